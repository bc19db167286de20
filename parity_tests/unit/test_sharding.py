"""Meshes as they are written, and which parameter lies where on one. Steps on meshes: test_devices."""

import re

import jax
import optax
import pytest
from jax.sharding import PartitionSpec

from flax_transformer import optimizers, sharding, training
from flax_transformer.sharding import FSDP, RULES, TENSOR, MeshShape, partition, partition_all
from parity_tests.unit.small_models import PRESETS, hollow

MESH = MeshShape(data=5, fsdp=2, tensor=3)


@pytest.mark.parametrize(
    ("text", "mesh"),
    [
        ("data=4,fsdp=2", MeshShape(data=4, fsdp=2)),
        ("tensor=3", MeshShape(tensor=3)),
        (" fsdp = 2 , data = -1 ", MeshShape(fsdp=2)),
        ("data=1,fsdp=3,tensor=5", MeshShape(data=1, fsdp=3, tensor=5)),
    ],
)
def test_a_mesh_is_read_from_its_axes_and_written_so_that_it_is_read_again(text, mesh):
    assert MeshShape.parse(text) == mesh
    assert MeshShape.parse(str(mesh)) == mesh


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model=2", r"its axes, which are data, fsdp, tensor.*got 'model=2' in 'model=2'"),
        ("data=2,data=3", "got 'data=3' in 'data=2,data=3'"),
        ("fsdp=two", "AXIS=NUMBER.*got 'fsdp=two'"),
        ("fsdp", "got 'fsdp'"),
        ("", "got ''"),
        ("data=2,", "got '' in 'data=2,'"),
        ("data=1.5", "got 'data=1.5'"),
        ("fsdp=0,tensor=-2", "at least 1 device each, got fsdp=0, tensor=-2"),
        ("data=-3", "got data=-3"),
        ("tensor=-1", "got tensor=-1"),
    ],
)
def test_a_text_that_is_no_mesh_is_refused(text, words):
    with pytest.raises(ValueError, match=words):
        MeshShape.parse(text)


def test_devices_that_no_axis_takes_lie_along_data():
    assert MeshShape().of_devices(7) == MeshShape(data=7)
    assert MeshShape(fsdp=2, tensor=3).of_devices(30) == MESH
    assert MESH.of_devices(30) == MESH
    assert MESH.parts == 10


@pytest.mark.parametrize(
    ("mesh", "count", "words"),
    [
        (MESH, 8, "multiply to the number of devices, 8; got data=5,fsdp=2,tensor=3"),
        (MeshShape(fsdp=3), 8, "divide the number of devices, 8; got fsdp=3"),
        (MeshShape(tensor=16), 8, "divide the number of devices, 8; got tensor=16"),
    ],
)
def test_a_mesh_of_another_number_of_devices_is_refused(mesh, count, words):
    with pytest.raises(ValueError, match=words):
        mesh.of_devices(count)


@pytest.mark.parametrize("preset", PRESETS)
def test_one_rule_of_its_rank_decides_about_every_parameter_of_both_models(preset):
    _, parameters, _ = training.split_model(hollow(PRESETS[preset]()))
    for name, leaf in parameters.items():
        ranks = [len(axes) for pattern, axes in RULES if re.fullmatch(pattern, name)]
        assert ranks == [len(leaf.shape)], name


def test_the_second_product_of_a_pair_splits_what_the_first_one_left_apart():
    for first, second in (("query", "output"), ("value", "output"), ("up", "down")):
        place = "feed_forward" if first == "up" else "self_attention"
        columns = partition(f"encoder.layers.0.{place}.{first}.kernel", (6, 12), MESH)
        rows = partition(f"encoder.layers.0.{place}.{second}.kernel", (12, 6), MESH)
        assert (columns[1], rows[0]) == (TENSOR, TENSOR)
        assert partition(f"encoder.layers.0.{place}.{first}.bias", (12,), MESH) == PartitionSpec(TENSOR)
        assert partition(f"encoder.layers.0.{place}.{second}.bias", (6,), MESH) == PartitionSpec()


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((9, 4), PartitionSpec(TENSOR, FSDP)),
        ((9, 5), PartitionSpec(TENSOR)),
        ((11, 4), PartitionSpec(None, FSDP)),
        ((11, 5), PartitionSpec()),
        ((9,), PartitionSpec()),
    ],
)
def test_a_dimension_that_an_axis_does_not_divide_is_not_split_along_it(shape, spec):
    assert partition("embedding.embedding", shape, MESH) == spec


def test_an_axis_of_one_device_is_not_mentioned():
    assert partition("output.kernel", (9, 4), MeshShape(data=8)) == PartitionSpec()
    assert partition("output.kernel", (9, 4), MESH, over=(TENSOR,)) == PartitionSpec(TENSOR)


def test_what_an_optimizer_keeps_lies_where_its_parameter_does():
    _, parameters, _ = training.split_model(hollow(PRESETS["paper_base"]()))
    optimizer = optimizers.adamw(optimizers.warmup_cosine(0.1, warmup_steps=2, total_steps=9), max_norm=0.5)
    state = jax.eval_shape(optimizer.init, parameters)
    expected, actual = partition_all(parameters, MESH), partition_all(state, MESH)
    for moment in ("mu", "nu"):
        assert optax.tree.get(actual, moment) == expected
    assert any(spec != PartitionSpec() for spec in expected.values())
    assert [spec for _, spec in optax.tree.get_all_with_path(actual, "count")] == 2 * [PartitionSpec()]
    assert sharding.partition_all({"output.kernel": {"row": jax.ShapeDtypeStruct((9, 4), "f4")}}, MESH) == {
        "output.kernel": {"row": PartitionSpec()}
    }
