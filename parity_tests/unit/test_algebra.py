"""Laws that a Transformer obeys whatever its weights are, in float64: no reference implementation is needed.

Each law has a counterpart that must not hold, so that a model which ignores its input cannot pass.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_transformer.attention import MultiHeadAttention
from flax_transformer.config import EncoderDecoderConfig
from flax_transformer.masks import causal_mask, combine_masks, padding_mask
from parity_tests.unit.small_models import DOUBLE, PRESETS, SOURCE_IDS, TARGET_IDS, build

LONG_SOURCE, LONG_TARGET = 9, 8  # what padding lengthens 7 and 5 to
MODELS = {
    "encoder_decoder_document": {},
    "paper_base": {},
    "encoder_decoder_small": dict(mask_fill="minus_inf", activation="silu"),
    "decoder_only_document": {},
    "gpt2_small": dict(mask_fill="minus_1e9"),
}
every_model = pytest.mark.parametrize("name", MODELS)


@functools.cache
def model_of(name: str, **options: Any) -> Any:
    return build(PRESETS[name](**{**MODELS[name], **DOUBLE, **options}))


def is_encoder_decoder(model) -> bool:
    return isinstance(model.config, EncoderDecoderConfig)


def forward(model, source, target):
    """Logits of padded ids, under the masks that training uses."""
    if is_encoder_decoder(model):
        target_mask = combine_masks(padding_mask(target), causal_mask(target.shape[1]))
        return model(source, target, padding_mask(source), target_mask)
    return model(target, padding_mask(target))


run = nnx.jit(forward)


def logits_of(model, source=SOURCE_IDS, target=TARGET_IDS) -> np.ndarray:
    return np.asarray(run(model, jnp.asarray(source), jnp.asarray(target)))


def lengthened(ids: np.ndarray, length: int, fill) -> np.ndarray:
    return np.concatenate([ids, np.broadcast_to(fill, (len(ids), length - ids.shape[1])).astype(ids.dtype)], axis=1)


def assert_equal(actual: np.ndarray, expected: np.ndarray) -> None:
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-12 * np.abs(expected).max())


def assert_different(actual: np.ndarray, expected: np.ndarray) -> None:
    assert np.abs(actual - expected).max() > 1e-5 * np.abs(expected).max()


@every_model
def test_a_position_sees_nothing_after_itself(float64, name):
    model, changed = model_of(name), TARGET_IDS.copy()
    changed[:, 3:] = changed[:, 3:] % 12 + 1
    before, after = logits_of(model), logits_of(model, target=changed)
    assert_equal(after[:, :3], before[:, :3])
    for position in (3, 4):
        assert_different(after[:, position], before[:, position])


@every_model
def test_a_position_sees_itself_and_everything_before(float64, name):
    model = model_of(name)
    before = logits_of(model)
    for position in (0, 4):
        changed = TARGET_IDS.copy()
        changed[:, position] = changed[:, position] % 12 + 1
        after = logits_of(model, target=changed)
        for later in range(position, 5):
            assert_different(after[:, later], before[:, later])


@every_model
def test_the_logits_of_a_prefix_are_the_prefix_of_the_logits(float64, name):
    model = model_of(name)
    longer = lengthened(TARGET_IDS, LONG_TARGET, [[3, 1, 4], [1, 5, 9], [2, 6, 5]])
    source = lengthened(SOURCE_IDS, LONG_SOURCE, 0)
    assert_equal(logits_of(model, source, longer)[:, :5], logits_of(model))


@every_model
def test_more_padding_changes_no_real_position(float64, name):
    model = model_of(name)
    source, target = lengthened(SOURCE_IDS, LONG_SOURCE, 0), lengthened(TARGET_IDS, LONG_TARGET, 0)
    assert_equal(logits_of(model, source, target)[:, :5], logits_of(model))
    # Were the same positions not padding, they would be seen.
    if is_encoder_decoder(model):
        assert_different(logits_of(model, lengthened(SOURCE_IDS, LONG_SOURCE, 4), target)[:, :5], logits_of(model))


@every_model
def test_padding_within_a_sentence_is_invisible_to_all_others(float64, name):
    model = model_of(name)

    @nnx.jit
    def run_masked(model, source, target, source_mask, target_mask):
        if is_encoder_decoder(model):
            target_mask = combine_masks(target_mask, causal_mask(5))
            return model(source, target, source_mask, target_mask)
        return model(target, target_mask)

    hidden_source, hidden_target = SOURCE_IDS.copy(), TARGET_IDS.copy()
    hidden_source[:, 2] = hidden_target[:, 1] = 0
    masks = padding_mask(jnp.asarray(hidden_source)), padding_mask(jnp.asarray(hidden_target))
    results = []
    for replacement in (1, 7):
        source, target = SOURCE_IDS.copy(), TARGET_IDS.copy()
        source[:, 2] = target[:, 1] = replacement
        results.append(np.asarray(run_masked(model, jnp.asarray(source), jnp.asarray(target), *masks)))
    others = np.array([0, 2, 3, 4])
    assert_equal(results[0][:, others], results[1][:, others])
    assert_different(results[0][:, 1], results[1][:, 1])


@every_model
def test_examples_of_a_batch_do_not_see_each_other(float64, name):
    model, order = model_of(name), np.array([2, 0, 1])
    assert_equal(logits_of(model, SOURCE_IDS[order], TARGET_IDS[order]), logits_of(model)[order])
    changed = TARGET_IDS.copy()
    changed[1] = changed[1] % 12 + 1
    assert_equal(logits_of(model, target=changed)[[0, 2]], logits_of(model)[[0, 2]])
    assert_different(logits_of(model, target=changed)[1], logits_of(model)[1])


def attentions_of(model) -> list[MultiHeadAttention]:
    found = [node for _, node in nnx.iter_graph(model) if isinstance(node, MultiHeadAttention)]
    assert len(found) == (6 if is_encoder_decoder(model) else model.config.num_layers)
    return found


def permuted(model, *, projections: tuple[str, ...]) -> Any:
    """A copy whose attentions have their heads in another order, each its own, in these projections."""
    model = nnx.clone(model)
    rng = np.random.default_rng(7)
    head_size = model.config.head_size
    for attention in attentions_of(model):
        order = np.array([[1, 2, 0], [2, 0, 1], [0, 2, 1]])[rng.integers(3)]
        columns = (order[:, None] * head_size + np.arange(head_size)).ravel()
        for name in projections:
            linear = getattr(attention, name)
            if name == "output":
                linear.kernel[...] = linear.kernel[...][columns]
            else:
                linear.kernel[...] = linear.kernel[...][:, columns]
                if linear.bias is not None:
                    linear.bias[...] = linear.bias[...][columns]
    return model


@every_model
def test_the_order_of_the_heads_does_not_matter(float64, name):
    # Where the document shares one projection, its heads cannot be reordered in one role alone.
    model = model_of(name, sharing="none")
    expected = logits_of(model)
    assert_equal(logits_of(permuted(model, projections=("query", "key", "value", "output"))), expected)
    for part in (("query",), ("query", "key"), ("query", "key", "value"), ("output",)):
        assert_different(logits_of(permuted(model, projections=part)), expected)


def shifted(model, projection: str) -> Any:
    """A copy with a random vector added to the bias of this projection in every attention."""
    model = nnx.clone(model)
    rng = np.random.default_rng(8)
    for attention in attentions_of(model):
        bias = getattr(attention, projection).bias
        bias[...] = bias[...] + jnp.asarray(rng.standard_normal(bias.shape))
    return model


@every_model
def test_the_bias_of_the_keys_does_not_matter(float64, name):
    # query . bias is the same for every key, and the softmax ignores what all keys share.
    model = model_of(name, sharing="none", projection_bias="with")
    expected = logits_of(model)
    assert_equal(logits_of(shifted(model, "key")), expected)
    for other in ("query", "value", "output"):
        assert_different(logits_of(shifted(model, other)), expected)


@pytest.mark.parametrize("name", ["paper_base", "decoder_only_document"])
def test_the_gradient_of_the_key_bias_is_zero(float64, name):
    model = model_of(name, sharing="none", projection_bias="with")
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    weights = jnp.asarray(np.random.default_rng(9).standard_normal((3, 5, 13)))

    def loss(params):
        logits = forward(nnx.merge(graph, params, rest), jnp.asarray(SOURCE_IDS), jnp.asarray(TARGET_IDS))
        return (logits * weights).sum()

    biases: dict[Any, list[float]] = {"query": [], "key": []}
    for path, leaf in nnx.to_flat_state(jax.jit(jax.grad(loss))(params)):
        if path[-1] == "bias" and path[-2] in biases:
            biases[path[-2]].append(float(jnp.abs(leaf[...]).max()))
    assert len(biases["key"]) == len(attentions_of(model))
    assert max(biases["key"]) < 1e-12 * min(biases["query"])
