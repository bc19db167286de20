"""Mixed precision: what a TPU does to float32 products by default, on this machine, forward and backward."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_transformer.commands import jobs, train_options
from flax_transformer.commands.recipes import Recipe
from flax_transformer.config import DecoderOnlyConfig, EncoderDecoderConfig, TransformerConfig
from flax_transformer.losses import cross_entropy
from flax_transformer.masks import causal_mask, padding_mask
from flax_transformer.numerics import Numerics, mixed_einsum
from flax_transformer.parity import tolerances
from flax_transformer.parity.emulation import Mode, emulate, products_in_sequence
from flax_transformer.training import split_model
from flax_transformer.vocabulary_loss import fused_cross_entropy
from parity_tests.unit import small_models

FAST: Any = {"xla_backend_optimization_level": 0}  # compiling is what takes the time
LABELS = np.random.default_rng(12).integers(0, small_models.TARGET_VOCABULARY, small_models.TARGET_IDS.shape, np.int32)
# Both sides round the same factors and add the same products in another order.
ROUNDING = 1e-6


def relative(expected: Any, actual: Any) -> float:
    a, b = (
        np.concatenate([np.ravel(leaf).astype(np.float64) for leaf in jax.tree.leaves(t)]) for t in (expected, actual)
    )
    return float(np.linalg.norm(a - b) / np.linalg.norm(a))


SPECS = {
    "...i,io->...o": ((3, 5, 7), (7, 11)),
    "...d,vd->...v": ((3, 5, 7), (13, 7)),
    "BTNH,BSNH->BNTS": ((3, 5, 2, 7), (3, 11, 2, 7)),
    "BNTS,BSNH->BTNH": ((3, 2, 5, 11), (3, 11, 2, 7)),
    "CD,CN->DN": ((13, 7), (13, 5)),
}


@pytest.mark.parametrize("spec", SPECS)
def test_a_product_and_its_gradients_are_those_of_the_emulated_tpu(spec):
    rng = np.random.default_rng(1)
    left, right = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in SPECS[spec])

    def value(left, right, product):
        result = product(spec, left, right)
        return jnp.sum(jnp.sin(result)), result

    gradient = functools.partial(jax.value_and_grad(value, argnums=(0, 1), has_aux=True), product=jnp.einsum)
    ours = jax.jit(jax.value_and_grad(functools.partial(value, product=mixed_einsum), (0, 1), has_aux=True))(
        left, right
    )
    emulated = jax.jit(emulate(gradient, "tpu_default"))(left, right)
    for one, other in zip(jax.tree.leaves(emulated), jax.tree.leaves(ours), strict=True):
        assert one.dtype == other.dtype == "float32"
        assert relative(one, other) < ROUNDING
    exact = jax.jit(gradient)(left, right)
    for one, other in zip(jax.tree.leaves(exact[1]), jax.tree.leaves(ours[1]), strict=True):
        assert 1e-4 < relative(one, other) < 2e-2


def test_a_product_has_one_meaning_under_every_transformation_and_whatever_is_transposed():
    """XLA for CPUs stops with "BF16 x BF16 = F32" where it folds a transposition into such a product, or gives a result
    a transposed layout: a tied head written as x @ w.T did that to the gradient of w."""
    rng = np.random.default_rng(2)
    x, w = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((3, 32, 64), (48, 64)))

    def value(w, x):
        return jnp.sum(jnp.square(mixed_einsum("ab,bc->ac", x, w.T).T))

    gradient = jax.grad(value)
    expected = [jax.jit(gradient)(w, one) for one in x]
    rounded = jax.jit(emulate(jax.grad(lambda w, x: jnp.sum(jnp.square((x @ w.T).T))), "tpu_default"))
    assert relative(expected, [rounded(w, one) for one in x]) < ROUNDING

    def looped(w, x):
        return jax.lax.scan(lambda carry, one: (carry, gradient(w, one)), 0, x)[1]

    others = {
        "vmap": jax.jit(jax.vmap(gradient, (None, 0)))(w, x),
        "vmap of both": jax.jit(jax.vmap(gradient))(jnp.stack([w, w, w]), x),
        "remat": [jax.jit(jax.grad(jax.checkpoint(value)))(w, one) for one in x],
        "scan": jax.jit(looped)(w, x),
        "pmap": [jax.pmap(gradient)(w[None], one[None])[0] for one in x],
        "eager": [gradient(w, one) for one in x],
    }
    for name, actual in others.items():
        assert relative(expected, list(actual)) < ROUNDING, name


def test_only_float32_factors_are_mixed():
    with pytest.raises(ValueError, match="round float32 factors to bfloat16, got bfloat16 and float32"):
        mixed_einsum("ab,bc->ac", jnp.zeros((3, 5), jnp.bfloat16), jnp.zeros((5, 7)))
    with pytest.raises(ValueError, match=r"precision='mixed' .* needs compute_dtype='float32', got 'bfloat16'"):
        DecoderOnlyConfig.small(vocab_size=11, precision="mixed", compute_dtype="bfloat16")


def loss_of(config: TransformerConfig):
    """Of parameters and buffers: the mean loss, and the logits."""
    structure = split_model(small_models.hollow(config))[0]

    def loss(parameters, buffers):
        model = structure.merge(parameters, buffers)
        if isinstance(config, EncoderDecoderConfig):
            source, target = small_models.SOURCE_IDS, small_models.TARGET_IDS
            logits = model(source, target, padding_mask(jnp.asarray(source)), causal_mask(target.shape[1]))
        else:
            logits = model(small_models.TARGET_IDS)
        return cross_entropy(logits, jnp.asarray(LABELS)).mean, logits

    return loss


@functools.cache
def program(name: str, kind: train_options.TrainingPrecision, mode: Mode | None = None) -> Any:
    config = small_models.PRESETS[name](num_layers=1, **train_options.PRECISIONS[kind])
    gradient = jax.value_and_grad(loss_of(config), has_aux=True)
    return jax.jit(gradient if mode is None else emulate(gradient, mode), compiler_options=FAST)


@pytest.mark.parametrize("name", ["decoder_only_document", "encoder_decoder_document"])
def test_mixed_models_are_the_emulated_tpu_and_keep_its_budget(name):
    build = functools.partial(small_models.PRESETS[name], num_layers=1)
    programs = [program(name, "float32"), program(name, "mixed"), program(name, "float32", "tpu_default")]
    errors: dict[str, list[float]] = {"outputs": [], "gradients": []}
    differences: dict[str, list[float]] = {"outputs": [], "gradients": []}
    for seed in range(tolerances.BUDGET_SEEDS):
        _, parameters, buffers = split_model(small_models.build(build(), seed=seed))
        truth, ours, emulated = (
            {"outputs": logits, "gradients": gradients}
            for (_, logits), gradients in (run(parameters, buffers) for run in programs)
        )
        for quantity in errors:
            errors[quantity].append(relative(truth[quantity], ours[quantity]))
            differences[quantity].append(relative(emulated[quantity], ours[quantity]))
    loss = loss_of(build())
    for quantity, function in (("outputs", loss), ("gradients", jax.grad(loss, has_aux=True))):
        products = products_in_sequence(function, parameters, buffers)
        allowed = tolerances.budget("tpu_default", quantity, products=products, activation="relu")
        assert allowed / 40 < np.median(errors[quantity]) < allowed, quantity
        # Float32 noise, save where it carries a factor over the middle between two bfloat16 numbers.
        assert np.median(differences[quantity]) < np.median(errors[quantity]) / 100, (quantity, differences)
        assert min(differences[quantity]) < 2 * ROUNDING, (quantity, differences)


def test_a_bfloat16_model_keeps_float32_weights_and_gradients_within_its_budget():
    name = "decoder_only_document"
    _, parameters, buffers = split_model(small_models.build(small_models.PRESETS[name]()))
    truth, ours = (program(name, kind)(parameters, buffers) for kind in ("float32", "bfloat16"))
    assert {str(array.dtype) for array in jax.tree.leaves(ours[1])} == {"float32"}
    assert relative(truth[1], ours[1]) < 0.1
    assert abs(float(truth[0][0] - ours[0][0])) < 0.02 * float(truth[0][0])


def test_the_fused_loss_is_mixed_as_the_plain_one():
    config = small_models.PRESETS["decoder_only_document"](precision="mixed")
    rng = np.random.default_rng(4)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    arrays = {"features": draw(3, 5, 7), "kernel": draw(37, 7), "bias": draw(37)}
    labels, weights = jnp.asarray(rng.integers(0, 37, (3, 5)), jnp.int32), jnp.abs(draw(3, 5))
    mixed = Numerics.of(config)

    def plain(arrays):
        logits = mixed.einsum("...d,vd->...v", arrays["features"], arrays["kernel"], result="float32")
        logits = logits + arrays["bias"][None, None]
        return cross_entropy(logits, labels, weights=weights, label_smoothing=0.1).mean

    def fused(arrays, **options):
        return fused_cross_entropy(
            **arrays, labels=labels, weights=weights, label_smoothing=0.1, numerics=mixed, **options
        ).mean

    expected = jax.jit(jax.value_and_grad(plain))(arrays)
    for options in ({"chunk": 8}, {"chunk": 5, "shards": 3}):
        actual = jax.jit(jax.value_and_grad(functools.partial(fused, **options)))(arrays)
        for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
            assert relative(one, other) < 2e-6


def test_the_option_decides_two_fields_of_the_configuration_and_the_record_keeps_its_word():
    for kind, fields in train_options.PRECISIONS.items():
        options = train_options.DecoderOnlyOptions(training=train_options.TrainingOptions(precision=kind))
        config = DecoderOnlyConfig.small(vocab_size=11, **jobs.chosen_sizes(options, DecoderOnlyConfig))
        assert {"precision": config.precision, "compute_dtype": config.compute_dtype} == fields
        assert config.param_dtype == "float32"
        recipe = Recipe(steps=3, batch_size=2, learning_rate=1e-3)
        record = jobs.describe("decoder-only", options, config=config, recipe=recipe, resolved={}, data={})
        assert record["options"]["precision"] == kind
        assert record["model"]["precision"] == fields["precision"]  # so that another one is refused on resuming
