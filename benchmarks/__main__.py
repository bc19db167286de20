"""The command line: `python -m benchmarks --help`."""

import dataclasses
import importlib.metadata
import inspect
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal, get_args

import tyro

from benchmarks import table
from benchmarks.contenders import CONTENDERS, Contender, ContenderName, choose, has_compiler
from benchmarks.measure import TUNED_ALLOCATOR, WorkerProcess, measure_row
from benchmarks.rows import DEFAULT_ROWS, ROWS, Row, RowName, VocabularyLoss

BUSY = 1.0  # programs that want a processor before we do


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Compare a train step of our models with PyTorch's and Flax's own on the same models, on this machine's CPU; in the
    rows called decode, a greedy translation.

    Every contender runs in a process of its own and they take turns, a few steps at a time. All have the same weights, the
    same batch, Adam, no dropout, equally many threads and the same allocator settings; losses and gradients are compared
    with those of PyTorch eager before anything is timed. The result is ratios: times of two runs cannot be compared, the
    ratio within one run can. docs/benchmarks.md says what is measured and how.
    """

    rows: Annotated[tuple[RowName, ...], tyro.conf.arg(metavar="ROW ...")] = DEFAULT_ROWS
    """What to measure."""
    contenders: Annotated[
        tuple[ContenderName, ...],
        tyro.conf.arg(metavar="NAME ...", help_behavior_hint="(default: all that can do something of a row)"),
    ] = get_args(ContenderName)
    """Who takes part."""
    vocabulary_loss: VocabularyLoss = "auto"
    """Ours; `auto` is what the trainer chooses for so many tokens and classes."""
    rounds: int = 7
    """Turns of each contender."""
    steps: int = 4
    """Steps that are timed in a turn; one before them is not."""
    threads: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="(default: all processors)")] = None
    """Processors that each may use."""
    allocator: Literal["tuned", "system"] = "tuned"
    """`tuned` sets glibc's allocator to keep freed memory, `system` leaves it as it is; for all of them."""
    openmp: Literal["passive", "active"] = "passive"
    """How PyTorch's threads wait for one another. `active`, its own default, is a little quicker on an idle machine, and
    hundreds of times slower where another program wants a processor too."""
    seed: int = 0
    """Decides weights and batches."""
    quick: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Toy sizes, two rounds of two steps: to see that everything runs. The ratios mean nothing."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status: 1 where contenders are not alike or one fails, 2 for a mistake."""
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
    if not has_compiler():
        print("torch.compile needs a C++ compiler, g++ or that of CXX, and finds none: compiled takes no part")
    print(f"rounds: {rounds} of {steps} timed steps each\n")
    print(table.heading())

    def start(contender: Contender) -> WorkerProcess:
        return WorkerProcess(contender.framework, variant=contender.name, threads=threads, environment=environment)

    for name in options.rows:
        row = dataclasses.replace(ROWS[name], vocabulary_loss=options.vocabulary_loss)
        row = row.quick() if options.quick else row
        contenders = choose(row, options.contenders)
        if row.model == "head":
            print(_head_lines(row, contenders, start), flush=True)
            continue
        # New processes for every row, so that none begins with the memory of the last.
        with tempfile.TemporaryDirectory() as folder:
            result = measure_row(
                row,
                contenders,
                start=start,
                weights=Path(folder) / "weights.npz",
                rounds=rounds,
                steps=steps,
                seed=options.seed,
            )
        print(table.lines(row, result), flush=True)


def _head_lines(row: Row, contenders: Sequence[Contender], start: Callable[[Contender], WorkerProcess]) -> str:
    found = []
    for contender in contenders:
        with start(contender) as worker:
            found.append(table.head_line(row, contender, worker.ask("head_memory", row=dataclasses.asdict(row))))
    return "\n".join(found)


def _checked_threads(options: Options) -> int:
    if sys.platform != "linux":
        raise ValueError(f"memory and processors are asked of Linux, and this is {sys.platform}; run it there")
    wrong = [
        f"--{name} must be at least 1, got {n}" for name in ("rounds", "steps") if (n := getattr(options, name)) < 1
    ]
    if not options.rows:
        wrong.append(f"--rows needs at least one of {', '.join(ROWS)}")
    alone = [row for row in options.rows if not _of_frameworks(row, options.contenders) & {"jax"}]
    if alone:
        wrong.append(f"--contenders needs one of ours, float32 or mixed, that can do something of {', '.join(alone)}")
    if not 0 <= options.seed < 2**32:
        wrong.append(f"--seed must be at least 0 and below 2^32, got {options.seed}")
    available = len(os.sched_getaffinity(0))
    threads = available if options.threads is None else options.threads
    if not 1 <= threads <= available:
        wrong.append(f"--threads must be from 1 to {available}, the processors of this process, got {threads}")
    if wrong:
        raise ValueError("; ".join(wrong))
    return threads


def _of_frameworks(row: RowName, names: Sequence[str]) -> set[str]:
    return {contender.framework for contender in choose(ROWS[row], names)}


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
            "all contenders: Adam, no dropout; " + " ".join(f"{name}={value}" for name, value in environment.items()),
        )
    )


def _description() -> str:
    contenders = "\n\n".join(f"{name}: {contender.about}" for name, contender in CONTENDERS.items())
    rows = "\n\n".join(str(row) for row in ROWS.values())
    return f"{inspect.cleandoc(Options.__doc__ or '')}\n\nContenders:\n\n{contenders}\n\nRows:\n\n{rows}"


if __name__ == "__main__":
    sys.exit(main())
