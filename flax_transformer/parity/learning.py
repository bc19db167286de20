"""The rungs of learning: loss, gradients, the first update, a training run. Matched recordings in, rows out."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from flax_transformer.parity import tolerances
from flax_transformer.parity.judgement import Finding, Sample, judge_equal, judge_learned, judge_values
from flax_transformer.parity.matching import Match, by_any_name, execution_order, owner
from flax_transformer.parity.measures import measure
from flax_transformer.parity.preconditions import Case
from flax_transformer.parity.recording import Arrays, Recording, split_activation_key
from flax_transformer.parity.rungs import Ladder, row_of, same_shapes
from flax_transformer.parity.verdict import Row


class Learning:
    """What two models learn, compared; everything is relative to the scale of its module's gradients or its own update."""

    def __init__(self, ladder: Ladder) -> None:
        self.ladder, self.cases, self.reference = ladder, ladder.cases, ladder.reference
        modules = by_any_name(self.reference.module_names)
        self._owners = {name: owner(name, modules) for name in self.reference.parameters}
        self._truths = [case.truth or case.reference for case in self.cases]
        self._gradient_scales = [_scales(truth.gradients, self._owners) for truth in self._truths]
        self._tolerated = tolerances.GRADIENT_NOISE.get(self.reference.dtype, np.nan)

    @functools.cached_property
    def _candidate_gradients(self) -> dict[str, list[np.ndarray]]:
        """In the reference's layout, a case each."""
        return {name: [sample.candidate for sample in samples] for name, samples in self._samples("gradients")}

    @property
    def structural_zeros(self) -> tuple[str, ...]:
        """Parameters whose gradient is nothing but rounding noise in every case."""
        return tuple(
            name
            for name in self.reference.gradients
            if all(
                tolerances.scale(truth.gradients[name]) <= tolerances.STRUCTURAL_ZERO * scales[self._owners[name]]
                for truth, scales in zip(self._truths, self._gradient_scales, strict=True)
            )
        )

    def loss(self) -> Iterator[Row]:
        """The first loss, a forward result."""
        if self.reference.losses:
            samples = []
            for case in self.cases:
                truth = None if case.truth is None else case.truth.losses["loss"][:1]
                samples.append(Sample(case.reference.losses["loss"][:1], case.candidate.losses["loss"][:1], truth))
            yield row_of("loss", "", judge_values(samples))

    def backward(self) -> Iterator[Row]:
        """Gradients that reach the submodules' outputs, from the loss backwards."""
        gradients = self.reference.activation_gradients
        scales = _scales(gradients, {key: split_activation_key(key)[0] for key in gradients})
        for pair in reversed(self.ladder.calls.pairs):
            if pair.reference not in gradients or pair.candidate not in self.ladder.candidate.activation_gradients:
                continue
            samples = []
            for case in self.cases:
                ours = case.reference.activation_gradients[pair.reference]
                theirs = pair.transform(case.candidate.activation_gradients[pair.candidate])
                truth = None if case.truth is None else case.truth.activation_gradients[pair.reference]
                around = scales.get(_parent(pair.path, scales), 0.0)
                samples.append(Sample(ours, theirs, truth, max(tolerances.scale(ours), around)))
            if same_shapes(samples):
                yield row_of(pair.reference, pair.path, judge_learned(samples))

    def gradients(self) -> list[Row]:
        """The gradient of every parameter, a shared one's as the sum over its uses."""
        zeros = set(self.structural_zeros)
        rows = []
        for name, samples in self._samples("gradients"):
            scaled = [
                dataclasses.replace(sample, scale=scales[self._owners[name]])
                for sample, scales in zip(samples, self._gradient_scales, strict=True)
            ]
            finding = self._judge_zero(scaled) if name in zeros else judge_learned(scaled)
            rows.append(row_of(name, self._owners[name], finding))
        return self._backwards(rows)

    def updates(self) -> list[Row]:
        """What the first step adds to every parameter, relative to that, and the optimizer's moments after it."""
        zeros = set(self.structural_zeros)
        rows = [
            row_of(name, self._owners[name], self._judge_update(name, samples))
            for name, samples in self._samples("updates")
            if name not in zeros
        ]
        if rows and all(not np.any(self.reference.updates[row.name]) for row in rows):
            detail = "the first update of the reference moves nothing, so that a step that does nothing would pass"
            return [Row(name="updates", path="", passed=False, detail=detail)]
        return self._backwards(rows) + self._backwards(list(self._moments(zeros)))

    def training(self) -> Iterator[Row]:
        """The losses of all steps, and how far every parameter has moved after the last."""
        if not self.reference.trained:
            return
        samples = []
        for case in self.cases:
            truth = None if case.truth is None else case.truth.losses["loss"]
            others = tuple(run.losses["loss"] for run in case.envelope)
            curves = case.reference.losses["loss"], case.candidate.losses["loss"]
            samples.append(Sample(*curves, truth=truth, others=others))
        yield row_of("losses", "", judge_learned(samples, part=tolerances.TRAINING))
        zeros = set(self.structural_zeros)
        rows = []
        for name, samples in self._samples("trained", minus_start=True):
            if name in zeros:
                continue
            judged = [
                dataclasses.replace(
                    sample,
                    counted=self._counted(name, number),
                    others=tuple(run.trained[name] - run.parameters[name] for run in self.cases[number].envelope),
                )
                for number, sample in enumerate(samples)
            ]
            finding = judge_learned(judged, part=tolerances.TRAINING)
            rows.append(row_of(name, self._owners[name], finding))
        yield from self._backwards(rows)

    def decoding(self) -> Iterator[Row]:
        """Decoded tokens, one by one."""
        for name in self.reference.decoded:
            samples = [Sample(case.reference.decoded[name], case.candidate.decoded[name]) for case in self.cases]
            yield row_of(f"decoded{name}", "", judge_equal(samples))

    def _judge_zero(self, samples: Sequence[Sample]) -> Finding:
        allowed = max(self._tolerated, tolerances.MEANING)
        for sample in samples:
            bound = allowed * (sample.scale or 0.0)
            largest = max(tolerances.scale(sample.reference), tolerances.scale(sample.candidate))
            if largest > bound or not np.all(np.isfinite(sample.candidate)):
                measures = measure(sample.reference, sample.candidate)
                detail = f"is zero by structure and reaches {largest:.2g}, allowed {bound:.2g}"
                return Finding(False, detail, measures, bound, largest)
        first = samples[0]
        measures = measure(first.reference, first.candidate)
        largest = max(tolerances.scale(first.reference), tolerances.scale(first.candidate))
        detail = "zero by structure on both sides, up to rounding"
        return Finding(True, detail, measures, allowed * (first.scale or 0.0), largest)

    def _judge_update(self, name: str, samples: list[Sample]) -> Finding:
        counted = [
            dataclasses.replace(sample, counted=self._counted(name, number)) for number, sample in enumerate(samples)
        ]
        if samples[0].truth is not None:
            return judge_learned(counted)
        sample, gradient = counted[0], np.abs(self.reference.gradients[name])
        measures = measure(sample.reference, sample.candidate)
        if not np.all(np.isfinite(sample.candidate) == np.isfinite(sample.reference)):
            return judge_learned(counted)
        scale = tolerances.scale(sample.reference)
        # PyTorch tells its updates as differences of parameters, each of which was rounded.
        rounding = 2 * tolerances.UNIT_ROUNDOFF["float64"] * tolerances.scale(self.reference.parameters[name])
        if 0 < scale < 1e3 * rounding:
            detail = f"the update, {scale:.2g}, is too small beside the parameter to be told; raise the learning rate"
            return Finding(False, detail, measures)
        # What the rung of gradients lets pass reaches the update of an element, in proportion, at most one to one.
        noise = tolerances.MEANING * self._gradient_scales[0][self._owners[name]]
        with np.errstate(divide="ignore", invalid="ignore"):
            passed_on = np.nan_to_num(np.minimum(1.0, noise / gradient), nan=0.0) * np.abs(sample.reference)
        allowed = (tolerances.MEANING * scale + rounding + passed_on)[sample.counted]
        differences = np.abs(sample.candidate - sample.reference)[sample.counted]
        excess = differences - allowed
        detail = f"differs by {measures.max_abs / scale if scale else measures.max_abs:.2g} of the update"
        if not excess.size:
            return Finding(True, detail, measures)
        worst = int(np.argmax(excess))  # every element has a limit of its own; this one is nearest to it
        return Finding(bool(excess[worst] <= 0), detail, measures, float(allowed[worst]), float(differences[worst]))

    def _moments(self, zeros: set[str]) -> Iterator[Row]:
        """Moments, relative to those of the module; names of moments that only one side has were refused before."""
        users = {match.reference: match for match in self.ladder.tensors}
        for kind in dict.fromkeys(name.partition("/")[0] for name in self.reference.moments):
            ours = {
                n: self.reference.moments[f"{kind}/{n}"]
                for n in self._owners
                if f"{kind}/{n}" in self.reference.moments
            }
            scales = _scales(ours, self._owners)
            for name in ours:
                if name in zeros or name not in users:
                    continue
                samples = [self._sample(users[name], case, "moments", prefix=f"{kind}/") for case in self.cases]
                found = [sample for sample in samples if sample is not None]
                if len(found) == len(samples) and same_shapes(found):
                    scaled = [dataclasses.replace(sample, scale=scales[self._owners[name]]) for sample in found]
                    if kind == "second" and found[0].truth is not None:
                        scaled = [_root(sample) for sample in scaled]
                    yield row_of(f"{name} ({kind} moment)", self._owners[name], judge_learned(scaled))

    def _counted(self, name: str, number: int) -> np.ndarray:
        """Elements whose gradient is more than rounding noise, or nothing at all on both sides."""
        gradient = np.abs(self._truths[number].gradients[name].astype(np.float64))
        # An exact 0 may be noise that cancelled by chance, as within the key's part of a fused bias.
        nothing = (gradient == 0) & (self._candidate_gradients[name][number] == 0)
        return (gradient > self._tolerated * self._gradient_scales[number][self._owners[name]]) | nothing

    def _samples(self, section: str, *, minus_start: bool = False) -> Iterator[tuple[str, list[Sample]]]:
        for match in self.ladder.tensors:
            if match.reference not in getattr(self.reference, section):
                continue
            found = [self._sample(match, case, section, minus_start=minus_start) for case in self.cases]
            samples = [sample for sample in found if sample is not None]
            if len(samples) == len(found) and same_shapes(samples):
                yield match.reference, samples

    def _sample(
        self, match: Match, case: Case, section: str, *, prefix: str = "", minus_start: bool = False
    ) -> Sample | None:
        def get(run: Recording, name: str) -> np.ndarray:
            arrays: Arrays = getattr(run, section)
            return arrays[prefix + name] - (run.parameters[name] if minus_start else 0)

        theirs: Arrays = getattr(case.candidate, section)
        if not all(prefix + name in theirs for group in match.candidates for name in group):
            return None  # a buffer there, which the rung of keys tells
        moved = [match.transform(*(get(case.candidate, name) for name in group)) for group in match.candidates]
        if len({array.shape for array in moved}) > 1:
            return None
        truth = None if case.truth is None else get(case.truth, match.reference)
        # Where the candidate unties what the reference shares, the sum of its gradients is the counterpart.
        return Sample(get(case.reference, match.reference), sum(moved[1:], start=moved[0]), truth)

    def _backwards(self, rows: list[Row]) -> list[Row]:
        order = execution_order(self.reference)
        return sorted(rows, key=lambda row: -order.get(row.path, -1))


def _root(sample: Sample) -> Sample:
    """A second moment as the size of a gradient, whose errors are those that the rules for float32 are derived for.

    The relative error of a square is twice as large, and pooled over seeds the largest square would decide alone: of 16
    seeds of one norm's bias a single one made 70 % of the error.
    """

    def root(array: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore"):  # of a negative one NaN, which no truth is
            return np.sqrt(array)

    truth = None if sample.truth is None else root(sample.truth)
    scale = None if sample.scale is None else float(np.sqrt(sample.scale))
    others = tuple(root(other) for other in sample.others)
    return dataclasses.replace(
        sample,
        reference=root(sample.reference),
        candidate=root(sample.candidate),
        truth=truth,
        scale=scale,
        others=others,
    )


def _scales(arrays: Arrays, owners: Mapping[str, str]) -> dict[str, float]:
    """Path -> the largest magnitude of anything that belongs to it."""
    scales: dict[str, float] = {}
    for name, array in arrays.items():
        path = owners[name]
        scales[path] = max(scales.get(path, 0.0), tolerances.scale(array))
    return scales


def _parent(path: str, known: Mapping[str, float]) -> str:
    """The nearest module around ``path``, but the model itself, that has a gradient."""
    while path:
        path = path.rpartition(".")[0]
        if path and path in known:
            return path
    return "(none)"
