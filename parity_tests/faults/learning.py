"""Mistakes in what a model is trained with: the loss, the optimizer, the schedule, the batches."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from flax_transformer import optimizers
from parity_tests.faults import DECODER_ONLY, ENCODER_DECODER, PAIRS, LossFault, OptimizerFault, TrainingFault

# Losses, written out in NumPy.


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def targets(case, logits, labels, smoothing) -> np.ndarray:
    """The smoothed distribution, over all classes."""
    exact = np.eye(logits.shape[-1])[labels]
    return (1 - smoothing) * exact + smoothing / logits.shape[-1]


def losses(logits, target) -> np.ndarray:
    return -(target * log_softmax(logits)).sum(-1)


def counted(case, labels) -> np.ndarray:
    return np.ones(labels.shape, bool) if case.padding_id is None else labels != case.padding_id


def right_loss(case, logits, labels) -> float:
    """What the reference computes; the control."""
    return losses(logits, targets(case, logits, labels, case.label_smoothing))[counted(case, labels)].mean()


def over_wrong_classes(case, logits, labels) -> float:
    exact, classes = np.eye(logits.shape[-1])[labels], logits.shape[-1]
    e = case.label_smoothing
    target = (1 - e) * exact + e / (classes - 1) * (1 - exact)
    return losses(logits, target)[counted(case, labels)].mean()


def over_wrong_classes_but_padding(case, logits, labels) -> float:
    exact, classes = np.eye(logits.shape[-1])[labels], logits.shape[-1]
    spread = (1 - exact) * (np.arange(classes) != case.padding_id)
    e = case.label_smoothing
    return losses(logits, (1 - e) * exact + e / (classes - 2) * spread)[counted(case, labels)].mean()


def not_smoothed(case, logits, labels) -> float:
    return losses(logits, targets(case, logits, labels, 0.0))[counted(case, labels)].mean()


def padding_counted(case, logits, labels) -> float:
    return losses(logits, targets(case, logits, labels, case.label_smoothing)).mean()


def padding_in_the_denominator(case, logits, labels) -> float:
    used = counted(case, labels)
    return (losses(logits, targets(case, logits, labels, case.label_smoothing)) * used).sum() / used.size


def mean_of_sentence_means(case, logits, labels) -> float:
    every, used = losses(logits, targets(case, logits, labels, case.label_smoothing)), counted(case, labels)
    return float(np.mean([row[kept].mean() for row, kept in zip(every, used, strict=True) if kept.any()]))


def summed(case, logits, labels) -> float:
    return losses(logits, targets(case, logits, labels, case.label_smoothing))[counted(case, labels)].sum()


def labels_shifted(case, logits, labels) -> float:
    return right_loss(case, logits, np.roll(labels, -1, axis=-1))


def of_probabilities(case, logits, labels) -> float:
    return right_loss(case, np.exp(log_softmax(logits)), labels)


def in_bits(case, logits, labels) -> float:
    return right_loss(case, logits, labels) / np.log(2)


EVERYWHERE = (DECODER_ONLY, *PAIRS)

LOSSES = (
    LossFault(name="smoothing over the wrong classes", cases=PAIRS, loss=over_wrong_classes),
    LossFault(name="smoothing over all but label and padding", cases=PAIRS, loss=over_wrong_classes_but_padding),
    LossFault(name="no smoothing", cases=PAIRS, loss=not_smoothed),
    LossFault(name="padding counted in the loss", cases=PAIRS, loss=padding_counted),
    LossFault(name="padding counted in the denominator", cases=PAIRS, loss=padding_in_the_denominator),
    LossFault(name="mean of the sentences' means", cases=PAIRS, loss=mean_of_sentence_means),
    LossFault(name="sum for mean", cases=EVERYWHERE, loss=summed),
    LossFault(name="labels shifted by one", cases=EVERYWHERE, loss=labels_shifted),
    LossFault(name="loss of probabilities for logits", cases=EVERYWHERE, loss=of_probabilities),
    LossFault(name="loss in bits", cases=(DECODER_ONLY, ENCODER_DECODER), loss=in_bits),
)

# Optimizers. The right one clips at 0.5, has b1 0.9, b2 0.98, eps 1e-9, decay 0.3 on matrices, and Noam's schedule.

NOAM = optimizers.noam(20, warmup_steps=40)
CLIP = optimizers.clip_by_global_norm(0.5)
DECAY = optax.add_decayed_weights(0.3, mask=optimizers.decays)
RATE = optax.scale_by_learning_rate(NOAM)


def chained(*parts: optax.GradientTransformation) -> optax.GradientTransformation:
    return optimizers.with_standard_promotion(optax.chain(*parts))


def adam(**options) -> optax.GradientTransformation:
    return optax.scale_by_adam(**{"b1": 0.9, "b2": 0.98, "eps": 1e-9, **options})


def right_but(**options) -> optax.GradientTransformation:
    recipe = dict(b1=0.9, b2=0.98, eps=1e-9, weight_decay=0.3, max_norm=0.5)
    return optimizers.adamw(**{"learning_rate": NOAM, **recipe, **options})


def without_bias_correction() -> optax.GradientTransformation:
    right = adam()

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        _, state = right.update(updates, state, params)
        return jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + 1e-9), state.mu, state.nu), state

    return optax.GradientTransformation(right.init, update)


def clip_each(limit: float) -> optax.GradientTransformation:
    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        norms = jax.tree.map(lambda g: jnp.sqrt(jnp.square(g).sum()), updates)
        return jax.tree.map(lambda g, n: g * jnp.minimum(1.0, limit / (n + 1e-6)), updates, norms), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


OPTIMIZERS = (
    OptimizerFault(
        name="Adam's eps under the root", optimizer=chained(CLIP, adam(eps=0.0, eps_root=1e-9), DECAY, RATE)
    ),
    OptimizerFault(name="Adam's eps of 1e-8 for 1e-9", optimizer=right_but(eps=1e-8)),
    OptimizerFault(name="no bias correction", optimizer=chained(CLIP, without_bias_correction(), DECAY, RATE)),
    OptimizerFault(name="b1 of 0.95 for 0.9", optimizer=right_but(b1=0.95)),
    OptimizerFault(name="b2 of 0.999 for 0.98", optimizer=right_but(b2=0.999)),
    OptimizerFault(name="L2 for decoupled decay", optimizer=chained(CLIP, DECAY, adam(), RATE)),
    OptimizerFault(name="decay on biases and norms", optimizer=right_but(decay_mask=optimizers.everything)),
    OptimizerFault(name="no decay", optimizer=right_but(weight_decay=0.0)),
    OptimizerFault(
        name="decay not multiplied by the learning rate",
        optimizer=chained(CLIP, adam(), RATE, optax.add_decayed_weights(-0.3, mask=optimizers.decays)),
    ),
    OptimizerFault(name="clipping without eps", optimizer=chained(optax.clip_by_global_norm(0.5), adam(), DECAY, RATE)),
    OptimizerFault(name="every tensor clipped by itself", optimizer=chained(clip_each(0.5), adam(), DECAY, RATE)),
    OptimizerFault(name="no clipping", optimizer=right_but(max_norm=None)),
    OptimizerFault(name="clipping after Adam", optimizer=chained(adam(), CLIP, DECAY, RATE)),
    OptimizerFault(
        name="Noam that begins at zero",
        optimizer=right_but(learning_rate=lambda count: jnp.where(count == 0, 0.0, NOAM(jnp.maximum(count - 1, 0)))),
    ),
    OptimizerFault(name="schedule one step ahead", optimizer=right_but(learning_rate=lambda count: NOAM(count + 1))),
    OptimizerFault(
        name="Noam without the width", optimizer=right_but(learning_rate=lambda count: NOAM(count) * 20**0.5)
    ),
)


def forgets_at(step: int) -> optax.GradientTransformation:
    """The right optimizer, which loses its state once, as when a run is resumed from weights alone."""
    inner = right_but()

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        assert params is not None
        fresh = inner.init(params)
        count = optax.tree.get(state, "ScaleByAdamState").count
        state = jax.tree.map(lambda kept, new: jnp.where(count == step, new, kept), state, fresh)
        return inner.update(updates, state, params)

    return optax.GradientTransformation(inner.init, update)


TRAINING = (
    TrainingFault(
        name="Noam one update late from the second on",
        options={"optimizer": right_but(learning_rate=lambda count: NOAM(jnp.maximum(count - 1, 0)))},
    ),
    TrainingFault(name="the first batch at every step", options={"batches": ()}),
    TrainingFault(name="moments lost half-way", options={"optimizer": forgets_at(10)}),
)
