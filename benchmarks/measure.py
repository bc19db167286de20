"""All contenders in turns, each in a process of its own, and what that says as ratios."""

import contextlib
import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from benchmarks.contenders import CONTENDERS, Contender
from benchmarks.rows import Row

ROOT = Path(__file__).parents[1]
PRODUCT_SIZE, PRODUCTS = 1024, 10  # rows and columns; how many in a turn
# Freed memory is kept and large pages are used, so that a step does not pay for page faults (docs/benchmarks.md).
TUNED_ALLOCATOR = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """How far apart, as a share of it, a number of a contender may be from that of PyTorch eager."""

    first_loss: float
    gradient_norm: float
    later_loss: float


# One batch and one set of weights leave float32 rounding alone. After an update it is Adam's: it makes a step of full
# size out of a gradient that is nothing but rounding.
FLOAT32 = Tolerance(first_loss=1e-5, gradient_norm=1e-4, later_loss=1e-3)
# Rounding to bfloat16 changes a number by at most its unit roundoff, 2^-8 of it. A loss is a mean over tokens whose errors
# have either sign: one roundoff is plenty (at toy sizes a twentieth). The gradient is rounded both ways, forward and
# backward: two (a seventh of one). Adam then makes full steps of what is but rounding, as above.
UNIT_ROUNDOFF = 2.0**-8
BFLOAT16 = Tolerance(first_loss=UNIT_ROUNDOFF, gradient_norm=2 * UNIT_ROUNDOFF, later_loss=4 * UNIT_ROUNDOFF)
# Where activations are rounded too, every layer adds its own.
ACTIVATIONS = Tolerance(first_loss=2 * UNIT_ROUNDOFF, gradient_norm=8 * UNIT_ROUNDOFF, later_loss=8 * UNIT_ROUNDOFF)
TOLERANCES = {"float32": FLOAT32, "bfloat16": BFLOAT16, "everything bfloat16": ACTIVATIONS}
# Rounding decides where two tokens are all but equally likely, and everything after them differs then.
EQUAL_TRANSLATIONS = 0.8


class WorkerProcess:
    """The process of one contender (`worker.py`), as a context manager.

    Args:
        framework: torch, jax or flax.
        variant: which of the framework's.
        threads: how many processors it may use.
        environment: variables that replace those of this process.
    """

    def __init__(self, framework: str, *, variant: str, threads: int, environment: Mapping[str, str]) -> None:
        self._name = f"{framework} {variant}"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.worker", framework, str(threads), variant],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            # `torch.compile` would start processes of its own, which stay.
            env={**os.environ, "JAX_PLATFORMS": "cpu", "TORCHINDUCTOR_COMPILE_THREADS": "1", **environment},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self._process.kill()
        self._process.communicate()

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        """The reply to a request.

        Raises:
            RuntimeError: the process could not answer, or is no more.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"do": do, **request}) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"the {self._name} process ended with status {self._process.wait()} during {do}; if it was killed (-9), "
                "memory ran out: choose smaller rows"
            )
        reply = json.loads(line)
        if "error" in reply:
            raise RuntimeError(f"the {self._name} process failed during {do}: {reply['error']}")
        return reply


@dataclasses.dataclass(frozen=True)
class Ratio:
    """A ratio of medians, and the lowest and highest of the rounds' own ratios."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


Rounds = Sequence[Sequence[float]]  # seconds of every step of every round


@dataclasses.dataclass(frozen=True)
class Result:
    """One row, by contender.

    Attributes:
        steps: of the train step, or the translation.
        products: of a product of two matrices alone, in the same processes: about what a step that is nothing but products
            can reach.
        memory: peak bytes of the process while it takes steps.
        imported: bytes that it had after its imports.
    """

    steps: Mapping[str, Rounds]
    products: Mapping[str, Rounds]
    memory: Mapping[str, int]
    imported: Mapping[str, int]

    def fastest(self, framework: str) -> str | None:
        """The contender of a framework with the lowest median; None if none of it took part."""
        medians = {
            name: median(rounds) for name, rounds in self.steps.items() if CONTENDERS[name].framework == framework
        }
        return min(medians, key=medians.__getitem__) if medians else None


def ratio(theirs: Rounds, ours: Rounds) -> Ratio:
    """Their time over ours; above 1 ours is faster."""
    each = [statistics.median(one) / statistics.median(other) for one, other in zip(theirs, ours, strict=True)]
    return Ratio(median(theirs) / median(ours), min(each), max(each))


def median(rounds: Rounds) -> float:
    return statistics.median(seconds for turn in rounds for seconds in turn)


Start = Callable[[Contender], WorkerProcess]


def measure_row(
    row: Row,
    contenders: Sequence[Contender],
    *,
    start: Start,
    weights: Path,
    rounds: int,
    steps: int,
    seed: int,
    device: Literal["cpu", "cuda"] = "cpu",
) -> Result:
    """Prepares all contenders, makes sure that they do the same, and lets them take turns.

    Args:
        start: makes the process of a contender.
        weights: the file that PyTorch eager writes its weights to and all others read.
        rounds: how many turns of each.
        steps: in a turn.
        device: "cuda": everything on a GPU, whose memory is then what counts; no product of matrices is measured.

    Raises:
        ValueError: see `require_alike`.
        RuntimeError: a process failed.
    """
    prepare: dict[str, Any] = dict(row=dataclasses.asdict(row), weights=str(weights), seed=seed, device=device)
    with contextlib.ExitStack() as stack:
        workers = {contender.name: stack.enter_context(start(contender)) for contender in contenders}
        reference = CONTENDERS["flax" if row.model == "chain" else "eager"]
        if reference in contenders:
            expected = workers[reference.name].ask("prepare", **prepare)
        else:
            with start(reference) as worker:  # closed before the others need its memory
                expected = worker.ask("prepare", **prepare)
        for contender in contenders:
            if contender is not reference:
                require_alike(
                    row, contender, expected=expected, found=workers[contender.name].ask("prepare", **prepare)
                )
        taken = _in_turns(workers, rounds=rounds, steps=steps)
        memory = {name: worker.ask("memory") for name, worker in workers.items()}
        products = {}
        if device == "cpu":
            for worker in workers.values():
                worker.ask("prepare_product", size=PRODUCT_SIZE)
            products = _in_turns(workers, rounds=rounds, steps=PRODUCTS)
    return Result(
        steps=taken,
        products=products,
        memory={name: reply["peak"] for name, reply in memory.items()},
        imported={name: reply["imported"] for name, reply in memory.items()},
    )


def require_alike(row: Row, contender: Contender, *, expected: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Compares a contender's reply to `prepare` with that of PyTorch eager: equal first losses and gradients, and losses
    that stay together when trained; or equal translations.

    Raises:
        ValueError: they differ, so that times would not be those of the same work.
    """
    if row.model == "translation":
        _require_equal_translations(row, expected["ids"], found["ids"])
        return
    tolerance = TOLERANCES[contender.factors]
    pairs = [("gradient norm of step 1", expected["gradient_norm"], found["gradient_norm"], tolerance.gradient_norm)]
    for number, (theirs, ours) in enumerate(zip(expected["loss"], found["loss"], strict=True), start=1):
        allowed = tolerance.first_loss if number == 1 else tolerance.later_loss
        pairs.append((f"loss of step {number}", theirs, ours, allowed))
    wrong = [
        f"{name}: {theirs:.9g} expected, {contender.name} {ours:.9g} (at most {allowed:g} of it apart)"
        for name, theirs, ours, allowed in pairs
        if not math.isclose(theirs, ours, rel_tol=allowed)
    ]
    if wrong:
        raise ValueError(
            f"{row.name}: the two sides do not compute the same, so their times say nothing: {'; '.join(wrong)}. Both must "
            "have the same weights, batch, loss and optimizer"
        )


def _require_equal_translations(row: Row, theirs: Sequence[Sequence[int]], ours: Sequence[Sequence[int]]) -> None:
    equal = sum(one == other for one, other in zip(theirs, ours, strict=True))
    if equal < EQUAL_TRANSLATIONS * len(theirs):
        raise ValueError(
            f"{row.name}: the two sides do not compute the same, so their times say nothing: {equal} of {len(theirs)} "
            f"translations are equal, and {EQUAL_TRANSLATIONS:.0%} should be. Both must have the same weights and sources"
        )


def _in_turns(workers: Mapping[str, WorkerProcess], *, rounds: int, steps: int) -> dict[str, list[Sequence[float]]]:
    """Who begins changes from round to round."""
    seconds: dict[str, list[Sequence[float]]] = {name: [] for name in workers}
    for number in range(rounds):
        first = number % len(workers)
        order = list(workers)
        for name in order[first:] + order[:first]:
            seconds[name].append(workers[name].ask("turn", steps=steps)["seconds"])
    return seconds
