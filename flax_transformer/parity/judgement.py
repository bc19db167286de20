"""The rules of ``tolerances``, applied to one quantity."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from flax_transformer.parity import tolerances
from flax_transformer.parity.measures import Measures, measure, rms
from flax_transformer.parity.recording import is_floating


@dataclasses.dataclass(frozen=True)
class Sample:
    """One quantity of one run: the reference's, the candidate's in the reference's layout, and the float64 truth.

    Attributes:
        scale: what differences are relative to, where it is not the largest magnitude of the quantity itself.
        counted: elements that are judged, where not all are.
        others: the same quantity from further runs of the reference, whose spread is a yardstick for float32.
    """

    reference: np.ndarray
    candidate: np.ndarray
    truth: np.ndarray | None = None
    scale: float | None = None
    counted: np.ndarray | None = None
    others: tuple[np.ndarray, ...] = ()


@dataclasses.dataclass(frozen=True)
class Finding:
    """Whether a quantity holds, and why; ``verdict.Row`` says what the fields mean."""

    passed: bool
    detail: str
    measures: Measures | None = None
    allowed: float | None = None
    judged: float | None = None


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
    """The meaning rule without a truth, the arithmetic rule with one, for forward results. Shapes must be equal."""
    if not is_floating(samples[0].reference):
        return judge_equal(samples)
    return _judge(samples, tolerances.MEANING, equal_in_float32=True)


def judge_learned(samples: Sequence[Sample], *, part: float = tolerances.MEANING) -> Finding:
    """As ``judge_values``, without equality in float32, which a value that is zero by cancellation does not have.

    Args:
        part: what a difference may be of the scale, without a truth.
    """
    return _judge(samples, part, equal_in_float32=False)


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
        worst,
    )


def _judge(samples: Sequence[Sample], part: float, *, equal_in_float32: bool) -> Finding:
    for sample in samples:
        if misplaced := tolerances.misplaced(sample.reference, sample.candidate):
            detail = f"{misplaced} elements are NaN or infinite on one side only, or have another sign of infinity"
            return Finding(False, detail, measure(sample.reference, sample.candidate))
    if samples[0].truth is None:
        return _judge_meaning(samples[0], part, equal_in_float32=equal_in_float32)
    return _judge_arithmetic(samples)


def _judge_meaning(sample: Sample, part: float, *, equal_in_float32: bool) -> Finding:
    measures = measure(sample.reference, sample.candidate)
    scale = tolerances.scale(sample.reference) if sample.scale is None else sample.scale
    allowed = part * scale
    counted = measures if sample.counted is None else measure(*_counted(sample, sample.reference, sample.candidate))
    error = counted.max_abs
    if error > allowed:
        at = f" at {list(measures.where)}" if sample.counted is None else ""
        return Finding(False, f"differs by {error:.2g}{at}, allowed {allowed:.2g}", measures, allowed, error)
    noise = tolerances.STRADDLING * tolerances.UNIT_ROUNDOFF["float64"] * scale
    if equal_in_float32 and (misses := tolerances.float32_misses(sample.reference, sample.candidate, forgiven=noise)):
        detail = f"{misses} elements differ after rounding to float32 (the largest difference is {error:.2g})"
        return Finding(False, detail, measures, allowed, error)
    relative = error / scale if scale else 0.0
    return Finding(True, f"differs by {relative:.2g} of the scale", measures, allowed, error)


def _judge_arithmetic(samples: Sequence[Sample]) -> Finding:
    dtype = samples[0].reference.dtype.name
    if dtype not in tolerances.UNIT_ROUNDOFF:
        return Finding(False, f"is {dtype}, for which there is no rule")
    measures = measure(samples[0].reference, samples[0].candidate)
    with np.errstate(invalid="ignore"):  # inf - inf, which rms leaves out
        theirs = [_error(sample, sample.candidate) for sample in samples]
        # Of several runs of the reference the worst is the yardstick.
        ours = [max((_error(sample, run) for run in (sample.reference, *sample.others)), key=rms) for sample in samples]
    largest = [
        tolerances.scale(np.asarray(sample.truth)) if sample.scale is None else sample.scale for sample in samples
    ]
    for seed, (their, our, top) in enumerate(zip(theirs, ours, largest, strict=True)):
        allowed = tolerances.SINGLE.allowed(reference_error=rms(our), largest=top, dtype=dtype)
        if rms(their) > allowed:
            which = f" in case {seed}" if len(samples) > 1 else ""
            detail = f"rms error {rms(their):.2g}{which}, the reference's {rms(our):.2g}, allowed {allowed:.2g}"
            return Finding(False, detail, measures, allowed, rms(their))
    if len(samples) == 1:
        detail = f"rms error {rms(theirs[0]):.2g}, the reference's {rms(ours[0]):.2g}"
        return Finding(True, detail, measures, allowed, rms(theirs[0]))
    their, our = (rms(np.concatenate([error.ravel() for error in errors])) for errors in (theirs, ours))
    allowed = tolerances.POOLED.allowed(reference_error=our, largest=max(largest), dtype=dtype)
    detail = f"rms error over {len(samples)} cases {their:.2g}, the reference's {our:.2g}, allowed {allowed:.2g}"
    return Finding(their <= allowed, detail, measures, allowed, their)


def _error(sample: Sample, array: np.ndarray) -> np.ndarray:
    (array, truth) = _counted(sample, array, np.asarray(0 if sample.truth is None else sample.truth))
    return array.astype(np.float64) - truth


def _counted(sample: Sample, *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    return arrays if sample.counted is None else tuple(array[sample.counted] for array in arrays)
