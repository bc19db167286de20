"""What is measured: models, their sizes and their batches. Imports neither framework."""

import dataclasses
from typing import Any, Literal, NamedTuple

import numpy as np

PAD_ID = 0
LEARNING_RATE = 1e-3  # of Adam, with the betas and the eps that both frameworks have by default
START_ID = 1  # of every translation

RowName = Literal[
    "gpt",
    "gpt-256",
    "encoder-decoder",
    "encoder-decoder-base",
    "decoder-only",
    "decoder-only-batch-64",
    "decode-1",
    "decode-32",
    "decode-1-recompute",
    "head-memory",
    "dispatch",
    "dispatch-8",
]
Model = Literal["gpt", "encoder-decoder", "decoder-only", "translation", "head", "chain"]
VocabularyLoss = Literal["auto", "plain", "fused"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One comparison.

    Attributes:
        model: gpt: GPT-2's architecture; encoder-decoder, decoder-only: the documents' models as written; translation: the
            paper's encoder-decoder, whose step is a whole greedy translation instead of a train step; head: the output
            projection and its loss alone, compiled and not run; chain: layers so small that a step is all dispatch.
        batch_size, length, source_length: B, T and, with an encoder, S.
        reference_cache: of a translation: whether PyTorch has a key/value cache too.
        steps_per_dispatch: how many train steps of ours are one compiled call, as with the trainer's `--steps-per-dispatch`;
            what is timed is so many steps of all contenders.
        vocabulary_loss: ours; auto: what the trainer chooses for so many tokens and classes.
        goals: what is aimed at, by our contender.
    """

    name: RowName
    model: Model
    batch_size: int
    length: int
    source_length: int = 0
    vocab_size: int
    d_model: int
    d_ff: int
    num_heads: int
    num_layers: int
    reference_cache: Literal["on", "off"] = "on"
    steps_per_dispatch: int = 1
    vocabulary_loss: VocabularyLoss = "auto"
    goals: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def is_trained(self) -> bool:
        """Whether its step is a train step of a model that PyTorch has too."""
        return self.model in ("gpt", "encoder-decoder", "decoder-only")

    def __str__(self) -> str:
        if self.model == "chain":
            at_once = f", {self.steps_per_dispatch} steps a dispatch" if self.steps_per_dispatch > 1 else ""
            return f"{self.name}: {self.num_layers} layers of width {self.d_model}{at_once}"
        layers = "" if self.model == "head" else f"{self.num_layers} x {self.num_heads} heads, "
        source = f"{self.source_length} + " if self.source_length else ""
        return (
            f"{self.name}: width {self.d_model}, {layers}vocabulary {self.vocab_size:,}, "
            f"batch {self.batch_size} x {source}{self.length}"
        )

    def quick(self) -> "Row":
        """The same model at toy sizes."""
        sizes: dict[str, Any] = dict(
            batch_size=3, length=7, vocab_size=53, d_model=16, d_ff=64, num_heads=2, num_layers=1
        )
        return dataclasses.replace(self, **sizes, source_length=min(self.source_length, 5))


_FLOAT32_GOAL = "vs eager 0.95, vs compiled 1.0"
_LARGE_VOCABULARY_GOAL = "vs fused 1.6, peak memory 0.4"
_PAPER_BASE: dict[str, Any] = dict(vocab_size=8192, d_model=512, d_ff=2048, num_heads=8, num_layers=6)
# 96 layers of a kernel and a bias: 192 parameters, two moments of each and two counts are 578 leaves.
_CHAIN: dict[str, Any] = dict(
    model="chain",
    batch_size=1,
    length=1,
    vocab_size=2,
    d_model=8,
    d_ff=8,
    num_heads=1,
    num_layers=96,
    goals={"float32": "vs Flax's own 12"},
)
ROWS: dict[RowName, Row] = {
    row.name: row
    for row in (
        Row(
            name="gpt", model="gpt", batch_size=8, length=128,
            vocab_size=8192, d_model=256, d_ff=1024, num_heads=4, num_layers=6,
        ),
        Row(
            name="gpt-256", model="gpt", batch_size=8, length=256,
            vocab_size=8192, d_model=256, d_ff=1024, num_heads=4, num_layers=6,
            goals={
                "float32": f"{_FLOAT32_GOAL}, vs Flax's own 1.3",
                "mixed": "vs eager 2.5, vs best 1.6, vs Flax's own 1.3",
            },
        ),
        Row(
            name="encoder-decoder", model="encoder-decoder", batch_size=8, length=40, source_length=48,
            vocab_size=4096, d_model=256, d_ff=1024, num_heads=4, num_layers=3,
        ),
        Row(
            name="encoder-decoder-base", model="encoder-decoder", batch_size=16, length=64, source_length=64,
            vocab_size=8192, d_model=512, d_ff=2048, num_heads=8, num_layers=6,
            goals={"float32": _FLOAT32_GOAL, "mixed": "vs eager 2.5, vs best 1.8"},
        ),
        Row(
            name="decoder-only", model="decoder-only", batch_size=4, length=16,
            vocab_size=199_854, d_model=64, d_ff=256, num_heads=4, num_layers=1,
        ),
        Row(
            name="decoder-only-batch-64", model="decoder-only", batch_size=64, length=16,
            vocab_size=199_854, d_model=64, d_ff=256, num_heads=4, num_layers=1,
            goals={"float32": _LARGE_VOCABULARY_GOAL, "mixed": _LARGE_VOCABULARY_GOAL},
        ),
        Row(
            name="decode-1", model="translation", batch_size=1, length=128, source_length=64,
            goals={"float32": "vs eager 1.3"}, **_PAPER_BASE,
        ),
        Row(
            name="decode-32", model="translation", batch_size=32, length=128, source_length=64,
            goals={"float32": "vs eager 1.0"}, **_PAPER_BASE,
        ),
        Row(
            name="decode-1-recompute", model="translation", batch_size=1, length=128, source_length=64,
            reference_cache="off", goals={"float32": "vs eager 6"}, **_PAPER_BASE,
        ),
        Row(
            name="head-memory", model="head", batch_size=64, length=16,
            vocab_size=199_854, d_model=64, d_ff=256, num_heads=4, num_layers=1,
            goals={"float32": "peak memory 1/40", "mixed": "peak memory 1/40"},
        ),
        Row(name="dispatch", **_CHAIN),
        Row(name="dispatch-8", steps_per_dispatch=8, **_CHAIN),
    )
}  # fmt: skip
# Those of the goals, and the documents' own run of 4 x 16 tokens.
DEFAULT_ROWS: tuple[RowName, ...] = tuple(row.name for row in ROWS.values() if row.goals or row.name == "decoder-only")


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
