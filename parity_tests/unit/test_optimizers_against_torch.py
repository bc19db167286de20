"""1,000 steps of every optimizer, clipped and not, under every schedule, beside PyTorch's own optimizers and schedulers.

The gradients depend on the parameters, so a difference feeds back. What is compared is the way that a parameter has gone
since the start, which is 0 for an optimizer that does nothing, and PyTorch's moments.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from flax_transformer import optimizers
from flax_transformer.parity import tolerances
from parity_tests.references import needs_torch

pytestmark = needs_torch

STEPS = 1000
SHAPES = {"kernel": (3, 5), "bias": (5,), "table": (7, 3)}
SEEN = (1, 2, 10, 100, STEPS)  # after how many updates the two are compared
Named = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Problem:
    """A bowl with a random curvature in each direction, a cubic term, and noise. All numbers are float32 numbers.

    Each field is one vector, the parameters one after the other; the noise is one for each step.
    """

    shapes: dict[str, tuple[int, ...]]
    start: np.ndarray
    curvature: np.ndarray
    centre: np.ndarray
    noise: np.ndarray

    def named(self, vectors: Any) -> Named:
        """Vectors of NumPy, JAX or PyTorch as parameters; views where the framework has them."""
        ends = np.cumsum([math.prod(shape) for shape in self.shapes.values()]).tolist()
        return {
            name: vectors[..., begin:end].reshape(*vectors.shape[:-1], *shape)
            for (name, shape), begin, end in zip(self.shapes.items(), [0, *ends[:-1]], ends, strict=True)
        }


def gradient(parameter: Any, curvature: Any, centre: Any, noise: Any) -> Any:
    return curvature * (parameter - centre) + 0.1 * parameter * parameter * parameter + noise


@functools.cache
def problem(copies: int) -> Problem:
    """`copies` draws of the problem, in one whose first axes are that much longer."""
    rng = np.random.default_rng(copies)
    shapes = {name: (copies * shape[0], *shape[1:]) for name, shape in SHAPES.items()}

    size = sum(math.prod(shape) for shape in shapes.values())

    def draw(centre: float, spread: float, *axes: int) -> np.ndarray:
        return rng.normal(centre, spread, (*axes, size)).astype(np.float32)

    curvature = np.abs(draw(0, 1)) + np.float32(0.3)
    return Problem(shapes, start=draw(0, 1), curvature=curvature, centre=draw(1, 1), noise=draw(0, 0.5, STEPS))


@dataclasses.dataclass(frozen=True)
class Twin:
    """The same optimizer twice, with hyperparameters that nobody would choose, so that no default stands in for them."""

    ours: Callable[..., optax.GradientTransformation]
    torchs: Callable[[Any, Named, float], Any]  # torch.optim, parameters by name, learning rate
    moments: dict[str, str]  # optax's name -> PyTorch's


def decayed_apart(leaves: Named, weight_decay: float) -> list[dict[str, Any]]:
    decayed = [leaf for leaf in leaves.values() if leaf.ndim >= 2]
    others = [leaf for leaf in leaves.values() if leaf.ndim < 2]
    return [dict(params=decayed, weight_decay=weight_decay), dict(params=others, weight_decay=0.0)]


ADAM = {"mu": "exp_avg", "nu": "exp_avg_sq"}
TRACE = {"trace": "momentum_buffer"}
TWINS = {
    "sgd": Twin(
        functools.partial(optimizers.sgd, weight_decay=0.07),
        lambda optim, leaves, rate: optim.SGD(leaves.values(), lr=rate, weight_decay=0.07),
        {},
    ),
    "momentum": Twin(
        functools.partial(optimizers.momentum, momentum=0.85, dampening=0.3, weight_decay=0.07),
        lambda optim, leaves, rate: optim.SGD(
            leaves.values(), lr=rate, momentum=0.85, dampening=0.3, weight_decay=0.07
        ),
        TRACE,
    ),
    "nesterov": Twin(
        functools.partial(optimizers.momentum, momentum=0.7, form="nesterov", weight_decay=0.07),
        lambda optim, leaves, rate: optim.SGD(leaves.values(), lr=rate, momentum=0.7, nesterov=True, weight_decay=0.07),
        TRACE,
    ),
    "adam": Twin(
        functools.partial(optimizers.adam, b1=0.85, b2=0.97, eps=1e-3),
        lambda optim, leaves, rate: optim.Adam(leaves.values(), lr=rate, betas=(0.85, 0.97), eps=1e-3),
        ADAM,
    ),
    "adam_l2": Twin(
        functools.partial(optimizers.adam, weight_decay=0.07),
        lambda optim, leaves, rate: optim.Adam(leaves.values(), lr=rate, weight_decay=0.07),
        ADAM,
    ),
    "adamw": Twin(
        functools.partial(optimizers.adamw, b1=0.3, b2=0.99, eps=1e-4, weight_decay=0.4),
        lambda optim, leaves, rate: optim.AdamW(decayed_apart(leaves, 0.4), lr=rate, betas=(0.3, 0.99), eps=1e-4),
        ADAM,
    ),
}
# Ours, PyTorch's learning rate, and the scheduler that PyTorch puts on its optimizer.
SCHEDULES: dict[str, tuple[optimizers.Schedule, float, Callable[[Any, Any], Any]]] = {
    "constant": (optimizers.constant(0.03), 0.03, lambda lr_scheduler, optimizer: None),
    "linear": (
        optimizers.linear(0.05, total_steps=613, start_factor=0.2, end_factor=0.9),
        0.05,
        lambda lr_scheduler, optimizer: lr_scheduler.LinearLR(optimizer, 0.2, 0.9, total_iters=613),
    ),
    "cosine": (
        optimizers.cosine(0.05, total_steps=310, final=0.004),  # up again from 310 to 620, and so on
        0.05,
        lambda lr_scheduler, optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=310, eta_min=0.004),
    ),
    "noam": (
        optimizers.noam(20, warmup_steps=23, factor=1.7),
        1.0,
        lambda lr_scheduler, optimizer: lr_scheduler.LambdaLR(
            optimizer, lambda count: 1.7 * 20**-0.5 * min((count + 1) ** -0.5, (count + 1) * 23**-1.5)
        ),
    ),
}
MAX_NORM = {1: 6.0, tolerances.POOLED_SEEDS: 27.0}  # of the order of the gradients' norm: some are clipped


def run_torch(twin: Twin, schedule: str, copies: int, dtype: str, *, clipped: bool) -> list[dict[str, Named]]:
    """For each of SEEN, the parameters and the moments, by optax's name of the kind and the parameter's name."""
    import torch

    data, options = problem(copies), dict(dtype=getattr(torch, dtype))
    position, curvature, centre, noise = (
        torch.tensor(field, **options) for field in (data.start, data.curvature, data.centre, data.noise)
    )
    # Parameters are views of one vector, and so are their gradients, since a thousand small expressions take long.
    slope = torch.zeros_like(position)
    leaves = {name: torch.nn.Parameter(view) for name, view in data.named(position).items()}
    for name, view in data.named(slope).items():
        leaves[name].grad = view
    _, rate, scheduler_of = SCHEDULES[schedule]
    optimizer = twin.torchs(torch.optim, leaves, rate)
    scheduler = scheduler_of(torch.optim.lr_scheduler, optimizer)
    seen, was_clipped = [], 0
    for step in range(1, STEPS + 1):
        slope[:] = gradient(position, curvature, centre, noise[step - 1])
        if clipped:
            norm = torch.nn.utils.clip_grad_norm_(leaves.values(), MAX_NORM[copies])
            was_clipped += int(norm > MAX_NORM[copies])
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        if step in SEEN:
            kinds = {"parameter": {name: leaf.detach().clone() for name, leaf in leaves.items()}}
            for ours, theirs in twin.moments.items():
                kinds[ours] = {name: optimizer.state[leaf][theirs].clone() for name, leaf in leaves.items()}
            seen.append(jax.tree.map(lambda tensor: tensor.numpy(), kinds))
    assert not clipped or 0 < was_clipped < STEPS, f"{was_clipped} of {STEPS} gradients were clipped; nothing is shown"
    return seen


def run_ours(twin: Twin, schedules: list[str], copies: int, *, clipped: bool) -> list[list[dict[str, Named]]]:
    """For each schedule what `run_torch` returns, in the float type that JAX has at the moment."""
    counts = jnp.arange(STEPS)
    rates = jnp.stack([jax.vmap(SCHEDULES[schedule][0])(counts) for schedule in schedules])
    data = problem(copies)
    fields = [data.named(jnp.asarray(field, float)) for field in (data.start, data.curvature, data.centre, data.noise)]

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(0, None))
    def run(rate, fields):
        start, curvature, centre, noises = fields
        optimizer = twin.ours(lambda count: rate[count], max_norm=MAX_NORM[copies] if clipped else None)

        def step(carry, noise):
            parameters, state = carry
            gradients = jax.tree.map(gradient, parameters, curvature, centre, noise)
            updates, state = optimizer.update(gradients, state, parameters)
            parameters = jax.tree.map(jnp.add, parameters, updates)
            return (parameters, state), {"parameter": parameters} | {
                kind: optax.tree.get(state, kind) for kind in twin.moments
            }

        return jax.lax.scan(step, (start, optimizer.init(start)), noises)[1]

    result = jax.tree.map(np.asarray, run(rates, fields))
    return [
        [jax.tree.map(lambda leaf, k=k, step=step: leaf[k, step - 1], result) for step in SEEN]
        for k in range(len(schedules))
    ]


def compared(seen: dict[str, Named], start: Named) -> dict[tuple[str, str], np.ndarray]:
    """By kind and name: moments, and in place of a parameter the way that it has gone."""
    return {
        (kind, name): array.astype(np.float64) - (start[name] if kind == "parameter" else 0.0)
        for kind, arrays in seen.items()
        for name, array in arrays.items()
    }


@pytest.mark.parametrize("clipped", [False, True], ids=["free", "clipped"])
@pytest.mark.parametrize("name", TWINS)
def test_a_thousand_steps_in_float64_mean_what_pytorchs_mean(name, clipped):
    twin, start = TWINS[name], problem(1).named(problem(1).start)
    with jax.enable_x64(True):
        ours = run_ours(twin, list(SCHEDULES), 1, clipped=clipped)
    for schedule, run in zip(SCHEDULES, ours, strict=True):
        for step, actual, expected in zip(
            SEEN, run, run_torch(twin, schedule, 1, "float64", clipped=clipped), strict=True
        ):
            candidates = compared(actual, start)
            for key, reference in compared(expected, start).items():
                error = np.abs(candidates[key] - reference).max() / np.abs(reference).max()
                assert error <= tolerances.MEANING, f"{schedule}, step {step}, {key}: {error:.1e} of the scale"


@pytest.mark.parametrize("name", TWINS)
def test_a_thousand_clipped_steps_under_noam_in_float32_are_as_exact_as_pytorchs(name):
    copies, twin = tolerances.POOLED_SEEDS, TWINS[name]
    start = problem(copies).named(problem(copies).start)
    truth, theirs = (run_torch(twin, "noam", copies, dtype, clipped=True) for dtype in ("float64", "float32"))
    (ours,) = run_ours(twin, ["noam"], copies, clipped=True)
    for step, actual, rounded, exact in zip(SEEN, ours, theirs, truth, strict=True):
        candidates, references = compared(actual, start), compared(rounded, start)
        for key, true in compared(exact, start).items():
            error, reference_error = (
                float(np.sqrt(np.mean((side[key] - true) ** 2))) for side in (candidates, references)
            )
            kind, parameter = key
            largest = float(np.abs(exact[kind][parameter]).max())  # a parameter is rounded at its own size
            allowed = tolerances.POOLED.allowed(reference_error=reference_error, largest=largest, dtype="float32")
            assert error <= allowed, f"step {step}, {key}: {error:.1e}, PyTorch {reference_error:.1e}"
