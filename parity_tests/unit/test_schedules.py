"""Schedules against their formulas, PyTorch's schedulers, and what optax has under similar names."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from flax_transformer import optimizers, schedules
from parity_tests.references import needs_torch


def rates(schedule: Callable[[Any], Any], steps: int) -> np.ndarray:
    """The learning rates of the first updates, in the float type that JAX has at the moment."""
    return np.asarray(jax.jit(jax.vmap(schedule))(jnp.arange(steps)))


def torchs_rates(rate: float, scheduler_of: Callable[[Any, Any], Any], steps: int) -> np.ndarray:
    import torch

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.tensor([0.3]))], lr=rate)
    scheduler, seen = scheduler_of(torch.optim.lr_scheduler, optimizer), []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return np.asarray(seen)


def sequential(lr_scheduler: Any, optimizer: Any) -> Any:
    parts = [
        lr_scheduler.LinearLR(optimizer, start_factor=1 / 40, total_iters=39),
        lr_scheduler.CosineAnnealingLR(optimizer, T_max=260, eta_min=0.02),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[39])


TWINS: dict[str, tuple[schedules.Schedule, float, Callable[[Any, Any], Any], int]] = {
    "linear": (
        schedules.linear(0.3, total_steps=70, start_factor=0.2, end_factor=0.9),
        0.3,
        lambda lr_scheduler, optimizer: lr_scheduler.LinearLR(optimizer, 0.2, 0.9, total_iters=70),
        90,
    ),
    "linear by default": (
        schedules.linear(0.3, total_steps=5),
        0.3,
        lambda lr_scheduler, optimizer: lr_scheduler.LinearLR(optimizer),
        9,
    ),
    "cosine": (
        schedules.cosine(0.3, total_steps=70, final=0.02),
        0.3,
        lambda lr_scheduler, optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=70, eta_min=0.02),
        300,
    ),
    "warmup_cosine": (
        schedules.warmup_cosine(0.3, warmup_steps=40, total_steps=300, final=0.02),
        0.3,
        sequential,
        300,
    ),
    "noam": (
        schedules.noam(20, warmup_steps=30, factor=1.7),
        1.0,
        lambda lr_scheduler, optimizer: lr_scheduler.LambdaLR(
            optimizer, lambda count: 1.7 * 20**-0.5 * min((count + 1) ** -0.5, (count + 1) * 30**-1.5)
        ),
        90,
    ),
}


@needs_torch
@pytest.mark.parametrize("name", TWINS)
def test_every_rate_is_that_of_pytorchs_scheduler(name):
    schedule, rate, scheduler_of, steps = TWINS[name]
    with jax.enable_x64(True):
        actual = rates(schedule, steps)
    np.testing.assert_allclose(actual, torchs_rates(rate, scheduler_of, steps), rtol=1e-12)


IN_FLOAT32 = {
    **{name: (schedule, steps) for name, (schedule, _, _, steps) in TWINS.items()},
    "cosine to 0": (schedules.cosine(0.3, total_steps=700), 1500),
    "warmup_cosine to 0": (schedules.warmup_cosine(0.3, warmup_steps=40, total_steps=700), 800),
}


@pytest.mark.parametrize("name", IN_FLOAT32)
def test_a_rate_in_float32_is_right_to_a_few_roundings_also_near_the_end(name):
    schedule, steps = IN_FLOAT32[name]
    with jax.enable_x64(True):
        exact = rates(schedule, steps)
    rounded = rates(schedule, steps)
    assert rounded.dtype == np.float32
    np.testing.assert_allclose(rounded, exact, rtol=5 * 2.0**-23)


def test_optaxs_line_is_the_same_line():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):  # optax needs it
        ours = rates(schedules.linear(0.3, total_steps=70, start_factor=0.2, end_factor=0.9), 90)
        theirs = rates(optax.linear_schedule(0.2 * 0.3, 0.9 * 0.3, 70), 90)
    np.testing.assert_allclose(ours, theirs, rtol=1e-14)


def test_optaxs_cosine_is_the_same_down_and_stays_there():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):  # optax needs it
        ours = rates(schedules.cosine(0.3, total_steps=70, final=0.02), 141)
        theirs = rates(optax.cosine_decay_schedule(0.3, 70, alpha=0.02 / 0.3), 141)
    np.testing.assert_allclose(ours[:71], theirs[:71], rtol=1e-13)
    np.testing.assert_allclose(theirs[71:], 0.02, rtol=1e-13)
    np.testing.assert_allclose([ours[105], ours[140]], [(0.3 + 0.02) / 2, 0.3], rtol=1e-13)


def test_optaxs_warmup_and_cosine_is_one_update_late():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):  # optax needs it
        ours = rates(schedules.warmup_cosine(0.3, warmup_steps=40, total_steps=300, final=0.02), 300)
        theirs = rates(optax.warmup_cosine_decay_schedule(0.0, 0.3, 40, 300, 0.02), 301)
    np.testing.assert_allclose(ours, theirs[1:], rtol=1e-12)
    assert (theirs[0], ours[0]) == (0.0, 0.3 / 40)
    assert theirs[299] > 0.02


def test_the_annotated_transformers_rate_is_one_update_late_from_the_second():
    def rate(step: int) -> float:  # as it is written there
        step = max(step, 1)
        return 1.7 * (20**-0.5 * min(step**-0.5, step * 30**-1.5))

    with jax.enable_x64(True):
        ours = rates(schedules.noam(20, warmup_steps=30, factor=1.7), 90)
    theirs = np.asarray([rate(count) for count in range(90)])
    np.testing.assert_allclose(theirs[1:], ours[:-1], rtol=1e-14)
    np.testing.assert_allclose([theirs[0] / ours[0], theirs[1] / ours[1]], [1.0, 0.5], rtol=1e-14)


def test_a_warmup_from_nothing_is_allowed():
    np.testing.assert_allclose(rates(schedules.linear(0.3, total_steps=3, start_factor=0), 5), [0, 0.1, 0.2, 0.3, 0.3])


def test_the_schedules_are_names_of_the_optimizers_module_too():
    for name in ("Schedule", "constant", "linear", "cosine", "warmup_cosine", "noam"):
        assert getattr(optimizers, name) is getattr(schedules, name)


def test_noam_is_the_equation_of_the_paper_counted_from_one():
    schedule = schedules.noam(512, warmup_steps=4000)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        for step in (1, 2, 3999, 4000, 4001, 100_000):
            expected = 512**-0.5 * min(step**-0.5, step * 4000**-1.5)
            np.testing.assert_allclose(schedule(jnp.asarray(step - 1)), expected, rtol=1e-14, err_msg=str(step))
    assert schedule(jnp.asarray(0)) > 0


def test_warmup_cosine_rises_to_its_peak_falls_to_its_floor_and_stays():
    schedule = schedules.warmup_cosine(0.3, warmup_steps=4, total_steps=10, final=0.03)
    values = [float(schedule(jnp.asarray(count))) for count in range(13)]
    np.testing.assert_allclose(values[:4], [0.075, 0.15, 0.225, 0.3], rtol=1e-6)
    np.testing.assert_allclose(values[6], (0.3 + 0.03) / 2, rtol=1e-6)  # step 7, half of the way down
    np.testing.assert_allclose(values[9:], 0.03, rtol=1e-6)
    assert np.all(np.diff(values[3:10]) < 0)


def test_a_schedule_without_warmup_starts_just_below_its_peak():
    schedule = schedules.warmup_cosine(0.3, warmup_steps=0, total_steps=10)
    np.testing.assert_allclose(schedule(jnp.asarray(0)), 0.15 * (1 + math.cos(math.pi / 10)), rtol=1e-6)


def test_schedules_keep_float64_where_it_is_switched_on():
    with jax.enable_x64(True):
        for schedule in (
            schedules.constant(0.1),
            schedules.noam(7, warmup_steps=3),
            schedules.linear(0.1, total_steps=3),
            schedules.cosine(0.1, total_steps=3),
            schedules.warmup_cosine(0.1, warmup_steps=3, total_steps=5),
        ):
            assert schedule(jnp.asarray(1)).dtype == jnp.float64


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: schedules.constant(-1.0), "learning_rate must be at least 0, got -1"),
        (lambda: schedules.constant(float("nan")), "learning_rate"),
        (lambda: schedules.constant(math.inf), "learning_rate"),
        (lambda: schedules.warmup_cosine(0.1, warmup_steps=5, total_steps=5), "total_steps must be at least 6, got 5"),
        (lambda: schedules.noam(0, warmup_steps=3), "d_model"),
        (lambda: schedules.noam(512, warmup_steps=0), "warmup_steps"),
        (lambda: schedules.linear(0.1, total_steps=0), "total_steps must be at least 1, got 0"),
        (
            lambda: schedules.linear(0.1, total_steps=3, start_factor=1.5),
            "start_factor must be at least 0 and at most 1",
        ),
        (lambda: schedules.cosine(0.1, total_steps=3, final=-0.1), "final must be at least 0, got -0.1"),
    ],
)
def test_numbers_out_of_range_are_refused_by_name(build, words):
    with pytest.raises(ValueError, match=words):
        build()
