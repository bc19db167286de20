"""Steps with the key/value cache against a call on the whole text: the same logits at every position, for every preset."""

import functools
import re
from typing import Any
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_transformer import decoding
from flax_transformer.cache import Cache, KeysAndValues
from flax_transformer.config import EncoderDecoderConfig
from flax_transformer.layers import Positions
from flax_transformer.masks import causal_mask, padding_mask
from parity_tests.unit.small_models import (
    BATCH,
    DOUBLE,
    PRESETS,
    SOURCE_IDS,
    TARGET,
    TARGET_IDS,
    build,
    decoder_only_config,
    encoder_decoder_config,
)

UNIT_ROUNDOFF = 2.0**-24
ROOM = TARGET + 3  # what lies behind the text must not matter
PROMPT_THEN_TOKENS = (2, 1, 1, 1)

SOURCE = np.array(SOURCE_IDS)
SOURCE[0, 4:] = 0
SOURCE[1] = 0  # nothing but padding: its rows are fully masked
SOURCE_MASK = padding_mask(jnp.asarray(SOURCE))

every_preset = pytest.mark.parametrize("preset", PRESETS)


def called(model) -> np.ndarray:
    """The logits of every position, by one call on the whole text."""
    if isinstance(model.config, EncoderDecoderConfig):
        return np.asarray(model(SOURCE, TARGET_IDS, SOURCE_MASK, causal_mask(TARGET)))
    return np.asarray(model(TARGET_IDS))


def start(model, *, length: int = ROOM, source_mask: Any = SOURCE_MASK) -> Cache:
    if isinstance(model.config, EncoderDecoderConfig):
        return model.start(SOURCE, source_mask, length=length)
    return model.start(BATCH, length=length)


def stepped(model, chunks: tuple[int, ...]) -> tuple[np.ndarray, list[int]]:
    """The logits after every chunk, and the positions that they belong to."""
    cache, logits, ends = start(model), [], np.cumsum(chunks)
    for end, size in zip(ends, chunks, strict=True):
        step = model.step(TARGET_IDS[:, end - size : end], cache)
        logits.append(np.asarray(step.logits))
        cache = step.cache
    return np.stack(logits, axis=1), list(ends - 1)


def require_same_logits(model, chunks: tuple[int, ...]) -> None:
    """In float64: at most 1e-12 of the scale apart, NaN at the same places."""
    logits, positions = stepped(model, chunks)
    expected = called(model)[:, positions]
    assert logits.dtype == expected.dtype == np.float64
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-12 * np.nanmax(np.abs(expected)))


@every_preset
def test_every_step_has_the_logits_of_a_call_on_the_whole_text(float64, preset):
    require_same_logits(build(PRESETS[preset](**DOUBLE)), PROMPT_THEN_TOKENS)


@pytest.mark.parametrize("preset", ["encoder_decoder_document", "decoder_only_small"])
@pytest.mark.parametrize("chunks", [(1,) * TARGET, (TARGET,), (2, 3)], ids=str)
def test_it_does_not_matter_in_which_chunks_a_text_is_read(float64, preset, chunks):
    require_same_logits(build(PRESETS[preset](**DOUBLE)), chunks)


@pytest.mark.parametrize("mask_fill", ["minus_1e9", "minus_inf", "dtype_min"])
def test_a_source_of_padding_alone_is_attended_to_as_its_fill_says(float64, mask_fill):
    model = build(encoder_decoder_config(mask_fill=mask_fill, **DOUBLE))
    require_same_logits(model, PROMPT_THEN_TOKENS)
    whole = called(model)
    assert np.isnan(whole[1]).all() == np.isnan(whole).any() == (mask_fill == "minus_inf")


@pytest.mark.parametrize(
    "options", [dict(norm_position="post"), dict(norm_position="both"), dict(position_table="pow")]
)
def test_other_options_have_the_same_logits_too(float64, options):
    for config in (encoder_decoder_config(**options, **DOUBLE), decoder_only_config(**options, **DOUBLE)):
        require_same_logits(build(config), PROMPT_THEN_TOKENS)


def test_a_source_mask_with_rows_of_its_own_for_every_target_position_is_followed(float64):
    rows = np.random.default_rng(3).random((BATCH, 1, SOURCE.shape[1], SOURCE.shape[1])) < 0.5
    rows[..., 1] = True
    model = build(encoder_decoder_config(**DOUBLE))
    memory = model.encode(SOURCE, rows)
    features = model.decode(TARGET_IDS, memory, rows[:, :, :TARGET], causal_mask(TARGET))
    cache = start(model, length=SOURCE.shape[1], source_mask=rows)
    for position in range(TARGET):
        logits, cache = model.step(TARGET_IDS[:, position, None], cache)
        np.testing.assert_allclose(logits, model.logits(features)[:, position], rtol=0, atol=1e-12)


@every_preset
@pytest.mark.parametrize(("dtype", "floor"), [("float32", 16 * UNIT_ROUNDOFF), ("bfloat16", 16 * 2.0**-9)])
def test_in_lower_precision_a_step_is_as_close_to_the_truth_as_a_call(float64, preset, dtype, floor):
    storage = dict(param_dtype="float32")
    truth = called(build(PRESETS[preset](compute_dtype="float64", **storage)))
    model = build(PRESETS[preset](compute_dtype=dtype, **storage))
    logits, positions = stepped(model, PROMPT_THEN_TOKENS)
    assert logits.dtype == dtype
    truth = truth[:, positions]
    error, theirs = (np.abs(x.astype(np.float64) - truth) for x in (logits, called(model)[:, positions]))
    assert error.max() <= max(4 * theirs.max(), floor * np.abs(truth).max())
    assert np.sqrt(np.mean(error**2)) <= max(2 * np.sqrt(np.mean(theirs**2)), floor / 2 * np.abs(truth).max())


# That these tests can fail


def off_by(distance: int):
    original = KeysAndValues.write
    return mock.patch.object(
        KeysAndValues, "write", lambda self, new, position: original(self, new, jnp.maximum(position + distance, 0))
    )


def offset_forgotten():
    original = Positions.__call__
    return mock.patch.object(
        Positions, "__call__", lambda self, x, dropout=None, *, offset=0: original(self, x, dropout)
    )


def source_mask_replaced(mask: Any):
    return mock.patch.object(Cache, "source_rows", return_value=mask)


def seeing(distance: int):
    original = Cache.causal_mask
    return mock.patch.object(
        Cache, "causal_mask", lambda self, num_tokens: jnp.roll(original(self, num_tokens), distance, axis=-1)
    )


FAULTS = {
    "keys and values are written one position too early": functools.partial(off_by, -1),
    "keys and values are written one position too late": functools.partial(off_by, 1),
    "the offset into the position table is forgotten": offset_forgotten,
    "the source mask is forgotten": functools.partial(source_mask_replaced, None),
    "the source mask is inverted": functools.partial(source_mask_replaced, ~SOURCE_MASK),
    "a token sees the one after it": functools.partial(seeing, 1),
    "a token does not see itself": functools.partial(seeing, -1),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("preset", ["encoder_decoder_document", "paper_base"])
def test_a_planted_mistake_is_seen(float64, fault, preset):
    model = build(PRESETS[preset](**DOUBLE))
    with FAULTS[fault](), pytest.raises(AssertionError):
        require_same_logits(model, PROMPT_THEN_TOKENS)


# What is refused


@pytest.mark.parametrize("length", [0, 18])
def test_a_cache_beyond_the_position_table_is_refused(length):
    for config in (encoder_decoder_config(), decoder_only_config()):
        with pytest.raises(ValueError, match=f"length must be between 1 and the model's max_length=17, got {length}"):
            start(build(config), length=length)


def test_more_tokens_than_there_is_room_for_are_refused():
    model = build(decoder_only_config())
    cache = model.start(BATCH, length=4)
    with pytest.raises(ValueError, match="ids has length 5"):
        model.step(TARGET_IDS, cache)
    cache = model.step(TARGET_IDS[:, :3], cache).cache
    with pytest.raises(
        ValueError, match="has room for 4 tokens and holds 3, got 2 more; start it with a larger length"
    ):
        model.step(TARGET_IDS[:, 3:], cache)


def test_another_batch_than_the_cache_s_is_refused():
    for model in map(build, (encoder_decoder_config(), decoder_only_config())):
        with pytest.raises(ValueError, match="ids must continue the cache's 3 texts, got 2; start another cache"):
            model.step(TARGET_IDS[:2], start(model))


def test_a_wrong_source_mask_is_refused_when_the_cache_is_started():
    model = build(encoder_decoder_config())
    rows = np.ones((BATCH, 1, SOURCE.shape[1], SOURCE.shape[1]), bool)  # rows for 7 target positions, of 8
    with pytest.raises(
        ValueError, match=re.escape("source_mask of start must be broadcastable to (B, 1, T, S) = (3, 1, 8")
    ):
        start(model, source_mask=rows)


# What makes it fast


def instructions_of_the_loop(hlo: str) -> list[str]:
    """Every instruction that runs inside a `while` loop of a compiled program, those of fusions included."""
    computations = {
        name: body.splitlines() for name, body in re.findall(r"^%?([\w.\-]+) \(.*?\{\n(.*?)^\}", hlo, re.M | re.S)
    }
    pending, reached = re.findall(r"while\(.*body=%?([\w.\-]+)", hlo), set()
    assert pending, "there is no loop; this test sees nothing"
    while pending:
        name = pending.pop()
        if name in computations and name not in reached:
            reached.add(name)
            for line in computations[name]:
                pending += re.findall(r"(?:calls|to_apply|body)=%?([\w.\-]+)", line)
    return [line for name in reached for line in computations[name]]


def test_no_cache_is_copied_or_transposed_inside_the_loop():
    config = encoder_decoder_config()
    graph, state = nnx.split(build(config))
    compiled = decoding._translate.lower(graph, state, SOURCE, SOURCE_MASK, 1, -1, length=TARGET, cache="on")
    instructions = instructions_of_the_loop(compiled.compile().as_text() or "")
    assert any("dynamic-update-slice" in line for line in instructions)
    N, H = config.num_heads, config.head_size  # noqa: N806
    sizes = {BATCH * N * H * TARGET, BATCH * N * H * SOURCE.shape[1]}
    moved = [
        line.strip()
        for line in instructions
        if (found := re.search(r"= f32\[([\d,]+)\]\S* (?:copy|transpose)\(", line))
        and np.prod([int(size) for size in found[1].split(",")]) in sizes
    ]
    assert not moved, "\n".join(moved)
