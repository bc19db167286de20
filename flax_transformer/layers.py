"""The layers that both models are made of: linear maps, norms, embeddings, positions, feed-forward, residuals.

Parameters have Flax's names: ``kernel`` (in, out), ``bias``, ``scale``, ``embedding``. Where an option decides between two
formulas, the constructor picks the function once, and the call has no branch.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jaxtyping import Array, Float, Int, Integer

from flax_transformer.config import Bias, TransformerConfig
from flax_transformer.dropout import Dropout, DropoutSource
from flax_transformer.initialisation import Initialiser, initialiser
from flax_transformer.numerics import Numerics

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": jax.nn.relu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "silu": jax.nn.silu,
}


class Buffer(nnx.Variable):
    """State that is no parameter: it is saved and loaded, and never trained."""


class Linear(nnx.Module):
    """y = x W + b, with ``kernel`` W of shape (in, out): the transpose of ``torch.nn.Linear.weight``."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: Bias, init: Initialiser, numerics: Numerics, rngs: nnx.Rngs
    ) -> None:
        self.kernel = nnx.Param(init.weight(rngs.params(), in_features, out_features))
        self.bias = nnx.Param(init.bias(rngs.params(), in_features, out_features)) if bias == "with" else None
        self.numerics = numerics

    def __call__(self, x: Float[Array, "*B in"]) -> Float[Array, "*B out"]:
        y = self.numerics.einsum("...i,io->...o", x, self.kernel[...], result=self.numerics.compute)
        return _add_bias(y, self.bias)


class OutputProjection(nnx.Module):
    """logits = x W^T + b, with ``kernel`` W of shape (V, D): the layout of an embedding table, which it may be.

    Args:
        tied_to: the embedding table to use instead of a ``kernel`` of its own.
    """

    def __init__(
        self, config: TransformerConfig, vocab_size: int, *, tied_to: nnx.Param | None, rngs: nnx.Rngs
    ) -> None:
        init = initialiser(config)
        if tied_to is None:
            tied_to = nnx.Param(init.weight(rngs.params(), config.d_model, vocab_size).T)
        self.kernel = tied_to
        with_bias = config.output_bias == "with"
        self.bias = nnx.Param(init.bias(rngs.params(), config.d_model, vocab_size)) if with_bias else None
        self.numerics = Numerics.of(config)

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        y = self.numerics.einsum("...d,vd->...v", x, self.kernel[...], result=self.numerics.compute)
        return _add_bias(y, self.bias)


def _add_bias(y: Array, bias: nnx.Param | None) -> Array:
    return y if bias is None else y + jnp.broadcast_to(bias[...].astype(y.dtype), y.shape)


def _inside_sqrt(variance: Float[Array, "*B 1"], eps: float) -> Float[Array, "*B 1"]:
    return jnp.sqrt(variance + eps)


def _outside_sqrt(variance: Float[Array, "*B 1"], eps: float) -> Float[Array, "*B 1"]:
    # PyTorch defines the gradient of std as 0 on a constant row; sqrt alone would give NaN there.
    is_constant = variance == 0
    root = jnp.sqrt(jnp.where(is_constant, 1.0, variance))
    return jnp.where(is_constant, 0.0, root) + eps


Denominator = Callable[[Float[Array, "*B 1"]], Float[Array, "*B 1"]]
NORM_DENOMINATORS = {"inside_sqrt": _inside_sqrt, "outside_sqrt": _outside_sqrt}


class LayerNorm(nnx.Module):
    """y = scale * (x - mean) / denominator + bias over the last axis, D.

    The denominator is sqrt(var + eps) with ``norm_eps_placement="inside_sqrt"``, sqrt(var) + eps with ``outside_sqrt``;
    var divides the squared deviations by D with ``norm_variance="biased"``, by D - 1 with ``unbiased``. The first of
    each is Ba et al. 2016 and ``torch.nn.LayerNorm``, the second the ``LayerNorm`` of the encoder-decoder document.
    Statistics are at least float32.
    """

    def __init__(self, config: TransformerConfig) -> None:
        numerics = Numerics.of(config)
        self.scale = nnx.Param(jnp.ones(config.d_model, numerics.param))
        self.bias = nnx.Param(jnp.zeros(config.d_model, numerics.param))
        self.eps = config.norm_eps
        self.degrees_of_freedom = config.d_model - (1 if config.norm_variance == "unbiased" else 0)
        self.denominator = NORM_DENOMINATORS[config.norm_eps_placement]
        self.numerics = numerics

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        x = x.astype(self.numerics.statistics)
        scale, bias = (jnp.broadcast_to(p[...].astype(x.dtype), x.shape) for p in (self.scale, self.bias))
        denominator = functools.partial(self.denominator, eps=self.eps)
        normalised: Any = _normalise(denominator, self.degrees_of_freedom, x, scale, bias)
        return normalised.astype(self.numerics.compute)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _normalise(denominator: Denominator, degrees_of_freedom: int, x: Array, scale: Array, bias: Array) -> Array:
    deviation, variance = _moments(x, degrees_of_freedom)
    return scale * deviation / denominator(variance) + bias


@_normalise.defjvp
def _normalise_jvp(
    denominator: Denominator, degrees_of_freedom: int, primals: tuple[Array, ...], tangents: tuple[Array, ...]
) -> tuple[Array, Array]:
    """The derivative that the chain rule gives, with fewer arrays of the size of x: 2/3 of the time, there and back."""
    x, scale, bias = primals
    by_x, by_scale, by_bias = tangents
    deviation, variance = _moments(x, degrees_of_freedom)
    divisor = denominator(variance)
    unit, change = deviation / divisor, by_x / divisor
    by_variance = 2 * (unit * change).sum(-1, keepdims=True) / degrees_of_freedom  # over divisor^2
    _, by_divisor = jax.jvp(denominator, (variance,), (by_variance,))
    # Not `unit * (divisor * by_divisor)`: where the variance overflows that is 0 times infinity.
    by_unit = change - change.mean(-1, keepdims=True) - deviation * by_divisor
    return scale * deviation / divisor + bias, scale * by_unit + by_scale * unit + by_bias


def _moments(x: Array, degrees_of_freedom: int) -> tuple[Array, Array]:
    deviation = x - x.mean(-1, keepdims=True)
    return deviation, jnp.square(deviation).sum(-1, keepdims=True) / degrees_of_freedom


class Identity(nnx.Module):
    """y = x: where a stack has no final norm."""

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        return x


class Embedding(nnx.Module):
    """y = embedding[ids], times sqrt(D) with ``embedding_scale="sqrt_d_model"``.

    Ids must be in [0, V): an id outside raises with ``check_ids="on"``, and reads the nearest row otherwise.
    """

    def __init__(self, config: TransformerConfig, vocab_size: int, *, rngs: nnx.Rngs) -> None:
        init = initialiser(config)
        self.embedding = nnx.Param(init.embedding(rngs.params(), vocab_size, config.d_model))
        self.scale = math.sqrt(config.d_model) if config.embedding_scale == "sqrt_d_model" else 1.0
        self.check = require_ids if config.check_ids == "on" else _unchecked
        self.numerics = Numerics.of(config)

    def __call__(self, ids: Integer[Array, "B T"]) -> Float[Array, "B T D"]:
        self.check(ids, self.embedding.shape[0])
        return jnp.take(self.embedding[...], ids, axis=0, mode="clip").astype(self.numerics.compute) * self.scale


def require_ids(ids: Integer[Array, "B T"], vocab_size: int) -> None:
    """Raise unless every id is in [0, ``vocab_size``).

    Raises:
        ValueError: at once outside ``jit``; inside, the computation fails with a ``jax.errors.JaxRuntimeError`` that
            carries the message, when its result is waited for.
    """
    lowest, highest = ids.min(), ids.max()
    if isinstance(ids, Tracer):
        jax.debug.callback(functools.partial(_require_range, vocab_size=vocab_size), lowest, highest)
    else:
        _require_range(lowest, highest, vocab_size)


def _require_range(lowest: Array, highest: Array, vocab_size: int) -> None:
    # As Python numbers: compared with an array of int8, a vocabulary of 300 would wrap to 44.
    if int(lowest) < 0 or int(highest) >= vocab_size:
        raise ValueError(
            f"ids must be in [0, {vocab_size}), the vocabulary, got ids from {lowest} to {highest}; "
            "was the text encoded with another tokenizer?"
        )


def _unchecked(ids: Integer[Array, "B T"], vocab_size: int) -> None:
    del ids, vocab_size


def sinusoidal_table(
    length: int, d_model: int, *, formula: str, dtype: type = np.float32
) -> Float[np.ndarray, "length D"]:
    """Sinusoidal positions: table[p, 2i] = sin(p * f_i), table[p, 2i + 1] = cos(p * f_i), f_i = 10000^(-2i / D).

    Source: Vaswani et al. 2017, section 3.5. ``formula`` is the arithmetic of f_i: ``exp`` computes
    exp(2i * -(ln 10000 / D)) and multiplies (encoder-decoder document), ``pow`` computes 10000^(2i / D) and divides
    (decoder-only document). In float32 they differ in the last bits.

    Each operation is rounded to ``dtype`` as the document's is. PyTorch's own exp, sin and cos are not always correctly
    rounded and ours are, so a float32 table may differ from PyTorch's by p * ulp(f_i) + 1 ulp; where equality matters
    the table is loaded (``weights``).
    """
    double = np.float64
    index = np.arange(0, d_model, 2).astype(dtype)
    position = np.arange(length).astype(dtype)[:, None]
    if formula == "exp":
        exponent = index * dtype(-(math.log(10000.0) / d_model))
        angle = position * np.exp(exponent.astype(double)).astype(dtype)[None, :]
    elif formula == "pow":
        angle = position / np.power(10000.0, (index / dtype(d_model)).astype(double)).astype(dtype)[None, :]
    else:
        raise ValueError(f"a sinusoidal table's formula must be 'exp' or 'pow', got {formula!r}")
    pairs = np.stack([np.sin(angle.astype(double)), np.cos(angle.astype(double))], axis=-1)
    return pairs.reshape(length, d_model).astype(dtype)


class Positions(nnx.Module):
    """y = dropout(x + table[offset : offset + T]).

    ``table`` is a ``Buffer`` of (max_length, D) for the sinusoidal formulas, kept in float32 (float64 models keep the
    float32 values, as PyTorch's ``.double()`` does), and an ``nnx.Param`` for ``learned``.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        self.numerics = Numerics.of(config)
        shape = (config.max_length, config.d_model)
        if config.position_table == "learned":
            self.table: nnx.Variable = nnx.Param(initialiser(config).embedding(rngs.params(), *shape))
        else:
            self.table = Buffer(
                jnp.asarray(sinusoidal_table(*shape, formula=config.position_table), self.numerics.statistics)
            )
        self.dropout = Dropout(config.dropout)

    def __call__(
        self, x: Float[Array, "B T D"], dropout: DropoutSource | None = None, *, offset: int | Int[Array, ""] = 0
    ) -> Float[Array, "B T D"]:
        rows = jax.lax.dynamic_slice_in_dim(self.table[...], offset, x.shape[1]).astype(self.numerics.compute)
        return self.dropout(x + jnp.broadcast_to(rows[None], x.shape), dropout)


class FeedForward(nnx.Module):
    """y = W2 dropout(activation(W1 x + b1)) + b2, D -> F -> D (Vaswani et al. 2017, section 3.3)."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        init, numerics = initialiser(config), Numerics.of(config)
        self.up = Linear(config.d_model, config.d_ff, bias="with", init=init, numerics=numerics, rngs=rngs)
        self.down = Linear(
            config.d_ff, config.d_model, bias="with", init=init.into_residual(), numerics=numerics, rngs=rngs
        )
        self.activation = ACTIVATIONS[config.activation]
        self.dropout = Dropout(config.activation_dropout)

    def __call__(self, x: Float[Array, "B T D"], dropout: DropoutSource | None = None) -> Float[Array, "B T D"]:
        return self.down(self.dropout(self.activation(self.up(x)), dropout))


Sublayer = Callable[[Array], Array]


def _pre_norm(x: Array, sublayer: Sublayer, norm: Sublayer, drop: Sublayer) -> Array:
    return x + drop(sublayer(norm(x)))


def _post_norm(x: Array, sublayer: Sublayer, norm: Sublayer, drop: Sublayer) -> Array:
    return norm(x + drop(sublayer(x)))


def _norm_before_and_after(x: Array, sublayer: Sublayer, norm: Sublayer, drop: Sublayer) -> Array:
    return norm(x + drop(sublayer(norm(x))))


RESIDUALS = {"pre": _pre_norm, "post": _post_norm, "both": _norm_before_and_after}


class Residual(nnx.Module):
    """A residual connection with its norm and dropout, around any sublayer f of D -> D.

    ``pre``: x + f(norm(x)) (Xiong et al. 2020); ``post``: norm(x + f(x)) (the paper); ``both``: norm(x + f(norm(x))) with
    one norm (``SublayerConnection`` of the encoder-decoder document). Dropout is on f's output.
    """

    def __init__(self, config: TransformerConfig) -> None:
        self.norm = LayerNorm(config)
        self.dropout = Dropout(config.dropout)
        self.connect = RESIDUALS[config.norm_position]

    def __call__(
        self, x: Float[Array, "B T D"], sublayer: Sublayer, dropout: DropoutSource | None = None
    ) -> Float[Array, "B T D"]:
        return self.connect(x, sublayer, self.norm, lambda y: self.dropout(y, dropout))


def final_norm(config: TransformerConfig) -> LayerNorm | Identity:
    """The norm at the end of a stack, or none."""
    return LayerNorm(config) if config.final_norm == "stack_end" else Identity()
