"""Operations are counted from what a program is written as, loops and devices included."""

import jax
import jax.numpy as jnp
import pytest

from flax_transformer.chips import chip
from flax_transformer.flops import Flops, count_flops

M, K = 3, 5
X = jax.ShapeDtypeStruct((M, K), jnp.float32)
W = jax.ShapeDtypeStruct((K, K), jnp.float32)
ONE = 2 * M * K * K


def product(x, w, precision="default"):
    return jnp.matmul(x, w, precision=precision)


def test_a_product_is_two_operations_for_each_of_its_terms():
    assert count_flops(product, X, W) == Flops(ONE, ONE)
    batched = count_flops(lambda x, w: jnp.einsum("bij,bjk->bik", x, w), *(X.update(shape=(7, K, K)),) * 2)
    assert batched.useful == 7 * 2 * K**3


@pytest.mark.parametrize(("precision", "passes"), [("default", 1), ("high", 3), ("highest", 6)])
def test_float32_takes_as_many_passes_as_its_precision_says_and_bfloat16_one(precision, passes):
    assert count_flops(lambda x, w: product(x, w, precision), X, W) == Flops(ONE, passes * ONE)
    narrow = X.update(dtype=jnp.bfloat16), W.update(dtype=jnp.bfloat16)
    assert count_flops(lambda x, w: product(x, w, precision), *narrow) == Flops(ONE, ONE)


def test_the_body_of_a_loop_counts_as_often_as_it_runs():
    def loop(x, w):
        return jax.lax.scan(lambda carry, _: (product(carry, w), None), x, length=11)[0]

    assert count_flops(jax.jit(loop), X, W).useful == 11 * ONE


def test_what_is_computed_again_in_the_backward_pass_counts_again():
    def loss(x, w, remember):
        layer = (lambda x: jnp.tanh(product(x, w))) if remember else jax.checkpoint(lambda x: jnp.tanh(product(x, w)))
        return layer(x).sum()

    counts = [
        count_flops(jax.grad(lambda x, w, r=r: loss(x, w, r), argnums=(0, 1)), X, W).useful for r in (True, False)
    ]
    assert counts == [3 * ONE, 4 * ONE]


def test_the_dearest_branch_counts():
    def either(x, w):
        return jax.lax.cond(x[0, 0] > 0, lambda: product(x, w), lambda: x + 0.0)

    assert count_flops(either, X, W).useful == ONE


def test_a_program_of_one_device_counts_for_each_of_them():
    devices = jax.device_count()
    stacked = (X.update(shape=(devices, M, K)), W.update(shape=(devices, K, K)))
    assert count_flops(jax.pmap(product), *stacked).useful == devices * ONE


def test_the_peak_of_a_chip_is_found_by_the_name_that_jax_gives_it():
    lite, h100 = chip("TPU v5 lite"), chip("NVIDIA H100 80GB HBM3")
    assert lite is not None
    assert h100 is not None
    assert (lite.flops, h100.flops) == (197e12, 989e12)
    assert chip("cpu") is None
    assert chip("TPU v5 light") is None
