"""Attention against loops over examples, heads and positions in NumPy, masks and fully masked rows included."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_transformer.attention import MultiHeadAttention, attention_weights
from flax_transformer.config import DecoderOnlyConfig
from flax_transformer.dropout import DropoutSource
from flax_transformer.flops import count_flops
from flax_transformer.masks import causal_mask
from flax_transformer.numerics import Numerics

B, T, S, N, H = 2, 3, 5, 4, 6  # axis letters of config.py
D = N * H


def config_of(**options) -> DecoderOnlyConfig:
    sizes = dict(vocab_size=11, d_model=D, d_ff=20, num_heads=N, num_layers=1, max_length=17)
    return DecoderOnlyConfig(**{**sizes, **options})


def double(**options) -> DecoderOnlyConfig:
    return config_of(param_dtype="float64", compute_dtype="float64", **options)


def random_heads(length: int, *, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((B, length, N, H))


def random_mask(*shape: int) -> np.ndarray:
    """Random, with something to attend to in every row."""
    mask = np.random.default_rng(3).random(shape) < 0.5
    mask[..., 1] = True
    return mask


def weights_by_hand(query, key, mask) -> np.ndarray:
    """softmax over the keys that a query may attend to, 0 elsewhere."""
    allowed = np.broadcast_to(mask, (B, 1, T, S))
    weights = np.zeros((B, N, T, S))
    for b, n, t in np.ndindex(B, N, T):
        keys = [s for s in range(S) if allowed[b, 0, t, s]]
        scores = [sum(query[b, t, n, h] * key[b, s, n, h] for h in range(H)) / math.sqrt(H) for s in keys]
        total = sum(math.exp(score) for score in scores)
        for s, score in zip(keys, scores, strict=True):
            weights[b, n, t, s] = math.exp(score) / total
    return weights


def weights_of(query, key, mask, *, mask_fill: Any = "dtype_min", config=None) -> jax.Array:
    numerics = Numerics.of(config or double())
    mask = None if mask is None else jnp.asarray(mask)
    return attention_weights(jnp.asarray(query), jnp.asarray(key), mask=mask, mask_fill=mask_fill, numerics=numerics)


every_fill = pytest.mark.parametrize("mask_fill", ["minus_1e9", "minus_inf", "dtype_min"])


@every_fill
@pytest.mark.parametrize("shape", [(B, 1, T, S), (1, 1, T, S), (B, 1, 1, S), (1, 1, 1, S)])
def test_weights_are_the_softmax_over_what_may_be_attended_to(float64, shape, mask_fill):
    query, key, mask = random_heads(T, seed=1), random_heads(S, seed=2), random_mask(*shape)
    weights = weights_of(query, key, mask, mask_fill=mask_fill)
    np.testing.assert_allclose(weights, weights_by_hand(query, key, mask), rtol=1e-12, atol=0)
    assert weights.dtype == jnp.float64


def test_no_mask_masks_nothing(float64):
    query, key = random_heads(T, seed=1), random_heads(S, seed=2)
    np.testing.assert_allclose(weights_of(query, key, None), weights_by_hand(query, key, True), rtol=1e-12)


@pytest.mark.parametrize("compute", ["float32", "float64", "bfloat16"])
@every_fill
def test_a_fully_masked_row_is_uniform_or_nan_as_its_fill_says(float64, mask_fill, compute):
    config = config_of(compute_dtype=compute)
    query, key = (jnp.asarray(random_heads(length, seed=length), compute) for length in (T, S))
    mask = random_mask(B, 1, T, S)
    mask[1, 0, 2] = False
    weights = np.asarray(weights_of(query, key, mask, mask_fill=mask_fill, config=config))
    masked, others = weights[1, :, 2], np.delete(weights.reshape(B, N, T, S).transpose(0, 2, 1, 3).reshape(6, -1), 5, 0)
    if mask_fill == "minus_inf":
        assert np.isnan(masked).all()
    else:
        np.testing.assert_array_equal(masked, np.full((N, S), 1 / S, weights.dtype))
    assert np.isfinite(others).all()


@every_fill
def test_masked_scores_are_replaced_and_not_lowered(float64, mask_fill):
    query, key = random_heads(T, seed=1), random_heads(S, seed=2)
    key[:, 0] = 1e6 * query[:, 0]  # a score so high that a number added to it would not hide it
    mask = random_mask(B, 1, T, S)
    mask[..., 0] = False
    weights = weights_of(query, key, mask, mask_fill=mask_fill)
    assert not np.any(weights[..., 0])


@every_fill
def test_a_masked_key_has_no_gradient_and_spoils_no_other(float64, mask_fill):
    query, key, mask = random_heads(T, seed=1), random_heads(S, seed=2), random_mask(B, 1, 1, S)
    mask[:, :, :, 4] = False
    upstream = np.random.default_rng(4).standard_normal((B, N, T, S))
    gradient = jax.grad(lambda key: (weights_of(query, key, mask, mask_fill=mask_fill) * upstream).sum())(
        jnp.asarray(key)
    )
    assert np.isfinite(gradient).all()
    assert not np.any(gradient[:, 4])
    assert np.all(np.any(gradient != 0, axis=(0, 2, 3)) == mask.any(axis=(0, 1, 2)))


def test_bfloat16_weights_are_computed_in_float32():
    query, key = (jnp.asarray(random_heads(length, seed=length), jnp.bfloat16) for length in (T, S))
    weights = weights_of(query, key, None, config=config_of(compute_dtype="bfloat16"))
    assert weights.dtype == jnp.float32
    exact = weights_by_hand(np.asarray(query, np.float64), np.asarray(key, np.float64), True)
    np.testing.assert_allclose(weights, exact, rtol=1e-5)  # bfloat16 scores would be off by 4e-3


def randomised(module) -> Any:
    rng = np.random.default_rng(5)
    for _, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Param):
            node[...] = jnp.asarray(rng.standard_normal(node.shape) / 3, node.dtype)
    return module


def apply_by_hand(linear, x):
    bias = 0 if linear.bias is None else np.asarray(linear.bias[...])
    return x @ np.asarray(linear.kernel[...]) + bias


def attention_by_hand(attention, inputs, mask, keep: Any = 1.0):
    """Head n uses the n-th slice of H columns of each projection; heads are laid side by side again."""
    q, k, v = (
        apply_by_hand(linear, x).reshape(B, -1, N, H)
        for linear, x in zip((attention.query, attention.key, attention.value), inputs, strict=True)
    )
    weights = weights_by_hand(q, k, mask) * keep
    mixed = np.zeros((B, T, D))
    for n in range(N):
        mixed[..., n * H : (n + 1) * H] = weights[:, n] @ v[:, :, n]
    return apply_by_hand(attention.output, mixed)


def random_inputs() -> list[Any]:
    rng = np.random.default_rng(6)
    return [rng.standard_normal((B, length, D)) for length in (T, S, S)]


@pytest.mark.parametrize("projections", ["separate", "shared"])
@pytest.mark.parametrize("bias", ["with", "without"])
def test_multi_head_attention_is_its_formula(float64, projections, bias):
    attention = randomised(MultiHeadAttention(double(projection_bias=bias), projections=projections, rngs=nnx.Rngs(0)))
    inputs, mask = random_inputs(), random_mask(B, 1, T, S)
    expected = attention_by_hand(attention, inputs, mask)
    actual = attention(*map(jnp.asarray, inputs), jnp.asarray(mask))
    np.testing.assert_allclose(actual, expected, rtol=1e-11, atol=1e-12)
    assert actual.dtype == jnp.float64


def test_shared_projections_are_one_module_and_separate_ones_are_four():
    shared = MultiHeadAttention(config_of(), projections="shared", rngs=nnx.Rngs(0))
    assert shared.query is shared.key is shared.value is shared.output
    separate = MultiHeadAttention(config_of(), projections="separate", rngs=nnx.Rngs(0))
    kernels = [np.asarray(p.kernel[...]) for p in (separate.query, separate.key, separate.value, separate.output)]
    for i, j in np.ndindex(4, 4):
        assert np.array_equal(kernels[i], kernels[j]) == (i == j)


@pytest.mark.parametrize("length", [256, 259])
def test_causal_attention_in_parts_is_causal_attention(float64, length):
    """With as many operations fewer as 4 parts have, each looking back from its end."""
    attention = randomised(MultiHeadAttention(double(), projections="separate", rngs=nnx.Rngs(0)))
    structure, state = nnx.split(attention)
    x = jnp.asarray(np.random.default_rng(6).standard_normal((B, length, D)))
    upstream = jnp.asarray(np.random.default_rng(7).standard_normal((B, length, D)))

    def mixed(pattern, state, x):
        return nnx.merge(structure, state)(x, x, x, causal_mask(length), pattern=pattern)

    def loss(pattern, state, x):
        return (mixed(pattern, state, x) * upstream).sum()

    np.testing.assert_allclose(mixed("causal", state, x), mixed("any", state, x), rtol=1e-12, atol=1e-12)
    for part, whole in zip(
        *(jax.tree.leaves(jax.grad(loss, argnums=(1, 2))(pattern, state, x)) for pattern in ("causal", "any")),
        strict=True,
    ):
        np.testing.assert_allclose(part, whole, rtol=1e-11, atol=1e-10)
    parts, whole = (count_flops(functools.partial(mixed, pattern), state, x).useful for pattern in ("causal", "any"))
    assert whole - parts == pytest.approx(3 / 8 * 4 * B * length**2 * D, rel=0.01)


class KeepEvenKeys(DropoutSource):
    """A mask that can be written down, and a record of who asked."""

    def __init__(self):
        self.asked = []

    def keep(self, shape, rate):
        self.asked.append((shape, rate))
        return jnp.broadcast_to(jnp.arange(shape[-1]) % 2 == 0, shape)


def test_attention_dropout_acts_on_the_weights_at_its_own_rate(float64):
    config = double(dropout=0.5, attention_dropout=0.2)
    attention = randomised(MultiHeadAttention(config, projections="separate", rngs=nnx.Rngs(0)))
    inputs, source = random_inputs(), KeepEvenKeys()
    actual = attention(*map(jnp.asarray, inputs), None, source)
    assert source.asked == [((B, N, T, S), 0.2)]
    keep = np.where(np.arange(S) % 2 == 0, 1 / 0.8, 0.0)
    np.testing.assert_allclose(actual, attention_by_hand(attention, inputs, True, keep), rtol=1e-11, atol=1e-12)


def test_weights_that_are_dropped_are_drawn_for_all_queries_at_once(float64):
    attention = randomised(MultiHeadAttention(double(attention_dropout=0.2), projections="separate", rngs=nnx.Rngs(0)))
    x, source = jnp.asarray(np.random.default_rng(6).standard_normal((B, 256, D))), KeepEvenKeys()
    mixed = attention(x, x, x, causal_mask(256), source, pattern="causal")
    assert source.asked == [((B, N, 256, 256), 0.2)]
    np.testing.assert_array_equal(mixed, attention(x, x, x, causal_mask(256), KeepEvenKeys()))


def test_a_fully_masked_query_is_the_mean_of_the_values_or_nan_and_no_other_row_changes(float64):
    inputs, mask = random_inputs(), random_mask(B, 1, T, S)
    hidden = mask.copy()
    hidden[1, 0, 2] = False
    for fill in ("minus_1e9", "dtype_min", "minus_inf"):
        attention = randomised(MultiHeadAttention(double(mask_fill=fill), projections="separate", rngs=nnx.Rngs(0)))
        before = np.array(attention(*map(jnp.asarray, inputs), jnp.asarray(mask)))
        after = np.array(attention(*map(jnp.asarray, inputs), jnp.asarray(hidden)))
        if fill == "minus_inf":
            assert np.isnan(after[1, 2]).all()
        else:
            mean = apply_by_hand(attention.value, inputs[2][1]).mean(0)
            np.testing.assert_allclose(after[1, 2], apply_by_hand(attention.output, mean), rtol=1e-11, atol=1e-12)
        after[1, 2] = before[1, 2]
        np.testing.assert_array_equal(after, before)


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_attention_returns_the_compute_type(compute):
    attention = randomised(
        MultiHeadAttention(config_of(compute_dtype=compute), projections="separate", rngs=nnx.Rngs(0))
    )
    inputs = (jnp.asarray(x, compute) for x in random_inputs())
    assert attention(*inputs, None).dtype == compute
