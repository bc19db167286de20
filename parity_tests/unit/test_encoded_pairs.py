"""A sentence is its tokenizer's ids moved up by three and an end; a pair that is too long is left out whole and counted."""

import numpy as np
import pytest

from flax_transformer.data import (
    BEGIN_ID,
    END_ID,
    NUM_SPECIAL_IDS,
    PAD_ID,
    ParallelText,
    add_end,
    encode_pairs,
    remove_special,
)


def letters(sentence: str) -> list[int]:
    return [ord(letter) - ord("a") for letter in sentence]


def shouted(sentence: str) -> np.ndarray:
    """Another encoding, so that it shows which side was encoded with which."""
    return np.array([100 + ord(letter) for letter in sentence], np.int64)


TEXT = ParallelText("t", ("abc", "hello", "a", "dabba", ""), ("wx", "yz", "vwxyz", "v", "zyx"))


def encode(max_length: int, text: ParallelText = TEXT):
    return encode_pairs(text, encode_source=letters, encode_target=shouted, max_length=max_length)


def test_special_ids_are_those_of_the_document_and_come_before_the_tokenizers():
    assert (PAD_ID, BEGIN_ID, END_ID, NUM_SPECIAL_IDS) == (0, 1, 2, 3)
    ids = np.array([7, 0, 11], np.uint16)
    assert add_end(ids).tolist() == [10, 3, 14, 2]
    assert add_end(ids).dtype == np.int32
    assert ids.tolist() == [7, 0, 11]
    assert add_end([]).tolist() == [2]


def test_removing_special_ids_undoes_adding_an_end():
    assert remove_special(add_end([7, 0, 11])).tolist() == [7, 0, 11]
    assert remove_special(add_end([])).tolist() == []
    assert remove_special([1, 10, 0, 3, 1, 14, 2, 5, 2, 7]).tolist() == [7, 0, 11]  # what a model may write
    assert remove_special([10, 3]).tolist() == [7, 0]  # a sentence that was cut before its end
    assert remove_special(np.array([10, 2], np.uint8)).dtype == np.int32


@pytest.mark.parametrize("ids", [[3, -1], [0.5], [[3, 5], [7, 11]], 7])
def test_what_is_no_sentence_of_ids_is_refused(ids):
    with pytest.raises(ValueError, match="a sentence must be one sequence of integers from 0, got shape"):
        add_end(ids)


def test_both_sides_are_encoded_in_order_each_with_its_own_function():
    pairs = encode(6)
    assert len(pairs) == 5
    for i, (source, target) in enumerate(zip(TEXT.sources, TEXT.targets, strict=True)):
        for side, expected in ((pairs.source, letters(source)), (pairs.target, shouted(target).tolist())):
            sentence = side.ids[side.starts[i] : side.starts[i + 1]]
            assert sentence.tolist() == [number + 3 for number in expected] + [2]
    assert pairs.source.lengths.tolist() == [4, 6, 2, 6, 1]
    assert pairs.target.lengths.tolist() == [3, 3, 6, 2, 4]
    assert pairs.source.ids.dtype == pairs.target.ids.dtype == np.int32
    assert (pairs.places.tolist(), pairs.too_long, pairs.max_length) == ([0, 1, 2, 3, 4], 0, 6)


def test_a_pair_that_is_too_long_on_either_side_is_left_out_and_counted():
    pairs = encode(5)
    assert (pairs.places.tolist(), pairs.too_long, pairs.max_length) == ([0, 4], 3, 5)
    assert pairs.source.ids.tolist() == [3, 4, 5, 2, 2]
    assert pairs.target.lengths.tolist() == [3, 4]
    assert encode(4).too_long == 3
    assert encode(3, ParallelText("t", ("ab", "abc"), ("ab", "ab"))).places.tolist() == [0]


def test_rows_are_padded_behind_their_end():
    source = encode(6).source
    padded = source.padded([2, 0, 2, 4], length=5)
    assert padded.tolist() == [[3, 2, 0, 0, 0], [3, 4, 5, 2, 0], [3, 2, 0, 0, 0], [2, 0, 0, 0, 0]]
    assert padded.dtype == np.int32
    assert source.padded(np.array([], np.int64), length=5).shape == (0, 5)
    with pytest.raises(ValueError, match="sentences of up to 6 ids do not fit a length of 5"):
        source.padded([0, 1], length=5)


def test_a_text_of_which_nothing_is_short_enough_is_refused():
    with pytest.raises(
        ValueError, match=r"^t: none of its 2 pairs has at most max_length 3 .* since the shortest has 4; "
    ):
        encode(3, ParallelText("t", ("abcd", "a"), ("v", "vwx")))
    with pytest.raises(ValueError, match=r"^t: none of its 0 pairs has at most max_length 3 .* included; raise"):
        encode(3, ParallelText("t", (), ()))
    with pytest.raises(ValueError, match="max_length must be at least 1, got 0"):
        encode(0)


def test_what_an_encode_function_refuses_is_passed_on():
    def refuse(sentence):
        raise ValueError(f"no token for {sentence!r}")

    with pytest.raises(ValueError, match="no token for 'abc'"):
        encode_pairs(TEXT, encode_source=refuse, encode_target=letters, max_length=7)
