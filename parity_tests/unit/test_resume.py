"""A run that is killed, stopped or refused, and goes on exactly as if nothing had happened."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import train
from flax_transformer import data
from flax_transformer.commands import runs
from parity_tests.unit.small_runs import (
    PATTERN,
    ROOT,
    TINY,
    assert_same_run,
    call,
    curve,
    lines_of,
    metrics_of,
    stop_after,
)


def test_a_run_that_is_killed_at_any_moment_and_resumed_is_the_run_that_was_not(whole, text, tmp_path):
    """kill -9 in a process of its own: nothing is tidied up, saves in progress included."""
    output = tmp_path / "run"
    command = [sys.executable, str(ROOT / "train.py"), "--data", str(text), *TINY, "--output", str(output), "--resume"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 240
        while len(lines_of(output)) < 10:
            assert process.poll() is None, "it ended before it was killed"
            assert time.monotonic() < end
            time.sleep(0.001)
    finally:
        process.kill()
        process.wait()
    assert not (output / "results.json").exists()
    status, out, err = call(train.main, *command[2:])
    assert (status, err) == (0, "")
    assert "resumed after step" in out or "nothing to resume" in out
    assert_same_run(output, whole)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_is_stopped_by_a_signal_and_resumed_is_the_run_that_was_not(
    whole, text, tmp_path, monkeypatch, number, status
):
    output = tmp_path / "run"
    with monkeypatch.context() as patch:
        stop_after(patch, 10, number)
        assert call(train.main, "--data", text, *TINY, "--output", output)[0] == status
    assert runs.load_run(output).step == 11  # not one of those that are saved anyway
    status, out, err = call(train.main, "decoder-only", "--output", output, "--resume")  # what it says
    assert (status, err) == (0, "")
    assert "resumed after step 11" in out
    assert_same_run(output, whole)


@pytest.fixture
def stopped(text, tmp_path, monkeypatch) -> Path:
    """A run that was stopped after step 8, with checkpoints of steps 6, 7 and 8."""
    output = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        stop_after(patch, 7, signal.SIGTERM)
        assert call(train.main, "--data", text, *TINY, "--output", output)[0] == 143
    assert sorted(path.name for path in (output / "checkpoint").iterdir()) == ["6", "7", "8"]
    return output


def truncate(checkpoint: Path) -> None:
    """As a machine that loses its power: every name there, half of the bytes not."""
    for path in checkpoint.rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def test_checkpoints_that_are_torn_do_not_keep_a_run_from_going_on_with_an_earlier_one(stopped, whole):
    truncate(stopped / "checkpoint" / "8")
    shutil.copytree(stopped / "checkpoint" / "7", stopped / "checkpoint" / "9.tmp")
    shutil.rmtree(stopped / "checkpoint" / "7" / "state")
    status, out, err = call(train.main, "--output", stopped, "--resume")
    assert (status, err) == (0, "")
    assert "the checkpoint of step 8 is damaged" in out
    assert f"it is now {stopped / 'checkpoint' / 'damaged-8-1'}" in out
    assert "resumed after step 6" in out
    assert not list((stopped / "checkpoint").glob("*tmp*"))
    assert_same_run(stopped, whole)


def test_a_run_none_of_whose_checkpoints_can_be_read_is_refused_and_left_as_it_is(stopped):
    for path in (stopped / "checkpoint").iterdir():
        truncate(path)
    before = sorted(str(path) for path in stopped.rglob("*"))
    status, out, err = call(train.main, "--output", stopped, "--resume")
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert "none of the checkpoints can be read; the newest, of step 8" in err
    assert sorted(str(path) for path in stopped.rglob("*")) == before


def test_a_finished_run_that_is_resumed_takes_no_step_and_ends_as_before(whole, tmp_path):
    output = tmp_path / "run"
    shutil.copytree(whole, output)
    (output / "results.json").unlink()
    status, out, _ = call(train.main, "--output", output, "--resume")
    assert status == 0
    assert "resumed after step 23" in out
    assert_same_run(output, whole)


@pytest.mark.parametrize("found", ["nothing", "an empty directory", "a claimed directory"])
def test_a_run_that_is_to_be_resumed_and_has_not_begun_begins(whole, text, tmp_path, found):
    output = tmp_path / "run"
    if found != "nothing":
        output.mkdir()
    if found == "a claimed directory":  # whose run was killed while it built its model, or wrote its first file
        (output / "metrics.jsonl").touch()
        (output / ".config.json.abc").write_text("{")
    status, out, _ = call(train.main, "--data", text, *TINY, "--output", output, "--resume")
    assert status == 0
    assert "nothing to resume" in out
    assert curve(output) == curve(whole)


def test_the_last_checkpoints_and_the_best_are_kept(whole, text, tmp_path):
    output = tmp_path / "run"
    # A learning rate that grows out of hand after the first validation: the best checkpoint is an early one.
    wild = ["--learning-rate", "50", "--schedule", "constant", "--keep", "2"]
    assert call(train.main, "--data", text, *TINY, *wild, "--output", output)[0] == 0
    losses = {entry["step"]: entry["validation_loss"] for entry in metrics_of(output) if "validation_loss" in entry}
    best = min(losses, key=losses.__getitem__)
    kept = sorted(int(path.name) for path in (output / "checkpoint").iterdir())
    assert kept == sorted({best, 21, 23})
    assert sorted(int(path.name) for path in (whole / "checkpoint").iterdir())[-3:] == [18, 21, 23]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--d-model", "10"], ["model.d_model: saved 8, given 10", "model.d_ff: saved 32, given 40"]),
        (["--vocabulary", "full"], ["model.vocab_size: saved 7, given", "data.tokenizer_sha256: saved"]),
        (["--data", "OTHER"], ["data.sha256: saved", "data.train_tokens: saved"]),
        (["--steps", "24", "--seed", "3"], ["training.steps: saved 23, given 24", "training.seed: saved 0, given 3"]),
        (["--preset", "document"], ['training.preset: saved "small", given "document"']),
    ],
)
def test_a_run_is_not_resumed_as_another_one(whole, tmp_path, arguments, words):
    (tmp_path / "other.txt").write_text(PATTERN + " a a a")
    arguments = [str(tmp_path / "other.txt") if argument == "OTHER" else argument for argument in arguments]
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    status, out, err = call(train.main, "--output", whole, "--resume", *arguments)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert [word for word in words if word not in err] == []
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*")} == before


def test_every_field_that_decides_a_run_is_compared_when_it_is_resumed(whole, tmp_path):
    """Width, depth, vocabulary, tying, dtypes, optimizer, clipping, data and tokenizer among them."""
    record = json.loads((whole / "config.json").read_text())
    deciding = {name: value for name, value in runs.fields(record).items() if not name.startswith("options.")}
    named = {"model.d_model", "model.num_layers", "model.vocab_size", "model.embedding_tying", "model.param_dtype"}
    named |= {
        f"training.{name}" for name in ("b1", "b2", "eps", "weight_decay", "max_norm", "schedule", "learning_rate")
    }
    named |= {"data.sha256", "data.tokenizer_sha256", "command"}
    assert named - deciding.keys() == set()
    for name in deciding:
        other = json.loads(json.dumps(record))
        *groups, last = name.split(".")
        group = other
        for key in groups:
            group = group[key]
        group[last] = "another"
        output = tmp_path / name
        output.mkdir()
        (output / "config.json").write_text(json.dumps(other))
        differences = f'{name}: saved "another", given {json.dumps(deciding[name])}'
        if name == "data.name":  # where the text is kept
            with runs.open_directory(output, record, resume=True):
                continue
        with (
            pytest.raises(ValueError, match="cannot be resumed") as error,
            runs.open_directory(output, record, resume=True),
        ):
            pass
        assert str(error.value).endswith(f"--output: {differences}")


def test_a_directory_that_a_run_is_writing_to_is_refused_to_another_until_it_is_dead(whole, tmp_path):
    output = tmp_path / "run"
    shutil.copytree(whole, output)
    program = (
        "import pathlib, sys, time; from flax_transformer.commands.lock import locked\n"
        "with locked(pathlib.Path(sys.argv[1])): print('held', flush=True); time.sleep(600)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    holder = subprocess.Popen([sys.executable, "-c", program, str(output)], stdout=subprocess.PIPE, env=environment)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        before = {path: path.stat().st_mtime_ns for path in output.rglob("*")}
        status, out, err = call(train.main, "--output", output, "--resume")
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert f"a run is writing to '{output}' already (process {holder.pid} on " in err
        assert {path: path.stat().st_mtime_ns for path in output.rglob("*")} == before
    finally:
        holder.kill()
        holder.communicate()
    assert call(train.main, "--output", output, "--resume")[0] == 0


def test_another_command_and_a_directory_that_is_no_run_are_refused(whole, tmp_path):
    status, _, err = call(train.main, "encoder-decoder", "--output", whole, "--resume")
    assert (status, err.count("\n")) == (2, 1)
    assert "saved 'decoder-only', given 'encoder-decoder'" in err
    (tmp_path / "notes").write_text("precious")
    status, _, err = call(train.main, "--output", tmp_path, "--resume")
    assert (status, err.count("\n")) == (2, 1)
    assert "config.json cannot be read" in err
    status, _, err = call(train.main, "--resume")
    assert (status, err.count("\n")) == (2, 1)
    assert "give it with --output DIR" in err


def test_a_resolved_configuration_reads_back_as_the_same_run(whole, tmp_path):
    output = tmp_path / "run"
    config = whole / "config.json"
    assert call(train.main, "--config", config, "--output", output)[0] == 0
    assert curve(output) == curve(whole)
    assert (output / "config.json").read_text() == config.read_text()
    options = train.parse(["--config", str(config), "--steps", "5"])  # what is typed comes before what is read
    assert (options.training.steps, options.training.batch_size) == (5, 6)


def test_provenance_says_what_every_launch_ran_with(stopped, text):
    assert call(train.main, "--output", stopped, "--resume")[0] == 0
    provenance = json.loads((stopped / "provenance.json").read_text())
    assert provenance["corpus_sha256"] == data.read_corpus(text).sha256
    assert provenance["tokenizer_sha256"] == runs.load_run(stopped).tokenizer.sha256
    first, second = provenance["launches"]
    assert (first["from_step"], second["from_step"]) == (0, 8)
    assert f"--data {text} --d-model 8" in first["command_line"]
    assert first["versions"]["jax"] == train.jax.__version__
    assert first["devices"] == ["cpu: cpu"]
