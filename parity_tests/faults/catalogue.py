"""The catalogue. A fault that the ladder does not catch where this table says is a hole in the ladder."""

import dataclasses
import functools
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flax_transformer import attention, layers
from parity_tests.faults import Fault

ENCODER_DECODER = "encoder_decoder_odd"
DECODER_ONLY = "decoder_only_odd"


def replace(**options):
    return lambda config: dataclasses.replace(config, **options)


def transpose_query(model) -> None:
    kernel = model.blocks[0].attention.query.kernel
    kernel[...] = kernel[...].T


def swap_query_and_key(model) -> None:
    attention_ = model.blocks[0].attention
    attention_.query, attention_.key = attention_.key, attention_.query


def rebuild_table_by_exp(model) -> None:
    table = model.positions.table
    table[...] = jnp.asarray(layers.sinusoidal_table(*table.shape, formula="exp"), table.dtype)


def rebuild_table_from_one(model) -> None:
    table = model.source_positions.table
    table[...] = jnp.roll(table[...], -1, axis=0)


def untie_norms(model) -> None:
    model.blocks[0].feed_forward_residual = nnx.clone(model.blocks[0].attention_residual)


def drop_output_bias(model) -> None:
    model.output.bias = None


def drop_final_norm(model) -> None:
    model.decoder.norm = layers.Identity()


def split_heads_inside_out(self, x):
    return x.reshape(*x.shape[:-1], -1, self.num_heads).swapaxes(-1, -2)


def softmax_over_queries(scores, axis):
    del axis
    return original_softmax(scores, axis=-2)


original_softmax = jax.nn.softmax


def shifted_causal(masks: dict) -> dict:
    """tril(k=1): each position also sees the next one."""
    causal = np.tril(np.ones(masks["causal"].shape[-2:], bool), k=1)
    return {"causal": causal[None, None]}


def inverted_padding(masks: dict) -> dict:
    return {**masks, "source": ~masks["source"]}


def again_softmax(call):
    def twice(model, **inputs):
        output = call(model, **inputs)
        return {**output, "probabilities": jax.nn.softmax(output["probabilities"], axis=-1)}

    return twice


def patched(owner, name, replacement):
    return functools.partial(mock.patch.object, owner, name, replacement)


FAULTS = (
    # keys
    Fault(
        name="independent layers and projections instead of shared ones",
        case=ENCODER_DECODER,
        rung="keys",
        module="encoder.layers.0.sublayer.0.norm",
        config=replace(sharing="none"),
    ),
    Fault(
        name="a norm of its own for the second sublayer",
        case=DECODER_ONLY,
        rung="keys",
        module="blocks.0.feed_forward_residual.norm",
        model=untie_norms,
    ),
    Fault(
        name="no bias in the last projection",
        case=ENCODER_DECODER,
        rung="keys",
        module="generator.proj",
        model=drop_output_bias,
    ),
    Fault(
        name="no final norm in the decoder",
        case=ENCODER_DECODER,
        rung="keys",
        module="decoder.norm",
        model=drop_final_norm,
    ),
    # shapes and values of parameters
    Fault(name="a square kernel not transposed", case=DECODER_ONLY, rung="shapes", module="Wq", model=transpose_query),
    Fault(name="query and key swapped", case=DECODER_ONLY, rung="shapes", module="Wq", model=swap_query_and_key),
    # masks
    Fault(name="causal mask off by one", case=DECODER_ONLY, rung="masks", module="", masks=shifted_causal),
    Fault(name="padding mask inverted", case=ENCODER_DECODER, rung="masks", module="", masks=inverted_padding),
    # position tables
    Fault(name="exp table for pow", case=DECODER_ONLY, rung="buffers", module="", model=rebuild_table_by_exp),
    Fault(
        name="positions counted from one",
        case=ENCODER_DECODER,
        rung="buffers",
        module="src_embed.1",
        model=rebuild_table_from_one,
    ),
    # submodules
    Fault(
        name="norm eps of 1e-5 for 1e-6",
        case=ENCODER_DECODER,
        rung="modules",
        module="encoder.layers.0.sublayer.0.norm",
        config=replace(norm_eps=1e-5),
    ),
    Fault(
        name="norm eps inside the root",
        case=ENCODER_DECODER,
        rung="modules",
        module="encoder.layers.0.sublayer.0.norm",
        config=replace(norm_eps_placement="inside_sqrt"),
    ),
    Fault(
        name="biased standard deviation",
        case=ENCODER_DECODER,
        rung="modules",
        module="encoder.layers.0.sublayer.0.norm",
        config=replace(norm_variance="biased"),
    ),
    Fault(
        name="embeddings not scaled",
        case=ENCODER_DECODER,
        rung="modules",
        module="src_embed.0",
        config=replace(embedding_scale="none"),
    ),
    Fault(
        name="GELU for ReLU",
        case=ENCODER_DECODER,
        rung="modules",
        module="encoder.layers.0.feed_forward.dropout",
        config=replace(activation="gelu"),
    ),
    Fault(
        name="pre-norm for a norm before and after",
        case=ENCODER_DECODER,
        rung="modules",
        module="encoder.layers.0.sublayer.0.norm",
        config=replace(norm_position="pre"),
    ),
    Fault(
        name="masked scores of -inf for -1e9",
        case=ENCODER_DECODER,
        rung="modules",
        module="encoder.layers.0.self_attn.dropout",
        config=replace(mask_fill="minus_inf"),
    ),
    Fault(
        name="scores not divided by sqrt(H)",
        case=ENCODER_DECODER,
        rung="modules",
        module="encoder.layers.0.self_attn.dropout",
        patch=patched(attention, "math", types.SimpleNamespace(sqrt=lambda size: 1.0)),
    ),
    Fault(
        name="softmax over queries",
        case=ENCODER_DECODER,
        rung="modules",
        module="encoder.layers.0.self_attn.dropout",
        patch=patched(attention.jax.nn, "softmax", softmax_over_queries),
    ),
    Fault(
        name="heads split inside out",
        case=DECODER_ONLY,
        rung="modules",
        module="Wo",
        patch=patched(attention.MultiHeadAttention, "_split", split_heads_inside_out),
    ),
    Fault(
        name="computed in float32 for float64",
        case=DECODER_ONLY,
        rung="shapes",
        module="embeddings",
        config=replace(compute_dtype="float32"),
    ),
    # output
    Fault(name="softmax of a softmax", case=ENCODER_DECODER, rung="output", module="", call=again_softmax),
)
