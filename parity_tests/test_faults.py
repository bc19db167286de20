"""Proof that the ladder can fail: every planted mistake is caught, on its rung, and named at its module."""

import pytest

from flax_transformer import parity
from parity_tests.faults import ALL, DECODER_ONLY, Fault, LossFault, OptimizerFault, TrainingFault
from parity_tests.faults.detection import failed
from parity_tests.faults.learning import right_but, right_loss
from parity_tests.faults.planting import CASES, FAULTS, expected, verdict_on
from parity_tests.faults.sources import SOURCES
from parity_tests.references import needs_torch

PLANTED = [
    pytest.param(
        fault,
        CASES[name],
        id=f"{fault}-{name}",
        # What learns is compiled, once a case; masks of dropout and training runs are drawn by PyTorch on the spot.
        marks=[
            *([] if isinstance(fault, Fault) else [pytest.mark.xdist_group(name)]),
            *(
                [needs_torch]
                if isinstance(fault, TrainingFault) or (isinstance(fault, Fault) and fault.dropout)
                else []
            ),
        ],
    )
    for fault in FAULTS
    for name in fault.cases
]


@pytest.fixture(scope="module", autouse=True)
def traces():
    """No fault patches what a compiled recording runs; those that patch run operation by operation."""
    with parity.shared_traces():
        yield


@pytest.mark.parametrize(("fault", "case"), PLANTED)
def test_a_planted_mistake_is_caught_on_its_rung_and_named_at_its_module(fault, case):
    verdict = verdict_on(fault, case)
    assert not verdict.passed, f"{fault} went unnoticed:\n{verdict}"
    divergence = verdict.first_divergence
    assert divergence is not None
    assert [divergence.rung, divergence.path] == expected()[fault.name][case.name], str(verdict)


CONTROLS = [
    *(Fault(name="no mistake", cases=(name,)) for name in ALL),
    Fault(name="no mistake in a gradient", cases=(DECODER_ONLY,), backward=True),
    *(LossFault(name="the right loss", cases=(name,), loss=right_loss) for name in ALL),
    OptimizerFault(name="the right optimizer", optimizer=right_but()),
]


@pytest.mark.parametrize("control", CONTROLS, ids=str)
def test_the_same_climb_without_a_mistake_passes(control):
    for name in control.cases:
        verdict = verdict_on(control, CASES[name])
        assert verdict.passed, str(verdict)


@needs_torch
def test_the_same_climb_with_dropout_or_training_and_no_mistake_passes():
    assert verdict_on(Fault(name="no mistake", cases=(), dropout=True), CASES["torch_gpt"]).passed
    assert verdict_on(TrainingFault(name="no mistake", options={}), CASES[DECODER_ONLY]).passed


def test_every_mistake_has_a_name_of_its_own_and_a_place_in_the_matrix():
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names) >= 40
    assert {fault.name: set(fault.cases) for fault in FAULTS} == {name: set(row) for name, row in expected().items()}, (
        "run python -m parity_tests.faults --write, and read what it wrote"
    )
    assert not SOURCES.keys() - set(names), "a source of no mistake"


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_mistake_with_a_size_is_caught_down_to_a_size_and_no_further(dtype):
    assert "modules" in failed("scale of the scores", 0, dtype)
    assert "modules" in failed("scale of the scores", {"float64": -10, "float32": -4}[dtype], dtype)
    assert not failed("scale of the scores", -16, dtype)
