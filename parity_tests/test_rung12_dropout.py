"""Rung 12: dropout on. Masks that one framework drew are replayed in the other: forward, loss and gradients."""

import functools

import jax
import numpy as np
import pytest

from flax_transformer import parity
from flax_transformer.dropout import RandomDropout, RecordedDropout, ReplayedDropout
from parity_tests.cases import all_cases, load_reference, model_loss, reference_loss, rules_for
from parity_tests.references import module_and_inputs, needs_torch

pytestmark = needs_torch

DROPPING = [
    pytest.param(case, marks=pytest.mark.xdist_group(case.name), id=str(case))
    for case in all_cases()
    if case.drops and case.size == "small"
]
SEED = 4


def record_reference(case, **options) -> parity.Recording:
    import torch

    module, inputs = module_and_inputs(case, SEED)
    torch.manual_seed(SEED)
    return parity.record_torch(
        module, inputs, mode="train", call=case.call_reference, loss=reference_loss(case), **options
    )


def record_model(case, reference: parity.Recording, masks) -> parity.Recording:
    def call(model, **inputs):
        return case.call_model(model, dropout=ReplayedDropout(masks), **inputs)

    with jax.enable_x64(True):
        model = case.model(case.config("float64"))
        load_reference(case, model, reference)
        return parity.record_flax(model, dict(reference.inputs), execution="jit", call=call, loss=model_loss(case))


def rules(case):
    with jax.enable_x64(True):
        return rules_for(case, case.model(case.config("float64")))


@functools.lru_cache
def drawn_by_pytorch(case) -> parity.Recording:
    return record_reference(case)


def require_all(verdict: parity.Verdict) -> None:
    assert verdict.passed, str(verdict)
    assert {"modules", "output", "loss", "backward", "gradients"} <= {rung.name for rung in verdict.rungs}


@pytest.mark.parametrize("case", DROPPING)
def test_masks_drawn_by_pytorch_replayed_in_flax_give_the_same_outputs_and_gradients(case):
    reference = drawn_by_pytorch(case)
    kept = np.mean([mask.mean() for mask in reference.dropout.values()])
    assert 0.8 < kept < 0.97, "a tenth is dropped"
    require_all(parity.compare(reference, record_model(case, reference, reference.dropout.values()), rules(case)))


@pytest.mark.parametrize("case", DROPPING)
def test_masks_drawn_by_flax_replayed_in_pytorch_give_the_same_outputs_and_gradients(case):
    reference = drawn_by_pytorch(case)
    with jax.enable_x64(True):
        model = case.model(case.config("float64"))
        load_reference(case, model, reference)
        batch = len(next(iter(reference.inputs.values())))
        source = RecordedDropout(RandomDropout(jax.random.split(jax.random.key(SEED), batch)))
        case.call_model(model, dropout=source, **reference.inputs)
    masks = [np.asarray(mask) for mask in source.masks]
    assert len(masks) == len(reference.dropout)
    again = record_reference(case, dropout=masks)
    assert not np.array_equal(again.outputs["/logits"], reference.outputs["/logits"]), "other masks"
    require_all(parity.compare(again, record_model(case, again, masks), rules(case)))


@pytest.mark.parametrize("case", DROPPING[:1])
def test_masks_of_two_sites_of_one_shape_swapped_are_told(case):
    reference = drawn_by_pytorch(case)
    masks = list(reference.dropout.values())
    same = next((a, b) for a in range(len(masks)) for b in range(a) if masks[a].shape == masks[b].shape)
    masks[same[0]], masks[same[1]] = masks[same[1]], masks[same[0]]
    verdict = parity.compare(reference, record_model(case, reference, masks), rules(case))
    assert not verdict.passed


@pytest.mark.parametrize("case", DROPPING[:1])
def test_masks_of_another_batch_are_refused(case):
    reference = drawn_by_pytorch(case)
    with pytest.raises(ValueError, match="dropout site 0 needs a mask of shape"):
        record_model(case, reference, [mask[1:] for mask in reference.dropout.values()])
