"""Which call of the candidate answers which call of the reference."""

import dataclasses
from collections.abc import Iterable, Sequence

from flax_transformer.parity.matching import Match, Rules, Transform, exempt
from flax_transformer.parity.recording import Recording, pair_places, split_activation_key
from flax_transformer.parity.verdict import Row


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two activation keys to compare, the reference's module path, and the transform of the candidate's array."""

    reference: str
    candidate: str
    path: str
    transform: Transform


@dataclasses.dataclass(frozen=True)
class PairedCalls:
    """Calls paired by number.

    Attributes:
        pairs: what to compare, in the reference's order.
        miscounted: failed rows of modules with parameters that were not called as often, named by the first call.
        unlike: failed rows of calls that return another number of arrays.
        unmatched: modules that were called and are not compared, in words.
    """

    pairs: list[Pair]
    miscounted: list[Row]
    unlike: list[Row]
    unmatched: list[str]


def pair_calls(reference: Recording, candidate: Recording, rules: Rules, matches: Sequence[Match]) -> PairedCalls:
    """Pair the n-th call of a module with the n-th call of its counterpart.

    A module without parameters (dropout, an activation) may be called another number of times: a port may well leave it
    out where it does nothing, and what it does otherwise shows in the module around it.
    """
    ours, theirs = _calls(reference), _calls(candidate)
    found = PairedCalls([], [], [], [])
    by_reference = {match.reference: match for match in matches}
    for path, calls in ours.items():
        names = reference.module_names[path]
        if path not in by_reference:
            if not exempt(names, rules.modules):
                found.unmatched.append(f"module {path or '(model)'} of the reference, called {len(calls)} times")
            continue
        match = by_reference[path]
        answers = _in_order([call for (other,) in match.candidates for call in theirs.get(other, ())], candidate)
        if len(calls) != len(answers):
            counts = f"called {len(answers)} times in the candidate and {len(calls)} times in the reference"
            if not _has_parameters(names, reference):
                found.unmatched.append(f"module {path or '(model)'}, without parameters, {counts}")
                continue
            found.miscounted.append(Row(name=calls[0][0], path=path, passed=False, detail=f"is {counts}"))
        for call, answer in zip(calls, answers, strict=False):
            if len(call) != len(answer):
                detail = f"returns {len(answer)} arrays, the reference {len(call)}"
                found.unlike.append(Row(name=call[0], path=path, passed=False, detail=detail))
            transform = match.transform
            places, others = _by_place(call), _by_place(answer)
            found.pairs.extend(Pair(places[a], others[b], path, transform) for a, b in pair_places(places, others))
    position = {key: place for place, key in enumerate(reference.activations)}
    found.pairs.sort(key=lambda pair: position[pair.reference])
    answered = {other for match in matches for (other,) in match.candidates}
    found.unmatched.extend(
        f"module {path or '(model)'} of the candidate, called {len(calls)} times"
        for path, calls in theirs.items()
        if path not in answered
    )
    return found


def _calls(recording: Recording) -> dict[str, list[tuple[str, ...]]]:
    """Module path -> for each call the keys of its outputs."""
    calls: dict[tuple[str, int], list[str]] = {}
    for key in recording.activations:
        calls.setdefault(split_activation_key(key), []).append(key)
    by_path: dict[str, list[tuple[str, ...]]] = {}
    for (path, _), keys in calls.items():
        by_path.setdefault(path, []).append(tuple(keys))
    return by_path


def _by_place(call: tuple[str, ...]) -> dict[str, str]:
    """Place in a nested output -> the key of one call that has it."""
    return {"".join(key.partition("#")[2].partition("/")[1:]): key for key in call}


def _in_order(calls: list[tuple[str, ...]], recording: Recording) -> list[tuple[str, ...]]:
    position = {key: place for place, key in enumerate(recording.activations)}
    return sorted(calls, key=lambda keys: position[keys[0]])


def _has_parameters(paths: Iterable[str], recording: Recording) -> bool:
    prefixes = tuple(f"{path}." if path else "" for path in paths)
    return any(name.startswith(prefixes) for names in recording.tensor_names.values() for name in names)
