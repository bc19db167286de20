"""Attention masks: boolean, True = may attend, broadcastable to B 1 T S.

The third axis is the query, the fourth the key; the second is the heads', and always 1. PyTorch's
``nn.MultiheadAttention`` has the opposite sign for its boolean masks (True = may *not* attend).
"""

import functools

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from flax_transformer.config import MaskFill

FILL_VALUES: dict[str, float | None] = {"minus_1e9": -1e9, "minus_inf": -np.inf, "dtype_min": None}


def fill_value(mask_fill: MaskFill, dtype: jnp.dtype) -> float:
    """What a masked score becomes before the softmax.

    ``minus_1e9`` (encoder-decoder document) and ``dtype_min`` (the lowest finite number of ``dtype``): a fully masked row
    attends to everything equally. ``minus_inf`` (decoder-only document): such a row is NaN, in PyTorch as here.
    """
    value = FILL_VALUES[mask_fill]
    return float(jnp.finfo(dtype).min) if value is None else value


def padding_mask(ids: Int[Array, "B S"], *, pad_id: int = 0) -> Bool[Array, "B 1 1 S"]:
    """``ids != pad_id``: every query may attend to every key that is not padding.

    The encoder-decoder document's ``create_pad_mask`` is this without the head axis.

    Raises:
        ValueError: not two axes.
    """
    ids = jnp.asarray(ids)
    if ids.ndim != 2:
        raise ValueError(f"a padding mask needs ids of shape (B, S), got {ids.shape}; one sequence is ids[None, :]")
    return (ids != pad_id)[:, None, None, :]


def causal_mask(length: int) -> Bool[Array, "1 1 T T"]:
    """Position t may attend to positions 0 .. t. The encoder-decoder document's ``subsequent_mask`` is this as float32
    without the head axis; the decoder-only document masks the complement, ``triu(ones, diagonal=1)``.
    """
    if length < 1:
        raise ValueError(f"a causal mask needs a length of at least 1, got {length}")
    return jnp.tril(jnp.ones((length, length), bool))[None, None]


def combine_masks(*masks: Bool[Array, "..."]) -> Bool[Array, "B 1 T S"]:
    """May attend where every mask says so: their logical and, broadcast."""
    if not masks:
        raise ValueError("combine_masks needs at least one mask, got none; pass None to a model to mask nothing")
    for index, mask in enumerate(masks):
        _require_mask(mask, f"mask {index} of combine_masks")
    shape = jnp.broadcast_shapes(*(mask.shape for mask in masks))
    return functools.reduce(jnp.logical_and, (jnp.broadcast_to(mask, shape) for mask in masks))


def from_document_mask(mask: Array) -> Bool[Array, "B 1 T S"]:
    """A mask as the encoder-decoder document makes them, as one of ours.

    Args:
        mask: B T S, or broadcastable to it (``create_pad_mask``: bool B 1 S; ``subsequent_mask``: float32 1 T T; their
            product). PyTorch tensors are accepted. 0 or False may not be attended to, anything else may, as in the
            document's ``masked_fill(mask == 0, -1e9)``.
    Raises:
        ValueError: not three axes.
    """
    values = np.asarray(mask) if not isinstance(mask, Array) else mask
    if values.ndim != 3:
        raise ValueError(
            f"a document mask has three axes, B T S, got shape {values.shape}; "
            "masks of this package have a head axis already and need no adapter"
        )
    return jnp.asarray(values.astype(bool))[:, None]


def require_mask(mask: Array | None, shape: tuple[int, int, int], *, name: str) -> Bool[Array, "#B 1 #T #S"] | None:
    """``mask`` as a JAX array, with ``shape`` = (B, T, S); None, which masks nothing, as it is.

    Raises:
        ValueError: not a boolean array broadcastable to B 1 T S; naming the rule, what was given, and the remedy.
    """
    if mask is None:
        return None
    _require_mask(mask, name)
    batch, target, source = shape
    wanted = (batch, 1, target, source)
    if any(size not in (1, full) for size, full in zip(mask.shape, wanted, strict=True)):
        raise ValueError(f"{name} must be broadcastable to (B, 1, T, S) = {wanted}, got shape {mask.shape}")
    return jnp.asarray(mask)


def _require_mask(mask: Array, name: str) -> None:
    if not isinstance(mask, Array | np.ndarray):
        raise ValueError(
            f"{name} must be a boolean array of JAX or NumPy, got {type(mask).__name__}; "
            "masks.from_document_mask converts a PyTorch mask of B T S"
        )
    if mask.dtype != bool:
        raise ValueError(
            f"{name} must be boolean, True = may attend, got dtype {mask.dtype}; "
            "convert a document's float mask with masks.from_document_mask"
        )
    if mask.ndim != 4:
        raise ValueError(
            f"{name} must have four axes, broadcastable to (B, 1, T, S), got shape {mask.shape}; "
            "masks.from_document_mask adds the head axis to a B T S mask"
        )
