"""PyTorch's optimizers as optax chains. Pytrees of arrays in, pytrees of arrays out.

What PyTorch computes is meant to the letter: where the decay enters, the eps of clipping, the place of Adam's eps, the
bias corrections, the first step of momentum, and the defaults. Each docstring says where optax's own function of that
name differs and by how much; parity_tests/unit/test_optax_differences.py measures it.

The schedules of `schedules.py` are names of this module, too. PyTorch's moments are in the state under optax's names, for
example `optax.tree.get(state, "mu")`:

    sgd                 none
    momentum            `trace`       momentum_buffer
    adam, adamw         `mu`, `nu`    exp_avg, exp_avg_sq
"""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from flax_transformer.schedules import Schedule, constant, require_number
from flax_transformer.schedules import cosine as cosine
from flax_transformer.schedules import linear as linear
from flax_transformer.schedules import noam as noam
from flax_transformer.schedules import warmup_cosine as warmup_cosine

DecayMask = Callable[[Any], Any]  # from the parameters to a pytree of booleans, or to one boolean
MomentumForm = Literal["classical", "nesterov"]


def clip_by_global_norm(max_norm: float, *, eps: float = 1e-6) -> optax.GradientTransformation:
    """Scales all gradients down together where their joint norm exceeds `max_norm`.

        g <- g * min(1, max_norm / (norm + eps)),    norm = sqrt(sum of the squares of all gradients)

    This is `torch.nn.utils.clip_grad_norm_`, eps included. `optax.clip_by_global_norm` has no eps: its result is larger by
    the share eps / norm, 5e-7 at a norm of 2 and 5e-5 at a norm of 0.02.

    Source: Pascanu et al. 2013 (arXiv:1211.5063, algorithm 1).
    """
    require_number("max_norm", max_norm, above=0.0)
    require_number("eps", eps, at_least=0.0)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        scale = jnp.minimum(1.0, max_norm / (optax.tree.norm(updates) + eps))
        return jax.tree.map(lambda g: g * scale.astype(g.dtype), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def everything(parameters: Any) -> Any:
    """The decay mask of PyTorch's defaults: True for every parameter, biases and norms too."""
    return jax.tree.map(lambda parameter: True, parameters)


def decays(parameters: Any) -> Any:
    """Which parameters weight decay shrinks: a pytree of booleans in the form of `parameters`.

    True for those of two axes or more (the kernels of products and the embedding tables), False for biases and the
    scales and shifts of norms, which set a level rather than a strength.

    Source: the convention of GPT-2 and its successors (Brown et al. 2020, appendix B, decay "a small amount of
    regularization"; nanoGPT's `configure_optimizers` draws the line at two axes). `torch.optim.AdamW` and
    `optax.adamw` decay everything unless told otherwise.
    """
    return jax.tree.map(lambda parameter: parameter.ndim >= 2, parameters)


def sgd(
    learning_rate: Schedule | float,
    *,
    weight_decay: float = 0.0,
    decay_mask: DecayMask = everything,
    max_norm: float | None = None,
) -> optax.GradientTransformation:
    """Stochastic gradient descent, as `torch.optim.SGD` without momentum.

        g <- g + weight_decay * p
        p <- p - lr * g

    `optax.sgd` has the same update, but no weight decay (a relative change of the update by weight_decay * p / g).

    Args:
        learning_rate: a schedule, for example `noam(...)`, or a number.
        weight_decay: strength of the L2 penalty weight_decay / 2 * p^2 whose gradient is added, after clipping.
        decay_mask: from the parameters to a pytree of booleans (or one): where weight decay applies.
        max_norm: the largest norm of the gradient, see `clip_by_global_norm`; None: no clipping.

    Raises:
        ValueError: a number out of its range.
    """
    require_number("weight_decay", weight_decay, at_least=0.0)
    return _chain(
        max_norm,
        optax.add_decayed_weights(weight_decay, mask=decay_mask),
        optax.scale_by_learning_rate(_schedule(learning_rate)),
    )


def momentum(
    learning_rate: Schedule | float,
    *,
    momentum: float,
    dampening: float = 0.0,
    form: MomentumForm = "classical",
    weight_decay: float = 0.0,
    decay_mask: DecayMask = everything,
    max_norm: float | None = None,
) -> optax.GradientTransformation:
    """Gradient descent with momentum, as `torch.optim.SGD(momentum=...)`.

        g <- g + weight_decay * p
        b <- g                                          at the first update: no dampening
        b <- momentum * b + (1 - dampening) * g         after that
        p <- p - lr * b                                 classical
        p <- p - lr * (g + momentum * b)                nesterov

    The learning rate is outside the buffer, which a schedule therefore does not reach (Sutskever et al. 2013 and
    TensorFlow have it inside).

    `optax.sgd(..., momentum=...)` is the same where dampening and weight decay are 0, and has neither. Without a dampening
    of 0.1 at a momentum of 0.9, a steady gradient moves 5.6 % further in the second update, 11 % in the long run.
    `optax.chain(optax.sgd(...), optax.add_decayed_weights(...))` decays past the buffer and the learning rate, and uphill.

    Args:
        learning_rate: a schedule, for example `noam(...)`, or a number.
        momentum: decay of the buffer, above 0 and below 1; for 0 there is `sgd`.
        dampening: share of the gradient that is kept out of the buffer, in [0, 1].
        form: "nesterov" looks ahead by one buffer; with dampening it is not defined (PyTorch refuses it as well).
        weight_decay: strength of the L2 penalty weight_decay / 2 * p^2 whose gradient is added, after clipping.
        decay_mask: from the parameters to a pytree of booleans (or one): where weight decay applies.
        max_norm: the largest norm of the gradient, see `clip_by_global_norm`; None: no clipping.

    Raises:
        ValueError: a number out of its range, an unknown form, or dampening with "nesterov".
    """
    require_number("momentum", momentum, above=0.0, below=1.0)
    require_number("dampening", dampening, at_least=0.0, at_most=1.0)
    require_number("weight_decay", weight_decay, at_least=0.0)
    if form not in ("classical", "nesterov"):
        raise ValueError(f'form must be "classical" or "nesterov", got {form!r}.')
    if form == "nesterov" and dampening > 0:
        raise ValueError(f'form="nesterov" needs dampening=0, got {dampening:g}; take form="classical" to dampen.')
    buffer = optax.trace(momentum, nesterov=form == "nesterov") if dampening == 0 else _dampened(momentum, dampening)
    return _chain(
        max_norm,
        optax.add_decayed_weights(weight_decay, mask=decay_mask),
        buffer,
        optax.scale_by_learning_rate(_schedule(learning_rate)),
    )


def adam(
    learning_rate: Schedule | float,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decay_mask: DecayMask = everything,
    max_norm: float | None = None,
) -> optax.GradientTransformation:
    """Adam, as `torch.optim.Adam`: weight decay is an L2 penalty, and so passes through both moments.

    With s = `count` + 1:

        g <- g + weight_decay * p
        m <- b1 m + (1 - b1) g
        v <- b2 v + (1 - b2) g^2
        p <- p - lr(s) / (1 - b1^s) * m / (sqrt(v) / sqrt(1 - b2^s) + eps)

    eps is outside the root, and inside the bias correction. The paper (section 5.3) takes b2=0.98 and eps=1e-9.

    `optax.adam` has the same formula and defaults, and no weight decay. In float64 the two differ by rounding alone. In
    float32 it raises 0.999, already rounded, to the power s: its first update is too small by 6.6e-6 of itself, its second
    by 1.0e-5. PyTorch has these powers in Python's float64; here they are right to a rounding, the update to 5e-7.

    Args:
        learning_rate: a schedule, for example `noam(...)`, or a number.
        b1: decay of the mean of gradients, in [0, 1).
        b2: decay of the mean of squared gradients, in [0, 1).
        eps: added to the root.
        weight_decay: strength of the L2 penalty weight_decay / 2 * p^2 whose gradient is added, after clipping.
        decay_mask: from the parameters to a pytree of booleans (or one): where weight decay applies.
        max_norm: the largest norm of the gradient, see `clip_by_global_norm`; None: no clipping.

    Raises:
        ValueError: a number out of its range.

    Source: Kingma and Ba 2015 (arXiv:1412.6980, algorithm 1).
    """
    require_number("weight_decay", weight_decay, at_least=0.0)
    return _chain(
        max_norm,
        optax.add_decayed_weights(weight_decay, mask=decay_mask),
        _scale_by_adam(b1, b2, eps),
        optax.scale_by_learning_rate(_schedule(learning_rate)),
    )


def adamw(
    learning_rate: Schedule | float,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    decay_mask: DecayMask = decays,
    max_norm: float | None = None,
) -> optax.GradientTransformation:
    """AdamW, as `torch.optim.AdamW`: Adam, with weight decay past its moments.

    With s = `count` + 1 and the moments m and v of `adam`, of the gradient alone:

        p <- p - lr(s) * weight_decay * p - lr(s) / (1 - b1^s) * m / (sqrt(v) / sqrt(1 - b2^s) + eps)

    `weight_decay=0.0` is Adam. The defaults are those of PyTorch, except for the mask: `decay_mask=everything` decays all
    parameters, as PyTorch does without parameter groups.

    `optax.adamw` has weight_decay=1e-4 where PyTorch has 0.01, and no mask: a weight without a gradient shrinks by 0.010 %
    in 1,000 steps of 1e-3, with PyTorch's default by 1.0 %. For its bias corrections see `adam`.

    Args:
        learning_rate: a schedule, for example `noam(...)`, or a number.
        b1: decay of the mean of gradients, in [0, 1).
        b2: decay of the mean of squared gradients, in [0, 1).
        eps: added to the root.
        weight_decay: multiplied by the learning rate, not by the gradient.
        decay_mask: from the parameters to a pytree of booleans (or one): where weight decay applies.
        max_norm: the largest norm of the gradient, see `clip_by_global_norm`; None: no clipping.

    Raises:
        ValueError: a number out of its range.

    Source: Loshchilov and Hutter 2019 (arXiv:1711.05101, algorithm 2).
    """
    require_number("weight_decay", weight_decay, at_least=0.0)
    return _chain(
        max_norm,
        _scale_by_adam(b1, b2, eps),
        optax.add_decayed_weights(weight_decay, mask=decay_mask),
        optax.scale_by_learning_rate(_schedule(learning_rate)),
    )


def with_standard_promotion(transformation: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same transformation, working also where `jax_numpy_dtype_promotion` is "strict".

    optax multiplies arrays of several types, which strict promotion forbids. The scope ends with the update, so the
    models stay strict.
    """

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        with jax.numpy_dtype_promotion("standard"):
            return transformation.update(updates, state, params)

    return optax.GradientTransformation(transformation.init, update)


class DampenedTraceState(NamedTuple):
    """The buffer of a dampened momentum under the name that `optax.TraceState` gives it, and the number of updates."""

    count: Any  # Int[Array, ""]
    trace: Any


def _dampened(momentum: float, dampening: float) -> optax.GradientTransformation:
    def init(params: Any) -> DampenedTraceState:
        return DampenedTraceState(jnp.zeros((), jnp.int32), optax.tree.zeros_like(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, DampenedTraceState]:
        del params
        kept = jnp.where(state.count == 0, 1.0, 1.0 - dampening)
        trace = jax.tree.map(lambda g, b: momentum * b + kept.astype(g.dtype) * g, updates, state.trace)
        return trace, DampenedTraceState(optax.safe_increment(state.count), trace)

    return optax.GradientTransformation(init, update)


def _scale_by_adam(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """`optax.scale_by_adam` and its state, with bias corrections that are right in float32 too."""
    for name, decay in (("b1", b1), ("b2", b2)):
        require_number(name, decay, at_least=0.0, below=1.0)
    require_number("eps", eps, above=0.0)
    b1_log, b2_log = (math.log(decay) if decay > 0 else -math.inf for decay in (b1, b2))

    def init(params: Any) -> optax.ScaleByAdamState:
        zeros = optax.tree.zeros_like
        return optax.ScaleByAdamState(count=jnp.zeros((), jnp.int32), mu=zeros(params), nu=zeros(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, optax.ScaleByAdamState]:
        del params
        count = optax.safe_increment(state.count)
        mu = jax.tree.map(lambda g, m: b1 * m + (1 - b1) * g, updates, state.mu)
        nu = jax.tree.map(lambda g, v: b2 * v + (1 - b2) * (g * g), updates, state.nu)
        # 1 - b^s from the logarithm: b itself, rounded to float32, would be off by up to 6e-8, a large part of 1 - b.
        step = jnp.asarray(count, float)
        correction1, root_of_correction2 = -jnp.expm1(step * b1_log), jnp.sqrt(-jnp.expm1(step * b2_log))
        scaled = jax.tree.map(
            lambda m, v: (m / (correction1 * (jnp.sqrt(v) / root_of_correction2 + eps))).astype(m.dtype), mu, nu
        )
        return scaled, optax.ScaleByAdamState(count=count, mu=mu, nu=nu)

    return optax.GradientTransformation(init, update)


def _schedule(learning_rate: Schedule | float) -> Schedule:
    return learning_rate if callable(learning_rate) else constant(learning_rate)


def _chain(max_norm: float | None, *parts: optax.GradientTransformation) -> optax.GradientTransformation:
    """Clipping comes first: PyTorch clips `.grad`, and its optimizers add the L2 penalty after that."""
    clip = optax.identity() if max_norm is None else clip_by_global_norm(max_norm)
    return with_standard_promotion(optax.chain(clip, *parts))
