"""The rungs of the ladder: matched recordings in, rows out."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from flax_transformer.parity.calls import PairedCalls, pair_calls
from flax_transformer.parity.judgement import Finding, Sample, judge_equal, judge_layout, judge_values
from flax_transformer.parity.matching import Match, Rules, by_any_name, execution_order, exempt, owner
from flax_transformer.parity.preconditions import Case, is_mask, paired_inputs
from flax_transformer.parity.recording import pair_places
from flax_transformer.parity.verdict import Row


class Ladder:
    """The rungs of one comparison; ``cases`` are of the same two models, and stand for each other in all but values."""

    def __init__(self, cases: Sequence[Case], rules: Rules, tensors: Sequence[Match], modules: Sequence[Match]) -> None:
        self.cases, self.rules, self.tensors, self.modules = cases, rules, tensors, modules
        self.reference, self.candidate = cases[0].reference, cases[0].candidate
        self.calls: PairedCalls = pair_calls(self.reference, self.candidate, rules, modules)

    def keys(self) -> Iterator[Row]:
        """One to one, none left over, shared where the reference shares, trained where the reference trains."""
        users: dict[str, list[str]] = {}
        for match in self.tensors:
            for name in {name for group in match.candidates for name in group}:
                users.setdefault(name, []).append(match.reference)
        findings = {match.reference: self._judge_match(match, users) for match in self.tensors}
        for name, aliases in self.reference.tensor_names.items():
            missing = name in self.reference.parameters and name not in findings
            if missing and not exempt(aliases, self.rules.parameters):
                findings[name] = Finding(False, "is missing in the candidate")
        yield from self._tensor_rows(findings.items())
        modules = by_any_name(self.candidate.module_names)
        for name in self.candidate.parameters:
            if name not in users:
                yield row_of(name, owner(name, modules), Finding(False, "is in the candidate only"))

    def shapes(self) -> Iterator[Row]:
        """Shapes and dtypes of everything, and, since parameters are copied, equality of their values."""
        findings = []
        for match in self.tensors:
            samples = self._tensor_samples(match)
            finding = judge_layout(samples)
            if finding.passed and match.reference in self.reference.parameters:
                finding = judge_equal(samples)
                if not finding.passed:
                    finding = dataclasses.replace(finding, detail=finding.detail + self._resemblance(samples[0]))
            findings.append((match.reference, finding))
        yield from self._tensor_rows(findings)
        yield from self.calls.unlike
        for name, path, samples in self._activation_samples():
            yield row_of(name, path, judge_layout(samples))
        if len(self.reference.outputs) != len(self.candidate.outputs):
            ours, theirs = list(self.reference.outputs), list(self.candidate.outputs)
            yield row_of("output", "", Finding(False, f"is {len(theirs)} arrays {theirs}, the reference {ours}"))
        for name, samples in self._output_samples():
            yield row_of(name, "", judge_layout(samples))

    def masks(self) -> Iterator[Row]:
        """Boolean inputs, the masks handed to the recorders, boolean outputs of modules."""
        for pairs in zip(*(paired_inputs(case) for case in self.cases), strict=True):
            name, a, b = pairs[0]
            if is_mask(a, b):
                yield row_of(f"input {name}", "", judge_equal([Sample(a, b) for _, a, b in pairs]))
        for name in self.reference.masks:
            samples = [Sample(case.reference.masks[name], case.candidate.masks[name]) for case in self.cases]
            yield row_of(f"mask {name}", "", judge_equal(samples))
        for name, path, samples in self._activation_samples():
            if is_mask(samples[0].reference):
                yield row_of(name, path, judge_equal(samples))

    def buffers(self) -> Iterator[Row]:
        """Buffers are copied, so their values are equal."""
        buffers = [match for match in self.tensors if match.reference in self.reference.buffers]
        yield from self._tensor_rows((match.reference, judge_equal(self._tensor_samples(match))) for match in buffers)

    def outputs_of_modules(self) -> Iterator[Row]:
        """Every call of every matched module, in the order in which the reference's calls ended."""
        rows = [*self.calls.miscounted]
        for name, path, samples in self._activation_samples():
            if not is_mask(samples[0].reference) and same_shapes(samples):
                rows.append(row_of(name, path, judge_values(samples)))
        position = {key: place for place, key in enumerate(self.reference.activations)}
        yield from sorted(rows, key=lambda row: position[row.name])

    def output(self) -> Iterator[Row]:
        """The final result."""
        for name, samples in self._output_samples():
            if same_shapes(samples):
                yield row_of(name, "", judge_values(samples))

    def unmatched(self) -> Iterator[str]:
        """What could have been compared and was not, for a person to read."""
        matched = {match.reference for match in self.tensors}
        used = {name for match in self.tensors for group in match.candidates for name in group}
        yield from (f"buffer {name} of the reference" for name in self.reference.buffers if name not in matched)
        yield from (f"buffer {name} of the candidate" for name in self.candidate.buffers if name not in used)
        yield from self.calls.unmatched

    def _judge_match(self, match: Match, users: dict[str, list[str]]) -> Finding:
        if len(match.candidates) > 1:
            names = ", ".join("+".join(group) for group in match.candidates)
            return Finding(False, f"is one tensor in the reference and several in the candidate: {names}")
        ours, theirs = self.reference.tensors, self.candidate.tensors
        for name in match.candidates[0]:
            # Several tensors may be cut from one array, such as a stack of layers, if it has room for them all.
            if len(users[name]) > 1 and sum(ours[user].size for user in users[name]) > theirs[name].size:
                others = ", ".join(user for user in users[name] if user != match.reference)
                return Finding(False, f"is {name} in the candidate, which is also {others} of the reference")
        kinds = {name in self.candidate.parameters for name in match.candidates[0]}
        if kinds != {match.reference in self.reference.parameters}:
            return Finding(False, f"is a parameter on one side and a buffer on the other ({match})")
        return Finding(True, str(match))

    def _resemblance(self, sample: Sample) -> str:
        """What a wrong value equals, which usually tells the mistake."""
        if sample.candidate.ndim == 2 and np.array_equal(sample.candidate.T, sample.reference):
            return "; it is the transpose"
        twins = [n for n, array in self.reference.parameters.items() if np.array_equal(array, sample.candidate)]
        return f"; it holds the reference's {', '.join(twins)}" if twins else ""

    def _tensor_samples(self, match: Match) -> list[Sample]:
        samples = []
        for case in self.cases:
            ours, theirs = case.reference.tensors[match.reference], case.candidate.tensors
            samples += [Sample(ours, match.transform(*(theirs[n] for n in group))) for group in match.candidates]
        return samples

    def _tensor_rows(self, findings: Iterable[tuple[str, Finding]]) -> list[Row]:
        modules, order = by_any_name(self.reference.module_names), execution_order(self.reference)
        rows = [row_of(name, owner(name, modules), finding) for name, finding in findings]
        return sorted(rows, key=lambda row: order.get(row.path, math.inf))

    def _activation_samples(self) -> Iterator[tuple[str, str, list[Sample]]]:
        for pair in self.calls.pairs:
            yield (
                pair.reference,
                pair.path,
                [
                    Sample(
                        case.reference.activations[pair.reference],
                        pair.transform(case.candidate.activations[pair.candidate]),
                        None if case.truth is None else case.truth.activations[pair.reference],
                    )
                    for case in self.cases
                ],
            )

    def _output_samples(self) -> Iterator[tuple[str, list[Sample]]]:
        transform = self.rules.transform([""])
        for ours, theirs in pair_places(self.reference.outputs, self.candidate.outputs):
            samples = [
                Sample(
                    case.reference.outputs[ours],
                    transform(case.candidate.outputs[theirs]),
                    None if case.truth is None else case.truth.outputs[ours],
                )
                for case in self.cases
            ]
            yield f"output{ours}", samples


def row_of(name: str, path: str, finding: Finding) -> Row:
    """A row of a finding."""
    return Row(
        name=name,
        path=path,
        passed=finding.passed,
        detail=finding.detail,
        measures=finding.measures,
        allowed=finding.allowed,
        judged=finding.judged,
    )


def same_shapes(samples: Sequence[Sample]) -> bool:
    """Whether values can be compared at all."""
    return all(sample.reference.shape == sample.candidate.shape for sample in samples)
