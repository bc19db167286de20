"""Both frameworks in turns, each in a process of its own, and what that says as ratios."""

import contextlib
import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

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
# One batch and one set of weights leave float32 rounding alone. After an update it is Adam's: it makes a step of full
# size out of a gradient that is nothing but rounding.
FIRST_LOSS, GRADIENT_NORM, LATER_LOSS = 1e-5, 1e-4, 1e-3
# Rounding decides where two tokens are all but equally likely, and everything after them differs then.
EQUAL_TRANSLATIONS = 0.8


class WorkerProcess:
    """The process of one framework (`worker.py`), as a context manager.

    Args:
        framework: torch or jax.
        threads: how many processors it may use.
        environment: variables that replace those of this process.
    """

    def __init__(self, framework: str, *, threads: int, environment: Mapping[str, str]) -> None:
        self.framework = framework
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.worker", framework, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
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
                f"the {self.framework} process ended with status {self._process.wait()} during {do}; if it was killed (-9), "
                "memory ran out: choose smaller rows"
            )
        reply = json.loads(line)
        if "error" in reply:
            raise RuntimeError(f"the {self.framework} process failed during {do}: {reply['error']}")
        return reply


@dataclasses.dataclass(frozen=True)
class Ratio:
    """A ratio of medians, and the lowest and highest of the rounds' own ratios."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


@dataclasses.dataclass(frozen=True)
class Result:
    """One row.

    Attributes:
        speed: time of a PyTorch step / time of one of ours; above 1 ours is faster.
        product: the same for a product of two float32 matrices alone, in the same processes: about what a step that is
            nothing but products can reach.
        memory: our peak memory / PyTorch's, of the whole process while it trains; below 1 ours needs less.
        memory_beyond_imports: the same, what either had after its imports taken off.
    """

    speed: Ratio
    product: Ratio
    memory: float
    memory_beyond_imports: float


def measure_row(
    row: Row, *, torch: WorkerProcess, jax: WorkerProcess, weights: Path, rounds: int, steps: int, seed: int
) -> Result:
    """Prepares both sides, makes sure that they do the same, and lets them take turns.

    Args:
        weights: the file that PyTorch writes its weights to and JAX reads.
        rounds: how many turns of both.
        steps: in a turn.

    Raises:
        ValueError: see `require_alike`.
        RuntimeError: a process failed.
    """
    prepare = dict(row=dataclasses.asdict(row), weights=str(weights), seed=seed)
    require_alike(row, torch=torch.ask("prepare", **prepare), jax=jax.ask("prepare", **prepare))
    speed = _alternate(torch, jax, rounds=rounds, steps=steps)
    theirs, ours = torch.ask("memory"), jax.ask("memory")
    for worker in (torch, jax):
        worker.ask("prepare_product", size=PRODUCT_SIZE)
    product = _alternate(torch, jax, rounds=rounds, steps=PRODUCTS)
    return Result(
        speed=speed,
        product=product,
        memory=ours["peak"] / theirs["peak"],
        memory_beyond_imports=(ours["peak"] - ours["imported"]) / (theirs["peak"] - theirs["imported"]),
    )


def require_alike(row: Row, *, torch: Mapping[str, Any], jax: Mapping[str, Any]) -> None:
    """Compares the replies to `prepare`: equal first losses and gradients, and losses that stay together when trained; or
    equal translations.

    Raises:
        ValueError: they differ, so that times would not be those of the same work.
    """
    if row.model == "translation":
        _require_equal_translations(row, torch["ids"], jax["ids"])
        return
    pairs = [("gradient norm of step 1", torch["gradient_norm"], jax["gradient_norm"], GRADIENT_NORM)]
    for number, (theirs, ours) in enumerate(zip(torch["loss"], jax["loss"], strict=True), start=1):
        pairs.append((f"loss of step {number}", theirs, ours, FIRST_LOSS if number == 1 else LATER_LOSS))
    wrong = [
        f"{name}: PyTorch {theirs:.9g}, ours {ours:.9g} (at most {tolerance:g} of it apart)"
        for name, theirs, ours, tolerance in pairs
        if not math.isclose(theirs, ours, rel_tol=tolerance)
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


def _alternate(torch: WorkerProcess, jax: WorkerProcess, *, rounds: int, steps: int) -> Ratio:
    """The time of PyTorch over ours. Who begins changes from round to round."""
    seconds: dict[str, list[Sequence[float]]] = {"torch": [], "jax": []}
    for number in range(rounds):
        for worker in (torch, jax) if number % 2 == 0 else (jax, torch):
            seconds[worker.framework].append(worker.ask("turn", steps=steps)["seconds"])
    each = [
        statistics.median(theirs) / statistics.median(ours)
        for theirs, ours in zip(seconds["torch"], seconds["jax"], strict=True)
    ]
    medians = {name: statistics.median(time for turn in turns for time in turn) for name, turns in seconds.items()}
    return Ratio(medians["torch"] / medians["jax"], min(each), max(each))
