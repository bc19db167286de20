"""Pairs of sentences as ids, with the three ids that no tokenizer knows: padding, begin and end.

A tokenizer's id i is id i + NUM_SPECIAL_IDS of the model, so a model's vocabulary has `tokenizer.vocab_size +
NUM_SPECIAL_IDS` entries, and padding is 0 as in the encoder-decoder document (`pad_idx=0`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flax_transformer.data.parallel_text import ParallelText

PAD_ID, BEGIN_ID, END_ID = 0, 1, 2
NUM_SPECIAL_IDS = 3


@dataclass(frozen=True)
class Sentences:
    """Sentences of ids, each with END_ID as its last, one after the other in one array.

    Attributes:
      ids: int32, shape (number of ids of all sentences,).
      starts: int64, shape (number of sentences + 1,): sentence i is `ids[starts[i] : starts[i + 1]]`.
    """

    ids: NDArray[np.int32]
    starts: NDArray[np.int64]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The number of ids of every sentence, its end included."""
        return np.diff(self.starts)

    def padded(self, rows: ArrayLike, *, length: int) -> NDArray[np.int32]:
        """Returns sentences with PAD_ID after their end: int32, shape (number of rows, length).

        Raises:
          ValueError: a sentence is longer.
        """
        rows = np.asarray(rows)
        lengths, columns = self.lengths[rows], np.arange(length)
        if lengths.size and lengths.max() > length:
            raise ValueError(f"sentences of up to {lengths.max()} ids do not fit a length of {length}; give more")
        places = np.minimum(self.starts[rows][:, None] + columns, len(self.ids) - 1)
        return np.where(columns < lengths[:, None], self.ids[places], np.int32(PAD_ID))


@dataclass(frozen=True)
class EncodedPairs:
    """The pairs of a text as ids, without those that are too long.

    Attributes:
      source: what the encoder reads.
      target: the labels; the decoder reads them one later, after BEGIN_ID.
      places: int64, shape (number of pairs,): pair i is the text's pair `places[i]`.
      too_long: how many pairs of the text were left out.
      max_length: what no sentence is longer than, its end included.
    """

    source: Sentences
    target: Sentences
    places: NDArray[np.int64]
    too_long: int
    max_length: int

    def __len__(self) -> int:
        return len(self.places)


def encode_pairs(
    text: ParallelText,
    *,
    encode_source: Callable[[str], ArrayLike],
    encode_target: Callable[[str], ArrayLike],
    max_length: int,
) -> EncodedPairs:
    """Encodes both sides of a text, sentence by sentence.

    A pair is left out and counted, never cut, if either side has more than max_length ids with its end: a cut source
    would be paired with a translation of more than it says.

    Args:
      encode_source: gives the ids of a sentence, integers from 0, shape (number of tokens,); `Tokenizer.encode`.
      encode_target: likewise.
      max_length: the longest sentence, its end included.

    Raises:
      ValueError: every pair is too long, or what an encode function raises or returns is no sequence of ids.
    """
    if max_length < 1:
        raise ValueError(f"max_length must be at least 1, got {max_length}")
    sources = [add_end(encode_source(sentence)) for sentence in text.sources]
    targets = [add_end(encode_target(sentence)) for sentence in text.targets]
    longer = [max(len(source), len(target)) for source, target in zip(sources, targets, strict=True)]
    places = np.flatnonzero(np.array(longer, np.int64) <= max_length)
    if not places.size:
        shortest = f", since the shortest has {min(longer)}" if longer else ""
        raise ValueError(
            f"{text.name}: none of its {len(text)} pairs has at most max_length {max_length} ids on either side, "
            f"the end included{shortest}; raise max_length or give shorter sentences"
        )
    return EncodedPairs(
        _sentences(sources, places), _sentences(targets, places), places, len(text) - len(places), max_length
    )


def add_end(ids: ArrayLike) -> NDArray[np.int32]:
    """Returns the model's ids of a sentence: the tokenizer's, moved up by NUM_SPECIAL_IDS, and END_ID.

    Raises:
      ValueError: ids are not one sequence of integers from 0.
    """
    array = np.asarray(ids)
    if array.size and (array.ndim != 1 or array.dtype.kind not in "iu" or array.min() < 0):
        raise ValueError(
            f"a sentence must be one sequence of integers from 0, got shape {array.shape}, dtype {array.dtype} "
            f"and {array.reshape(-1)[:5].tolist()}; give an encode function that returns such ids"
        )
    sentence = np.full(array.size + 1, END_ID, np.int32)
    sentence[:-1] = array
    sentence[:-1] += NUM_SPECIAL_IDS
    return sentence


def remove_special(ids: ArrayLike) -> NDArray[np.int32]:
    """Returns the tokenizer's ids of one row of the model's: those before the first END_ID, if any. Inverse of `add_end`.

    Padding and BEGIN_ID are left out wherever they are, since a model may write them.
    """
    array = np.asarray(ids, np.int32).reshape(-1)
    ends = np.flatnonzero(array == END_ID)
    array = array[: ends[0]] if ends.size else array
    return array[array >= NUM_SPECIAL_IDS] - np.int32(NUM_SPECIAL_IDS)


def _sentences(arrays: Sequence[NDArray[np.int32]], places: NDArray[np.int64]) -> Sentences:
    chosen = [arrays[place] for place in places]
    return Sentences(np.concatenate(chosen), np.cumsum([0, *map(len, chosen)], dtype=np.int64))
