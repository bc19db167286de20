"""What a wrong word on the command line is answered with, and what --help says."""

import itertools

import pytest

import train
from flax_transformer.commands.command_line import parse
from parity_tests.unit.small_runs import call


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--lerning-rate", "3"],
            "no option --lerning-rate; perhaps --learning-rate? train.py decoder-only --help shows",
        ),
        (
            ["encoder-decoder", "--sourcefile=a"],
            "no option --sourcefile; perhaps --source-file? train.py encoder-decoder",
        ),
        (["encoder-decoder", "--context-length", "3"], "no option --context-length; "),
        (["-x"], "no option -x; train.py decoder-only --help shows all"),
        (["encoder_decoder"], "no command 'encoder_decoder'; perhaps encoder-decoder? train.py --help shows all"),
        (["my.txt"], "no command 'my.txt'; train.py --help shows all"),
        (["--steps", "abc"], "--steps must be a whole number, got 'abc'"),
        (["--steps", "3.5"], "--steps must be a whole number, got '3.5'"),
        (["--steps", "3", "5"], "'5' follows no option that takes a value"),
        (["--dropout=half"], "--dropout must be a number, got 'half'"),
        (["--schedule", "cosin"], "--schedule must be one of cosine, noam, constant, got 'cosin'; perhaps cosine?"),
        (["--preset", "paper"], "--preset must be one of small, document, gpt2-small, got 'paper'"),
        (["--steps"], "--steps must be followed by a whole number, got nothing"),
        (["--data", "--steps", "3"], "--data must be followed by a path, got --steps"),
        (["--resume=yes"], "--resume takes no value, got 'yes'"),
    ],
)
def test_a_wrong_word_is_one_line_with_the_nearest_right_one(arguments, words):
    status, out, err = call(train.main, *arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("train.py: ")
    assert words in err


def test_every_way_to_write_an_option_is_understood():
    written = (
        ["--steps", "3"],
        ["--steps=3"],
        ["decoder-only", "--steps", "3", "--learning_rate", "1e-3", "--prompt=--x"],
    )
    assert [parse(arguments).training.steps for arguments in written] == [3, 3, 3]
    options = parse(["--tensorboard", "--data", "a file", "--steps", "None", "--warmup", "-0.5"])
    assert options.run.tensorboard
    assert (options.training.steps, options.training.warmup) == (None, -0.5)


@pytest.mark.parametrize("command", [[], ["decoder-only"], ["encoder-decoder"]])
def test_help_is_wrapped_prose(monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "100")
    status, out, err = call(train.main, *command, "--help")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert max(map(len, lines)) <= 100
    assert [words for words in ("devices options", "default: False", "default: None") if words in out] == []
    inside = [line.strip("│ ") for line in lines if line.startswith("│")]
    broken = [line for line, following in itertools.pairwise(inside) if breaks_off(line, following)]
    assert broken == []  # where a docstring breaks its lines, the help must not


def breaks_off(line: str, following: str) -> bool:
    return 0 < len(line) < 60 and line[-1] not in ".):}─" and following[:1].islower()
