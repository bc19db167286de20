"""Transformers in JAX/Flax NNX that provably compute what their PyTorch originals compute.

import flax_transformer as ft
from flax import nnx

model = ft.DecoderOnly(ft.DecoderOnlyConfig.small(vocab_size=1000), rngs=nnx.Rngs(0))
logits = model(ids)
"""

from flax_transformer import attention, dropout, layers, masks, weights
from flax_transformer.config import DecoderOnlyConfig, EncoderDecoderConfig, TransformerConfig
from flax_transformer.decoder_only import DecoderOnly
from flax_transformer.encoder_decoder import EncoderDecoder

__all__ = [
    "DecoderOnly",
    "DecoderOnlyConfig",
    "EncoderDecoder",
    "EncoderDecoderConfig",
    "TransformerConfig",
    "attention",
    "dropout",
    "layers",
    "masks",
    "weights",
]
