"""train.py --tensorboard: the numbers of metrics.jsonl, read back out of the file of events."""

import importlib.util
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import train
from flax_transformer.commands.tensorboard import EventFile
from parity_tests.unit.small_runs import PATTERN, TINY, call, metrics_of, stop_after, write

needs_tensorboard = pytest.mark.skipif(
    importlib.util.find_spec("tensorboardX") is None, reason="needs the extra `tensorboard`"
)
Scalars = dict[tuple[int, str], float]


def scalars_of(directory: Path) -> Scalars:
    """Every scalar of a directory by step and name, none of which may stand there twice."""
    from tensorboardX.proto import event_pb2

    events: Any = event_pb2
    found: Scalars = {}
    for path in sorted(directory.iterdir()):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            event = events.Event.FromString(content[12 : 12 + length])  # between two checksums of four bytes
            content = content[16 + length :]
            for value in event.summary.value:
                assert (event.step, value.tag) not in found
                found[event.step, value.tag] = value.simple_value
    return found


def assert_holds_the_metrics(output: Path) -> None:
    expected = {
        (entry["step"], name): value
        for entry in metrics_of(output)
        for name, value in entry.items()
        if name != "step" and value is not None
    }
    found = scalars_of(output / "tensorboard")
    assert found.keys() == expected.keys()
    np.testing.assert_allclose(list(found.values()), [expected[key] for key in found], rtol=1e-7)  # float32


@pytest.fixture
def arguments(tmp_path) -> list[object]:
    return ["--data", write(tmp_path, PATTERN), *TINY, "--output", tmp_path / "run"]


@needs_tensorboard
def test_a_run_that_is_stopped_and_resumed_has_the_curve_of_its_metrics_without_a_step_twice(
    arguments, tmp_path, monkeypatch
):
    with monkeypatch.context() as patch:
        stop_after(patch, 10, train.signal.SIGTERM)
        assert call(train.main, *arguments, "--tensorboard")[0] == 143
    assert_holds_the_metrics(tmp_path / "run")
    (tmp_path / "run" / "checkpoint" / "11").rename(tmp_path / "elsewhere")  # so that four steps are taken again
    assert call(train.main, "--output", tmp_path / "run", "--resume")[::2] == (0, "")
    assert [entry["step"] for entry in metrics_of(tmp_path / "run")] == list(range(1, 24))
    assert_holds_the_metrics(tmp_path / "run")
    assert {name for _, name in scalars_of(tmp_path / "run" / "tensorboard")} == {
        *("loss", "validation_loss", "learning_rate", "grad_norm", "tokens_per_second")
    }


@needs_tensorboard
def test_a_loss_that_is_not_a_number_is_written_as_such(tmp_path):
    file = EventFile(tmp_path / "events", [{"step": 3, "loss": float("nan")}])
    file.append({"step": 5, "loss": float("inf"), "tokens_per_second": None})
    file.close()
    np.testing.assert_equal(scalars_of(tmp_path / "events"), {(3, "loss"): np.nan, (5, "loss"): np.inf})


def test_without_the_package_the_extra_is_named_before_anything_is_made(arguments, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    status, out, err = call(train.main, *arguments, "--tensorboard")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert 'pip install "flax-transformer[tensorboard]"' in err
    assert not (tmp_path / "run").exists()


def test_without_being_asked_for_nothing_is_written_and_the_package_is_not_needed(arguments, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    assert call(train.main, *arguments, "--steps", "2")[0] == 0
    assert not (tmp_path / "run" / "tensorboard").exists()
