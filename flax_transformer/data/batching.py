"""Token ids to batches. Every batch is a pure function of its arguments; nothing here keeps a state.

Axes: B batch, T position in the window (context_length of them). Ids have shape (number of tokens,).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray


class Batch(NamedTuple):
    """Windows of ids and, for every id, the one that follows it. A named tuple, because JAX takes one as a pytree.

    Attributes:
      inputs: int32 B T.
      labels: int32 B T; `labels[b, t]` follows `inputs[b, t]` in the text.
      weights: float32 B T; 1 where the label is real, 0 where it fills up the shape. A loss is the mean over the ones.
    """

    inputs: NDArray[np.int32]
    labels: NDArray[np.int32]
    weights: NDArray[np.float32]


@dataclass(frozen=True)
class Split:
    """The ids of a text, in order: those to train on, and the rest.

    Attributes:
      train: the first part.
      validation: the part after it.
    """

    train: NDArray[np.int32]
    validation: NDArray[np.int32]


def split(ids: ArrayLike, *, fraction: float = 0.9) -> Split:
    """Splits ids in two: the first `int(fraction * len(ids))` to train on, the rest for validation.

    Source: the decoder-only document, section 3.

    Raises:
      ValueError: ids are not one sequence of integers, or fraction is not between 0 and 1.
    """
    if not 0 < fraction < 1:
        raise ValueError(f"fraction, the share of ids to train on, must be between 0 and 1, got {fraction}")
    array = _sequence(ids)
    cut = int(fraction * len(array))
    return Split(array[:cut], array[cut:])


def check_split(parts: Split, *, context_length: int, source: str) -> None:
    """Checks that both parts of a text have a window of context_length + 1 ids (the inputs and the last label).

    Args:
      source: names the text in the message.

    Raises:
      ValueError: a part is too short.
    """
    train, validation = len(parts.train), len(parts.validation)
    if min(train, validation) <= context_length:
        raise ValueError(
            f"{source} is too short: its {train + validation} tokens are {train} to train on and {validation} to validate "
            f"with, and either must be at least context_length + 1 = {context_length + 1}; "
            "give a longer text or a smaller context_length"
        )


def sample_batch(ids: ArrayLike, *, batch_size: int, context_length: int, seed: int, step: int) -> Batch:
    """Draws windows that start anywhere in a text, uniformly and with replacement.

    A start is drawn from [0, len(ids) - context_length), as the document's `torch.randint` does, so that every label exists.
    The draws are another sequence than PyTorch's. They come from Philox, a counter-based generator, with the seed for its
    key and the step in its counter: a batch depends on these two numbers and not on the batches drawn before it, which is
    what lets a run be resumed. The raw 64 bit outputs are used because numpy keeps those the same across its versions, and
    reduced modulo the number n of starts, which favours some by less than one part in 2^64 / n.

    Source: the decoder-only document, section 4.

    Args:
      seed: in [0, 2^64).
      step: in [0, 2^64).

    Returns:
      A batch with B = batch_size, T = context_length and weights of 1.

    Raises:
      ValueError: ids are too few for one window, or a number is out of its range.
    """
    array = _windowed(ids, batch_size=batch_size, context_length=context_length)
    for name, number in (("seed", seed), ("step", step)):
        if not 0 <= number < 2**64:
            raise ValueError(f"{name} must be in [0, 2^64), got {number}")
    # The counter counts from its low end, so a step in its high half leaves 2^128 blocks to every step: none overlap.
    random = np.random.Philox(key=seed, counter=step << 128).random_raw(batch_size)
    starts = random % np.uint64(len(array) - context_length)
    windows = array[starts.astype(np.int64)[:, None] + np.arange(context_length + 1)]
    weights = np.ones((batch_size, context_length), np.float32)
    return Batch(np.ascontiguousarray(windows[:, :-1]), np.ascontiguousarray(windows[:, 1:]), weights)


def validation_batches(ids: ArrayLike, *, batch_size: int, context_length: int) -> Iterator[Batch]:
    """Cuts a text into windows side by side: every id but the first, which nothing precedes, is a label exactly once.

    All batches have the same shape, B = batch_size and T = context_length: a compiled step serves them all. The last one is
    filled up with labels of weight 0, so a mean must be taken over the weights of all batches together, not batch by batch.

    Raises:
      ValueError: ids are too few for one window, or a number is out of its range. At the call, before the first batch.
    """
    array = _windowed(ids, batch_size=batch_size, context_length=context_length)
    shape, size = (batch_size, context_length), batch_size * context_length

    def batches() -> Iterator[Batch]:
        for start in range(0, len(array) - 1, size):
            part = array[start : start + size + 1]
            weights = (np.arange(size) < len(part) - 1).astype(np.float32)
            part = np.pad(part, (0, size + 1 - len(part)))
            yield Batch(part[:-1].reshape(shape), part[1:].reshape(shape), weights.reshape(shape))

    return batches()


def _sequence(ids: ArrayLike) -> NDArray[np.int32]:
    array = np.asarray(ids)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"ids must be one sequence of integers, got shape {array.shape} and dtype {array.dtype}")
    return array.astype(np.int32, copy=False)


def _windowed(ids: ArrayLike, *, batch_size: int, context_length: int) -> NDArray[np.int32]:
    for name, number in (("batch_size", batch_size), ("context_length", context_length)):
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")
    array = _sequence(ids)
    if len(array) <= context_length:
        raise ValueError(
            f"a window of context_length {context_length} needs {context_length + 1} tokens (inputs and the last label), "
            f"got {len(array)}; give a longer text or a smaller context_length"
        )
    return array
