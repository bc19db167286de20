"""Scaled dot-product attention and its multi-head form (Vaswani et al. 2017, section 3.2)."""

import itertools
import math
import warnings
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from flax_transformer.cache import KeysAndValues
from flax_transformer.config import MaskFill, TransformerConfig
from flax_transformer.dropout import Dropout, DropoutSource
from flax_transformer.flash_attention import Pattern, flash_attention, obstacle
from flax_transformer.initialisation import initialiser
from flax_transformer.layers import Linear
from flax_transformer.masks import fill_value
from flax_transformer.numerics import Numerics

# Causal attention, a part of the queries at a time: a part does not look at the keys after it, whose weight is 0. With 4
# parts that is 5/8 of the work, and whole train steps of 256 tokens take 0.92 of the time (two cores, width 256).
_PARTS = 4
_WORTH_PARTING = 256


def attention_weights(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S N H"],
    *,
    mask: Bool[Array, "#B 1 #T #S"] | None,
    mask_fill: MaskFill,
    numerics: Numerics,
) -> Float[Array, "B N T S"]:
    """softmax over S of query . key / sqrt(H), masked scores replaced by ``masks.fill_value``; at least float32."""
    scores = numerics.einsum("BTNH,BSNH->BNTS", query, key, result=numerics.statistics) / math.sqrt(query.shape[-1])
    if mask is not None:
        scores = jnp.where(jnp.broadcast_to(mask, scores.shape), scores, fill_value(mask_fill, scores.dtype))
    return jax.nn.softmax(scores, axis=-1)


class MultiHeadAttention(nnx.Module):
    """MultiHead(q, k, v) = concat_n(softmax(q_n k_n^T / sqrt(H)) v_n) W_o, with q_n, k_n, v_n slices of projections D -> D.

    ``sharing="document"`` in an encoder-decoder makes the four projections one module, as that document's ``clones`` does.

    A query row whose mask is False everywhere attends to every key equally, or is NaN with ``minus_inf``.
    """

    def __init__(
        self, config: TransformerConfig, *, projections: Literal["separate", "shared"], rngs: nnx.Rngs
    ) -> None:
        init, numerics = initialiser(config), Numerics.of(config)

        def projection(init):
            return Linear(
                config.d_model, config.d_model, bias=config.projection_bias, init=init, numerics=numerics, rngs=rngs
            )

        self.query = projection(init)
        if projections == "shared":
            self.key = self.value = self.output = self.query
        else:
            self.key, self.value, self.output = projection(init), projection(init), projection(init.into_residual())
        self.dropout = Dropout(config.attention_dropout)
        self.num_heads = config.num_heads
        self.mask_fill: MaskFill = config.mask_fill
        self.numerics = numerics
        self.mix = MIXERS[config.attention]

    def __call__(
        self,
        query: Float[Array, "B T D"],
        key: Float[Array, "B S D"],
        value: Float[Array, "B S D"],
        mask: Bool[Array, "#B 1 #T #S"] | None,
        dropout: DropoutSource | None = None,
        *,
        pattern: Pattern = "any",
    ) -> Float[Array, "B T D"]:
        """``pattern`` says what ``mask`` is known to be, so that what it hides need not be computed; ``causal`` is exactly
        ``masks.causal_mask(T)``. It changes no number but for the order of sums."""
        q, k, v = self._split(self.query(query)), self._split(self.key(key)), self._split(self.value(value))
        return self._merge(self.mix(self, q, k, v, mask, dropout, pattern))

    def keys_and_values(self, memory: Float[Array, "B S D"]) -> KeysAndValues:
        """Of ``memory``, to be attended to by ``attend`` as often as wanted."""
        k, v = self._split(self.key(memory)), self._split(self.value(memory))
        return KeysAndValues(k.swapaxes(1, 2), v.swapaxes(1, 2))

    def attend(
        self, query: Float[Array, "B T D"], past: KeysAndValues, mask: Bool[Array, "#B 1 #T #S"] | None
    ) -> Float[Array, "B T D"]:
        """A call without dropout on keys and values that are there already.

        ``attend(query, keys_and_values(memory), mask)`` is ``self(query, memory, memory, mask)``.
        """
        k, v = past.keys.swapaxes(1, 2), past.values.swapaxes(1, 2)
        return self._merge(_by_products(self, self._split(self.query(query)), k, v, mask, None))

    def _merge(self, mixed: Float[Array, "B T N H"]) -> Float[Array, "B T D"]:
        return self.output(mixed.reshape(*mixed.shape[:2], -1))

    def _split(self, x: Float[Array, "B T D"]) -> Float[Array, "B T N H"]:
        return x.reshape(*x.shape[:-1], self.num_heads, -1)


def _by_products(
    layer: MultiHeadAttention,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S N H"],
    value: Float[Array, "B S N H"],
    mask: Bool[Array, "#B 1 #T #S"] | None,
    dropout: DropoutSource | None,
    pattern: Pattern = "any",
) -> Float[Array, "B T N H"]:
    def mix(query: Array, key: Array, value: Array, mask: Array | None) -> Float[Array, "B T N H"]:
        weights = attention_weights(query, key, mask=mask, mask_fill=layer.mask_fill, numerics=layer.numerics)
        weights = layer.dropout(weights, dropout)
        return layer.numerics.einsum("BNTS,BSNH->BTNH", weights, value, result=layer.numerics.compute)

    length = query.shape[1]
    drops = dropout is not None and layer.dropout.rate > 0  # whose masks are drawn for all queries at once
    if pattern != "causal" or mask is None or length < _WORTH_PARTING or drops:
        return mix(query, key, value, mask)
    ends = [length * part // _PARTS for part in range(_PARTS + 1)]
    mixed = [
        mix(query[:, start:end], key[:, :end], value[:, :end], mask[:, :, start:end, :end])
        for start, end in itertools.pairwise(ends)
    ]
    return jnp.concatenate(mixed, axis=1)


def _by_kernel(
    layer: MultiHeadAttention,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S N H"],
    value: Float[Array, "B S N H"],
    mask: Bool[Array, "#B 1 #T #S"] | None,
    dropout: DropoutSource | None,
    pattern: Pattern = "any",
) -> Float[Array, "B T N H"]:
    if mask is None or mask.shape[2] == 1:
        pattern = "keys"
    drops = dropout is not None and layer.dropout.rate > 0
    reason = obstacle(query, key, pattern=pattern, drops=drops, precision=layer.numerics.precision)
    if reason is None and pattern == "keys" and layer.mask_fill == "minus_inf" and mask is not None:
        reason = "with mask_fill minus_inf a query that may attend to nothing is NaN, which no kernel gives"
    if reason is not None:
        warnings.warn(f"attention='flash' falls back to plain products: {reason}.", stacklevel=2)
        return _by_products(layer, query, key, value, mask, dropout, pattern)
    return flash_attention(query, key, value, mask=mask, pattern=pattern)


MIXERS = {"einsum": _by_products, "flash": _by_kernel}
