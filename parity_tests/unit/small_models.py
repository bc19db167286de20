"""Small models for the unit tests: no two sizes equal, and every parameter random, biases and norms too."""

import functools
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

import flax_transformer as ft
from flax_transformer.config import DecoderOnlyConfig, EncoderDecoderConfig, TransformerConfig
from flax_transformer.layers import sinusoidal_table
from flax_transformer.weights.transfer import variables

SIZES = dict(d_model=12, d_ff=20, num_heads=3, num_layers=2, max_length=17)
SOURCE_VOCABULARY, TARGET_VOCABULARY = 11, 13
BATCH, SOURCE, TARGET = 3, 7, 5
DOUBLE: dict[str, Any] = dict(param_dtype="float64", compute_dtype="float64")

SOURCE_IDS: Any = np.random.default_rng(10).integers(1, SOURCE_VOCABULARY, (BATCH, SOURCE), np.int32)
TARGET_IDS: Any = np.random.default_rng(11).integers(1, TARGET_VOCABULARY, (BATCH, TARGET), np.int32)


def encoder_decoder_config(**options) -> EncoderDecoderConfig:
    vocabularies = dict(source_vocab_size=SOURCE_VOCABULARY, target_vocab_size=TARGET_VOCABULARY)
    return EncoderDecoderConfig(**{**vocabularies, **SIZES, **options})


def decoder_only_config(**options) -> DecoderOnlyConfig:
    return DecoderOnlyConfig(**{"vocab_size": TARGET_VOCABULARY, **SIZES, **options})


# Every preset of both models at these sizes. Each is a function, since float64 options need the 64-bit mode.
PRESETS = {
    "encoder_decoder_document": lambda **options: EncoderDecoderConfig.document(
        source_vocab_size=SOURCE_VOCABULARY, target_vocab_size=TARGET_VOCABULARY, **{**SIZES, **options}
    ),
    "encoder_decoder_small": lambda **options: EncoderDecoderConfig.small(
        source_vocab_size=SOURCE_VOCABULARY, target_vocab_size=TARGET_VOCABULARY, **{**SIZES, **options}
    ),
    "paper_base": lambda **options: EncoderDecoderConfig.paper_base(
        vocab_size=TARGET_VOCABULARY, **{**SIZES, **options}
    ),
    "paper_big": lambda **options: EncoderDecoderConfig.paper_big(vocab_size=TARGET_VOCABULARY, **{**SIZES, **options}),
    "decoder_only_document": lambda **options: DecoderOnlyConfig.document(
        vocab_size=TARGET_VOCABULARY, **{**SIZES, "num_layers": 1, **options}
    ),
    "decoder_only_small": lambda **options: DecoderOnlyConfig.small(
        vocab_size=TARGET_VOCABULARY, **{**SIZES, **options}
    ),
    "gpt2_small": lambda **options: DecoderOnlyConfig.gpt2_small(vocab_size=TARGET_VOCABULARY, **{**SIZES, **options}),
}


def _abstract(config: TransformerConfig) -> Any:
    model: Any = ft.EncoderDecoder if isinstance(config, EncoderDecoderConfig) else ft.DecoderOnly
    return nnx.eval_shape(lambda: model(config, rngs=nnx.Rngs(0)))


@functools.cache
def hollow(config: TransformerConfig) -> Any:
    """The model of ``config`` with shapes in place of arrays: enough for whatever is decided before computing."""
    return _abstract(config)


def build(config: TransformerConfig, *, seed: int = 0) -> Any:
    """The model of ``config`` with random weights, made without compiling its initialisers."""
    model = _abstract(config)
    rng = np.random.default_rng(seed)
    for path, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Param):
            centre = 1 if path[-1] == "scale" else 0  # a norm near zero would silence what comes before it
            node.set_value(jnp.asarray(centre + rng.standard_normal(node.shape) / 2, node.dtype))
        elif isinstance(node, ft.layers.Buffer):
            node.set_value(jnp.asarray(sinusoidal_table(*node.shape, formula=config.position_table), node.dtype))
    return model


def random_ids(config: TransformerConfig) -> tuple[Any, ...]:
    """The ids that a call of the model of ``config`` takes, none of them 0."""
    if isinstance(config, EncoderDecoderConfig):
        return SOURCE_IDS, TARGET_IDS
    return (TARGET_IDS,)


def bits_of(model) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Everything that a model keeps, so that two models compare bit for bit."""
    return {name: bits(variable[...]) for name, variable in variables(model)}


def bits(value: Any) -> tuple[str, tuple[int, ...], bytes]:
    array = np.asarray(value)
    return array.dtype.name, array.shape, array.tobytes()


def assert_same_arrays(actual: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert set(actual) == set(expected)
    for key in expected:
        assert bits(actual[key]) == bits(expected[key]), key
