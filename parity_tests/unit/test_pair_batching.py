"""Batches of pairs depend on (pairs, seed, step) alone, have few shapes, and hold every pair once in an epoch."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from flax_transformer.data import EncodedPairs, PairBatch, PairBatches, Sentences, validation_pair_batches

RANDOM = np.random.default_rng(11)


def sentences(lengths: np.ndarray, first: int) -> Sentences:
    """Sentences whose ids count up from `first`, so that an id tells where it stood."""
    ids = np.arange(first, first + lengths.sum(), dtype=np.int32)
    starts = np.cumsum([0, *lengths])
    ids[starts[1:] - 1] = 2
    return Sentences(ids, starts)


def make_pairs(source, target, *, max_length: int) -> EncodedPairs:
    source, target = np.asarray(source), np.asarray(target)
    places = np.arange(len(source))
    return EncodedPairs(sentences(source, 3), sentences(target, 10_000), places, 0, max_length)


COUNT = 83
PAIRS = make_pairs(RANDOM.integers(2, 30, COUNT), RANDOM.integers(2, 30, COUNT), max_length=64)


def pair_of(batch: PairBatch) -> list[int]:
    """Which of PAIRS stands in each row."""
    return [int(np.flatnonzero(PAIRS.target.ids == target[1])[0]) for target in batch.target_input]


def row_of(batch: PairBatch) -> list[int]:
    return [int(np.searchsorted(PAIRS.target.starts, place, side="right")) - 1 for place in pair_of(batch)]


def batches(**kwargs) -> PairBatches:
    return PairBatches(PAIRS, **{"batch_size": 5, "seed": 3, **kwargs})


def epoch(made: PairBatches, number: int = 0) -> list[PairBatch]:
    return [made.batch(number * made.steps_per_epoch + place) for place in range(made.steps_per_epoch)]


def check_batch(batch: PairBatch, rows: list[int], real: int) -> None:
    """Every row against its definition, without the library's own padding."""
    length = batch.source.shape[1]
    for i, row in enumerate(rows):
        source = PAIRS.source.ids[PAIRS.source.starts[row] : PAIRS.source.starts[row + 1]].tolist()
        labels = PAIRS.target.ids[PAIRS.target.starts[row] : PAIRS.target.starts[row + 1]].tolist()
        blank = [0] * (length - len(labels))
        assert batch.source[i].tolist() == source + [0] * (length - len(source))
        assert batch.target_input[i].tolist() == [1, *labels[:-1], *blank]
        assert batch.labels[i].tolist() == (labels + blank if i < real else [0] * length)
        assert batch.weights[i].tolist() == ([1] * len(labels) + blank if i < real else [0] * length)


@pytest.mark.parametrize("buckets", [1, 2, 3, 4])
@pytest.mark.parametrize("number", [0, 7])
def test_an_epoch_holds_every_pair_once_and_every_row_is_what_teacher_forcing_needs(buckets, number):
    made = batches(buckets=buckets)
    seen: Counter[int] = Counter()
    for batch in epoch(made, number):
        assert [array.dtype.name for array in batch] == ["int32", "int32", "int32", "float32"]
        assert {array.shape for array in batch} <= set(made.shapes)
        assert len({array.shape for array in batch}) == 1
        real = int(batch.weights.any(axis=1).sum())
        rows = row_of(batch)
        check_batch(batch, rows, real)
        seen.update(rows[:real])
    assert seen == Counter(range(COUNT))
    assert len(made.shapes) == min(buckets, 3)  # a fourth length, 8, would have next to no pairs
    assert {batch.source.shape for batch in epoch(made, number)} == set(made.shapes)


def test_no_row_is_padding_alone_and_only_the_last_batch_of_a_shape_is_filled_up():
    made = batches()
    partial = [batch for batch in epoch(made) if not batch.weights.any(axis=1).all()]
    assert partial
    assert len({batch.source.shape for batch in partial}) == len(partial)
    for batch in partial:
        assert (batch.source != 0).any(axis=1).all()
        real = int(batch.weights.any(axis=1).sum())
        np.testing.assert_array_equal(batch.source, np.resize(batch.source[:real], batch.source.shape))


def test_a_batch_counts_its_real_labels():
    made = batches()
    for batch in epoch(made):
        assert batch.num_labels == batch.weights.sum() == (batch.labels != 0).sum()
    assert sum(batch.num_labels for batch in epoch(made, 3)) == len(PAIRS.target.ids)


def test_a_batch_does_not_depend_on_the_batches_taken_before():
    steps = range(0, 100, 7)
    once = [batches().batch(step) for step in steps]
    made = batches()
    for step, batch in reversed(list(zip(steps, once, strict=True))):
        for again, array in zip(made.batch(step), batch, strict=True):
            np.testing.assert_array_equal(again, array)


def test_epochs_and_seeds_have_orders_of_their_own():
    made = batches()
    orders = {tuple(row_of(batch)[0] for batch in epoch(made, number)) for number in range(7)}
    orders |= {tuple(row_of(batch)[0] for batch in epoch(batches(seed=seed))) for seed in (0, 5, 2**32 + 3, 2**64 - 1)}
    assert len(orders) == 7 + 4


def test_an_epoch_mixes_both_the_pairs_and_the_lengths_of_batches():
    made = batches()
    first, second = epoch(made, 0), epoch(made, 1)
    assert {frozenset(row_of(batch)) for batch in first}.isdisjoint(frozenset(row_of(batch)) for batch in second)
    lengths = [batch.source.shape[1] for batch in first]
    assert lengths != sorted(lengths)
    assert lengths != [batch.source.shape[1] for batch in second]


def test_a_pair_has_any_place_of_the_epoch():
    made = PairBatches(make_pairs([5] * 7, [3] * 7, max_length=8), batch_size=2, seed=5)
    counts = np.zeros((7, 4))
    for number in range(700):
        for place, batch in enumerate(epoch(made, number)):
            real = int(batch.weights.any(axis=1).sum())
            for target in batch.target_input[:real]:
                counts[(target[1] - 10_000) // 3, place] += 1
    # Three full batches and one of a single pair, in any order: 7 / 4 pairs at each place, so every pair 700 / 4 times.
    assert np.abs(counts - 175).max() < 5 * math.sqrt(175)


def test_the_order_is_the_same_on_every_machine_and_version():
    # The ranks of words 1 to 7 of Philox 4x64-10 with key (3, 0) and counter (1, 0, 5, 0) onwards order the pairs of each
    # bucket, here the even and the odd ones; the ranks of words 8 to 11 order the batches, two of each bucket.
    made = PairBatches(make_pairs([5, 13] * 3 + [5], [3] * 7, max_length=16), batch_size=2, seed=3)
    words = np.random.Philox(key=3, counter=[0, 0, 5, 0]).random_raw(11).tolist()
    orders = [sorted(range(first, 7, 2), key=words[:7].__getitem__) for first in (0, 1)]
    cut = [order[start : start + 2] for order in orders for start in (0, 2)]
    expected = [cut[i] for i in sorted(range(4), key=words[7:].__getitem__)]
    got = [((b.target_input[b.weights.any(axis=1), 1] - 10_000) // 3).tolist() for b in epoch(made, 5)]
    assert got == expected == [[0, 2], [4, 6], [5], [3, 1]]


def positions(lengths, needed, batch_size: int) -> int:
    """What an epoch costs with these lengths, by definition."""
    shortest = [min(length for length in lengths if length >= need) for need in needed]
    return sum(math.ceil(count / batch_size) * length for length, count in Counter(shortest).items())


@pytest.mark.parametrize("buckets", [1, 2, 3, 4])
@pytest.mark.parametrize("batch_size", [1, 5, 32])
def test_lengths_are_the_multiples_of_eight_with_the_least_padding(buckets, batch_size):
    random = np.random.default_rng(buckets)
    needed = random.integers(2, 60, 71)
    needed[:2] = 57, 60
    made = PairBatches(make_pairs(needed, needed[::-1], max_length=64), batch_size=batch_size, seed=3, buckets=buckets)
    either = np.maximum(needed, needed[::-1])
    choices = [{*shorter, 64} for count in range(buckets) for shorter in itertools.combinations(range(8, 64, 8), count)]
    lengths = [length for _, length in made.shapes]
    assert lengths == sorted(set(lengths))
    assert lengths[-1] == 64
    assert all(length % 8 == 0 for length in lengths)
    best = min(positions(choice, either, batch_size) for choice in choices)
    assert positions(lengths, either, batch_size) == best
    assert sum(batch.source.shape[1] for batch in epoch(made)) == best


def test_a_length_is_never_more_than_the_model_has_positions_for():
    made = PairBatches(make_pairs([3, 50], [49, 2], max_length=50), batch_size=1, seed=3)
    assert made.shapes == ((1, 50),)
    assert PairBatches(make_pairs([3, 50], [49, 2], max_length=64), batch_size=1, seed=3).shapes == ((1, 56),)


def test_a_shape_that_saves_nothing_does_not_occur():
    equal = make_pairs([11] * 7, [13] * 7, max_length=64)
    assert PairBatches(equal, batch_size=3, seed=3, buckets=4).shapes == ((3, 16),)
    few = make_pairs([3, 60], [5, 7], max_length=64)  # one batch of 8 rows at length 64 is less than two
    assert PairBatches(few, batch_size=8, seed=3).shapes == ((8, 64),)


def test_very_long_sentences_have_few_lengths_to_choose_from():
    needed = np.random.default_rng(7).integers(2, 2000, 97)
    needed[0] = 2000
    made = PairBatches(make_pairs(needed, needed, max_length=2000), batch_size=3, seed=3, buckets=4)
    assert len(made.shapes) == 4
    assert made.shapes[-1] == (3, 2000)
    assert all(length % 64 == 0 for _, length in made.shapes[:-1])  # 2000 / 32 rounded up to eights


@pytest.mark.parametrize("batch_size", [1, 5, COUNT, 97])
@pytest.mark.parametrize("buckets", [1, 3])
def test_validation_sees_every_pair_once_in_few_shapes(batch_size, buckets):
    seen = []
    found = list(validation_pair_batches(PAIRS, batch_size=batch_size, buckets=buckets))
    for batch in found:
        real = int(batch.weights.any(axis=1).sum())
        rows = row_of(batch)
        check_batch(batch, rows, real)
        seen += rows[:real]
    assert sorted(seen) == list(range(COUNT))
    assert sum(batch.num_labels for batch in found) == len(PAIRS.target.ids)
    assert {batch.source.shape for batch in found} == set(
        PairBatches(PAIRS, batch_size=batch_size, seed=3, buckets=buckets).shapes
    )
    assert [batch.source.shape[1] for batch in found] == sorted(batch.source.shape[1] for batch in found)


def train(pairs, *, seed: int = 3, **kwargs):
    return PairBatches(pairs, seed=seed, **kwargs)


@pytest.mark.parametrize("function", [train, validation_pair_batches])
@pytest.mark.parametrize(
    ("name", "number", "rule"), [("batch_size", 0, "at least 1"), ("buckets", 0, "1 to 4"), ("buckets", 5, "1 to 4")]
)
def test_numbers_out_of_range_are_refused_at_the_call(function, name, number, rule):
    with pytest.raises(ValueError, match=rf"^{name} must be {rule}.* got {number}$"):
        function(PAIRS, **{"batch_size": 5, name: number})


@pytest.mark.parametrize("number", [-1, 2**64])
def test_a_seed_or_step_out_of_range_is_refused(number):
    with pytest.raises(ValueError, match=rf"seed must be in \[0, 2\^64\), got {number}"):
        batches(seed=number)
    with pytest.raises(ValueError, match=rf"step must be in \[0, 2\^64\), got {number}"):
        batches().batch(number)
    batches(seed=2**64 - 1).batch(2**64 - 1)
