"""With replay one fault is one row; a search finds what random inputs miss."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_transformer import optimizers, parity
from flax_transformer.parity.localisation import rearranged_back

torch = pytest.importorskip("torch")
from parity_tests.unit.toy_port import Norm, Port, Reference, draw  # noqa: E402


@pytest.fixture(scope="module")
def module() -> Reference:
    torch.manual_seed(3)
    return Reference()


@pytest.fixture(scope="module")
def reference(module) -> parity.Recording:
    return parity.record_torch(module, draw())


def failed(verdict: parity.Verdict) -> list[str]:
    return [row.name for rung in verdict.rungs if rung.name == "modules" for row in rung.rows if not row.passed]


def test_one_fault_is_one_row(module, reference):
    port = Port(module)
    port.norm.eps = 1e-6
    cascade = failed(parity.compare(reference, parity.record_flax(port, draw())))
    assert cascade == ["norm#0", "query#0", "key#0", "first#1", "head#0", "#0"]
    assert failed(parity.localise(reference, port)) == ["norm#0"]
    assert parity.localise(reference, Port(module)).passed


class Unscaled(Port):
    def __call__(self, x, mask):
        return 1.5 * super().__call__(x, mask)


def test_a_fault_between_the_modules_is_the_row_of_what_surrounds_them(module, reference):
    assert failed(parity.localise(reference, Unscaled(module))) == ["#0"]


def test_replay_passes_gradients_and_survives_a_module_that_gives_nan(module):
    def torch_loss(output, batch):
        return (output**2).mean()

    def flax_loss(output, batch):
        return (output**2).mean()

    recorded = parity.record_torch(module, draw(), loss=torch_loss)
    assert parity.localise(recorded, Port(module), loss=flax_loss).passed
    port = Port(module)
    port.key.bias = nnx.Param(jnp.full(5, jnp.nan))
    assert failed(parity.localise(reference_of(module), port)) == ["key#0"]


def reference_of(module) -> parity.Recording:
    return parity.record_torch(module, draw())


def test_a_layout_is_undone_where_it_only_moves_elements():
    like = np.random.default_rng(0).standard_normal((2, 3, 5))
    for transform in (lambda a: a, lambda a: np.moveaxis(a, -1, 0), lambda a: a.reshape(6, 5).T):
        np.testing.assert_array_equal(rearranged_back(transform, like, transform(like)), like)
    assert rearranged_back(lambda a: a.sum(0), like, like.sum(0)) is None


class Clamped(Norm):
    """Right for everything that a standard normal ever shows."""

    def __call__(self, x):
        return super().__call__(jnp.minimum(x, 40.0))


def test_random_inputs_miss_what_a_search_finds(module):
    port = Port(module)
    for seed in range(3):
        assert parity.compare(parity.record_torch(module, draw(seed)), parity.record_flax(port, draw(seed))).passed
    port.norm = Clamped(module.norm)
    assert parity.compare(parity.record_torch(module, draw()), parity.record_flax(port, draw())).passed
    live = parity.live_torch(module), parity.live_flax(port)
    found = parity.search(*live, draw(), steps=40)
    assert found.at_start < 1e-13
    assert found.difference > 1e-3
    inputs = tuple(found.inputs.values())
    verdict = parity.compare(parity.record_torch(module, inputs), parity.record_flax(port, inputs))
    assert verdict.first_divergence is not None
    assert verdict.first_divergence.path == "norm"


def test_a_search_on_a_right_port_finds_nothing(module):
    found = parity.search(parity.live_torch(module), parity.live_flax(Port(module)), draw(), steps=40)
    assert found.difference < 1e-11
    assert list(found.history) == sorted(found.history)


class Table(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(300, 5)

    def forward(self, ids):
        return self.table(ids)


class TablePort(nnx.Module):
    def __init__(self, reference: Table) -> None:
        self.table = nnx.Param(jnp.asarray(reference.table.weight.detach().numpy()))

    def __call__(self, ids):
        return self.table[jnp.clip(ids, 0, 289)]


def test_a_search_over_ids_finds_the_rows_that_are_wrong():
    torch.manual_seed(0)
    reference = Table()
    ids = np.random.default_rng(0).integers(0, 100, (3, 7)).astype(np.int32)
    live = parity.live_torch(reference), parity.live_flax(TablePort(reference))
    found = parity.search(*live, ids, steps=100, vocabulary=300)
    assert found.at_start == 0
    assert found.difference > 0.01
    assert found.inputs["0"].max() > 289
    with pytest.raises(ValueError, match="got masks alone"):
        parity.search(*live, np.ones((3, 5), bool))


def test_the_gradient_of_a_live_model_is_that_of_its_outputs(module):
    x, mask = draw()
    for live in (parity.live_torch(module), parity.live_flax(Port(module))):
        outputs, pullback = live({"0": x.astype(np.float64), "1": mask})
        weights = np.random.default_rng(1).standard_normal(outputs[""].shape)
        gradient = pullback({"": weights})["0"]
        step = np.random.default_rng(2).standard_normal(x.shape)
        moved = [live({"0": x + sign * 1e-5 * step, "1": mask})[0][""] for sign in (1, -1)]
        slope = ((moved[0] - moved[1]) / 2e-5 * weights).sum()
        np.testing.assert_allclose((gradient * step).sum(), slope, rtol=1e-6)
    assert not jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]


def test_a_reference_that_was_trained_is_compared_as_far_as_the_options_go(module):
    def loss(output, batch):
        return (output**2).mean()

    trained = parity.record_torch(
        module,
        draw(),
        loss=loss,
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
        steps=3,
        batches=[draw(1)],
        decode=lambda model, x, mask: model(x, mask).argmax(-1),
    )
    port = Port(module)
    port.norm.eps = 1e-6
    forward = parity.localise(trained, port)
    assert failed(forward) == ["norm#0"]
    assert [rung.name for rung in forward.rungs][-1] == "output"
    assert [rung.name for rung in parity.localise(trained, port, loss=loss).rungs][-1] == "gradients"
    learned = parity.localise(trained, Port(module), loss=loss, optimizer=optimizers.adam(0.01), steps=3)
    assert learned.passed
    assert [rung.name for rung in learned.rungs][-1] == "training"


class Named(torch.nn.Module):
    def forward(self, x):
        return {"z": x, "a": 2 * x, "many": [n * x for n in range(12)]}


class OtherNames(nnx.Module):
    def __init__(self, second):
        self.second = second

    def __call__(self, x):
        return (x, 2 * x, [n * x for n in range(11)] + [self.second * x])


class OtherOrder(nnx.Module):
    def __call__(self, x):
        return {"a": 2 * x, "many": [n * x for n in range(12)], "z": x}


def test_a_search_pairs_outputs_by_name_or_else_in_the_order_in_which_they_are_returned():
    x = np.random.default_rng(0).standard_normal((2, 3))
    live = parity.live_torch(Named())
    for port, differs in ((OtherOrder(), False), (OtherNames(11), False), (OtherNames(11.5), True)):
        assert (parity.search(live, parity.live_flax(port), x, steps=5).difference > 1e-12) == differs
