"""One fault, one row: every module of the candidate is fed the reference's intermediates."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from flax_transformer.parity.calls import pair_calls
from flax_transformer.parity.comparison import compare
from flax_transformer.parity.flax_recorder import record_flax
from flax_transformer.parity.matching import Rules, Transform, match_modules, match_tensors
from flax_transformer.parity.recording import Recording, is_floating
from flax_transformer.parity.verdict import Verdict


def localise(
    reference: Recording, module: Any, rules: Rules | None = None, *, truth: Recording | None = None, **options: Any
) -> Verdict:
    """Record a live Flax model on the reference's inputs with *replay*, and compare.

    In a plain comparison a fault is followed by a cascade: every later module differs too. Here each module's output is
    recorded as it is, and then the reference's stands in for it, so that the next module starts from the right numbers, and
    the rows that fail are those modules that are wrong by themselves, with whatever surrounds them and adds nothing right.
    Gradients pass through the replaced numbers as if they were the model's own.

    Args:
        reference: as for ``compare``.
        module: an NNX module, the candidate.
        rules: as for ``compare``.
        truth: as for ``compare``.
        options: of ``record_flax``: ``call``, ``loss``, ``masks``, ...; inputs, batches and dtype are the reference's.
            What the reference learned or decoded is compared as far as ``loss``, ``optimizer`` and ``decode`` are among
            them, and else left aside.
    Raises:
        ValueError: as ``compare`` and ``record_flax``.
    """
    reference = _as_far_as(reference, options)
    truth = None if truth is None else _as_far_as(truth, options)
    options = {"dtype": reference.dtype, "batches": batches_of(reference), **options}
    inputs = inputs_of(reference)
    candidate = record_flax(module, inputs, **options)
    tensors = match_tensors(reference, candidate, rules)
    modules = match_modules(reference, candidate, rules, tensors)
    replay = {}
    for pair in pair_calls(reference, candidate, rules or Rules(), modules).pairs:
        like, array = candidate.activations[pair.candidate], reference.activations[pair.reference]
        stand_in = rearranged_back(pair.transform, like, array) if is_floating(like) else None
        if stand_in is not None:
            replay[pair.candidate] = stand_in
    replayed = record_flax(module, inputs, replay=replay, **options)
    verdict = compare(reference, replayed, rules, truth=truth)
    return dataclasses.replace(verdict, rule=f"{verdict.rule}; every module fed the reference's intermediates")


def _as_far_as(recording: Recording, options: Mapping[str, Any]) -> Recording:
    """The recording without what the candidate is not asked for."""
    left: dict[str, Any] = {}
    if options.get("optimizer") is None:
        first = {name: losses[:1] for name, losses in recording.losses.items()}
        left |= {"losses": first, "batches": {}, "updates": {}, "moments": {}, "trained": {}}
    if options.get("loss") is None:
        left |= {"losses": {}, "gradients": {}, "activation_gradients": {}}
    if options.get("decode") is None:
        left |= {"decoded": {}}
    return dataclasses.replace(recording, **left)


def inputs_of(recording: Recording) -> Any:
    """The inputs as a recorder was given them: a tuple if they were positional, else by name."""
    return _as_given(dict(recording.inputs))


def batches_of(recording: Recording) -> list[Any]:
    """The further batches as a recorder was given them."""
    batches: dict[str, dict[str, np.ndarray]] = {}
    for name, array in recording.batches.items():
        number, _, key = name.partition("/")
        batches.setdefault(number, {})[key] = array
    return [_as_given(batch) for batch in batches.values()]


def _as_given(named: dict[str, np.ndarray]) -> Any:
    positional = list(named) == [str(place) for place in range(len(named))]
    return tuple(named.values()) if positional else named


def rearranged_back(transform: Transform, like: np.ndarray, array: np.ndarray) -> np.ndarray | None:
    """``array``, which has the layout that ``transform`` makes, in the layout of ``like``; None if that cannot be told.

    A transform that only moves elements is inverted by watching where it moves their numbers.
    """
    moved = np.asarray(transform(np.arange(like.size).reshape(like.shape)))
    if moved.shape != array.shape or not np.array_equal(np.sort(moved, axis=None), np.arange(like.size)):
        return None
    back = np.empty(like.size, array.dtype)
    back[moved.ravel()] = array.ravel()
    return back.reshape(like.shape)
