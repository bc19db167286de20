"""The rules of ``tolerances``, applied to one quantity."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from flax_transformer.parity import tolerances
from flax_transformer.parity.measures import Measures, measure, rms
from flax_transformer.parity.recording import is_floating


@dataclasses.dataclass(frozen=True)
class Sample:
    """One quantity of one run: the reference's, the candidate's in the reference's layout, and the float64 truth."""

    reference: np.ndarray
    candidate: np.ndarray
    truth: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Finding:
    """Whether a quantity holds, and why; ``verdict.Row`` says what the fields mean."""

    passed: bool
    detail: str
    measures: Measures | None = None
    allowed: float | None = None


def judge_layout(samples: Sequence[Sample]) -> Finding:
    """Equal shapes; equal floating-point types, and otherwise equal kinds, since int32 and int64 ids are the same ids."""
    for sample in samples:
        a, b = sample.reference, sample.candidate
        if a.shape != b.shape:
            return Finding(False, f"has shape {b.shape}, the reference {a.shape}")
        same_kind = a.dtype.kind == b.dtype.kind and not is_floating(a)
        if a.dtype != b.dtype and not same_kind:
            return Finding(False, f"is {b.dtype}, the reference {a.dtype}")
    return Finding(True, f"{samples[0].reference.dtype} {samples[0].reference.shape}")


def judge_equal(samples: Sequence[Sample]) -> Finding:
    """Equal values, for what is copied or boolean. NaN equals NaN."""
    for sample in samples:
        a, b = sample.reference, sample.candidate
        if a.shape != b.shape:
            return Finding(False, f"has shape {b.shape}, the reference {a.shape}")
        if different := int(np.sum((a != b) & ~((a != a) & (b != b)))):
            return Finding(False, f"{different} of {a.size} elements differ", measure(a, b))
    return Finding(True, "equal")


def judge_values(samples: Sequence[Sample]) -> Finding:
    """The meaning rule without a truth, the arithmetic rule with one. Shapes must be equal."""
    if not is_floating(samples[0].reference):
        return judge_equal(samples)
    for sample in samples:
        if misplaced := tolerances.misplaced(sample.reference, sample.candidate):
            detail = f"{misplaced} elements are NaN or infinite on one side only, or have another sign of infinity"
            return Finding(False, detail, measure(sample.reference, sample.candidate))
    if samples[0].truth is None:
        return _judge_meaning(samples[0])
    return _judge_arithmetic(samples)


def judge_position_table(reference: np.ndarray, candidate: np.ndarray, *, frequencies: np.ndarray) -> Finding:
    """Freshly built sinusoidal tables of two frameworks, against ``tolerances.position_table_allowed``.

    Args:
        reference, candidate: (length, D), sines in the even columns and cosines in the odd ones, of one dtype.
        frequencies: (D / 2,), what the positions are multiplied by, in that dtype.
    """
    layout = judge_layout([Sample(reference, candidate)])
    if not layout.passed:
        return layout
    allowed = tolerances.position_table_allowed(len(reference), frequencies)
    ratio = np.abs(reference.astype(np.float64) - candidate) / np.repeat(allowed, 2, axis=1)
    worst = float(ratio.max(initial=0.0))
    return Finding(
        worst <= 1,  # a NaN anywhere is no table, and fails here
        f"differs by up to {worst:.2g} of position * ulp(frequency) and its rounding",
        measure(reference, candidate),
        1.0,
    )


def _judge_meaning(sample: Sample) -> Finding:
    measures = measure(sample.reference, sample.candidate)
    scale = tolerances.scale(sample.reference)
    allowed = tolerances.MEANING * scale
    noise = tolerances.STRADDLING * tolerances.UNIT_ROUNDOFF["float64"] * scale
    misses = tolerances.float32_misses(sample.reference, sample.candidate, forgiven=noise)
    if measures.max_abs > allowed:
        detail = f"differs by {measures.max_abs:.2g} at {list(measures.where)}, allowed {allowed:.2g}"
    elif misses:
        detail = (
            f"{misses} elements differ after rounding to float32 (the largest difference is {measures.max_abs:.2g})"
        )
    else:
        return Finding(True, f"differs by {measures.relative:.2g} of the scale", measures, allowed)
    return Finding(False, detail, measures, allowed)


def _judge_arithmetic(samples: Sequence[Sample]) -> Finding:
    dtype = samples[0].reference.dtype.name
    if dtype not in tolerances.UNIT_ROUNDOFF:
        return Finding(False, f"is {dtype}, for which there is no rule")
    measures = measure(samples[0].reference, samples[0].candidate)
    with np.errstate(invalid="ignore"):  # inf - inf, which rms leaves out
        theirs = [_error(sample.candidate, sample.truth) for sample in samples]
        ours = [_error(sample.reference, sample.truth) for sample in samples]
    largest = [tolerances.scale(sample.truth) for sample in samples if sample.truth is not None]
    for seed, (their, our, top) in enumerate(zip(theirs, ours, largest, strict=True)):
        allowed = tolerances.SINGLE.allowed(reference_error=rms(our), largest=top, dtype=dtype)
        if rms(their) > allowed:
            which = f" in case {seed}" if len(samples) > 1 else ""
            detail = f"rms error {rms(their):.2g}{which}, the reference's {rms(our):.2g}, allowed {allowed:.2g}"
            return Finding(False, detail, measures, allowed)
    if len(samples) == 1:
        return Finding(True, f"rms error {rms(theirs[0]):.2g}, the reference's {rms(ours[0]):.2g}", measures, allowed)
    their, our = (rms(np.concatenate([error.ravel() for error in errors])) for errors in (theirs, ours))
    allowed = tolerances.POOLED.allowed(reference_error=our, largest=max(largest), dtype=dtype)
    detail = f"rms error over {len(samples)} cases {their:.2g}, the reference's {our:.2g}, allowed {allowed:.2g}"
    return Finding(their <= allowed, detail, measures, allowed)


def _error(array: np.ndarray, truth: np.ndarray | None) -> np.ndarray:
    return array.astype(np.float64) - (0 if truth is None else truth)
