"""What the presets of `train.py` are: a model, and how it is trained unless the user says otherwise."""

import dataclasses
import math
from collections.abc import Callable
from typing import Literal

import optax

from flax_transformer import optimizers
from flax_transformer.config import DecoderOnlyConfig, EncoderDecoderConfig
from flax_transformer.tokenizer import Vocabulary

ScheduleName = Literal["cosine", "noam", "constant"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a model is trained."""

    steps: int
    batch_size: int
    learning_rate: float  # the highest
    schedule: ScheduleName = "cosine"
    warmup: float = 0.1  # share of the steps
    final: float = 0.1  # share of the learning rate that is left at the end of a cosine
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_norm: float = 1.0

    def make_schedule(self, *, d_model: int) -> optimizers.Schedule:
        """The learning rate as a function of the number of updates made."""
        warmup_steps = round(self.warmup * self.steps)
        if self.schedule == "constant":
            return optimizers.constant(self.learning_rate)
        if self.schedule == "cosine":
            return optimizers.warmup_cosine(
                self.learning_rate,
                warmup_steps=min(warmup_steps, self.steps - 1),
                total_steps=self.steps,
                final=self.final * self.learning_rate,
            )
        warmup_steps = max(warmup_steps, 1)
        factor = self.learning_rate * math.sqrt(d_model * warmup_steps)  # so that this is the highest
        return optimizers.noam(d_model, warmup_steps=warmup_steps, factor=factor)

    def make_optimizer(self, schedule: optimizers.Schedule) -> optax.GradientTransformation:
        return optimizers.adamw(
            schedule,
            b1=self.b1,
            b2=self.b2,
            eps=self.eps,
            weight_decay=self.weight_decay,
            max_norm=self.max_norm,
        )

    def problems(
        self, *, log_every: int, validate_every: int | None, save_every: int | None, keep: int, max_bad_steps: int
    ) -> list[str]:
        """Sentences about the numbers that cannot be used."""
        counts = {
            "steps": self.steps,
            "batch-size": self.batch_size,
            "log-every": log_every,
            "validate-every": 1 if validate_every is None else validate_every,
            "save-every": 1 if save_every is None else save_every,
            "keep": keep,
            "max-bad-steps": max_bad_steps,
        }
        wrong = [f"--{name} must be at least 1, got {value}" for name, value in counts.items() if value < 1]
        if not 0 < self.learning_rate < math.inf:
            wrong.append(f"--learning-rate must be a number above 0, got {self.learning_rate}")
        if not 0 <= self.warmup < 1:
            wrong.append(f"--warmup must be a share of the steps, at least 0 and below 1, got {self.warmup}")
        return wrong


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextRecipe(Recipe):
    """How a decoder-only model is trained."""

    context_length: int
    vocabulary: Vocabulary


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairRecipe(Recipe):
    """How an encoder-decoder model is trained: with the optimizer of the paper (section 5.3), and clipping."""

    max_length: int
    buckets: int = 3  # lengths that batches are padded to, each of which is compiled
    schedule: ScheduleName = "noam"
    b2: float = 0.98
    eps: float = 1e-9
    weight_decay: float = 0.0


@dataclasses.dataclass(frozen=True)
class DecoderOnlyPreset:
    words: str
    config: Callable[..., DecoderOnlyConfig]
    recipe: TextRecipe


@dataclasses.dataclass(frozen=True)
class EncoderDecoderPreset:
    words: str
    config: Callable[..., EncoderDecoderConfig]  # called with vocab_size and what the user wants different
    recipe: PairRecipe


def _two_vocabularies(config: Callable[..., EncoderDecoderConfig]) -> Callable[..., EncoderDecoderConfig]:
    def build(*, vocab_size: int, **options) -> EncoderDecoderConfig:
        return config(source_vocab_size=vocab_size, target_vocab_size=vocab_size, **options)

    return build


def _small(*, vocab_size: int, **options) -> EncoderDecoderConfig:
    sizes = dict(d_model=128, d_ff=512, num_layers=2, label_smoothing=0.1, embedding_tying="source_target_output")
    return _two_vocabularies(EncoderDecoderConfig.small)(vocab_size=vocab_size, **{**sizes, **options})


# Chosen by measurement on 2 cores: the two named small, and the decoder-only document's. `gpt2-small` is what its
# successors commonly use, the others follow the paper, each with the largest power of two for a batch with which a step
# stays below 17 GiB with `--precision float32`: as much as a GPU of 24 GiB, or a large laptop, has to give.
DECODER_ONLY = {
    "small": DecoderOnlyPreset(
        "trains in minutes on 2 cores",
        DecoderOnlyConfig.small,
        TextRecipe(steps=900, batch_size=8, context_length=64, learning_rate=2e-3, vocabulary="compact"),
    ),
    "document": DecoderOnlyPreset(
        "the decoder-only document's model as written",
        DecoderOnlyConfig.document,
        TextRecipe(steps=300, batch_size=4, context_length=16, learning_rate=3e-3, vocabulary="full"),
    ),
    "gpt2-small": DecoderOnlyPreset(
        "the size of GPT-2, for accelerators",
        DecoderOnlyConfig.gpt2_small,
        TextRecipe(steps=2000, batch_size=4, context_length=1024, learning_rate=6e-4, vocabulary="compact"),
    ),
}
ENCODER_DECODER = {
    "small": EncoderDecoderPreset(
        "trains in minutes on 2 cores",
        _small,
        PairRecipe(steps=1500, batch_size=16, learning_rate=4e-3, max_length=32, buckets=2),
    ),
    "document": EncoderDecoderPreset(
        "the encoder-decoder document's model as written",
        _two_vocabularies(EncoderDecoderConfig.document),
        PairRecipe(steps=2000, batch_size=32, learning_rate=5e-4, max_length=64),
    ),
    # The paper's learning rate has no factor: 4,000 steps of warmup make it 1 / sqrt(d_model * 4,000) at most.
    "paper-base": EncoderDecoderPreset(
        "the paper's base model, for accelerators",
        EncoderDecoderConfig.paper_base,
        PairRecipe(
            steps=100_000, batch_size=128, learning_rate=(512 * 4000) ** -0.5, warmup=4000 / 100_000, max_length=256
        ),
    ),
    "paper-big": EncoderDecoderPreset(
        "the paper's big model, for accelerators",
        EncoderDecoderConfig.paper_big,
        PairRecipe(
            steps=300_000, batch_size=64, learning_rate=(1024 * 4000) ** -0.5, warmup=4000 / 300_000, max_length=256
        ),
    ),
}
