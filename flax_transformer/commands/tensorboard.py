"""The numbers of metrics.jsonl as TensorBoard reads them. The only file that imports tensorboardX."""

import os
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flax_transformer.checkpoint import writing


def require_tensorboard() -> None:
    """Raises ValueError if the package of the extra `tensorboard` is not installed."""
    try:
        import tensorboardX  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f'--tensorboard needs the package tensorboardX ({error}); install it with: pip install "flax-transformer'
            '[tensorboard]"'
        ) from error


class EventFile:
    """A file of events, one scalar for every number of every entry.

    It is written here and now, not by tensorboardX's own thread, whose errors would come too late to be told and whose
    queue would wait for ever for a disk that is full.
    """

    def __init__(self, directory: Path, entries: Iterable[Mapping[str, Any]]) -> None:
        """Begins with the entries that there are, and then removes the files of earlier launches.

        So no step stands there twice, and the curve is whole even if earlier launches wrote none.

        Raises:
            OSError: it cannot be written; names the file.
        """
        from tensorboardX import RecordWriter
        from tensorboardX.proto import event_pb2, summary_pb2

        self._events: Any = event_pb2
        self._summaries: Any = summary_pb2
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self.path = directory.absolute() / name  # to tensorboardX a path with a colon in front is in some cloud
        with writing(self.path):
            directory.mkdir(parents=True, exist_ok=True)
            self._file = RecordWriter(str(self.path))
            self._write(file_version="brain.Event:2")
            # A TensorBoard that is open forgets what it has read of the files that go.
            self._write(session_log=self._events.SessionLog(status=self._events.SessionLog.START))
            for entry in entries:
                self._add(entry)
            self._file.flush()
            for other in directory.glob("events.out.tfevents.*"):
                if other.name != name:
                    other.unlink()

    def append(self, entry: Mapping[str, Any]) -> None:
        """Adds the numbers of one entry, under their own names, at its `step`.

        Raises:
            OSError: they cannot be written; names the file.
        """
        with writing(self.path):
            self._add(entry)
            self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _add(self, entry: Mapping[str, Any]) -> None:
        value = self._summaries.Summary.Value
        scalars = [
            value(tag=name, simple_value=number)
            for name, number in entry.items()
            if name != "step" and number is not None
        ]
        self._write(step=entry["step"], summary=self._summaries.Summary(value=scalars))

    def _write(self, **content: Any) -> None:
        self._file.write(self._events.Event(wall_time=time.time(), **content).SerializeToString())
