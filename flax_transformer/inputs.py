"""What both models require of their inputs, checked once at the entrance, by shapes and dtypes only (free under jit)."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from flax_transformer.config import TransformerConfig


def require_config(config: TransformerConfig, kind: type[TransformerConfig], *, model: str) -> None:
    if not isinstance(config, kind):
        raise ValueError(f"{model} is built from a {kind.__name__}, got {type(config).__name__}")


def require_token_ids(ids: Array, max_length: int, *, name: str) -> Int[Array, "B T"]:
    """``ids`` as a JAX array.

    Raises:
        ValueError: not integers, not two axes (B, T), nothing in it, or T > ``max_length``.
    """
    if not isinstance(ids, Array):
        ids = np.asarray(ids)  # JAX would refuse text before the check below can say what to do
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(
            f"{name} must be integer token ids, got dtype {ids.dtype}; encode text with tokenizer.py first"
        )
    if ids.ndim != 2 or 0 in ids.shape:
        raise ValueError(
            f"{name} must have shape (B, T), neither of them 0, got {ids.shape}; one sequence is ids[None, :]"
        )
    if ids.shape[1] > max_length:
        raise ValueError(
            f"{name} has length {ids.shape[1]}, beyond the position table's max_length={max_length}; "
            "shorten it, or build the model with a larger max_length"
        )
    return jnp.asarray(ids)
