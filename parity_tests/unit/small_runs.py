"""Runs of train.py that take seconds: how tests start them and read what they leave."""

import contextlib
import io
import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import train
from flax_transformer import data
from flax_transformer.checkpoint import Checkpoints

ROOT = Path(train.__file__).parent
CACHE = {"JAX_COMPILATION_CACHE_DIR": str(ROOT / ".jax_cache"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2"}
PATTERN = " a b c d e f g" * 200
# What `whole` is trained with.
TINY = [
    *("--d-model", "8", "--num-heads", "2", "--num-layers", "1", "--dropout", "0.3"),
    *("--batch-size", "6", "--context-length", "5", "--learning-rate", "0.03", "--generate-tokens", "3"),
    *("--log-every", "1", "--validate-every", "7", "--save-every", "3", "--steps", "23"),
]


def write(directory: Path, content: str | bytes) -> Path:
    path = directory / "text.txt"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def call(command, *arguments: object) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of a command."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = command([str(argument) for argument in arguments])
        except SystemExit as exit_:
            status = int(exit_.code or 0)
    return status, out.getvalue(), err.getvalue()


def wait_for(condition: Callable[[], bool], processes: list[subprocess.Popen]) -> None:
    """Until processes that go on running have brought something about."""
    end = time.monotonic() + 400
    while not condition():
        assert [process.returncode for process in processes if process.poll() is not None] == []
        assert time.monotonic() < end
        time.sleep(0.01)


def stop_after(monkeypatch, steps: int, number: signal.Signals) -> None:
    """The signal arrives when so many steps have been taken and the next is prepared."""
    sample_batch = data.sample_batch

    def interrupted(*arguments, step, **options):
        if step == steps:
            signal.raise_signal(number)
        return sample_batch(*arguments, step=step, **options)

    monkeypatch.setattr(data, "sample_batch", interrupted)


def metrics_of(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def lines_of(output: Path) -> list[str]:
    path = output / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def curve(output: Path) -> list[dict]:
    """All that a run logged, except for the times that it took."""
    return [{k: v for k, v in entry.items() if k != "tokens_per_second"} for entry in metrics_of(output)]


def leaves(output: Path, step: int) -> dict[str, np.ndarray]:
    job, _ = train.prepare(train.parse(["--output", str(output), "--resume"]))
    structure_of_state = train.training.split_model(job.build_model())
    like = train.training.init_state(*structure_of_state[1:], job.optimizer, seed=1)
    with Checkpoints(output / "checkpoint") as checkpoints:
        state = checkpoints.restore(like, step=step)
    return {str(number): np.asarray(leaf) for number, leaf in enumerate(train.jax.tree.leaves(state))}


def assert_same_run(output: Path, whole: Path) -> None:
    assert curve(output) == curve(whole)
    ours, theirs = leaves(output, 23), leaves(whole, 23)
    assert {name for name in theirs if ours[name].tobytes() != theirs[name].tobytes()} == set()
    for name in ("results.json", "sample.txt", "config.json", "tokenizer.json"):
        assert (output / name).read_text() == (whole / name).read_text()
