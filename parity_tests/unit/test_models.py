"""Both models from outside: what they refuse, and what holds for every preset: types, jit, probabilities, precision."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

import flax_transformer as ft
from flax_transformer.config import EncoderDecoderConfig
from flax_transformer.masks import causal_mask, combine_masks, padding_mask
from parity_tests.unit.small_models import (
    DOUBLE,
    PRESETS,
    SOURCE_IDS,
    TARGET_IDS,
    build,
    decoder_only_config,
    encoder_decoder_config,
    hollow,
    random_ids,
)

every_preset = pytest.mark.parametrize("preset", PRESETS)


def arguments_of(config) -> tuple:
    """Ids, and a mask for everything that takes one."""
    if isinstance(config, EncoderDecoderConfig):
        return SOURCE_IDS, TARGET_IDS, padding_mask(SOURCE_IDS), causal_mask(5)
    return TARGET_IDS, padding_mask(TARGET_IDS)


def trace(config, *arguments) -> jax.ShapeDtypeStruct:
    """The logits' shape and dtype, without compiling."""
    return nnx.eval_shape(lambda model: model(*arguments), hollow(config))


# What is refused


WRONG_IDS = {
    "floats": (TARGET_IDS.astype(np.float32), "must be integer token ids, got dtype float32; encode text with"),
    "booleans": (TARGET_IDS > 3, "must be integer token ids, got dtype bool"),
    "text": ("to be or not to be", "must be integer token ids, got dtype <U18; encode text with tokenizer.py first"),
    "one axis": (TARGET_IDS[0], "must have shape (B, T), neither of them 0, got (5,); one sequence is ids[None, :]"),
    "three axes": (TARGET_IDS[None], "must have shape (B, T), neither of them 0, got (1, 3, 5)"),
    "no example": (TARGET_IDS[:0], "must have shape (B, T), neither of them 0, got (0, 5)"),
    "no token": (TARGET_IDS[:, :0], "must have shape (B, T), neither of them 0, got (3, 0)"),
    "too long": (
        np.ones((3, 18), np.int32),
        "has length 18, beyond the position table's max_length=17; shorten it, or build the model with a larger",
    ),
}


@pytest.mark.parametrize("case", WRONG_IDS)
def test_wrong_ids_are_refused_with_their_name(case):
    ids, words = WRONG_IDS[case]
    calls = {
        "ids": lambda: trace(decoder_only_config(), ids),
        "source": lambda: trace(encoder_decoder_config(), ids, TARGET_IDS, None, None),
        "target": lambda: trace(encoder_decoder_config(), SOURCE_IDS, ids, None, None),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=f"^{re.escape(f'{name} {words}')}"):
            call()


def test_a_sequence_as_long_as_the_table_is_accepted():
    longest = np.ones((3, 17), np.int32)
    assert trace(decoder_only_config(), longest).shape == (3, 17, 13)
    assert trace(encoder_decoder_config(), longest, longest, None, None).shape == (3, 17, 13)


@pytest.mark.parametrize("ids", [TARGET_IDS.tolist(), TARGET_IDS.astype(np.uint8), jnp.asarray(TARGET_IDS)])
def test_ids_may_be_lists_or_any_integer_array(ids):
    assert trace(decoder_only_config(), ids).shape == (3, 5, 13)


def test_source_and_target_of_different_batches_are_refused():
    with pytest.raises(
        ValueError, match=r"memory must have shape \(B, S, D\) = \(3, S, 12\), got \(2, 7, 12\); .*batch"
    ):
        trace(encoder_decoder_config(), SOURCE_IDS[:2], TARGET_IDS, None, None)
    with pytest.raises(ValueError, match=r"= \(1, S, 12\), got \(3, 7, 12\)"):
        trace(encoder_decoder_config(), SOURCE_IDS, TARGET_IDS[:1], None, None)


@pytest.mark.parametrize("shape", [(3, 7, 11), (3, 7), (2, 7, 12), (3, 7, 12, 1)])
def test_a_memory_of_another_shape_is_refused(shape):
    model, memory = hollow(encoder_decoder_config()), np.ones(shape, np.float32)
    with pytest.raises(ValueError, match=rf"memory must have shape .*, got {re.escape(str(shape))}"):
        nnx.eval_shape(lambda model: model.decode(TARGET_IDS, memory, None, None), model)


def masks_that_are_wrong(shape: tuple[int, ...]) -> dict[str, tuple]:
    right, other = np.ones(shape, bool), np.ones((*shape[:2], shape[2] + 1, shape[3]), bool)
    return {
        "float": (right.astype(np.float32), "must be boolean, True = may attend, got dtype float32; convert"),
        "integer": (right.astype(np.int32), "must be boolean, True = may attend, got dtype int32"),
        "three axes": (
            right[:, 0],
            f"must have four axes, broadcastable to (B, 1, T, S), got shape {right[:, 0].shape}",
        ),
        "another length": (other, f"must be broadcastable to (B, 1, T, S) = {shape}, got shape {other.shape}"),
        "another batch": (right[:2], f"must be broadcastable to (B, 1, T, S) = {shape}, got shape {right[:2].shape}"),
        "heads": (right.repeat(3, 1), f"must be broadcastable to (B, 1, T, S) = {shape}, got shape"),
        "list": ([[[[True]]]], "must be a boolean array of JAX or NumPy, got list"),
    }


@pytest.mark.parametrize("case", masks_that_are_wrong((3, 1, 5, 5)))
def test_wrong_masks_are_refused_with_their_name(case):
    def refused(name, shape, call):
        mask, words = masks_that_are_wrong(shape)[case]
        with pytest.raises(ValueError, match=f"^{re.escape(f'{name} {words}')}"):
            call(mask)

    config = encoder_decoder_config()
    memory = np.ones((3, 7, 12), np.float32)
    refused("mask", (3, 1, 5, 5), lambda mask: trace(decoder_only_config(), TARGET_IDS, mask))
    refused("target_mask", (3, 1, 5, 5), lambda mask: trace(config, SOURCE_IDS, TARGET_IDS, None, mask))
    refused("source_mask of encode", (3, 1, 7, 7), lambda mask: trace(config, SOURCE_IDS, TARGET_IDS, mask, None))
    refused(
        "source_mask of decode",
        (3, 1, 5, 7),
        lambda mask: nnx.eval_shape(lambda model: model.decode(TARGET_IDS, memory, mask, None), hollow(config)),
    )


def test_masks_may_be_numpy_arrays():
    source_mask, target_mask = (np.asarray(mask) for mask in arguments_of(encoder_decoder_config())[2:])
    assert trace(encoder_decoder_config(), SOURCE_IDS, TARGET_IDS, source_mask, target_mask).shape == (3, 5, 13)
    assert trace(decoder_only_config(), TARGET_IDS, target_mask).shape == (3, 5, 13)


def test_a_model_refuses_the_other_models_configuration():
    other: Any = encoder_decoder_config()
    with pytest.raises(ValueError, match="DecoderOnly is built from a DecoderOnlyConfig, got EncoderDecoderConfig"):
        ft.DecoderOnly(other, rngs=nnx.Rngs(0))
    other = decoder_only_config()
    with pytest.raises(ValueError, match="EncoderDecoder is built from a EncoderDecoderConfig, got DecoderOnlyConfig"):
        ft.EncoderDecoder(other, rngs=nnx.Rngs(0))


# What holds for every preset


@every_preset
def test_every_preset_runs_and_its_probabilities_are_the_softmax_of_its_logits(float64, preset):
    config = PRESETS[preset](**DOUBLE)
    model, arguments = build(config), arguments_of(config)
    logits, probabilities = nnx.jit(lambda model: (model(*arguments), model.probabilities(*arguments)))(model)
    assert logits.shape == probabilities.shape == (3, 5, 13)
    assert logits.dtype == probabilities.dtype == jnp.float64
    assert np.isfinite(logits).all()
    np.testing.assert_allclose(probabilities.sum(-1), np.ones((3, 5)), rtol=1e-14)
    exponentials = np.exp(np.asarray(logits))
    np.testing.assert_allclose(probabilities, exponentials / exponentials.sum(-1, keepdims=True), rtol=1e-11)


@pytest.mark.parametrize("preset", ["encoder_decoder_document", "gpt2_small"])
def test_jit_changes_nothing_in_float64(float64, preset):
    config = PRESETS[preset](**DOUBLE)
    model, arguments = build(config), arguments_of(config)
    eager = model(*arguments)
    graph, state = nnx.split(model)
    compiled = {
        "nnx.jit": nnx.jit(lambda model: model(*arguments))(model),
        "jax.jit": jax.jit(lambda state: nnx.merge(graph, state)(*arguments))(state),
    }
    for logits in compiled.values():
        np.testing.assert_allclose(logits, eager, rtol=0, atol=1e-12 * np.abs(eager).max())


@pytest.mark.parametrize("preset", ["encoder_decoder_document", "gpt2_small"])
@pytest.mark.parametrize("compute", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("param", ["float32", "float64", "bfloat16"])
def test_logits_have_the_compute_type_and_parameters_the_param_type(float64, preset, param, compute):
    config = PRESETS[preset](param_dtype=param, compute_dtype=compute)
    logits = trace(config, *random_ids(config), *[None] * (len(random_ids(config)) * 2 - 2))
    assert logits.dtype == compute
    state = nnx.state(hollow(config))
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.filter_state(state, nnx.Param))} == {jnp.dtype(param)}
    buffers = {leaf.dtype for leaf in jax.tree.leaves(nnx.filter_state(state, ft.layers.Buffer))}
    sinusoidal = jnp.dtype("float64" if compute == "float64" else "float32")
    assert buffers == (set() if config.position_table == "learned" else {sinusoidal})


def test_lower_types_come_near_the_logits_of_float64(float64):
    def logits_of(**types):
        config = PRESETS["encoder_decoder_document"](**types)
        model, arguments = build(config), arguments_of(config)
        return np.asarray(nnx.jit(lambda model: model(*arguments))(model), np.float64)

    exact = logits_of(**DOUBLE)
    scale = np.abs(exact).max()
    single, half = logits_of(), logits_of(compute_dtype="bfloat16")
    assert 0 < np.abs(single - exact).max() < 1e-5 * scale
    assert 1e-4 * scale < np.abs(half - exact).max() < 0.1 * scale


def test_a_call_is_encode_then_decode_then_logits(float64):
    config = encoder_decoder_config(**DOUBLE)
    source, target, source_mask, target_mask = arguments_of(config)

    @nnx.jit
    def in_one_and_in_parts(model):
        memory = model.encode(source, source_mask)
        features = model.decode(target, memory, source_mask, target_mask)
        return model(source, target, source_mask, target_mask), model.logits(features)

    np.testing.assert_allclose(*in_one_and_in_parts(build(config)), rtol=0, atol=1e-13)


@pytest.mark.parametrize("preset", ["encoder_decoder_document", "paper_base", "decoder_only_document", "gpt2_small"])
def test_the_second_call_does_not_compile_again(preset):
    config = PRESETS[preset]()
    traces = []

    @nnx.jit
    def call(model, *arguments):
        traces.append(preset)
        return model(*arguments)

    ids = random_ids(config)
    masks = [combine_masks(causal_mask(5), padding_mask(TARGET_IDS))] if len(ids) == 1 else [None, None]
    first = call(build(config), *ids, *masks)
    second = call(build(config, seed=1), *(values[::-1].copy() for values in ids), *masks)
    assert len(traces) == 1
    assert np.all(first != second)


def dot_products_of(jaxpr) -> list:
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            found.append(equation)
        for inner in jaxprs_in_params(equation.params):
            found += dot_products_of(inner)
    return found


@pytest.mark.parametrize("precision", ["default", "high", "highest"])
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_every_matrix_product_has_the_configured_precision(precision, compute):
    config = decoder_only_config(precision=precision, compute_dtype=compute)
    graph, state = nnx.split(hollow(config))
    jaxpr = jax.make_jaxpr(lambda state: nnx.merge(graph, state)(TARGET_IDS))(state).jaxpr
    products = dot_products_of(jaxpr)
    # query, key, value, scores, mixing, output, up and down in each layer, and the vocabulary
    assert len(products) == 8 * config.num_layers + 1
    wanted = jax.lax.Precision(precision)
    assert {product.params["precision"] for product in products} == {(wanted, wanted)}
    assert {variable.aval.dtype.name for product in products for variable in product.invars} == {compute}
