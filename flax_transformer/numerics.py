"""In which types a model stores and computes, and how precisely it multiplies: the one place that says so."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from flax_transformer.config import TransformerConfig

Factors = Literal["as_they_are", "bfloat16"]


@dataclasses.dataclass(frozen=True)
class Numerics:
    """Types and precision of one model.

    ``param`` is what parameters are stored in, ``compute`` what activations are, ``statistics`` what norms, softmax and
    position tables are computed in: at least float32, since a bfloat16 sum of D terms loses the mean it looks for.
    ``factors`` is what the two factors of a product are rounded to (``mixed_einsum``), which is of type ``compute``
    whatever they are.
    """

    param: jnp.dtype
    compute: jnp.dtype
    precision: jax.lax.Precision
    factors: Factors = "as_they_are"

    @classmethod
    def of(cls, config: TransformerConfig) -> "Numerics":
        mixed = config.precision == "mixed"
        return cls(
            param=jnp.dtype(config.param_dtype),
            compute=jnp.dtype(config.compute_dtype),
            precision=jax.lax.Precision.DEFAULT if mixed else jax.lax.Precision(config.precision),
            factors="bfloat16" if mixed else "as_they_are",
        )

    @property
    def statistics(self) -> jnp.dtype:
        return jnp.dtype("float64" if self.compute == "float64" else "float32")

    def einsum(self, spec: str, left: Float[Array, "..."], right: Float[Array, "..."], *, result: DTypeLike) -> Array:
        """``jnp.einsum`` of both operands cast to ``compute``, in the model's precision, accumulated into ``result``.

        "..." may begin the first factor and the result alone, as in ``mixed_einsum``.
        """
        product = _EINSUMS[self.factors]
        return product(spec, left.astype(self.compute), right.astype(self.compute), self.precision, result)

    def rounded(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """A factor as a product reads it, but in ``statistics``."""
        x = x.astype(self.statistics)
        if "bfloat16" in (self.compute, self.factors):
            # Not two conversions: XLA may drop these, and the rounding with them.
            return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        return x


def _einsum(spec: str, left: Array, right: Array, precision: jax.lax.Precision, result: DTypeLike) -> Array:
    product = functools.partial(jnp.einsum, precision=precision, preferred_element_type=result)
    return _by_matrices(product, spec, left, right)


def _mixed_einsum(spec: str, left: Array, right: Array, precision: jax.lax.Precision, result: DTypeLike) -> Array:
    del precision, result  # those of `mixed_einsum`
    return mixed_einsum(spec, left, right)


_EINSUMS = {"as_they_are": _einsum, "bfloat16": _mixed_einsum}


def mixed_einsum(spec: str, left: Float[Array, "..."], right: Float[Array, "..."]) -> Float[Array, "..."]:
    """``jnp.einsum`` of two float32 arrays as a TPU multiplies them by default, on every backend, and so its gradients.

    Both factors are rounded to bfloat16 (to nearest, ties to even); their products, which are exact, are summed in
    float32, and the result is float32. The gradient by each factor is such a product too, of the rounded gradient of the
    result and the other factor. ``parity.emulate(f, "tpu_default")`` does the same to any function.

    Args:
        spec: of two factors, each of whose axes stands in the other or in the result. "..." may begin the first and
            the result, and stands for any number of axes.
        left, right: the factors.

    Raises:
        ValueError: factors that are not float32.
    """
    if not left.dtype == right.dtype == "float32":
        raise ValueError(f"mixed products round float32 factors to bfloat16, got {left.dtype} and {right.dtype}.")
    product: Any = _mixed
    return _by_matrices(product, spec, left, right)


def _by_matrices(product: Callable[[str, Array, Array], Array], spec: str, left: Array, right: Array) -> Array:
    """``product(spec, left, right)`` with one axis, Z, for all that "..." stands for: a product of two matrices.

    A gradient by the weights sums over those axes. Over two of them XLA:CPU transposes its factors first, element by
    element, and computes anew in every element whatever it can of how the factor came about: of the gradient of a residual
    stream, the sum of all layers above. It was 29 % of the time of a train step (GPT of width 256, 6 layers, float32).
    """
    if "..." not in spec:
        return product(spec, left, right)
    axes = left.ndim - len(spec.partition(",")[0].removeprefix("..."))
    flat = product(spec.replace("...", "Z"), left.reshape(-1, *left.shape[axes:]), right)
    return flat.reshape(*left.shape[:axes], *flat.shape[1:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mixed(spec: str, left: Array, right: Array) -> Array:
    return _mixed_forward(spec, left, right)[0]


def _mixed_forward(spec: str, left: Array, right: Array) -> tuple[Array, Any]:
    (first, second), result = _axes(spec)
    left, right = left.astype(jnp.bfloat16), right.astype(jnp.bfloat16)
    return _product(result, (first, left), (second, right)), (left, right)


def _mixed_backward(spec: str, factors: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    (first, second), result = _axes(spec)
    left, right, by_result = (first, factors[0]), (second, factors[1]), (result, gradient.astype(jnp.bfloat16))
    return _product(first, by_result, right), _product(second, left, by_result)


_mixed.defvjp(_mixed_forward, _mixed_backward)


def _axes(spec: str) -> tuple[list[str], str]:
    factors, _, result = spec.partition("->")
    return factors.split(","), result


def _product(result: str, left: tuple[str, Array], right: tuple[str, Array]) -> Array:
    """The product of two bfloat16 factors, each with its axes, in float32."""
    rows = next(axis for axis in result if (axis in left[0]) != (axis in right[0]))
    if rows in right[0]:  # the rows of the result are those of the first factor, so that it needs no transposition
        left, right = right, left
    (one, x), (other, y) = left, right
    batch = [axis for axis in result if axis in one and axis in other]
    summed = [axis for axis in one if axis in other and axis not in result]
    if one[-1] not in summed:
        order = batch + [axis for axis in one if axis not in other] + summed
        x, one = row_major(x.transpose([one.index(axis) for axis in order])), "".join(order)
    places = lambda axes: ([one.index(axis) for axis in axes], [other.index(axis) for axis in axes])  # noqa: E731
    product = jax.lax.dot_general(x, y, (places(summed), places(batch)), preferred_element_type=jnp.float32)
    found = batch + [axis for factor in (one, other) for axis in factor if axis not in batch + summed]
    # Not to be folded with a transposition that follows either: the left factor would be the transposed one then.
    return row_major(product.transpose([found.index(axis) for axis in result]))


def row_major(x: Array) -> Array:
    """``x``, which on a CPU is laid out in memory as it is indexed.

    XLA for CPUs multiplies bfloat16 matrices at full speed only if the rows of the left one lie in memory one after
    another, and several at a time not at all otherwise; it folds a transposition into the product if nothing forbids it.
    (With jax 0.10 and one `jit` over several simulated CPU devices, what this is given is gathered on all of them.)
    """

    def lay_out(x: Array) -> Array:
        return with_layout_constraint(x, Layout(tuple(range(x.ndim))))

    return jax.lax.platform_dependent(x, cpu=lay_out, default=lambda x: x)
