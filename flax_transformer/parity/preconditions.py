"""What must hold before a comparison means anything: one error that names every offender."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from flax_transformer.parity.recording import Arrays, Recording


@dataclasses.dataclass(frozen=True)
class Case:
    """One run of the reference, the same run of the candidate, and for float32 the reference's run in float64."""

    reference: Recording
    candidate: Recording
    truth: Recording | None = None


def require_comparable(cases: Sequence[Case]) -> None:
    """Raise unless the recordings are of the same runs, in a dtype that has a rule.

    Raises:
        ValueError: different dtypes; float32 without a truth, or a truth of another run; different inputs; masks under
            different names; several cases of different models.
    """
    problems = []
    for number, case in enumerate(cases):
        prefix = f"case {number}: " if len(cases) > 1 else ""
        problems += [prefix + problem for problem in (*_dtype_problems(case), *_input_problems(case))]
        if case.truth is not None:
            problems += [prefix + problem for problem in _truth_problems(case.reference, case.truth)]
        for side, first, this in (
            ("reference", cases[0].reference, case.reference),
            ("candidate", cases[0].candidate, case.candidate),
        ):
            if _names(first) != _names(this):
                problems.append(f"{prefix}the {side} has other names or calls than in case 0")
    if problems:
        raise ValueError("the recordings cannot be compared: " + "; ".join(problems))


def paired_inputs(case: Case) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Inputs of both sides: by name where the names are the same, else in order (a tuple here, a mapping there)."""
    ours, theirs = case.reference.inputs, case.candidate.inputs
    by_name = ours.keys() == theirs.keys()
    for (name, array), in_order in zip(ours.items(), theirs.values(), strict=True):
        yield name, array, theirs[name] if by_name else in_order


def _dtype_problems(case: Case) -> Iterator[str]:
    ours, theirs = case.reference.dtype, case.candidate.dtype
    if ours != theirs:
        yield f"the reference is {ours} and the candidate {theirs}, record both in one dtype"
    elif ours == "float64" and case.truth is not None:
        yield "float64 recordings are compared with each other, without a truth"
    elif ours == "float32" and case.truth is None:
        yield 'float32 recordings need truth=, the reference recorded with dtype="float64" on the same inputs'
    elif ours not in ("float64", "float32"):
        yield f"there is no rule for {ours}, record in float64 or float32"


def _input_problems(case: Case) -> Iterator[str]:
    ours, theirs = case.reference, case.candidate
    if len(ours.inputs) != len(theirs.inputs):
        yield f"the reference has the inputs {list(ours.inputs)}, the candidate {list(theirs.inputs)}"
    else:
        for name, a, b in paired_inputs(case):
            # Unequal masks are a finding, not an error: a port may build them itself, and wrongly.
            if not is_mask(a, b) and not _same(a, b):
                yield f"input {name} differs"
    if ours.masks.keys() != theirs.masks.keys():
        yield f"the reference has the masks {sorted(ours.masks)}, the candidate {sorted(theirs.masks)}"


def _truth_problems(reference: Recording, truth: Recording) -> Iterator[str]:
    if truth.dtype != "float64":
        yield f"the truth is {truth.dtype}, it must be float64"
    for section in ("activations", "outputs"):
        if list(getattr(reference, section)) != list(getattr(truth, section)):
            yield f"the truth has other {section} than the reference"
    # The truth must be that of the rounded numbers: their rounding in the reference's error would hide the candidate's.
    for section in ("inputs", "parameters", "buffers"):
        ours: Arrays = getattr(reference, section)
        theirs: Arrays = getattr(truth, section)
        for name in ours.keys() | theirs.keys():
            if name not in ours or name not in theirs or not _same(ours[name], theirs[name]):
                yield f"{section}/{name} of the truth is not the reference's (round it to float32 before recording both)"


def is_mask(*arrays: np.ndarray) -> bool:
    """Whether any is boolean."""
    return any(array.dtype == bool for array in arrays)


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and bool(np.all((a == b) | ((a != a) & (b != b))))


def _names(recording: Recording) -> list[list[str]]:
    mappings = (recording.tensor_names, recording.module_names, recording.activations, recording.outputs)
    return [list(mapping) for mapping in (*mappings, recording.inputs, recording.masks)]
