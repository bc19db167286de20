"""How many floating point operations a program takes, counted from what it is written as, before any compiler sees it.

Only products of matrices count, as in all figures of model FLOPs utilisation (Chowdhery et al. 2022, appendix B): a
product of (m, k) and (k, n) is 2 m k n operations. A compiler's own count (`compiled.cost_analysis()`) takes the body of
a loop once; here it counts as often as it runs.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.extend import core


class Flops(NamedTuple):
    """Operations of a program, all devices together.

    Attributes:
        useful: 2 m k n for each product.
        passes: the same, times how often the bfloat16 multipliers of a TPU run for it: once for bfloat16 operands and for
            float32 ones in `default` precision, 3 times in `high`, 6 times in `highest`. `passes` / peak is the least time.
    """

    useful: int
    passes: int

    def __add__(self, other: Self) -> Self:  # type: ignore[override]  # of tuples it would be one behind the other
        return type(self)(self.useful + other.useful, self.passes + other.passes)

    def times(self, count: int) -> "Flops":
        return Flops(self.useful * count, self.passes * count)


def count_flops(function: Callable[..., Any], *arguments: Any) -> Flops:
    """The operations of `function(*arguments)`, which is traced and not run.

    Args:
        arguments: pytrees of arrays or of `jax.ShapeDtypeStruct`s.

    A loop without a length that is known counts once, the dearest branch of a `cond` counts, and a kernel counts as if
    no block of it were left out.
    """
    return _of_jaxpr(jax.make_jaxpr(function)(*arguments).jaxpr)


def _of_jaxpr(jaxpr: Any) -> Flops:
    return sum((_of_equation(equation) for equation in jaxpr.eqns), start=Flops(0, 0))


def _of_equation(equation: Any) -> Flops:
    name, parameters = equation.primitive.name, equation.params
    if name == "dot_general":
        return _of_product(equation)
    inner = [_of_jaxpr(jaxpr) for jaxpr in _jaxprs_in(parameters)]
    if not inner:
        return Flops(0, 0)
    if name == "cond":
        return max(inner, key=lambda flops: flops.passes)
    total = sum(inner, start=Flops(0, 0))
    if name == "scan":
        return total.times(parameters["length"])
    if name == "shard_map":  # what stands inside is the program of one device
        return total.times(math.prod(parameters["mesh"].shape[axis] for axis in parameters["newly_manual_axes"]))
    if name == "pallas_call":
        return total.times(math.prod(parameters["grid_mapping"].grid))
    return total


def _of_product(equation: Any) -> Flops:
    left, right = (variable.aval for variable in equation.invars)
    ((contracted, _), _) = equation.params["dimension_numbers"]
    size = math.prod(left.shape[axis] for axis in contracted)
    useful = 2 * math.prod(equation.outvars[0].aval.shape) * size
    wide = all(operand.dtype in (jnp.float32, jnp.float64) for operand in (left, right))
    return Flops(useful, useful * (_PASSES[_precision(equation)] if wide else 1))


_PASSES = {jax.lax.Precision.DEFAULT: 1, jax.lax.Precision.HIGH: 3, jax.lax.Precision.HIGHEST: 6}


def _precision(equation: Any) -> jax.lax.Precision:
    precision = equation.params["precision"]
    first = precision[0] if isinstance(precision, tuple) else precision
    return first if isinstance(first, jax.lax.Precision) else jax.lax.Precision.DEFAULT


def _jaxprs_in(parameters: dict[str, Any]) -> list[Any]:
    """Every program that stands in the parameters of an equation: bodies of loops, branches, calls."""
    found = []
    for value in parameters.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            if isinstance(part, core.ClosedJaxpr):
                found.append(part.jaxpr)
            elif isinstance(part, core.Jaxpr):
                found.append(part)
    return found
