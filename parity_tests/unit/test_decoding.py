"""Decoding against the plain loop that runs the whole model on a text that grows by one token."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flax_transformer as ft
from flax_transformer import decoding
from parity_tests.unit.small_models import DOUBLE, PRESETS, build

V, MAX_LENGTH = 13, 7


@pytest.fixture(scope="module")
def decoder_only() -> ft.DecoderOnly:
    config = ft.DecoderOnlyConfig.small(
        vocab_size=V, d_model=6, d_ff=11, num_heads=3, num_layers=1, max_length=MAX_LENGTH, embedding_tying="none"
    )
    return spread(ft.DecoderOnly(config, rngs=nnx.Rngs(0)))


@pytest.fixture(scope="module")
def encoder_decoder() -> ft.EncoderDecoder:
    config = ft.EncoderDecoderConfig.document(
        source_vocab_size=11, target_vocab_size=V, d_model=10, d_ff=14, num_heads=5, num_layers=1, max_length=6
    )
    return spread(ft.EncoderDecoder(config, rngs=nnx.Rngs(0)))


def spread(model):
    """Random weights large enough that the likeliest token changes with the text, and no two logits are close."""
    graph, parameters, rest = nnx.split(model, nnx.Param, ...)
    rng = np.random.default_rng(5)

    def enlarge(leaf):
        return jnp.asarray(rng.standard_normal(leaf.shape), leaf.dtype) if leaf.ndim == 2 else leaf

    larger = jax.tree.map(enlarge, parameters)
    return nnx.merge(graph, larger, rest)


def random_ids(seed: int, shape: tuple[int, int], vocab_size: int = V) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, vocab_size, shape), jnp.int32)


def continued(model, prompt, num_tokens):
    text = np.asarray(prompt)
    for _ in range(num_tokens):
        logits = model(jnp.asarray(text[:, -MAX_LENGTH:]))
        text = np.concatenate([text, np.argmax(logits[:, -1], -1)[:, None]], axis=1)
    return text


with_and_without_cache = pytest.mark.parametrize("cache", ["on", "off"])


@with_and_without_cache
def test_greedy_is_the_plain_loop_also_where_the_text_outgrows_the_position_table(decoder_only, cache):
    prompt = random_ids(0, (5, 3))
    result = decoding.generate_greedy(decoder_only, prompt, num_tokens=10, cache=cache)
    assert result.dtype == jnp.int32
    np.testing.assert_array_equal(result, continued(decoder_only, prompt, 10))
    assert len(np.unique(result[:, 3:])) > 3, "the model says one thing whatever it reads; this test sees nothing"


@pytest.mark.parametrize(("batch", "length", "num_tokens"), [(2, 9, 4), (3, MAX_LENGTH, 3), (4, 1, 5), (1, 2, 1)])
def test_greedy_takes_any_prompt_one_beyond_the_position_table_too(decoder_only, batch, length, num_tokens):
    prompt = random_ids(1, (batch, length))
    result = decoding.generate_greedy(decoder_only, prompt, num_tokens=num_tokens)
    np.testing.assert_array_equal(result, continued(decoder_only, prompt, num_tokens))


def test_a_row_does_not_depend_on_the_rows_beside_it(decoder_only):
    prompt = random_ids(0, (5, 3))
    together = decoding.generate_greedy(decoder_only, prompt, num_tokens=10)
    alone = decoding.generate_greedy(decoder_only, prompt[2:3], num_tokens=10)
    np.testing.assert_array_equal(together[2:3], alone)


@with_and_without_cache
def test_an_ended_row_is_filled_with_the_end_and_the_others_go_on(decoder_only, cache):
    prompt = random_ids(0, (5, 3))
    free = np.asarray(decoding.generate_greedy(decoder_only, prompt, num_tokens=10))
    end = int(free[4, 8])
    assert end not in free[4, 3:8]
    assert any(end not in row[3:] for row in free), "every row ends; this test sees nothing"
    stopped = np.asarray(decoding.generate_greedy(decoder_only, prompt, num_tokens=10, end_id=end, cache=cache))
    for before, after in zip(free, stopped, strict=True):
        hits = np.flatnonzero(before[3:] == end)
        cut = 3 + hits[0] if hits.size else len(before)
        np.testing.assert_array_equal(after[:cut], before[:cut])
        assert np.all(after[cut:] == end)


def test_sampling_is_a_function_of_its_key(decoder_only):
    prompt = random_ids(0, (5, 3))

    def draw(seed):
        return np.asarray(decoding.generate_sampled(decoder_only, prompt, key=jax.random.key(seed), num_tokens=10))

    np.testing.assert_array_equal(draw(3), draw(3))
    assert np.any(draw(3) != draw(4))
    np.testing.assert_array_equal(draw(3)[:, :3], prompt)


def test_a_text_of_which_all_rows_have_ended_is_filled_with_the_end(decoder_only):
    prompt = random_ids(0, (1, 3))
    free = np.asarray(decoding.generate_greedy(decoder_only, prompt, num_tokens=10))
    end = int(free[0, 5])
    first = 3 + int(np.flatnonzero(free[0, 3:] == end)[0])
    stopped = np.asarray(decoding.generate_greedy(decoder_only, prompt, num_tokens=10, end_id=end))
    np.testing.assert_array_equal(stopped[0, : first + 1], free[0, : first + 1])
    assert np.all(stopped[0, first:] == end)


def test_samples_are_the_same_with_and_without_a_cache(decoder_only):
    prompt = random_ids(0, (5, 3))
    one, other = (
        decoding.generate_sampled(
            decoder_only, prompt, key=jax.random.key(3), num_tokens=10, temperature=3.0, top_k=7, cache=cache
        )
        for cache in ("on", "off")
    )
    np.testing.assert_array_equal(one, other)
    assert len(np.unique(one[:, 3:])) > 5, "the samples are all alike; this test sees nothing"


def test_the_likeliest_token_alone_is_greedy(decoder_only):
    prompt = random_ids(0, (5, 3))
    greedy = decoding.generate_greedy(decoder_only, prompt, num_tokens=10)
    one = decoding.generate_sampled(decoder_only, prompt, key=jax.random.key(0), num_tokens=10, top_k=1)
    cold = decoding.generate_sampled(decoder_only, prompt, key=jax.random.key(0), num_tokens=10, temperature=1e-4)
    np.testing.assert_array_equal(one, greedy)
    np.testing.assert_array_equal(cold, greedy)


def test_samples_follow_the_tempered_distribution_of_the_top_tokens(decoder_only):
    prompt = random_ids(6, (1, 3))
    logits = np.asarray(decoder_only(prompt)[0, -1], np.float64) / 4.0
    kept = np.sort(logits)[-5]
    weight = np.where(logits >= kept, np.exp(logits - logits.max()), 0)
    expected = weight / weight.sum()

    rows = jnp.broadcast_to(prompt, (4000, 3))
    drawn = decoding.generate_sampled(decoder_only, rows, key=jax.random.key(1), num_tokens=1, temperature=4.0, top_k=5)
    frequency = np.bincount(drawn[:, -1], minlength=V) / 4000
    assert not np.any(frequency[expected == 0])
    np.testing.assert_allclose(frequency, expected, atol=5 * 0.5 / np.sqrt(4000))
    assert np.sort(expected)[-2] > 0.1, "one token takes all; this test sees nothing"


def test_sampled_positions_are_drawn_independently(decoder_only):
    rows = jnp.broadcast_to(random_ids(7, (1, 3)), (300, 3))
    drawn = np.asarray(
        decoding.generate_sampled(decoder_only, rows, key=jax.random.key(2), num_tokens=2, temperature=1e4)
    )
    agreement = np.mean(drawn[:, 3] == drawn[:, 4])  # 1 / V if independent, 1 with one key for both
    assert agreement < 0.25


def translated(model, source, mask, start, length):
    """The document's `autoregressive_infer`, step by step, in our own words."""
    memory = model.encode(source, mask)
    target = np.full((source.shape[0], 1), start)
    for _ in range(length - 1):
        causal = ft.masks.causal_mask(target.shape[1])
        logits = model.logits(model.decode(jnp.asarray(target), memory, mask, causal))
        target = np.concatenate([target, np.argmax(logits[:, -1], -1)[:, None]], axis=1)
    return target


@with_and_without_cache
def test_translation_is_the_document_s_loop(encoder_decoder, cache):
    source = random_ids(9, (7, 5), 11).at[1:5, 2:].set(0)  # with this seed the encoder's mask decides a token
    mask = ft.masks.padding_mask(source)
    result = decoding.translate_greedy(encoder_decoder, source, mask, start_id=2, length=6, cache=cache)
    assert result.dtype == jnp.int32
    np.testing.assert_array_equal(result, translated(encoder_decoder, source, mask, 2, 6))
    assert len(np.unique(result[:, 1:])) > 2, "the model says one thing whatever it reads; this test sees nothing"


# The seeds are those whose untrained models repeat themselves least.
@pytest.mark.parametrize(
    ("preset", "batch", "seed"), [("encoder_decoder_document", 4, 39), ("encoder_decoder_small", 1, 27)]
)
def test_translations_are_the_same_with_and_without_a_cache(float64, preset, batch, seed):
    model = build(PRESETS[preset](**DOUBLE), seed=seed)
    source = random_ids(3, (batch, 7), 11).at[0, 3:].set(0).at[batch - 1, batch:].set(0)
    mask = ft.masks.padding_mask(source)
    one, other = (
        np.asarray(decoding.translate_greedy(model, source, mask, start_id=2, length=17, cache=cache))
        for cache in ("on", "off")
    )
    np.testing.assert_array_equal(one, other)
    assert len(np.unique(one[:, 1:])) > 2, "the model says one thing whatever it reads; this test sees nothing"


@pytest.mark.parametrize(("preset", "seed"), [("decoder_only_document", 24), ("gpt2_small", 16)])
def test_texts_are_the_same_with_and_without_a_cache(float64, preset, seed):
    model = build(PRESETS[preset](**DOUBLE), seed=seed)
    prompt = random_ids(4, (4, 5))
    one, other = (
        np.asarray(decoding.generate_greedy(model, prompt, num_tokens=20, cache=cache)) for cache in ("on", "off")
    )
    np.testing.assert_array_equal(one, other)
    assert len(np.unique(one[:, 5:])) > 2, "the model says one thing whatever it reads; this test sees nothing"


def test_a_translation_of_length_one_is_its_start_token(encoder_decoder):
    source = random_ids(8, (3, 5), 11)
    result = decoding.translate_greedy(encoder_decoder, source, ft.masks.padding_mask(source), start_id=4, length=1)
    np.testing.assert_array_equal(result, [[4], [4], [4]])


def test_an_ended_translation_is_filled_with_the_end(encoder_decoder):
    source = random_ids(8, (3, 5), 11)
    mask = ft.masks.padding_mask(source)
    free = np.asarray(decoding.translate_greedy(encoder_decoder, source, mask, start_id=2, length=6))
    end = int(free[0, 3])
    stopped = np.asarray(decoding.translate_greedy(encoder_decoder, source, mask, start_id=2, length=6, end_id=end))
    first = 1 + int(np.flatnonzero(free[0, 1:] == end)[0])
    np.testing.assert_array_equal(stopped[0, : first + 1], free[0, : first + 1])
    assert np.all(stopped[0, first:] == end)


@with_and_without_cache
def test_a_second_text_of_the_same_shape_does_not_recompile(decoder_only, encoder_decoder, cache):
    def write(seed):
        decoding.generate_greedy(spread(decoder_only), random_ids(seed, (5, 3)), num_tokens=10, cache=cache)
        source = random_ids(seed, (7, 5), 11)
        mask = ft.masks.padding_mask(source)
        decoding.translate_greedy(spread(encoder_decoder), source, mask, start_id=seed, length=6, cache=cache)

    loops: list[Any] = [decoding._extend, decoding._translate]
    write(1)
    before = [loop._cache_size() for loop in loops]
    write(2)
    assert [loop._cache_size() for loop in loops] == before


def test_a_cache_that_is_neither_on_nor_off_is_refused(decoder_only, encoder_decoder):
    wrong: Any = "maybe"
    source = random_ids(8, (3, 5), 11)
    with pytest.raises(ValueError, match="cache must be 'on' or 'off', got 'maybe'"):
        decoding.generate_greedy(decoder_only, random_ids(0, (2, 3)), num_tokens=4, cache=wrong)
    with pytest.raises(ValueError, match="cache must be 'on' or 'off', got 'maybe'"):
        decoding.translate_greedy(
            encoder_decoder, source, ft.masks.padding_mask(source), start_id=2, length=6, cache=wrong
        )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(prompt=jnp.zeros((2, 0), jnp.int32)), r"at least one token, got \(2, 0\)"),
        (dict(prompt=jnp.zeros(3, jnp.int32)), r"shape \(B, P\)"),
        (dict(num_tokens=0), "num_tokens must be at least 1, got 0"),
        (dict(temperature=0.0), "temperature must be above 0, got 0.0; generate_greedy"),
        (dict(temperature=float("nan")), "temperature"),
        (dict(top_k=0), "top_k must be between 1 and the vocabulary's 13 tokens, got 0"),
        (dict(top_k=14), "top_k"),
    ],
)
def test_what_cannot_be_generated_is_refused(decoder_only, options, words):
    arguments = dict(prompt=random_ids(0, (2, 3)), key=jax.random.key(0), num_tokens=4) | options
    with pytest.raises(ValueError, match=words):
        decoding.generate_sampled(decoder_only, arguments.pop("prompt"), **arguments)


@pytest.mark.parametrize("length", [0, 7])
def test_a_translation_beyond_the_position_table_is_refused(encoder_decoder, length):
    source = random_ids(8, (3, 5), 11)
    with pytest.raises(ValueError, match=f"max_length=6, got {length}"):
        decoding.translate_greedy(encoder_decoder, source, ft.masks.padding_mask(source), start_id=2, length=length)
