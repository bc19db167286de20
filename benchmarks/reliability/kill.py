"""kill -9 at random moments: does every run go on, is its curve the uninterrupted one's, and how much is lost?"""

import collections
import dataclasses
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from benchmarks.reliability import launch, tiny_run

Moment = Literal["in a save", "in an evaluation", "between"]
_PATIENCE = 300.0  # seconds


@dataclasses.dataclass(frozen=True)
class Kill:
    """Kill a training process with SIGKILL at seeded random moments, a quarter of them aimed inside a save, a quarter
    inside an evaluation and a quarter between, resume it each time, and compare the curve and the results with those of a
    run that nothing killed."""

    times: int = 50
    """How often."""
    seed: int = 0
    """Decides the moments, as far as a clock can."""

    def run(self) -> bool:
        """Whether every promise held."""
        rng = random.Random(self.seed)
        found: collections.Counter[str] = collections.Counter()
        lost, equal, finished = [], 0, 0
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder)
            text, phases = tiny_run.write_text(work), work / "phases"
            whole = work / "whole"
            if not self._finish(work, text, whole):
                return False
            expected = tiny_run.curve(whole)
            output = work / "run"
            while len(lost) < self.times:
                killed = self._kill(phases, text, output, rng)
                if killed is None:  # it was complete before its moment came
                    if not self._finish(work, text, output):
                        return False
                    finished += 1
                    equal += _same_run(output, whole, expected)
                    shutil.rmtree(output)
                    continue
                moment, due = killed
                found[moment] += 1
                lost.append(due)
                print(f"kill {len(lost)} of {self.times}: {moment}, saves lost {due}", flush=True)
            finished += 1
            equal += self._finish(work, text, output) and _same_run(output, whole, expected)
        print("\n| kills | in a save | in an evaluation | between | most saves lost | runs | bit-equal |")
        print("|---|---|---|---|---|---|---|")
        counts = " | ".join(str(found[name]) for name in ("in a save", "in an evaluation", "between"))
        print(f"| {len(lost)} | {counts} | {max(lost)} | {finished} | {equal} |")
        return equal == finished and max(lost) <= 1

    def _finish(self, work: Path, text: Path, output: Path) -> bool:
        phases = work / "phases"
        phases.write_bytes(bytes(3))
        with tiny_run.start(phases, text, output) as process:
            if process.wait(_PATIENCE) == 0:
                return True
        print(f"a run ended with status {process.returncode}:\n{phases.with_suffix('.log').read_text()[-2000:]}")
        return False

    def _kill(self, phases: Path, text: Path, output: Path, rng: random.Random) -> tuple[Moment, int] | None:
        """The moment, and how many of the saves that were due by then are not there; None: the run ended before."""
        moment = rng.choice(["in a save", "in an evaluation", "between", "anywhere"])
        skipped, delay = rng.randrange(6), rng.random()
        phases.write_bytes(bytes(3))
        with tiny_run.start(phases, text, output) as process:
            if not _await(process, lambda: phases.read_bytes()[launch.TRAINING] == 1):
                return None
            if moment == "anywhere":
                time.sleep(delay)
            else:
                place = launch.EVALUATION if moment == "in an evaluation" else launch.SAVE

                def has_come() -> bool:
                    count = phases.read_bytes()[place]
                    return count > 2 * skipped and count % 2 == (moment != "between")

                if not _await(process, has_come):
                    return None
                time.sleep({"in a save": 0.05, "in an evaluation": 0.002, "between": 0.0}[moment] * delay)
            if process.poll() is not None:
                return None
            process.kill()
            process.wait()
        state = phases.read_bytes()  # where it really was
        hit: Moment = "between"
        if state[launch.EVALUATION] % 2:
            hit = "in an evaluation"
        elif state[launch.SAVE] % 2:
            hit = "in a save"
        logged = len((output / "metrics.jsonl").read_text().splitlines())
        steps = [int(path.name) for path in (output / "checkpoint").glob("*") if path.name.isdecimal()]
        return hit, max((logged - 1) // tiny_run.SAVE_EVERY - max(steps, default=0) // tiny_run.SAVE_EVERY, 0)


def _await(process: subprocess.Popen, condition: Callable[[], bool]) -> bool:
    """Whether it came about before the process ended."""
    end = time.monotonic() + _PATIENCE
    while not condition():
        if process.poll() is not None or time.monotonic() > end:
            return False
        time.sleep(0.0002)
    return True


def _same_run(output: Path, whole: Path, expected: list[dict]) -> bool:
    """Whether the curve is the same, and what the last step left; bit for bit."""
    same = tiny_run.curve(output) == expected
    for name in ("results.json", "sample.txt", "config.json", "tokenizer.json"):
        same &= (output / name).read_bytes() == (whole / name).read_bytes()
    if not same:
        print(f"the curve of {output} is not that of {whole}")
    return same
