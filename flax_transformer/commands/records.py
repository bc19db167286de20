"""What a run keeps of its steps: metrics.jsonl, the same for TensorBoard, and checkpoints."""

import contextlib
import json
import math
from collections.abc import Callable
from typing import Any

from flax_transformer.checkpoint import Checkpoints, NotFiniteError, RunDirectory, writing
from flax_transformer.commands.tensorboard import EventFile
from flax_transformer.commands.watch import NOT_FINITE

UNWRITABLE = 1  # the exit status of a run whose directory cannot be written any more


class Records(contextlib.AbstractContextManager):
    """Keeps what a run logs and saves. For process 0 alone.

    What cannot be written, or is not finite, is not raised before `close`: the other processes have to be told first, which
    would otherwise wait for this one. After it nothing more is written, since a checkpoint of later steps would hide a hole
    in the curve.

    Attributes:
        best_validation_loss: the least before this launch; infinite where nothing was validated.
        status: `UNWRITABLE` once something could not be written, `NOT_FINITE` once a state was not to be saved; else 0.
    """

    def __init__(self, run: RunDirectory, *, step: int, keep: int, tensorboard: bool) -> None:
        """Takes out what was logged after `step`, since those steps will be taken again.

        Raises:
            OSError: it cannot be written; names the file.
        """
        entries = _read_until(run, step)
        self._metrics = run.metrics
        with writing(self._metrics):
            temporary = self._metrics.with_suffix(".tmp")
            temporary.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
            temporary.replace(self._metrics)
        self._events = EventFile(run.tensorboard, entries) if tensorboard else None
        self._checkpoints = Checkpoints(run.checkpoints, keep=keep, saving="asynchronous")
        self._problem: OSError | NotFiniteError | None = None
        self.best_validation_loss = min((entry.get("validation_loss", math.inf) for entry in entries), default=math.inf)

    @property
    def status(self) -> int:
        if self._problem is None:
            return 0
        return UNWRITABLE if isinstance(self._problem, OSError) else NOT_FINITE

    def append(self, entry: dict[str, Any]) -> None:
        """Adds one JSON object as one line of metrics.jsonl, and its numbers as scalars."""

        def write() -> None:
            with writing(self._metrics), self._metrics.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
            if self._events is not None:
                self._events.append(entry)

        self._attempt(write)

    def save(self, step: int, state: Any, *, validation_loss: float | None) -> None:
        """Saves a checkpoint, while training goes on."""
        self._attempt(lambda: self._checkpoints.save(step, state, validation_loss=validation_loss))

    def close(self) -> None:
        """Waits for a save in progress.

        Raises:
            OSError: something could not be written, now or earlier; names it.
            NotFiniteError: a state was not to be saved, now or earlier.
        """
        self._attempt(self._checkpoints.close)
        if self._problem is not None:
            raise self._problem

    def __exit__(self, *exception: object) -> None:
        """Waits for a save in progress. Says nothing of what cannot be written: that is for `close`."""
        with contextlib.suppress(OSError, NotFiniteError):
            self._checkpoints.close()
        if self._events is not None:
            with contextlib.suppress(OSError):
                self._events.close()

    def _attempt(self, write: Callable[[], None]) -> None:
        if self._problem is None:
            try:
                write()
            except (OSError, NotFiniteError) as error:
                self._problem = error


def _read_until(run: RunDirectory, step: int) -> list[dict[str, Any]]:
    """The entries of metrics.jsonl up to a step. Lines that are no entries are left out."""
    kept = []
    text = run.metrics.read_text(encoding="utf-8", errors="replace") if run.metrics.exists() else ""
    for line in text.splitlines():
        try:
            entry = json.loads(line)
            if entry["step"] > step:
                break
        except (ValueError, KeyError, TypeError):
            continue  # half a line, at whose end the run was killed; or a damaged one
        kept.append(entry)
    return kept
