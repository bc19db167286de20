"""Processes of one run that differ: all of them stop with what differs, and none waits for ever."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from flax_transformer.commands import agreement
from parity_tests.unit.small_runs import CACHE, PATTERN, ROOT, write


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> tuple[Path, list[dict[str, tuple[int, str]]]]:
    """Where the runs were kept, and by the way in which process 1 differed the status and error of both."""
    directory = tmp_path_factory.mktemp("runs")
    text = write(directory, PATTERN)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    flags = "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"
    environment = {**os.environ, **CACHE, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-m", "parity_tests.agreement_worker", str(port)]
    processes = [
        subprocess.Popen(
            [*command, str(number), str(text), str(directory)], env=environment, stdout=subprocess.PIPE, text=True
        )
        for number in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=200)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return directory, [json.loads(out.splitlines()[-1]) for out in outputs]


@pytest.mark.parametrize(
    ("way", "status", "words"),
    [
        (
            "configuration",
            2,
            ["training.seed: process 0 has 0, process 1 has 3", "options.log_every: process 0 has 1, process 1 has 2"],
        ),
        ("code", 2, ["code.source_sha256: process 0 has", 'process 1 has "another"']),
        ("restored", 1, ["checksum of the state: process 0 has"]),
        ("trained", 1, ["checksum of the state: process 0 has"]),
    ],
)
def test_processes_that_differ_all_stop_and_say_in_what(results, way, status, words):
    for process in results[1]:
        assert process[way][0] == status
        assert process[way][1].count("\n") == 1
        assert [word for word in words if word not in process[way][1]] == []
    others = {"training", "options", "code", "model", "data", "step"} - {word.split(".")[0] for word in words}
    assert not any(f"; {other}." in results[1][0][way][1] for other in others)


def test_a_state_that_differs_is_not_saved(results):
    directory, _ = results
    steps = [path.name for path in (directory / "trained" / "checkpoint").glob("*")]
    assert steps == ["3"]  # it went wrong at step 4, and 6 is the next that is saved
    assert not (directory / "configuration").exists()


def test_a_checksum_changes_with_any_element_and_with_their_order():
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((3, 5)).astype(np.float32), rng.integers(0, 9, 7).astype(np.int32)]
    checksum = int(agreement._checksum(arrays))
    assert checksum == int(agreement._checksum([jax.device_put(array) for array in arrays]))
    for number, array in enumerate(arrays):
        for place in np.ndindex(array.shape):
            changed = [array.copy() for array in arrays]
            changed[number].view(np.uint32)[place] ^= 1 << rng.integers(32)
            assert int(agreement._checksum(changed)) != checksum
    assert int(agreement._checksum([arrays[0][::-1].copy(), arrays[1]])) != checksum
    assert int(agreement._checksum(arrays[::-1])) != checksum
