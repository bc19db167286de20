"""SIGTERM and Ctrl-C in every phase of a run: a documented exit status, the last finished step saved, and it goes on."""

import shutil
import signal

import pytest

import train
from flax_transformer import data
from flax_transformer.commands import decoder_only_job, runs
from parity_tests.unit.small_runs import TINY, assert_same_run, call

SIGNALS = [(signal.SIGINT, 130), (signal.SIGTERM, 143)]


def raise_when_called(monkeypatch, module, name: str, number: signal.Signals, *, call_number: int = 1) -> None:
    """The signal arrives inside a function, the so many-th time that it is called."""
    original, calls = getattr(module, name), []

    def interrupted(*arguments, **options):
        calls.append(1)
        if len(calls) == call_number:
            signal.raise_signal(number)
        return original(*arguments, **options)

    monkeypatch.setattr(module, name, interrupted)


@pytest.mark.parametrize(("number", "status"), SIGNALS)
def test_a_signal_while_the_data_is_read_ends_the_program_with_its_status(text, tmp_path, monkeypatch, number, status):
    raise_when_called(monkeypatch, data, "read_corpus", number)
    result, out, err = call(train.main, "--data", text, *TINY, "--output", tmp_path / "run")
    assert (result, out, err) == (status, "", "train.py: interrupted\n")
    assert not (tmp_path / "run").exists()


def test_a_signal_while_the_model_is_built_leaves_a_directory_that_is_begun_again(text, tmp_path, monkeypatch):
    output = tmp_path / "run"
    with monkeypatch.context() as patch:
        raise_when_called(patch, decoder_only_job, "DecoderOnly", signal.SIGTERM)
        result, out, err = call(train.main, "--data", text, *TINY, "--output", output)
    assert (result, out, err) == (143, "", "train.py: interrupted\n")
    job, _ = train.prepare(train.parse(["--data", str(text), *TINY]))
    with runs.open_directory(output, job.record, resume=True) as directory:
        assert directory.root == output


def test_a_signal_while_the_first_step_compiles_saves_that_step(text, tmp_path, monkeypatch):
    output = tmp_path / "run"
    raise_when_called(monkeypatch, train.training, "dropout_keys", signal.SIGTERM)  # while the step is traced
    result, out, _ = call(train.main, "--data", text, *TINY, "--output", output)
    assert result == 143
    assert f"stopped by SIGTERM; step 1 is saved in {output}" in out
    assert runs.load_run(output).step == 1


@pytest.mark.parametrize("call_number", [1, 4])
def test_a_signal_during_an_evaluation_saves_that_step_and_its_evaluation(
    whole, text, tmp_path, monkeypatch, call_number
):
    """Of the first, and of the last, after which nothing is left but the sample."""
    output, step = tmp_path / "run", {1: 7, 4: 23}[call_number]
    with monkeypatch.context() as patch:
        raise_when_called(patch, data, "validation_batches", signal.SIGTERM, call_number=call_number)
        result, out, _ = call(train.main, "--data", text, *TINY, "--output", output)
    assert result == 143
    assert f"stopped by SIGTERM; step {step} is saved in {output}" in out
    assert call(train.main, "--output", output, "--resume")[0] == 0
    assert_same_run(output, whole)


@pytest.mark.parametrize(("number", "status"), SIGNALS)
def test_a_signal_while_the_sample_is_written_says_where_the_run_is_saved(whole, tmp_path, monkeypatch, number, status):
    output = tmp_path / "run"
    shutil.copytree(whole, output)
    with monkeypatch.context() as patch:
        raise_when_called(patch, decoder_only_job, "continue_text", number)
        result, out, _ = call(train.main, "--output", output, "--resume")
    assert result == status
    assert f"stopped by {number.name}; step 23 is saved in {output}\nto resume: python train.py" in out
    assert call(train.main, "--output", output, "--resume")[0] == 0
    assert_same_run(output, whole)


def test_a_second_signal_stops_at_once(text, tmp_path, monkeypatch):
    output = tmp_path / "run"
    raise_when_called(monkeypatch, data, "sample_batch", signal.SIGTERM, call_number=5)
    raise_when_called(monkeypatch, data, "validation_batches", signal.SIGTERM)
    result, _, err = call(train.main, "--data", text, *TINY, "--validate-every", "5", "--output", output)
    assert result == 143
    assert err.endswith("train.py: interrupted\n")
    assert runs.load_run(output).step == 3
