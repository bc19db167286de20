"""The kernels' attention is the plain products': the TPU's interpreted on a CPU, and what other platforms get."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pallas_tpu

from flax_transformer import flash_attention as flash
from flax_transformer.attention import attention_weights
from flax_transformer.config import DecoderOnlyConfig
from flax_transformer.masks import causal_mask
from flax_transformer.numerics import Numerics

B, T, S, N, H = 2, 256, 128, 3, 8
NUMERICS = Numerics.of(DecoderOnlyConfig.small(vocab_size=3))
LENGTHS = np.array([[S], [77]])


def draw(*shape: int, seed: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def by_products(query, key, value, mask):
    weights = attention_weights(query, key, mask=mask, mask_fill="dtype_min", numerics=NUMERICS)
    return jnp.einsum("BNTS,BSNH->BTNH", weights, value, precision="highest")


def case(pattern: flash.Pattern):
    length = T if pattern == "causal" else S
    arrays = [draw(B, T, N, H, seed=0), draw(B, length, N, H, seed=1), draw(B, length, N, H, seed=2)]
    mask = causal_mask(T) if pattern == "causal" else jnp.asarray(np.arange(S) < LENGTHS)[:, None, None, :]
    return arrays, mask


def compare(attend, arrays, mask) -> None:
    gradient = draw(B, T, N, H, seed=3)
    expected, pull = jax.vjp(functools.partial(by_products, mask=mask), *arrays)
    found, pull_found = jax.vjp(attend, *arrays)
    for one, other in zip((expected, *pull(gradient)), (found, *pull_found(gradient)), strict=True):
        np.testing.assert_allclose(other, one, rtol=0, atol=2e-6 * float(jnp.abs(one).max()))


@pytest.mark.parametrize("pattern", ["causal", "keys"])
def test_the_kernel_of_tpus_computes_the_plain_products_and_their_gradients(pattern):
    arrays, mask = case(pattern)
    keys = None if pattern == "causal" else mask[:, 0, 0]
    with pallas_tpu.force_tpu_interpret_mode():
        compare(lambda q, k, v: flash._on_tpu(pattern == "causal", q, k, v, keys), arrays, mask)


@pytest.mark.parametrize("pattern", ["causal", "keys"])
def test_a_platform_without_a_kernel_computes_the_same(pattern):
    arrays, mask = case(pattern)
    compare(jax.jit(functools.partial(flash.flash_attention, mask=mask, pattern=pattern)), arrays, mask)


def test_what_a_kernel_cannot_do_is_named():
    query = jnp.zeros((B, T, N, H), jnp.bfloat16)

    def reason(query=query, key=query, *, pattern: flash.Pattern = "causal", drops=False, precision="default"):
        return flash.obstacle(query, key, pattern=pattern, drops=drops, precision=jax.lax.Precision(precision))

    assert reason() is None
    assert "attention_dropout to 0" in (reason(drops=True) or "")
    assert "neither" in (reason(pattern="any") or "")
    assert "multiple of 128 long, got 256 and 100" in (reason(key=query[:, :100]) or "")
    wide = query.astype(jnp.float32)
    assert "precision highest asks for more" in (reason(wide, wide, precision="highest") or "")
    assert reason(wide, wide) is None
