"""One climb of the ladder for a case, shared by the test modules of all rungs."""

import functools
from typing import Literal

import jax
import pytest

from flax_transformer import parity
from flax_transformer.config import Dtype
from parity_tests.cases import Case, all_cases, load_reference, rules_for
from parity_tests.references import reference

Execution = Literal["eager", "jit"]
POOLED_SEEDS = range(16)

CLIMBS = [
    pytest.param(
        case,
        dtype,
        execution,
        id=f"{case}-{dtype}-{execution}",
        # One worker climbs a case, and every rung then looks at what it found.
        marks=[pytest.mark.xdist_group(case.name), *[pytest.mark.document_size] * large],
    )
    for case in all_cases()
    for large in [case.size == "document"]
    for dtype in ("float64", "float32")
    # Operation by operation as well as compiled as a whole; at the documents' own sizes compiled only, to save minutes.
    for execution in (("jit",) if large else ("eager", "jit"))
]


def candidate(case: Case, dtype: Dtype, seed: int, execution: Execution) -> parity.Recording:
    """The recording of our model with the reference's weights and inputs."""
    recorded = reference(case, dtype, seed)
    with jax.enable_x64(dtype == "float64"):
        model = case.model(case.config(dtype))
        load_reference(model, recorded)
        masks = case.model_masks(recorded.inputs)
        return parity.record_flax(
            model, recorded.inputs, dtype=dtype, execution=execution, call=case.call_model, masks=masks
        )


@functools.lru_cache(maxsize=32)
def verdict(case: Case, dtype: Dtype, execution: Execution) -> parity.Verdict:
    """What a climb found: one seed in float64; in float32 16 seeds pooled for small cases, one for large ones."""
    with jax.enable_x64(dtype == "float64"):
        rules = rules_for(case.model(case.config(dtype)))
    if dtype == "float64":
        return parity.compare(reference(case, dtype, 0), candidate(case, dtype, 0, execution), rules)
    seeds = POOLED_SEEDS if case.size == "small" else [0]
    references = [reference(case, dtype, seed) for seed in seeds]
    truths = [reference(case, "float64", seed) for seed in seeds]
    candidates = [candidate(case, dtype, seed, execution) for seed in seeds]
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
