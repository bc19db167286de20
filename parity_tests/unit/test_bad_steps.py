"""Losses and gradients that are not finite: they change nothing, are counted, and stop a run that has no others."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import train
from flax_transformer import data, parallel, training
from flax_transformer.losses import LossSums
from parity_tests.unit.small_runs import PATTERN, TINY, call, curve, leaves, metrics_of, write
from parity_tests.unit.test_training import B, adamw, build, prepare, random_batch

BAD = [np.nan, np.inf, -np.inf]


def bits(tree) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def spoil(batch, value: float):
    return batch._replace(weights=batch.weights.at[1, 0].set(value))


@pytest.fixture(scope="module")
def step():
    return jax.jit(prepare()[1])


@pytest.mark.parametrize("value", BAD)
def test_a_loss_that_is_not_finite_leaves_parameters_and_optimizer_as_they_were_and_is_counted(step, value):
    state, _ = step(prepare()[0], random_batch(1), jnp.arange(B))
    after = state
    for number in (1, 2):
        after, metrics = step(after, spoil(random_batch(2), value), jnp.arange(B))
        assert not np.isfinite(metrics.loss)
        assert (int(metrics.skipped), int(metrics.skipped_in_a_row)) == (number, number)
        assert bits((after.parameters, after.optimizer_state)) == bits((state.parameters, state.optimizer_state))
    assert (int(after.step), int(after.skipped), int(after.skipped_in_a_row)) == (3, 2, 2)
    last, metrics = step(after, random_batch(3), jnp.arange(B))
    assert (int(metrics.skipped), int(metrics.skipped_in_a_row)) == (2, 0)
    unspoiled, _ = step(dataclasses.replace(state, step=after.step), random_batch(3), jnp.arange(B))
    assert bits((last.parameters, last.optimizer_state)) == bits((unspoiled.parameters, unspoiled.optimizer_state))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def steep(value, gradient):
    """The identity, with a gradient of its own."""
    del gradient
    return value


steep.defvjp(
    lambda value, gradient: (value, None), lambda gradient, _, cotangent: (jnp.full_like(cotangent, gradient),)
)


def test_a_gradient_that_is_not_finite_is_skipped_though_the_loss_is_a_number():
    def loss(model, batch, *, dropout):
        sums = training.next_token_loss(model, batch, dropout=dropout)
        return LossSums(steep(sums.loss, np.inf), sums.weight)

    state, step = prepare(loss=loss)
    after, metrics = jax.jit(step)(state, random_batch(1), jnp.arange(B))
    assert np.isfinite(metrics.loss)
    assert int(after.skipped) == 1
    assert bits((after.parameters, after.optimizer_state)) == bits((state.parameters, state.optimizer_state))


def test_a_step_under_pmap_is_skipped():
    state, _ = prepare()
    layout = parallel.layout("pmap")
    step = layout.compile_train_step(build()[0], training.next_token_loss, adamw())
    batch = jax.tree.map(np.asarray, spoil(random_batch(2), np.nan))
    after, metrics = step(layout.place_state(state), layout.place_batch(batch))
    assert int(metrics.skipped_in_a_row) == 1
    assert bits(layout.unplace_state(after).parameters) == bits(state.parameters)


def spoil_steps(monkeypatch, steps) -> None:
    sample_batch = data.sample_batch

    def spoilt(*arguments, step, **options):
        batch = sample_batch(*arguments, step=step, **options)
        return batch._replace(weights=batch.weights * np.float32(np.nan)) if step in steps else batch

    monkeypatch.setattr(data, "sample_batch", spoilt)


def test_a_run_that_meets_bad_steps_one_after_the_other_stops_with_the_last_good_state_and_can_go_on_behind_them(
    tmp_path, monkeypatch
):
    output, text = tmp_path / "run", write(tmp_path, PATTERN)
    spoil_steps(monkeypatch, {2, *range(10, 17)})
    status, out, err = call(train.main, "--data", text, *TINY, "--max-bad-steps", "4", "--output", output)
    assert status == 3
    assert err.count("\n") == 1
    assert "not finite in 4 steps in a row, the last of them step 14 with loss nan and gradient norm nan" in err
    resuming = f"python train.py decoder-only --output {output} --resume --max-bad-steps 8"
    assert err.endswith(f"go on behind them with: {resuming}\n")
    assert not (output / "results.json").exists()
    steps = [int(path.name) for path in (output / "checkpoint").iterdir()]
    stopped = max(steps)
    assert 14 < stopped <= 16  # at most two steps are under way
    states = {step: leaves(output, step) for step in steps}
    assert all(np.all(np.isfinite(leaf)) for state in states.values() for leaf in state.values())
    skipped = {entry["step"]: entry.get("skipped") for entry in metrics_of(output)}
    assert [skipped[step] for step in (2, 3, 10, 11, 14)] == [None, 1, 1, 2, 5]

    status, out, err = call(train.main, *resuming.split()[2:])
    assert (status, err) == (0, "")
    assert f"resumed after step {stopped}" in out
    last = metrics_of(output)[-1]
    assert (last["step"], last["skipped"]) == (23, 8)
    assert np.isfinite([last["loss"], last["validation_loss"]]).all()

    # A run that nothing stopped is the same, and its checkpoints hold the same counts.
    assert call(train.main, "--data", text, *TINY, "--output", tmp_path / "whole")[0] == 0
    assert json.dumps(curve(tmp_path / "whole")) == json.dumps(curve(output))


def test_bad_steps_at_the_very_end_are_told_too(tmp_path, monkeypatch):
    spoil_steps(monkeypatch, range(20, 23))
    arguments = ["--data", write(tmp_path, PATTERN), *TINY, "--output", tmp_path / "run"]
    status, _, err = call(train.main, *arguments, "--max-bad-steps", "3")
    assert status == 3
    assert "the last of them step 23" in err


def test_a_state_that_is_not_finite_whatever_made_it_so_ends_the_run_and_is_not_saved(tmp_path, monkeypatch):
    def spoilt(checkpoints, state):
        parameters = {**state.parameters, "embedding.embedding": state.parameters["embedding.embedding"] * np.inf}
        return dataclasses.replace(state, parameters=parameters), []

    monkeypatch.setattr(train.runs, "resume", spoilt)
    output = tmp_path / "run"
    status, _, err = call(train.main, "--data", write(tmp_path, PATTERN), *TINY, "--output", output)
    assert (status, err.count("\n")) == (3, 1)
    assert "the state after step 3 is not finite, and not saved: parameters/embedding.embedding" in err
    assert list((output / "checkpoint").glob("*")) == []
