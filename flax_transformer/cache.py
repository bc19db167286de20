"""The key/value cache: what a decoder keeps of the tokens that it has read, so that a step reads only the new ones.

A cache is a plain pytree, and a step a pure function: it takes one cache and returns another. Under `jit`, in a loop that
carries it, XLA writes the new one in the memory of the old.
"""

import dataclasses
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from flax_transformer.config import TransformerConfig
from flax_transformer.inputs import require_token_ids
from flax_transformer.numerics import Numerics


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeysAndValues:
    """The keys and values of one attention.

    The head axis comes before the sequence, not after it as everywhere else: one query per text makes attention a
    matrix-vector product for each text and head, and this way its matrix lies in one piece. The other way round, XLA:CPU
    transposes the whole cache at every step: attention to 128 positions of 32 texts cost 18 times as much.
    """

    keys: Float[Array, "B N S H"]
    values: Float[Array, "B N S H"]

    @classmethod
    def empty(cls, config: TransformerConfig, *, batch_size: int, length: int) -> Self:
        """Zeros, to be written over."""
        shape = (batch_size, config.num_heads, length, config.head_size)
        return cls(*jnp.zeros((2, *shape), Numerics.of(config).compute))

    def write(self, new: Self, position: Int[Array, ""]) -> Self:
        """With ``new`` (B N T H) at ``position`` and after it."""
        return jax.tree.map(
            lambda old, rows: jax.lax.dynamic_update_slice_in_dim(old, rows, position, axis=2), self, new
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Of one model and one batch of texts that are being written.

    Attributes:
        position: how many tokens have been read; all texts of the batch are equally long.
        texts: of self-attention, one for every *use* of a layer, shared layers included; what lies behind ``position`` is
            masked.
        memory: of the attention to the encoder's memory, computed once, one for every use of a layer; none in a
            decoder-only model.
        source_mask: what of that memory may be attended to.
    """

    position: Int[Array, ""]
    texts: tuple[KeysAndValues, ...]
    memory: tuple[KeysAndValues, ...] = ()
    source_mask: Bool[Array, "#B 1 #length #S"] | None = None

    @property
    def length(self) -> int:
        """How many tokens there is room for."""
        return self.texts[0].keys.shape[2]

    def causal_mask(self, num_tokens: int) -> Bool[Array, "1 1 T length"]:
        """The next ``num_tokens`` tokens may attend to what was read before, to each before them and to themselves."""
        places = jnp.arange(self.length, dtype=jnp.int32)
        own = self.position + jnp.arange(num_tokens, dtype=jnp.int32)
        return (places[None, :] <= own[:, None])[None, None]

    def source_rows(self, num_tokens: int) -> Bool[Array, "#B 1 #T #S"] | None:
        """The rows of ``source_mask`` that belong to the next ``num_tokens`` tokens."""
        if self.source_mask is None or self.source_mask.shape[2] == 1:
            return self.source_mask
        return jax.lax.dynamic_slice_in_dim(self.source_mask, self.position, num_tokens, axis=2)


class Step(NamedTuple):
    """What a model says after a step: the logits of the token after the last, and the cache for the next step."""

    logits: Float[Array, "B V"]
    cache: Cache


def empty_texts(config: TransformerConfig, *, batch_size: int, length: int) -> tuple[KeysAndValues, ...]:
    """A cache of self-attention for every use of a layer.

    Raises:
        ValueError: ``length`` not in [1, max_length].
    """
    if not 1 <= length <= config.max_length:
        raise ValueError(
            f"length must be between 1 and the model's max_length={config.max_length}, got {length}; "
            "a position beyond the position table has no row there."
        )
    return tuple(KeysAndValues.empty(config, batch_size=batch_size, length=length) for _ in range(config.num_layers))


def require_room(ids: Array, cache: Cache) -> Int[Array, "B T"]:
    """``ids`` as a JAX array.

    Raises:
        ValueError: not token ids of two axes, another batch than the cache's, or more than it has room for. Under ``jit``
            the position is not known: there a caller must count, and tokens too many would be written over the last ones.
    """
    ids = require_token_ids(ids, cache.length, name="ids")
    batch_size = cache.texts[0].keys.shape[0]
    if ids.shape[0] != batch_size:
        raise ValueError(f"ids must continue the cache's {batch_size} texts, got {ids.shape[0]}; start another cache")
    if not isinstance(cache.position, Tracer) and cache.position + ids.shape[1] > cache.length:
        raise ValueError(
            f"the cache has room for {cache.length} tokens and holds {cache.position}, got {ids.shape[1]} more; "
            "start it with a larger length"
        )
    return ids
