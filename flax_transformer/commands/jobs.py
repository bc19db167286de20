"""What a training loop needs to know of the model and the data that it is run for."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import optax
from flax import nnx

from flax_transformer import optimizers, training
from flax_transformer.commands.recipes import Recipe
from flax_transformer.commands.train_options import PRECISIONS, Options, as_record, given
from flax_transformer.config import TransformerConfig
from flax_transformer.sharding import MeshShape
from flax_transformer.tokenizer import Tokenizer
from flax_transformer.vocabulary_loss import default_kind


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """All that the training loop needs to know, whichever the model.

    Attributes:
        name: of the command.
        title: lines about the data, for people.
        build_model: called once.
        loss: of a training batch.
        validation_loss: of a validation batch.
        optimizer: with `schedule` inside.
        schedule: the learning rate, to be shown.
        batch: from the number of steps taken to the next batch.
        longest: tokens in a row of the longest batches.
        validation: all validation batches, of the same batch size.
        baseline: nats per token that a model must be below.
        write_sample: from the trained model to what it has to show.
        sample_file: where that is kept.
        draw_attention: from the trained model and a directory to pictures of its attention, there.
        tokenizer: kept beside the model.
        record: what config.json is to hold.
        recipe: resolved.
        validate_every, save_every: in steps, resolved.
        work: what a step is made of, in words.
    """

    name: str
    title: list[str]
    build_model: Callable[[], nnx.Module]
    loss: training.LossFunction
    validation_loss: training.LossFunction
    optimizer: optax.GradientTransformation
    schedule: optimizers.Schedule
    batch: Callable[[int], Any]
    longest: int
    validation: Callable[[], Iterator[Any]]
    baseline: float
    write_sample: Callable[[Any], str]
    sample_file: str
    draw_attention: Callable[[Any, Path], None]
    tokenizer: Tokenizer
    record: dict[str, Any]
    recipe: Recipe
    validate_every: int
    save_every: int
    work: str


def intervals(options: Options, recipe: Recipe) -> dict[str, int]:
    """Steps between two validations, and between two checkpoints."""
    fifth = max(recipe.steps // 5, 1)
    return {"validate_every": options.run.validate_every or fifth, "save_every": options.run.save_every or fifth}


def chosen_sizes(options: Options, config: type[TransformerConfig]) -> dict[str, Any]:
    """The fields of a configuration that the user decided; a width brings a feed-forward network four times as wide."""
    sizes = {**given(options, dataclasses.fields(config)), **PRECISIONS[options.training.precision]}
    return sizes if options.model.d_model is None else {**sizes, "d_ff": 4 * options.model.d_model}


def vocabulary_loss(options: Options, *, positions: int, vocab_size: int) -> dict[str, Any]:
    """How the loss over the vocabulary is computed, as arguments of a loss: as the user decided, or as is better for so
    many tokens in a batch; and how many devices share the vocabulary."""
    kind = options.training.vocabulary_loss
    if kind == "auto":
        precision = PRECISIONS[options.training.precision]["precision"]
        kind = default_kind(positions, vocab_size, precision=precision)
    shards = 1 if options.device.mesh is None else MeshShape.parse(options.device.mesh).tensor
    return {"vocabulary_loss": kind, "vocabulary_shards": shards}


def describe(
    name: str, options: Options, *, config: Any, recipe: Recipe, resolved: dict[str, Any], data: dict[str, Any]
) -> dict[str, Any]:
    """What config.json is to hold: the options as they can be read back, and what became of them."""
    decided = {**dataclasses.asdict(config), **dataclasses.asdict(recipe), **resolved}
    decided["precision"] = options.training.precision  # which stands for two fields of the configuration
    return {
        "command": name,
        "options": as_record(options, decided),
        "model": dataclasses.asdict(config),
        "training": {"preset": options.preset, "seed": options.training.seed, **dataclasses.asdict(recipe)},
        "data": data,
    }


def refuse(options: Options, recipe: Recipe, others: list[str]) -> None:
    """Raises ValueError where numbers cannot be used, all in one message; `others` are sentences about further ones."""
    run = options.run
    wrong = recipe.problems(
        log_every=run.log_every,
        validate_every=run.validate_every,
        save_every=run.save_every,
        keep=run.keep,
        max_bad_steps=run.max_bad_steps,
    )
    if not 0 <= options.training.seed < 2**32:
        wrong.append(f"--seed must be at least 0 and below 2^32, got {options.training.seed}")
    wrong += _not_at_once(options, recipe)
    if wrong + others:
        raise ValueError("; ".join(wrong + others))


def _not_at_once(options: Options, recipe: Recipe) -> list[str]:
    """What does not fall between two dispatches."""
    several, run = options.device.steps_per_dispatch, options.run
    if several < 1:
        return [f"--steps-per-dispatch must be at least 1, got {several}"]
    every = {
        "steps": recipe.steps,
        "log-every": run.log_every,
        **{name.replace("_", "-"): value for name, value in intervals(options, recipe).items()},
    }
    return [
        f"--{name} must be a multiple of --steps-per-dispatch, {several}, got {value}"
        for name, value in every.items()
        if value % several
    ]


def count_labels(batch: Any) -> int:
    """How many labels of a batch, in the host's memory, are real."""
    return int(np.count_nonzero(batch.weights))
