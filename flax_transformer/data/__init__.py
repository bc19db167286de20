"""Corpora, parallel text and batches. Knows text and arrays of ids, no model and no tokenizer."""

from flax_transformer.data.baseline import unigram_loss
from flax_transformer.data.batching import Batch, Split, check_split, sample_batch, split, validation_batches
from flax_transformer.data.bible import king_james_to_world_english
from flax_transformer.data.corpora import Corpus, default_corpus, read_corpus, read_text
from flax_transformer.data.encoded_pairs import (
    BEGIN_ID,
    END_ID,
    NUM_SPECIAL_IDS,
    PAD_ID,
    EncodedPairs,
    Sentences,
    add_end,
    encode_pairs,
    remove_special,
)
from flax_transformer.data.pair_batching import PairBatch, PairBatches, validation_pair_batches
from flax_transformer.data.parallel_text import (
    BadPairs,
    CheckedText,
    Defect,
    PairReport,
    PairSplit,
    ParallelText,
    read_tab_separated,
    read_two_files,
    split_pairs,
)

__all__ = [
    "BEGIN_ID",
    "END_ID",
    "NUM_SPECIAL_IDS",
    "PAD_ID",
    "BadPairs",
    "Batch",
    "CheckedText",
    "Corpus",
    "Defect",
    "EncodedPairs",
    "PairBatch",
    "PairBatches",
    "PairReport",
    "PairSplit",
    "ParallelText",
    "Sentences",
    "Split",
    "add_end",
    "check_split",
    "default_corpus",
    "encode_pairs",
    "king_james_to_world_english",
    "read_corpus",
    "read_tab_separated",
    "read_text",
    "read_two_files",
    "remove_special",
    "sample_batch",
    "split",
    "split_pairs",
    "unigram_loss",
    "validation_batches",
    "validation_pair_batches",
]
