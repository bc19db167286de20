"""A run's directory as the commands write and read it."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from flax import nnx

from flax_transformer import training
from flax_transformer.checkpoint import Checkpoints, RunDirectory, read_json
from flax_transformer.config import DecoderOnlyConfig
from flax_transformer.decoder_only import DecoderOnly
from flax_transformer.tokenizer import Tokenizer

MODELS = {"decoder-only": (DecoderOnly, DecoderOnlyConfig)}


@dataclasses.dataclass(frozen=True)
class LoadedRun:
    """A trained model and what turns text into its ids and back."""

    model: DecoderOnly
    tokenizer: Tokenizer
    step: int


def claim_directory(output: Path | None, *, default: Path) -> RunDirectory:
    """A directory that this run alone writes to, made if needed.

    Args:
        output: what the user asked for: may exist, but must be empty.
        default: where `output` is None; if it is taken, then `default`-2, `default`-3 and so on.

    Raises:
        ValueError: not empty, not a directory, or not to be written.
    """
    candidate, number = output or default, 1
    while output is None and _is_taken(candidate):
        number += 1
        candidate = default.with_name(f"{default.name}-{number}")
    try:
        if _is_taken(candidate):
            raise ValueError(
                f"output {str(candidate)!r} already exists and is not an empty directory; give another --output, or "
                "delete it if its run is no longer needed"
            )
        candidate.mkdir(parents=True, exist_ok=True)
        (candidate / "metrics.jsonl").touch()
    except OSError as error:
        raise ValueError(
            f"output {str(candidate)!r} cannot be written ({error.strerror}); give another --output"
        ) from error
    return RunDirectory(candidate)


def _is_taken(path: Path) -> bool:
    return path.exists() and not (path.is_dir() and not any(path.iterdir()))


def append_metrics(run: RunDirectory, entry: dict[str, Any]) -> None:
    """Adds one JSON object as one line of `metrics.jsonl`."""
    with run.metrics.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


def load_run(directory: Path) -> LoadedRun:
    """The newest model of a run that `train.py` wrote.

    Raises:
        ValueError: not the directory of a run, or one that is damaged; the message names the file.
    """
    run = RunDirectory(directory)
    record = read_json(run.config)
    try:
        model_class, config_class = MODELS[record["command"]]
        config = config_class(**record["model"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{run.config} does not describe a model of this version ({error!r})") from error
    tokenizer = Tokenizer.load(run.tokenizer)
    if tokenizer.vocab_size != config.vocab_size:
        raise ValueError(
            f"{run.tokenizer} has {tokenizer.vocab_size} tokens, but the model of {run.config} has {config.vocab_size}; "
            "take both from the same run"
        )
    shapes = nnx.eval_shape(lambda: model_class(config, rngs=nnx.Rngs(0)))
    structure, parameters, buffers = training.split_model(shapes)
    wanted = {"parameters": parameters, "buffers": buffers}
    with Checkpoints(run.checkpoints) as checkpoints:
        step = checkpoints.latest_step()
        arrays = checkpoints.restore(wanted, step=step, unwanted="ignore")
    return LoadedRun(structure.merge(arrays["parameters"], arrays["buffers"]), tokenizer, step or 0)
