"""Optimizers and schedules against their formulas in numpy, and against PyTorch where it is installed."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_transformer import optimizers

SHAPES = {"kernel": (3, 5), "bias": (5,), "table": (7, 3)}


def random_tree(seed: int, scale: float = 1.0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: scale * rng.standard_normal(shape) for name, shape in SHAPES.items()}


def run(transformation, parameters, gradients) -> tuple[dict[str, np.ndarray], list[dict[str, np.ndarray]]]:
    """Parameters after, and the update of, every step; in float64 and strict promotion."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        parameters = jax.tree.map(jnp.asarray, parameters)
        state = transformation.init(parameters)
        steps = []
        for gradient in gradients:
            updates, state = jax.jit(transformation.update)(jax.tree.map(jnp.asarray, gradient), state, parameters)
            parameters = jax.tree.map(jnp.add, parameters, updates)
            steps.append(jax.tree.map(np.asarray, updates))
    return jax.tree.map(np.asarray, parameters), steps


def test_adamw_follows_its_formula_and_decays_only_where_the_mask_says():
    parameters, gradients = random_tree(0), [random_tree(seed) for seed in range(1, 6)]
    rate = optimizers.warmup_cosine(0.05, warmup_steps=2, total_steps=5, final=0.01)
    adamw = optimizers.adamw(rate, b1=0.8, b2=0.95, eps=1e-3, weight_decay=0.3)
    _, steps = run(adamw, parameters, gradients)

    moments = {name: (np.zeros(shape), np.zeros(shape)) for name, shape in SHAPES.items()}
    rates = [0.025, 0.05, *(0.01 + 0.02 * (1 + math.cos(math.pi * k / 3)) for k in (1, 2, 3))]
    for count, (gradient, updates) in enumerate(zip(gradients, steps, strict=True), start=1):
        for name, g in gradient.items():
            mean, square = moments[name]
            mean, square = 0.8 * mean + 0.2 * g, 0.95 * square + 0.05 * g * g
            moments[name] = (mean, square)
            direction = (mean / (1 - 0.8**count)) / (np.sqrt(square / (1 - 0.95**count)) + 1e-3)
            decay = 0.0 if name == "bias" else 0.3
            expected = -rates[count - 1] * (direction + decay * parameters[name])
            np.testing.assert_allclose(updates[name], expected, rtol=1e-12, err_msg=f"{name}, step {count}")
            parameters[name] = parameters[name] + expected


@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_clipped_adamw_takes_the_steps_of_pytorch(weight_decay):
    torch = pytest.importorskip("torch")
    parameters, gradients = random_tree(20), [random_tree(seed, scale=0.3 * seed) for seed in range(1, 7)]
    transformation = optimizers.adamw(
        optimizers.constant(0.01), weight_decay=weight_decay, decay_mask=lambda tree: True, max_norm=5.0
    )
    after, _ = run(transformation, parameters, gradients)

    leaves = {name: torch.nn.Parameter(torch.tensor(value)) for name, value in parameters.items()}
    optimizer = torch.optim.AdamW(leaves.values(), lr=0.01, weight_decay=weight_decay)
    for gradient in gradients:
        for name, leaf in leaves.items():
            leaf.grad = torch.tensor(gradient[name])
        torch.nn.utils.clip_grad_norm_(leaves.values(), 5.0)
        optimizer.step()
    for name, leaf in leaves.items():
        np.testing.assert_allclose(after[name], leaf.detach().numpy(), rtol=1e-12, err_msg=name)


def test_clipping_bounds_the_joint_norm_and_leaves_small_gradients_alone():
    large, small = random_tree(30, scale=9.0), random_tree(31, scale=0.01)
    clip = optimizers.clip_by_global_norm(2.0, eps=0.5)
    _, (clipped, untouched) = run(clip, random_tree(32), [large, small])
    norm = math.sqrt(sum(float((g * g).sum()) for g in large.values()))
    for name in SHAPES:
        np.testing.assert_allclose(clipped[name], large[name] * 2.0 / (norm + 0.5), rtol=1e-12)
        np.testing.assert_array_equal(untouched[name], small[name])


def test_decay_spares_biases_and_norms():
    assert optimizers.decays(random_tree(0)) == {"kernel": True, "bias": False, "table": True}


def test_noam_is_the_equation_of_the_paper_counted_from_one():
    schedule = optimizers.noam(512, warmup_steps=4000)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        for step in (1, 2, 3999, 4000, 4001, 100_000):
            expected = 512**-0.5 * min(step**-0.5, step * 4000**-1.5)
            np.testing.assert_allclose(schedule(jnp.asarray(step - 1)), expected, rtol=1e-14, err_msg=str(step))
    assert schedule(jnp.asarray(0)) > 0


def test_warmup_cosine_rises_to_its_peak_falls_to_its_floor_and_stays():
    schedule = optimizers.warmup_cosine(0.3, warmup_steps=4, total_steps=10, final=0.03)
    values = [float(schedule(jnp.asarray(count))) for count in range(13)]
    np.testing.assert_allclose(values[:4], [0.075, 0.15, 0.225, 0.3], rtol=1e-6)
    np.testing.assert_allclose(values[6], (0.3 + 0.03) / 2, rtol=1e-6)  # step 7, half of the way down
    np.testing.assert_allclose(values[9:], 0.03, rtol=1e-6)
    assert np.all(np.diff(values[3:10]) < 0)


def test_a_schedule_without_warmup_starts_just_below_its_peak():
    schedule = optimizers.warmup_cosine(0.3, warmup_steps=0, total_steps=10)
    np.testing.assert_allclose(schedule(jnp.asarray(0)), 0.15 * (1 + math.cos(math.pi / 10)), rtol=1e-6)


def test_schedules_keep_float64_where_it_is_switched_on():
    with jax.enable_x64(True):
        for schedule in (
            optimizers.constant(0.1),
            optimizers.noam(7, warmup_steps=3),
            optimizers.warmup_cosine(0.1, warmup_steps=3, total_steps=5),
        ):
            assert schedule(jnp.asarray(1)).dtype == jnp.float64


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: optimizers.constant(-1.0), "learning_rate must be at least 0, got -1"),
        (lambda: optimizers.constant(float("nan")), "learning_rate"),
        (lambda: optimizers.constant(math.inf), "learning_rate"),
        (lambda: optimizers.warmup_cosine(0.1, warmup_steps=5, total_steps=5), "total_steps must be at least 6, got 5"),
        (lambda: optimizers.noam(0, warmup_steps=3), "d_model"),
        (lambda: optimizers.noam(512, warmup_steps=0), "warmup_steps"),
        (lambda: optimizers.clip_by_global_norm(0.0), "max_norm must be above 0, got 0"),
        (lambda: optimizers.adamw(optimizers.constant(0.1), b2=1.0), "b2 must be at least 0 and below 1, got 1"),
        (lambda: optimizers.adamw(optimizers.constant(0.1), weight_decay=-0.1), "weight_decay"),
    ],
)
def test_numbers_out_of_range_are_refused_by_name(build, words):
    with pytest.raises(ValueError, match=words):
        build()
