"""The benchmarks compare like with like, and refuse to compare anything else."""

import copy
import dataclasses
import math

import jax
import numpy as np
import pytest

from benchmarks import table
from benchmarks.__main__ import main
from benchmarks.contenders import CONTENDERS, choose, has_compiler
from benchmarks.measure import BFLOAT16, FLOAT32, Result, WorkerProcess, ratio, require_alike
from benchmarks.rows import ROWS, RowName
from benchmarks.worker import first_steps
from parity_tests.references import needs_torch

MODELS: list[RowName] = ["gpt", "encoder-decoder", "decoder-only"]
OURS = CONTENDERS["float32"]


@pytest.fixture
def sides(tmp_path):
    """PyTorch eager and another contender at toy sizes, in this process; the weights go through `change` on their way."""
    import torch

    from benchmarks import flax_side, jax_side, torch_side

    modules = {"torch": torch_side, "jax": jax_side, "flax": flax_side}

    def evidence(name, contender=OURS, *, change=lambda weights: None, seeds=(0, 0)):
        row, file = ROWS[name].quick(), tmp_path / "weights.npz"
        theirs = first_steps(torch_side.Side(row, weights=file, seed=seeds[0], threads=1))
        with np.load(file) as stored:
            weights = dict(stored)
        change(weights)
        np.savez(file, **weights)
        side = modules[contender.framework].Side
        with jax.numpy_dtype_promotion("standard"):  # optax's Adam needs it
            found = first_steps(side(row, weights=file, seed=seeds[1], threads=1, variant=contender.name))
        return row, theirs, found

    threads = torch.get_num_threads()
    yield evidence
    torch.set_num_threads(threads)


def pairs(*contenders):
    return [(row, name) for row in MODELS for name in contenders if CONTENDERS[name].takes_part(ROWS[row])]


def check_alike(sides, row, contender):
    row, theirs, found = sides(row, CONTENDERS[contender])
    require_alike(row, CONTENDERS[contender], expected=theirs, found=found)
    assert found["loss"][-1] < found["loss"][0]


@needs_torch
@pytest.mark.parametrize(("row", "contender"), pairs("fused", "autocast", "float32", "mixed", "flax"))
def test_every_contender_computes_and_learns_the_same(sides, row, contender):
    check_alike(sides, row, contender)


@needs_torch
@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(not has_compiler(), reason="needs a C++ compiler")
@pytest.mark.parametrize(("row", "contender"), pairs("compiled", "autocast-compiled"))
def test_compiled_contenders_do_so_too(sides, row, contender):
    check_alike(sides, row, contender)


@needs_torch
@pytest.mark.parametrize("kind", ["plain", "fused"])
def test_either_loss_over_the_vocabulary_is_the_same_work(sides, monkeypatch, kind):
    from benchmarks import jax_side

    monkeypatch.setattr(jax_side, "default_kind", lambda positions, classes, *, precision: kind)
    check_alike(sides, "decoder-only", "float32")


def test_a_dispatch_of_several_steps_is_those_steps(tmp_path):
    from benchmarks import flax_side, jax_side

    row = dataclasses.replace(ROWS["dispatch-8"], num_layers=3)
    sides = [module.Side(row, weights=tmp_path / "none", seed=3, threads=1) for module in (jax_side, jax_side)]
    with jax.numpy_dtype_promotion("standard"):
        sides.append(flax_side.Side(row, weights=tmp_path / "none", seed=3, threads=1))
        theirs = sides[2].dispatch()
    expected = [sides[0].step() for _ in range(8)][-1]
    np.testing.assert_allclose([sides[1].dispatch(), theirs], expected, rtol=1e-4)
    np.testing.assert_allclose(sides[1].gradient_norm(), sides[0].gradient_norm(), rtol=1e-4)


def test_ours_and_flax_take_the_same_steps_of_a_chain(tmp_path):
    from benchmarks import flax_side, jax_side

    row = dataclasses.replace(ROWS["dispatch"], num_layers=3)
    nowhere = tmp_path / "no weights"
    with jax.numpy_dtype_promotion("standard"):
        theirs = first_steps(flax_side.Side(row, weights=nowhere, seed=3, threads=1))
    ours = first_steps(jax_side.Side(row, weights=nowhere, seed=3, threads=1))
    require_alike(row, OURS, expected=theirs, found=ours)


def test_the_chain_has_the_leaves_that_are_measured():
    from flax import nnx

    from benchmarks import chain

    parameters = nnx.state(nnx.eval_shape(lambda: chain.build(ROWS["dispatch"], seed=0)), nnx.Param)
    count = sum(1 for _ in nnx.to_flat_state(parameters))
    assert 3 * count + 2 == 578, "parameters, two moments, and the counts of optimizer and Adam"


@needs_torch
def test_other_weights_are_noticed(sides):
    def change(weights):
        weights["transformer.h.0.mlp.c_fc.weight"][3, 5] += 0.2

    row, theirs, ours = sides("gpt", change=change)
    with pytest.raises(ValueError, match="gpt: the two sides do not compute the same"):
        require_alike(row, OURS, expected=theirs, found=ours)


@needs_torch
def test_another_batch_is_noticed(sides):
    row, theirs, ours = sides("gpt", seeds=(0, 1))
    with pytest.raises(ValueError, match="loss of step 1"):
        require_alike(row, OURS, expected=theirs, found=ours)


@needs_torch
def test_another_learning_rate_is_noticed(sides, monkeypatch):
    from benchmarks import jax_side

    monkeypatch.setattr(jax_side, "LEARNING_RATE", 1.3 * jax_side.LEARNING_RATE)
    row, theirs, ours = sides("gpt")
    with pytest.raises(ValueError, match=r"same, so their times say nothing: loss of step [23]"):
        require_alike(row, OURS, expected=theirs, found=ours)


@pytest.mark.parametrize(
    ("name", "place", "factor"),
    [("loss of step 1", 0, 1 + 3e-5), ("loss of step 3", 2, 1 + 3e-3), ("loss of step 2", 1, math.nan)],
)
def test_a_loss_that_differs_is_named(name, place, factor):
    theirs = {"loss": [5.1, 4.3, 3.7], "gradient_norm": 1.9}
    ours = copy.deepcopy(theirs)
    ours["loss"][place] *= factor
    with pytest.raises(ValueError, match=name):
        require_alike(ROWS["gpt"], OURS, expected=theirs, found=ours)


def test_a_gradient_that_differs_is_named():
    theirs = {"loss": [5.1, 4.3, 3.7], "gradient_norm": 1.9}
    with pytest.raises(ValueError, match=r"gradient norm of step 1: 1\.9 expected, float32 3\.8"):
        require_alike(ROWS["gpt"], OURS, expected=theirs, found={**theirs, "gradient_norm": 3.8})


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(FLOAT32)])
def test_bfloat16_has_tolerances_of_its_own_and_they_end(field):
    theirs = {"loss": [5.1, 4.3, 3.7], "gradient_norm": 1.9}

    def off(by):
        factor = 1 + by * getattr(BFLOAT16, field)
        norm = theirs["gradient_norm"] * (factor if field == "gradient_norm" else 1)
        places = {"first_loss": (0,), "later_loss": (1, 2)}.get(field, ())
        losses = [loss * (factor if place in places else 1) for place, loss in enumerate(theirs["loss"])]
        return {"loss": losses, "gradient_norm": norm}

    require_alike(ROWS["gpt"], CONTENDERS["mixed"], expected=theirs, found=off(0.9))
    for contender, by in ((CONTENDERS["mixed"], 1.1), (OURS, 0.9)):
        with pytest.raises(ValueError, match="do not compute the same"):
            require_alike(ROWS["gpt"], contender, expected=theirs, found=off(by))


@needs_torch
@pytest.mark.parametrize("name", ["decode-1", "decode-1-recompute"])
def test_both_sides_of_a_row_write_the_same_translations(tmp_path, name):
    import torch

    from benchmarks import jax_side, torch_side

    row, file, threads = ROWS[name].quick(), tmp_path / "weights.npz", torch.get_num_threads()
    theirs = torch_side.Translator(row, weights=file, seed=0, threads=1).step()
    ours = jax_side.Translator(row, weights=file, seed=0, threads=1).step()
    torch.set_num_threads(threads)
    require_alike(row, OURS, expected={"ids": theirs}, found={"ids": ours})
    assert np.shape(ours) == (row.batch_size, row.length)
    assert len(set(np.ravel(ours))) > 3, "the model says one thing whatever it reads; this test sees nothing"


def test_translations_that_differ_are_noticed():
    theirs, ours = [[1, 5, 7]] * 4, [[1, 5, 7]] * 3 + [[1, 5, 8]]
    with pytest.raises(ValueError, match="3 of 4 translations are equal, and 80% should be"):
        require_alike(ROWS["decode-32"], OURS, expected={"ids": theirs}, found={"ids": ours})


@needs_torch
def test_the_quick_command_runs_end_to_end(capfd):
    command = "--quick --rows decoder-only head-memory --threads 1 --contenders fused float32"
    assert main(command.split()) == 0
    lines = capfd.readouterr().out.splitlines()
    assert any(line.startswith("versions:") and "torch" in line for line in lines)
    row, head = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines[-2:])
    assert row[0].startswith("decoder-only: width 16")
    assert row[1:3] == ["float32", "-"]
    assert float(row[3].split()[0]) > 0
    assert row[5].endswith("fused")
    assert head[:2] == ["head-memory: width 16, vocabulary 53, batch 3 x 7", "float32"]
    assert head[8].startswith("1/")


@needs_torch
@pytest.mark.slow
def test_the_script_for_a_gpu_runs_at_toy_sizes(capfd, monkeypatch):
    from benchmarks import gpu_training

    monkeypatch.setenv("CXX", "no-such-compiler")
    assert gpu_training.main(["--quick"]) == 0
    rows = [line for line in capfd.readouterr().out.splitlines() if "ours with bfloat16" in line]
    assert [row.split(":")[0] for row in rows] == ["| gpt", "| encoder-decoder-base"]


def test_without_a_gpu_its_script_says_so(capsys, monkeypatch):
    from benchmarks import gpu_training

    monkeypatch.setattr(gpu_training, "_card", lambda: None)
    assert gpu_training.main([]) == 2
    assert "finds no GPU; --quick" in capsys.readouterr().err


def test_the_operations_of_a_step_are_those_of_its_products():
    from benchmarks import jax_side

    row = ROWS["gpt"].quick()
    tokens, width, inner = row.batch_size * row.length, row.d_model, row.d_ff
    projections = 4 * width * width + 2 * width * inner + width * row.vocab_size
    attention = 2 * row.length * width  # scores, and the mixture of values, of every token
    assert jax_side.count_step(row) == 3 * 2 * tokens * (projections + attention)


def test_a_line_compares_medians_with_the_best_of_pytorch_and_with_flax():
    steps = {
        "eager": [[4.0, 6.0], [6.0, 8.0]],
        "autocast": [[3.0, 3.0], [3.0, 3.0]],
        "float32": [[2.0, 2.0], [4.0, 4.0]],
        "flax": [[9.0, 9.0], [9.0, 9.0]],
    }
    memory = {"eager": 900, "autocast": 700, "float32": 450, "flax": 800}
    result = Result(steps=steps, products=steps, memory=memory, imported=dict.fromkeys(steps, 100))
    assert str(ratio(steps["eager"], steps["float32"])) == "2.00 (1.75 to 2.50)"
    cells = [cell.strip() for cell in table.lines(ROWS["gpt-256"], result).strip("|").split("|")]
    assert cells[1:] == [
        "float32",
        "2.00 (1.75 to 2.50)",
        "-",
        "-",
        "1.00 (0.75 to 1.50) autocast",
        "3.00 (2.25 to 4.50)",
        "2.00 (1.75 to 2.50)",
        "0.50 of eager (0.44 beyond imports)",
        "vs eager 0.95, vs compiled 1.0, vs Flax's own 1.3",
    ]


def test_contenders_take_part_where_they_can(monkeypatch):
    def names(row):
        return [contender.name for contender in choose(ROWS[row], list(CONTENDERS))]

    monkeypatch.setenv("CXX", "no-such-compiler")
    assert names("gpt-256") == ["eager", "fused", "autocast", "float32", "mixed", "flax"]
    assert names("decoder-only") == ["eager", "fused", "autocast", "float32", "mixed"]
    assert names("decode-32") == ["eager", "float32"]
    assert names("head-memory") == ["float32", "mixed"]
    assert names("dispatch") == ["float32", "flax"]


def test_a_process_that_fails_says_why():
    with (
        WorkerProcess("abacus", variant="wooden", threads=1, environment={}) as process,
        pytest.raises(RuntimeError, match="the abacus wooden process failed during memory: ModuleNotFoundError"),
    ):
        process.ask("memory")


def test_numbers_out_of_range_are_refused_together(capsys):
    assert main(["--rounds", "0", "--threads", "10000", "--contenders", "eager", "mixed"]) == 2
    message = capsys.readouterr().err
    assert "--contenders needs one of ours, float32 or mixed, that can do something of decode-1, decode-32" in message
    assert "--rounds must be at least 1, got 0; " in message
    assert "--threads must be from 1 to" in message
