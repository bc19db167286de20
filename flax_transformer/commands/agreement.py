"""What several processes of one run have to have in common, compared before they train and as they do."""

import hashlib
import importlib.metadata
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Array, UInt

import flax_transformer
from flax_transformer.commands.runs import fields

# Where each process finds its copy of the data is its own affair; that the copies are equal, the digests in "data" say.
_OWN = {"options.data", "options.source_file", "options.target_file", "options.pairs", "data.name"}


class DisagreementError(ValueError):
    """Processes of one run differ in what must be equal. It is raised in all of them at once."""


def code_version(*programs: Path) -> dict[str, str]:
    """What the steps are computed by: versions, and a digest of the package's source and of further files."""
    package = Path(flax_transformer.__file__).parent
    digest = hashlib.sha256()
    for path in (*sorted(package.rglob("*.py")), *programs):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax", "numpy")}
    return {**versions, "source_sha256": digest.hexdigest()}


def require_same_run(record: dict[str, Any], code: dict[str, str]) -> None:
    """Raises DisagreementError where a process has another configuration, or another code, than process 0.

    Args:
        record: what config.json is to hold.
        code: see `code_version`.
    """
    if jax.process_count() == 1:
        return
    own = {name: value for name, value in fields({**record, "code": code}).items() if name not in _OWN}
    every = [json.loads(text) for text in _gather_text(json.dumps(own))]
    names = list(dict.fromkeys(name for found in every for name in found))
    _raise_if_different(
        {name: [json.dumps(found.get(name)) for found in every] for name in names},
        "start all processes with the same command line, data and installation",
    )


def require_same_state(step: int, replicas: Sequence[Sequence[Array]]) -> None:
    """Raises DisagreementError where devices that hold copies of a state hold different ones.

    Args:
        step: how many steps were taken.
        replicas: for each device of this process, the arrays that all devices hold copies of, and there in whole.
    """
    if jax.process_count() == 1:
        return
    sums = jax.device_get([_checksum(list(leaves)) for leaves in replicas])
    numbers = multihost_utils.process_allgather(np.asarray([step, *sums], np.uint32))
    steps, checksums = numbers[:, 0], numbers[:, 1:]
    # Of the devices of one process, the first that differs from the very first device stands for it.
    shown = [next((number for number in row if number != checksums[0, 0]), row[0]) for row in checksums]
    _raise_if_different(
        {"step": [str(number) for number in steps], "checksum of the state": [f"{number:08x}" for number in shown]},
        "nothing more is saved; go on from the last checkpoint with --resume, and mind the machine if it happens again",
    )


def _raise_if_different(values: dict[str, list[str]], remedy: str) -> None:
    """Args:
    values: by their names, in the order of the processes.
    """
    different = [
        f"{name}: process 0 has {row[0]}, process {other} has {row[other]}"
        for name, row in values.items()
        if (other := next((number for number, value in enumerate(row) if value != row[0]), None))
    ]
    if different:
        raise DisagreementError(f"the processes of this run do not agree; {remedy}: {'; '.join(different)}")


def _gather_text(text: str) -> list[str]:
    """The texts of all processes, in their order."""
    content = np.frombuffer(text.encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.asarray(content.size, np.int32))
    padded = np.zeros(sizes.max(), np.uint8)
    padded[: content.size] = content
    rows = multihost_utils.process_allgather(padded)
    return [bytes(row[:size]).decode() for row, size in zip(rows, sizes, strict=True)]


@jax.jit
def _checksum(leaves: list[Array]) -> UInt[Array, ""]:
    """The sum over all elements of their bits times an odd number of their place, modulo 2^32, of all arrays in turn.

    A change of one element always changes it: odd numbers have inverses modulo 2^32.
    """
    total = jnp.zeros((), jnp.uint32)
    for leaf in leaves:
        bits = jax.lax.bitcast_convert_type(leaf, _UNSIGNED[leaf.dtype.itemsize]).astype(jnp.uint32).ravel()
        place = jnp.arange(bits.size, dtype=jnp.uint32)
        total = total * 31 + (bits * (2 * place + 1)).sum(dtype=jnp.uint32)
    return total


# An element of eight bytes becomes two of four.
_UNSIGNED: dict[int, Any] = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}
