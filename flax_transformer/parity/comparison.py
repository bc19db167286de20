"""The ladder: two recordings in, a verdict out."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from flax_transformer.parity.learning import Learning
from flax_transformer.parity.matching import Rules, match_modules, match_tensors, require_fitting, require_known
from flax_transformer.parity.preconditions import Case, require_comparable
from flax_transformer.parity.recording import Recording
from flax_transformer.parity.rungs import Ladder
from flax_transformer.parity.tolerances import MEANING, POOLED, POOLED_SEEDS, SINGLE
from flax_transformer.parity.verdict import Row, Rung, RungName, Verdict

RULES = {
    "float64": f"float64, at most {MEANING:g} of the scale and equal in float32",
    "float32": f"float32, rms error at most {SINGLE.factor:g} x the reference's",
    "pooled": f"float32, rms error over all cases at most {POOLED.factor:g} x the reference's",
}

FORWARD: dict[RungName, Callable[[Ladder], Iterable[Row]]] = {
    "keys": Ladder.keys,
    "shapes": Ladder.shapes,
    "masks": Ladder.masks,
    "buffers": Ladder.buffers,
    "modules": Ladder.outputs_of_modules,
    "output": Ladder.output,
}
LEARNING: dict[RungName, Callable[[Learning], Iterable[Row]]] = {
    "loss": Learning.loss,
    "backward": Learning.backward,
    "gradients": Learning.gradients,
    "updates": Learning.updates,
    "training": Learning.training,
    "decoding": Learning.decoding,
}


def compare(
    reference: Recording,
    candidate: Recording,
    rules: Rules | None = None,
    *,
    truth: Recording | None = None,
    envelope: Sequence[Recording] = (),
) -> Verdict:
    """Climb the ladder: keys, shapes, masks, buffers, every submodule's output, the final output; and as far as they were
    recorded the loss, every gradient, the first update, the training run, the decoded tokens.

    float64 recordings are held to the meaning rule, float32 recordings to the arithmetic rule against ``truth``, the
    reference's float64 recording (``tolerances``).

    Args:
        rules: how the candidate names things. Without rules names match by equality, by Flax's conventions
            (``kernel`` for ``weight``, transposed), and what is left by value, shape and order; the verdict lists how.
            With rules nothing is guessed.
        envelope: further float32 recordings of the reference that only sum in another order (other threads, a permuted
            batch): of all its runs the one that is farthest from the truth is the yardstick of a training run.
    Raises:
        ValueError: the recordings cannot be compared, the rules name what is not there, or nothing was compared; every
            offender is named.
    """
    return _climb([Case(reference, candidate, truth, tuple(envelope))], rules)


def compare_pooled(
    references: Sequence[Recording],
    candidates: Sequence[Recording],
    rules: Rules | None = None,
    *,
    truths: Sequence[Recording],
) -> Verdict:
    """``compare`` for float32 recordings of one model under many seeds, which allows the sharper pooled rule.

    Raises:
        ValueError: as ``compare``, or fewer than ``POOLED_SEEDS`` cases, or not as many of each.
    """
    counts = (len(references), len(candidates), len(truths))
    if min(counts) < POOLED_SEEDS or len(set(counts)) != 1:
        raise ValueError(
            f"pooling needs at least {POOLED_SEEDS} references and as many candidates and truths, got {counts}; "
            "compare fewer one by one"
        )
    return _climb([Case(*case) for case in zip(references, candidates, truths, strict=True)], rules)


def _climb(cases: Sequence[Case], rules: Rules | None) -> Verdict:
    require_comparable(cases)
    reference, candidate = cases[0].reference, cases[0].candidate
    if rules is not None:
        require_known(rules, reference, candidate)
    tensors = match_tensors(reference, candidate, rules)
    modules = match_modules(reference, candidate, rules, tensors)
    if rules is not None:
        require_fitting(tensors, modules, candidate)
    ladder = Ladder(cases, rules or Rules(), tensors, modules)
    learning = Learning(ladder)
    rows: dict[RungName, tuple[Row, ...]] = {name: tuple(climb(ladder)) for name, climb in FORWARD.items()}
    rows |= {name: tuple(climb(learning)) for name, climb in LEARNING.items()}
    verdict = Verdict(
        rule=RULES["pooled" if len(cases) > 1 else reference.dtype],
        rungs=tuple(Rung(name, found) for name, found in rows.items() if found),
        matches=(*tensors, *modules),
        unmatched=tuple(ladder.unmatched()),
        structural_zeros=learning.structural_zeros,
        curves=_curves(cases[0]),
        provenance={"reference": reference.provenance, "candidate": candidate.provenance},
    )
    numbers = sum(int(np.isfinite(array).sum()) for array in reference.outputs.values())
    if verdict.passed and not (rows["modules"] and numbers):
        raise ValueError(
            f"nothing was compared, which is never a pass: {len(rows['modules'])} outputs of modules and {numbers} finite "
            "numbers in the final output; record a call of the model itself"
        )
    return verdict


def _curves(case: Case) -> dict[str, np.ndarray]:
    """The losses of every run of a case, for pictures."""
    runs = {"reference": case.reference, "candidate": case.candidate, "truth (float64)": case.truth}
    runs |= {f"reference again ({number})": run for number, run in enumerate(case.envelope, start=1)}
    return {name: run.losses["loss"] for name, run in runs.items() if run is not None and run.losses}
