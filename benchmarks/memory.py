"""The resident memory of this process, as Linux counts it."""

import ctypes
import gc
from pathlib import Path

_PROCESS = Path("/proc/self")


def resident() -> int:
    """Bytes now."""
    return _status("VmRSS")


def peak() -> int:
    """The highest number of bytes since `reset_peak`."""
    return _status("VmHWM")


def give_back() -> None:
    """Gives what is free back to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def reset_peak() -> None:
    """Gives what is free back first, so that the peak is that of what follows."""
    give_back()
    (_PROCESS / "clear_refs").write_text("5")


def _status(field: str) -> int:
    lines = (_PROCESS / "status").read_text().splitlines()
    (kilobytes,) = (int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))
    return 1024 * kilobytes
