"""The command line: `python -m benchmarks --help`."""

import dataclasses
import importlib.metadata
import inspect
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

from benchmarks.measure import TUNED_ALLOCATOR, WorkerProcess, measure_row
from benchmarks.rows import DEFAULT_ROWS, ROWS, RowName

BUSY = 1.0  # programs that want a processor before we do


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Compare a train step of our models with PyTorch eager on the same models, on this machine's CPU; in the rows called
    decode, a greedy translation.

    PyTorch and JAX run in a process each and take turns, a few steps at a time. Both have the same weights, the same
    batch, float32, Adam, no dropout, equally many threads and the same allocator settings; losses and gradients are
    compared before anything is timed. The result is ratios: times of two runs cannot be compared, the ratio within one
    run can. docs/benchmarks.md says what is measured and how.
    """

    rows: Annotated[tuple[RowName, ...], tyro.conf.arg(metavar="ROW ...")] = DEFAULT_ROWS
    """What to measure."""
    rounds: int = 7
    """Turns of either side."""
    steps: int = 4
    """Steps that are timed in a turn; one before them is not."""
    threads: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="(default: all processors)")] = None
    """Processors that either side may use."""
    allocator: Literal["tuned", "system"] = "tuned"
    """`tuned` sets glibc's allocator to keep freed memory, for both; `system` leaves it as it is, for both."""
    openmp: Literal["passive", "active"] = "passive"
    """How PyTorch's threads wait for one another. `active`, its own default, is a little quicker on an idle machine, and
    hundreds of times slower where another program wants a processor too."""
    seed: int = 0
    """Decides weights and batches."""
    quick: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Toy sizes, two rounds of two steps: to see that everything runs. The ratios mean nothing."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status: 1 where the sides are not alike or one fails, 2 for a mistake."""
    options = tyro.cli(Options, prog="python -m benchmarks", description=_description(), args=arguments)
    try:
        threads = _checked_threads(options)
    except ValueError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    try:
        _run(options, threads)
    except (ValueError, RuntimeError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1
    return 0


def _run(options: Options, threads: int) -> None:
    allocator = TUNED_ALLOCATOR if options.allocator == "tuned" else {}
    environment = {**allocator, "OMP_WAIT_POLICY": options.openmp}
    rounds, steps = (2, 2) if options.quick else (options.rounds, options.steps)
    print(_environment(threads, environment), flush=True)
    print(f"rounds: {rounds} of {steps} timed steps a side\n")

    print(
        "| row | step: PyTorch's time / ours | matrix product: the same | peak memory: ours / PyTorch's | beyond imports |"
    )
    print("|---|---|---|---|---|")
    for name in options.rows:
        row = ROWS[name].quick() if options.quick else ROWS[name]
        # New processes for every row, so that none begins with the memory of the last.
        with (
            tempfile.TemporaryDirectory() as folder,
            WorkerProcess("torch", threads=threads, environment=environment) as torch,
            WorkerProcess("jax", threads=threads, environment=environment) as jax,
        ):
            weights = Path(folder) / "weights.npz"
            result = measure_row(
                row, torch=torch, jax=jax, weights=weights, rounds=rounds, steps=steps, seed=options.seed
            )
        print(
            f"| {row} | {result.speed} | {result.product} | {result.memory:.2f} | {result.memory_beyond_imports:.2f} |",
            flush=True,
        )


def _checked_threads(options: Options) -> int:
    if sys.platform != "linux":
        raise ValueError(f"memory and processors are asked of Linux, and this is {sys.platform}; run it there")
    wrong = [
        f"--{name} must be at least 1, got {n}" for name in ("rounds", "steps") if (n := getattr(options, name)) < 1
    ]
    if not options.rows:
        wrong.append(f"--rows needs at least one of {', '.join(ROWS)}")
    if not 0 <= options.seed < 2**32:
        wrong.append(f"--seed must be at least 0 and below 2^32, got {options.seed}")
    available = len(os.sched_getaffinity(0))
    threads = available if options.threads is None else options.threads
    if not 1 <= threads <= available:
        wrong.append(f"--threads must be from 1 to {available}, the processors of this process, got {threads}")
    if wrong:
        raise ValueError("; ".join(wrong))
    return threads


def _environment(threads: int, environment: dict[str, str]) -> str:
    """What the numbers depend on, in words."""
    names = [
        line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "jax", "flax", "optax"))
    load = os.getloadavg()[0]
    return "\n".join(
        (
            f"processor: {names[0] if names else platform.machine()}; {threads} of {os.cpu_count()} used; "
            f"load average {load:.1f} at the start"
            + (": the machine is busy, so the ratios are rough" if load > BUSY else ""),
            f"versions: Python {platform.python_version()}, {versions}",
            "both sides: float32, Adam, no dropout; "
            + " ".join(f"{name}={value}" for name, value in environment.items()),
        )
    )


def _description() -> str:
    return f"{inspect.cleandoc(Options.__doc__ or '')}\n\nRows:\n\n" + "\n\n".join(str(row) for row in ROWS.values())


if __name__ == "__main__":
    sys.exit(main())
