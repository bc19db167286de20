"""What the docstrings of optimizers.py say about optax's own functions, measured."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from flax_transformer import optimizers

START = np.random.default_rng(0).standard_normal((5, 7))
GRADIENT = np.random.default_rng(1).standard_normal((5, 7))


def updates_of(optimizer: optax.GradientTransformation, steps: int, gradient: np.ndarray = GRADIENT) -> np.ndarray:
    """Every update of START under a steady gradient, in the float type that JAX has at the moment: (steps, 5, 7)."""
    gradients = jnp.asarray(gradient, float)

    @jax.jit
    def run(parameters):
        def step(carry, _):
            parameters, state = carry
            updates, state = optimizer.update(gradients, state, parameters)
            return (parameters + updates, state), updates

        return jax.lax.scan(step, (parameters, optimizer.init(parameters)), length=steps)[1]

    with jax.numpy_dtype_promotion("standard"):  # optax needs it
        return np.asarray(run(jnp.asarray(START, float)), np.float64)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (lambda: optimizers.sgd(0.01), lambda: optax.sgd(0.01)),
        (lambda: optimizers.momentum(0.01, momentum=0.9), lambda: optax.sgd(0.01, momentum=0.9)),
        (
            lambda: optimizers.momentum(0.01, momentum=0.9, form="nesterov"),
            lambda: optax.sgd(0.01, momentum=0.9, nesterov=True),
        ),
        (lambda: optimizers.adam(0.01), lambda: optax.adam(0.01)),
        (
            lambda: optimizers.adamw(0.01, weight_decay=1e-4, decay_mask=optimizers.everything),
            lambda: optax.adamw(0.01),
        ),
    ],
    ids=["sgd", "momentum", "nesterov", "adam", "adamw"],
)
@pytest.mark.usefixtures("float64")
def test_with_the_same_numbers_in_float64_optax_differs_by_rounding_alone(ours, theirs):
    np.testing.assert_allclose(updates_of(ours(), 20), updates_of(theirs(), 20), rtol=1e-12)


def test_the_first_updates_of_optaxs_adam_in_float32_are_too_small_by_7e_6_and_1e_5():
    exact = -GRADIENT.astype(np.float32).astype(np.float64)
    exact = exact / (np.abs(exact) + 1e-8)  # of a steady gradient, at a learning rate of 1
    ours, theirs = (updates_of(build(1.0), 2) / exact - 1 for build in (optimizers.adam, optax.adam))
    np.testing.assert_allclose(theirs[0].mean(), -6.6e-6, atol=2e-7)
    np.testing.assert_allclose(theirs[1].mean(), -1.0e-5, atol=2e-7)
    assert np.abs(ours).max() < 5e-7


@pytest.mark.usefixtures("float64")
def test_a_weight_without_a_gradient_shrinks_by_one_percent_with_pytorchs_decay_and_a_hundredth_of_it_with_optaxs():
    nothing = np.zeros_like(GRADIENT)
    for optimizer, expected in ((optimizers.adamw(1e-3), 1.0e-2), (optax.adamw(1e-3), 1.0e-4)):
        shrunk = -updates_of(optimizer, 1000, nothing).sum(axis=0) / START
        np.testing.assert_allclose(shrunk, expected, rtol=6e-3)


@pytest.mark.usefixtures("float64")
def test_a_momentum_that_is_not_dampened_moves_further():
    dampened = updates_of(optimizers.momentum(0.01, momentum=0.9, dampening=0.1), 300)
    free = updates_of(optax.sgd(0.01, momentum=0.9), 300)
    further = free / dampened - 1
    np.testing.assert_allclose(further[0], 0.0, atol=1e-14)
    np.testing.assert_allclose(further[1], 0.0556, atol=1e-4)
    np.testing.assert_allclose(further[-1], 0.111, atol=1e-3)


@pytest.mark.usefixtures("float64")
def test_decay_chained_after_optaxs_sgd_is_added_uphill_and_without_the_learning_rate():
    chained = optax.chain(optax.sgd(0.01), optax.add_decayed_weights(0.1))
    np.testing.assert_allclose(updates_of(chained, 1)[0], -0.01 * GRADIENT + 0.1 * START, rtol=1e-12)
    np.testing.assert_allclose(
        updates_of(optimizers.sgd(0.01, weight_decay=0.1), 1)[0], -0.01 * (GRADIENT + 0.1 * START), rtol=1e-12
    )


@pytest.mark.parametrize(("norm", "share"), [(2.0, 5e-7), (0.02, 5e-5)])
@pytest.mark.usefixtures("float64")
def test_optaxs_clipping_leaves_a_gradient_larger_by_the_eps_over_its_norm(norm, share):
    gradient = GRADIENT * norm / np.linalg.norm(GRADIENT)
    ours, theirs = (
        updates_of(clip(norm / 2), 1, gradient) for clip in (optimizers.clip_by_global_norm, optax.clip_by_global_norm)
    )
    np.testing.assert_allclose(theirs / ours - 1, share, rtol=1e-6)
