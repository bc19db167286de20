"""The conditioning report tells an ill-conditioned model from a wrong one."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_transformer import parity


class Scale(nnx.Module):
    def __init__(self, factor: float) -> None:
        self.factor = nnx.Param(jnp.full(5, factor))

    def __call__(self, x):
        return x * jnp.broadcast_to(self.factor[...], x.shape)


class Difference(nnx.Module):
    """(first(x) + 1000) - 1000 loses three digits of what leaves `first`'s sum, which `sum` makes seen."""

    def __init__(self, offset: float) -> None:
        self.first, self.shift = Scale(0.7), Shift(offset)
        self.offset = offset

    def __call__(self, x):
        return self.shift(self.first(x)) - self.offset


class Shift(nnx.Module):
    def __init__(self, offset: float) -> None:
        self.offset = offset

    def __call__(self, x):
        return x + self.offset


X = np.random.default_rng(0).standard_normal((3, 5))


def squared(output, batch):
    return jnp.square(output).mean()


def test_a_linear_module_passes_noise_on_as_it_comes():
    report = parity.conditioning(Difference(0.0), X, draws=8)
    assert report.outputs["first#0"] == pytest.approx(1.0, abs=0.2)
    assert report.parameters["first.factor"] == pytest.approx(1.0, abs=0.4)


def test_a_cancellation_is_named_with_its_size():
    report = parity.conditioning(Difference(1000.0), X, loss=squared)
    output = np.sqrt(np.mean((0.7 * X) ** 2))
    assert report.outputs["shift#0"] == pytest.approx(1000 / output, rel=0.3)
    assert max(report.outputs, key=lambda key: report.outputs[key]) == "shift#0"
    assert "shift#0" in str(report)
    assert report.expected["gradient first.factor"] > 1e-5 > 1e-7


@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_what_is_expected_in_float32_is_what_happens(offset):
    model = Difference(offset)
    expected = parity.conditioning(model, X, draws=8).expected[""]
    exact, found = (
        parity.record_flax(model, X.astype(np.float32), dtype=d).outputs[""] for d in ("float64", "float32")
    )
    error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
    assert error < 3 * expected
    assert error > expected / 10
