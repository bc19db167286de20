"""Layouts on the one device that the tests have, and every mistake that is refused. More devices: test_devices."""

import ast
import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flax_transformer as ft
from flax_transformer import data, parallel, training
from flax_transformer.sharding import MeshShape
from parity_tests.unit.small_models import build

ROOT = Path(__file__).parents[2]
B, T, V = 3, 5, 11
CONFIG = ft.DecoderOnlyConfig.small(vocab_size=V, d_model=6, d_ff=7, num_heads=3, num_layers=1, max_length=T)
OPTIMIZER = optax.sgd(0.1, momentum=0.9)

both_layouts = pytest.mark.parametrize("kind", ["jit", "pmap"])


def random_batch(seed: int) -> data.Batch:
    rng = np.random.default_rng(seed)
    weights = (np.arange(T) < np.asarray([5, 0, 2])[:, None]).astype(np.float32)
    inputs, labels = rng.integers(0, V, (2, B, T)).astype(np.int32)
    return data.Batch(inputs, labels, weights)


def prepare() -> tuple[training.ModelStructure, training.TrainState]:
    structure, parameters, buffers = training.split_model(build(CONFIG))
    return structure, training.init_state(parameters, buffers, OPTIMIZER, seed=3)


def compiled(kind: parallel.Kind) -> tuple[parallel.Layout, parallel.TrainStep, training.TrainState]:
    layout = parallel.layout(kind)
    structure, state = prepare()
    return layout, layout.compile_train_step(structure, training.next_token_loss, OPTIMIZER), state


@pytest.fixture
def compilations():
    """One entry per program that was compiled since the test began."""
    found = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event.endswith("backend_compile_duration"):
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


@both_layouts
def test_steps_after_the_first_compile_nothing(kind, compilations):
    layout, step, state = compiled(kind)
    placed = layout.place_state(state)
    compilations.clear()
    placed, _ = step(placed, layout.place_batch(random_batch(0)))
    assert len(compilations) == 1
    for seed in range(1, 4):
        placed, metrics = step(placed, layout.place_batch(random_batch(seed)))
        layout.unplace_state(placed)
        assert jax.device_get(metrics).weight == 7
    assert len(compilations) == 1
    assert layout.unplace_state(placed).step == 4


@both_layouts
def test_steps_that_are_taken_at_once_are_those_taken_one_by_one(kind):
    layout, step, state = compiled(kind)
    batches = [random_batch(seed) for seed in range(3)]
    structure, _ = prepare()
    together = layout.compile_train_step(structure, training.next_token_loss, OPTIMIZER, steps=3)
    alone = layout.place_state(state)
    for batch in batches:
        alone, last = step(alone, layout.place([batch]))
    found, metrics = together(layout.place_state(state), layout.place(batches))
    assert int(layout.unplace_state(found).step) == 3
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-6), metrics, last)
    assert float(metrics.weight) == 7
    for name, expected in layout.unplace_state(alone).parameters.items():
        np.testing.assert_allclose(layout.unplace_state(found).parameters[name], expected, rtol=1e-5, atol=1e-7)


def test_steps_that_are_taken_at_once_need_batches_of_one_shape():
    longer = jax.tree.map(lambda leaf: np.pad(leaf, [(0, 0), (0, 1)]), random_batch(1))
    with pytest.raises(ValueError, match="need batches of one shape"):
        parallel.layout("jit").place([random_batch(0), longer])


@both_layouts
def test_a_step_deletes_the_state_it_is_given_and_not_the_one_it_was_placed_from(kind):
    layout, step, state = compiled(kind)
    state = jax.device_put(state, jax.devices()[0])
    before = jax.tree.map(np.array, state)
    placed = layout.place_state(state)
    step(placed, layout.place_batch(random_batch(0)))
    assert all(leaf.is_deleted() for leaf in placed.parameters.values()), "the state was not donated"
    jax.tree.map(np.testing.assert_array_equal, state, before)


@both_layouts
def test_a_state_on_the_host_outlives_the_steps_after_it(kind):
    layout, step, state = compiled(kind)
    placed = layout.place_state(state)
    host = layout.unplace_state(placed)
    jax.tree.map(np.testing.assert_array_equal, host, state)
    kept = jax.tree.map(np.array, host)
    for seed in range(2):
        placed, _ = step(placed, layout.place_batch(random_batch(seed)))
    jax.block_until_ready(placed)
    assert all(isinstance(leaf, np.ndarray) and leaf.flags.writeable for leaf in jax.tree.leaves(host))
    jax.tree.map(np.testing.assert_array_equal, host, kept)
    assert any(
        np.any(host.parameters[name] != after) for name, after in layout.unplace_state(placed).parameters.items()
    )


@both_layouts
def test_a_batch_that_is_changed_after_it_was_placed_changes_nothing(kind):
    layout = parallel.layout(kind)
    # JAX takes over the memory of an array that begins at a multiple of 64 bytes.
    memory = np.zeros(B * T + 16, np.int32)
    offset = -memory.ctypes.data % 64 // memory.itemsize
    inputs = memory[offset : offset + B * T].reshape(B, T)
    placed = layout.place_batch(random_batch(0)._replace(inputs=inputs))
    inputs[:] = -1
    np.testing.assert_array_equal(np.reshape(placed.batch.inputs, (B, T)), np.zeros((B, T)))
    np.testing.assert_array_equal(np.ravel(placed.examples), [0, 1, 2])
    assert placed.examples.dtype == np.int32


@both_layouts
def test_evaluation_gives_the_sums_of_the_batch_without_dropout(kind):
    layout = parallel.layout(kind)
    structure, state = prepare()
    evaluate = layout.compile_eval_step(structure, training.next_token_loss)
    sums = evaluate(layout.place_state(state), layout.place_batch(random_batch(0)))
    batch = jax.tree.map(jnp.asarray, random_batch(0))
    expected = training.next_token_loss(structure.merge(state.parameters, state.buffers), batch)
    np.testing.assert_allclose(jax.device_get(sums), expected, rtol=1e-5)


@both_layouts
@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"ids": np.zeros((4, 5)), "weights": np.zeros((3, 5))}, r"one first axis.*\(4, 5\), \(3, 5\)"),
        ({"ids": np.zeros((4, 5)), "weight": np.float32(1)}, r"one first axis.*\(4, 5\), \(\)"),
        ({}, r"one first axis.*\[\]"),
        ({"ids": np.zeros((0, 5))}, "got 0"),
    ],
)
def test_a_batch_that_is_not_rows_of_examples_is_refused(kind, batch, words):
    with pytest.raises(ValueError, match=words):
        parallel.layout(kind).place_batch(batch)


@dataclasses.dataclass(frozen=True)
class Device:
    """A device as far as a layout looks at it before it builds a mesh."""

    id: int
    process_index: int


def fake_devices(*processes: int) -> Any:
    return [Device(number, process) for number, process in enumerate(processes)]


@both_layouts
def test_a_batch_that_devices_cannot_share_equally_is_refused_with_sizes_that_they_can(kind):
    layout = parallel.layout(kind)
    layout.mesh = MeshShape(data=4)
    layout.check_batch_size(8)
    with pytest.raises(
        ValueError, match=r"multiple of the number of devices, 4.*got 10. Give 8 or 12, or other devices"
    ):
        layout.check_batch_size(10)
    with pytest.raises(ValueError, match=r"got 3\. Give 4, or"):
        layout.place_batch({"ids": np.zeros((3, 5))})


def test_the_devices_along_data_and_fsdp_share_a_batch_and_those_along_tensor_have_it_in_common():
    layout = parallel.layout("jit")
    layout.mesh = MeshShape(data=2, fsdp=3, tensor=5)
    layout.check_batch_size(12)
    with pytest.raises(ValueError, match=r"devices along data and fsdp, 6.*got 10\. Give 6 or 12"):
        layout.check_batch_size(10)


def test_a_mesh_that_the_devices_do_not_fill_is_refused():
    with pytest.raises(ValueError, match="multiply to the number of devices, 1; got data=3"):
        parallel.layout("jit", mesh=MeshShape(data=3))
    with pytest.raises(ValueError, match="divide the number of devices, 1; got fsdp=2"):
        parallel.layout("pmap", mesh=MeshShape(fsdp=2))


def test_microbatches_that_devices_cannot_share_equally_are_refused():
    layout = parallel.layout("jit")
    layout.mesh = MeshShape(data=4)
    layout.check_batch_size(24, accumulate=3)
    with pytest.raises(ValueError, match=r"devices, 4, times that of microbatches, 3,.*: 12; got 20\. Give 12 or 24"):
        layout.check_batch_size(20, accumulate=3)
    with pytest.raises(ValueError, match="at least 1 microbatch, got accumulate 0"):
        layout.check_batch_size(20, accumulate=0)


@pytest.mark.parametrize("axis", ["fsdp", "tensor"])
def test_pmap_takes_no_mesh_with_parameters_spread_over_it(axis):
    with pytest.raises(ValueError, match=f"no axis but data; got data=1,{axis}=3. Give --parallel jit"):
        parallel.layout("pmap", devices=fake_devices(0, 0, 0), mesh=MeshShape(**{axis: 3}))


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        (0, "0 devices were asked for.*from 1 to 1.*device_count=0"),
        (-2, "-2 devices were asked for"),
        (3, "3 devices were asked for.*from 1 to 1.*cpu, 1 process\\).*device_count=3"),
        ([], "at least one device, got none"),
        (2 * fake_devices(0), r"must differ, got \[0, 0\]"),
    ],
)
@both_layouts
def test_devices_that_are_not_there_are_refused(kind, devices, words):
    with pytest.raises(ValueError, match=words):
        parallel.layout(kind, devices=devices)


def test_a_layout_that_there_is_not_is_refused():
    unknown: Any = "shard"
    with pytest.raises(ValueError, match="one of jit, pmap, got 'shard'"):
        parallel.layout(unknown)


@both_layouts
def test_processes_must_hold_equally_many_devices(kind, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    with pytest.raises(ValueError, match="process 0 holds 2, 1 holds 1, 2 holds 0"):
        parallel.layout(kind, devices=fake_devices(0, 1, 0))
    with pytest.raises(ValueError, match="process 0 holds 1, 1 holds 0, 2 holds 0, 5 holds 1"):  # of a slice elsewhere
        parallel.layout(kind, devices=fake_devices(0, 5))


def test_a_number_of_devices_that_processes_cannot_share_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "devices", lambda: fake_devices(0, 0, 1, 1))
    with pytest.raises(ValueError, match=r"3 devices.*2 processes; give a multiple of 2"):
        parallel.layout("jit", devices=3)


def test_only_this_file_says_pmap_and_only_kernels_are_mapped_over_a_mesh():
    files = [*(ROOT / "flax_transformer").rglob("*.py"), ROOT / "train.py"]
    sayers = {
        (node.attr, path.name)
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("pmap", "shard_map", "psum")
    }
    assert sayers == {
        ("pmap", "parallel.py"), ("psum", "parallel.py"), ("shard_map", "flash_attention.py"),
    }  # fmt: skip
