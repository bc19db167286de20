"""One run at a time in a directory."""

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

NAME = ".lock"


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Holds the directory of a run for this process, whose end, however it comes, lets go of it.

    Where the file system has no locks, as some network file systems, nothing is held, and nothing is noticed.

    Raises:
        ValueError: another run holds it, whose process is named; or nothing can be written there.
    """
    try:
        opened = (directory / NAME).open("a+", encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"output {str(directory)!r} cannot be written ({error.strerror}); give another --output"
        ) from error
    with opened as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip()
            raise ValueError(
                f"a run is writing to {str(directory)!r} already ({holder}); wait for its end, stop it, or give another "
                "--output"
            ) from None
        except OSError:
            pass
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield
