"""What must hold before a comparison means anything: one error that names every offender."""

import dataclasses
import re
from collections.abc import Iterator, Sequence

import numpy as np

from flax_transformer.parity.recording import Arrays, Recording, split_activation_key


@dataclasses.dataclass(frozen=True)
class Case:
    """One run of the reference, the same run of the candidate, and for float32 the reference's run in float64, and
    perhaps further runs of the reference that sum in another order."""

    reference: Recording
    candidate: Recording
    truth: Recording | None = None
    envelope: tuple[Recording, ...] = ()


def require_comparable(cases: Sequence[Case]) -> None:
    """Raise unless the recordings are of the same runs, in a dtype that has a rule.

    Raises:
        ValueError: a recording that contradicts itself; different dtypes; float32 without a truth, or a truth of another
            run; different inputs; masks under different names; several cases of different models.
    """
    runs = {"reference": cases[0].reference, "candidate": cases[0].candidate}
    problems = [f"the {side} {found}" for side, run in runs.items() for found in _contradictions(run)]
    if problems:
        raise ValueError("the recordings contradict themselves: " + "; ".join(problems))
    for number, case in enumerate(cases):
        prefix = f"case {number}: " if len(cases) > 1 else ""
        found = (*_dtype_problems(case), *_input_problems(case), *_learning_problems(case))
        problems += [prefix + problem for problem in found]
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


# What one side recorded and the other not would silently not be compared.
LEARNED = {"losses": "loss=", "updates": "optimizer=", "trained": "steps=", "decoded": "decode="}


def _learning_problems(case: Case) -> Iterator[str]:
    ours, theirs = case.reference, case.candidate
    for section, argument in LEARNED.items():
        has = bool(getattr(ours, section)), bool(getattr(theirs, section))
        if has[0] != has[1]:
            side = "reference" if has[0] else "candidate"
            yield f"only the {side} has {section}, record both with {argument}"
    steps = [len(run.losses["loss"]) for run in (ours, theirs) if run.losses]
    if len(set(steps)) > 1:
        yield f"the reference took {steps[0]} steps and the candidate {steps[1]}"
    if len(ours.batches) != len(theirs.batches):
        yield f"the reference has {len(ours.batches)} arrays of further batches, the candidate {len(theirs.batches)}"
    else:
        # The names of inputs may differ, so the order counts; both sides list batch after batch.
        pairs = zip(ours.batches.items(), theirs.batches.values(), strict=True)
        yield from (f"batch {name} differs" for (name, a), b in pairs if not _same(a, b))
    if ours.decoded.keys() != theirs.decoded.keys():
        yield f"the reference decoded {list(ours.decoded)}, the candidate {list(theirs.decoded)}"
    kinds = [{name.partition("/")[0] for name in run.moments} for run in (ours, theirs)]
    if kinds[0] != kinds[1] and ours.updates and theirs.updates:
        yield f"the reference's optimizer has the moments {sorted(kinds[0])}, the candidate's {sorted(kinds[1])}"
    if ours.dropout and theirs.dropout:
        masks = list(ours.dropout.values()), list(theirs.dropout.values())
        if len(masks[0]) != len(masks[1]) or not all(_same(a, b) for a, b in zip(*masks, strict=True)):
            yield "dropout kept other elements; record the candidate with dropout=, the reference's masks"
    for run in case.envelope:
        if _names(run) != _names(ours) or run.dtype != ours.dtype or len(run.trained) != len(ours.trained):
            yield "a recording of the envelope is of another run than the reference"


def _truth_problems(reference: Recording, truth: Recording) -> Iterator[str]:
    if truth.dtype != "float64":
        yield f"the truth is {truth.dtype}, it must be float64"
    for section in ("activations", "outputs", "gradients", "updates", "moments", "trained"):
        if list(getattr(reference, section)) != list(getattr(truth, section)):
            yield f"the truth has other {section} than the reference"
    # The truth must be that of the rounded numbers: their rounding in the reference's error would hide the candidate's.
    for section in ("inputs", "parameters", "buffers"):
        ours: Arrays = getattr(reference, section)
        theirs: Arrays = getattr(truth, section)
        for name in ours.keys() | theirs.keys():
            if name not in ours or name not in theirs or not _same(ours[name], theirs[name]):
                yield f"{section}/{name} of the truth is not the reference's (round it to float32 before recording both)"


def _contradictions(run: Recording) -> Iterator[str]:
    """Names in one part of a recording that another part must have: a foreign program may write anything."""
    modules = {alias for aliases in run.module_names.values() for alias in aliases}
    if run.tensors and "" not in modules:
        yield "has tensors and no module that holds them"
    if strangers := run.tensors.keys() ^ run.tensor_names.keys():
        yield f"names other tensors than it holds: {sorted(strangers)}"
    if strangers := [key for key in run.activations if not re.fullmatch(r"[^#]*#\d+(/.*)?", key, re.DOTALL)]:
        yield f"has activations without the number of their call: {strangers}"
        return
    called = {split_activation_key(key)[0] for key in run.activations}
    if strangers := called - run.module_names.keys():
        yield f"calls modules that it does not name: {sorted(strangers)}"
    for section in ("gradients", "updates", "trained"):
        strangers = getattr(run, section).keys() - run.parameters.keys()
        if strangers:
            yield f"has {section} of what is no parameter: {sorted(strangers)}"
    if strangers := {name.partition("/")[2] for name in run.moments} - run.parameters.keys():
        yield f"has moments of what is no parameter: {sorted(strangers)}"
    if strangers := run.activation_gradients.keys() - run.activations.keys():
        yield f"has gradients of what no module gave: {sorted(strangers)}"
    if run.losses and run.losses.keys() != {"loss"}:
        yield f"has the losses {sorted(run.losses)} instead of 'loss'"
    if (run.gradients or run.trained) and not run.losses:
        yield "has gradients and no loss"
    if run.updates and not run.gradients.keys() >= run.updates.keys():
        yield "has updates of parameters without gradients"


def is_mask(*arrays: np.ndarray) -> bool:
    """Whether any is boolean."""
    return any(array.dtype == bool for array in arrays)


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and bool(np.all((a == b) | ((a != a) & (b != b))))


def _names(recording: Recording) -> list[list[str]]:
    mappings = (recording.tensor_names, recording.module_names, recording.activations, recording.outputs)
    return [list(mapping) for mapping in (*mappings, recording.inputs, recording.masks)]
