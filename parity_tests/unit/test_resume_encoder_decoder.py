"""kill -9 for the trainer of pairs, on one device and under pmap on two and three: the run that goes on is the whole run."""

from pathlib import Path

import numpy as np
import pytest

from flax_transformer import training
from flax_transformer.commands import runs
from parity_tests.unit.small_runs import curve, lines_of, wait_for
from parity_tests.unit.test_train_encoder_decoder import sentences, start

TINY = [
    *("--d-model", "8", "--num-heads", "2", "--num-layers", "1", "--dropout", "0.3", "--batch-size", "12"),
    *("--steps", "17", "--log-every", "1", "--validate-every", "7", "--save-every", "3"),
]


@pytest.mark.parametrize(
    ("kind", "devices"),
    [pytest.param("jit", 1, marks=pytest.mark.slow), ("pmap", 2), pytest.param("pmap", 3, marks=pytest.mark.slow)],
)
def test_a_run_that_is_killed_and_resumed_is_the_run_that_was_not(tmp_path, kind, devices):
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("".join(f"{source}\t{target}\n" for source, target in sentences()))
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    arguments = ["encoder-decoder", "--pairs", pairs, *TINY, "--parallel", kind, "--resume", "--output"]

    finish(arguments, whole, devices)
    process = start([*arguments, killed], devices=devices)
    try:
        wait_for(lambda: len(lines_of(killed)) >= 10, [process])  # so a moment that the machine's load decides
    finally:
        process.kill()
        process.communicate()
    assert not (killed / "results.json").exists()
    out = finish(arguments, killed, devices)

    assert "resumed after step" in out
    assert curve(killed) == curve(whole)
    for name in ("results.json", "samples.txt", "config.json", "tokenizer.json"):
        assert (killed / name).read_text() == (whole / name).read_text()
    ours, theirs = (training.split_model(runs.load_run(output).model)[1] for output in (killed, whole))
    for name, leaf in theirs.items():
        np.testing.assert_array_equal(ours[name], leaf, err_msg=name)


def finish(arguments: list[object], output: Path, devices: int) -> str:
    process = start([*arguments, output], devices=devices)
    out, err = process.communicate(timeout=400)
    assert (process.returncode, err) == (0, "")
    return out
