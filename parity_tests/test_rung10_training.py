"""Rung 10: 200 steps from the same weights on the same batches: all losses, and where every parameter ends."""

import jax
import numpy as np
import pytest

from flax_transformer import parity
from flax_transformer.config import Dtype
from parity_tests.cases import Case, all_cases, load_reference, model_loss, reference_loss, rules_for
from parity_tests.recipes import GENTLE, RECIPES, STEPS, Recipe
from parity_tests.references import later_batches, module_and_inputs, needs_torch

SMALL = [case for case in all_cases() if case.size == "small"]
# Every recipe on the quickest case, the one with everything in it on all.
RUNS = [
    pytest.param(case, recipe, marks=pytest.mark.xdist_group(case.name), id=f"{case}-{recipe}")
    for case in SMALL
    for recipe in (RECIPES if case.name == "decoder_only_odd" else [GENTLE])
]
DOCUMENTS = [
    pytest.param(case, marks=pytest.mark.xdist_group(case.name), id=str(case))
    for case in SMALL
    if case.name in ("decoder_only_odd", "encoder_decoder_odd")
]
SEED = 0


def permuted(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same examples in another order: the same mean, summed otherwise."""
    return {name: np.roll(array, 1, axis=0) for name, array in batch.items()}


def train_reference(case: Case, recipe: Recipe, dtype: Dtype, *, order=lambda batch: batch) -> parity.Recording:
    module, inputs = module_and_inputs(case, SEED)
    return parity.record_torch(
        module,
        order(inputs),
        dtype=dtype,
        call=case.call_reference,
        loss=reference_loss(case),
        optimizer=recipe.optimizer,
        schedule=recipe.schedule,
        max_norm=recipe.max_norm,
        steps=STEPS,
        batches=[order(batch) for batch in later_batches(case)],
    )


def train_model(case: Case, recipe: Recipe, reference: parity.Recording) -> parity.Recording:
    dtype: Dtype = "float64" if reference.dtype == "float64" else "float32"
    with jax.enable_x64(dtype == "float64"):
        model = case.model(case.config(dtype))
        load_reference(case, model, reference)
        return parity.record_flax(
            model,
            dict(reference.inputs),
            dtype=dtype,
            execution="jit",
            call=case.call_model,
            loss=model_loss(case),
            optimizer=recipe.transformation,
            steps=STEPS,
            batches=later_batches(case),
        )


def require_training(verdict: parity.Verdict, *, at_least: float) -> None:
    assert verdict.passed, str(verdict)
    assert [rung.name for rung in verdict.rungs][-1] == "training"
    losses = verdict.curves["reference"]
    assert len(losses) == STEPS
    assert losses[0] - losses[-4:].mean() > at_least, "a run that learns nothing proves little"


@pytest.fixture(scope="module")
def traces():
    """The recipes of a case share a trace: they differ in the optimizer alone."""
    with parity.shared_traces():
        yield


@needs_torch
@pytest.mark.usefixtures("traces")
@pytest.mark.parametrize(("case", "recipe"), RUNS)
def test_200_steps_leave_the_same_losses_and_weights(case, recipe):
    with jax.enable_x64(True):
        rules = rules_for(case, case.model(case.config("float64")))
    reference = train_reference(case, recipe, "float64")
    verdict = parity.compare(reference, train_model(case, recipe, reference), rules)
    require_training(verdict, at_least=0.02)


@needs_torch
@pytest.mark.parametrize("case", DOCUMENTS)
def test_200_steps_in_float32_stay_within_the_spread_of_pytorch_against_itself(case):
    import torch

    rules = rules_for(case, case.model(case.config("float32")))
    truth = train_reference(case, GENTLE, "float64")
    reference = train_reference(case, GENTLE, "float32")
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if threads > 1 else 2)
    try:
        envelope = [train_reference(case, GENTLE, "float32")]
    finally:
        torch.set_num_threads(threads)
    envelope.append(train_reference(case, GENTLE, "float32", order=permuted))
    candidate = train_model(case, GENTLE, reference)
    require_training(parity.compare(reference, candidate, rules, truth=truth, envelope=envelope), at_least=0.02)
