"""Optimizers against their formulas in numpy; test_optimizers_against_torch.py has them beside PyTorch's."""

import math
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
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


def test_momentum_follows_its_formula_and_does_not_dampen_its_first_step():
    parameters, gradients = random_tree(2), [random_tree(seed) for seed in range(3, 7)]
    _, steps = run(optimizers.momentum(0.2, momentum=0.7, dampening=0.4), parameters, gradients)
    for name in SHAPES:
        buffer = gradients[0][name]
        for gradient, updates in zip(gradients, steps, strict=True):
            buffer = buffer if gradient is gradients[0] else 0.7 * buffer + 0.6 * gradient[name]
            np.testing.assert_allclose(updates[name], -0.2 * buffer, rtol=1e-12, err_msg=name)


def test_adam_without_memory_divides_each_gradient_by_its_size():
    gradients = [random_tree(13), random_tree(14)]
    _, steps = run(optimizers.adam(1.0, b1=0.0, b2=0.0, eps=0.5), random_tree(15), gradients)
    for gradient, updates in zip(gradients, steps, strict=True):
        for name, g in gradient.items():
            np.testing.assert_allclose(updates[name], -g / (np.abs(g) + 0.5), rtol=1e-12, err_msg=name)


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_the_l2_penalty_is_added_after_clipping_and_before_the_moments(name):
    parameters, gradients = random_tree(7), [random_tree(8, scale=9.0)]
    build = getattr(optimizers, name)
    _, (actual,) = run(build(0.1, weight_decay=0.3, max_norm=2.0), parameters, gradients)
    _, (clipped,) = run(optimizers.clip_by_global_norm(2.0), parameters, gradients)
    penalised = {key: clipped[key] + 0.3 * parameters[key] for key in SHAPES}
    _, (expected,) = run(build(0.1), parameters, [penalised])
    for key in SHAPES:
        np.testing.assert_allclose(actual[key], expected[key], rtol=1e-12, err_msg=key)


@pytest.mark.parametrize(
    ("build", "moments"),
    [
        (lambda: optimizers.sgd(0.1), []),
        (lambda: optimizers.momentum(0.1, momentum=0.9), ["trace"]),
        (lambda: optimizers.momentum(0.1, momentum=0.9, dampening=0.2, max_norm=1.0), ["trace"]),
        (lambda: optimizers.adam(0.1, weight_decay=0.1), ["mu", "nu"]),
        (lambda: optimizers.adamw(0.1, max_norm=1.0), ["mu", "nu"]),
    ],
)
def test_pytorchs_moments_are_in_the_state_under_optaxs_names(build, moments):
    state = build().init(jax.tree.map(jnp.asarray, random_tree(9)))
    for kind in ("mu", "nu", "trace"):
        found = optax.tree.get_all_with_path(state, kind)
        assert len(found) == (kind in moments), kind
        for _, moment in found:
            assert jax.tree.map(jnp.shape, moment) == SHAPES


def test_a_number_is_a_constant_schedule():
    parameters, gradients = random_tree(10), [random_tree(11)]
    _, (number,) = run(optimizers.adam(0.03), parameters, gradients)
    _, (schedule,) = run(optimizers.adam(optimizers.constant(0.03)), parameters, gradients)
    for name in SHAPES:
        np.testing.assert_array_equal(number[name], schedule[name])


def test_bfloat16_parameters_keep_their_type_in_updates_and_moments():
    parameters = {name: jnp.asarray(value, jnp.bfloat16) for name, value in random_tree(12).items()}
    for optimizer in (
        optimizers.sgd(0.1, weight_decay=0.1, max_norm=1.0),
        optimizers.momentum(0.1, momentum=0.9, dampening=0.2),
        optimizers.adamw(0.1, max_norm=1.0),
    ):
        updates, state = jax.jit(optimizer.update)(parameters, optimizer.init(parameters), parameters)
        assert {leaf.dtype for leaf in jax.tree.leaves((updates, state)) if leaf.ndim} == {jnp.dtype(jnp.bfloat16)}


def test_clipping_bounds_the_joint_norm_and_leaves_small_gradients_alone():
    large, small = random_tree(30, scale=9.0), random_tree(31, scale=0.01)
    clip = optimizers.clip_by_global_norm(2.0, eps=0.5)
    _, (clipped, untouched) = run(clip, random_tree(32), [large, small])
    norm = math.sqrt(sum(float((g * g).sum()) for g in large.values()))
    for name in SHAPES:
        np.testing.assert_allclose(clipped[name], large[name] * 2.0 / (norm + 0.5), rtol=1e-12)
        np.testing.assert_array_equal(untouched[name], small[name])


def test_decay_spares_biases_and_norms_unless_it_is_to_shrink_everything():
    assert optimizers.decays(random_tree(0)) == {"kernel": True, "bias": False, "table": True}
    assert optimizers.everything(random_tree(0)) == {"kernel": True, "bias": True, "table": True}


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: optimizers.clip_by_global_norm(0.0), "max_norm must be above 0, got 0"),
        (lambda: optimizers.adamw(optimizers.constant(0.1), b2=1.0), "b2 must be at least 0 and below 1, got 1"),
        (lambda: optimizers.adam(0.1, eps=0.0), "eps must be above 0, got 0"),
        (lambda: optimizers.adam(-0.1), "learning_rate must be at least 0, got -0.1"),
        (lambda: optimizers.adamw(optimizers.constant(0.1), weight_decay=-0.1), "weight_decay"),
        (lambda: optimizers.sgd(0.1, weight_decay=float("nan")), "weight_decay must be at least 0, got nan"),
        (lambda: optimizers.momentum(0.1, momentum=0.0), "momentum must be above 0 and below 1, got 0"),
        (lambda: optimizers.momentum(0.1, momentum=0.9, dampening=1.1), "dampening must be at least 0 and at most 1"),
        (lambda: optimizers.momentum(0.1, momentum=0.9, dampening=0.1, form="nesterov"), "needs dampening=0, got 0.1"),
        (lambda: optimizers.momentum(0.1, momentum=0.9, form=cast(Any, "polyak")), "form must be .* got 'polyak'"),
    ],
)
def test_numbers_out_of_range_are_refused_by_name(build, words):
    with pytest.raises(ValueError, match=words):
        build()
