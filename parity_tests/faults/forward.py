"""Mistakes in a model: its weights, masks, tables, layers and output."""

import dataclasses
import functools
import math
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flax_transformer import attention, dropout, layers
from flax_transformer import masks as masking
from parity_tests.faults import ALL, DECODER_ONLY, ENCODER_DECODER, GPT, PAIRS, POST_NORM, PRE_NORM, Fault


def replace(**options):
    return lambda config: dataclasses.replace(config, **options)


def patched(owner, name, replacement):
    return functools.partial(mock.patch.object, owner, name, replacement)


def layers_of(model) -> nnx.List:
    """The blocks, or the layers of the encoder."""
    return model.encoder.layers if "encoder" in vars(model) else model.blocks


def attention_of(layer) -> attention.MultiHeadAttention:
    return layer.self_attention if "self_attention" in vars(layer) else layer.attention


def positions_of(model) -> layers.Positions:
    return model.source_positions if "source_positions" in vars(model) else model.positions


# Weights.


def transpose_query(model) -> None:
    kernel = attention_of(layers_of(model)[0]).query.kernel
    kernel[...] = kernel[...].T


def swap_query_and_key(model) -> None:
    attention_ = attention_of(layers_of(model)[0])
    attention_.query, attention_.key = attention_.key, attention_.query


def split_qkv_by_heads(model) -> None:
    """(3, N, H) rows of the fused matrix taken for (N, 3, H), as GPT-NeoX lays them out."""
    attention_ = attention_of(layers_of(model)[0])
    parts = [attention_.query, attention_.key, attention_.value]
    for name, axis in (("kernel", 1), ("bias", 0)):
        fused = jnp.concatenate([getattr(part, name)[...] for part in parts], axis=axis)
        apart = fused.reshape(*fused.shape[:-1], attention_.num_heads, 3, -1)
        for number, part in enumerate(parts):
            getattr(part, name)[...] = apart[..., number, :].reshape(getattr(part, name).shape)


def reverse_layers(model) -> None:
    found = layers_of(model)
    found[0], found[1] = found[1], found[0]


def untie_norms(model) -> None:
    model.blocks[0].feed_forward_residual = nnx.clone(model.blocks[0].attention_residual)


def untie_output(model) -> None:
    model.output.kernel = nnx.Param(model.output.kernel[...])


def drop_output_bias(model) -> None:
    model.output.bias = None


def drop_feed_forward_bias(model) -> None:
    layers_of(model)[0].feed_forward.down.bias = None


def drop_final_norm(model) -> None:
    owner = model.decoder if "decoder" in vars(model) else model
    owner.norm = layers.Identity()


# Tables.


def rebuild_table(formula):
    def rebuild(model) -> None:
        table = positions_of(model).table
        table[...] = jnp.asarray(layers.sinusoidal_table(*table.shape, formula=formula), table.dtype)

    return rebuild


def count_positions_from_one(model) -> None:
    table = positions_of(model).table
    table[...] = jnp.roll(table[...], -1, axis=0)


def sines_before_cosines(model) -> None:
    table = positions_of(model).table
    table[...] = jnp.concatenate([table[:, 0::2], table[:, 1::2]], axis=1)


# Masks.


def shifted_causal(masks: dict) -> dict:
    """tril(k=1): each position also sees the next one."""
    return {"causal": np.tril(np.ones(masks["causal"].shape[-2:], bool), k=1)[None, None]}


def inverted_padding(masks: dict) -> dict:
    return {**masks, "source": ~np.asarray(masks["source"])}


def no_causal_mask(masks: dict) -> dict:
    """The last query sees all that is no padding; here all queries do."""
    target = np.asarray(masks["target"])
    return {**masks, "target": np.broadcast_to(target[:, :, -1:], target.shape)}


def no_target_padding(masks: dict) -> dict:
    length = np.asarray(masks["target"]).shape[-1]
    return {**masks, "target": np.asarray(masking.causal_mask(length))}


# Layers. Replacements of functions that the library looks up when it is called.

original_softmax = jax.nn.softmax
original_split = attention.MultiHeadAttention._split
original_embedding = layers.Embedding.__call__
original_positions = layers.Positions.__call__
original_projection = layers.OutputProjection.__call__
original_weights = attention.attention_weights
original_norm = layers.LayerNorm.__call__


def softmax_over_queries(scores, axis):
    del axis
    return original_softmax(scores, axis=-2)


def softmax_in_float32(scores, axis):
    return original_softmax(scores.astype(jnp.float32), axis=axis).astype(scores.dtype)


def split_heads_inside_out(self, x):
    return x.reshape(*x.shape[:-1], -1, self.num_heads).swapaxes(-1, -2)


def embed_padding_as_zero(self, ids):
    return jnp.where(ids[..., None] == 0, 0.0, original_embedding(self, ids))


def scale_twice(self, ids):
    return original_embedding(self, ids) * math.sqrt(self.embedding.shape[-1])


def positions_offset_by_two(self, x, dropout=None):
    return original_positions(self, x, dropout) + jnp.broadcast_to(
        (self.table[2 : 2 + x.shape[1]] - self.table[: x.shape[1]])[None], x.shape
    )


def scaled_logits(self, x):
    return original_projection(self, x / math.sqrt(x.shape[-1]))


def residual_from_the_normed(x, sublayer, norm, drop):
    normed = norm(x)
    return normed + drop(sublayer(normed))


def norm_inside_the_sum(x, sublayer, norm, drop):
    return x + norm(drop(sublayer(x)))


def again_softmax(call):
    def twice(model, **inputs):
        output = call(model, **inputs)
        return {**output, "probabilities": jax.nn.softmax(output["probabilities"], axis=-1)}

    return twice


def log_probabilities(call):
    def logged(model, **inputs):
        output = call(model, **inputs)
        return {**output, "probabilities": jnp.log(output["probabilities"])}

    return logged


def memory_unmasked(call):
    """The encoder is given the source mask and the decoder is not."""

    def called(model, **inputs):
        decode = type(model).decode

        def unmasked(self, target, memory, source_mask, target_mask, **options):
            del source_mask
            return decode(self, target, memory, None, target_mask, **options)

        with mock.patch.object(type(model), "decode", unmasked):
            return call(model, **inputs)

    return called


def dropout_in_evaluation(call):
    def dropping(model, dropout=None, **inputs):
        batch = len(next(iter(inputs.values())))
        source = dropout or dropout_source(batch)
        return call(model, dropout=source, **inputs)

    return dropping


def dropout_source(batch: int) -> dropout.DropoutSource:
    return dropout.RandomDropout(jax.random.split(jax.random.key(3), batch))


# Gradients.


def stopped_weights(*arguments, **options):
    return jax.lax.stop_gradient(original_weights(*arguments, **options))


def stopped_statistics(self, x):
    """Mean and deviation taken for constants."""
    x = x.astype(self.numerics.statistics)
    mean = jax.lax.stop_gradient(x.mean(-1, keepdims=True))
    variance = jnp.square(x - mean).sum(-1, keepdims=True) / self.degrees_of_freedom
    denominator = jax.lax.stop_gradient(self.denominator(variance, self.eps))
    scale, bias = (jnp.broadcast_to(p[...].astype(x.dtype), x.shape) for p in (self.scale, self.bias))
    return (scale * (x - mean) / denominator + bias).astype(self.numerics.compute)


def stopped_table(self, x):
    with mock.patch.object(self.numerics.__class__, "einsum", _einsum_of_a_constant):
        return original_projection(self, x)


original_einsum = layers.Numerics.einsum


def _einsum_of_a_constant(self, formula, x, kernel, **options):
    return original_einsum(self, formula, x, jax.lax.stop_gradient(kernel), **options)


def no_gradient_for_padding(self, ids):
    rows = original_embedding(self, ids)
    return jnp.where(ids[..., None] == 0, jax.lax.stop_gradient(rows), rows)


# Dropout.


def not_rescaled(self, x, source):
    return x if source is None or self.rate == 0 else x * source.keep(x.shape, self.rate).astype(x.dtype)


def rescaled_by_the_rate(self, x, source):
    if source is None or self.rate == 0:
        return x
    return x * (source.keep(x.shape, self.rate).astype(x.dtype) / self.rate)


def dropped_inverted(self, x, source):
    if source is None or self.rate == 0:
        return x
    return x * ((~source.keep(x.shape, self.rate)).astype(x.dtype) / (1 - self.rate))


def dropped_sum(x, sublayer, norm, drop):
    """Dropout on the sum instead of the sublayer's output."""
    return norm(drop(x + sublayer(x)))


FORWARD = (
    # keys
    Fault(name="independent layers instead of shared ones", cases=(ENCODER_DECODER,), config=replace(sharing="none")),
    Fault(name="a norm of its own for the second sublayer", cases=(DECODER_ONLY,), model=untie_norms),
    Fault(name="tied output untied", cases=(GPT, POST_NORM, PRE_NORM), model=untie_output),
    Fault(name="no bias in the last projection", cases=(DECODER_ONLY, ENCODER_DECODER), model=drop_output_bias),
    Fault(name="no bias in the feed-forward", cases=ALL, model=drop_feed_forward_bias),
    Fault(name="no norm at the end of the stack", cases=(ENCODER_DECODER, PRE_NORM, GPT), model=drop_final_norm),
    # shapes, and values of parameters
    Fault(name="a square kernel not transposed", cases=ALL, model=transpose_query),
    Fault(name="query and key swapped", cases=(DECODER_ONLY, GPT, POST_NORM, PRE_NORM), model=swap_query_and_key),
    Fault(name="fused projection split by heads", cases=(GPT, POST_NORM, PRE_NORM), model=split_qkv_by_heads),
    Fault(name="layers in reverse order", cases=(GPT, POST_NORM, PRE_NORM), model=reverse_layers),
    Fault(name="computed in float32 for float64", cases=ALL, config=replace(compute_dtype="float32")),
    # masks
    Fault(name="causal mask off by one", cases=(DECODER_ONLY, GPT), masks=shifted_causal),
    Fault(name="padding mask inverted", cases=PAIRS, masks=inverted_padding),
    Fault(name="no causal mask", cases=PAIRS, masks=no_causal_mask),
    Fault(name="padding of the target not masked", cases=PAIRS, masks=no_target_padding),
    # position tables
    Fault(name="exp table for pow", cases=(DECODER_ONLY, POST_NORM, PRE_NORM), model=rebuild_table("exp")),
    Fault(name="pow table for exp", cases=(ENCODER_DECODER,), model=rebuild_table("pow")),
    Fault(name="positions counted from one", cases=(DECODER_ONLY, *PAIRS), model=count_positions_from_one),
    Fault(name="sines before cosines", cases=(DECODER_ONLY, *PAIRS), model=sines_before_cosines),
    # submodules
    Fault(name="norm eps of 1e-5 for 1e-6", cases=PAIRS, config=replace(norm_eps=1e-5)),
    Fault(name="norm eps of 1e-6 for 1e-5", cases=(DECODER_ONLY, GPT), config=replace(norm_eps=1e-6)),
    Fault(name="no norm eps", cases=ALL, config=replace(norm_eps=0.0)),
    Fault(name="norm eps inside the root", cases=(ENCODER_DECODER,), config=replace(norm_eps_placement="inside_sqrt")),
    Fault(
        name="norm eps outside the root",
        cases=(DECODER_ONLY, GPT, POST_NORM, PRE_NORM),
        config=replace(norm_eps_placement="outside_sqrt"),
    ),
    Fault(name="biased standard deviation", cases=(ENCODER_DECODER,), config=replace(norm_variance="biased")),
    Fault(
        name="unbiased standard deviation",
        cases=(DECODER_ONLY, GPT, POST_NORM, PRE_NORM),
        config=replace(norm_variance="unbiased"),
    ),
    Fault(name="embeddings not scaled", cases=PAIRS, config=replace(embedding_scale="none")),
    Fault(name="embeddings scaled", cases=(DECODER_ONLY, GPT), config=replace(embedding_scale="sqrt_d_model")),
    Fault(name="embeddings scaled twice", cases=PAIRS, patch=patched(layers.Embedding, "__call__", scale_twice)),
    Fault(
        name="padding embedded as zero", cases=PAIRS, patch=patched(layers.Embedding, "__call__", embed_padding_as_zero)
    ),
    Fault(
        name="learned positions offset by two",
        cases=(GPT,),
        patch=patched(layers.Positions, "__call__", positions_offset_by_two),
    ),
    Fault(name="GELU for ReLU", cases=(DECODER_ONLY, *PAIRS), config=replace(activation="gelu")),
    Fault(name="tanh GELU for GELU", cases=(GPT,), config=replace(activation="gelu_tanh")),
    Fault(name="SiLU for GELU", cases=(GPT,), config=replace(activation="silu")),
    Fault(name="pre-norm", cases=(DECODER_ONLY, ENCODER_DECODER, POST_NORM), config=replace(norm_position="pre")),
    Fault(name="post-norm", cases=(ENCODER_DECODER, PRE_NORM, GPT), config=replace(norm_position="post")),
    Fault(
        name="residual from the normed input",
        cases=(PRE_NORM, GPT),
        patch=functools.partial(mock.patch.dict, layers.RESIDUALS, {"pre": residual_from_the_normed}),
    ),
    Fault(
        name="norm inside the sum",
        cases=(DECODER_ONLY, POST_NORM),
        patch=functools.partial(mock.patch.dict, layers.RESIDUALS, {"post": norm_inside_the_sum}),
    ),
    Fault(name="masked scores of -inf for -1e9", cases=(ENCODER_DECODER,), config=replace(mask_fill="minus_inf")),
    Fault(
        name="scores not divided by sqrt(H)",
        cases=ALL,
        patch=patched(attention, "math", types.SimpleNamespace(sqrt=lambda size: 1.0)),
    ),
    Fault(
        name="scores divided by sqrt(D)",
        cases=ALL,
        patch=patched(attention, "math", types.SimpleNamespace(sqrt=lambda size: math.sqrt(20))),
    ),
    Fault(name="softmax over queries", cases=ALL, patch=patched(attention.jax.nn, "softmax", softmax_over_queries)),
    Fault(name="softmax in float32", cases=ALL, patch=patched(attention.jax.nn, "softmax", softmax_in_float32)),
    Fault(
        name="heads split inside out",
        cases=ALL,
        patch=patched(attention.MultiHeadAttention, "_split", split_heads_inside_out),
    ),
    Fault(name="memory not masked", cases=PAIRS, call=memory_unmasked),
    Fault(name="dropout in evaluation", cases=(ENCODER_DECODER, POST_NORM, PRE_NORM, GPT), call=dropout_in_evaluation),
    Fault(
        name="tied logits divided by sqrt(D)",
        cases=(GPT, POST_NORM, PRE_NORM),
        patch=patched(layers.OutputProjection, "__call__", scaled_logits),
    ),
    # output
    Fault(name="softmax of a softmax", cases=(DECODER_ONLY, ENCODER_DECODER), call=again_softmax),
    Fault(name="log-softmax for softmax", cases=(DECODER_ONLY, ENCODER_DECODER), call=log_probabilities),
    # gradients
    Fault(
        name="no gradient through attention weights",
        cases=(DECODER_ONLY, GPT),
        patch=patched(attention, "attention_weights", stopped_weights),
        backward=True,
    ),
    Fault(
        name="statistics of a norm taken for constants",
        cases=(DECODER_ONLY, GPT),
        patch=patched(layers.LayerNorm, "__call__", stopped_statistics),
        backward=True,
    ),
    Fault(
        name="tied table trained by one of its uses",
        cases=(GPT,),
        patch=patched(layers.OutputProjection, "__call__", stopped_table),
        backward=True,
    ),
    Fault(
        name="no gradient for the padding's embedding",
        cases=(ENCODER_DECODER, GPT),  # elsewhere masks let none through anyway
        patch=patched(layers.Embedding, "__call__", no_gradient_for_padding),
        backward=True,
    ),
    # dropout
    Fault(
        name="kept values not rescaled",
        cases=(ENCODER_DECODER, GPT, POST_NORM),
        patch=patched(dropout.Dropout, "__call__", not_rescaled),
        dropout=True,
    ),
    Fault(
        name="kept values divided by the rate",
        cases=(ENCODER_DECODER, GPT, POST_NORM),
        patch=patched(dropout.Dropout, "__call__", rescaled_by_the_rate),
        dropout=True,
    ),
    Fault(
        name="what should be kept dropped",
        cases=(ENCODER_DECODER, GPT, POST_NORM),
        patch=patched(dropout.Dropout, "__call__", dropped_inverted),
        dropout=True,
    ),
    Fault(
        name="dropout on the sum",
        cases=(POST_NORM,),
        patch=functools.partial(mock.patch.dict, layers.RESIDUALS, {"post": dropped_sum}),
        dropout=True,
    ),
)
