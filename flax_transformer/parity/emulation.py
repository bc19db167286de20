"""Other hardware's matrix products on this machine: what a TPU or a GPU makes of a float32 product by default.

A TPU multiplies float32 matrices in bfloat16 and a GPU in TF32 unless told otherwise. ``emulate`` gives a function the
products of such hardware, so that one learns before renting it how far they move logits, losses and gradients::

    exact = jax.value_and_grad(loss)
    on_a_tpu = jax.jit(emulate(exact, "tpu_default"))

It is written on jaxprs, JAX's own form of a program, so it holds for any function of JAX and is no part of any model.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

Mode = Literal["tpu_default", "tpu_high", "tpu_highest", "gpu_tf32"]
MODES: tuple[Mode, ...] = get_args(Mode)

# The primitives that multiply matrices. Each takes the two factors first, and `precision` and `preferred_element_type`.
PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")
# Primitives whose program is not a jaxpr, so that nobody can see whether it multiplies.
OPAQUE = ("call_exported",)

_Function = TypeVar("_Function", bound=Callable[..., Any])


def emulate(function: _Function, mode: Mode) -> _Function:
    """``function`` with every float32 matrix product and convolution computed as other hardware does by default.

    ==============  ====================================================================================================
    ``tpu_default``  both factors rounded to bfloat16 (``Precision.DEFAULT`` of a TPU)
    ``tpu_high``     bfloat16_3x: x = h + l in bfloat16, h h' + (h l' + l h') (``Precision.HIGH`` of a TPU)
    ``tpu_highest``  bfloat16_6x: x = h + m + l, and l l', l m', m l' left out (``Precision.HIGHEST`` of a TPU)
    ``gpu_tf32``     both factors rounded to TF32, 10 bits after the point (``Precision.DEFAULT`` of an NVIDIA GPU)
    ==============  ====================================================================================================

    Products are replaced whatever ``precision`` they ask for: this shows what the hardware does to code that asks for
    none. Products of other types (float64, integers, bfloat16, complex) stay as they are, and so does all else. A program
    without float32 products is unchanged, bit for bit.

    What is exact: the rounding of the factors, to the bit, and each product of two rounded numbers, which has 16
    (bfloat16) or 22 (TF32) significant bits and fits into float32's 24. What is not: the order of the sum over them.
    Hardware has another, and tensor cores also truncate where they align the terms of a few (Fasi et al. 2021,
    doi:10.7717/peerj-cs.330). That is noise of float32's size, far below the rounding of the factors except for
    ``tpu_highest``, where it is all there is. Hardware may also flush subnormal numbers to zero. Matrix decompositions
    and solvers are left alone.

    *Rounding to bfloat16*: to nearest, ties to even, as every conversion in JAX does; in the splits too. How a TPU splits
    is not published. XLA for GPUs truncates the larger parts (``dot_algorithm_rewriter.cc``), which costs ``tpu_high`` a
    bit; its order of adding the partial products, the smallest first, is ours.

    *Rounding to TF32*: to nearest, ties away from zero, as PTX's ``cvt.rna.tf32.f32`` does. A tensor core by itself reads
    only the upper 19 bits, that is it truncates; but a product behind this conversion equals that of cuBLAS bit for
    bit (github.com/triton-lang/triton/issues/4574), and XLA's on an A100 (github.com/jax-ml/jax/issues/23182). Kernels
    that omit it, as Triton's and Pallas' own products do there, have twice the error, and a biased one.

    Args:
        function: of pytrees of arrays, as for ``jax.jit``. It may use ``jit``, ``grad``, ``vmap``, ``scan``, ``while_loop``,
            ``cond``, ``checkpoint``, custom derivatives and ``shard_map``; its products are found wherever they stand.
        mode: see above.

    Returns:
        A function of the same arguments. It traces ``function`` at each call: wrap it in ``jax.jit`` to call it often.

    Raises:
        ValueError: an unknown ``mode``; a program that cannot be looked into (``jax.export``); and derivatives of the
            result, whose products would escape: emulate the derivative, ``emulate(jax.grad(f), mode)``.

    Source: the splits are those of Henry, Tang and Heinecke 2019 (arXiv:1904.06376).
    """
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(map(repr, MODES))}, got {mode!r}.")

    @functools.wraps(function)
    def emulated(*args, **kwargs):
        program, shapes = jax.make_jaxpr(function, return_shape=True)(*args, **kwargs)
        results = core.jaxpr_as_fun(_Rewriting(mode).program(program))(*jax.tree.leaves((args, kwargs)))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return emulated  # type: ignore[return-value]


def products_in_sequence(function: Callable[..., Any], *args: Any) -> int:
    """The longest chain of float32 products in which each needs the result of the one before: what errors add up over.

    A ``scan`` counts as often as it runs; a ``while_loop``, whose number of steps is not known before, once. Where
    functions are nested, the longest chains of each are put together, so the count may be too large, never too small.

    Args:
        function, args: as for ``emulate``; arrays or ``jax.ShapeDtypeStruct``.
    """
    return _longest_chain(jax.make_jaxpr(function)(*args))


def _longest_chain(program: Any) -> int:
    lengths: dict[Any, int] = {}
    for equation in program.eqns:
        before = max((lengths.get(atom, 0) for atom in equation.invars if isinstance(atom, core.Var)), default=0)
        if _is_float32_product(equation):
            own = 1
        else:
            chains = [_longest_chain(inner) for inner in core.jaxprs_in_params(equation.params)]
            own = max(chains, default=0) * equation.params.get("length", 1)
        lengths.update(dict.fromkeys(equation.outvars, before + own))
    return max(lengths.values(), default=0)


def _is_float32_product(equation: Any) -> bool:
    factors = equation.invars[:2]
    return equation.primitive.name in PRODUCTS and all(factor.aval.dtype == "float32" for factor in factors)


# What follows becomes part of the programs of others. Inside of `shard_map` an array's type says whether it differs between
# devices, and constants or a nested `jit` would lose that: so there are neither.


def round_to_bfloat16(x: jax.Array) -> jax.Array:
    """The nearest bfloat16 numbers, ties to even, still stored as float32.

    Not two conversions: XLA may drop these (``xla_allow_excess_precision``), and the rounding with them.
    """
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def round_to_tf32(x: jax.Array) -> jax.Array:
    """The nearest numbers with 10 bits after the point, ties away from zero (``cvt.rna.tf32.f32``), stored as float32."""
    kept = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=10)  # ties to even
    with_half = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=11)
    bits, kept, with_half = (lax.bitcast_convert_type(number, jnp.uint32) for number in (x, kept, with_half))
    # A tie that lost magnitude: it needs one bit more than TF32 has. What it lost, added to it, makes the number above.
    cut = lax.eq(with_half, bits) & lax.lt(kept, bits)
    return lax.bitcast_convert_type(lax.select(cut, lax.add(bits, lax.sub(bits, kept)), kept), jnp.float32)


def bfloat16_parts(x: jax.Array, count: int) -> list[jax.Array]:
    """``count`` bfloat16 numbers whose sum is closest to x, the largest first; three of them make up any float32.

    (Those but the first of an infinity are NaN, and those of a number near 2^-126 too small for any format.)
    """
    parts = [round_to_bfloat16(x)]
    for _ in range(count - 1):
        x = lax.sub(x, parts[-1])
        parts.append(round_to_bfloat16(x))
    return parts


class _Term(NamedTuple):
    """A partial product: which part of the left factor times which of the right."""

    left: int
    right: int


# In the order in which they are added, the smallest first; the last is the product of the largest parts.
_TERMS: dict[Mode, list[_Term]] = {
    "tpu_default": [_Term(0, 0)],
    "tpu_high": [_Term(1, 0), _Term(0, 1), _Term(0, 0)],
    "tpu_highest": [_Term(1, 1), _Term(0, 2), _Term(2, 0), _Term(0, 1), _Term(1, 0), _Term(0, 0)],
    "gpu_tf32": [_Term(0, 0)],
}


def _parts(x: jax.Array, mode: Mode) -> list[jax.Array]:
    if mode == "gpu_tf32":
        return [round_to_tf32(x)]
    return bfloat16_parts(x, 1 + max(term.left for term in _TERMS[mode]))


def _product(mode: Mode, multiply: Callable[[jax.Array, jax.Array], jax.Array], left: jax.Array, right: jax.Array):
    """The product of float32 factors as hardware computes it, by ``multiply``, which is exact for numbers of few bits."""
    lefts, rights = _parts(left, mode), _parts(right, mode)
    *small, largest = (multiply(lefts[term.left], rights[term.right]) for term in _TERMS[mode])
    if not small:
        return largest
    # Where the largest is infinite it decides: the small parts are NaN there, or 0, and 0 times infinity is NaN too.
    total = lax.add(functools.reduce(lax.add, small), largest)
    return lax.select(lax.is_finite(largest), total, largest)


class _Rewriting:
    """Programs with their products replaced; each is rewritten once, so what was shared stays shared."""

    def __init__(self, mode: Mode) -> None:
        self._mode: Mode = mode
        self._done: dict[int, Any] = {}

    def program(self, program: Any) -> Any:
        """``program`` (a jaxpr, closed or not) rewritten; itself if it multiplies nothing."""
        if id(program) not in self._done:
            # The original is kept with it: the id of an object that is gone is given to another.
            self._done[id(program)] = (program, self._rewritten(program))
        return self._done[id(program)][1]

    def _rewritten(self, program: Any) -> Any:
        if not isinstance(program, core.Jaxpr):  # before JAX 0.11 a closed jaxpr is a jaxpr in a box
            inside = self.program(program.jaxpr)
            return program if inside is program.jaxpr else program.replace(jaxpr=inside)
        equations = [self._equation(equation) for equation in program.eqns]
        unchanged = all(new is old for new, old in zip(equations, program.eqns, strict=True))
        return program if unchanged else program.replace(eqns=equations)

    def _equation(self, equation: core.JaxprEqn) -> core.JaxprEqn:
        name = equation.primitive.name
        if name in OPAQUE:
            raise ValueError(
                f"emulate replaces the products of a JAX program and cannot look into {name!r}; call the original "
                "function instead of the exported one."
            )
        if _is_float32_product(equation):
            return self._replaced(equation)
        params = {key: self._parameter(value) for key, value in equation.params.items()}
        if all(params[key] is value for key, value in equation.params.items()):
            return equation
        return equation.replace(params=params)

    def _parameter(self, value: Any) -> Any:
        """A parameter of a primitive with the programs in it rewritten: the body of a loop, the branches of a choice."""
        if isinstance(value, core.Jaxpr | core.ClosedJaxpr):
            return self.program(value)
        if isinstance(value, tuple | list):
            items = [self._parameter(item) for item in value]
            if all(new is old for new, old in zip(items, value, strict=True)):
                return value
            return type(value)(*items) if isinstance(value, tuple) and type(value) is not tuple else type(value)(items)
        return value

    def _replaced(self, equation: core.JaxprEqn) -> core.JaxprEqn:
        primitive, dtype = equation.primitive, _types(equation.outvars)[0].dtype
        highest = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
        params = {**equation.params, "precision": highest, "preferred_element_type": np.dtype("float32")}

        # Called as one function that has no derivative: rounding has none, or a wrong one.
        @jax.custom_jvp
        def product(left, right, *others):
            multiply = lambda a, b: primitive.bind(a, b, *others, **params)  # noqa: E731
            return lax.convert_element_type(_product(self._mode, multiply, left, right), dtype)

        product.defjvp(_refuse_derivatives)
        # Shapes and types alone: inside of `shard_map` an array has a type that means nothing outside of it.
        operands = (jax.ShapeDtypeStruct(operand.shape, operand.dtype) for operand in _types(equation.invars))
        (call,) = jax.make_jaxpr(product)(*operands).eqns
        return equation.replace(primitive=call.primitive, params=call.params)


def _types(atoms: list[Any]) -> list[Any]:
    return [atom.aval for atom in atoms]


def _refuse_derivatives(primals, tangents):
    raise ValueError(
        "the products of a backward pass would escape the emulation, so an emulated function has no derivatives; "
        "emulate the derivative: emulate(jax.value_and_grad(f), mode) instead of jax.value_and_grad(emulate(f, mode))."
    )
