"""What a model must beat: the loss of knowing how often each token occurs, and nothing else."""

import numpy as np
from numpy.typing import ArrayLike


def unigram_loss(train_ids: ArrayLike, validation_ids: ArrayLike, *, vocab_size: int) -> float:
    """Returns the cross entropy, in nats per token, of validation labels under the frequencies of the training ids.

    The distribution has one added to every count: p(v) = (count of v + 1) / (number of training ids + vocab_size), so that
    a token that only validation has keeps a finite loss. The labels are all validation ids but the first, the same ones
    that `validation_batches` gives a model, which makes the two losses comparable.

    Args:
      train_ids: integers in [0, vocab_size), shape (number of tokens,).
      validation_ids: likewise; at least two.

    Raises:
      ValueError: ids out of range, or too few for a label.
    """
    train, validation = np.asarray(train_ids), np.asarray(validation_ids)
    if len(validation) < 2:
        raise ValueError(f"a validation label needs a token before it, so at least 2 tokens, got {len(validation)}")
    for name, ids in (("train_ids", train), ("validation_ids", validation)):
        if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
            raise ValueError(f"{name} must be in [0, {vocab_size}), got [{ids.min()}, {ids.max()}]; check vocab_size")
    counts = np.bincount(train, minlength=vocab_size) + 1.0
    return float(np.log(counts.sum()) - np.log(counts[validation[1:]]).mean())
