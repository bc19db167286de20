"""Cross entropy against its definition, written out in numpy, and against PyTorch where it is installed."""

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from flax_transformer.losses import LossSums, cross_entropy, smoothed_entropy
from flax_transformer.parity import tolerances
from parity_tests.references import needs_torch


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


PAD = 2  # as the Annotated Transformer has it
OPTIONS = ["all_classes", "wrong_classes", "wrong_classes_but_padding"]


def peers_loss(kind: str, scores: Any, labels: Any, smoothing: float) -> Any:
    """The summed loss as a peer writes it, in PyTorch; labels of PAD do not count."""
    import torch

    scores, labels = scores.reshape(-1, scores.shape[-1]), labels.reshape(-1)
    if kind == "all_classes":
        return torch.nn.functional.cross_entropy(
            scores, labels, ignore_index=PAD, label_smoothing=smoothing, reduction="sum"
        )
    log_probabilities, V = torch.log_softmax(scores, -1), scores.shape[-1]  # noqa: N806  (axis letters)
    ignored = labels == PAD
    if kind == "wrong_classes":  # fairseq since 2021: a share for all classes, less one for the label
        share = smoothing / (V - 1)
        own = -log_probabilities.gather(1, labels[:, None])[:, 0].masked_fill(ignored, 0.0)
        every = -log_probabilities.sum(-1).masked_fill(ignored, 0.0)
        return ((1 - smoothing - share) * own + share * every).sum()
    target = torch.full_like(log_probabilities, smoothing / (V - 2))  # the Annotated Transformer and OpenNMT-py
    target.scatter_(1, labels[:, None], 1 - smoothing)
    target[:, PAD] = 0.0
    target[ignored] = 0.0
    return torch.nn.KLDivLoss(reduction="sum")(log_probabilities, target)


def torch_loss_and_gradient(kind: str, logits: np.ndarray, labels: np.ndarray) -> tuple[float, np.ndarray]:
    import torch

    leaf = torch.tensor(logits, requires_grad=True)
    loss = peers_loss(kind, leaf, torch.tensor(labels), 0.1)
    loss.backward()
    assert leaf.grad is not None
    return loss.item(), leaf.grad.numpy()


@functools.partial(jax.jit, static_argnames="kind")
def compiled(logits, labels, kind):
    def loss(values):
        return cross_entropy(values, labels, label_smoothing=0.1, smoothing_over=kind, ignore_index=PAD).loss

    return jax.value_and_grad(loss)(logits)


def loss_and_gradient(kind: str, logits: np.ndarray, labels: np.ndarray) -> tuple[float, np.ndarray]:
    value, gradient = compiled(jnp.asarray(logits), jnp.asarray(labels, jnp.int32), kind)
    return float(value), np.asarray(gradient)


@needs_torch
@pytest.mark.parametrize("kind", OPTIONS)
def test_loss_and_gradient_are_those_of_pytorch_and_of_peers_in_float64(kind):
    logits, labels, _ = random_case(11)
    assert np.any(labels == PAD)
    expected, expected_gradient = torch_loss_and_gradient(kind, logits, labels)
    with jax.enable_x64(True):
        actual, gradient = loss_and_gradient(kind, logits, labels)
    if kind == "wrong_classes_but_padding":  # the peers' is the divergence
        actual -= np.sum(labels != PAD) * smoothed_entropy(7, label_smoothing=0.1, smoothing_over=kind)
    assert abs(actual - expected) <= tolerances.MEANING * abs(expected)
    assert np.abs(gradient - expected_gradient).max() <= tolerances.MEANING * np.abs(expected_gradient).max()


@needs_torch
@pytest.mark.parametrize("kind", OPTIONS)
def test_gradients_in_float32_are_as_exact_as_pytorchs(kind):
    errors: dict[str, list[np.ndarray]] = {"ours": [], "theirs": []}
    largest = 0.0
    for seed in range(tolerances.POOLED_SEEDS):
        logits, labels, _ = random_case(seed)
        rounded = logits.astype(np.float32)
        _, truth = torch_loss_and_gradient(kind, rounded.astype(np.float64), labels)
        errors["ours"].append(loss_and_gradient(kind, rounded, labels)[1] - truth)
        errors["theirs"].append(torch_loss_and_gradient(kind, rounded, labels)[1] - truth)
        largest = max(largest, float(np.abs(truth).max()))
    ours, theirs = (float(np.sqrt(np.mean(np.square(errors[side])))) for side in ("ours", "theirs"))
    assert ours <= tolerances.POOLED.allowed(reference_error=theirs, largest=largest, dtype="float32")


@needs_torch
def test_the_mean_is_pytorchs_whose_ignored_labels_are_ours_or_have_weight_zero():
    import torch

    logits, labels, _ = random_case(13)
    ignored = np.random.default_rng(12).random(labels.shape) < 0.3
    marked = np.where(ignored, -100, labels)
    expected = torch.nn.functional.cross_entropy(
        torch.tensor(logits).reshape(-1, 7), torch.tensor(marked).reshape(-1), label_smoothing=0.1
    )
    with jax.enable_x64(True):
        values, kept = jnp.asarray(logits), jnp.asarray(~ignored)
        by_label = cross_entropy(values, jnp.asarray(marked), label_smoothing=0.1, ignore_index=-100)
        by_weight = cross_entropy(values, jnp.asarray(marked), weights=kept, label_smoothing=0.1)
        mean = float(by_label.mean)
    np.testing.assert_allclose(mean, expected.item(), rtol=1e-13)
    np.testing.assert_array_equal(by_label, by_weight)


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("smoothing", [0.0, 0.3, 1.0])
def test_the_smoothing_goes_to_the_named_classes_and_its_entropy_is_the_least_loss(kind, smoothing):
    logits, labels, weights = random_case(14)
    classes, own = np.arange(7), labels[..., None]
    sharing = {"all_classes": 7, "wrong_classes": 6, "wrong_classes_but_padding": 5}[kind]
    shares = np.ones((3, 5, 7), bool) if kind == "all_classes" else classes != own
    shares = shares & (classes != PAD) if kind == "wrong_classes_but_padding" else shares
    target = (1 - smoothing) * (classes == own) + smoothing / sharing * shares
    used = np.where(labels == PAD, 0.0, weights)
    options: dict[str, Any] = dict(label_smoothing=smoothing, smoothing_over=kind)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        ids, kept = jnp.asarray(labels), jnp.asarray(weights)
        sums = cross_entropy(jnp.asarray(logits), ids, weights=kept, ignore_index=PAD, **options)
        log_target = jnp.asarray(np.log(np.maximum(target, 1e-300)))
        least = float(cross_entropy(log_target, ids, weights=kept, ignore_index=PAD, **options).mean)
    log_probabilities = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_allclose(sums.loss, -(used[..., None] * target * log_probabilities).sum(), rtol=1e-13)
    np.testing.assert_allclose(sums.weight, used.sum(), rtol=1e-13)
    np.testing.assert_allclose(least, smoothed_entropy(7, **options), rtol=1e-12, atol=1e-15)


def test_gradients_of_two_smoothings_differ_by_at_most_a_share():
    logits, labels, _ = random_case(15)
    with jax.enable_x64(True):
        gradients = [loss_and_gradient(kind, logits, labels)[1] for kind in OPTIONS]
    differences = [float(np.abs(one - other).max()) for one, other in itertools.pairwise(gradients)]
    np.testing.assert_allclose(differences, [0.1 / 7, 0.1 / 6], rtol=1e-12)


def test_a_padding_class_of_minus_infinity_does_not_spoil_a_smoothing_that_leaves_it_out():
    logits, labels, _ = random_case(16)
    logits[..., PAD] = -np.inf
    value, gradient = loss_and_gradient("wrong_classes_but_padding", logits, labels)
    assert np.isfinite(value)
    assert np.all(np.isfinite(gradient))


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


@pytest.mark.parametrize(
    ("classes", "options", "words"),
    [
        (7, dict(smoothing_over="some"), "smoothing_over must be one of all_classes, wrong_classes, .*'some'"),
        (7, dict(smoothing_over="wrong_classes_but_padding"), "padding as ignore_index, .* below 7, got None"),
        (7, dict(smoothing_over="wrong_classes_but_padding", ignore_index=-100), "got -100"),
        (1, dict(smoothing_over="wrong_classes"), "more than 1 classes, got 1"),
        (2, dict(smoothing_over="wrong_classes_but_padding", ignore_index=0), "more than 2 classes, got 2"),
    ],
)
@pytest.mark.usefixtures("unchecked_annotations")
def test_a_smoothing_that_has_no_classes_is_refused_by_name(classes, options, words):
    with pytest.raises(ValueError, match=words):
        cross_entropy(jnp.zeros((3, classes)), jnp.zeros(3, jnp.int32), label_smoothing=0.1, **options)
