"""What a training run keeps on disk. The only file that imports orbax.

A run is one directory:

    config.json       the resolved configuration
    provenance.json   what it was run with: versions, devices, digests of the data, command lines
    tokenizer.json    the vocabulary, which the ids of the model mean nothing without
    metrics.jsonl     one JSON object per logged step
    checkpoint/N/     the whole train state after N steps, the validation loss if it is known, and a manifest of these files
    tensorboard/      the same as metrics.jsonl, as TensorBoard reads it, if that was asked for
    .lock             held by the process that writes here
    profile/          a trace of some steps, if that was asked for
    results.json, and sample.txt or samples.txt, at the end: the losses, and what the trained model wrote

A checkpoint is a flat table from names to arrays ("parameters/blocks.0.norm.scale"), whatever classes held them, so that
it outlives a renamed class and a mismatch can be told by name.
"""

import contextlib
import dataclasses
import errno
import json
import logging
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, Self

import jax
import numpy as np
import orbax.checkpoint as ocp

from flax_transformer import manifest


@dataclasses.dataclass(frozen=True)
class RunDirectory:
    """The paths of one run. Making the record touches nothing on disk."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.json"

    @property
    def tokenizer(self) -> Path:
        return self.root / "tokenizer.json"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def profile(self) -> Path:
        return self.root / "profile"

    @property
    def provenance(self) -> Path:
        return self.root / "provenance.json"

    @property
    def results(self) -> Path:
        return self.root / "results.json"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoint"


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Makes whatever the disk refuses inside an OSError with a number, its words, and `path` as its file name.

    Neither a disk that is full nor tensorstore, which raises other types, says so by itself.
    """
    try:
        yield
    except Exception as error:
        told = re.search(r"os_error_code='(\d+)'", str(error))  # tensorstore's
        number = error.errno if isinstance(error, OSError) else int(told[1]) if told else None
        if number is None:
            raise
        raise OSError(number, os.strerror(number), str(path)) from error


def write_json(path: Path, value: Any) -> None:
    """Writes `value` as JSON so that `path` holds either all of it or what it held before.

    Raises:
        OSError: it cannot be written; names `path`.
    """
    with writing(path):
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", text=True)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(value, file, indent=2, ensure_ascii=False)
                file.write("\n")
            os.chmod(temporary, 0o644)  # mkstemp's own mode shuts everyone else out
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def read_json(path: Path) -> Any:
    """The value that `write_json` wrote.

    Raises:
        ValueError: no such file, or not JSON; the message names the file.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} cannot be read as JSON ({error}); is {path.parent} the directory of a run?"
        ) from error


class DamageError(ValueError):
    """A checkpoint that is not as it was saved."""


class NotFiniteError(ValueError):
    """A state that holds NaN or infinity, and is not saved."""


class Checkpoints:
    """The checkpoints of one run, `directory/<step>/`. A context manager.

    A checkpoint is written beside its place, and renamed into it when it is complete with its manifest: so an interrupted
    save leaves the earlier checkpoints and nothing that could be taken for a new one, and a directory without manifest is
    a damaged checkpoint. What is read is checked against its manifest before.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep: int | None = None,
        saving: Literal["synchronous", "asynchronous"] = "synchronous",
    ) -> None:
        """Args:
        directory: made at the first save if it does not exist.
        keep: how many of the newest checkpoints stay, beside the one with the least validation loss; None: all.
        saving: "asynchronous" is for the one process that trains: `save` returns while another thread writes, what
            goes wrong there is raised by the next call of `save` or `close`, and what a save left behind that was
            killed is removed first.
        """
        self._directory = directory.absolute()  # orbax refuses relative paths
        self._keep = keep
        self._saving = saving
        self._writer: ThreadPoolExecutor | None = None
        self._in_progress: Future[None] | None = None
        self._losses: dict[int, float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Waits for a save in progress.

        Raises:
            OSError, NotFiniteError: see `save`.
        """
        if self._writer is not None:
            writer, self._writer = self._writer, None
            with writer:
                self._wait()

    def latest_step(self) -> int | None:
        """The step of the newest checkpoint; None where there is none."""
        return max(self.steps(), default=None)

    def steps(self) -> list[int]:
        """The steps of the checkpoints, in their order, whether they are damaged or not."""
        if not self._directory.is_dir():
            return []
        return sorted(int(path.name) for path in self._directory.iterdir() if path.name.isdecimal() and path.is_dir())

    def save(self, step: int, state: Any, *, validation_loss: float | None = None) -> None:
        """Saves a pytree of arrays as the checkpoint of `step`.

        Args:
            state: with asynchronous saving, arrays that nobody changes or deletes until the save is over.
            validation_loss: of this step, where it is known; decides which checkpoint is the best.

        Raises:
            ValueError: a checkpoint of this step exists.
            OSError: it cannot be written, or with asynchronous saving the one before could not; names the directory.
            NotFiniteError: it, or with asynchronous saving the one before, holds NaN or infinity; names the arrays.
        """
        self._wait()
        if step in self.steps():
            raise ValueError(
                f"{self._directory} already holds a checkpoint of step {step}; save into another directory."
            )
        with writing(self._directory):
            _check_room(self._directory, state)
            if self._writer is None:
                self._begin()
        known = validation_loss is not None and math.isfinite(validation_loss)
        assert self._writer is not None
        self._in_progress = self._writer.submit(self._write, step, _by_name(state), validation_loss if known else None)
        if self._saving == "synchronous":
            self._wait()

    def set_aside(self, step: int) -> Path:
        """Renames the checkpoint of a step, so that it is one no more; returns where it is."""
        number, place = 1, self._directory / str(step)
        while (aside := place.with_name(f"damaged-{step}-{number}")).exists():
            number += 1
        return place.rename(aside)

    def restore(self, like: Any, *, step: int | None = None, unwanted: Literal["refuse", "ignore"] = "refuse") -> Any:
        """The saved arrays, in the form of `like`.

        Args:
            like: a pytree of arrays or `jax.ShapeDtypeStruct`s; the arrays come back with its shapes, dtypes and, where
                given, shardings. Nothing is cast: orbax would do so silently.
            step: which checkpoint; None: the newest.
            unwanted: what to do about arrays in the checkpoint that `like` has no place for. "ignore" reads a part of a
                state: `restore({"parameters": ...}, unwanted="ignore")`.

        Raises:
            DamageError: a file of it is not as it was saved, is missing, or is one too many. All are named.
            ValueError: no checkpoint, or one whose names, shapes or dtypes are not those of `like`. All are listed.
        """
        wanted = "a complete checkpoint" if step is None else f"a complete checkpoint of step {step}"
        step = self.latest_step() if step is None else step
        if step is None or step not in self.steps():
            raise ValueError(f"{self._directory} does not hold {wanted}; give the directory of a run that saved one.")
        place = self._directory / str(step)
        if problems := manifest.problems(place):
            raise DamageError("; ".join(problems))

        expected = {name: _describe(leaf) for name, leaf in _by_name(like).items()}
        with _checkpointer() as checkpointer:
            saved = dict(checkpointer.metadata(place / _STATE).item_metadata)
            _refuse_mismatch(
                f"checkpoint {place}",
                expected={name: (leaf.shape, leaf.dtype) for name, leaf in expected.items()},
                saved={name: (tuple(leaf.shape), np.dtype(leaf.dtype)) for name, leaf in saved.items()},
                unwanted=unwanted,
            )
            restored = checkpointer.restore(
                place / _STATE,
                args=ocp.args.PyTreeRestore(
                    expected,
                    restore_args=ocp.checkpoint_utils.construct_restore_args(expected),
                    partial_restore=True,
                ),
            )
        return jax.tree.unflatten(jax.tree.structure(like), [restored[name] for name in expected])

    def _begin(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        if self._saving == "asynchronous":
            for left in self._directory.glob("*.tmp"):
                shutil.rmtree(left)
        self._losses = {step: loss for step in self.steps() if (loss := self._read_loss(step)) is not None}
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def _wait(self) -> None:
        """For the save in progress, which may raise."""
        if self._in_progress is not None:
            save, self._in_progress = self._in_progress, None
            with writing(self._directory):
                save.result()

    def _write(self, step: int, named: dict[str, Any], validation_loss: float | None) -> None:
        """In the thread that writes: the manifest and the name come last, and only then earlier checkpoints go."""
        if bad := [name for name, leaf in named.items() if not np.all(np.isfinite(leaf))]:
            raise NotFiniteError(f"the state after step {step} is not finite, and not saved: {', '.join(bad)}")
        place = self._directory / str(step)
        unfinished = place.with_name(f"{step}.tmp")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        try:
            with _checkpointer() as checkpointer:
                checkpointer.save(unfinished / _STATE, args=ocp.args.PyTreeSave(named))
            if validation_loss is not None:
                write_json(unfinished / _METRICS, {"validation_loss": validation_loss})
            manifest.write(unfinished)
            os.rename(unfinished, place)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)  # on a full disk it stands in the way
            raise
        if validation_loss is not None:
            self._losses[step] = validation_loss
        if self._keep is not None:
            steps = self.steps()
            kept = {*steps[-self._keep :], *sorted(self._losses, key=lambda step: self._losses[step])[:1]}
            for old in set(steps) - kept:
                self._losses.pop(old, None)
                self._remove(old)

    def _remove(self, step: int) -> None:
        """Renamed first: a kill while files go must not leave what looks like a damaged checkpoint."""
        going = self._directory / f"{step}.tmp"
        os.rename(self._directory / str(step), going)
        shutil.rmtree(going)

    def _read_loss(self, step: int) -> float | None:
        try:
            return float(read_json(self._directory / str(step) / _METRICS)["validation_loss"])
        except (ValueError, KeyError, TypeError):  # not validated; or damaged, which its manifest tells who loads it
            return None


_STATE, _METRICS = "state", "metrics.json"  # within a checkpoint


def _checkpointer() -> ocp.Checkpointer:
    # This process alone: where there are several, one saves, and the others have nothing to wait for.
    alone = ocp.options.MultiprocessingOptions(primary_host=jax.process_index(), active_processes={jax.process_index()})
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


def _check_room(directory: Path, state: Any) -> None:
    """Raises OSError if the disk has no room for a state. Found out while writing, it leaves half a checkpoint there."""
    present = next(path for path in (directory, *directory.parents) if path.exists())
    if shutil.disk_usage(present).free < sum(leaf.nbytes for leaf in jax.tree.leaves(state)):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# What goes wrong in orbax is raised here; pages of it in the log as well would bury the one line that tells what to do.
logging.getLogger("absl").addFilter(lambda record: "orbax" not in Path(record.pathname).parts)


def _by_name(tree: Any) -> dict[str, Any]:
    """Every leaf of a pytree by the names on the way to it, in the order of `jax.tree.leaves`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    if len(named) != len(leaves):
        raise ValueError("a train state with two leaves of one name cannot be saved: a dictionary key holds a '/'.")
    return named


def _describe(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _refuse_mismatch(
    where: str,
    *,
    expected: dict[str, tuple[tuple[int, ...], np.dtype]],
    saved: dict[str, tuple[tuple[int, ...], np.dtype]],
    unwanted: Literal["refuse", "ignore"],
) -> None:
    def text(entry: tuple[tuple[int, ...], np.dtype]) -> str:
        return f"{entry[1].name}{list(entry[0])}"

    def sentences() -> Iterable[str]:
        for name in sorted(expected.keys() | (saved.keys() if unwanted == "refuse" else set())):
            if name not in saved:
                yield f"{name}: not saved, expected {text(expected[name])}"
            elif name not in expected:
                yield f"{name}: saved {text(saved[name])}, not expected"
            elif saved[name] != expected[name]:
                yield f"{name}: saved {text(saved[name])}, expected {text(expected[name])}"

    problems = list(sentences())
    if problems:
        raise ValueError(
            f"{where} does not fit the model and optimizer that it is to be loaded into; nothing was loaded. Build them "
            "from the run's config.json. " + "; ".join(problems)
        )
