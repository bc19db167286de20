"""Saving and restoring a train state, and everything that must not be restored."""

import os
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_transformer import checkpoint
from flax_transformer.checkpoint import Checkpoints, NotFiniteError


class State(NamedTuple):
    step: jax.Array
    parameters: dict[str, jax.Array]
    moments: list[jax.Array]


def random_state(seed: int) -> State:
    rng = np.random.default_rng(seed)
    return State(
        step=jnp.asarray(seed, jnp.uint32),
        parameters={
            "blocks.0.kernel": jnp.asarray(rng.standard_normal((3, 5)), jnp.float32),
            "blocks.0.bias": jnp.asarray(rng.standard_normal(7), jnp.bfloat16),
        },
        moments=[jnp.asarray(rng.standard_normal((5, 3)), jnp.float32).T],
    )


def shapes_of(state):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)


def assert_same_bits(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_a_state_comes_back_bit_for_bit(tmp_path):
    state = random_state(3)
    with Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(3, state)
    with Checkpoints(tmp_path / "run") as checkpoints:
        assert checkpoints.latest_step() == 3
        assert_same_bits(checkpoints.restore(shapes_of(state)), state)
        assert_same_bits(checkpoints.restore(random_state(4)), state)


def test_the_newest_checkpoint_is_restored_unless_a_step_is_named(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        for step in (9, 10):
            checkpoints.save(step, random_state(step))
        assert_same_bits(checkpoints.restore(shapes_of(random_state(0))), random_state(10))
        assert_same_bits(checkpoints.restore(shapes_of(random_state(0)), step=9), random_state(9))


def test_only_the_newest_checkpoints_are_kept_where_asked(tmp_path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, random_state(step))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]


def test_a_step_is_not_saved_twice(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, random_state(3))
        with pytest.raises(ValueError, match="already holds a checkpoint of step 3"):
            checkpoints.save(3, random_state(4))
        assert_same_bits(checkpoints.restore(random_state(0)), random_state(3))


def test_a_part_of_a_state_is_read_by_name(tmp_path):
    state = random_state(5)
    part = {"parameters": shapes_of(state.parameters)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(5, state)
        assert_same_bits(checkpoints.restore(part, unwanted="ignore"), {"parameters": state.parameters})
        with pytest.raises(ValueError, match=r"moments/0: saved float32\[3, 5\], not expected"):
            checkpoints.restore(part)


def test_every_mismatch_is_listed_and_nothing_is_cast(tmp_path):
    state = random_state(6)
    other = State(
        step=jnp.asarray(1, jnp.int32),
        parameters={"blocks.0.kernel": jnp.zeros((5, 3)), "blocks.1.kernel": jnp.zeros((3, 5))},
        moments=state.moments,
    )
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(6, state)
        with pytest.raises(ValueError, match="nothing was loaded") as error:
            checkpoints.restore(other)
    for sentence in (
        "step: saved uint32[], expected int32[]",
        "parameters/blocks.0.kernel: saved float32[3, 5], expected float32[5, 3]",
        "parameters/blocks.0.bias: saved bfloat16[7], not expected",
        "parameters/blocks.1.kernel: not saved, expected float32[3, 5]",
    ):
        assert sentence in str(error.value)
    assert "moments/0" not in str(error.value)


@pytest.mark.parametrize("step", [None, 7])
def test_a_missing_checkpoint_is_named(tmp_path, step):
    with Checkpoints(tmp_path / "empty") as checkpoints:
        assert checkpoints.latest_step() is None
        with pytest.raises(ValueError, match="empty does not hold"):
            checkpoints.restore(random_state(0), step=step)
    assert not (tmp_path / "empty").exists()


def test_an_interrupted_save_leaves_the_earlier_checkpoint_and_no_other(tmp_path, monkeypatch):
    def fail(*arguments, **options):
        raise OSError("No space left on device")

    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, random_state(3))
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", fail)
            patch.setattr(os, "replace", fail)
            patch.setattr("pathlib.Path.rename", fail)
            with pytest.raises(OSError, match="No space"):
                checkpoints.save(4, random_state(4))
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest_step() == 3
        assert_same_bits(checkpoints.restore(random_state(0)), random_state(3))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("saving", ["synchronous", "asynchronous"])
def test_a_state_that_is_not_finite_is_not_saved_and_its_arrays_are_named(tmp_path, value, saving):
    state = random_state(3)
    state.parameters["blocks.0.bias"] = state.parameters["blocks.0.bias"].at[2].set(value)
    words = r"after step 3 is not finite, and not saved: parameters/blocks\.0\.bias$"
    with pytest.raises(NotFiniteError, match=words), Checkpoints(tmp_path, saving=saving) as checkpoints:
        checkpoints.save(3, state)
    assert list(tmp_path.iterdir()) == []


def test_json_comes_back_and_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "config.json"
    checkpoint.write_json(path, {"text": "naïve", "size": 3})
    with pytest.raises(TypeError):
        checkpoint.write_json(path, {"size": object()})
    assert checkpoint.read_json(path) == {"text": "naïve", "size": 3}
    assert [entry.name for entry in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.parametrize("content", [None, b"{", b"\xff"])
def test_a_missing_or_damaged_json_file_is_named(tmp_path, content):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=r"config\.json cannot be read"):
        checkpoint.read_json(path)
