"""What a person sees while a model trains: a bar on a terminal, plain lines elsewhere, nothing on other processes."""

import abc
import contextlib
import dataclasses
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any, NamedTuple, Self

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column

PATIENCE = 30.0  # seconds without a report


@dataclasses.dataclass(frozen=True)
class Report:
    """One logged step.

    Attributes:
        step: steps taken so far.
        loss: nats per token.
        learning_rate: of this step.
        grad_norm: before clipping.
        tokens_per_second: since the last report; None for the first, whose time is that of compiling.
        seconds_left: None while unknown.
        validation_loss: nats per token after this step, where it was validated.
        skipped: how many steps so far were skipped, since their loss or gradient was not finite.
        mfu: model FLOPs utilisation since the last report, where the peak of the devices is known.
        peak_memory: the most bytes that were ever in use on a device of this process, where they say.
    """

    step: int
    loss: float
    learning_rate: float
    grad_norm: float
    tokens_per_second: float | None
    seconds_left: float | None
    validation_loss: float | None = None
    skipped: int = 0
    mfu: float | None = None
    peak_memory: int | None = None

    def as_metrics(self) -> dict[str, int | float | None]:
        """What is kept of it: all but the guess of the time left, and from the validation loss on what there is."""
        kept = {name: value for name, value in dataclasses.asdict(self).items() if name != "seconds_left"}
        for name in ("validation_loss", "skipped", "mfu", "peak_memory"):
            if not kept[name]:
                del kept[name]
        return kept

    def __str__(self) -> str:
        speed = "compiled" if self.tokens_per_second is None else f"{self.tokens_per_second:,.0f} tokens/s"
        left = "" if self.seconds_left is None else f"  {_clock(self.seconds_left)} left"
        validated = "" if self.validation_loss is None else f"  validation loss {self.validation_loss:.3f}"
        skipped = f"  {self.skipped} skipped" if self.skipped else ""
        use = "" if self.mfu is None else f"  MFU {self.mfu:.1%}"
        use += "" if self.peak_memory is None else f"  {self.peak_memory / 2**30:.1f} GiB"
        numbers = f"loss {self.loss:.3f}  lr {self.learning_rate:.2e}  norm {self.grad_norm:.2f}"
        return f"{numbers}  {speed}{use}{left}{validated}{skipped}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Speed(NamedTuple):
    """How fast training is; None while that is not known."""

    tokens_per_second: float | None
    flops_per_second: float | None
    seconds_left: float | None


class Pace:
    """How fast training is, and how long it will take. The first step, which compiles, is left out."""

    def __init__(self, first: int, total_steps: int) -> None:
        """Args:
        first: steps taken before this launch.
        """
        self._total = total_steps
        self._number = first
        self._compiled: int | None = None  # the step after which the program was there
        self._tokens = self._flops = 0
        self._began = self._mark = 0.0

    def took(self, number: int, tokens: int, result: Any, *, flops: int = 0) -> None:
        """A step was started; `result` is what it will have computed."""
        self._number = number
        self._tokens += tokens
        self._flops += flops
        if self._compiled is None:
            self._compiled = number
            jax.block_until_ready(result)
            self._began = time.perf_counter()
            self.go_on()

    def measure(self) -> Speed:
        """Since the last report, once the last step is over."""
        now, taken = time.perf_counter(), self._number - (self._compiled or self._number)
        if taken == 0:
            return Speed(None, None, None)
        seconds = now - self._mark
        return Speed(
            self._tokens / seconds if self._tokens else None,
            self._flops / seconds if self._flops else None,
            (self._total - self._number) * (now - self._began) / taken,
        )

    def is_overdue(self) -> bool:
        """Whether people have not seen a report for so long that they wonder."""
        return time.perf_counter() - self._mark > PATIENCE

    def go_on(self) -> None:
        """The next report is measured from here on."""
        self._tokens = self._flops = 0
        self._mark = time.perf_counter()


class Display(abc.ABC):
    """Shows reports. A context manager, around the loop."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None

    def begin(self) -> None:
        """The first step is about to be compiled, which takes a while."""
        return None

    @abc.abstractmethod
    def show(self, report: Report) -> None: ...

    @abc.abstractmethod
    def say(self, line: str) -> None:
        """A line that stays."""


class Silence(Display):
    """For every process but the first."""

    def show(self, report: Report) -> None:
        del report

    def say(self, line: str) -> None:
        del line


class Lines(Display):
    """One line per report, each written at once, so that a log file can be followed."""

    def __init__(self, total_steps: int) -> None:
        self._total = total_steps

    def begin(self) -> None:
        self.say("compiling ...")

    def show(self, report: Report) -> None:
        self.say(f"step {report.step:>{len(str(self._total))}}/{self._total}  {report}")

    def say(self, line: str) -> None:
        print(line, flush=True)


class Bar(Display):
    """A bar in the last line of a terminal."""

    def __init__(self, total_steps: int) -> None:
        # A narrow terminal cuts the report short, never the count of steps. The console is one of our own, since rich's
        # shared one keeps the width that it found when it was made.
        count = MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=2 * len(str(total_steps)) + 1))
        self._progress = Progress(
            BarColumn(bar_width=16), count, TextColumn("{task.fields[report]}"), console=Console()
        )
        self._task = self._progress.add_task("training", total=total_steps, report="compiling ...")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._progress.stop()

    def show(self, report: Report) -> None:
        self._progress.update(self._task, completed=report.step, report=str(report))

    def say(self, line: str) -> None:
        self._progress.console.print(line, markup=False, highlight=False)


def display(total_steps: int, *, process_index: int) -> Display:
    """The display for where the output goes."""
    if process_index != 0:
        return Silence()
    return Bar(total_steps) if sys.stdout.isatty() else Lines(total_steps)


class Terminated(KeyboardInterrupt):
    """What SIGTERM raises, as Ctrl-C raises its parent."""


class _Gate:
    """Whether a signal may raise. Where other processes wait for this one, it has to tell them first, see `together`."""

    def __init__(self) -> None:
        self.closed = False
        self.pending: signal.Signals | None = None

    def receive(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.closed and self.pending is None:
            self.pending = signal.Signals(number)
            return
        self.pending = signal.Signals(number)
        self.raise_pending()

    def raise_pending(self) -> None:
        number, self.pending = self.pending, None
        if number is not None:
            raise Terminated if number == signal.SIGTERM else KeyboardInterrupt


GATE = _Gate()


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM raises `Terminated`, so that a program ends by its own exit status; it and Ctrl-C wait for `GATE`."""
    previous = {number: signal.signal(number, GATE.receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        GATE.closed, GATE.pending = False, None
        for number, handler in previous.items():
            signal.signal(number, handler)


class StopSignal:
    """Turns the first Ctrl-C or SIGTERM into a question that the loop asks, so that no step is cut in half.

    A second one acts as if this were not here. A context manager; outside of it signals do what they did before.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def status(self) -> int:
        """The exit status of a program that stops for the signal; 0 where there was none."""
        return 0 if self.received is None else 128 + self.received

    def __enter__(self) -> Self:
        self.received, GATE.pending = GATE.pending, None
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.received = signal.Signals(number)
        GATE.closed = False  # for the second one
        signal.signal(number, self._previous[self.received])
        print("\nstopping after this step, to save it; once more to stop at once", file=sys.stderr, flush=True)
