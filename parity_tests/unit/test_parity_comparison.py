"""The ladder passes right ports and names what is wrong with the others: the rung and the module."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_transformer import parity

torch = pytest.importorskip("torch")
from parity_tests.unit.toy_port import B, D, Linear, Port, Reference, T, V, draw  # noqa: E402


@pytest.fixture(scope="module")
def module() -> Reference:
    torch.manual_seed(3)
    return Reference()


@pytest.fixture(scope="module")
def reference(module) -> parity.Recording:
    return parity.record_torch(module, draw())


def test_a_right_port_passes_eager_and_compiled(module, reference):
    for execution in ("eager", "jit"):
        verdict = parity.compare(reference, parity.record_flax(Port(module), draw(), execution=execution))
        assert verdict.passed
        assert verdict.first_divergence is None
        assert [rung.name for rung in verdict.rungs] == list(parity.RUNGS)[:6]
        assert {row.name for row in verdict.rungs[4].rows} == {
            "first#0", "norm#0", "query#0", "key#0", "first#1", "head#0", "#0",
        }  # fmt: skip
        ran = [key for key in reference.activations if key != "dropout#0"]
        assert [row.name for row in verdict.rungs[1].rows if "#" in row.name] == ran, "in order of execution"
        assert verdict.unmatched == ("module dropout of the reference, called 1 times",)


def transposed_square_kernel(port: Port) -> None:
    port.query.kernel[...] = port.query.kernel[...].T


def swapped_weights(port: Port) -> None:
    port.query, port.key = port.key, port.query


def untied_module(port: Port) -> None:
    port.second = nnx.clone(port.first)


def tied_modules(port: Port) -> None:
    port.query = port.key


def dropped_bias(port: Port) -> None:
    port.head.bias = None


def frozen_parameter(port: Port) -> None:
    scale = port.norm.scale[...]
    del port.norm.scale
    port.norm.scale = nnx.Variable(scale)


def wrong_eps(port: Port) -> None:
    port.norm.eps = 1e-6


def shifted_table(port: Port) -> None:
    port.table[...] = jnp.roll(port.table[...], 1, axis=0)


class CallsNoNorm(Port):
    def normalise(self, x):
        return x


class CallsNormTwice(Port):
    def normalise(self, x):
        return self.norm(self.norm(x))


class HeadInFloat32(Port):
    def __init__(self, reference: Reference) -> None:
        super().__init__(reference)
        self.head = RoundedLinear(reference.head)


class RoundedLinear(Linear):
    def __call__(self, x):
        return super().__call__(x).astype(jnp.float32)


class ReturnsTwo(Port):
    def __call__(self, x, mask):
        y = super().__call__(x, mask)
        return y, y


FAULTS = [
    (transposed_square_kernel, "shapes", "query", "it is the transpose"),
    (swapped_weights, "shapes", "query", "it holds the reference's key.weight"),
    (untied_module, "keys", "first", "several in the candidate: first.kernel, second.kernel"),
    (tied_modules, "keys", "query", "which is also key"),
    (dropped_bias, "keys", "head", "is missing in the candidate"),
    (frozen_parameter, "keys", "norm", "a buffer on the other"),
    (shifted_table, "buffers", "", "35 of 35 elements differ"),
    (wrong_eps, "modules", "norm", "allowed"),
    (CallsNoNorm, "modules", "norm", "is called 0 times in the candidate and 1 times in the reference"),
    (CallsNormTwice, "modules", "norm", "is called 2 times in the candidate"),
    (HeadInFloat32, "shapes", "head", "is float32, the reference float64"),
    (ReturnsTwo, "shapes", "", "returns 2 arrays, the reference 1"),
]


@pytest.mark.parametrize(("fault", "rung", "path", "detail"), FAULTS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_fault_is_caught_at_its_rung_and_module(module, reference, fault, rung, path, detail):
    if isinstance(fault, type):
        port = fault(module)
    else:
        port = Port(module)
        fault(port)
    verdict = parity.compare(reference, parity.record_flax(port, draw()))
    assert not verdict.passed
    found = verdict.first_divergence
    assert found is not None
    assert (found.rung, found.path) == (rung, path), str(verdict)
    assert detail in found.row.detail
    assert "DIVERGED" in str(verdict)
    assert str(found) in str(verdict)


def test_an_input_mask_that_is_off_by_one_is_caught_on_the_rung_of_masks(module, reference):
    x, _ = draw()
    shifted = np.broadcast_to(np.tril(np.ones((T, T), bool), 1), (B, T, T))
    verdict = parity.compare(reference, parity.record_flax(Port(module), (x, shifted)))
    found = verdict.first_divergence
    assert found is not None
    assert (found.rung, found.row.name) == ("masks", "input 1")
    assert found.row.detail == f"{B * (T - 1)} of {B * T * T} elements differ"


def test_masks_built_by_each_framework_are_compared_under_their_names(module):
    mask = np.tril(np.ones((1, T, T)))
    recordings = [
        parity.record_torch(module, draw(), masks={"causal": mask}),
        *(
            parity.record_flax(Port(module), draw(), masks={"causal": jnp.tril(jnp.ones((1, T, T)), k)})
            for k in (0, -1)
        ),
        parity.record_flax(Port(module), draw(), masks={"padding": mask}),
    ]
    assert parity.compare(recordings[0], recordings[1]).passed
    found = parity.compare(recordings[0], recordings[2]).first_divergence
    assert found is not None
    assert (found.rung, found.row.name) == ("masks", "mask causal")
    with pytest.raises(ValueError, match=r"masks \['causal'\], the candidate \['padding'\]"):
        parity.compare(recordings[0], recordings[3])


def test_nan_at_the_same_place_is_equal_and_elsewhere_is_not(reference):
    def with_nan(*place: int) -> parity.Recording:
        output = reference.activations["#0"].copy()
        output[place] = np.nan
        return dataclasses.replace(reference, activations={**reference.activations, "#0": output}, outputs={"": output})

    assert parity.compare(with_nan(0, 1, 2), with_nan(0, 1, 2)).passed
    found = parity.compare(with_nan(0, 1, 2), with_nan(0, 2, 1)).first_divergence
    assert found is not None
    assert (found.rung, found.path) == ("modules", "")
    assert found.row.detail.startswith("2 elements are NaN")


def test_the_first_divergence_is_the_first_in_the_references_order_of_execution(reference):
    changed = {key: reference.activations[key] + 1e-3 for key in ("head#0", "key#0", "first#1")}
    candidate = dataclasses.replace(reference, activations={**reference.activations, **changed})
    verdict = parity.compare(reference, candidate)
    assert [row.name for row in verdict.rungs[4].rows if not row.passed] == ["key#0", "first#1", "head#0"]
    assert verdict.first_divergence is not None
    assert verdict.first_divergence.row.name == "key#0"


def test_a_missing_call_does_not_hide_an_earlier_divergence(reference):
    activations = {**reference.activations, "first#0": reference.activations["first#0"] + 1e-3}
    del activations["head#0"]
    verdict = parity.compare(reference, dataclasses.replace(reference, activations=activations))
    assert [row.name for row in verdict.rungs[4].rows if not row.passed] == ["first#0", "head#0"]


def test_another_number_of_final_outputs_diverges_where_the_calls_agree(reference):
    twice = {"/0": reference.outputs[""], "/1": reference.outputs[""]}
    found = parity.compare(reference, dataclasses.replace(reference, outputs=twice)).first_divergence
    assert found is not None
    assert (found.rung, found.row.name) == ("shapes", "output")
    assert found.row.detail.startswith("is 2 arrays")


def test_nothing_compared_is_an_error_and_never_a_pass(reference):
    empty = {"activations": {}, "outputs": {}}
    for changes in (empty, {"outputs": {}}, {"activations": {}}, {"outputs": {"": np.full((B, T, V), np.nan)}}):
        hollow = dataclasses.replace(reference, **changes)
        with pytest.raises(ValueError, match="nothing was compared, which is never a pass"):
            parity.compare(hollow, hollow)
    void = dataclasses.replace(reference, **empty, parameters={}, buffers={}, tensor_names={}, module_names={})
    with pytest.raises(ValueError, match="nothing was compared"):
        parity.compare(void, void)
    exempt = parity.Rules(modules=dict.fromkeys(reference.module_names))
    with pytest.raises(ValueError, match="nothing was compared"):
        parity.compare(reference, reference, exempt)


def test_different_inputs_are_an_error_that_names_them(module, reference):
    x, mask = draw()
    other = parity.record_flax(Port(module), (x + np.float32(0.25), mask))
    with pytest.raises(ValueError, match="cannot be compared: input 0 differs"):
        parity.compare(reference, other)
    with pytest.raises(ValueError, match=r"inputs \['0', '1'\], the candidate \['x'\]"):
        parity.compare(reference, dataclasses.replace(other, inputs={"x": x}))


def test_inputs_by_place_on_one_side_and_by_keyword_on_the_other_are_compared_in_order(module, reference):
    x, mask = draw()
    by_keyword = parity.record_flax(Port(module), {"x": x, "mask": mask})
    assert parity.compare(reference, by_keyword).passed
    reordered = dataclasses.replace(by_keyword, inputs={"mask": mask, "x": x})
    assert parity.compare(by_keyword, reordered).passed, "equal names count for more than the order"


def test_recordings_of_different_dtypes_are_an_error(module, reference):
    with pytest.raises(ValueError, match="the reference is float64 and the candidate float32"):
        parity.compare(reference, parity.record_flax(Port(module), draw(), dtype="float32"))
    half = parity.record_torch(module, draw(), dtype="bfloat16")
    with pytest.raises(ValueError, match="there is no rule for bfloat16"):
        parity.compare(half, half)


def test_float32_is_held_to_the_error_of_the_reference_against_the_truth(module, reference):
    reference32 = parity.record_torch(module, draw(), dtype="float32")
    candidate32 = parity.record_flax(Port(module), draw(), dtype="float32", execution="jit")
    assert parity.compare(reference32, candidate32, truth=reference).passed
    with pytest.raises(ValueError, match="float32 recordings need truth="):
        parity.compare(reference32, candidate32)
    with pytest.raises(ValueError, match="the truth is float32"):
        parity.compare(reference32, candidate32, truth=reference32)
    with pytest.raises(ValueError, match="without a truth"):
        parity.compare(reference, reference, truth=reference)
    port = Port(module)
    wrong_eps(port)
    port.norm.eps = 2e-5  # what float32 can see
    found = parity.compare(
        reference32, parity.record_flax(port, draw(), dtype="float32"), truth=reference
    ).first_divergence
    assert found is not None
    assert (found.rung, found.path) == ("modules", "norm")


def test_the_truth_must_be_of_the_same_rounded_numbers(module):
    x = np.random.default_rng(0).standard_normal((B, T, D))  # in float64: the float32 run sees other numbers
    inputs = (x, draw()[1])
    runs = [parity.record_torch(module, inputs, dtype=dtype) for dtype in ("float32", "float64")]
    with pytest.raises(ValueError, match="inputs/0 of the truth is not the reference's"):
        parity.compare(runs[0], runs[0], truth=runs[1])
    features = parity.record_torch(module, inputs, call=lambda model, x, mask: model.first(x))
    with pytest.raises(ValueError, match="the truth has other activations than the reference"):
        parity.compare(runs[0], runs[0], truth=features)


def test_pooling_over_seeds_passes_right_ports_and_needs_sixteen(module):
    port = Port(module)
    inputs = [draw(seed) for seed in range(16)]
    references = [parity.record_torch(module, i, dtype="float32") for i in inputs]
    truths = [parity.record_torch(module, i) for i in inputs]
    candidates = [parity.record_flax(port, i, dtype="float32") for i in inputs]
    verdict = parity.compare_pooled(references, candidates, truths=truths)
    assert verdict.passed
    assert "over 16 cases" in verdict.rungs[-1].rows[0].detail
    with pytest.raises(ValueError, match=r"at least 16 .* got \(16, 15, 16\)"):
        parity.compare_pooled(references, candidates[1:], truths=truths)
    with pytest.raises(ValueError, match=r"at least 16 .* got \(15, 15, 15\)"):
        parity.compare_pooled(references[1:], candidates[1:], truths=truths[1:])
    candidates[3] = dataclasses.replace(candidates[3], outputs={"/0": candidates[3].outputs[""]})
    with pytest.raises(ValueError, match="case 3: the candidate has other names or calls than in case 0"):
        parity.compare_pooled(references, candidates, truths=truths)


def test_a_verdict_reads_as_a_table(module, reference):
    text = str(parity.compare(reference, parity.record_flax(Port(module), draw())))
    assert text.startswith("PASSED (float64, at most 1e-12 of the scale and equal in float32)")
    assert "query.weight = query.kernel (kernel layout), by convention" in text
    assert "module dropout of the reference, called 1 times" in text


def test_outputs_of_the_same_names_are_paired_by_name_and_others_in_order(reference):
    def returning(**names):
        nested = {f"/{name}": array for name, array in names.items()}
        activations = {key: array for key, array in reference.activations.items() if key != "#0"}
        activations |= {f"#0{place}": array for place, array in nested.items()}
        return dataclasses.replace(reference, activations=activations, outputs=nested)

    mean = reference.outputs[""]
    ours = returning(mean=mean, spread=2 * mean)
    assert parity.compare(ours, returning(spread=2 * mean, mean=mean)).passed
    assert parity.compare(ours, returning(mu=mean, sigma=2 * mean)).passed
    for wrong in (returning(spread=mean, mean=2 * mean), returning(sigma=2 * mean, mu=mean)):
        found = parity.compare(ours, wrong).first_divergence
        assert found is not None
        assert (found.rung, found.row.name) == ("modules", "#0/mean")
