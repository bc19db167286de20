"""The benchmarks compare like with like, and refuse to compare anything else."""

import copy
import math

import numpy as np
import pytest

from benchmarks.__main__ import main
from benchmarks.measure import WorkerProcess, require_alike
from benchmarks.rows import ROWS
from benchmarks.worker import first_steps
from parity_tests.references import needs_torch

MODELS = ["gpt", "encoder-decoder", "decoder-only"]


@pytest.fixture
def sides(tmp_path):
    """Both sides of a row at toy sizes, in this process; the weights go through `change` on their way to ours."""
    import torch

    from benchmarks import jax_side, torch_side

    def evidence(name, *, change=lambda weights: None, seeds=(0, 0)):
        row, file = ROWS[name].quick(), tmp_path / "weights.npz"
        theirs = first_steps(torch_side.Side(row, weights=file, seed=seeds[0], threads=1))
        with np.load(file) as stored:
            weights = dict(stored)
        change(weights)
        np.savez(file, **weights)
        return row, theirs, first_steps(jax_side.Side(row, weights=file, seed=seeds[1], threads=1))

    threads = torch.get_num_threads()
    yield evidence
    torch.set_num_threads(threads)


@needs_torch
@pytest.mark.parametrize("name", MODELS)
def test_both_sides_of_a_row_compute_and_learn_the_same(sides, name):
    row, theirs, ours = sides(name)
    require_alike(row, torch=theirs, jax=ours)
    assert ours["loss"][-1] < ours["loss"][0]


@needs_torch
def test_other_weights_are_noticed(sides):
    def change(weights):
        weights["transformer.h.0.mlp.c_fc.weight"][3, 5] += 0.2

    row, theirs, ours = sides("gpt", change=change)
    with pytest.raises(ValueError, match="gpt: the two sides do not compute the same"):
        require_alike(row, torch=theirs, jax=ours)


@needs_torch
def test_another_batch_is_noticed(sides):
    row, theirs, ours = sides("gpt", seeds=(0, 1))
    with pytest.raises(ValueError, match="loss of step 1"):
        require_alike(row, torch=theirs, jax=ours)


@needs_torch
def test_another_learning_rate_is_noticed(sides, monkeypatch):
    from benchmarks import jax_side

    monkeypatch.setattr(jax_side, "LEARNING_RATE", 1.3 * jax_side.LEARNING_RATE)
    row, theirs, ours = sides("gpt")
    with pytest.raises(ValueError, match=r"same, so their times say nothing: loss of step [23]"):
        require_alike(row, torch=theirs, jax=ours)


@pytest.mark.parametrize(
    ("name", "place", "factor"),
    [("loss of step 1", 0, 1 + 3e-5), ("loss of step 3", 2, 1 + 3e-3), ("loss of step 2", 1, math.nan)],
)
def test_a_loss_that_differs_is_named(name, place, factor):
    theirs = {"loss": [5.1, 4.3, 3.7], "gradient_norm": 1.9}
    ours = copy.deepcopy(theirs)
    ours["loss"][place] *= factor
    with pytest.raises(ValueError, match=name):
        require_alike(ROWS["gpt"], torch=theirs, jax=ours)


def test_a_gradient_that_differs_is_named():
    theirs = {"loss": [5.1, 4.3, 3.7], "gradient_norm": 1.9}
    with pytest.raises(ValueError, match=r"gradient norm of step 1: PyTorch 1\.9, ours 3\.8"):
        require_alike(ROWS["gpt"], torch=theirs, jax={**theirs, "gradient_norm": 3.8})


@needs_torch
@pytest.mark.parametrize("name", ["decode-1", "decode-1-recompute"])
def test_both_sides_of_a_row_write_the_same_translations(tmp_path, name):
    import torch

    from benchmarks import jax_side, torch_side

    row, file, threads = ROWS[name].quick(), tmp_path / "weights.npz", torch.get_num_threads()
    theirs = torch_side.Translator(row, weights=file, seed=0, threads=1).step()
    ours = jax_side.Translator(row, weights=file, seed=0, threads=1).step()
    torch.set_num_threads(threads)
    require_alike(row, torch={"ids": theirs}, jax={"ids": ours})
    assert np.shape(ours) == (row.batch_size, row.length)
    assert len(set(np.ravel(ours))) > 3, "the model says one thing whatever it reads; this test sees nothing"


def test_translations_that_differ_are_noticed():
    theirs, ours = [[1, 5, 7]] * 4, [[1, 5, 7]] * 3 + [[1, 5, 8]]
    with pytest.raises(ValueError, match="3 of 4 translations are equal, and 80% should be"):
        require_alike(ROWS["decode-32"], torch={"ids": theirs}, jax={"ids": ours})


@needs_torch
def test_the_quick_command_runs_end_to_end(capfd):
    assert main(["--quick", "--rows", "decoder-only", "--threads", "1"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert any(line.startswith("versions:") and "torch" in line for line in lines)
    cells = [cell.strip() for cell in lines[-1].strip("|").split("|")]
    assert cells[0].startswith("decoder-only: width 16")
    speed, product = (float(cell.split()[0]) for cell in cells[1:3])
    assert min(speed, product, *map(float, cells[3:])) > 0


def test_a_process_that_fails_says_why():
    with (
        WorkerProcess("abacus", threads=1, environment={}) as process,
        pytest.raises(RuntimeError, match="the abacus process failed during memory: ModuleNotFoundError"),
    ):
        process.ask("memory")


def test_numbers_out_of_range_are_refused_together(capsys):
    assert main(["--rounds", "0", "--threads", "10000"]) == 2
    message = capsys.readouterr().err
    assert "--rounds must be at least 1, got 0; --threads must be from 1 to" in message
