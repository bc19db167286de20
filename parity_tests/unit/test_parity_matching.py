"""Names find their counterparts, by rule or by guessing, and wrong rules are refused; all without a framework."""

import dataclasses
from collections.abc import Mapping

import numpy as np
import pytest

from flax_transformer import parity
from flax_transformer.parity.layouts import from_kernel


def recorded(
    tensors: Mapping[str, np.ndarray],
    calls: list[str],
    *,
    aliases: Mapping[str, tuple[str, ...]] | None = None,
    buffers: Mapping[str, np.ndarray] | None = None,
) -> parity.Recording:
    """A recording whose every call returns an array that depends on how often it was called, and on nothing else.

    ``aliases`` are second names of tensors and modules alike.
    """
    aliases, buffers = aliases or {}, buffers or {}
    paths = (
        {name.rpartition(".")[0] for name in [*tensors, *buffers]} | {call.partition("#")[0] for call in calls} | {""}
    )
    outputs = {call: np.random.default_rng(place).standard_normal((2, 3)) for place, call in enumerate(calls)}
    return parity.Recording(
        dtype="float64",
        inputs={"0": np.arange(3.0)},
        masks={},
        parameters=tensors,
        buffers=buffers,
        activations=outputs,
        outputs={"": next(reversed(outputs.values()))},
        tensor_names={name: (name, *aliases.get(name, ())) for name in [*tensors, *buffers]},
        module_names={path: (path, *aliases.get(path, ())) for path in sorted(paths)},
        provenance={},
    )


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def found(verdict: parity.Verdict) -> dict[str, tuple[str, str]]:
    """Reference name -> candidate name and how."""
    return {match.reference: ("+".join(match.candidates[0]), match.how) for match in verdict.matches}


def test_flax_names_match_by_convention_with_their_layouts():
    linear, convolution = draw(5, 5), draw(7, 3, 2, 4)
    reference = recorded(
        {"a.weight": linear, "b.weight": draw(5), "c.weight": draw(11, 5), "d.weight": convolution},
        ["a#0", "d#0", "#0"],
        buffers={"e.running_mean": draw(5, seed=1)},
    )
    candidate = recorded(
        {
            "a.kernel": linear.T,
            "b.scale": draw(5),
            "c.embedding": draw(11, 5),
            "d.kernel": convolution.transpose(2, 3, 1, 0),
        },
        ["a#0", "d#0", "#0"],
        buffers={"e.mean": draw(5, seed=1)},
    )
    verdict = parity.compare(reference, candidate)
    assert verdict.passed, str(verdict)
    assert {how for _, how in found(verdict).values()} == {"convention", "name"}


def test_a_kernel_of_another_layout_matches_by_its_shape_and_a_square_one_by_its_name():
    head, square = draw(11, 5), draw(5, 5)
    reference = recorded({"head.weight": head, "a.weight": square}, ["head#0", "#0"])
    untransposed = recorded({"head.kernel": head, "a.kernel": square}, ["head#0", "#0"])
    verdict = parity.compare(reference, untransposed)
    assert [row.name for rung in verdict.rungs for row in rung.rows if not row.passed] == ["a.weight"]
    assert verdict.first_divergence is not None
    assert verdict.first_divergence.rung == "shapes"


def test_kernels_come_to_pytorchs_axes():
    assert from_kernel(draw(2, 4, 3, 7)).shape == (7, 3, 2, 4)
    np.testing.assert_array_equal(from_kernel(draw(3, 7)), draw(3, 7).T)
    assert from_kernel(draw(3)).shape == (3,)


def test_unrelated_names_match_by_value_then_by_shape_and_order_of_execution():
    reference = recorded(
        {"one.w": draw(5, 3), "two.w": draw(5, 3, seed=1), "three.w": draw(5, 3, seed=2), "four.w": draw(7, seed=3)},
        ["one#0", "two#0", "three#0", "four#0", "#0"],
    )
    candidate = recorded(
        {"zeta.w": draw(5, 3), "alpha.w": draw(7, seed=3), "mu.w": draw(3, 5, seed=2), "eta.w": draw(5, 3, seed=1).T},
        ["zeta#0", "eta#0", "mu#0", "alpha#0", "#0"],
    )
    verdict = parity.compare(reference, candidate)
    assert found(verdict) == {
        "one.w": ("zeta.w", "value"),
        "two.w": ("eta.w", "value"),
        "three.w": ("mu.w", "shape and order"),
        "four.w": ("alpha.w", "value"),
        "": ("", "name"),
        "one": ("zeta", "parameters"),
        "two": ("eta", "parameters"),
        "three": ("mu", "parameters"),
        "four": ("alpha", "parameters"),
    }
    assert verdict.first_divergence is not None
    assert (verdict.first_divergence.rung, verdict.first_divergence.path) == ("shapes", "three")
    assert "three.w = mu.w (kernel layout), by shape and order" in str(verdict)


def test_wrappers_around_the_same_parameters_pair_from_the_inside_if_there_are_as_many():
    weight = draw(5)
    reference = recorded({"outer.inner.w": weight}, ["outer.inner#0", "outer#0", "#0"])
    alike = recorded({"wrap.core.v": weight}, ["wrap.core#0", "wrap#0", "#0"])
    matches = found(parity.compare(reference, alike))
    assert (matches["outer.inner"], matches["outer"]) == (("wrap.core", "parameters"), ("wrap", "parameters"))
    flat = recorded({"core.v": weight}, ["core#0", "#0"])
    verdict = parity.compare(reference, with_output_of(flat, reference))
    assert set(verdict.unmatched) == {
        "module outer.inner of the reference, called 1 times",
        "module outer of the reference, called 1 times",
        "module core of the candidate, called 1 times",
    }


def with_output_of(candidate: parity.Recording, reference: parity.Recording) -> parity.Recording:
    """``candidate`` with the reference's result, where the calls before are not in question."""
    activations = {**candidate.activations, "#0": reference.activations["#0"]}
    return dataclasses.replace(candidate, activations=activations, outputs=reference.outputs)


def test_rules_reach_shared_tensors_and_modules_by_any_alias():
    weight = draw(5, 5)
    reference = recorded(
        {"layers.0.w": weight}, ["layers.0#0", "layers.0#1", "#0"],
        aliases={"layers.0.w": ("layers.1.w",), "layers.0": ("layers.1",)},
    )  # fmt: skip
    candidate = recorded(
        {"block.kernel": weight.T}, ["block#0", "block#1", "#0"],
        aliases={"block.kernel": ("again.kernel",), "block": ("again",)},
    )  # fmt: skip
    rules = parity.Rules(
        parameters={"layers.1.w": "again.kernel"}, modules={"layers.1": "again"}, transforms={"layers.0.w": "kernel"}
    )
    verdict = parity.compare(reference, candidate, rules)
    assert verdict.passed, str(verdict)
    assert found(verdict) == {"layers.0.w": ("block.kernel", "rule"), "layers.0": ("block", "rule"), "": ("", "name")}
    assert verdict.unmatched == ()


def test_one_fused_parameter_may_be_three_in_the_candidate():
    query, key, value = (draw(5, 5, seed=seed) for seed in range(3))
    reference = recorded({"in_proj": np.concatenate([query, key, value])}, ["#0"])
    kernels = {"q.kernel": query.T, "k.kernel": key.T, "v.kernel": value.T}
    fused = {"in_proj": lambda *parts: np.concatenate([part.T for part in parts])}
    rules = parity.Rules(parameters={"in_proj": tuple(kernels)}, transforms=fused)
    assert parity.compare(reference, recorded(kernels, ["#0"]), rules).passed
    swapped = recorded({**kernels, "q.kernel": key.T, "k.kernel": query.T}, ["#0"])
    divergence = parity.compare(reference, swapped, rules).first_divergence
    assert divergence is not None
    assert (divergence.rung, divergence.row.name) == ("shapes", "in_proj")


def test_a_stack_may_hold_several_parameters_but_a_matrix_only_one():
    layers = {f"layers.{index}.w": draw(3, 5, seed=index) for index in range(2)}
    stacked = recorded({"layers.kernel": np.stack(list(layers.values()))}, ["#0"])
    rules = parity.Rules(
        parameters=dict.fromkeys(layers, "layers.kernel"),
        transforms={"layers.0.w": lambda stack: stack[0], "layers.1.w": lambda stack: stack[1]},
    )
    assert parity.compare(recorded(layers, ["#0"]), stacked, rules).passed
    single = recorded({"layers.kernel": layers["layers.0.w"]}, ["#0"])
    tied = parity.Rules(parameters=rules.parameters, transforms=dict.fromkeys(layers, lambda matrix: matrix))
    divergence = parity.compare(recorded(layers, ["#0"]), single, tied).first_divergence
    assert divergence is not None
    assert divergence.rung == "keys"
    assert "which is also layers.1.w of the reference" in divergence.row.detail


def test_a_transform_of_a_module_applies_to_its_outputs():
    reference = recorded({}, ["a#0", "#0"])
    outputs = {key: array.T for key, array in reference.activations.items()}
    candidate = dataclasses.replace(reference, activations=outputs, outputs={"": outputs["#0"]})
    assert not parity.compare(reference, candidate).passed
    rules = parity.Rules(transforms={"a": lambda array: array.T, "": lambda array: array.T})
    assert parity.compare(reference, candidate, rules).passed


def test_a_rule_claims_its_names_and_none_exempts_one():
    reference = recorded({"proj.w": draw(5), "extra": draw(3)}, ["proj#0", "#0"])
    # The candidate's model returns what proj returns; its final output is another function's, as probabilities are.
    candidate = dataclasses.replace(
        recorded({"proj.w": draw(5)}, ["#0"]),
        activations={"#0": reference.activations["proj#0"]},
        outputs=reference.outputs,
    )
    rules = parity.Rules(parameters={"extra": None}, modules={"proj": ""})
    verdict = parity.compare(reference, candidate, rules)
    assert verdict.passed, str(verdict)
    assert found(verdict)["proj"] == ("", "rule")
    assert verdict.unmatched == ("module (model) of the reference, called 1 times",)
    exempt = parity.Rules(parameters={"extra": None}, modules={"proj": "", "": None})
    assert parity.compare(reference, candidate, exempt).unmatched == ()


def test_what_is_left_matches_in_order_of_execution_and_not_of_names():
    reference = recorded({"one.w": draw(5), "two.w": draw(5, seed=1)}, ["one#0", "two#0", "#0"])
    candidate = recorded({"a.v": draw(5, seed=2), "b.v": draw(5, seed=3)}, ["b#0", "a#0", "#0"])
    matches = found(parity.compare(reference, candidate))
    assert (matches["one.w"], matches["two.w"]) == (("b.v", "shape and order"), ("a.v", "shape and order"))


def test_a_rule_replaces_the_equal_name():
    reference = recorded({"a.w": draw(5)}, ["a#0", "#0"])
    candidate = recorded({"a.w": draw(5, seed=1), "b.w": draw(5)}, ["b#0", "#0"])
    verdict = parity.compare(reference, candidate, parity.Rules(parameters={"a.w": "b.w"}, modules={"a": "b"}))
    assert [(row.name, row.detail) for rung in verdict.rungs for row in rung.rows if not row.passed] == [
        ("a.w", "is in the candidate only")
    ]


def test_parameters_are_listed_in_the_order_in_which_their_modules_ran():
    reference = recorded({"a.w": draw(5), "b.w": draw(5, seed=1)}, ["b#0", "a#0", "#0"])
    wrong = recorded({"a.w": draw(5, seed=2), "b.w": draw(5, seed=3)}, ["b#0", "a#0", "#0"])
    failed = [row.name for rung in parity.compare(reference, wrong).rungs for row in rung.rows if not row.passed]
    assert failed == ["b.w", "a.w"]


def test_a_module_that_returns_booleans_is_on_the_rung_of_masks():
    reference = recorded({}, ["mask#0", "#0"])
    runs = [
        dataclasses.replace(reference, activations={**reference.activations, "mask#0": np.tri(3, 3, k) > 0})
        for k in (0, 1)
    ]
    verdict = parity.compare(runs[0], runs[1])
    assert [(r.name, row.name) for r in verdict.rungs for row in r.rows if not row.passed] == [("masks", "mask#0")]


def test_with_rules_nothing_is_guessed():
    reference, candidate = recorded({"a.weight": draw(5)}, ["#0"]), recorded({"a.scale": draw(5)}, ["#0"])
    assert parity.compare(reference, candidate).passed
    verdict = parity.compare(reference, candidate, parity.Rules())
    failed = {row.name: row.detail for row in verdict.rungs[0].rows if not row.passed}
    assert failed == {"a.weight": "is missing in the candidate", "a.scale": "is in the candidate only"}


def test_every_wrong_name_in_the_rules_is_listed_in_one_error():
    reference, candidate = recorded({"a.w": draw(5)}, ["a#0", "#0"]), recorded({"a.w": draw(5)}, ["a#0", "#0"])
    rules = parity.Rules(
        parameters={"b.w": "a.w", "a.w": ("c.w", "a.w")},
        modules={"d": "a", "a": "e"},
        transforms={"f": "kernel", "a": "sideways"},
    )
    with pytest.raises(ValueError, match="rules must name what the recordings hold") as error:
        parity.compare(reference, candidate, rules)
    for part in (
        "parameter 'b.w' of the reference",
        "parameter 'c.w' of the candidate",
        "module 'd' of the reference",
        "module 'e' of the candidate",
        "'f' of the reference (a transform)",
        "layout 'sideways'",
        "function in transforms that makes one array of ('c.w', 'a.w')",
    ):
        assert part in str(error.value)


def test_a_module_without_parameters_may_be_called_another_number_of_times_and_is_then_listed():
    reference = recorded({"a.w": draw(5)}, ["a#0", "drop#0", "drop#1", "#0"])
    candidate = with_output_of(recorded({"a.w": draw(5)}, ["a#0", "drop#0", "#0"]), reference)
    verdict = parity.compare(reference, candidate)
    assert verdict.passed
    assert verdict.unmatched == (
        "module drop, without parameters, called 1 times in the candidate and 2 times in the reference",
    )
