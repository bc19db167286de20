"""Losses over arrays. Sums are returned, never means: only the caller knows the global batch.

A mean over examples, devices or accumulation steps of *different* token counts weighs tokens unequally. So every loss
here returns the sum of the loss and the sum of the weights; sums add up over any layout, and one division at the end
gives the mean over all tokens.

Axis letters: B batch, T target, V vocabulary (see config.py).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


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
) -> LossSums:
    """Cross entropy of the softmax of `logits` against `labels`, summed over all positions.

    With e = `label_smoothing`, the target distribution of a position whose label is y is q_v = (1 - e) [v = y] + e / V:
    the e / V goes to *all* V classes, the label's own included. The loss of the position is

        l = -sum_v q_v log softmax(z)_v = log sum_v exp(z_v) - (1 - e) z_y - (e / V) sum_v z_v

    Arithmetic is in float32 at least, also for bfloat16 logits; float64 logits stay in float64.

    Args:
        logits: scores before the softmax, shape (..., V).
        labels: class ids in [0, V), shape (...). An id outside makes the loss NaN (JAX cannot raise from inside
            `jit`), unless its weight is 0: a position to be ignored needs that, not a magic label like PyTorch's -100.
        weights: one number, or boolean, per position: 0 or False leaves a position out. None: every position counts.
        label_smoothing: e, in [0, 1].

    Returns:
        `LossSums(loss, weight)`. `.mean` is what `torch.nn.functional.cross_entropy` returns for `reduction="mean"`,
        with weight 0 where PyTorch has `ignore_index`.

    Raises:
        ValueError: shapes that do not fit each other, or `label_smoothing` outside [0, 1].

    Source: label smoothing as Szegedy et al. 2015 (arXiv:1512.00567, section 7), which Vaswani et al. 2017 (section
    5.4) use, and as PyTorch's `CrossEntropyLoss(label_smoothing=...)` defines it. (Some libraries spread e over the
    V - 1 wrong classes instead.)
    """
    if logits.ndim == 0 or logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"labels must have the shape of logits without the last axis: logits {logits.shape}, labels {labels.shape}."
        )
    if weights is not None and weights.shape != labels.shape:
        raise ValueError(f"weights must have the shape of labels: weights {weights.shape}, labels {labels.shape}.")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be between 0 and 1, got {label_smoothing}.")

    dtype = jnp.float32 if jnp.finfo(logits.dtype).bits < 32 else logits.dtype
    logits = logits.astype(dtype)
    used = jnp.ones(labels.shape, dtype) if weights is None else weights.astype(dtype)

    index = jnp.where(labels < 0, logits.shape[-1], labels)  # -1 would be read as the last class
    label_logits = jnp.take_along_axis(logits, index[..., None], axis=-1, mode="fill")[..., 0]
    if label_smoothing > 0.0:  # decided by a Python number: 0 * mean would turn a logit of -inf into NaN
        label_logits = (1.0 - label_smoothing) * label_logits + label_smoothing * logits.mean(axis=-1)
    losses = jax.nn.logsumexp(logits, axis=-1) - label_logits

    # A product would let the NaN of a position that does not count through: 0 * NaN is NaN.
    counted = jnp.where(used == 0, 0.0, losses * used)
    return LossSums(loss=counted.sum(), weight=used.sum())
