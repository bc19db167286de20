"""Encoded pairs to batches of a few static shapes. Every batch is a pure function of the pairs, the seed and the step.

Axes: B batch, S source position, T target position. Here S = T, the length of the batch's bucket.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from flax_transformer.data.encoded_pairs import BEGIN_ID, PAD_ID, EncodedPairs

MAX_BUCKETS = 4


class PairBatch(NamedTuple):
    """Sources, and for teacher forcing targets with the label of every position. JAX takes it as a pytree.

    A sentence ends with END_ID in `source` and `labels`; behind it everything is PAD_ID.

    Attributes:
      source: int32 B S.
      target_input: int32 B T; BEGIN_ID and the labels but the last.
      labels: int32 B T; `labels[b, t]` follows `target_input[b, t]`.
      weights: float32 B T; 1 where the label is real, 0 elsewhere. A loss is the mean over the ones.
    """

    source: NDArray[np.int32]
    target_input: NDArray[np.int32]
    labels: NDArray[np.int32]
    weights: NDArray[np.float32]

    @property
    def num_labels(self) -> int:
        """How many labels are real. Of a batch in the host's memory; in a compiled step take the sum of `weights`."""
        return int(np.count_nonzero(self.weights))


class _Group(NamedTuple):
    """Pairs that are padded to one length: those of a bucket, or those of a batch."""

    length: int
    rows: NDArray[np.int64]


@final
class PairBatches:
    """The batches to train on: one epoch after the other, in each of which every pair occurs exactly once.

    Pairs of similar length share a batch, so that little of it is padding, and batches have few lengths, since a compiled
    step costs seconds for every shape. Every epoch has its own order of pairs in a bucket and of batches among
    the epoch's. Orders are sorted draws of Philox, a counter-based generator, with the seed for its key and the epoch in its
    counter: any batch can be had without those before it, which is what lets a run be resumed, and they are the same
    across versions of numpy.

    The last batch of a bucket may lack pairs. It is filled up with sentences of its own, whose labels are padding of
    weight 0: unlike rows of nothing but padding, they leave no softmax without anything to attend to.

    Args:
      pairs: to train on.
      batch_size: B of every batch.
      seed: in [0, 2^64).
      buckets: how many lengths there may be, 1 to 4. The lengths are chosen for least padding.

    Attributes:
      shapes: (B, length) of the batches that occur, shortest first: what a step will be compiled for.
      steps_per_epoch: batches in an epoch.

    Raises:
      ValueError: a number is out of its range.
    """

    def __init__(self, pairs: EncodedPairs, *, batch_size: int, seed: int, buckets: int = 3) -> None:
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed must be in [0, 2^64), got {seed}")
        self._pairs, self._batch_size, self._seed = pairs, batch_size, seed
        self._buckets = _fill_buckets(pairs, batch_size=batch_size, buckets=buckets)
        self.shapes = tuple((batch_size, bucket.length) for bucket in self._buckets)
        self.steps_per_epoch = sum(-(-len(bucket.rows) // batch_size) for bucket in self._buckets)
        self._cached = (0, self._order(0))

    def batch(self, step: int) -> PairBatch:
        """Returns the batch of a step in [0, 2^64), the first step being 0."""
        if not 0 <= step < 2**64:
            raise ValueError(f"step must be in [0, 2^64), got {step}")
        epoch, place = divmod(step, self.steps_per_epoch)
        cached_epoch, order = self._cached
        if cached_epoch != epoch:
            order = self._order(epoch)
            self._cached = (epoch, order)
        return _pad(self._pairs, order[place], batch_size=self._batch_size)

    def _order(self, epoch: int) -> list[_Group]:
        # The epoch in the counter's high half leaves 2^128 blocks to every epoch: none overlap.
        generator = np.random.Philox(key=self._seed, counter=epoch << 128)
        draws, batch_draws = np.split(generator.random_raw(len(self._pairs) + self.steps_per_epoch), [len(self._pairs)])
        batches = [
            part
            for length, rows in self._buckets
            for part in _cut(length, rows[np.argsort(draws[rows], kind="stable")], self._batch_size)
        ]
        return [batches[i] for i in np.argsort(batch_draws, kind="stable")]


def validation_pair_batches(pairs: EncodedPairs, *, batch_size: int, buckets: int = 3) -> Iterator[PairBatch]:
    """Puts every pair into exactly one batch, the short ones first, in at most `buckets` shapes.

    As in training the last batch of a shape is filled up with rows of weight 0, so a mean must be taken over the weights
    of all batches together, not batch by batch.

    Raises:
      ValueError: a number is out of its range. At the call, before the first batch.
    """
    filled = _fill_buckets(pairs, batch_size=batch_size, buckets=buckets)
    parts = (part for length, rows in filled for part in _cut(length, rows, batch_size))
    return (_pad(pairs, part, batch_size=batch_size) for part in parts)


def _fill_buckets(pairs: EncodedPairs, *, batch_size: int, buckets: int) -> list[_Group]:
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    if not 1 <= buckets <= MAX_BUCKETS:
        raise ValueError(f"buckets must be 1 to {MAX_BUCKETS}, since every one costs a compilation, got {buckets}")
    needed = np.maximum(pairs.source.lengths, pairs.target.lengths)
    lengths = _bucket_lengths(needed, batch_size=batch_size, buckets=buckets)
    bucket = np.searchsorted(lengths, needed)
    # A length is rounded up, which must not make it more than the model has positions for.
    return [
        _Group(min(length, pairs.max_length), np.flatnonzero(bucket == number)) for number, length in enumerate(lengths)
    ]


def _bucket_lengths(needed: NDArray[np.int64], *, batch_size: int, buckets: int) -> tuple[int, ...]:
    """The lengths, at most `buckets` of them, with the fewest positions in an epoch; fewer lengths where that is equal."""
    longest = int(needed.max())
    unit = 8 * -(-longest // 256)  # lengths that hardware likes, and at most 32 to choose from
    candidates = range(unit, longest + unit, unit)
    up_to = np.cumsum(np.bincount(-(-needed // unit), minlength=len(candidates) + 1))

    def positions(lengths: tuple[int, ...]) -> int:
        counts = np.diff([0, *(up_to[length // unit] for length in lengths)])
        return sum(-(-int(count) // batch_size) * length for count, length in zip(counts, lengths, strict=True))

    choices = (
        (*shorter, candidates[-1])
        for number in range(buckets)
        for shorter in itertools.combinations(candidates[:-1], number)
    )
    return min(choices, key=positions)


def _cut(length: int, rows: NDArray[np.int64], batch_size: int) -> list[_Group]:
    return [_Group(length, rows[start : start + batch_size]) for start in range(0, len(rows), batch_size)]


def _pad(pairs: EncodedPairs, part: _Group, *, batch_size: int) -> PairBatch:
    rows = np.resize(part.rows, batch_size)  # repeats them where they are too few
    source, labels = (side.padded(rows, length=part.length) for side in (pairs.source, pairs.target))
    real = np.arange(part.length) < pairs.target.lengths[rows][:, None]
    target_input = np.where(real, np.roll(labels, 1, axis=1), np.int32(PAD_ID))
    target_input[:, 0] = BEGIN_ID
    real[len(part.rows) :] = False
    return PairBatch(source, target_input, np.where(real, labels, np.int32(PAD_ID)), real.astype(np.float32))
