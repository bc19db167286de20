"""Batches are windows of the text that depend on (seed, step) alone; validation sees every label once."""

import math

import numpy as np
import pytest

from flax_transformer.data import Split, check_split, sample_batch, split, unigram_loss, validation_batches

IDS = np.random.default_rng(11).permutation(1009).astype(np.int32)  # all different: an id tells where it stood
PLACE = np.argsort(IDS)


def starts(**kwargs) -> list[int]:
    batch = sample_batch(IDS, **{"batch_size": 5, "context_length": 7, "seed": 3, "step": 13, **kwargs})
    return PLACE[batch.inputs[:, 0]].tolist()


@pytest.mark.parametrize(("length", "cut"), [(11, 9), (1009, 908), (10, 9), (3, 2)])
def test_the_first_nine_tenths_train_and_the_rest_validates(length, cut):
    parts = split(IDS[:length])
    np.testing.assert_array_equal(parts.train, IDS[:cut])
    np.testing.assert_array_equal(parts.validation, IDS[cut:length])
    np.testing.assert_array_equal(split(IDS[:length].tolist(), fraction=0.4).train, IDS[: int(0.4 * length)])


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.5, 90])
def test_a_fraction_that_leaves_a_part_empty_is_refused(fraction):
    with pytest.raises(ValueError, match=f"between 0 and 1, got {fraction}"):
        split(IDS, fraction=fraction)


@pytest.mark.parametrize("ids", [[[3, 5], [7, 11]], [0.5, 3.0], 7, []])
def test_what_is_not_a_sequence_of_integers_is_refused(ids):
    with pytest.raises(ValueError, match="must be one sequence of integers, got shape"):
        split(ids)


def test_a_split_with_room_for_one_window_each_passes_and_one_less_does_not():
    check_split(Split(IDS[:6], IDS[:6]), context_length=5, source="'a.txt'")
    for parts in (Split(IDS[:5], IDS[:6]), Split(IDS[:6], IDS[:5])):
        with pytest.raises(
            ValueError, match=r"^'a\.txt' is too short: its 11 tokens are .* at least .* = 6; give a longer"
        ):
            check_split(parts, context_length=5, source="'a.txt'")


def test_a_batch_holds_windows_of_the_text_and_the_ids_that_follow():
    batch = sample_batch(IDS.astype(np.int64), batch_size=5, context_length=7, seed=3, step=13)
    assert [array.shape for array in batch] == [(5, 7)] * 3
    assert [array.dtype for array in batch] == [np.int32, np.int32, np.float32]
    assert all(array.flags.c_contiguous for array in batch)
    for inputs, labels in zip(batch.inputs, batch.labels, strict=True):
        start = PLACE[inputs[0]]
        np.testing.assert_array_equal(inputs, IDS[start : start + 7])
        np.testing.assert_array_equal(labels, IDS[start + 1 : start + 8])
    assert batch.weights.min() == batch.weights.max() == 1


def test_the_draws_are_the_same_on_every_machine_and_version():
    # The first five words of Philox 4x64-10 with key (3, 0) and counters (1, 0, 13, 0), (2, 0, 13, 0), modulo 1009 - 7.
    assert starts() == [713, 407, 287, 645, 58]
    assert starts(seed=2**64 - 1, step=2**64 - 1) == [445, 251, 398, 407, 211]


def test_a_batch_does_not_depend_on_the_batches_drawn_before():
    forward = [starts(step=step) for step in range(7)]
    backward = [starts(step=step) for step in reversed(range(7))]
    assert forward == backward[::-1]
    np.random.seed(5)
    assert starts(step=3) == forward[3]


def test_seeds_and_steps_all_draw_differently():
    draws = {tuple(starts(seed=seed, step=step)) for seed in range(7) for step in range(11)}
    draws |= {
        tuple(starts(seed=seed, step=step)) for seed, step in [(2**32, 0), (2**32 + 1, 0), (0, 2**32), (1, 2**32)]
    }
    assert len(draws) == 7 * 11 + 4


def test_steps_share_no_part_of_their_draws():
    long = [sample_batch(IDS, batch_size=64, context_length=7, seed=3, step=step).inputs[:, 0] for step in range(3)]
    windows = [tuple(row[i : i + 3]) for row in long for i in range(62)]
    assert len(set(windows)) == len(windows)


def test_a_larger_batch_begins_with_the_smaller_one():
    assert starts(batch_size=11)[:5] == starts()


def test_starts_are_uniform_from_the_first_to_the_last_that_has_all_labels():
    ids = np.arange(18)
    batch = sample_batch(ids, batch_size=20_000, context_length=11, seed=5, step=7)
    counts = np.bincount(batch.inputs[:, 0], minlength=7)
    assert len(counts) == 7  # 18 - 11, as torch.randint(0, len(data) - context_len)
    assert batch.labels.max() == 17
    assert np.abs(counts - 20_000 / 7).max() < 5 * math.sqrt(20_000 / 7)


def test_one_window_is_enough():
    batch = sample_batch(IDS[:8], batch_size=3, context_length=7, seed=3, step=5)
    np.testing.assert_array_equal(batch.inputs, np.tile(IDS[:7], (3, 1)))


@pytest.mark.parametrize("count", [8, 9, 21, 22, 23, 106, 107, 1009])
def test_validation_sees_every_label_once_in_batches_of_one_shape(count):
    batches = list(validation_batches(IDS[:count], batch_size=3, context_length=7))
    real = [batch.weights == 1 for batch in batches]
    assert {array.shape for batch in batches for array in batch} == {(3, 7)}
    assert {tuple(array.dtype.name for array in batch) for batch in batches} == {("int32", "int32", "float32")}
    np.testing.assert_array_equal(
        np.concatenate([b.inputs[r] for b, r in zip(batches, real, strict=True)]), IDS[: count - 1]
    )
    np.testing.assert_array_equal(
        np.concatenate([b.labels[r] for b, r in zip(batches, real, strict=True)]), IDS[1:count]
    )
    assert sum(batch.weights.sum() for batch in batches) == count - 1
    assert len(batches) == math.ceil((count - 1) / 21)
    assert all((batch.weights[~r] == 0).all() for batch, r in zip(batches, real, strict=True))


def draw(ids, **kwargs):
    return sample_batch(ids, seed=3, step=5, **kwargs)


@pytest.mark.parametrize("function", [draw, validation_batches])
def test_a_text_shorter_than_a_window_is_refused_at_the_call(function):
    with pytest.raises(ValueError, match=r"context_length 7 needs 8 tokens .* got 7; give a longer text"):
        function(IDS[:7], batch_size=3, context_length=7)


@pytest.mark.parametrize("function", [draw, validation_batches])
@pytest.mark.parametrize("name", ["batch_size", "context_length"])
def test_sizes_below_one_are_refused(function, name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        function(IDS, **{"batch_size": 3, "context_length": 7, name: 0})


@pytest.mark.parametrize("name", ["seed", "step"])
@pytest.mark.parametrize("number", [-1, 2**64])
def test_a_seed_or_step_out_of_range_is_refused(name, number):
    with pytest.raises(ValueError, match=rf"{name} must be in \[0, 2\^64\), got {number}"):
        starts(**{name: number})


def test_the_unigram_loss_is_the_cross_entropy_of_the_smoothed_frequencies():
    random = np.random.default_rng(7)
    train, validation = random.integers(0, 9, 103), random.integers(0, 11, 31)
    assert 10 in validation[1:]  # training never has it
    expected = 0.0
    for label in validation.tolist()[1:]:
        expected -= math.log((train.tolist().count(label) + 1) / (103 + 11)) / 30
    assert unigram_loss(train, validation, vocab_size=11) == pytest.approx(expected, rel=1e-13)
    assert unigram_loss(train.tolist(), validation.tolist(), vocab_size=11) == pytest.approx(expected, rel=1e-13)


def test_the_unigram_probabilities_sum_to_one():
    train = np.random.default_rng(7).integers(0, 9, 103)
    assert sum(math.exp(-unigram_loss(train, [3, token], vocab_size=11)) for token in range(11)) == pytest.approx(
        1, rel=1e-13
    )


def test_the_unigram_loss_is_over_the_labels_that_a_model_is_validated_with():
    parts = split(np.random.default_rng(13).zipf(1.5, 997) % 23)
    table = np.array([unigram_loss(parts.train, [0, token], vocab_size=23) for token in range(23)])
    batches = list(validation_batches(parts.validation, batch_size=3, context_length=7))
    total = sum((table[batch.labels] * batch.weights).sum() for batch in batches)
    mean = total / sum(batch.weights.sum() for batch in batches)
    assert unigram_loss(parts.train, parts.validation, vocab_size=23) == pytest.approx(mean, rel=1e-12)


@pytest.mark.parametrize(("train", "validation"), [([3, 11], [3, 5]), ([3, 5], [5, 11]), ([3, -1], [3, 5]), ([3], [5])])
def test_ids_that_have_no_unigram_loss_are_refused(train, validation):
    with pytest.raises(ValueError, match=r"must be in \[0, 11\)|at least 2 tokens"):
        unigram_loss(train, validation, vocab_size=11)
