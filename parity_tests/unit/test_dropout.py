"""Dropout masks: their law, their independence of how a batch is laid out, and where a model asks for them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_transformer.dropout import Dropout, DropoutSource, RandomDropout
from parity_tests.unit.small_models import (
    DOUBLE,
    PRESETS,
    TARGET_IDS,
    build,
    decoder_only_config,
    encoder_decoder_config,
    hollow,
    random_ids,
)


def keys_of(seed: int, count: int) -> jax.Array:
    return jax.random.split(jax.random.key(seed), count)


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.75])
def test_masks_keep_one_minus_the_rate_independently(rate):
    keep = np.asarray(RandomDropout(keys_of(1, 4)).keep((4, 50, 60), rate), np.float64)
    count = keep.size
    error = np.sqrt(rate * (1 - rate) / count)
    assert abs(keep.mean() - (1 - rate)) < 5 * error
    assert np.all(np.abs(keep.mean(axis=(1, 2)) - (1 - rate)) < 5 * 2 * error)
    centred = keep - (1 - rate)
    for neighbours in (
        centred[1:] * centred[:-1],
        centred[:, 1:] * centred[:, :-1],
        centred[..., 1:] * centred[..., :-1],
    ):
        assert abs(neighbours.mean()) < 5 * rate * (1 - rate) / np.sqrt(neighbours.size)


@pytest.mark.parametrize("rate", [0.1, 0.75])
def test_dropout_zeroes_or_scales_and_keeps_the_mean(rate):
    x = jnp.asarray(np.random.default_rng(2).standard_normal((4, 50, 60)) + 3, jnp.float32)
    y = Dropout(rate)(x, RandomDropout(keys_of(3, 4)))
    kept = np.asarray(RandomDropout(keys_of(3, 4)).keep(x.shape, rate))
    assert y.dtype == x.dtype
    assert not np.any(np.asarray(y)[~kept])
    np.testing.assert_allclose(np.asarray(y)[kept], np.asarray(x)[kept] / (1 - rate), rtol=3e-7)
    second_moment = float(jnp.square(x).mean())
    assert abs(float(y.mean() - x.mean())) < 5 * np.sqrt(second_moment * rate / (1 - rate) / x.size)
    assert abs(float(jnp.square(y).mean()) * (1 - rate) / second_moment - 1) < 0.05


def test_neither_a_missing_source_nor_a_rate_of_zero_changes_anything():
    x = jnp.asarray(np.random.default_rng(2).standard_normal((3, 5, 7)), jnp.float32)
    source = RandomDropout(keys_of(4, 3))
    assert Dropout(0.5)(x, None) is x
    assert Dropout(0.0)(x, source) is x
    # Nor does a rate of zero use up a site: the next mask is the first.
    np.testing.assert_array_equal(source.keep((3, 50), 0.5), RandomDropout(keys_of(4, 3)).keep((3, 50), 0.5))


def test_an_examples_mask_does_not_depend_on_the_batch_around_it():
    keys, shape = keys_of(5, 7), (40,)
    together = RandomDropout(keys)
    sites = [together.keep((7, *shape), 0.4) for _ in range(3)]
    for rows in ([2], [6, 0, 2], [5, 5]):
        alone = RandomDropout(keys[np.array(rows)])
        for site in sites:
            np.testing.assert_array_equal(alone.keep((len(rows), *shape), 0.4), site[np.array(rows)])


def test_every_site_and_every_example_has_a_mask_of_its_own():
    source = RandomDropout(keys_of(6, 3))
    masks = [np.asarray(mask) for _ in range(4) for mask in source.keep((3, 100), 0.5)]
    for i, j in np.ndindex(len(masks), len(masks)):
        agreement = (masks[i] == masks[j]).mean()
        assert agreement == 1 if i == j else 0.25 < agreement < 0.75


def test_the_same_keys_give_the_same_masks_with_and_without_jit():
    keys = keys_of(7, 3)

    def three_sites(keys):
        source = RandomDropout(keys)
        return [source.keep((3, 5, 7), 0.3) for _ in range(3)]

    for eager, compiled in zip(three_sites(keys), jax.jit(three_sites)(keys), strict=True):
        np.testing.assert_array_equal(eager, compiled)


@pytest.mark.parametrize(
    "keys",
    [
        lambda: jax.random.key(0),
        lambda: jax.random.PRNGKey(0),
        lambda: keys_of(0, 6).reshape(2, 3),
        lambda: jnp.ones(3),
    ],
)
def test_anything_but_one_key_per_example_is_refused(keys):
    words = r"one jax.random.key per example, shape \(B,\), got .* of shape .*; split one key with jax.random.split"
    with pytest.raises(ValueError, match=words):
        RandomDropout(keys())


@pytest.mark.parametrize("given", [0.1, 0.0, jax.random.key(0), keys_of(0, 3), True])
@pytest.mark.parametrize("name", ["decoder_only", "encoder_decoder"])
def test_a_call_that_is_given_anything_but_a_source_says_what_to_give(name, given):
    config = decoder_only_config() if name == "decoder_only" else encoder_decoder_config()
    model = build(config, seed=1)
    with pytest.raises(ValueError, match=r"dropout= takes a source of masks, got .*RandomDropout\(jax.random.split"):
        model(*random_ids(config), *([] if name == "decoder_only" else [None, None]), dropout=given)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_another_number_of_keys_than_examples_is_refused(count):
    with pytest.raises(ValueError, match=f"dropout has {count} keys for a batch of 3; pass one key per example"):
        RandomDropout(keys_of(8, count)).keep((3, 5), 0.1)


class Recording(DropoutSource):
    """Keeps everything and records every site that asks."""

    def __init__(self):
        self.sites = []

    def keep(self, shape, rate):
        self.sites.append((shape, rate))
        return jnp.ones(shape, bool)


def sites_of(config) -> list[tuple[tuple[int, ...], float]]:
    """Where one call of the model of ``config`` asks for masks, found by tracing alone."""
    source, model, ids = Recording(), hollow(config), random_ids(config)
    masks = [None] * (2 * len(ids) - 2)
    nnx.eval_shape(lambda model: model(*ids, *masks, dropout=source), model)
    return source.sites


RATES = dict(dropout=0.1, attention_dropout=0.2, activation_dropout=0.3)


@pytest.mark.parametrize("sharing", ["none", "document"])
def test_a_decoder_only_model_asks_for_masks_in_execution_order(sharing):
    block = [((3, 3, 5, 5), 0.2), ((3, 5, 12), 0.1), ((3, 5, 20), 0.3), ((3, 5, 12), 0.1)]
    assert sites_of(decoder_only_config(sharing=sharing, **RATES)) == [((3, 5, 12), 0.1), *block, *block]


@pytest.mark.parametrize("sharing", ["none", "document"])
def test_an_encoder_decoder_asks_for_masks_in_execution_order(sharing):
    encoder_layer = [((3, 3, 7, 7), 0.2), ((3, 7, 12), 0.1), ((3, 7, 20), 0.3), ((3, 7, 12), 0.1)]
    self_attention = [((3, 3, 5, 5), 0.2), ((3, 5, 12), 0.1)]
    cross_attention = [((3, 3, 5, 7), 0.2), ((3, 5, 12), 0.1)]
    decoder_layer = [*self_attention, *cross_attention, ((3, 5, 20), 0.3), ((3, 5, 12), 0.1)]
    expected = [((3, 7, 12), 0.1), *encoder_layer * 2, ((3, 5, 12), 0.1), *decoder_layer * 2]
    assert sites_of(encoder_decoder_config(sharing=sharing, **RATES)) == expected


@pytest.mark.parametrize(
    ("rate", "sites"), [("dropout", 5), ("attention_dropout", 2), ("activation_dropout", 2), (None, 0)]
)
def test_each_rate_acts_at_its_own_sites_only(rate, sites):
    rates = {name: 0.25 if name == rate else 0.0 for name in RATES}
    assert len(sites_of(decoder_only_config(**rates))) == sites


def test_the_documents_model_drops_attention_at_a_tenth_whatever_dropout_is():
    sites = sites_of(PRESETS["encoder_decoder_document"](dropout=0.0))
    assert [rate for _, rate in sites] == [0.1] * 6
    assert {len(shape) for shape, _ in sites} == {4}


def test_a_model_drops_out_where_it_is_given_a_source_and_nowhere_else(float64):
    model, undropped = (
        build(decoder_only_config(num_layers=1, **DOUBLE, **rates)) for rates in (RATES, dict(dropout=0.0))
    )
    call = nnx.jit(lambda model, ids, keys: model(ids, dropout=RandomDropout(keys)))
    plain = nnx.jit(lambda model: model(TARGET_IDS))
    np.testing.assert_array_equal(plain(model), plain(undropped))
    np.testing.assert_allclose(call(undropped, TARGET_IDS, keys_of(9, 3)), plain(model), rtol=0, atol=1e-13)
    dropped = call(model, TARGET_IDS, keys_of(9, 3))
    np.testing.assert_array_equal(dropped, call(model, TARGET_IDS, keys_of(9, 3)))
    for other in (plain(model), call(model, TARGET_IDS, keys_of(10, 3))):
        assert np.all(np.abs(dropped - other).max(axis=(1, 2)) > 1e-3)
    order = np.array([2, 0, 1])
    reordered = call(model, TARGET_IDS[order], keys_of(9, 3)[order])
    np.testing.assert_allclose(reordered, dropped[order], rtol=0, atol=1e-13)
