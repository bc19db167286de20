"""The ladder, climbed by a model with a mistake."""

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from flax_transformer import parity
from flax_transformer.config import Dtype
from flax_transformer.dropout import ReplayedDropout
from flax_transformer.parity.matching import by_any_name
from parity_tests.cases import Case, all_cases, load_reference, model_loss, reference_loss, rules_for
from parity_tests.faults import AnyFault, Fault, LossFault, OptimizerFault, TrainingFault
from parity_tests.faults.forward import FORWARD
from parity_tests.faults.learning import LOSSES, OPTIMIZERS, TRAINING
from parity_tests.ladder import candidate, forward_only
from parity_tests.recipes import RECIPE
from parity_tests.references import later_batches, module_and_inputs, reference

CASES = {case.name: case for case in all_cases()}
FAULTS: tuple[AnyFault, ...] = (*FORWARD, *LOSSES, *OPTIMIZERS, *TRAINING)
MATRIX = Path(__file__).with_name("kill_matrix.json")
STEPS = 20


def expected() -> dict[str, dict[str, list[str]]]:
    """Fault -> case -> rung and module."""
    return json.loads(MATRIX.read_text(encoding="utf-8"))


def verdict_on(fault: AnyFault, case: Case, dtype: Dtype = "float64") -> parity.Verdict:
    """What the ladder says of the mistake; in float32 of models and optimizers only."""
    match fault:
        case Fault(dropout=True):
            return _with_dropout(fault, case)
        case Fault():
            return _forward(fault, case, dtype)
        case LossFault():
            return _loss(fault, case)
        case OptimizerFault():
            return _update(fault, case, dtype)
        case TrainingFault():
            return _training(fault, case)


def _without_updates(recording: parity.Recording) -> parity.Recording:
    return dataclasses.replace(recording, updates={}, moments={})


def _record(fault: Fault, case: Case, recorded: parity.Recording, **options: Any) -> tuple[parity.Recording, Any]:
    dtype: Dtype = "float64" if recorded.dtype == "float64" else "float32"
    with jax.enable_x64(dtype == "float64"), fault.patch():
        model = case.model(fault.config(case.config(dtype)))
        load_reference(case, model, recorded)
        fault.model(model)
        masks = fault.masks(dict(case.model_masks(recorded.inputs)))
        found = parity.record_flax(model, dict(recorded.inputs), dtype=dtype, masks=masks, **options)
        return found, _what_exists(rules_for(case, model), found)


def _what_exists(rules: parity.Rules, found: parity.Recording) -> parity.Rules:
    """The rules without those for a parameter that the mistake left out, which the rung of keys then misses."""
    names = by_any_name(found.tensor_names)

    def exists(target: Any) -> bool:
        return all(name in names for name in ((target,) if isinstance(target, str) else target or ()))

    kept = {name: target for name, target in rules.parameters.items() if exists(target)}
    return dataclasses.replace(rules, parameters=kept)


def _forward(fault: Fault, case: Case, dtype: Dtype) -> parity.Verdict:
    wanted = _without_updates if fault.backward else forward_only
    recorded = reference(case, dtype, 0)
    options = {"loss": model_loss(case)} if fault.backward else {}
    found, rules = _record(fault, case, recorded, call=fault.call(case.call_model), **options)
    return parity.compare(wanted(recorded), found, rules, truth=_truth(case, dtype, wanted))


def _truth(case: Case, dtype: Dtype, wanted: Callable[[parity.Recording], parity.Recording]) -> parity.Recording | None:
    return None if dtype == "float64" else wanted(reference(case, "float64", 0))


@functools.lru_cache
def _dropping(case: Case) -> parity.Recording:
    import torch

    module, inputs = module_and_inputs(case, 0)
    torch.manual_seed(0)
    return parity.record_torch(module, inputs, mode="train", call=case.call_reference, masks={})


def _with_dropout(fault: Fault, case: Case) -> parity.Verdict:
    recorded = _dropping(case)

    def call(model, **inputs):
        return case.call_model(model, dropout=ReplayedDropout(recorded.dropout.values()), **inputs)

    found, rules = _record(fault, case, recorded, call=call)
    return parity.compare(recorded, dataclasses.replace(found, masks={}), rules)


@functools.lru_cache
def _right(case: Case, dtype: Dtype) -> tuple[parity.Recording, Any]:
    with jax.enable_x64(dtype == "float64"):
        rules = rules_for(case, case.model(case.config(dtype)))
    return candidate(case, dtype, 0, "jit"), rules


def _loss(fault: LossFault, case: Case) -> parity.Verdict:
    found, rules = _right(case, "float64")
    value = fault.loss(case, found.outputs["/logits"], found.inputs["labels"])
    wrong = dataclasses.replace(found, losses={"loss": np.asarray([value])})
    return parity.compare(reference(case, "float64", 0), wrong, rules)


def _update(fault: OptimizerFault, case: Case, dtype: Dtype) -> parity.Verdict:
    found, rules = _right(case, dtype)
    with jax.enable_x64(dtype == "float64"):
        parameters, gradients = (
            {name: jnp.asarray(array) for name, array in section.items()}
            for section in (found.parameters, found.gradients)
        )
        state: Any = fault.optimizer.init(parameters)
        updates, state = cast(Any, fault.optimizer.update(gradients, state, parameters))
        moments = {
            f"{kind}/{name}": np.asarray(array)
            for kind, field in (("first", "mu"), ("second", "nu"))
            for name, array in cast(dict[str, Any], optax.tree.get(state, field)).items()
        }
        wrong = dataclasses.replace(
            found, updates={name: np.asarray(update) for name, update in updates.items()}, moments=moments
        )
    truth = _truth(case, dtype, lambda recording: recording)
    return parity.compare(reference(case, dtype, 0), wrong, rules, truth=truth)


@functools.lru_cache
def _trained_reference(case: Case) -> parity.Recording:
    module, inputs = module_and_inputs(case, 0)
    return parity.record_torch(
        module,
        inputs,
        call=case.call_reference,
        loss=reference_loss(case),
        optimizer=RECIPE.optimizer,
        schedule=RECIPE.schedule,
        max_norm=RECIPE.max_norm,
        steps=STEPS,
        batches=later_batches(case),
    )


def _training(fault: TrainingFault, case: Case) -> parity.Verdict:
    recorded = _trained_reference(case)
    right = {"optimizer": RECIPE.transformation, "batches": later_batches(case)}
    with jax.enable_x64(True):
        model = case.model(case.config("float64"))
        load_reference(case, model, recorded)
        found = parity.record_flax(
            model,
            dict(recorded.inputs),
            execution="jit",
            call=case.call_model,
            loss=model_loss(case),
            steps=STEPS,
            **{**right, **fault.options},
        )
        # A run on other batches says so in its recording, and would be refused; here it keeps that to itself.
        found = dataclasses.replace(found, batches=recorded.batches)
        return parity.compare(recorded, found, rules_for(case, model))
