"""Corpora and batches. Knows text and arrays of ids, no model and no tokenizer."""

from flax_transformer.data.baseline import unigram_loss
from flax_transformer.data.batching import Batch, Split, check_split, sample_batch, split, validation_batches
from flax_transformer.data.corpora import Corpus, default_corpus, read_corpus, read_text

__all__ = [
    "Batch",
    "Corpus",
    "Split",
    "check_split",
    "default_corpus",
    "read_corpus",
    "read_text",
    "sample_batch",
    "split",
    "unigram_loss",
    "validation_batches",
]
