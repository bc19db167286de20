"""What is measured: models, their sizes and their batches. Imports neither framework."""

import dataclasses
from typing import Any, Literal, NamedTuple

import numpy as np

PAD_ID = 0
LEARNING_RATE = 1e-3  # of Adam, with the betas and the eps that both frameworks have by default


START_ID = 1  # of every translation

RowName = Literal[
    "gpt",
    "encoder-decoder",
    "encoder-decoder-base",
    "decoder-only",
    "decoder-only-batch-64",
    "decode-1",
    "decode-32",
    "decode-1-recompute",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One comparison.

    Attributes:
        model: gpt: GPT-2's architecture; encoder-decoder, decoder-only: the documents' models as written; translation: the
            paper's encoder-decoder, whose step is a whole greedy translation instead of a train step.
        batch_size, length, source_length: B, T and, with an encoder, S.
        reference_cache: of a translation: whether PyTorch has a key/value cache too.
    """

    name: RowName
    model: Literal["gpt", "encoder-decoder", "decoder-only", "translation"]
    batch_size: int
    length: int
    source_length: int = 0
    vocab_size: int
    d_model: int
    d_ff: int
    num_heads: int
    num_layers: int
    reference_cache: Literal["on", "off"] = "on"

    def __str__(self) -> str:
        source = f"{self.source_length} + " if self.source_length else ""
        return (
            f"{self.name}: width {self.d_model}, {self.num_layers} x {self.num_heads} heads, "
            f"vocabulary {self.vocab_size:,}, batch {self.batch_size} x {source}{self.length}"
        )

    def quick(self) -> "Row":
        """The same model at toy sizes."""
        sizes = dict(batch_size=3, length=7, vocab_size=53, d_model=16, d_ff=64, num_heads=2, num_layers=1)
        return dataclasses.replace(self, **sizes, source_length=min(self.source_length, 5))


_PAPER_BASE: dict[str, Any] = dict(vocab_size=8192, d_model=512, d_ff=2048, num_heads=8, num_layers=6)
ROWS: dict[RowName, Row] = {
    row.name: row
    for row in (
        Row(
            name="gpt", model="gpt", batch_size=8, length=128,
            vocab_size=8192, d_model=256, d_ff=1024, num_heads=4, num_layers=6,
        ),
        Row(
            name="encoder-decoder", model="encoder-decoder", batch_size=8, length=40, source_length=48,
            vocab_size=4096, d_model=256, d_ff=1024, num_heads=4, num_layers=3,
        ),
        Row(
            name="encoder-decoder-base", model="encoder-decoder", batch_size=16, length=64, source_length=64,
            vocab_size=8192, d_model=512, d_ff=2048, num_heads=8, num_layers=6,
        ),
        Row(
            name="decoder-only", model="decoder-only", batch_size=4, length=16,
            vocab_size=199_854, d_model=64, d_ff=256, num_heads=4, num_layers=1,
        ),
        Row(
            name="decoder-only-batch-64", model="decoder-only", batch_size=64, length=16,
            vocab_size=199_854, d_model=64, d_ff=256, num_heads=4, num_layers=1,
        ),
        Row(name="decode-1", model="translation", batch_size=1, length=128, source_length=64, **_PAPER_BASE),
        Row(name="decode-32", model="translation", batch_size=32, length=128, source_length=64, **_PAPER_BASE),
        Row(
            name="decode-1-recompute", model="translation", batch_size=1, length=128, source_length=64,
            reference_cache="off", **_PAPER_BASE,
        ),
    )
}  # fmt: skip
DEFAULT_ROWS: tuple[RowName, ...] = ("gpt", "encoder-decoder", "decoder-only")


class Arrays(NamedTuple):
    """A batch: int32 ids, `inputs` and `labels` B T, `source` B S (S is 0 without an encoder).

    A `PAD_ID` in `labels` does not count; there is none where there is no encoder.
    """

    source: np.ndarray
    inputs: np.ndarray
    labels: np.ndarray


def make_batch(row: Row, *, seed: int) -> Arrays:
    """Uniformly random ids, in the encoder-decoder with sentences of unequal length, padded."""
    random = np.random.default_rng(seed)

    def ids(length: int) -> np.ndarray:
        drawn = random.integers(1, row.vocab_size, (row.batch_size, length), dtype=np.int32)
        if row.model in ("encoder-decoder", "translation"):
            lengths = random.integers(length // 2, length + 1, (row.batch_size, 1))
            drawn[np.arange(length) >= lengths] = PAD_ID
        return drawn

    source, text = ids(row.source_length), ids(row.length + 1)
    return Arrays(source, np.ascontiguousarray(text[:, :-1]), np.ascontiguousarray(text[:, 1:]))
