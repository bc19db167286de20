"""Proof that the ladder can fail: every planted mistake is caught, on its rung, and named at its module."""

import jax
import pytest

from flax_transformer import parity
from parity_tests.cases import all_cases, load_reference, rules_for
from parity_tests.faults import Fault
from parity_tests.faults.catalogue import FAULTS
from parity_tests.ladder import forward_only
from parity_tests.references import reference

CASES = {case.name: case for case in all_cases()}


def verdict_on(fault) -> parity.Verdict:
    case = CASES[fault.case]
    recorded = forward_only(reference(case, "float64", 0))
    with jax.enable_x64(True), fault.patch():
        model = case.model(fault.config(case.config("float64")))
        load_reference(case, model, recorded)
        fault.model(model)
        candidate = parity.record_flax(
            model,
            recorded.inputs,
            call=fault.call(case.call_model),
            masks=fault.masks(dict(case.model_masks(recorded.inputs))),
        )
        return parity.compare(recorded, candidate, rules_for(case, model))


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_planted_mistake_is_caught_on_its_rung_and_named_at_its_module(fault):
    verdict = verdict_on(fault)
    assert not verdict.passed, f"{fault} went unnoticed:\n{verdict}"
    divergence = verdict.first_divergence
    assert divergence is not None
    assert (divergence.rung, divergence.path) == (fault.rung, fault.module), str(verdict)


@pytest.mark.parametrize("name", sorted({fault.case for fault in FAULTS}))
def test_the_same_climb_without_a_mistake_passes(name):
    verdict = verdict_on(Fault(name="none", case=name, rung="", module=""))
    assert verdict.passed, str(verdict)


def test_no_fault_is_listed_twice():
    names = [str(fault) for fault in FAULTS]
    assert len(set(names)) == len(names) >= 10
