"""The fused vocabulary loss against the plain one: values, gradients, odd sizes, shards, and the memory that it is for."""

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_transformer import data, training
from flax_transformer.commands import jobs, train_options
from flax_transformer.losses import cross_entropy
from flax_transformer.numerics import Numerics
from flax_transformer.vocabulary_loss import fused_cross_entropy
from parity_tests.unit import small_models

ROOT = Path(__file__).parents[2]
SHAPE, WIDTH, CLASSES = (3, 5), 7, 37
# Of the scale of each array. Float32 sums of 37 terms are off by less; the bound is the one that large sizes keep too.
TOLERANCE = {"float64": 1e-12, "float32": 5e-6}


def random_case(seed: int = 0) -> dict[str, np.ndarray]:
    """Some positions have no weight, one of which has a label that there is not."""
    rng = np.random.default_rng(seed)
    weights = rng.random(SHAPE) * (np.arange(15).reshape(SHAPE) % 4 > 0)
    labels = rng.integers(0, CLASSES, SHAPE)
    labels[0, 0], labels[1, 3] = CLASSES, -1  # no. 0 and 8
    return {
        "features": rng.standard_normal((*SHAPE, WIDTH)),
        "kernel": 2 * rng.standard_normal((CLASSES, WIDTH)),
        "bias": rng.standard_normal(CLASSES),
        "weights": weights,
        "labels": labels,
    }


def plain(arrays: Any, *, bias: str = "with", **options) -> Any:
    logits = jnp.einsum("btd,vd->btv", arrays["features"], arrays["kernel"], precision="highest")
    logits = logits + (arrays["bias"][None, None] if bias == "with" else 0.0)
    return cross_entropy(logits, arrays["labels"], weights=arrays["weights"], **options)


def fused(arrays: Any, *, bias: str = "with", **options) -> Any:
    return fused_cross_entropy(
        arrays["features"],
        arrays["kernel"],
        bias=arrays["bias"] if bias == "with" else None,
        labels=arrays["labels"],
        weights=arrays["weights"],
        **options,
    )


def loss_and_gradients(loss: Any, case: dict[str, np.ndarray], dtype: str, **options) -> dict[str, np.ndarray]:
    numbers = {name: jnp.asarray(array, dtype) for name, array in case.items() if name != "labels"}
    labels = jnp.asarray(case["labels"], jnp.int32)

    def mean(numbers):
        sums = loss({**numbers, "labels": labels}, **options)
        return 3.0 * sums.loss, sums.weight

    (value, weight), gradients = jax.jit(jax.value_and_grad(mean, has_aux=True))(numbers)
    return {"loss": np.asarray(value), "weight": np.asarray(weight), **jax.tree.map(np.asarray, gradients)}


def largest_difference(expected: dict[str, np.ndarray], actual: dict[str, np.ndarray]) -> float:
    """Of the scale. The gradient of a weight that is 0 is NaN where the label is outside, and nothing else is."""
    assert expected.keys() == actual.keys()
    assert all(np.all(np.isfinite(array)) for name, array in expected.items() if name != "weights")
    differences = []
    for name, array in expected.items():
        np.testing.assert_array_equal(np.isnan(actual[name]), np.isnan(array))
        scale = max(float(np.nanmax(np.abs(array))), 1e-30)
        differences.append(float(np.nanmax(np.abs(array - actual[name]))) / scale)
    return max(differences)


PLAIN_OPTIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "smoothed": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 1e-2, "label_smoothing": 0.3},
}


@functools.cache
def expected(dtype: str, kind: str, bias: str = "with") -> dict[str, np.ndarray]:
    return loss_and_gradients(plain, random_case(), dtype, bias=bias, **PLAIN_OPTIONS[kind])


# 37 is a prime: no chunk but 1 and 37 divides it, nor do shards.
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(
    ("kind", "bias", "layout"),
    [
        ("as it is", "with", {"chunk": 8}),
        ("as it is", "without", {"chunk": 1}),
        ("smoothed", "with", {"chunk": 5, "shards": 3}),
        ("z-loss", "with", {"chunk": 100}),
        ("z-loss", "without", {"chunk": 4, "shards": 4}),
    ],
)
def test_loss_and_gradients_are_those_of_the_plain_loss(dtype, kind, bias, layout):
    with jax.enable_x64(dtype == "float64"):
        reference = expected(dtype, kind, bias)
        actual = loss_and_gradients(fused, random_case(), dtype, bias=bias, **layout, **PLAIN_OPTIONS[kind])
    assert largest_difference(reference, actual) <= TOLERANCE[dtype]


def test_many_classes_in_float32_are_as_exact_with_chunks_of_its_own_choice():
    rng = np.random.default_rng(2)
    case = {
        "features": rng.standard_normal((64, 19)),
        "kernel": rng.standard_normal((40_009, 19)),
        "bias": rng.standard_normal(40_009),
        "weights": rng.random(64),
        "labels": rng.integers(0, 40_009, 64),
    }

    def unbatched(loss):
        one_more = lambda arrays: {  # noqa: E731
            name: array[None] if name in ("features", "weights", "labels") else array for name, array in arrays.items()
        }
        return lambda arrays, **options: loss(one_more(arrays), **options)

    reference, actual = (loss_and_gradients(unbatched(loss), case, "float32") for loss in (plain, fused))
    assert largest_difference(reference, actual) <= TOLERANCE["float32"]


@pytest.mark.parametrize("label", [CLASSES, -1])
def test_a_label_outside_the_vocabulary_makes_the_loss_nan_unless_it_has_no_weight(label):
    case = random_case()
    case["labels"][2, 1] = label
    assert case["weights"][2, 1] > 0
    reference, actual = (
        loss_and_gradients(loss, case, "float32") for loss in (plain, functools.partial(fused, chunk=8))
    )
    assert np.isnan(reference["loss"])
    assert np.isnan(actual["loss"])
    for name in ("features", "kernel", "bias"):
        np.testing.assert_allclose(actual[name], reference[name], rtol=1e-4, atol=1e-5)


def test_a_class_that_a_bias_of_minus_infinity_rules_out_is_ruled_out_here_too():
    case = random_case()
    case["bias"][[0, 1, 2, 3, 30]] = -np.inf  # the first chunk has no class that is possible
    case["labels"] = np.where(np.isin(case["labels"], [0, 1, 2, 3, 30]), 9, case["labels"])
    reference, actual = (
        loss_and_gradients(loss, case, "float32") for loss in (plain, functools.partial(fused, chunk=4))
    )
    assert largest_difference(reference, actual) <= TOLERANCE["float32"]


def test_bfloat16_keeps_its_logits_in_float32_and_returns_gradients_in_the_types_of_its_arguments():
    case = random_case()
    numbers = {name: jnp.asarray(array, jnp.float32) for name, array in case.items() if name != "labels"}
    numerics = Numerics(param=jnp.dtype("float32"), compute=jnp.dtype("bfloat16"), precision=jax.lax.Precision.DEFAULT)
    half = {**numbers, "features": numbers["features"].astype(jnp.bfloat16)}
    rounding = {name: numbers[name].astype(jnp.bfloat16).astype(jnp.float32) for name in ("features", "kernel")}
    rounded = {**numbers, **rounding}
    labels = jnp.asarray(case["labels"] % CLASSES, jnp.int32)

    def value(arrays, **options):
        return fused({**arrays, "labels": labels}, label_smoothing=0.1, **options).loss

    loss, gradients = jax.jit(jax.value_and_grad(functools.partial(value, chunk=8, numerics=numerics)))(half)
    exact, exact_gradients = jax.jit(jax.value_and_grad(value))(rounded)
    assert loss.dtype == "float32"
    np.testing.assert_allclose(loss, exact, rtol=1e-6)
    assert {name: str(array.dtype) for name, array in gradients.items()} == {
        "features": "bfloat16", "kernel": "float32", "bias": "float32", "weights": "float32"
    }  # fmt: skip
    for name, array in exact_gradients.items():
        allowed = 2**-7 * float(np.abs(array).max())
        np.testing.assert_allclose(gradients[name].astype(jnp.float32), array, atol=allowed, rtol=0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"chunk": 0}, "chunk=0"),
        ({"shards": 0}, "shards=0"),
        ({"z_loss": -1.0}, "z_loss must be a finite number, at least 0, got -1.0"),
        ({"label_smoothing": 1.5}, "label_smoothing must be between 0 and 1, got 1.5"),
    ],
)
def test_options_out_of_range_are_refused_with_their_rule(options, words):
    arrays = {
        name: jnp.asarray(array, jnp.int32 if name == "labels" else jnp.float32)
        for name, array in random_case().items()
    }
    with pytest.raises(ValueError, match=words):
        fused(arrays, **options)
    with pytest.raises(ValueError, match=r"kernel must be \(V, D\)"):
        fused({**arrays, "kernel": arrays["kernel"].T})
    with pytest.raises(ValueError, match="bias must have a number for each row"):
        fused({**arrays, "bias": arrays["bias"][1:]})
    with pytest.raises(ValueError, match="labels must have the shape of features"):
        fused({**arrays, "labels": arrays["labels"][1:]})
    with pytest.raises(ValueError, match="weights must have the shape of labels"):
        fused({**arrays, "weights": arrays["weights"][1:]})


def batch_for(config) -> Any:
    rng = np.random.default_rng(3)
    labels = rng.integers(1, small_models.TARGET_VOCABULARY, small_models.TARGET_IDS.shape, np.int32)
    weights = np.asarray(rng.random(labels.shape) > 0.3, np.float32)
    inputs = small_models.random_ids(config)
    if len(inputs) == 1:
        return data.Batch(inputs=inputs[0], labels=labels, weights=weights)
    return data.PairBatch(source=inputs[0], target_input=inputs[1], labels=labels, weights=weights)


@pytest.mark.parametrize("name", ["decoder_only_document", "paper_base"])  # untied with a bias, and tied without
def test_models_train_with_either_loss(name, float64):
    config = small_models.PRESETS[name](**small_models.DOUBLE, num_layers=1)
    structure, parameters, buffers = training.split_model(small_models.build(config))
    loss: Any = training.next_token_loss if name.startswith("decoder_only") else training.translation_loss
    batch = batch_for(config)

    def value(parameters, batch, kind):
        model = structure.merge(parameters, buffers)
        return loss(model, batch, label_smoothing=0.1, z_loss=1e-3, vocabulary_loss=kind).mean

    fast = {"xla_backend_optimization_level": 0}  # compiling is what takes the time
    step = jax.jit(jax.value_and_grad(value), static_argnums=2, compiler_options=fast)
    (plain_value, plain_gradients), (fused_value, fused_gradients) = (
        step(parameters, batch, kind) for kind in ("plain", "fused")
    )
    scale = max(float(np.abs(array).max()) for array in plain_gradients.values())
    assert abs(float(plain_value - fused_value)) <= TOLERANCE["float64"] * float(plain_value)
    for key, array in plain_gradients.items():
        np.testing.assert_allclose(fused_gradients[key], array, rtol=0, atol=TOLERANCE["float64"] * scale, err_msg=key)
    assert scale > 1e-3


def test_a_large_vocabulary_takes_a_fortieth_of_the_memory():
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1024, 64), (199_854, 64))]
    labels = jnp.zeros(1024, jnp.int32)

    def plain_loss(features, kernel):
        return cross_entropy(jnp.einsum("nd,vd->nv", features, kernel, precision="highest"), labels).mean

    def fused_loss(features, kernel):
        return fused_cross_entropy(features, kernel, labels=labels).mean

    compiled = [jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*shapes).compile() for loss in (plain_loss, fused_loss)]
    analyses: list[Any] = [program.memory_analysis() for program in compiled]
    plain_bytes, fused_bytes = (analysis.temp_size_in_bytes for analysis in analyses)
    assert plain_bytes > 1.5e9
    assert fused_bytes <= plain_bytes / 40


PROGRAM = """
import functools, re
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from flax_transformer.commands import jobs, train_options
from flax_transformer.losses import cross_entropy
from flax_transformer.vocabulary_loss import fused_cross_entropy

assert jax.device_count() == 4
rng = np.random.default_rng(0)
N, D, V = 24, 10, 44
features = rng.standard_normal((N, D)).astype(np.float32)
kernel, bias = rng.standard_normal((V, D)).astype(np.float32), rng.standard_normal(V).astype(np.float32)
labels, weights = rng.integers(0, V, N).astype(np.int32), rng.random(N).astype(np.float32)


def sums(features, kernel, bias, labels, weights, shards=1):
    return fused_cross_entropy(
        features, kernel, bias=bias, labels=labels, weights=weights, label_smoothing=0.1, chunk=3, shards=shards
    ).loss


arrays = (features, kernel, bias, labels, weights)
expected = jax.value_and_grad(sums, (0, 1, 2))(*arrays)


def close(actual):
    for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
        np.testing.assert_allclose(np.asarray(other), one, rtol=0, atol=2e-6 * np.abs(one).max())


for data, tensor in ((1, 4), (2, 2)):
    mesh = Mesh(np.asarray(jax.devices()).reshape(data, tensor), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    specs = (P("data"), P("tensor"), P("tensor"), P("data"), P("data"))
    shardings = tuple(NamedSharding(mesh, spec) for spec in specs)
    for shards in (tensor, 1):
        step = jax.jit(
            jax.value_and_grad(functools.partial(sums, shards=shards), (0, 1, 2)),
            in_shardings=shardings, out_shardings=(None, shardings[:3]),
        )
        compiled = step.lower(*arrays).compile()
        close(compiled(*(jax.device_put(array, place) for array, place in zip(arrays, shardings, strict=True))))
        text = compiled.as_text()
        gathered = [shape for shape in re.findall(r"= (\\S+) all-gather\\(", text)]
        print(data, tensor, shards, "all-gathers:", *gathered)

share = lambda array: array.reshape(4, -1, *array.shape[1:])
spread = (share(features), kernel, bias, share(labels), share(weights))
mapped = jax.pmap(
    lambda *arrays: jax.lax.psum(jax.value_and_grad(sums, (1, 2))(*arrays), "devices"),
    axis_name="devices", in_axes=(0, None, None, 0, 0), out_axes=None,
)
value, gradients = mapped(*spread)
for one, other in zip((expected[0], *expected[1][1:]), (value, *gradients), strict=True):
    np.testing.assert_allclose(np.asarray(other), one, rtol=0, atol=2e-6 * np.abs(one).max())
print("pmap agrees")
"""


def test_over_a_mesh_no_device_gathers_the_kernel_and_pmap_agrees():
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "pmap agrees"
    by_layout = {tuple(line.split()[:3]): line.split()[4:] for line in lines[:-1]}
    assert by_layout["1", "4", "4"] == by_layout["2", "2", "2"] == []
    assert by_layout["1", "4", "1"]  # where the shards are not known to the loss, the kernel is gathered


def test_a_command_takes_the_fused_loss_where_it_was_measured_to_win_or_as_it_is_told():
    def chosen(kind, positions, vocab_size, precision: train_options.TrainingPrecision = "mixed"):
        training = train_options.TrainingOptions(vocabulary_loss=kind, precision=precision)
        options = train_options.DecoderOnlyOptions(training=training)
        return jobs.vocabulary_loss(options, positions=positions, vocab_size=vocab_size)["vocabulary_loss"]

    assert chosen("auto", 4 * 16, 199_854) == chosen("auto", 64 * 16, 8000) == "fused"
    assert chosen("auto", 8 * 64, 1400) == chosen("auto", 4 * 16, 16_000) == "plain"
    assert chosen("auto", 64 * 16, 8000, "float32") == "plain"
    assert chosen("auto", 4 * 16, 199_854, "float32") == chosen("auto", 64 * 16, 8000, "bfloat16") == "fused"
    assert chosen("fused", 5, 7) == "fused"
    assert chosen("plain", 64 * 16, 199_854) == "plain"


@pytest.mark.parametrize(("mesh", "shards"), [(None, 1), ("fsdp=2", 1), ("data=2,tensor=3", 3)])
def test_a_command_shares_the_vocabulary_as_its_mesh_does(mesh, shards):
    options = train_options.DecoderOnlyOptions(device=train_options.DeviceOptions(mesh=mesh))
    assert jobs.vocabulary_loss(options, positions=5, vocab_size=7)["vocabulary_shards"] == shards
