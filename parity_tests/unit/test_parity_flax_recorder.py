"""The Flax recorder sees every call under its path, and leaves no trace."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.core import Tracer

from flax_transformer import parity


class Scale(nnx.Module):
    def __init__(self, size: int, seed: int) -> None:
        self.factor = nnx.Param(jnp.asarray(np.random.default_rng(seed).standard_normal(size), jnp.float32))

    def __call__(self, x):
        return x * jnp.broadcast_to(self.factor[...].astype(x.dtype), x.shape)


class Shifted(Scale):
    """Reaches its parent's call by super(); one call, not two."""

    def __call__(self, x):
        return super().__call__(x) + 0.25


class Heir(Scale):
    """Inherits its call."""


class Net(nnx.Module):
    def __init__(self) -> None:
        self.zeta = Scale(5, 0)
        self.alpha = self.zeta
        self.layers = nnx.List([Shifted(5, 1), Heir(5, 2), self.zeta])
        self.table = nnx.Variable(jnp.asarray(np.random.default_rng(3).standard_normal(5), jnp.float32))
        self.constant = jnp.arange(3, 8, dtype=jnp.int32)
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
        self.calls = nnx.Variable(jnp.asarray(0, jnp.int32))

    def __call__(self, x):
        self.calls[...] += 1
        x = self.dropout(self.zeta(x))
        for layer in self.layers:
            x = layer(x)
        return {"x": x, "pair": (x > 0, None)}


X = np.random.default_rng(7).standard_normal((3, 5))


def expected() -> dict[str, np.ndarray]:
    draw = [np.random.default_rng(seed).standard_normal(5).astype(np.float32) for seed in range(3)]
    results, x = {}, X
    for key, factor, shift in (
        ("zeta#0", draw[0], 0),
        ("dropout#0", 1, 0),
        ("layers.0#0", draw[1], 0.25),
        ("layers.1#0", draw[2], 0),
        ("zeta#1", draw[0], 0),
    ):
        x = x * factor + shift
        results[key] = x
    return {**results, "#0/x": x, "#0/pair/0": x > 0}


@pytest.mark.parametrize("execution", ["eager", "jit"])
def test_every_call_is_recorded_in_order_under_path_number_and_place(execution):
    recording = parity.record_flax(Net(), X, execution=execution)
    wanted = expected()
    assert list(recording.activations) == list(wanted)
    for key, array in wanted.items():
        np.testing.assert_allclose(recording.activations[key], array, rtol=1e-15)
        assert recording.activations[key].dtype == array.dtype
    assert list(recording.outputs) == ["/x", "/pair/0"]


def test_the_model_runs_operation_by_operation_or_compiled():
    traced = []

    def call(model, x):
        traced.append(isinstance(x, Tracer))
        return model(x)

    for execution in ("eager", "jit"):
        traced.clear()
        parity.record_flax(Net(), X, execution=execution, call=call)
        assert traced[0] == (execution == "jit")


def test_every_recording_is_traced_anew_unless_traces_are_shared():
    factor = [2.0]

    def call(model, x):
        return model(x)["x"] * factor[0]

    first = parity.record_flax(Net(), X, execution="jit", call=call).outputs[""]
    factor[0] = 3.0
    np.testing.assert_allclose(parity.record_flax(Net(), X, execution="jit", call=call).outputs[""], first * 1.5)
    with parity.shared_traces():
        again = [parity.record_flax(Net(), x, execution="jit", call=call).outputs[""] for x in (X, 2 * X)]
        factor[0] = 2.0
        stale = parity.record_flax(Net(), X, execution="jit", call=call).outputs[""]
    np.testing.assert_array_equal(stale, again[0])
    assert not np.array_equal(again[0], again[1])


@pytest.mark.parametrize("execution", ["eager", "jit"])
def test_shared_modules_and_parameters_appear_once_with_all_their_names(execution):
    recording = parity.record_flax(Net(), X, execution=execution)
    assert recording.module_names["zeta"] == ("zeta", "alpha", "layers.2")
    assert list(recording.parameters) == ["zeta.factor", "layers.0.factor", "layers.1.factor"]
    assert recording.tensor_names["zeta.factor"] == ("zeta.factor", "alpha.factor", "layers.2.factor")
    assert list(recording.buffers) == ["table", "constant", "calls"], "and no state of random numbers"
    assert recording.parameters["zeta.factor"].dtype == np.float64
    assert recording.buffers["constant"].dtype == np.int32


@pytest.mark.parametrize("execution", ["eager", "jit"])
def test_the_module_its_classes_and_the_64_bit_switch_are_left_as_they_were(execution):
    net = Net()
    before = {cls: dict(vars(cls)) for cls in (Scale, Shifted, Heir, Net, nnx.Dropout, nnx.List)}
    parity.record_flax(net, X, execution=execution)
    assert before == {cls: dict(vars(cls)) for cls in before}
    assert "__call__" not in vars(Heir)
    assert Scale.__call__.__code__.co_filename == __file__
    assert net.calls[...] == 0
    assert not net.dropout.deterministic
    assert net.zeta.factor.dtype == jnp.float32
    assert not jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("execution", ["eager", "jit"])
def test_classes_are_restored_when_the_model_raises(execution):
    before = {cls: dict(vars(cls)) for cls in (Scale, Shifted, Heir, Net)}

    def fail(model, x):
        model(x)
        raise RuntimeError("no second half")

    with pytest.raises(RuntimeError, match="no second half"):
        parity.record_flax(Net(), X, execution=execution, call=fail)
    assert before == {cls: dict(vars(cls)) for cls in before}
    assert not jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]


def test_a_float32_recording_is_float32_throughout():
    recording = parity.record_flax(Net(), X, dtype="float32")
    arrays = [*recording.activations.values(), *recording.parameters.values(), *recording.inputs.values()]
    assert {array.dtype.name for array in arrays} == {"float32", "bool"}


def test_inputs_by_keyword_and_another_method_can_be_recorded():
    recording = parity.record_flax(Net(), {"x": X}, call=lambda model, x: model.zeta(model.alpha(x)))
    assert list(recording.activations) == ["zeta#0", "zeta#1"]
    assert list(recording.outputs) == [""]


class Scanned(nnx.Module):
    def __init__(self) -> None:
        self.inner = Scale(5, 0)

    def __call__(self, x):
        return jax.lax.scan(lambda carry, _: (self.inner(carry), None), x, length=3)[0]


@pytest.mark.parametrize("execution", ["eager", "jit"])
def test_a_module_called_inside_a_transform_is_named_instead_of_missed(execution):
    with pytest.raises(ValueError, match=r"called inside a jax transform .*: inner: Scale; record"):
        parity.record_flax(Scanned(), X, execution=execution)


def test_an_unknown_execution_is_refused():
    with pytest.raises(ValueError, match="must be 'eager' or 'jit', got 'fast'"):
        parity.record_flax(Net(), X, execution="fast")  # pyright: ignore[reportArgumentType]


def test_masks_become_booleans():
    mask = np.tril(np.ones((5, 5), np.float32))
    recording = parity.record_flax(Net(), X, masks={"causal": jnp.asarray(mask)})
    assert recording.masks["causal"].dtype == bool
    np.testing.assert_array_equal(recording.masks["causal"], mask == 1)


def test_flaxs_own_layers_compute_in_the_type_of_the_recording_unless_they_were_told_another():
    class Layers(nnx.Module):
        def __init__(self, **options) -> None:
            rngs = nnx.Rngs(0)
            self.embed = nnx.Embed(7, 5, rngs=rngs, **options)
            self.linear = nnx.Linear(5, 3, rngs=rngs, **options)
            self.norm = nnx.LayerNorm(3, rngs=rngs, **options)

        def __call__(self, ids):
            return self.norm(self.linear(self.embed(ids)))

    ids = np.asarray([[3, 1, 6]], np.int32)
    with jax.numpy_dtype_promotion("standard"):  # Flax's own norm mixes types
        recording = parity.record_flax(Layers(), ids)
        told = parity.record_flax(Layers(dtype=jnp.bfloat16), ids)
    assert {array.dtype.name for array in recording.activations.values()} == {"float64"}
    assert {array.dtype.name for array in told.activations.values()} == {"bfloat16"}


class Padded(nnx.Module):
    def __init__(self) -> None:
        self.conv = nnx.Conv(5, 2, kernel_size=(4,), padding=[(1, 2)], rngs=nnx.Rngs(0))
        self.settings = {"scales": [2.0, 3.0]}

    def __call__(self, x):
        return self.conv(x) * self.settings["scales"][0]


@pytest.mark.parametrize("execution", ["eager", "jit"])
def test_a_module_may_hold_settings_that_cannot_be_hashed(execution):
    def record(model):
        return parity.record_flax(
            model, X, execution=execution, loss=lambda y, _: jnp.square(y).mean(), optimizer=optax.sgd(0.1), steps=2
        ).outputs[""]

    other = Padded()
    other.settings = {"scales": [4.0, 3.0]}
    with parity.shared_traces():
        first, again, doubled = record(Padded()), record(Padded()), record(other)
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(doubled, 2 * first)
