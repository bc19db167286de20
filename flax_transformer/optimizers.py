"""Optimizers as optax chains, and learning-rate schedules. Pytrees of arrays in, pytrees of arrays out.

A schedule is a function of `count`, the number of updates already made: 0 at the first update, as optax counts and as
`torch.optim.lr_scheduler.LambdaLR` does.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

Schedule = Callable[[Any], Float[Array, ""]]  # from a count, Int[Array, ""]


def constant(learning_rate: float) -> Schedule:
    """The same learning rate at every step."""
    _require("learning_rate", learning_rate, at_least=0.0)
    return lambda count: jnp.asarray(learning_rate, float)


def warmup_cosine(peak: float, *, warmup_steps: int, total_steps: int, final: float = 0.0) -> Schedule:
    """A linear rise to `peak`, then half a cosine down to `final`.

    With s = `count` + 1, the number of the step that is being taken, W = `warmup_steps` and N = `total_steps`:

        lr(s) = peak * s / W                                                        s <= W
        lr(s) = final + (peak - final) / 2 * (1 + cos(pi * (s - W) / (N - W)))      s > W

    and `final` after N. Counting from 1 makes the first step move; `optax.warmup_cosine_decay_schedule` counts from 0,
    so its first update is zero.

    Source: Loshchilov and Hutter 2017 (arXiv:1608.03983, equation 5), without restarts.
    """
    _require("peak", peak, at_least=0.0)
    _require("final", final, at_least=0.0)
    _require("warmup_steps", warmup_steps, at_least=0)
    _require("total_steps", total_steps, at_least=warmup_steps + 1)

    def schedule(count: Int[Array, ""]) -> Float[Array, ""]:
        step = jnp.asarray(count + 1, float)
        rise = peak * step / max(warmup_steps, 1)
        progress = jnp.clip((step - warmup_steps) / (total_steps - warmup_steps), 0.0, 1.0)
        fall = final + 0.5 * (peak - final) * (1.0 + jnp.cos(math.pi * progress))
        return jnp.where(step <= warmup_steps, rise, fall)

    return schedule


def noam(d_model: int, *, warmup_steps: int, factor: float = 1.0) -> Schedule:
    """The schedule of the paper: a linear rise, then a fall with the square root of the step.

        lr(s) = factor * d_model^(-1/2) * min(s^(-1/2), s * W^(-3/2))

    with s = `count` + 1 (the paper counts steps from 1) and W = `warmup_steps`; the paper has no `factor`.

    Source: Vaswani et al. 2017 (arXiv:1706.03762), section 5.3, equation 3.
    """
    _require("d_model", d_model, at_least=1)
    _require("warmup_steps", warmup_steps, at_least=1)
    _require("factor", factor, at_least=0.0)

    def schedule(count: Int[Array, ""]) -> Float[Array, ""]:
        step = jnp.asarray(count + 1, float)
        return factor * d_model**-0.5 * jnp.minimum(jax.lax.rsqrt(step), step * warmup_steps**-1.5)

    return schedule


def clip_by_global_norm(max_norm: float, *, eps: float = 1e-6) -> optax.GradientTransformation:
    """Scales all gradients down together where their joint norm exceeds `max_norm`.

        g <- g * min(1, max_norm / (norm + eps)),    norm = sqrt(sum of the squares of all gradients)

    This is `torch.nn.utils.clip_grad_norm_`, eps included; `optax.clip_by_global_norm` has no eps.

    Source: Pascanu et al. 2013 (arXiv:1211.5063, algorithm 1).
    """
    _require("max_norm", max_norm, above=0.0)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        scale = jnp.minimum(1.0, max_norm / (optax.tree.norm(updates) + eps))
        return jax.tree.map(lambda g: g * scale.astype(g.dtype), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def decays(parameters: Any) -> Any:
    """Which parameters weight decay shrinks: a pytree of booleans in the form of `parameters`.

    True for those of two axes or more (the kernels of products and the embedding tables), False for biases and the
    scales and shifts of norms, which set a level rather than a strength.

    Source: the convention of GPT-2 and its successors (Brown et al. 2020, appendix B, decay "a small amount of
    regularization"; nanoGPT's `configure_optimizers` draws the line at two axes). `torch.optim.AdamW` and
    `optax.adamw` decay everything unless told otherwise.
    """
    return jax.tree.map(lambda parameter: parameter.ndim >= 2, parameters)


def adamw(
    learning_rate: Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    decay_mask: Callable[[Any], Any] = decays,
    max_norm: float | None = None,
) -> optax.GradientTransformation:
    """AdamW, with clipping of the gradient's norm before it.

    With s = `count` + 1 and the gradient g, clipped where `max_norm` is given:

        m <- b1 m + (1 - b1) g
        v <- b2 v + (1 - b2) g^2
        p <- p - lr(s) * ((m / (1 - b1^s)) / (sqrt(v / (1 - b2^s)) + eps) + weight_decay * p)

    eps is outside the root. `weight_decay=0.0` is Adam. The defaults are those of `torch.optim.AdamW`, except for the
    mask: `decay_mask=lambda parameters: True` decays everything, as PyTorch does. (`optax.adamw` has weight_decay=1e-4,
    PyTorch 0.01.) The paper (section 5.3) takes b2=0.98, eps=1e-9 and no decay.

    Args:
        learning_rate: a schedule, for example `constant(1e-3)`.
        b1: decay of the mean of gradients, in [0, 1).
        b2: decay of the mean of squared gradients, in [0, 1).
        eps: added to the root.
        weight_decay: multiplied by the learning rate, not by the gradient.
        decay_mask: from the parameters to a pytree of booleans (or one): where weight decay applies.
        max_norm: the largest norm of the gradient, see `clip_by_global_norm`; None: no clipping.

    Raises:
        ValueError: a number out of its range.

    Source: Kingma and Ba 2015 (arXiv:1412.6980); Loshchilov and Hutter 2019 (arXiv:1711.05101, algorithm 2).
    """
    for name, decay in (("b1", b1), ("b2", b2)):
        _require(name, decay, at_least=0.0, below=1.0)
    _require("eps", eps, above=0.0)
    _require("weight_decay", weight_decay, at_least=0.0)
    return with_standard_promotion(
        optax.chain(
            optax.identity() if max_norm is None else clip_by_global_norm(max_norm),
            optax.scale_by_adam(b1=b1, b2=b2, eps=eps, eps_root=0.0, mu_dtype=None, nesterov=False),
            optax.add_decayed_weights(weight_decay, mask=decay_mask),
            optax.scale_by_learning_rate(learning_rate),
        )
    )


def with_standard_promotion(transformation: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same transformation, working also where `jax_numpy_dtype_promotion` is "strict".

    optax raises decay rates to the power of an integer count, which strict promotion forbids. The scope ends with the
    update, so the models stay strict.
    """

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        with jax.numpy_dtype_promotion("standard"):
            return transformation.update(updates, state, params)

    return optax.GradientTransformation(transformation.init, update)


def _require(
    name: str, value: float, *, at_least: float = -math.inf, above: float = -math.inf, below: float = math.inf
) -> None:
    if not (value >= at_least and value > above and value < below):
        bounds = [
            f"{words} {bound:g}"
            for words, bound in (("at least", at_least), ("above", above), ("below", below))
            if math.isfinite(bound)
        ]
        raise ValueError(f"{name} must be {' and '.join(bounds) or 'finite'}, got {value:g}.")
