"""Cross entropy without the logits: the output projection and its loss together, a part of the vocabulary at a time.

N positions and V classes make N x V logits, and as much again for their gradient: 1.6 GB for 1,024 positions and 199,854
classes. Here a loop goes over chunks of the vocabulary. The forward pass keeps the running maximum and sum of each
position, the backward pass computes each chunk's logits again, so that no more than a chunk is ever held.

Axis letters: N positions (those of all examples), D width, V vocabulary; S shards of the vocabulary, R rows of a shard,
C rows of a chunk.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from flax_transformer.losses import LossSums, check_options, sum_losses
from flax_transformer.numerics import Numerics

WORTH_FUSING, WORTH_FUSING_FLOAT32 = 2**22, 3 * 2**22  # logits; see `default_kind`
_LOGITS_AT_ONCE = 2**21  # in float32 8 MiB: what the caches of a CPU hold, and enough work for an accelerator
_SMALLEST_CHUNK = 512


def fused_cross_entropy(
    features: Float[Array, "*batch D"],
    kernel: Float[Array, "V D"],
    *,
    bias: Float[Array, "V"] | None = None,
    labels: Int[Array, "*batch"],
    weights: Float[Array, "*batch"] | Bool[Array, "*batch"] | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    numerics: Numerics | None = None,
    chunk: int | None = None,
    shards: int = 1,
) -> LossSums:
    """`losses.cross_entropy(features @ kernel.T + bias, labels, ...)`, without ever holding all the logits.

    With z the logits of a position, y its label and e = `label_smoothing`, the loss of the position is

        l = L - (1 - e) z_y - (e / V) sum_v z_v + z_loss L^2,    L = log sum_v exp(z_v)

    and its gradient by z_v, which is computed a chunk at a time and never kept,

        (1 + 2 z_loss L) exp(z_v - L) - (1 - e) [v = y] - e / V

    Loss and gradients are those of the plain loss up to rounding: at most 1e-12 of their scale in float64 and 5e-6 in
    float32. The logits are at least float32, also where `numerics.compute` is bfloat16, whose plain logits are rounded.
    It takes one product more than the plain loss: the logits are computed twice.

    Args:
        features: what the output projection is given, shape (..., D).
        kernel: of the projection, shape (V, D), which may be an embedding table.
        bias: of the projection.
        labels: class ids in [0, V), shape (...). An id outside makes the loss NaN, unless its weight is 0.
        weights: one number, or boolean, per position: 0 or False leaves a position out. None: every position counts.
        label_smoothing: e, in [0, 1], shared by all classes.
        z_loss: see `losses.cross_entropy`.
        numerics: how products are computed. None: in the type of `features`, as precisely as that allows.
        chunk: C, how many rows of each shard a step of the loop takes. None: so many that a step has some two million
            logits.
        shards: into how many equal parts, one after another, devices share the rows of `kernel` (the size of the mesh
            axis that they are sharded over). Each step then takes rows of every shard, and each device multiplies its
            own: no row is sent to another device. A number that does not divide V costs a padded copy of `kernel`.

    Returns:
        `LossSums(loss, weight)`, as `losses.cross_entropy`.

    Raises:
        ValueError: shapes that do not fit each other, or `label_smoothing`, `z_loss`, `chunk` or `shards` out of range.

    Source: the chunks are those of Wijmans et al. 2024 (arXiv:2411.09009), the running sum Milakov and Gimelshein 2018
    (arXiv:1805.02867), the z-loss Chowdhery et al. 2022 (PaLM, arXiv:2204.02311, section 5).
    """
    if features.ndim == 0 or kernel.ndim != 2 or features.shape[-1] != kernel.shape[1]:
        raise ValueError(
            f"kernel must be (V, D) and features (..., D): kernel {kernel.shape}, features {features.shape}."
        )
    num_classes = kernel.shape[0]
    if bias is not None and bias.shape != (num_classes,):
        raise ValueError(f"bias must have a number for each row of kernel, ({num_classes},), got {bias.shape}.")
    if features.shape[:-1] != labels.shape:
        raise ValueError(
            f"labels must have the shape of features without the last axis: features {features.shape}, labels "
            f"{labels.shape}."
        )
    used = check_options(labels, num_classes, weights=weights, label_smoothing=label_smoothing, z_loss=z_loss)
    if shards < 1 or (chunk is not None and chunk < 1):
        raise ValueError(f"shards and chunk must be at least 1, got shards={shards} and chunk={chunk}.")
    if numerics is None:
        numerics = Numerics(param=kernel.dtype, compute=features.dtype, precision=jax.lax.Precision.HIGHEST)

    rows = -(-num_classes // shards)
    if chunk is None:
        chunk = max(_LOGITS_AT_ONCE // max(labels.size, 1), _SMALLEST_CHUNK)
    plan = _Plan(
        numerics=numerics,
        num_classes=num_classes,
        shards=shards,
        rows=rows,
        chunk=min(chunk, rows),
        own_share=1.0 - label_smoothing,
        every_share=label_smoothing / num_classes,
    )
    labels = jnp.where(labels < 0, num_classes, labels.astype(jnp.int32))  # -1 would be read as the last class
    reduced: Any = _reduce(plan, features.reshape(-1, features.shape[-1]), kernel, bias, labels.reshape(-1))
    normalisers, expected = reduced
    return sum_losses(normalisers, expected, used.reshape(-1).astype(normalisers.dtype), z_loss=z_loss)


def default_kind(positions: int, num_classes: int, *, precision: str) -> Literal["plain", "fused"]:
    """Which loss is the better choice: "fused" from `WORTH_FUSING` logits on, or `WORTH_FUSING_FLOAT32`.

    Measured as the time of a train step with the plain loss over that with the fused one, on two cores with AMX:

        N      V        N V / 2^22    width 64: float32, mixed    width 256: float32, mixed
        1024   4,000    0.98          0.90, 1.06                  0.79, 0.93
        1024   8,000    1.95          1.03, 1.44                  0.86, 1.33
        1024   32,000   7.8           1.35, 2.19                  0.85, 1.37
        64     199,854  3.05          1.11, 1.39

    and on deeper models 0.91, 1.00 (encoder-decoder, width 512, 2^23 logits) and 1.00, 1.05 (GPT, width 256, 2^24). Logits
    are computed twice, which costs where products are slow; beyond 12 million of them the memory saved decides, 50 MB
    several times.

    Args:
        positions: N, of a batch.
        num_classes: V.
        precision: of products, as `TransformerConfig.precision`.
    """
    least = WORTH_FUSING_FLOAT32 if precision in ("high", "highest") else WORTH_FUSING
    return "fused" if positions * num_classes >= least else "plain"


@dataclasses.dataclass(frozen=True)
class _Plan:
    """All that is no array. The target distribution is `own_share` for the label and `every_share` for every class."""

    numerics: Numerics
    num_classes: int
    shards: int
    rows: int
    chunk: int
    own_share: float
    every_share: float

    @property
    def steps(self) -> int:
        return -(-self.rows // self.chunk)

    def split(self, whole: Float[Array, "V *rest"]) -> Float[Array, "S R *rest"]:
        """The shards of what has a row for each class."""
        padding = [(0, self.shards * self.rows - self.num_classes)] + [(0, 0)] * (whole.ndim - 1)
        return jnp.pad(whole, padding).reshape(self.shards, self.rows, *whole.shape[1:])

    def join(self, parts: Float[Array, "S R *rest"]) -> Float[Array, "V *rest"]:
        return parts.reshape(-1, *parts.shape[2:])[: self.num_classes]

    def over_shards(self, function: Callable[..., Any], kernel: Array, bias: Array | None) -> Any:
        """What `function(kernel, bias, first class)` gives for each shard, stacked."""
        if self.shards == 1:
            return jax.tree.map(lambda leaf: leaf[None], function(kernel, bias, jnp.int32(0)))
        first = self.rows * jnp.arange(self.shards, dtype=jnp.int32)
        return jax.vmap(function)(self.split(kernel), None if bias is None else self.split(bias), first)


class _Chunk(NamedTuple):
    """A chunk of a shard. The last begins early enough to be as long as the others; what it repeats is not live.

    Attributes:
        first: the place of its first row in the shard.
        ids: the classes that its rows stand for; -1 where not live.
        rows: of the kernel.
        logits: minus infinity where not live.
    """

    first: Int[Array, ""]
    ids: Int[Array, "C"]
    rows: Float[Array, "C D"]
    logits: Float[Array, "C N"]


def _chunk(plan: _Plan, index: Array, features: Array, kernel: Array, bias: Array | None, first_class: Array) -> _Chunk:
    dtype = plan.numerics.statistics
    first = jnp.minimum(index * plan.chunk, plan.rows - plan.chunk)
    place = first + jnp.arange(plan.chunk, dtype=jnp.int32)
    ids = first_class + place
    live = (place >= index * plan.chunk) & (ids < plan.num_classes)
    added = jnp.zeros((), dtype) if bias is None else _rows(plan, bias, first).astype(dtype)
    rows = _rows(plan, kernel, first)
    # Classes by positions, not the other way round: so every product but a small one reads both factors as they lie.
    logits = plan.numerics.einsum("CD,ND->CN", rows, features, result=dtype)
    return _Chunk(first, jnp.where(live, ids, -1), rows, logits + jnp.where(live, added, -jnp.inf)[:, None])


def _rows(plan: _Plan, whole: Array, first: Array) -> Array:
    return jax.lax.dynamic_slice_in_dim(whole, first, plan.chunk)


def _add_rows(plan: _Plan, whole: Array, part: Array, first: Array) -> Array:
    """`whole` with `part` added to the rows that begin at `first`: those that a chunk repeats get zeros."""
    return jax.lax.dynamic_update_slice_in_dim(whole, _rows(plan, whole, first) + part, first, axis=0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _reduce(
    plan: _Plan,
    features: Float[Array, "N D"],
    kernel: Float[Array, "V D"],
    bias: Float[Array, "V"] | None,
    labels: Int[Array, "N"],
) -> tuple[Float[Array, "N"], Float[Array, "N"]]:
    """log sum_v exp(z_v) of each position, and its sum_v q_v z_v for the target distribution q.

    A label outside the vocabulary is at least V here.
    """
    dtype = plan.numerics.statistics

    # Every shard has its own maxima and sums, so that the devices which hold the shards exchange nothing before the end.
    def sums(kernel: Array, bias: Array | None, first_class: Array) -> tuple[Array, Array]:
        def step(carry: tuple[Array, Array], index: Array) -> tuple[tuple[Array, Array], None]:
            largest, total = carry
            logits = _chunk(plan, index, features, kernel, bias, first_class).logits
            new_largest = jnp.maximum(largest, logits.max(axis=0))
            shift = _finite(new_largest)
            part = jnp.exp(logits - shift[None]).sum(axis=0)
            return (new_largest, total * jnp.exp(largest - shift) + part), None

        start = (jnp.full(labels.shape, -jnp.inf, dtype), jnp.zeros(labels.shape, dtype))
        return jax.lax.scan(step, start, jnp.arange(plan.steps, dtype=jnp.int32))[0]

    largest, total = plan.over_shards(sums, kernel, bias)
    shift = _finite(largest.max(axis=0))
    total = (total * jnp.exp(largest - shift[None])).sum(axis=0)
    return shift + jnp.log(total), _expected_logits(plan, features, kernel, bias, labels)


def _finite(largest: Array) -> Array:
    # Infinity less infinity is NaN, where no class of a chunk is possible.
    return jnp.where(jnp.isfinite(largest), largest, 0.0)


def _expected_logits(plan: _Plan, features: Array, kernel: Array, bias: Array | None, labels: Array) -> Array:
    numerics, dtype = plan.numerics, plan.numerics.statistics
    own = jnp.take(kernel, labels, axis=0, mode="fill", fill_value=jnp.nan)
    expected = (numerics.rounded(own) * numerics.rounded(features)).sum(axis=-1)
    if bias is not None:
        expected = expected + jnp.take(bias, labels, mode="fill", fill_value=jnp.nan).astype(dtype)
    if plan.every_share:
        total = numerics.rounded(kernel).sum(axis=0)
        every = jnp.einsum("ND,D->N", numerics.rounded(features), total, precision=jax.lax.Precision.HIGHEST)
        if bias is not None:
            every = every + bias.astype(dtype).sum()
        expected = plan.own_share * expected + plan.every_share * every
    return expected


def _forward(plan: _Plan, features: Array, kernel: Array, bias: Array | None, labels: Array):
    reduced: Any = _reduce(plan, features, kernel, bias, labels)
    return reduced, (features, kernel, bias, labels, reduced[0])


def _backward(plan: _Plan, kept, gradients: tuple[Array, Array]):
    features, kernel, bias, labels, normalisers = kept
    by_normaliser, by_expected = gradients
    numerics, dtype = plan.numerics, plan.numerics.statistics

    def shard(kernel: Array, bias: Array | None, first_class: Array):
        def step(carry, index: Array):
            by_features, by_kernel, by_bias = carry
            part = _chunk(plan, index, features, kernel, bias, first_class)
            expected = jnp.where(part.ids[:, None] == labels[None], plan.own_share, 0.0).astype(dtype)
            if plan.every_share:
                expected = expected + jnp.where(part.ids < 0, 0.0, plan.every_share)[:, None].astype(dtype)
            by_logits = by_normaliser[None] * jnp.exp(part.logits - normalisers[None]) + by_expected[None] * expected
            by_features = by_features + numerics.einsum("CD,CN->DN", part.rows, by_logits, result=dtype)
            by_rows = numerics.einsum("CN,ND->CD", by_logits, features, result=dtype)
            by_kernel = _add_rows(plan, by_kernel, by_rows, part.first)
            by_bias = None if by_bias is None else _add_rows(plan, by_bias, by_logits.sum(axis=-1), part.first)
            return (by_features, by_kernel, by_bias), None

        start = (
            jnp.zeros(features.T.shape, dtype),
            jnp.zeros(kernel.shape, dtype),
            None if bias is None else jnp.zeros(bias.shape, dtype),
        )
        return jax.lax.scan(step, start, jnp.arange(plan.steps, dtype=jnp.int32))[0]

    by_features, by_kernel, by_bias = plan.over_shards(shard, kernel, bias)
    return (
        by_features.sum(axis=0).T.astype(features.dtype),
        plan.join(by_kernel).astype(kernel.dtype),
        None if bias is None else plan.join(by_bias).astype(bias.dtype),
        None,
    )


_reduce.defvjp(_forward, _backward)
