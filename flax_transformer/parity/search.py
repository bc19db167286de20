"""Looking for inputs on which two live models differ, where random inputs show nothing."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from flax_transformer.parity.recording import Arrays, as_inputs, is_floating, pair_places

# Outputs of a model, and the gradient of its inputs for a gradient of each output.
Pullback = Callable[[Arrays], dict[str, np.ndarray]]
LiveModel = Callable[[Arrays], tuple[dict[str, np.ndarray], Pullback]]

# Starts: the inputs as given, and larger and smaller ones, since a clamp at 6 or an eps of 1e-5 hides from ordinary sizes.
MAGNITUDES = (1.0, 1e1, 1e2, 1e-2, 1e-4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """The worst inputs of a search.

    Attributes:
        inputs: on which the models differ most; record both on them to see where.
        difference: there, the root of sum((f - g)^2) / sum(f^2) over all outputs; infinite where one is not finite alone.
        at_start: the same for the inputs that were given.
        history: the largest difference so far, after each evaluation.
    """

    inputs: dict[str, np.ndarray]
    difference: float
    at_start: float
    history: tuple[float, ...]


def search(
    reference: LiveModel,
    candidate: LiveModel,
    inputs: Any,
    *,
    steps: int = 200,
    learning_rate: float = 0.1,
    vocabulary: int | Mapping[str, int] | None = None,
    seed: int = 0,
) -> Found:
    """Gradient ascent on the inputs, to widen the relative difference of two models.

    Floats climb along the gradient of the difference, from several magnitudes; where it is flat (two clamps agree below
    their bound) they take a random step. Integers have no gradient: some are drawn anew, and kept if the difference grows.

    Args:
        reference, candidate: ``parity.live_torch(module)`` and ``parity.live_flax(module)``, in float64.
        inputs: where to start, as for the recorders; booleans (masks) stay as they are.
        steps: evaluations of both models, over all starts.
        learning_rate: size of a step relative to the size of the inputs.
        vocabulary: integers are drawn from [0, vocabulary), by name where inputs differ; None: up to the largest given.
        seed: of the random steps.
    Returns:
        the worst inputs; a right port in float64 stays near 1e-15 on all of them.
    Raises:
        ValueError: no input can be changed, or the models' outputs cannot be compared.
    """
    start = as_inputs(inputs, "float64")
    floats = [name for name, array in start.items() if is_floating(array)]
    integers = [name for name, array in start.items() if array.dtype.kind in "iu" and array.size]
    if not floats and not integers:
        raise ValueError("a search needs inputs of floats or integers, got masks alone")
    sizes = {
        name: vocabulary.get(name, 0) if isinstance(vocabulary, Mapping) else vocabulary or int(start[name].max()) + 1
        for name in integers
    }
    rng = np.random.default_rng(seed)
    at_start, gradient = _difference(reference, candidate, start, floats)
    worst, best, history = dict(start), at_start, [at_start]
    rounds = MAGNITUDES if floats else (1.0,)
    for magnitude in rounds:
        here = {name: array * magnitude if name in floats else array for name, array in start.items()}
        value, gradient = _difference(reference, candidate, here, floats)
        for _ in range(max(1, steps // len(rounds))):
            if value > best:
                worst, best = here, value
            history.append(best)
            if not np.isfinite(value):
                break
            proposed = dict(here)
            for name in floats:
                proposed[name] = here[name] + learning_rate * _direction(here[name], gradient[name], rng)
            for name in integers:
                anew = rng.random(start[name].shape) < max(0.05, 1 / start[name].size)
                drawn = rng.integers(0, max(1, sizes[name]), start[name].shape).astype(start[name].dtype)
                proposed[name] = np.where(anew, drawn, here[name])
            there, slope = _difference(reference, candidate, proposed, floats)
            if there >= value or (floats and not integers):
                here, value, gradient = proposed, there, slope
        if value > best:
            worst, best = here, value
    return Found(inputs=worst, difference=best, at_start=at_start, history=(*history, best))


def _difference(
    reference: LiveModel, candidate: LiveModel, inputs: Arrays, floats: list[str]
) -> tuple[float, dict[str, np.ndarray]]:
    """The relative difference, and the gradient of its square with respect to the floating-point inputs."""
    (ours, ours_back), (theirs, theirs_back) = reference(inputs), candidate(inputs)
    pairing = list(pair_places(ours, theirs))
    shapes = [array.shape for array in ours.values()], [theirs[other].shape for _, other in pairing]
    if len(ours) != len(theirs) or shapes[0] != shapes[1] or not shapes[0]:
        shapes = [[array.shape for array in outputs.values()] for outputs in (ours, theirs)]
        raise ValueError(f"both models must return the same arrays, got the shapes {shapes[0]} and {shapes[1]}")
    pairs = [(name, other, ours[name].astype(np.float64), theirs[other].astype(np.float64)) for name, other in pairing]
    if any(np.any(np.isfinite(f) != np.isfinite(g)) for _, _, f, g in pairs):
        return np.inf, {name: np.zeros_like(inputs[name]) for name in floats}
    pairs = [(name, other, np.nan_to_num(f), np.nan_to_num(g)) for name, other, f, g in pairs]
    size = sum(float(np.sum(f * f)) for _, _, f, _ in pairs) or np.finfo(np.float64).tiny
    square = sum(float(np.sum((f - g) ** 2)) for _, _, f, g in pairs) / size
    pull_ours = ours_back({name: 2 * ((f - g) - square * f) / size for name, _, f, g in pairs})
    pull_theirs = theirs_back({other: -2 * (f - g) / size for _, other, f, g in pairs})
    return float(np.sqrt(square)), {name: np.nan_to_num(pull_ours[name] + pull_theirs[name]) for name in floats}


def _direction(array: np.ndarray, gradient: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A step of the size of the array: along the gradient, mixed with noise; noise alone where the gradient is nothing."""
    size = float(np.sqrt(np.mean(array**2))) or 1.0
    length = float(np.sqrt(np.mean(gradient**2)))
    noise = rng.standard_normal(array.shape)
    return size * (noise if length == 0 else gradient / length + 0.1 * noise)
