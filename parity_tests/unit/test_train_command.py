"""train.py and the generate command as a user meets them, on a text that a tiny model learns in a second."""

import contextlib
import dataclasses
import io
import json
import math
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import train
from flax_transformer import data, training
from flax_transformer.checkpoint import Checkpoints
from flax_transformer.commands import generate, progress, recipes, runs
from flax_transformer.decoder_only import DecoderOnly
from parity_tests.unit.small_runs import PATTERN, call, metrics_of, stop_after, write

TINY = [
    *("--d-model", "8", "--num-heads", "2", "--num-layers", "1", "--dropout", "0.05"),
    *("--batch-size", "5", "--context-length", "6", "--learning-rate", "0.03"),
    *("--generate-tokens", "9", "--log-every", "20"),
]


@dataclasses.dataclass(frozen=True)
class Finished:
    output: Path
    status: int
    out: str
    err: str
    arguments: list[object]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Finished:
    directory = tmp_path_factory.mktemp("train")
    arguments = ["--data", write(directory, PATTERN), *TINY, "--steps", "50", "--prompt", " a b c"]
    output = directory / "run"
    status, out, err = call(train.main, "decoder-only", *arguments, "--output", output)
    return Finished(output, status, out, err, arguments)


def test_a_run_succeeds_and_says_nothing_on_standard_error(finished):
    assert (finished.status, finished.err) == (0, "")


def test_a_run_leaves_what_it_promises(finished):
    names = {path.name for path in finished.output.iterdir()}
    files = {"config.json", "provenance.json", "tokenizer.json", "metrics.jsonl", "results.json", "sample.txt"}
    assert names == files | {"checkpoint", "loss.png", ".lock"}
    config = json.loads((finished.output / "config.json").read_text())
    assert config["command"] == "decoder-only"
    assert (config["model"]["d_model"], config["model"]["d_ff"], config["model"]["max_length"]) == (8, 32, 6)
    assert config["training"]["steps"] == 50
    recipe = recipes.DECODER_ONLY["small"].recipe
    assert (
        config["training"]["warmup"] == config["options"]["warmup"] == recipe.warmup
    )  # resolved: not only what was given


def test_metrics_are_one_object_per_logged_step(finished):
    entries = metrics_of(finished.output)
    assert [entry["step"] for entry in entries] == [1, 10, 20, 30, 40, 50]  # every 20th, and those validated
    assert [entry["step"] for entry in entries if "validation_loss" in entry] == [10, 20, 30, 40, 50]
    for entry in entries:
        assert math.isfinite(entry["loss"])
        assert entry["grad_norm"] > 0
        assert entry["learning_rate"] > 0
    assert entries[0]["tokens_per_second"] is None
    assert all(entry["tokens_per_second"] > 0 for entry in entries[1:])


def test_the_model_learns_and_the_end_compares_it_with_the_unigram_baseline(finished):
    results = json.loads((finished.output / "results.json").read_text())
    assert results["step"] == 50
    np.testing.assert_allclose(results["unigram_loss"], math.log(7), rtol=0.01)
    assert results["validation_loss"] < 0.5 * results["unigram_loss"]
    said = f"validation loss {results['validation_loss']:.3f} nats per token; unigram baseline 1.9"
    assert said in finished.out
    assert metrics_of(finished.output)[0]["loss"] > metrics_of(finished.output)[-1]["loss"]


def test_the_validation_loss_is_the_mean_over_all_tokens(finished):
    run = runs.load_run(finished.output)
    assert isinstance(run.model, DecoderOnly)
    ids = data.split(run.tokenizer.encode(PATTERN)).validation
    windows = [ids[start : start + 7] for start in range(0, len(ids) - 1, 6)]
    losses = []
    for window in windows:
        logits = run.model(jnp.asarray(window[None, :-1]))[0]
        losses += list(-jax.nn.log_softmax(logits)[jnp.arange(len(window) - 1), window[1:]])
    assert len(losses) == len(ids) - 1
    results = json.loads((finished.output / "results.json").read_text())
    np.testing.assert_allclose(results["validation_loss"], np.mean(losses), rtol=1e-4)


def test_plain_lines_tell_loss_speed_and_time_left(finished):
    lines = [line for line in finished.out.splitlines() if line.startswith("step")]
    assert lines[0].startswith("step  1/50  loss ")
    assert "tokens/s" in lines[1]
    assert " left" in lines[1]
    assert "0:00 left" in lines[-1]


def test_steps_that_take_long_are_shown_one_by_one_and_logged_as_ever(finished, tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    options = ["--validate-every", "5", "--steps", "7", "--output", tmp_path / "run"]
    status, out, _ = call(train.main, *finished.arguments, *options)
    assert status == 0
    shown = [line.split()[1] for line in out.splitlines() if line.startswith("step")]
    assert shown == [f"{step}/7" for step in range(1, 8)]
    assert [entry["step"] for entry in metrics_of(tmp_path / "run")] == [1, 5, 7]


def test_the_text_that_the_model_wrote_is_printed_and_kept(finished):
    sample = (finished.output / "sample.txt").read_text()
    assert sample.startswith(" a b c")
    assert len(sample.split()) == 3 + 9
    assert finished.out.endswith(sample)


def test_a_run_is_loaded_and_continues_a_prompt(finished):
    arguments = [finished.output, "--prompt", " b c", "--tokens", "6", "--method", "greedy"]
    status, out, err = call(generate.main, *arguments)
    assert (status, out, err) == (0, " b c d e f g a b\n", "")
    status, out, _ = call(generate.main, finished.output, "--prompt", " b c", "--tokens", "6", "--top-k", "None")
    assert status == 0
    assert len(out.split()) == 8


def test_the_checkpoint_holds_the_complete_train_state(finished):
    options = dict(zip(finished.arguments[::2], finished.arguments[1::2], strict=True))
    sizes = ["--d-model=8", "--num-heads=2", "--num-layers=1", "--context-length=6", "--steps=50"]
    job, _ = train.prepare(train.parse([f"--data={options['--data']}", *sizes]))
    _, parameters, buffers = training.split_model(job.build_model())
    start = training.init_state(parameters, buffers, job.optimizer, seed=9)
    with Checkpoints(finished.output / "checkpoint") as checkpoints:
        state = checkpoints.restore(start)
    assert (int(state.step), int(state.seed)) == (50, 0)
    loaded = training.split_model(runs.load_run(finished.output).model)[1]
    for name, leaf in state.parameters.items():
        np.testing.assert_array_equal(leaf, loaded[name])
    counts = [leaf for leaf in jax.tree.leaves(state.optimizer_state) if leaf.ndim == 0]
    assert {int(count) for count in counts} == {50}


def test_the_seed_decides_a_run(finished, tmp_path):
    curves = {}
    for seed in (0, 1):
        output = tmp_path / str(seed)
        status, *_ = call(train.main, *finished.arguments, "--seed", seed, "--output", output)
        assert status == 0  # and the model's name may be left out
        curves[seed] = [entry["loss"] for entry in metrics_of(output)]
    assert curves[0] == [entry["loss"] for entry in metrics_of(finished.output)]
    assert all(a != b for a, b in zip(curves[0], curves[1], strict=True))


def test_the_seed_decides_the_first_weights(tmp_path):
    text = write(tmp_path, PATTERN)

    def first_weights(seed):
        sizes = ["--d-model=8", "--num-heads=2", "--num-layers=1", "--context-length=6"]
        job, _ = train.prepare(train.parse([f"--data={text}", *sizes, f"--seed={seed}"]))
        return training.split_model(job.build_model())[1]["embedding.embedding"]

    np.testing.assert_array_equal(first_weights(3), first_weights(3))
    assert np.any(first_weights(3) != first_weights(4))


def test_the_document_s_model_trains_as_written(tmp_path):
    output = tmp_path / "run"
    arguments = ["--preset", "document", "--data", write(tmp_path, PATTERN), "--steps", "2", "--generate-tokens", "3"]
    assert call(train.main, "decoder-only", *arguments, "--output", output)[0] == 0
    config = json.loads((output / "config.json").read_text())
    model, recipe = config["model"], config["training"]
    assert (model["d_model"], model["num_heads"], model["num_layers"], model["max_length"]) == (64, 4, 1, 16)
    assert (model["sharing"], model["mask_fill"], model["dropout"]) == ("document", "minus_inf", 0.0)
    assert (recipe["batch_size"], recipe["vocabulary"]) == (4, "full")
    assert model["vocab_size"] == json.loads((output / "tokenizer.json").read_text())["vocab_size"] > 7


def test_a_text_with_carriage_returns_emoji_and_special_tokens_is_text(tmp_path):
    content = "Bonjour\r\n<|endoftext|> 🙂‍↔️ naïve\r\n" * 40
    output = tmp_path / "run"
    arguments = ["--data", write(tmp_path, content), *TINY, "--steps", "2", "--output", output]
    status, _, err = call(train.main, *arguments)
    assert (status, err) == (0, "")
    assert runs.load_run(output).tokenizer.decode(runs.load_run(output).tokenizer.encode(content)) == content


def test_a_sample_may_begin_inside_a_character(tmp_path):
    """The validation text begins wherever 90 % of the tokens end; these four-byte characters are several tokens each."""
    content = "".join(chr(0x13000 + number % 50) for number in range(403))
    output = tmp_path / "run"
    arguments = ["--data", write(tmp_path, content), *TINY, "--steps", "2", "--output", output]
    ids = runs.Tokenizer.build(content).encode(content)
    assert "\ufffd" in runs.Tokenizer.build(content).decode(data.split(ids).validation[:16])
    assert call(train.main, *arguments)[::2] == (0, "")


@pytest.fixture
def no_model(monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("a model was built")

    monkeypatch.setattr(training, "split_model", refuse)


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read: No such file"),
        (b"", "must hold text"),
        (b" \r\n", "must hold text"),
        (b"a few words", "is too short"),
        ("Prix: 5 \u20ac. ".encode("cp1252") * 500, "must be UTF-8"),
    ],
)
def test_a_text_that_cannot_be_used_is_one_line_naming_the_file(tmp_path, content, words):
    path = tmp_path / "text.txt"
    if content is not None:
        write(tmp_path, content)
    status, out, err = call(train.main, "--data", path, "--output", tmp_path / "run")
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert str(path) in err
    assert words in err
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--batch-size", "-3"], "--batch-size must be at least 1, got -3"),
        (["--context-length", "0"], "--context-length must be at least 1"),
        (["--log-every", "0"], "--log-every must be at least 1"),
        (["--generate-tokens", "-1"], "--generate-tokens must be at least 0"),
        (["--learning-rate", "-0.1"], "--learning-rate must be a number above 0, got -0.1"),
        (["--learning-rate", "nan"], "--learning-rate must be a number above 0, got nan"),
        (["--seed", "-1", "--steps", "0"], "--steps must be at least 1, got 0; --seed must be at least 0"),
        (["--num-heads", "3"], "num_heads must divide d_model, but 128 % 3 = 2"),
        (["--dropout", "1.5"], "dropout must be in [0, 1), got 1.5"),
        (["--prompt", " zebra"], "vocabulary"),
        (["--warmup", "1"], "--warmup must be a share of the steps, at least 0 and below 1, got 1.0"),
        (["--validate-every", "0", "--keep", "0"], "--validate-every must be at least 1, got 0; --keep must be"),
        (["--resume", "--steps", "3", "--save-every", "-1"], "--save-every must be at least 1, got -1"),
        (["--config", "nowhere.json"], "nowhere.json cannot be read as JSON"),
        (["--prompt", ""], "--prompt must hold at least one character"),
        (["--mesh", "data=1,model=1"], "its axes, which are data, fsdp, tensor, with a comma between"),
        (["--mesh", "fsdp=3"], "must divide the number of devices, 1; got fsdp=3"),
    ],
)
def test_a_number_that_cannot_be_used_is_one_line_naming_it(tmp_path, arguments, words):
    text = write(tmp_path, PATTERN)
    status, out, err = call(train.main, "decoder-only", "--data", text, *arguments, "--output", tmp_path / "run")
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert words in err
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("taken", ["directory", "file"])
def test_an_output_that_holds_something_is_refused_and_kept(tmp_path, taken):
    output = tmp_path / "run"
    if taken == "directory":
        output.mkdir()
    kept = output / "notes" if taken == "directory" else output
    kept.write_text("precious")
    status, _, err = call(train.main, "--data", write(tmp_path, PATTERN), "--output", output)
    assert status == 2
    assert err.count("\n") == 1
    assert "give another --output" in err
    assert kept.read_text() == "precious"


def test_an_empty_directory_is_taken_and_the_default_one_is_always_fresh(tmp_path):
    (tmp_path / "empty").mkdir()
    assert runs.claim_directory(tmp_path / "empty", default=tmp_path / "no").root == tmp_path / "empty"
    claimed = [runs.claim_directory(None, default=tmp_path / "runs" / "gpt").root.name for _ in range(3)]
    assert claimed == ["gpt", "gpt-2", "gpt-3"]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_run_after_the_step_it_met_and_saves_that(finished, tmp_path, monkeypatch, number, status):
    before = signal.getsignal(number)
    stop_after(monkeypatch, 2, number)
    output = tmp_path / "run"
    result, out, err = call(train.main, *finished.arguments, "--output", output)
    assert result == status
    assert signal.getsignal(number) == before
    assert "stopping after this step" in err
    assert f"step 3 is saved in {output}\nto resume: python train.py decoder-only --output {output} --resume" in out
    assert [entry["step"] for entry in metrics_of(output)] == [1]  # as without the signal: the curve has no more points
    assert runs.load_run(output).step == 3
    assert not (output / "results.json").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_mean_what_they_meant_once_the_loop_is_over(number):
    before = signal.getsignal(number)
    with progress.StopSignal() as stop:
        assert signal.getsignal(number) != before
    assert signal.getsignal(number) == before
    assert stop.received is None


def test_an_interrupt_outside_the_loop_ends_without_a_traceback(tmp_path, monkeypatch):
    def interrupted(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(data, "read_corpus", interrupted)
    assert call(train.main, "--data", tmp_path)[::2] == (130, "train.py: interrupted\n")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda run: (run / "config.json").unlink(), "config.json cannot be read"),
        (lambda run: (run / "config.json").write_text('{"command": "bert"}'), "does not describe a model"),
        (lambda run: (run / "tokenizer.json").write_text("{}"), "tokenizer.json"),
        (lambda run: (run / "checkpoint").rename(run / "elsewhere"), "does not hold a complete checkpoint"),
    ],
)
def test_a_damaged_run_is_one_line_naming_the_file(finished, tmp_path, damage, words):
    run = tmp_path / "run"
    run.mkdir()
    for path in finished.output.iterdir():
        target = run / path.name
        target.symlink_to(path) if path.is_dir() else target.write_bytes(path.read_bytes())
    damage(run)
    status, out, err = call(generate.main, run, "--prompt", " a")
    assert (status, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--help"], ["decoder-only", "encoder-decoder", "baseline"]),
        (["decoder-only", "--help"], ["--data", "--vocabulary", "900 steps of 8 x 64", "--resume", "--parallel"]),
        (["encoder-decoder", "--help"], ["--pairs", "--bad-pairs", "paper-big", "noam schedule", "--coordinator"]),
    ],
)
def test_help_explains_the_command(arguments, wanted):
    status, out, err = call(train.main, *arguments)
    assert (status, err) == (0, "")
    shown = " ".join(out.replace("│", " ").split())
    assert [words for words in wanted if words not in shown] == []


def test_progress_is_a_bar_on_a_terminal_lines_elsewhere_and_silence_on_other_processes(monkeypatch):
    assert isinstance(progress.display(5, process_index=0), progress.Lines)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert isinstance(progress.display(5, process_index=0), progress.Bar)
    assert isinstance(progress.display(5, process_index=1), progress.Silence)


def test_the_bar_shows_what_the_lines_show(monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    report = progress.Report(3, 1.25, 2e-3, 0.5, 12345.6, 3725.0, 1.5)
    with contextlib.redirect_stdout(terminal), progress.Bar(7) as bar:
        bar.say("[a title]")
        bar.show(report)
    shown = terminal.getvalue()
    assert "[a title]" in shown
    assert "3/7" in shown
    assert "loss 1.250  lr 2.00e-03  norm 0.50  12,346 tokens/s  1:02:05 left  validation loss 1.500" in shown


def test_a_narrow_terminal_still_shows_the_count_of_steps(monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    report = progress.Report(3, 1.25, 2e-3, 0.5, 12345.6, 3725.0, 1.5)
    with contextlib.redirect_stdout(terminal), progress.Bar(700) as bar:
        bar.show(report)
    assert "3/700" in terminal.getvalue()
