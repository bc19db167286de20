"""A run's directory as the commands write and read it."""

import contextlib
import dataclasses
import datetime
import hashlib
import importlib.metadata
import json
import platform
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
from flax import nnx

from flax_transformer import training
from flax_transformer.checkpoint import Checkpoints, DamageError, RunDirectory, read_json, write_json
from flax_transformer.commands import lock
from flax_transformer.config import DecoderOnlyConfig, EncoderDecoderConfig
from flax_transformer.decoder_only import DecoderOnly
from flax_transformer.encoder_decoder import EncoderDecoder
from flax_transformer.tokenizer import Tokenizer

MODELS: dict[str, Any] = {
    "decoder-only": (DecoderOnly, DecoderOnlyConfig),
    "encoder-decoder": (EncoderDecoder, EncoderDecoderConfig),
}


@dataclasses.dataclass(frozen=True)
class LoadedRun:
    """A trained model and what turns text into its ids and back."""

    model: DecoderOnly | EncoderDecoder
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


@contextlib.contextmanager
def open_directory(output: Path | None, record: dict[str, Any], *, resume: bool) -> Iterator[RunDirectory]:
    """The directory of the run that `record`, its config.json, describes: a fresh one, or one that is resumed.

    Raises:
        ValueError: see `claim_directory`; what is to be resumed is another run; or another process is writing there.
    """
    default = Path("runs") / record["command"]
    if resume and output is None:
        raise ValueError("--resume continues the run of a directory; give it with --output DIR")
    if resume and output is not None and output.exists():
        run = RunDirectory(output)
        if not _is_only_claimed(output):
            _refuse_another_run(read_json(run.config), record, where=output)
    else:
        run = claim_directory(output, default=default)
    with lock.locked(run.root):
        yield run


def _is_only_claimed(path: Path) -> bool:
    """Whether a directory is empty, or of a run that was killed before its config.json was complete."""

    def is_of_a_claim(entry: Path) -> bool:
        if entry.name == lock.NAME:
            return True
        if entry.name == "metrics.jsonl":
            return entry.stat().st_size == 0
        return entry.name.startswith(".config.json.")

    return path.is_dir() and all(is_of_a_claim(entry) for entry in path.iterdir())


def _refuse_another_run(saved: Any, given: dict[str, Any], *, where: Path) -> None:
    """Whatever decides the numbers of a run must be equal; where its text is kept, and how often it is saved, need not."""
    before, now = (fields({name: record.get(name) for name in _DECIDING}) for record in (saved, given))
    different = [
        f"{name}: saved {json.dumps(before.get(name))}, given {json.dumps(now.get(name))}"
        for name in (now | before)
        if name != "data.name" and before.get(name) != now.get(name)
    ]
    if different:
        raise ValueError(
            f"the run in {str(where)!r} cannot be resumed as another one; leave out what differs, or give another "
            f"--output: {'; '.join(different)}"
        )


_DECIDING = ("command", "model", "training", "data")


def fields(record: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Every entry of nested objects by its dotted name."""
    found: dict[str, Any] = {}
    for name, value in record.items():
        found |= fields(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found


def options_of(path: Path, *, command: str) -> dict[str, Any]:
    """The options that a config.json holds.

    Raises:
        ValueError: not such a file, or of another command.
    """
    record = read_json(path)
    if not isinstance(record, dict) or not isinstance(record.get("options"), dict):
        raise ValueError(f"{path} holds no options; give the config.json of a run of train.py")
    if record.get("command") != command:
        raise ValueError(f"{path} is of command: saved {record.get('command')!r}, given {command!r}; name that command")
    return record["options"]


def restore_newest(
    checkpoints: Checkpoints, like: Any, *, unwanted: Literal["refuse", "ignore"] = "refuse"
) -> tuple[int, Any, dict[int, str]]:
    """The newest checkpoint that is as it was saved.

    Args:
        like, unwanted: see `Checkpoints.restore`.

    Returns:
        Its step, 0 where there is no checkpoint; its arrays, `like` where there is none; and by their steps what is wrong
        with newer ones, which are damaged.

    Raises:
        ValueError: there are checkpoints, and none can be read; or one is of another model.
    """
    damaged, steps = {}, checkpoints.steps()
    for step in reversed(steps):
        try:
            return step, checkpoints.restore(like, step=step, unwanted=unwanted), damaged
        except DamageError as error:
            damaged[step] = str(error)
    if damaged:
        raise ValueError(f"none of the checkpoints can be read; the newest, of step {steps[-1]}: {damaged[steps[-1]]}")
    return 0, like, {}


def resume(checkpoints: Checkpoints, like: Any) -> tuple[Any, list[str]]:
    """The state to go on from, see `restore_newest`, and lines about damaged checkpoints, which are set aside."""
    _, state, damaged = restore_newest(checkpoints, like)
    return state, [
        f"the checkpoint of step {step} is damaged ({problem}); it is now {checkpoints.set_aside(step)}"
        for step, problem in damaged.items()
    ]


def write_provenance(run: RunDirectory, *, record: dict[str, Any], step: int, arguments: Sequence[str]) -> None:
    """Adds this launch to `provenance.json`: what it ran with, from which step on."""
    launches = _launches(run)
    packages = ("flax-transformer", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "tiktoken")
    launch = {
        "command_line": shlex.join(["python", "train.py", *arguments]),
        "from_step": step,
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in packages},
        "devices": [f"{device.platform}: {device.device_kind}" for device in jax.devices()],
        "processes": jax.process_count(),
    }
    digests = {
        "config_sha256": _sha256(run.config),
        "corpus_sha256": record["data"]["sha256"],
        "tokenizer_sha256": record["data"]["tokenizer_sha256"],
    }
    write_json(run.provenance, {**digests, "launches": [*launches, launch]})


def _launches(run: RunDirectory) -> list[Any]:
    """Those before this one; none where the file is damaged, which no step depends on: it is set aside."""
    if not run.provenance.exists():
        return []
    try:
        return list(read_json(run.provenance)["launches"])
    except (ValueError, KeyError, TypeError) as error:
        aside = run.provenance.rename(run.root / "damaged-provenance.json")
        print(f"{run.provenance} is damaged ({error!r}); it is now {aside}", file=sys.stderr)
        return []


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # this one may run from its source
        return None


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def load_run(directory: Path) -> LoadedRun:
    """The newest model of a run that `train.py` wrote. What is wrong with newer checkpoints goes to standard error.

    Raises:
        ValueError: not the directory of a run, or one that is damaged; the message names the file.
    """
    run = RunDirectory(directory)
    record = read_json(run.config)
    try:
        model_class, config_class = MODELS[record["command"]]
        config = config_class(**record["model"])
        tokenizer_sha256 = record["data"]["tokenizer_sha256"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{run.config} does not describe a model of this version ({error!r})") from error
    if run.provenance.exists() and _sha256(run.config) != read_json(run.provenance).get("config_sha256"):
        raise ValueError(
            f"{run.config} is not the file that was written: its digest is not the one in {run.provenance}; "
            "resume the run, which writes both anew, or take both from a copy"
        )
    tokenizer = Tokenizer.load(run.tokenizer)
    if tokenizer.sha256 != tokenizer_sha256:
        raise ValueError(
            f"{run.tokenizer} is not the one that the model of {run.config} was trained with: saved "
            f"{tokenizer_sha256}, found {tokenizer.sha256}; take both from the same run"
        )
    shapes = nnx.eval_shape(lambda: model_class(config, rngs=nnx.Rngs(0)))
    structure, parameters, buffers = training.split_model(shapes)
    wanted = {"parameters": parameters, "buffers": buffers}
    with Checkpoints(run.checkpoints) as checkpoints:
        if not checkpoints.steps():
            checkpoints.restore(wanted)  # which says what is missing
        step, arrays, damaged = restore_newest(checkpoints, wanted, unwanted="ignore")
    for newer, problem in damaged.items():
        print(
            f"the checkpoint of step {newer} is damaged ({problem}); this is the model of step {step}", file=sys.stderr
        )
    return LoadedRun(structure.merge(arrays["parameters"], arrays["buffers"]), tokenizer, step)
