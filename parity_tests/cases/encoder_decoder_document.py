"""The encoder-decoder document against ``EncoderDecoderConfig.document``, at its own sizes and at odd small ones."""

import functools

import jax
import numpy as np
from flax import nnx

import flax_transformer as ft
from flax_transformer import masks
from flax_transformer.decoding import translate_greedy
from parity_tests.cases import Case, with_logits


def _reference(**sizes):
    from torch_reference.encoder_decoder import make_standard_transformer

    return make_standard_transformer(**sizes)


def _inputs(rng, *, B, S, T, source_vocab_size, target_vocab_size):  # noqa: N803  (axis letters)
    """Ids with padding of unequal lengths; one source is nothing but padding, and one target begins with it, so that rows
    of both masks are fully masked."""
    source = rng.integers(1, source_vocab_size, (B, S))
    target = rng.integers(1, target_vocab_size, (B, T))
    source[0, S - 2 :] = 0
    source[1] = 0
    target[0, :2] = 0
    target[2, T - 3 :] = 0
    labels = np.where(target == 0, 0, rng.integers(1, target_vocab_size, (B, T)))
    return {name: ids.astype(np.int32) for name, ids in (("source", source), ("target", target), ("labels", labels))}


def _reference_masks(inputs):
    from torch_reference.encoder_decoder import create_pad_mask, subsequent_mask

    target = inputs["target"]
    return {
        "source": create_pad_mask(inputs["source"]),
        "target": create_pad_mask(target) * subsequent_mask(target.shape[1]),
    }


def _model_masks(inputs):
    source, target = inputs["source"], inputs["target"]
    causal = masks.causal_mask(target.shape[1])
    return {"source": masks.padding_mask(source), "target": masks.combine_masks(masks.padding_mask(target), causal)}


def _call_reference(module, source, target, labels):
    del labels
    made = _reference_masks({"source": source, "target": target})
    return with_logits(module, "generator.proj", lambda: module(source, target, made["source"], made["target"]))


def _call_model(model, source, target, labels, dropout=None):
    del labels
    made = _model_masks({"source": source, "target": target})
    logits = model(source, target, made["source"], made["target"], dropout=dropout)
    return {"probabilities": jax.nn.softmax(logits, axis=-1), "logits": logits}


DECODED_LENGTH = 12
START_ID = 1


def _decode_reference(module, source, target, labels):
    """The document decodes one sentence at a time; a batch of them, one after another."""
    import torch

    from torch_reference.encoder_decoder import autoregressive_infer, create_pad_mask

    del target, labels
    rows = [
        autoregressive_infer(module, row, create_pad_mask(row), DECODED_LENGTH, START_ID) for row in source[:, None]
    ]
    return torch.cat(rows)


def _decode_model(model, source, target, labels):
    del target, labels
    return translate_greedy(model, source, masks.padding_mask(source), start_id=START_ID, length=DECODED_LENGTH)


def _config(dtype, *, src_vocab, tgt_vocab, d_model=512, d_ff=2048, h=8, N=6):  # noqa: N803  (the document's names)
    return ft.EncoderDecoderConfig.document(
        source_vocab_size=src_vocab,
        target_vocab_size=tgt_vocab,
        d_model=d_model,
        d_ff=d_ff,
        num_heads=h,
        num_layers=N,
        param_dtype=dtype,
        compute_dtype=dtype,
    )


def document_case(name, size, *, B, S, T, **sizes):  # noqa: N803
    """The document at these sizes."""
    return Case(
        name=name,
        size=size,
        reference=functools.partial(_reference, **sizes),
        config=functools.partial(_config, **sizes),
        model=lambda config: ft.EncoderDecoder(config, rngs=nnx.Rngs(0)),
        inputs=functools.partial(
            _inputs, B=B, S=S, T=T, source_vocab_size=sizes["src_vocab"], target_vocab_size=sizes["tgt_vocab"]
        ),
        call_reference=_call_reference,
        call_model=_call_model,
        logits="generator.proj",
        label_smoothing=0.1,
        padding_id=0,
        # Document masks have no head axis; this adds it, and no more.
        reference_masks=lambda inputs: {name: mask.unsqueeze(1) for name, mask in _reference_masks(inputs).items()},
        model_masks=_model_masks,
        decode_reference=_decode_reference,
        decode_model=_decode_model,
    )


CASES = (
    document_case(
        "encoder_decoder_odd", "small", B=3, S=9, T=7, src_vocab=11, tgt_vocab=13, d_model=20, d_ff=28, h=5, N=2
    ),
    document_case("encoder_decoder_document", "document", B=3, S=11, T=10, src_vocab=100, tgt_vocab=120),
)
