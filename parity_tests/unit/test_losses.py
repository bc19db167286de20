"""Cross entropy against its definition, written out in numpy, and against PyTorch where it is installed."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from flax_transformer.losses import LossSums, cross_entropy


@pytest.fixture
def unchecked_annotations() -> Iterator[None]:
    """As users have it: the tests' run-time check of annotations would come before our own error."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def random_case(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits (3, 5, 7), labels (3, 5), weights (3, 5) with some zeros."""
    rng = np.random.default_rng(seed)
    logits = 3 * rng.standard_normal((3, 5, 7))
    labels = rng.integers(0, 7, (3, 5))
    weights = rng.random((3, 5)) * (rng.random((3, 5)) > 0.3)
    return logits, labels, weights


def defined_loss(logits: np.ndarray, labels: np.ndarray, weights: np.ndarray, smoothing: float) -> float:
    log_probabilities = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    target = (1 - smoothing) * np.eye(logits.shape[-1])[labels] + smoothing / logits.shape[-1]
    return float((weights * -(target * log_probabilities).sum(-1)).sum())


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_the_loss_is_the_cross_entropy_with_the_smoothed_distribution(seed, smoothing):
    logits, labels, weights = random_case(seed)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        sums = cross_entropy(
            jnp.asarray(logits), jnp.asarray(labels), weights=jnp.asarray(weights), label_smoothing=smoothing
        )
    np.testing.assert_allclose(sums.loss, defined_loss(logits, labels, weights, smoothing), rtol=1e-13)
    np.testing.assert_allclose(sums.weight, weights.sum(), rtol=1e-13)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_and_gradient_are_those_of_pytorch(smoothing):
    torch = pytest.importorskip("torch")
    logits, labels, _ = random_case(11)
    ignored = np.random.default_rng(12).random(labels.shape) < 0.3
    leaf = torch.tensor(logits, requires_grad=True)
    marked = torch.tensor(np.where(ignored, -100, labels))
    expected = torch.nn.functional.cross_entropy(leaf.reshape(-1, 7), marked.reshape(-1), label_smoothing=smoothing)
    expected.backward()

    def mean(values):
        kept = jnp.asarray(~ignored)
        return cross_entropy(values, jnp.asarray(labels), weights=kept, label_smoothing=smoothing).mean

    with jax.enable_x64(True):
        loss, gradient = jax.value_and_grad(mean)(jnp.asarray(logits))
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-13)
    np.testing.assert_allclose(gradient, leaf.grad.numpy(), rtol=0, atol=1e-14)


def test_sums_of_unequal_parts_add_up_to_the_whole_and_their_means_do_not():
    logits, labels, weights = (jnp.asarray(part) for part in random_case(5))
    whole = cross_entropy(logits, labels, weights=weights)
    parts = [cross_entropy(logits[rows], labels[rows], weights=weights[rows]) for rows in (slice(0, 1), slice(1, 3))]
    joined = LossSums(parts[0].loss + parts[1].loss, parts[0].weight + parts[1].weight)
    np.testing.assert_allclose(joined.mean, whole.mean, rtol=1e-6)
    assert abs(float(parts[0].mean + parts[1].mean) / 2 - float(whole.mean)) > 1e-3


def test_bfloat16_logits_are_summed_in_float32():
    logits, labels, _ = random_case(6)
    rounded = jnp.asarray(logits, jnp.bfloat16)
    sums = cross_entropy(rounded, jnp.asarray(labels))
    assert sums.loss.dtype == sums.weight.dtype == jnp.float32
    exact = defined_loss(np.asarray(rounded, np.float64), labels, np.ones(labels.shape), 0.0)
    np.testing.assert_allclose(sums.loss, exact, rtol=1e-6)


def test_huge_logits_do_not_overflow():
    logits, labels, _ = random_case(7)
    shifted = cross_entropy(jnp.asarray(logits + 1e4, jnp.float32), jnp.asarray(labels))
    np.testing.assert_allclose(shifted.loss, cross_entropy(jnp.asarray(logits), jnp.asarray(labels)).loss, rtol=1e-3)


@pytest.mark.parametrize("stranger", [-100, -1, 7, 1000])
def test_a_label_outside_the_vocabulary_is_nan_with_a_weight_and_nothing_without(stranger):
    logits, labels, _ = random_case(8)
    changed = np.array(labels)
    changed[1, 2] = stranger
    without = np.arange(15).reshape(3, 5) != 7  # all but [1, 2]

    def loss(values, weights):
        return cross_entropy(values, jnp.asarray(changed), weights=weights, label_smoothing=0.1).loss

    assert np.isnan(loss(jnp.asarray(logits), None))
    ignored, gradient = jax.value_and_grad(loss)(jnp.asarray(logits), jnp.asarray(without))
    np.testing.assert_allclose(ignored, defined_loss(logits, labels, without, 0.1), rtol=1e-6)
    assert np.all(np.isfinite(gradient))
    assert not np.any(gradient[1, 2])


def test_a_batch_of_nothing_but_padding_has_loss_and_gradient_zero():
    logits, labels, _ = random_case(9)

    def mean(values):
        return cross_entropy(values, jnp.asarray(labels), weights=jnp.zeros(labels.shape)).mean

    loss, gradient = jax.value_and_grad(mean)(jnp.asarray(logits))
    assert loss == 0
    assert not np.any(gradient)


def test_an_impossible_class_of_minus_infinity_does_not_spoil_an_unsmoothed_loss():
    logits, labels, weights = random_case(10)
    impossible = np.where(np.eye(7, dtype=bool)[(labels + 1) % 7], -np.inf, logits)
    sums = cross_entropy(jnp.asarray(impossible), jnp.asarray(labels), weights=jnp.asarray(weights))
    with np.errstate(divide="ignore"):
        log_probabilities = impossible - np.log(np.exp(impossible).sum(-1, keepdims=True))
    picked = np.take_along_axis(log_probabilities, labels[..., None], -1)[..., 0]
    np.testing.assert_allclose(sums.loss, -(weights * picked).sum(), rtol=1e-6)


@pytest.mark.parametrize(
    ("labels", "weights", "smoothing", "words"),
    [
        ((3, 7), None, 0.0, r"logits \(3, 5, 7\), labels \(3, 7\)"),
        ((3, 5), (3, 7), 0.0, r"weights \(3, 7\), labels \(3, 5\)"),
        ((3, 5), None, -0.1, "label_smoothing must be between 0 and 1, got -0.1"),
        ((3, 5), None, float("nan"), "label_smoothing"),
    ],
)
@pytest.mark.usefixtures("unchecked_annotations")
def test_shapes_and_numbers_that_do_not_fit_are_refused_by_name(labels, weights, smoothing, words):
    with pytest.raises(ValueError, match=words):
        cross_entropy(
            jnp.zeros((3, 5, 7)),
            jnp.zeros(labels, jnp.int32),
            weights=None if weights is None else jnp.zeros(weights),
            label_smoothing=smoothing,
        )
