"""How far two arrays of one shape are apart, in the measures that people ask for."""

import dataclasses

import numpy as np

from flax_transformer.parity.recording import is_floating
from flax_transformer.parity.tolerances import float32_misses, scale, spacing


@dataclasses.dataclass(frozen=True)
class Measures:
    """Differences over the elements that are finite on both sides.

    Attributes:
        max_abs: largest absolute difference.
        where: the index of that element.
        relative: ``max_abs`` over the reference's largest magnitude.
        ulp: largest difference in units in the last place of the reference, in its dtype (0 for integers).
        rms: root mean square of the differences.
        cosine: cosine of the angle between the two as vectors, 1 where both are zero.
        float32_misses: elements that differ after rounding to float32.
        largest: the reference's largest magnitude.
    """

    max_abs: float
    where: tuple[int, ...]
    relative: float
    ulp: float
    rms: float
    cosine: float
    float32_misses: int
    largest: float

    def __str__(self) -> str:
        return (
            f"max abs {self.max_abs:.2g} at {list(self.where)}, relative {self.relative:.2g}, {self.ulp:.3g} ulp, "
            f"rms {self.rms:.2g}, 1 - cosine {1 - self.cosine:.2g}, {self.float32_misses} differ in float32"
        )


def measure(reference: np.ndarray, candidate: np.ndarray) -> Measures:
    """The measures of two arrays of equal shape."""
    a, b = reference.astype(np.float64), candidate.astype(np.float64)
    finite = np.isfinite(a) & np.isfinite(b)
    a, b = np.where(finite, a, 0.0), np.where(finite, b, 0.0)
    difference = np.abs(a - b)
    max_abs = float(difference.max(initial=0.0))
    where = np.unravel_index(int(difference.argmax()), difference.shape) if difference.size else ()
    largest = scale(reference)
    ulp = 0.0
    if is_floating(reference):
        with np.errstate(over="ignore"):  # where the reference is 0, its unit is the smallest number there is
            ulp = float((difference / spacing(a, reference.dtype)).max(initial=0.0))
    return Measures(
        max_abs=max_abs,
        where=tuple(int(index) for index in where),
        relative=max_abs / largest if largest else (0.0 if max_abs == 0 else np.inf),
        ulp=ulp,
        rms=rms(difference),
        cosine=_cosine(a.ravel(), b.ravel()),
        float32_misses=float32_misses(reference, candidate),
        largest=largest,
    )


def rms(difference: np.ndarray) -> float:
    """Root mean square of the finite elements, 0 if there is none."""
    difference = difference.astype(np.float64)
    difference = difference[np.isfinite(difference)]
    largest = np.abs(difference).max(initial=0.0)
    # Divided by the largest, so that neither squares nor sums over- or underflow.
    return float(largest * np.sqrt(np.mean(np.square(difference / largest)))) if largest else 0.0


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    a, b = (vector / (np.abs(vector).max(initial=0.0) or 1.0) for vector in (a, b))
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    if lengths == 0:
        return 1.0 if np.array_equal(a, b) else 0.0
    return float(np.dot(a, b) / lengths)
