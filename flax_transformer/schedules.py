"""Learning-rate schedules, PyTorch-exact where a twin exists.

A schedule is a function of `count`, the number of updates already made: 0 at the first update, as optax counts and as
PyTorch's schedulers do, if `scheduler.step()` follows every `optimizer.step()`. In the formulas n is `count`, and
s = n + 1 the number of the update that is being made.

Each docstring says where optax's own schedule differs; parity_tests/unit/test_schedules.py measures it.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Schedule = Callable[[Any], Float[Array, ""]]  # from a count, Int[Array, ""]


def constant(learning_rate: float) -> Schedule:
    """The same learning rate at every step, as an optimizer of PyTorch without a scheduler."""
    require_number("learning_rate", learning_rate, at_least=0.0)
    return lambda count: jnp.asarray(learning_rate, float)


def linear(
    learning_rate: float, *, total_steps: int, start_factor: float = 1.0 / 3.0, end_factor: float = 1.0
) -> Schedule:
    """A straight line between two shares of `learning_rate`, then level: a warmup, or a decay.

        lr(n) = learning_rate * (start_factor + (end_factor - start_factor) * min(n, N) / N),    N = `total_steps`

    So update N + 1 is the first at `end_factor`. This is `torch.optim.lr_scheduler.LinearLR`, whose `total_iters` is N
    (default there 5; here it must be said), computed directly where PyTorch multiplies the last rate by a ratio.

    `optax.linear_schedule(start_factor * learning_rate, end_factor * learning_rate, N)` is the same line: 0 difference in
    meaning. A warmup from `start_factor` 0, which PyTorch refuses because of its ratio, is allowed; its first update is 0.

    Args:
        learning_rate: what the factors are shares of.
        total_steps: number of updates until the line ends.
        start_factor: share at the first update, in [0, 1].
        end_factor: share after `total_steps` updates, in [0, 1].
    """
    require_number("learning_rate", learning_rate, at_least=0.0)
    require_number("total_steps", total_steps, at_least=1)
    require_number("start_factor", start_factor, at_least=0.0, at_most=1.0)
    require_number("end_factor", end_factor, at_least=0.0, at_most=1.0)

    def schedule(count: Int[Array, ""]) -> Float[Array, ""]:
        progress = jnp.asarray(jnp.minimum(count, total_steps), float) / total_steps
        return learning_rate * (start_factor + (end_factor - start_factor) * progress)

    return schedule


def cosine(learning_rate: float, *, total_steps: int, final: float = 0.0) -> Schedule:
    """Half a cosine from `learning_rate` down to `final`, and up again after that.

        lr(n) = final + (learning_rate - final) / 2 * (1 + cos(pi * n / N)),    N = `total_steps`

    So update N + 1 is the first at `final`, and update 2 N + 1 is at `learning_rate` again. This is
    `torch.optim.lr_scheduler.CosineAnnealingLR`, whose `T_max` is N and `eta_min` is `final`, the rise included.

    `optax.cosine_decay_schedule(learning_rate, N, alpha=final / learning_rate)` is the same up to N and stays at `final`
    from there: after 1.5 N updates it has `final` where PyTorch has the mean of `final` and `learning_rate`.

    Source: Loshchilov and Hutter 2017 (arXiv:1608.03983, equation 5), without restarts.
    """
    require_number("learning_rate", learning_rate, at_least=0.0)
    require_number("total_steps", total_steps, at_least=1)
    require_number("final", final, at_least=0.0)

    def schedule(count: Int[Array, ""]) -> Float[Array, ""]:
        to_the_end = jnp.abs(total_steps - jnp.mod(count, 2 * total_steps))
        return final + (learning_rate - final) * _half_cosine(jnp.asarray(to_the_end, float) / total_steps)

    return schedule


def warmup_cosine(peak: float, *, warmup_steps: int, total_steps: int, final: float = 0.0) -> Schedule:
    """A linear rise to `peak`, then half a cosine down to `final`.

    With s = `count` + 1, W = `warmup_steps` and N = `total_steps`:

        lr(s) = peak * s / W                                                        s <= W
        lr(s) = final + (peak - final) / 2 * (1 + cos(pi * (s - W) / (N - W)))      s > W

    and `final` after N. PyTorch has it in two parts: for W above 1, `SequentialLR` of `LinearLR(start_factor=1 / W,
    total_iters=W - 1)` and `CosineAnnealingLR(T_max=N - W, eta_min=final)` with `milestones=[W - 1]`.

    `optax.warmup_cosine_decay_schedule(0, peak, W, N, final)` counts from 0, that is, it is this one update late: its
    first update is 0 where this one is peak / W, and its last, s = N, is not yet at `final`.

    Source: Loshchilov and Hutter 2017 (arXiv:1608.03983, equation 5), without restarts.
    """
    require_number("peak", peak, at_least=0.0)
    require_number("final", final, at_least=0.0)
    require_number("warmup_steps", warmup_steps, at_least=0)
    require_number("total_steps", total_steps, at_least=warmup_steps + 1)

    def schedule(count: Int[Array, ""]) -> Float[Array, ""]:
        step = jnp.asarray(count + 1, float)
        rise = peak * step / max(warmup_steps, 1)
        to_the_end = jnp.clip((total_steps - step) / (total_steps - warmup_steps), 0.0, 1.0)
        return jnp.where(step <= warmup_steps, rise, final + (peak - final) * _half_cosine(to_the_end))

    return schedule


def noam(d_model: int, *, warmup_steps: int, factor: float = 1.0) -> Schedule:
    """The schedule of the paper: a linear rise, then a fall with the square root of the step.

        lr(s) = factor * d_model^(-1/2) * min(s^(-1/2), s * W^(-3/2))

    with s = `count` + 1 (the paper counts steps from 1) and W = `warmup_steps`; the paper has no `factor`.

    In PyTorch it is `LambdaLR(optimizer, lambda n: lr(n + 1))` over a base rate of 1. The Annotated Transformer's `rate`
    is lr(max(n, 1)), which is one update late from the second one on: that one moves half as far as here. optax has no
    such schedule.

    Source: Vaswani et al. 2017 (arXiv:1706.03762), section 5.3, equation 3.
    """
    require_number("d_model", d_model, at_least=1)
    require_number("warmup_steps", warmup_steps, at_least=1)
    require_number("factor", factor, at_least=0.0)

    def schedule(count: Int[Array, ""]) -> Float[Array, ""]:
        step = jnp.asarray(count + 1, float)
        return factor * d_model**-0.5 * jnp.minimum(jax.lax.rsqrt(step), step * warmup_steps**-1.5)

    return schedule


def _half_cosine(to_the_end: Float[Array, ""]) -> Float[Array, ""]:
    """(1 + cos(pi * (1 - x))) / 2 for the share x that is left; a square, since 1 + cos loses all digits near the end."""
    return jnp.sin(0.5 * math.pi * to_the_end) ** 2


def require_number(
    name: str,
    value: float,
    *,
    at_least: float = -math.inf,
    at_most: float = math.inf,
    above: float = -math.inf,
    below: float = math.inf,
) -> None:
    """Raises ValueError with the bounds and the value where a hyperparameter is outside them, NaN or infinite."""
    if not (at_least <= value <= at_most and above < value < below):
        bounds = [
            f"{words} {bound:g}"
            for words, bound in (("at least", at_least), ("at most", at_most), ("above", above), ("below", below))
            if math.isfinite(bound)
        ]
        raise ValueError(f"{name} must be {' and '.join(bounds) or 'finite'}, got {value:g}.")
