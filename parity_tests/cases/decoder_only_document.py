"""The decoder-only document against ``DecoderOnlyConfig.document``, at its own sizes and at odd small ones."""

import functools

import jax
import numpy as np
from flax import nnx

import flax_transformer as ft
from flax_transformer import masks
from parity_tests.cases import Case, with_logits


def _reference(**sizes):
    from torch_reference.decoder_only import DecoderOnly

    return DecoderOnly(**sizes)


def _inputs(rng, *, B, T, vocab_size):  # noqa: N803  (axis letters)
    ids = rng.integers(0, vocab_size, (2, B, T)).astype(np.int32)
    return {"ids": ids[0], "labels": ids[1]}


def _call_reference(module, ids, labels):
    del labels
    return with_logits(module, "output", lambda: module(ids))


def _call_model(model, ids, labels, dropout=None):
    del labels
    logits = model(ids, dropout=dropout)
    return {"probabilities": jax.nn.softmax(logits, axis=-1), "logits": logits}


def _reference_masks(inputs):
    """The document's mask says where *not* to attend; ours is its complement, with the batch and head axes."""
    import torch

    length = inputs["ids"].shape[1]
    hidden = torch.triu(torch.ones(length, length), diagonal=1).bool()
    return {"causal": ~hidden[None, None]}


def _config(dtype, *, vocab_size, d_model=64, num_heads=4, context_len=16):
    return ft.DecoderOnlyConfig.document(
        vocab_size=vocab_size,
        d_model=d_model,
        num_heads=num_heads,
        max_length=context_len,
        param_dtype=dtype,
        compute_dtype=dtype,
    )


def document_case(name, size, *, B, **sizes):  # noqa: N803
    """The document at these sizes."""
    return Case(
        name=name,
        size=size,
        reference=functools.partial(_reference, **sizes),
        config=functools.partial(_config, **sizes),
        model=lambda config: ft.DecoderOnly(config, rngs=nnx.Rngs(0)),
        inputs=functools.partial(_inputs, B=B, T=sizes.get("context_len", 16), vocab_size=sizes["vocab_size"]),
        call_reference=_call_reference,
        call_model=_call_model,
        logits="output",
        drops=False,
        structural_zeros=("Wk.bias",),
        reference_masks=_reference_masks,
        model_masks=lambda inputs: {"causal": masks.causal_mask(inputs["ids"].shape[1])},
    )


CASES = (
    document_case("decoder_only_odd", "small", B=3, vocab_size=37, d_model=20, num_heads=5, context_len=7),
    document_case("decoder_only_document", "document", B=4, vocab_size=199_854),
)
