"""One climb of the ladder for a case, shared by the test modules of all rungs."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import pytest

from flax_transformer import parity
from flax_transformer.config import Dtype
from parity_tests.cases import Case, all_cases, load_reference, model_loss, rules_for
from parity_tests.recipes import RECIPE
from parity_tests.references import reference

# Rungs of learning are climbed by compiled programs only.
Execution = Literal["eager", "jit"]
POOLED_SEEDS = range(16)


def climbs(
    *, of: Callable[[Case], bool] = lambda case: True, executions: Sequence[Execution] = ("eager", "jit")
) -> list[Any]:
    """Parameters (case, dtype, execution) of the tests of a rung, for the cases wanted."""
    return [
        pytest.param(
            case,
            dtype,
            execution,
            id=f"{case}-{dtype}-{execution}",
            # One worker climbs a case, and every rung then looks at what it found.
            marks=[pytest.mark.xdist_group(case.name), *[pytest.mark.document_size] * (case.size == "document")],
        )
        for case in all_cases()
        if of(case)
        for dtype in ("float64", "float32")
        for execution in executions
        # Operation by operation as well as compiled as a whole; at the documents' own sizes compiled only, to save minutes.
        if execution == "jit" or case.size == "small"
    ]


CLIMBS = climbs()
LEARNING_CLIMBS = climbs(executions=["jit"])
# An update looks at each element by itself, so that sizes tell nothing new, and a vocabulary of 200k costs minutes.
UPDATE_CLIMBS = climbs(of=lambda case: case.size == "small", executions=["jit"])


def candidate(case: Case, dtype: Dtype, seed: int, execution: Execution) -> parity.Recording:
    """The recording of our model with the reference's weights and inputs; operation by operation it does not learn."""
    recorded = reference(case, dtype, seed)
    learning: dict[str, Any] = {"loss": model_loss(case)}
    if case.size == "small":
        learning["optimizer"] = RECIPE.transformation
    with jax.enable_x64(dtype == "float64"):
        model = case.model(case.config(dtype))
        load_reference(case, model, recorded)
        return parity.record_flax(
            model,
            recorded.inputs,
            dtype=dtype,
            execution=execution,
            call=case.call_model,
            masks=case.model_masks(recorded.inputs),
            **(learning if execution == "jit" else {}),
        )


def without(recording: parity.Recording, *sections: str) -> parity.Recording:
    """The recording without some of its sections."""
    return dataclasses.replace(recording, **{section: {} for section in sections})


def forward_only(recording: parity.Recording) -> parity.Recording:
    """The recording without what was learned."""
    return without(recording, "losses", "gradients", "activation_gradients", "updates", "moments")


@functools.lru_cache(maxsize=32)
def verdict(case: Case, dtype: Dtype, execution: Execution) -> parity.Verdict:
    """What a climb found: one seed in float64; in float32 16 seeds pooled for small cases, one for large ones."""
    with jax.enable_x64(dtype == "float64"):
        rules = rules_for(case, case.model(case.config(dtype)))
    wanted = forward_only if execution == "eager" else lambda recording: recording
    seeds = POOLED_SEEDS if case.size == "small" and dtype == "float32" else [0]
    with parity.shared_traces():
        candidates = [candidate(case, dtype, seed, execution) for seed in seeds]
    references = [wanted(reference(case, dtype, seed)) for seed in seeds]
    if dtype == "float64":
        return parity.compare(references[0], candidates[0], rules)
    truths = [wanted(reference(case, "float64", seed)) for seed in seeds]
    if len(references) > 1:
        return parity.compare_pooled(references, candidates, rules, truths=truths)
    return parity.compare(references[0], candidates[0], rules, truth=truths[0])


def require(case: Case, dtype: Dtype, execution: Execution, name: str) -> parity.Rung:
    """One rung of a climb, which must hold; a rung with nothing on it is a failure, never a pass."""
    climbed = verdict(case, dtype, execution)
    found = [rung for rung in climbed.rungs if rung.name == name]
    assert found, f"nothing was compared on rung {name}:\n{climbed}"
    assert found[0].passed, climbed
    return found[0]
