"""The rungs of learning pass right ports and tell wrong losses, gradients, optimizers and training runs."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from flax_transformer import optimizers, parity

torch = pytest.importorskip("torch")
from parity_tests.unit.toy_port import B, Port, Reference, T, V, draw  # noqa: E402

LABELS = np.random.default_rng(11).integers(0, V, (B, T)).astype(np.int32)
STEPS = 20


def inputs(seed: int = 0) -> dict[str, np.ndarray]:
    x, mask = draw(seed)
    return {"x": x, "mask": mask, "labels": np.roll(LABELS, seed)}


def call(model, x, mask, labels):
    del labels
    return model(x, mask)


def torch_loss(output, batch):
    return torch.nn.functional.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())


def flax_loss(output, batch):
    picked = jnp.take_along_axis(jax.nn.log_softmax(output), batch["labels"][..., None], axis=-1)
    return -picked.mean()


def adam(learning_rate: Any = 0.01, **options) -> optax.GradientTransformation:
    return optimizers.adam(learning_rate, **options)


BATCHES = [inputs(1), inputs(2)]


@pytest.fixture(scope="module")
def module() -> Reference:
    torch.manual_seed(3)
    return Reference()


def record_reference(module, dtype="float64", **options) -> parity.Recording:
    settings = dict(
        call=call,
        loss=torch_loss,
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
        max_norm=0.1,
        steps=STEPS,
        batches=BATCHES,
    )
    return parity.record_torch(module, inputs(), dtype=dtype, **{**settings, **options})


def record_candidate(port, dtype="float64", **options) -> parity.Recording:
    settings = dict(call=call, loss=flax_loss, optimizer=adam(max_norm=0.1), steps=STEPS, batches=BATCHES)
    return parity.record_flax(port, inputs(), dtype=dtype, execution="jit", **{**settings, **options})


@pytest.fixture(scope="module")
def reference(module) -> parity.Recording:
    return record_reference(module)


@pytest.fixture(scope="module")
def candidate(module) -> parity.Recording:
    return record_candidate(Port(module))


def test_a_right_port_holds_on_every_rung_of_learning(reference, candidate):
    verdict = parity.compare(reference, candidate)
    assert verdict.passed, str(verdict)
    assert [rung.name for rung in verdict.rungs][6:] == ["loss", "backward", "gradients", "updates", "training"]
    assert verdict.structural_zeros == ("key.bias",)
    rows = {rung.name: [row.name for row in rung.rows] for rung in verdict.rungs}
    assert rows["backward"][0] == "#0", "from the loss backwards"
    assert set(rows["gradients"]) == set(reference.parameters)
    assert "key.bias" not in rows["updates"], "its update is noise made large"
    assert len(rows["training"]) == len(reference.parameters), "the losses, and every parameter but one"
    assert len(verdict.curves["reference"]) == STEPS


def test_recordings_of_learning_survive_the_disk(reference, candidate, tmp_path):
    reference.save(tmp_path / "reference")
    loaded = parity.load(tmp_path / "reference")
    for section in ("losses", "gradients", "activation_gradients", "updates", "moments", "trained", "batches"):
        kept, written = getattr(reference, section), getattr(loaded, section)
        assert list(kept) == list(written)
        assert all(np.array_equal(kept[name], written[name]) for name in kept)
    assert parity.compare(loaded, candidate).passed


def first_divergence(reference, candidate) -> tuple[str, str]:
    found = parity.compare(reference, candidate).first_divergence
    assert found is not None, "the mistake went unnoticed"
    return found.rung, found.path


@pytest.mark.parametrize(
    ("mistake", "rung"),
    [
        ({"loss": lambda output, batch: flax_loss(output, batch) * (B * T) / (B * T - 1)}, "loss"),
        ({"optimizer": adam(max_norm=0.1, eps=1e-7)}, "updates"),
        ({"optimizer": adam(0.01 * (1 + 1e-9), max_norm=0.1)}, "updates"),
        ({"optimizer": optax.chain(optax.clip_by_global_norm(0.1), adam())}, "updates"),
        ({"optimizer": adam(b2=0.99, max_norm=0.1)}, "updates"),
        ({"optimizer": adam(0.0, max_norm=0.1)}, "updates"),
        ({"optimizer": adam(lambda count: jnp.where(count == 7, 0.02, 0.01), max_norm=0.1)}, "training"),
    ],
    ids=["mean over one less", "eps", "learning rate", "clip epsilon", "b2", "no step at all", "one step twice"],
)
def test_a_wrong_way_to_learn_is_told_on_its_rung(module, reference, mistake, rung):
    assert first_divergence(reference, record_candidate(Port(module), **mistake))[0] == rung


class Stopped(Port):
    """No gradient through the normalised input of attention: right forward, wrong backward."""

    def normalise(self, x):
        return jax.lax.stop_gradient(self.norm(x))


def test_a_gradient_that_is_cut_is_told_where_it_first_fails_to_arrive(module, reference):
    assert first_divergence(reference, record_candidate(Stopped(module))) == ("backward", "norm")


def test_a_gradient_of_a_structural_zero_must_be_zero(module, reference, candidate):
    wrong = dict(candidate.gradients)
    wrong["key.bias"] = wrong["key.bias"] + 1e-9
    assert first_divergence(reference, dataclasses.replace(candidate, gradients=wrong)) == ("gradients", "key")


def test_a_nan_in_a_gradient_counts(module, reference, candidate):
    for name in ("head.kernel", "key.bias"):
        wrong = {**candidate.gradients, name: np.full_like(candidate.gradients[name], np.nan)}
        rung, path = first_divergence(reference, dataclasses.replace(candidate, gradients=wrong))
        assert (rung, path) == ("gradients", name.partition(".")[0])


def test_a_reference_that_takes_no_step_cannot_be_matched_by_doing_nothing(module):
    lazy = record_reference(
        module, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.0), steps=1, batches=()
    )
    still = record_candidate(Port(module), optimizer=optax.sgd(0.0), steps=1, batches=())
    verdict = parity.compare(lazy, still)
    assert not verdict.passed
    assert "moves nothing" in str(verdict.first_divergence)


def test_what_only_one_side_recorded_is_refused_by_name(module, reference):
    alone = record_candidate(Port(module), optimizer=None, steps=1, batches=())
    with pytest.raises(ValueError, match=r"only the reference has updates.*only the reference has trained"):
        parity.compare(reference, alone)
    with pytest.raises(ValueError, match="20 steps and the candidate 3"):
        parity.compare(reference, record_candidate(Port(module), steps=3))
    with pytest.raises(ValueError, match=r"batch 0/x differs"):
        parity.compare(reference, record_candidate(Port(module), batches=BATCHES[::-1]))
    momentum = record_candidate(Port(module), optimizer=optax.sgd(0.01, momentum=0.9))
    with pytest.raises(ValueError, match=r"moments \['first', 'second'\], the candidate's \['momentum'\]"):
        parity.compare(reference, momentum)


def test_options_that_contradict_each_other_are_refused_on_both_sides(module):
    sides: list[tuple[Any, Any]] = [(parity.record_torch, module), (parity.record_flax, Port(module))]
    for record, model in sides:
        with pytest.raises(ValueError, match="an optimizer needs a loss"):
            record(model, inputs(), call=call, optimizer=adam())
        with pytest.raises(ValueError, match="need an optimizer"):
            record(model, inputs(), call=call, steps=5)
        with pytest.raises(ValueError, match="mode='train' only"):
            record(model, inputs(), call=call, dropout=[])
        with pytest.raises(ValueError, match="one number, got shape"):
            record(model, inputs(), call=call, loss=lambda output, batch: output)


def test_float32_training_is_measured_by_the_spread_of_the_reference(module, reference):
    runs = [record_reference(module, dtype="float32")]
    torch.set_num_threads(1)
    runs.append(record_reference(module, dtype="float32"))
    port = record_candidate(Port(module), dtype="float32")
    assert parity.compare(runs[0], port, truth=reference, envelope=runs[1:]).passed
    wrong = record_candidate(Port(module), dtype="float32", optimizer=adam(max_norm=0.1, b2=0.998))
    assert not parity.compare(runs[0], wrong, truth=reference, envelope=runs[1:]).passed
    with pytest.raises(ValueError, match="of another run than the reference"):
        parity.compare(runs[0], port, truth=reference, envelope=[reference])


def test_dropout_masks_of_pytorch_are_recorded_by_site_and_applied_again(module):
    first = parity.record_torch(module, inputs(), call=call, mode="train", loss=torch_loss)
    assert list(first.dropout) == ["dropout#0"]
    assert 0.2 < first.dropout["dropout#0"].mean() < 0.8
    again = parity.record_torch(module, inputs(), call=call, mode="train", loss=torch_loss, dropout=first.dropout)
    in_order = parity.record_torch(
        module, inputs(), call=call, mode="train", loss=torch_loss, dropout=list(first.dropout.values())
    )
    for other in (again, in_order):
        assert np.array_equal(other.outputs[""], first.outputs[""])
        assert np.array_equal(other.gradients["first.weight"], first.gradients["first.weight"])
    drawn = parity.record_torch(module, inputs(), call=call, mode="train")
    assert not np.array_equal(drawn.outputs[""], first.outputs[""]), "another draw"
    for wrong, words in (({}, "needs a mask"), ({"dropout#0": np.ones((1, 2))}, "got one of shape"), ([], "got none")):
        with pytest.raises(ValueError, match=words):
            parity.record_torch(module, inputs(), call=call, mode="train", dropout=wrong)


def test_the_recorded_mask_is_what_pytorch_itself_would_have_dropped(module):
    torch.manual_seed(5)
    recorded = parity.record_torch(module, inputs(), dtype="float32", call=call, mode="train").outputs[""]
    torch.manual_seed(5)
    x, mask = draw()
    with torch.no_grad():
        plain = module.train()(torch.from_numpy(x), torch.from_numpy(mask.copy())).numpy()
    module.eval()
    assert np.array_equal(recorded, plain)


def test_a_parameter_of_another_shape_is_told_by_its_shape_whatever_was_learned(reference, candidate):
    sections = ("parameters", "gradients", "updates", "moments", "trained")
    twice = {
        section: {
            name: np.tile(array, 2) if name.endswith("head.bias") else array
            for name, array in getattr(candidate, section).items()
        }
        for section in sections
    }
    assert first_divergence(reference, dataclasses.replace(candidate, **twice)) == ("shapes", "head")
