"""Losses over arrays. Sums are returned, never means: only the caller knows the global batch.

A mean over examples, devices or accumulation steps of *different* token counts weighs tokens unequally. So every loss
here returns the sum of the loss and the sum of the weights; sums add up over any layout, and one division at the end
gives the mean over all tokens.

Axis letters: B batch, T target, V vocabulary (see config.py).
"""

import math
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

SmoothingOver = Literal["all_classes", "wrong_classes", "wrong_classes_but_padding"]


class LossSums(NamedTuple):
    """A loss before its division: two scalars, which may be added over devices, batches and steps.

    Attributes:
        loss: `sum_i w_i l_i`, in nats.
        weight: `sum_i w_i`; without weights, the number of tokens.
    """

    loss: Float[Array, ""]
    weight: Float[Array, ""]

    @property
    def mean(self) -> Float[Array, ""]:
        """`loss / weight`; 0 where no token has a weight (PyTorch returns NaN there)."""
        return self.loss * reciprocal_or_zero(self.weight)


def reciprocal_or_zero(total: Float[Array, ""]) -> Float[Array, ""]:
    """`1 / total`, and 0 where `total` is 0, so that a batch of nothing but padding changes nothing."""
    return jnp.where(total == 0, 0.0, 1.0 / jnp.where(total == 0, 1.0, total))


def cross_entropy(
    logits: Float[Array, "*batch V"],
    labels: Int[Array, "*batch"],
    *,
    weights: Float[Array, "*batch"] | Bool[Array, "*batch"] | None = None,
    label_smoothing: float = 0.0,
    smoothing_over: SmoothingOver = "all_classes",
    ignore_index: int | None = None,
    z_loss: float = 0.0,
) -> LossSums:
    """Cross entropy of the softmax of `logits` against `labels`, summed over all positions.

    With e = `label_smoothing`, the target distribution of a position whose label is y is

        q_v = (1 - e) [v = y] + e / |C| [v in C]

    where C, the classes that share e, is

        all_classes                 all V, the label's own included
        wrong_classes               the V - 1 that are not the label
        wrong_classes_but_padding   the V - 2 that are neither the label nor `ignore_index`

    and the loss of the position is

        l = -sum_v q_v log softmax(z)_v = log sum_v exp(z_v) - (1 - e) z_y - (e / |C|) sum_{v in C} z_v

    Peers disagree about C. *All*: Szegedy et al. 2015, whom the paper cites; PyTorch's `CrossEntropyLoss`; fairseq until
    2021. *Wrong*: tensor2tensor, the paper's own code (`common_layers.smoothing_cross_entropy`); fairseq since its pull
    request 3182. *But padding*: the Annotated Transformer (`LabelSmoothing`) and OpenNMT-py (`LabelSmoothingLoss`). The
    gradients by z of any two differ by at most e / (V - 1): 3e-6 for V = 37,000 and e = 0.1, but 8e-3 for V = 13.

    tensor2tensor, the Annotated Transformer and OpenNMT-py report the divergence of softmax(z) from q, as `nn.KLDivLoss`
    does, in place of the cross entropy. It is less by the entropy of q, a constant, so that the gradients are the same:

        KL = sum_v q_v log(q_v / softmax(z)_v) = l - H(q),    H(q) = `smoothed_entropy(V, ...)`

    Arithmetic is in float32 at least, also for bfloat16 logits; float64 logits stay in float64.

    Args:
        logits: scores before the softmax, shape (..., V).
        labels: class ids in [0, V), shape (...). An id outside makes the loss NaN (JAX cannot raise from inside
            `jit`), unless its weight is 0 or it is `ignore_index`.
        weights: one number, or boolean, per position: 0 or False leaves a position out. None: every position counts.
        label_smoothing: e, in [0, 1].
        smoothing_over: which classes share e, see above.
        ignore_index: positions of this label do not count, whatever their weight. PyTorch's argument of this name, which
            is -100 unless said otherwise; None: no label is special. With "wrong_classes_but_padding" it is the class of
            padding, in [0, V).
        z_loss: adds z_loss (log sum_v exp(z_v))^2 to the loss of each position, at least 0. It keeps the normaliser of the
            softmax near 1, which low precision needs; PaLM takes 1e-4.

    Returns:
        `LossSums(loss, weight)`. `.mean` is what `torch.nn.functional.cross_entropy` returns for `reduction="mean"`.

    Raises:
        ValueError: shapes that do not fit each other, `label_smoothing` outside [0, 1], a negative `z_loss`, an unknown
            `smoothing_over`, or one that leaves no class to share e.

    Source: label smoothing as Szegedy et al. 2015 (arXiv:1512.00567, section 7); Vaswani et al. 2017 (section 5.4); the
    z-loss as Chowdhery et al. 2022 (PaLM, arXiv:2204.02311, section 5).
    """
    if logits.ndim == 0 or logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"labels must have the shape of logits without the last axis: logits {logits.shape}, labels {labels.shape}."
        )
    num_classes = logits.shape[-1]
    sharing = _sharing(num_classes, label_smoothing, smoothing_over)
    used = check_options(labels, num_classes, weights=weights, label_smoothing=label_smoothing, z_loss=z_loss)
    if smoothing_over == "wrong_classes_but_padding" and (ignore_index is None or not 0 <= ignore_index < num_classes):
        raise ValueError(
            'smoothing_over="wrong_classes_but_padding" needs the class of padding as ignore_index, '
            f"at least 0 and below {num_classes}, got {ignore_index}."
        )

    dtype = jnp.float32 if jnp.finfo(logits.dtype).bits < 32 else logits.dtype
    logits = logits.astype(dtype)
    used = used.astype(dtype)
    if ignore_index is not None:
        used = jnp.where(labels == ignore_index, 0.0, used)

    index = jnp.where(labels < 0, num_classes, labels)  # -1 would be read as the last class
    label_logits = jnp.take_along_axis(logits, index[..., None], axis=-1, mode="fill")[..., 0]
    if label_smoothing > 0.0:  # decided by a Python number: 0 * mean would turn a logit of -inf into NaN
        if smoothing_over == "all_classes":
            spread = logits.mean(axis=-1)
        else:
            classes = jax.lax.broadcasted_iota(jnp.int32, logits.shape, labels.ndim)
            wrong = classes != labels.astype(jnp.int32)[..., None]
            shares = wrong if smoothing_over == "wrong_classes" else wrong & (classes != ignore_index)
            spread = logits.sum(axis=-1, where=shares) / sharing
        label_logits = (1.0 - label_smoothing) * label_logits + label_smoothing * spread
    return sum_losses(jax.nn.logsumexp(logits, axis=-1), label_logits, used, z_loss=z_loss)


def check_options(
    labels: Int[Array, "*batch"], num_classes: int, *, weights: Array | None, label_smoothing: float, z_loss: float
) -> Array:
    """The weights of all positions, once the options that every cross entropy has are known to be in range.

    Raises:
        ValueError: as `cross_entropy`.
    """
    if weights is not None and weights.shape != labels.shape:
        raise ValueError(f"weights must have the shape of labels: weights {weights.shape}, labels {labels.shape}.")
    _sharing(num_classes, label_smoothing, "all_classes")
    if not 0.0 <= z_loss < math.inf:
        raise ValueError(f"z_loss must be a finite number, at least 0, got {z_loss}.")
    return jnp.ones(labels.shape, bool) if weights is None else weights


def sum_losses(
    normalisers: Float[Array, "*batch"],
    expected_logits: Float[Array, "*batch"],
    used: Float[Array, "*batch"],
    *,
    z_loss: float,
) -> LossSums:
    """Cross entropies, summed, of positions that are reduced to two numbers: log sum_v exp(z_v) and sum_v q_v z_v.

    Args:
        normalisers, expected_logits: these.
        used: the weight of each position.
        z_loss: see `cross_entropy`.
    """
    losses = normalisers - expected_logits
    if z_loss > 0.0:
        losses = losses + z_loss * jnp.square(normalisers)
    # A product would let the NaN of a position that does not count through: 0 * NaN is NaN.
    counted = jnp.where(used == 0, 0.0, losses * used)
    return LossSums(loss=counted.sum(), weight=used.sum())


def smoothed_entropy(
    num_classes: int, *, label_smoothing: float, smoothing_over: SmoothingOver = "all_classes"
) -> float:
    """The entropy of the target distribution of `cross_entropy`, in nats: the least that its loss can be.

        H(q) = -sum_v q_v log q_v

    Args:
        num_classes: V.
        label_smoothing: e, in [0, 1].
        smoothing_over: which classes share e, see `cross_entropy`.

    Raises:
        ValueError: as `cross_entropy`.
    """
    sharing = _sharing(num_classes, label_smoothing, smoothing_over)
    share = label_smoothing / sharing
    if smoothing_over == "all_classes":
        parts = [(1, 1.0 - label_smoothing + share), (sharing - 1, share)]
    else:
        parts = [(1, 1.0 - label_smoothing), (sharing, share)]
    return -sum(times * q * math.log(q) for times, q in parts if q > 0.0)


def _sharing(num_classes: int, label_smoothing: float, smoothing_over: SmoothingOver) -> int:
    """|C|, how many classes share the smoothing."""
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be between 0 and 1, got {label_smoothing}.")
    options = get_args(SmoothingOver)
    if smoothing_over not in options:
        raise ValueError(f"smoothing_over must be one of {', '.join(options)}, got {smoothing_over!r}.")
    left_out = options.index(smoothing_over)
    if num_classes <= left_out:
        raise ValueError(f"smoothing_over={smoothing_over!r} needs more than {left_out} classes, got {num_classes}.")
    return num_classes - left_out
