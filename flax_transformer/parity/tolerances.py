"""Every tolerance of the ladder, each with its derivation. A looser entry needs its reason beside it.

The scale of a forward result is its largest finite magnitude. u(dtype) is the unit roundoff, half the distance from 1 to the
next number.
"""

import dataclasses
import math
from typing import Literal

import ml_dtypes
import numpy as np

UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24}

# Meaning, float64 on both sides. Correct ports of both documents differ by 6e-15 of the scale in the forward pass; the
# smallest porting mistake that changes a formula (an eps of 1e-6 moved under the root) shows at 1e-7.
MEANING = 1e-12

# Forward results must also be equal when rounded to float32: that is what "identical logits" means. Rounding noise that
# straddles a boundary between two float32 numbers is no difference in meaning: correct ports differed in 1 of 10.6 million
# elements (by 6e-17 of the scale), so a vocabulary of 199,854 would raise an alarm every few runs. A miss is forgiven if the
# two are neighbours in float32 and differ in float64 by no more than this many u of the scale (7e-15; measured: 6e-15).
STRADDLING = 64

# Gradients: a float64 reference gradient below this part of its module's largest is zero by structure (a key bias: softmax
# ignores a constant), and its digits are rounding noise.
STRUCTURAL_ZERO = 1e-13

# An element whose gradient is below this part of its module's largest is rounding noise in that dtype, whatever its module:
# its update under Adam has the size of the learning rate and the sign of the noise. 64 u in float32, by the same measure
# as STRADDLING; in float64 the bound of structural zeros.
GRADIENT_NOISE = {"float64": STRUCTURAL_ZERO, "float32": 64 * UNIT_ROUNDOFF["float32"]}

# A training run in float64: differences of final weights relative to how far the weights moved, and of losses relative to
# the loss. 200 Adam steps leave up to 1.4e-11 in the weights of correct ports, whose gradients differ by 1e-14: noise grows
# with the steps, by a factor that depends on the task; 1e-9 is two orders above what was seen. What is smaller than that and
# wrong shows on the rung of the first update, which is held to MEANING.
TRAINING = 1e-9

# Reduced gradients and SGD updates on several devices against one, relative: the order of a sum changes, nothing else.
DEVICES = {"float32": 2e-6, "float64": 1e-12}

# Arithmetic, float32: fewer seeds than this are judged one by one.
POOLED_SEEDS = 16


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """error <= max(``factor`` * the reference's own error, ``floor`` * u * max|truth|), errors being rms against float64."""

    factor: float
    floor: float

    def allowed(self, *, reference_error: float, largest: float, dtype: str) -> float:
        """The largest error that a candidate may have."""
        return max(self.factor * reference_error, self.floor * UNIT_ROUNDOFF[dtype] * largest)


# Two correct float32 programs sum in different orders, so their errors are two draws from one distribution. Pooled over 16
# seeds their ratio stays below 2; one draw of a small tensor does not (the plain rule goes red on correct code in a third of
# the gradient cases), hence 4. The floors are what is left where the reference happens to be exact: a result of a few
# roundings is off by a few u of the largest value.
POOLED = Arithmetic(factor=2, floor=8)
SINGLE = Arithmetic(factor=4, floor=16)


# Reduced precision: both factors of every product rounded to a format of unit roundoff u (bfloat16: 2^-8, TF32: 2^-11).
#
# One product. Rounding x = m 2^e is off by up to u 2^e, evenly, so the relative error has an rms of u sqrt(E[1/m^2] / 3),
# which is 0.42 u for m between 1 and 2 of density 1 / (m ln 2), as products of many things have. A term of the sum has
# two such factors: 0.6 u. Terms and their errors are independent, so the sum has the relative error of a term, 0.6 u,
# whatever its length. With two parts a factor (bfloat16_3x), what is left of each is 0.42 u of 0.42 u, and the product of
# the small parts, 0.18 u^2 too, is left out: 0.3 u^2. Six products are float32, which `Arithmetic` judges.
PRODUCT_ERROR = {"tpu_default": 0.6 * 2.0**-8, "gpu_tf32": 0.6 * 2.0**-11, "tpu_high": 0.3 * 2.0**-16}

# A network. Each of n products in sequence adds an error of its own, independent of the others, and between them norms keep
# the size of what is passed on: the sum is sqrt(n) errors of one, times what the layers amplify. That is what the factors
# are for. Measured on the decoder-only document's model and both small ones, at small sizes, in bfloat16 and TF32, with
# weights as drawn for training and drawn large, as multiples of e sqrt(n), e the error of a product: outputs 0.2 to 0.8 and
# never more than 1.8 (300 draws); gradients 0.2 to 1.3; the worst parameter's gradient 0.7 to 6. These are medians over
# draws, and a median over at least `BUDGET_SEEDS` draws is what is held to the budget.
BUDGETS = {"outputs": 3.0, "gradients": 3.0, "worst gradient": 15.0}
BUDGET_SEEDS = 5

# The derivative of a ReLU jumps. An error d = e sqrt(n) carries a part of the arguments, proportional to d, over 0, and each
# adds its whole term to the gradient or takes it away: the squared error is proportional to d, the error to sqrt(d), which
# falls more slowly than d. In an encoder-decoder of 3 layers with 540,000 ReLU the gradients' error was 0.12, 0.11 and
# 0.04 sqrt(d) for bfloat16, TF32 and bfloat16_3x; `BUDGETS` multiplies this too. In a small model it is a few jumps or none
# (in one of 40 draws, 34 d), which is why a median is judged.
RELU_JUMPS = 0.1


def budget(mode: str, quantity: str, *, products: int, activation: Literal["smooth", "relu"] = "smooth") -> float:
    """The largest relative rms error, as a median over seeds, of a correct program in reduced precision.

    It is f d with d = e sqrt(n); for gradients through a ReLU, f (d + ``RELU_JUMPS`` sqrt(d)).

    Args:
        mode: a key of ``PRODUCT_ERROR``, whose value is e.
        quantity: a key of ``BUDGETS``, whose value is f. "outputs": the logits, or any activation. "gradients":
            those of all parameters as one vector. "worst gradient": that of each parameter by itself. (A loss has none:
            it may be near zero, and moves by no more than twice the largest change of a logit.)
        products: n, the number of products in sequence (``emulation.products_in_sequence``), the backward pass's included
            for gradients.
        activation: whether the derivative of the activation jumps.
    """
    error = PRODUCT_ERROR[mode] * math.sqrt(products)
    jumps = RELU_JUMPS * math.sqrt(error) if activation == "relu" and quantity != "outputs" else 0.0
    return BUDGETS[quantity] * (error + jumps)


def scale(array: np.ndarray) -> float:
    """The largest finite magnitude, 0 if there is none."""
    magnitude = np.abs(array.astype(np.float64))
    return float(magnitude.max(initial=0.0, where=np.isfinite(magnitude)))


def float32_misses(reference: np.ndarray, candidate: np.ndarray, *, forgiven: float = 0.0) -> int:
    """How many elements differ after rounding to float32. NaN equals NaN here (``misplaced``), and 0 equals -0.

    Args:
        forgiven: neighbours in float32 that differ by no more than this are not counted.
    """
    a, b = reference.astype(np.float64), candidate.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        x, y = a.astype(np.float32), b.astype(np.float32)
        straddling = (np.nextafter(x, y) == y) & (np.abs(a - b) <= forgiven)
    return int(np.sum((x != y) & ~(np.isnan(x) & np.isnan(y)) & ~straddling))


def misplaced(reference: np.ndarray, candidate: np.ndarray) -> int:
    """How many elements are NaN on one side only, or infinite on one side only or with another sign."""
    a, b = reference.astype(np.float64), candidate.astype(np.float64)
    infinite = np.isinf(a) | np.isinf(b)
    return int(np.sum((np.isnan(a) != np.isnan(b)) | (infinite & (a != b))))


def spacing(array: np.ndarray, dtype: np.dtype | type) -> np.ndarray:
    """Distance from each magnitude to the next larger number of ``dtype``: one unit in the last place."""
    info = ml_dtypes.finfo(dtype)
    magnitude = np.abs(array.astype(np.float64))
    _, exponent = np.frexp(magnitude)
    ulp = np.ldexp(float(info.eps), exponent - 1)
    return np.maximum(np.where(magnitude > 0, ulp, 0.0), float(info.smallest_subnormal))


def position_table_allowed(length: int, frequencies: np.ndarray) -> np.ndarray:
    """How far freshly built sinusoidal tables of two frameworks may differ: (length, number of frequencies).

    position * ulp(frequency), since two exp or pow functions may differ in the last place of a frequency, and this is then
    multiplied by the position (2.4e-4 at position 5000 in float32). Two more terms, because both are measured: the angle
    itself is rounded, by half an ulp on each side, and so is its sine, an ulp of 1.

    Args:
        length: number of positions.
        frequencies: the factors of the positions, in the dtype of the table.
    """
    position = np.arange(length, dtype=np.float64)[:, None]
    dtype = frequencies.dtype
    angle = position * frequencies.astype(np.float64)
    # At position 0 the angle is exact, and the spacing of 0 is the smallest subnormal: nothing.
    return position * spacing(frequencies, dtype) + spacing(angle, dtype) + 2 * UNIT_ROUNDOFF[dtype.name]
