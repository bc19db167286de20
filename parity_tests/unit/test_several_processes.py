"""train.py in two processes on one machine: the steps of one process, resumed and stopped as one process is."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import train
from flax_transformer.commands import runs
from flax_transformer.parity.tolerances import DEVICES
from parity_tests.unit.small_runs import CACHE, ROOT, call, curve, lines_of, metrics_of, wait_for

TINY = [
    *("--d-model", "8", "--num-heads", "2", "--num-layers", "1", "--dropout", "0.3", "--context-length", "5"),
    *("--batch-size", "6", "--generate-tokens", "3", "--validate-every", "4", "--save-every", "3", "--log-every", "1"),
]
# A learning rate so small that what rounding does to one step is not blown up by those that follow.
STEPS = ["--precision", "float32", "--steps", "9", "--learning-rate", "1e-4", "--schedule", "constant"]
LONG = ["--steps", "100000", "--validate-every", "100000", "--save-every", "100000", "--log-every", "50000"]


class Pair:
    """Two processes of one command line."""

    def __init__(self, *arguments: object) -> None:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        flags = "--xla_force_host_platform_device_count=1 --xla_backend_optimization_level=0"
        environment = {**os.environ, **CACHE, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
        several = ["--coordinator", f"localhost:{port}", "--num-processes", "2", "--process-id"]
        command = [sys.executable, str(ROOT / "train.py"), *map(str, arguments), *several]
        self.processes = [
            subprocess.Popen(
                [*command, str(number)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            for number in range(2)
        ]

    def finish(self) -> list[tuple[int, str, str]]:
        """Exit status, standard output and standard error of both."""
        results = [process.communicate(timeout=400) for process in self.processes]
        return [(process.returncode, *result) for process, result in zip(self.processes, results, strict=True)]

    def wait_for_steps(self, output: Path) -> None:
        wait_for(lambda: bool(lines_of(output)), self.processes)


@pytest.fixture
def pairs() -> Iterator[list[Pair]]:
    """Those that a test starts, which end with it."""
    started: list[Pair] = []
    yield started
    for process in (process for pair in started for process in pair.processes):
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("--parallel=jit", marks=pytest.mark.slow),
        pytest.param("--parallel=pmap", marks=pytest.mark.slow),
        pytest.param("--mesh=tensor=2", marks=pytest.mark.slow),
        "--mesh=fsdp=2",
    ],
)
def test_two_processes_take_the_steps_of_one_and_go_on_bit_for_bit(pairs, text, tmp_path, layout):
    """With fsdp each saves, validates and resumes with half of the state."""
    options = ["--data", text, *TINY, *STEPS]
    assert call(train.main, *options, "--output", tmp_path / "one")[0] == 0
    pairs.append(Pair(*options, layout, "--output", tmp_path / "two"))
    assert [status for status, *_ in pairs[0].finish()] == [0, 0]
    one, two = curve(tmp_path / "one"), curve(tmp_path / "two")
    assert [entry.keys() for entry in one] == [entry.keys() for entry in two]
    for ours, theirs in zip(two, one, strict=True):
        np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=DEVICES["float32"])

    for name in ("results.json", "checkpoint/9", "checkpoint/8"):  # as if it had been killed after step 7
        (tmp_path / "two" / name).rename(tmp_path / name.replace("/", "-"))
    pairs.append(Pair("--output", tmp_path / "two", "--resume"))
    (status, out, _), (other, silence, _) = pairs[1].finish()
    assert (status, other) == (0, 0)
    assert "resumed after step 6" in out
    assert [line for line in silence.splitlines() if not line.startswith("[Gloo]")] == []
    assert curve(tmp_path / "two") == two


@pytest.mark.parametrize(
    "told",
    [
        pytest.param([0], id="the first", marks=pytest.mark.slow),
        pytest.param([1], id="the second"),
        pytest.param([0, 1], id="both", marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_either_of_two_processes_stops_both_at_once_with_the_last_step_saved(pairs, text, tmp_path, told):
    """Long before a step is logged again."""
    output = tmp_path / "run"
    pairs.append(Pair("--data", text, *TINY, *LONG, "--output", output))
    pairs[0].wait_for_steps(output)
    for number in told:
        pairs[0].processes[number].send_signal(signal.SIGTERM)
    sent = time.monotonic()
    (status, out, _), (other, _, _) = pairs[0].finish()
    assert (status, other) == (143, 143)
    assert time.monotonic() - sent < 60
    step = runs.load_run(output).step
    assert 1 < step < 50000
    assert f"stopped by SIGTERM; step {step} is saved in {output}\nto resume: python train.py" in out
    assert [entry["step"] for entry in metrics_of(output)] == [1]


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["metrics.jsonl", "provenance.json", "results.json"])
def test_a_signal_to_two_processes_before_and_after_they_train_ends_both(pairs, text, tmp_path, phase):
    """Each file is written where another phase begins: building the model, compiling, writing the sample."""
    output = tmp_path / "run"
    pairs.append(Pair("--data", text, *TINY, *STEPS, "--generate-tokens", "300", "--output", output))
    wait_for((output / phase).exists, pairs[0].processes)
    for process in pairs[0].processes:
        process.send_signal(signal.SIGTERM)
    assert [status for status, *_ in pairs[0].finish()] == [143, 143]


@pytest.mark.slow
def test_a_disk_that_is_full_in_the_first_process_ends_both(pairs, text, tmp_path):
    output = tmp_path / "run"
    pairs.append(Pair("--data", text, *TINY, *LONG, "--log-every", "1", "--output", output))
    pairs[0].wait_for_steps(output)
    (output / "metrics.jsonl").unlink()
    (output / "metrics.jsonl").mkdir()  # nothing that root, too, could write to
    (status, _, err), (other, _, silence) = pairs[0].finish()
    assert (status, other) == (1, 1)
    assert f"{output / 'metrics.jsonl'} cannot be written (Is a directory). " in err
    assert "another process cannot go on" in silence
