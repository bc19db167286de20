"""A guard: what a model shares stays shared through every transform that this project uses.

The documents' models apply one module in many places. Some ways of transforming a module copy it once per place without
a word: the model still runs, its gradients are wrong. The last test records which ways those are.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import flax_transformer as ft
from flax_transformer.layers import Buffer
from flax_transformer.masks import causal_mask, padding_mask
from flax_transformer.weights import Table, gpt2, table_for
from parity_tests.unit.small_models import DOUBLE, PRESETS, SOURCE_IDS, TARGET_IDS, build, hollow

# Distinct parameters of each preset that shares something, counted by hand.
PARAMETERS = {"encoder_decoder_document": 26, "paper_base": 61, "decoder_only_document": 17, "gpt2_small": 36}


def assert_one(*parts) -> None:
    assert all(part is parts[0] for part in parts)


def assert_shared(name: str, model) -> None:
    """Every place that should hold one object holds it, and nothing else is merged or doubled."""
    match name:
        case "encoder_decoder_document":
            for stack in (model.encoder, model.decoder):
                assert_one(*stack.layers)
            encoder, decoder = model.encoder.layers[1], model.decoder.layers[0]
            attentions = encoder.self_attention, decoder.self_attention, decoder.cross_attention
            for attention in attentions:
                assert_one(attention.query, attention.key, attention.value, attention.output)
            assert len({id(attention) for attention in attentions}) == 3
            assert_one(encoder.self_attention_residual, encoder.feed_forward_residual)
            assert_one(decoder.self_attention_residual, decoder.cross_attention_residual, decoder.feed_forward_residual)
        case "paper_base":
            assert_one(model.source_embedding, model.target_embedding)
            assert_one(model.source_embedding.embedding, model.output.kernel)
        case "decoder_only_document":
            assert_one(model.blocks[0].attention_residual, model.blocks[0].feed_forward_residual)
        case "gpt2_small":
            assert_one(model.embedding.embedding, model.output.kernel)
    found = [node for _, node in nnx.iter_graph(model) if isinstance(node, nnx.Param)]
    assert len(found) == PARAMETERS[name]


def through_split(model, path):
    return nnx.merge(*nnx.split(model))


def through_split_by_kind(model, path):
    return nnx.merge(*nnx.split(model, nnx.Param, Buffer))


def through_pure_arrays(model, path):
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    return nnx.merge(graph, jax.tree.map(jnp.copy, nnx.as_pure(params)), nnx.as_pure(rest))


def through_clone(model, path):
    return nnx.clone(model)


def through_nnx_jit(model, path):
    return nnx.jit(lambda model: model)(model)


def through_a_change_inside_nnx_jit(model, path):
    @nnx.jit
    def change(model):
        for _, node in nnx.iter_graph(model):
            if isinstance(node, nnx.Param):
                node[...] = node[...] * 2

    change(model)
    return model


def through_jax_jit_of_the_state(model, path):
    graph, state = nnx.split(model)
    return nnx.merge(graph, jax.jit(lambda state: jax.tree.map(lambda leaf: leaf * 2, state))(state))


def through_update(model, path):
    nnx.update(model, jax.tree.map(jnp.copy, nnx.state(model)))
    return model


def through_a_safetensors_file(model, path):
    ft.weights.save_safetensors(model, path / "weights")
    other = build(model.config, seed=1)
    ft.weights.load_safetensors(other, path / "weights")
    return other


def through_pytorch_names(model, path):
    other = build(model.config, seed=1)
    ft.weights.load_torch(other, ft.weights.to_torch(model))
    return other


TRANSFORMS = [
    through_split,
    through_split_by_kind,
    through_pure_arrays,
    through_clone,
    through_nnx_jit,
    through_a_change_inside_nnx_jit,
    through_jax_jit_of_the_state,
    through_update,
    through_a_safetensors_file,
    through_pytorch_names,
]


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", PARAMETERS)
def test_shared_modules_stay_shared(name, transform, tmp_path):
    assert_shared(name, transform(build(PRESETS[name]()), tmp_path))


@pytest.mark.parametrize("name", PARAMETERS)
def test_shared_modules_are_shared_in_a_real_and_in_an_abstract_model(name):
    assert_shared(name, hollow(PRESETS[name]()))
    if name == "encoder_decoder_document":
        assert_shared(name, ft.EncoderDecoder(PRESETS[name](), rngs=nnx.Rngs(0)))


@pytest.mark.parametrize("name", ["encoder_decoder_document", "decoder_only_document"])
def test_without_sharing_nothing_is_shared(name):
    shared, independent = (hollow(PRESETS[name](sharing=sharing)) for sharing in ("document", "none"))
    paths = [path for path, node in nnx.iter_graph(independent) if isinstance(node, nnx.Param)]
    # With two layers: 2 + 3 attentions of 4 projections each, 2 feed-forwards of 2, 2 + 3 norms and 2 at the ends.
    assert len(paths) == (2 * (8 + 4 + 4) + 2 * (16 + 4 + 6) + 4 + 4 if "encoder" in name else 19)
    assert len(paths) > len([node for _, node in nnx.iter_graph(shared) if isinstance(node, nnx.Param)])


WEIGHTS = np.random.default_rng(12).standard_normal((3, 5, 13))


def loss(model) -> jax.Array:
    if isinstance(model, ft.EncoderDecoder):
        source_mask, target_mask = padding_mask(SOURCE_IDS), causal_mask(5)
        return (model(SOURCE_IDS, TARGET_IDS, source_mask, target_mask) * WEIGHTS).sum()
    return (model(TARGET_IDS) * WEIGHTS).sum()


def table_of(model) -> Table:
    """GPT-2's names for any decoder-only model, since they tell its two norms apart."""
    return table_for(model) if isinstance(model, ft.EncoderDecoder) else gpt2.table(model)


def loss_and_gradient(model) -> tuple[jax.Array, dict[str, np.ndarray]]:
    """The loss, and under each foreign name the gradient of the parameter there, as the train step takes it."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    value, gradient = jax.jit(jax.value_and_grad(lambda params: loss(nnx.merge(graph, params, rest))))(params)
    return value, ft.weights.to_torch(nnx.merge(graph, gradient, rest), table=table_of(model))


@pytest.mark.parametrize("name", ["encoder_decoder_document", "decoder_only_document"])
def test_a_shared_gradient_is_the_sum_over_the_uses_of_the_parameter(float64, name):
    config = PRESETS[name](**DOUBLE, num_layers=1)
    shared, copies = build(config), build(dataclasses.replace(config, sharing="none"), seed=1)
    table = table_of(shared)
    ft.weights.load_torch(copies, ft.weights.to_torch(shared, table=table), table=table_of(copies))

    shared_loss, shared_gradient = loss_and_gradient(shared)
    copies_loss, copies_gradient = loss_and_gradient(copies)
    np.testing.assert_allclose(shared_loss, copies_loss, rtol=1e-13)
    sums: dict[str, np.ndarray] = {}
    for rule in table.rules:
        if rule.kind != "buffer":
            owner, name = rule.alias_of or rule.sources[0], rule.sources[0]
            sums[owner] = sums.get(owner, 0) + copies_gradient[name]
            np.testing.assert_array_equal(shared_gradient[name], shared_gradient[owner])
    assert len(sums) < len(table.rules) - 1
    for owner, total in sums.items():
        scale = max(np.abs(copies_gradient[rule.sources[0]]).max() for rule in table.rules if rule.kind != "buffer")
        np.testing.assert_allclose(shared_gradient[owner], total, rtol=0, atol=1e-13 * scale)


def stack_loss(encoder) -> jax.Array:
    x = jnp.asarray(np.random.default_rng(13).standard_normal((3, 7, 12)))
    return (encoder(x, None) * jnp.asarray(np.random.default_rng(14).standard_normal((3, 7, 12)))).sum()


def gradient_by_nnx_grad(encoder):
    return nnx.jit(nnx.grad(stack_loss))(encoder)


def gradient_over_pure_arrays(encoder):
    graph, params = nnx.split(encoder, nnx.Param)
    return jax.jit(jax.grad(lambda params: stack_loss(nnx.merge(graph, params))))(nnx.as_pure(params))


def gradient_under_pmap(encoder):
    graph, params = nnx.split(encoder, nnx.Param)
    replicated = jax.tree.map(lambda leaf: leaf[None], nnx.as_pure(params))
    gradient = jax.pmap(jax.grad(lambda params: stack_loss(nnx.merge(graph, params))))(replicated)
    return jax.tree.map(lambda leaf: leaf[0], gradient)


@functools.cache
def encoder_and_slope() -> tuple[nnx.Module, list[jax.Array], float]:
    """An encoder, a direction for each of its parameters, and the slope of the loss that way, without any gradient."""
    encoder = build(PRESETS["encoder_decoder_document"](**DOUBLE)).encoder
    graph, params = nnx.split(encoder, nnx.Param)
    leaves, structure = jax.tree.flatten(nnx.as_pure(params))
    rng, step = np.random.default_rng(15), 1e-6
    directions = [jnp.asarray(rng.standard_normal(leaf.shape)) for leaf in leaves]
    value = nnx.jit(stack_loss)

    def moved(sign: int) -> float:
        params = [leaf + sign * step * direction for leaf, direction in zip(leaves, directions, strict=True)]
        return float(value(nnx.merge(graph, structure.unflatten(params))))

    return encoder, directions, (moved(1) - moved(-1)) / (2 * step)


@pytest.mark.parametrize("gradient_of", [gradient_by_nnx_grad, gradient_over_pure_arrays, gradient_under_pmap])
def test_every_way_of_taking_gradients_sums_over_the_uses(float64, gradient_of):
    encoder, directions, slope = encoder_and_slope()
    gradient = jax.tree.leaves(gradient_of(encoder))
    product = sum(float((g * d).sum()) for g, d in zip(gradient, directions, strict=True))
    np.testing.assert_allclose(product, slope, rtol=1e-6)


def test_an_optimizer_updates_a_shared_parameter_once(float64):
    name = "encoder_decoder_document"
    model = build(PRESETS[name](**DOUBLE))
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    optimizer = optax.sgd(0.125, momentum=0.5)

    @jax.jit
    def step(params, state, rest):
        gradient = jax.tree.map(jnp.ones_like, params)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, rest

    state = optimizer.init(params)
    assert len([leaf for leaf in jax.tree.leaves(state) if leaf.ndim]) == PARAMETERS[name]
    before = ft.weights.to_torch(model)
    for _ in range(2):
        params, state, rest = step(params, state, rest)
    updated = nnx.merge(graph, params, rest)
    assert_shared(name, updated)
    for key, array in ft.weights.to_torch(updated).items():
        expected = before[key] if key.endswith(".pe") else before[key] - 0.125 * (1 + 1.5)
        np.testing.assert_allclose(array, expected, rtol=0, atol=1e-14)


class Twice(nnx.Module):
    """f = w * w with one parameter under two names: df/dw = 2 w = 6."""

    def __init__(self) -> None:
        self.first = nnx.Param(jnp.float32(3))
        self.second = self.first


def square(module: Twice) -> jax.Array:
    return module.first[...] * module.second[...]


def test_jax_transforms_of_a_module_itself_untie_it_which_is_why_we_split():
    assert jax.tree.leaves(nnx.grad(square)(Twice())) == [6]
    assert jax.tree.leaves(jax.grad(square)(Twice())) == [3, 3]
    doubled = jax.tree.map(lambda leaf: 2 * leaf, Twice())
    assert doubled.first is not doubled.second
    seen = []
    jax.jit(lambda module: seen.append(module.first is module.second))(Twice())
    nnx.jit(lambda module: seen.append(module.first is module.second))(Twice())
    assert seen == [False, True]
