"""The emulation: exact rounding, errors where theory puts them, and products found wherever a program hides them."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec

from flax_transformer.parity.emulation import MODES, bfloat16_parts, emulate, round_to_bfloat16, round_to_tf32

X = np.random.default_rng(0).standard_normal((5, 7), np.float32)
W = np.random.default_rng(1).standard_normal((7, 7), np.float32) / 3


def every_kind_of_float32() -> np.ndarray:
    """Random bit patterns: all magnitudes, subnormal numbers, infinities and NaN among them; and every tie of two kinds."""
    rng = np.random.default_rng(2)
    bits = rng.integers(0, 2**32, 2**16, np.uint32)
    ties = [(bits[: 2**13] & np.uint32(2**32 - 2**low)) | np.uint32(2 ** (low - 1)) for low in (16, 13)]
    special = np.asarray([0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 3.4028235e38, -3.4028235e38, 1e-45], np.float32)
    all_ones = np.asarray(
        [0x7FFFF000, 0xFFFFF000, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32
    )  # NaN that an addition carries over
    subnormal = rng.integers(0, 2**23, 2**10, np.uint32)
    return np.concatenate(
        [bits, *ties, all_ones, subnormal, subnormal | np.uint32(2**31), special.view(np.uint32)]
    ).view(np.float32)


def assert_same_numbers(actual, expected) -> None:
    actual, expected = np.asarray(actual), np.asarray(expected)
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(actual), nan)
    np.testing.assert_array_equal(actual[~nan].view(np.uint32), expected[~nan].view(np.uint32))


def nearest_tf32(x: np.ndarray) -> np.ndarray:
    """In exact arithmetic: the magnitude in units of the last bit that stays, plus a half, cut off."""
    with np.errstate(invalid="ignore", over="ignore"):
        magnitude = np.abs(x.astype(np.float64))
        _, exponent = np.frexp(magnitude)
        unit = np.ldexp(1.0, np.maximum(exponent - 11, -126 - 10))
        return np.copysign(np.where(np.isfinite(x), np.floor(magnitude / unit + 0.5) * unit, x), x).astype(np.float32)


@pytest.mark.parametrize("compile_", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_rounding_to_bfloat16_is_that_of_ml_dtypes_to_the_bit(compile_):
    x = every_kind_of_float32()
    with np.errstate(invalid="ignore", over="ignore"):
        expected = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert_same_numbers(compile_(round_to_bfloat16)(x), expected)


@pytest.mark.parametrize("compile_", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_rounding_to_tf32_is_to_nearest_and_away_from_zero_at_ties(compile_):
    x = every_kind_of_float32()
    assert_same_numbers(compile_(round_to_tf32)(x), nearest_tf32(x))
    ties = jnp.asarray([1 + 2**-11, -1 - 2**-11, 1 + 3 * 2**-11], jnp.float32)
    np.testing.assert_array_equal(round_to_tf32(ties), np.asarray([1 + 2**-10, -1 - 2**-10, 1 + 2**-9], np.float32))


def test_three_bfloat16_parts_make_up_every_ordinary_float32():
    x = every_kind_of_float32()
    x = x[np.isfinite(x) & (np.abs(x) > 2.0**-100) & (np.abs(x) < 2.0**127)]
    parts = np.asarray(jax.jit(functools.partial(bfloat16_parts, count=3))(x), np.float64)
    np.testing.assert_array_equal(parts.sum(axis=0), x)
    assert_same_numbers(parts.astype(ml_dtypes.bfloat16).astype(np.float32), parts.astype(np.float32))


# The rms of a rounding, relative to the number rounded, is u sqrt(E[1/m^2] / 3), with m the significand in [1, 2) and u the
# unit roundoff: 0.41 u. Two factors: 0.59 u, in a random product of any length, since its terms' errors are independent.
# One part more takes another 2^-8 off. What `tpu_high` leaves out, l l' and the rest of the split, is 0.3 u^2 = 2^-17.7.
BANDS = {
    "tpu_default": (-8.9, -8.6),
    "gpu_tf32": (-11.9, -11.6),
    "tpu_high": (-18.0, -17.4),
    "tpu_highest": (-24.5, -21.5),  # float32's own, by the order of the sum
}


@pytest.mark.parametrize("mode", MODES)
def test_the_error_of_a_random_product_is_what_theory_predicts(mode):
    rng = np.random.default_rng(3)
    left, right = (rng.standard_normal(shape, np.float32) for shape in [(111, 130), (130, 97)])
    truth = left.astype(np.float64) @ right.astype(np.float64)
    error = np.asarray(jax.jit(emulate(jnp.matmul, mode))(left, right)) - truth
    low, high = BANDS[mode]
    assert low < np.log2(np.sqrt(np.mean(error**2) / np.mean(truth**2))) < high


@pytest.mark.parametrize("mode", MODES)
def test_a_product_of_numbers_that_need_no_rounding_is_exact(mode):
    left, right = (np.random.default_rng(seed).integers(-99, 99, shape) for seed, shape in [(4, X.shape), (5, W.shape)])
    product = emulate(jnp.matmul, mode)(left.astype(np.float32), right.astype(np.float32))
    np.testing.assert_array_equal(product, left @ right)


@pytest.mark.parametrize("mode", MODES)
def test_infinity_and_nan_go_where_float32_sends_them(mode):
    x = X.copy()
    x[0, 0], x[1, 1], x[2, 2], x[3, 3] = np.inf, -np.inf, np.nan, 3e38
    with np.errstate(invalid="ignore", over="ignore"):
        expected = x @ W
    actual = np.asarray(emulate(jnp.matmul, mode)(x, W))
    for kind in (np.isnan, np.isposinf, np.isneginf):
        np.testing.assert_array_equal(kind(actual), kind(expected))


# One product, and with it the two of its backward pass, rounded by hand.
@jax.custom_vjp
def rounded(x, w):
    return jnp.matmul(round_to_bfloat16(x), round_to_bfloat16(w), precision="highest")


def rounded_forward(x, w):
    return rounded(x, w), (x, w)


def rounded_backward(kept, g):
    x, w = kept
    return rounded(g, w.T), rounded(x.T, g)


rounded.defvjp(rounded_forward, rounded_backward)


def custom_jvp(multiply, x, w):
    @jax.custom_jvp
    def f(x):
        return multiply(x, w)

    f.defjvp(lambda primals, tangents: (f(*primals), multiply(*tangents, w)))
    return f(x)


def custom_vjp(multiply, x, w):
    @jax.custom_vjp
    def f(x, w):
        return multiply(x, w)

    # A wrong derivative on purpose: it must be this one that is computed.
    f.defvjp(lambda x, w: (f(x, w), w), lambda w, g: (multiply(g, w), w))
    return f(x, w)


def scan(multiply, x, w):
    return lax.scan(lambda x, row: (jnp.tanh(multiply(x, w + row)), x.sum()), x, W[:3, None])


def while_loop(multiply, x, w):
    # Products in the condition too.
    def more(state):
        return (state[0] < 3) & (jnp.abs(multiply(state[1], w)).sum() < 1e6)

    return lax.while_loop(more, lambda state: (state[0] + 1, jnp.tanh(multiply(state[1], w))), (0, x))


def shard_map(multiply, x, w, *, check_vma=True):
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("devices",))
    replicated, split = PartitionSpec(), PartitionSpec("devices")

    def part(x, w):
        return multiply(x, w), lax.psum(multiply(x, w).sum(), "devices")

    sharded = jax.shard_map(
        part, mesh=mesh, in_specs=(split, replicated), out_specs=(split, replicated), check_vma=check_vma
    )
    return sharded(x, w)


def pallas(multiply, x, w):
    def kernel(x_ref, w_ref, out_ref):
        out_ref[...] = multiply(x_ref[...], w_ref[...])

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x, w)


def linear_solve(multiply, x, w):
    """Its products hide in several programs of one primitive. The matrix is symmetric, diagonally dominant: 3 steps do."""
    matrix = (w + w.T) / 10

    def solve(matvec, b):
        return b - matvec(b - matvec(b))

    return lax.custom_linear_solve(lambda v: v + multiply(v[None], matrix)[0], x[0], solve, symmetric=True)


def gradient(f):
    """The value and the derivatives of a scalar made of ``f``'s outputs, whose weights no rule maps to themselves."""

    def gradient_of(multiply, x, w):
        def scalar(x, w):
            return sum(jnp.sum(jnp.cos(leaf) * leaf) for leaf in jax.tree.leaves(f(multiply, x, w)))

        return jax.value_and_grad(scalar, argnums=(0, 1))(x, w)

    return gradient_of


def plain(multiply, x, w):
    return jnp.tanh(multiply(jnp.tanh(multiply(x, w)), w))


PROGRAMS = {
    "plain": plain,
    "jit": lambda multiply, x, w: jax.jit(lambda x: jax.jit(multiply)(jax.jit(multiply)(x, w), w))(x),
    "vmap": lambda multiply, x, w: jax.vmap(lambda row: multiply(row[None], w)[0])(x),
    "scan": scan,
    "while": while_loop,
    "fori": lambda multiply, x, w: lax.fori_loop(0, 3, lambda i, x: jnp.tanh(multiply(x, w)), x),
    "cond": lambda multiply, x, w: lax.cond(x[0, 0] > 0, lambda: multiply(x, w), lambda: x),
    "switch": lambda multiply, x, w: lax.switch(2, [lambda: x, lambda: x + x, lambda: multiply(x, w)]),
    "map": lambda multiply, x, w: lax.map(lambda row: multiply(row[None], w), x),
    "checkpoint": lambda multiply, x, w: jax.checkpoint(functools.partial(plain, multiply))(x, w),
    "custom_jvp": custom_jvp,
    "custom_vjp": custom_vjp,
    "shard_map": shard_map,
    "pallas": pallas,
    "linear_solve": linear_solve,
}
DIFFERENTIATED = ["plain", "jit", "vmap", "scan", "cond", "checkpoint", "custom_vjp"]
PROGRAMS |= {f"gradient of {name}": gradient(PROGRAMS[name]) for name in DIFFERENTIATED}
# The derivative written by hand above does not say over which axes it varies, as the check would have it.
PROGRAMS["gradient of shard_map"] = gradient(functools.partial(shard_map, check_vma=False))


@pytest.mark.parametrize("name", PROGRAMS)
def test_products_are_found_wherever_they_stand(name):
    program = PROGRAMS[name]
    expected = jax.jit(functools.partial(program, rounded))(X, W)
    actual = jax.jit(emulate(functools.partial(program, jnp.matmul), "tpu_default"))(X, W)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=3e-6, atol=1e-6)
    exact = jax.jit(functools.partial(program, jnp.matmul))(X, W)
    differences = jax.tree.map(lambda a, b: np.max(np.abs(np.asarray(a, np.float64) - np.asarray(b))), actual, exact)
    assert max(jax.tree.leaves(differences)) > 3e-4


def test_convolutions_and_ragged_products_are_products():
    images = np.random.default_rng(6).standard_normal((3, 7, 11), np.float32)
    kernel = np.random.default_rng(7).standard_normal((5, 7, 3), np.float32)
    groups = jnp.asarray([2, 3], jnp.int32)

    def convolution(x, w, *, round_=lambda x: x):
        return lax.conv_general_dilated(round_(x), round_(w), (1,), "SAME", precision="highest")

    def ragged(x, w, *, round_=lambda x: x):
        return lax.ragged_dot(round_(x), round_(w), groups, precision="highest")

    for product, operands in [(convolution, (images, kernel)), (ragged, (X, np.stack([W, W.T])))]:
        expected = product(*operands, round_=round_to_bfloat16)
        np.testing.assert_allclose(emulate(product, "tpu_default")(*operands), expected, rtol=1e-5, atol=1e-6)
        assert np.max(np.abs(product(*operands) - expected)) > 1e-3


@pytest.mark.parametrize("compile_", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_program_without_products_is_unchanged_bit_for_bit(compile_):
    def program(x, *, shift):
        rows = lax.scan(lambda total, row: (total + row, jnp.exp(total)), x[0], x)[1]
        return {
            "softmax": jax.nn.softmax(rows),
            "gradient": jax.grad(lambda y: jnp.sin(y * shift).sum())(x),
            "none": None,
        }

    expected, actual = (compile_(f)(X, shift=np.float32(3)) for f in (program, emulate(program, "tpu_default")))
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize("dtype", ["float64", "int32", "bfloat16", "float16", "complex64"])
@pytest.mark.parametrize("mode", MODES)
def test_products_of_other_types_are_untouched(float64, dtype, mode):
    x, w = (100 * jnp.asarray(array) for array in (X, W))

    def program(x, w):
        return jnp.matmul(x.astype(dtype), w.astype(dtype))

    assert str(jax.make_jaxpr(emulate(program, mode))(x, w)) == str(jax.make_jaxpr(program)(x, w))


def test_a_float32_product_into_another_type_keeps_that_type():
    product = functools.partial(jnp.matmul, preferred_element_type=jnp.bfloat16)
    assert emulate(product, "tpu_high")(X, W).dtype == jnp.bfloat16


def test_the_precision_that_a_program_asks_for_does_not_matter():
    none, highest = (
        emulate(functools.partial(jnp.matmul, precision=p), "tpu_default")(X, W) for p in (None, "highest")
    )
    np.testing.assert_array_equal(none, highest)


def test_a_program_called_twice_is_rewritten_once():
    inner = jax.jit(jnp.matmul)
    program = jax.make_jaxpr(emulate(lambda x, w: inner(inner(x, w), w), "gpu_tf32"))(X, W)
    first, second = (equation.params["jaxpr"] for equation in program.eqns)
    assert first is second


def test_an_emulated_function_works_inside_of_other_transformations():
    product = emulate(jnp.matmul, "tpu_default")
    expected = product(X, W)
    np.testing.assert_allclose(jax.vmap(lambda row: product(row[None], W)[0])(X), expected, rtol=1e-6, atol=1e-6)
    # What is closed over may be a tracer.
    scaled = jax.jit(lambda w: emulate(lambda x: jnp.matmul(x, w), "tpu_default")(X))(W)
    np.testing.assert_allclose(scaled, expected, rtol=1e-6, atol=1e-6)


def test_the_derivative_of_an_emulation_is_refused_for_its_products_would_escape():
    with pytest.raises(ValueError, match=r"emulate\(jax.value_and_grad\(f\), mode\) instead of"):
        jax.grad(lambda x: emulate(jnp.matmul, "gpu_tf32")(x, W).sum())(X)


def test_an_unknown_mode_and_a_program_that_cannot_be_seen_are_refused():
    with pytest.raises(ValueError, match=r"mode must be one of 'tpu_default', .*, got 'tpu'"):
        emulate(jnp.matmul, "tpu")  # type: ignore[arg-type]
    exported = jax.export.export(jax.jit(jnp.matmul))(X, W)
    with pytest.raises(ValueError, match="cannot look into 'call_exported'"):
        emulate(exported.call, "tpu_default")(X, W)
