"""Layers rematerialised and scanned compute what layers compute that are run one after the other and kept."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flax_transformer as ft
from flax_transformer import training
from flax_transformer.dropout import RandomDropout, RecordedDropout, ReplayedDropout, count_sites
from flax_transformer.stacks import unrolled
from parity_tests.unit.small_models import BATCH, DOUBLE, PRESETS, assert_same_arrays, bits_of, build, random_ids

DROPOUTS: dict[str, Any] = dict(dropout=0.2, attention_dropout=0.3, activation_dropout=0.1)
WAYS = [("unrolled", "layers"), ("scanned", "none"), ("scanned", "layers")]
every_way = pytest.mark.parametrize(("layers", "rematerialise"), WAYS)
# Layers that differ, and one that is applied twice, whose modules are shared within it.
MODELS = ["decoder_only_small", "encoder_decoder_document"]
PROGRAMS = [*(("decoder_only_small", *way) for way in WAYS), ("encoder_decoder_document", *WAYS[-1])]


def config_of(name: str, **options: Any) -> Any:
    return PRESETS[name](**DOUBLE, **DROPOUTS, **options)


def source() -> RandomDropout:
    return RandomDropout(jax.random.split(jax.random.key(5), BATCH))


def call(config: Any, model: Any, dropout: Any) -> jax.Array:
    masks = () if isinstance(config, ft.DecoderOnlyConfig) else (None, ft.masks.causal_mask(5))
    return model(*random_ids(config), *masks, dropout=dropout)


def loss_and_gradients(config: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    structure, parameters, buffers = training.split_model(build(config))

    def loss(parameters: dict[str, jax.Array]) -> jax.Array:
        logits = call(config, structure.merge(parameters, buffers), source())
        return (logits * jnp.asarray(np.random.default_rng(3).standard_normal(logits.shape))).sum()

    # Optimising machine code takes most of the time and changes nothing about what is computed.
    return jax.jit(jax.value_and_grad(loss), compiler_options={"xla_backend_optimization_level": 0})(parameters)


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    with jax.enable_x64(True):
        return {name: loss_and_gradients(config_of(name)) for name in MODELS}


@pytest.mark.parametrize(("name", "layers", "rematerialise"), PROGRAMS)
def test_every_way_takes_the_gradients_of_the_plain_one_with_the_same_dropout(
    float64, expected, name, layers, rematerialise
):
    value, gradients = loss_and_gradients(config_of(name, layers=layers, rematerialise=rematerialise))
    expected_value, expected_gradients = expected[name]
    np.testing.assert_allclose(value, expected_value, rtol=1e-12)
    assert gradients.keys() == expected_gradients.keys()
    for key, gradient in gradients.items():
        whole = expected_gradients[key]
        module = [
            leaf for other, leaf in expected_gradients.items() if other.rpartition(".")[0] == key.rpartition(".")[0]
        ]
        scale = max(np.abs(leaf).max() for leaf in module)
        np.testing.assert_allclose(gradient, whole, rtol=0, atol=1e-12 * scale, err_msg=key)


@every_way
def test_every_way_asks_for_the_sites_of_the_plain_one_and_leaves_the_source_where_it_leaves_it(layers, rematerialise):
    config = PRESETS["decoder_only_small"](**DROPOUTS, num_layers=3)
    other = dataclasses.replace(config, layers=layers, rematerialise=rematerialise)
    plain, ours = source(), source()
    jax.eval_shape(lambda: call(config, build(config), plain))
    jax.eval_shape(lambda: call(other, build(other), ours))
    np.testing.assert_array_equal(ours.keep((BATCH, 7), 0.5), plain.keep((BATCH, 7), 0.5))


def test_the_source_of_a_layer_begins_where_the_layers_before_it_end():
    one_by_one, by_layer = source(), source()
    masks = [one_by_one.keep((BATCH, 7), 0.5) for _ in range(8)]
    by_layer.keep((BATCH, 7), 0.5)
    layers = by_layer.of_layers(3, 2)
    for layer in range(3):
        of_layer = layers(jnp.asarray(layer))
        for site in range(2):
            np.testing.assert_array_equal(of_layer.keep((BATCH, 7), 0.5), masks[1 + 2 * layer + site])
    np.testing.assert_array_equal(by_layer.keep((BATCH, 7), 0.5), masks[7])


def test_sites_are_counted_without_computing():
    config = PRESETS["decoder_only_small"](**DROPOUTS)
    model = build(config)
    assert count_sites(lambda dropout: call(config, model, dropout)) == 1 + 2 * 4


@pytest.mark.parametrize("other", [lambda: ReplayedDropout([]), lambda: RecordedDropout(source())])
def test_a_source_that_must_be_asked_site_after_site_is_refused_by_scanned_layers(other):
    config = PRESETS["decoder_only_small"](**DROPOUTS | dict(dropout=0.0), layers="scanned")
    with pytest.raises(ValueError, match=r"site after site.*layers=\"unrolled\", or RandomDropout"):
        call(config, build(config), other())


@every_way
def test_parameters_have_the_same_names_and_a_model_becomes_the_plain_one_without_a_copy(layers, rematerialise):
    config = PRESETS["encoder_decoder_document"]()
    model = build(dataclasses.replace(config, layers=layers, rematerialise=rematerialise))
    plain = build(config)
    assert_same_arrays(ft.weights.to_torch(model), ft.weights.to_torch(plain))
    again = unrolled(model)
    assert bits_of(again) == bits_of(model)
    assert nnx.graphdef(again) == nnx.graphdef(plain)
    assert again.output.kernel[...] is model.output.kernel[...]


def test_models_of_one_configuration_have_one_structure():
    config = PRESETS["decoder_only_small"](layers="scanned", rematerialise="layers")
    assert training.split_model(build(config))[0] == training.split_model(build(config, seed=1))[0]


def products(config: Any) -> int:
    """How many matrix products, in all loops' bodies once, the gradient is made of."""
    structure, parameters, buffers = training.split_model(build(config))
    loss = lambda parameters: call(config, structure.merge(parameters, buffers), None).sum()  # noqa: E731
    return str(jax.make_jaxpr(jax.grad(loss))(parameters)).count("dot_general[")


def test_rematerialised_layers_multiply_again_and_scanned_ones_stand_in_the_program_once():
    def count(**options: Any) -> int:
        return products(PRESETS["decoder_only_small"](**DROPOUTS, **options))

    of_a_layer, head = 8, 1  # products forward: q, k, v, scores, mixture, output, up, down; logits
    plain = count(num_layers=3)
    assert plain == 3 * (3 * of_a_layer + head - head) + 3 * head
    assert count(num_layers=3, rematerialise="layers") - plain == 3 * (of_a_layer - 1)
    assert count(num_layers=3, layers="scanned") == count(num_layers=5, layers="scanned") == 3 * of_a_layer + 3 * head
