"""The train step against a plain computation of the same thing: gradients, sharing, dropout, compilations."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import flax_transformer as ft
from flax_transformer import optimizers, training
from flax_transformer.losses import LossSums, cross_entropy

B, T, V = 4, 5, 11
CONFIG = ft.DecoderOnlyConfig.small(
    vocab_size=V, d_model=6, d_ff=7, num_heads=3, num_layers=1, max_length=T, position_table="exp"
)


class Batch(NamedTuple):
    inputs: jax.Array
    labels: jax.Array
    weights: jax.Array


def random_batch(seed: int) -> Batch:
    """Every row has another number of tokens that count."""
    rng = np.random.default_rng(seed)
    weights = np.arange(T) < np.asarray([5, 1, 3, 4])[:, None]
    draw = lambda: jnp.asarray(rng.integers(0, V, (B, T)), jnp.int32)  # noqa: E731
    return Batch(draw(), draw(), jnp.asarray(weights, jnp.float32))


def build(config=CONFIG, seed: int = 0):
    return training.split_model(ft.DecoderOnly(config, rngs=nnx.Rngs(seed)))


def adamw():
    return optimizers.adamw(optimizers.warmup_cosine(0.1, warmup_steps=2, total_steps=9), max_norm=0.5)


def prepare(config=CONFIG, optimizer=None, loss=training.next_token_loss, **options):
    structure, parameters, buffers = build(config)
    optimizer = adamw() if optimizer is None else optimizer
    step = training.make_train_step(structure, loss, optimizer, **options)
    return training.init_state(parameters, buffers, optimizer, seed=3), step


def recorder():
    """An optimizer whose state is the gradient that it was given, and which changes nothing."""

    def update(updates, state, params=None):
        return jax.tree.map(jnp.zeros_like, updates), updates

    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)


def assert_close(actual, expected, **tolerance):
    assert actual.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(actual[name], expected[name], err_msg=name, **tolerance)


def test_a_model_comes_back_whole_from_its_parts():
    model = ft.DecoderOnly(CONFIG, rngs=nnx.Rngs(0))
    structure, parameters, buffers = training.split_model(model)
    merged = structure.merge(parameters, buffers)
    np.testing.assert_array_equal(model(random_batch(0).inputs), merged(random_batch(0).inputs))
    assert merged.output.kernel is merged.embedding.embedding
    assert list(buffers) == ["positions.table"]
    assert "embedding.embedding" in parameters
    assert "blocks.0.attention_residual.norm.scale" in parameters
    assert not any(name.startswith("output") for name in parameters)  # tied: one array, one name


def test_the_structure_of_equal_models_is_equal_so_that_what_was_compiled_is_found_again():
    first, second = build(seed=0)[0], build(seed=1)[0]
    assert first == second
    assert hash(first) == hash(second)


def test_the_gradient_is_that_of_the_mean_over_all_tokens_of_the_batch():
    state, step = prepare(dataclasses.replace(CONFIG, dropout=0.0), recorder())
    batch = random_batch(1)
    structure, parameters, buffers = build(dataclasses.replace(CONFIG, dropout=0.0))

    def plain_loss(parameters):
        logits = structure.merge(parameters, buffers)(batch.inputs)
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch.labels[..., None], -1)[..., 0]
        return -(picked * batch.weights).sum() / batch.weights.sum()

    loss, gradient = jax.value_and_grad(plain_loss)(parameters)
    state, metrics = jax.jit(step)(state, batch, jnp.arange(B))
    assert_close(state.optimizer_state, gradient, rtol=1e-4, atol=1e-6)
    norm = np.sqrt(sum(np.square(g).sum() for g in gradient.values()))
    np.testing.assert_allclose(metrics[:3], [loss, norm, 13.0], rtol=1e-5)
    assert (int(metrics.skipped), int(metrics.skipped_in_a_row)) == (0, 0)


def test_parts_of_a_batch_that_reduce_their_sums_take_the_gradient_of_the_whole():
    """With dropout, and unequal numbers of tokens: 6 count in one half, 7 in the other, and 1 alone in one row."""
    batch, indices = random_batch(2), jnp.arange(B)
    state, step = prepare(optimizer=recorder())
    whole, whole_metrics = jax.jit(step)(state, batch, indices)

    for parts in ([[0, 3], [1, 2]], [[0], [1], [2], [3]]):
        _, part_step = prepare(optimizer=recorder(), reduce=lambda tree: jax.lax.psum(tree, "parts"))
        rows = jnp.asarray(parts)
        stacked = jax.tree.map(lambda leaf, rows=rows: leaf[rows], batch)
        mapped = jax.jit(jax.vmap(part_step, in_axes=(None, 0, 0), axis_name="parts"))
        part, metrics = mapped(state, stacked, rows)
        for device in range(len(parts)):
            gradient = {name: leaf[device] for name, leaf in part.optimizer_state.items()}
            assert_close(gradient, whole.optimizer_state, rtol=1e-4, atol=2e-6)
            np.testing.assert_allclose([leaf[device] for leaf in metrics], whole_metrics, rtol=1e-5)


@pytest.mark.parametrize("accumulate", [2, 4])
def test_microbatches_with_unequal_numbers_of_tokens_take_the_gradient_of_the_whole_batch(float64, accumulate):
    """With dropout. In rows: 5, 1, 3 and 4 tokens."""
    config = dataclasses.replace(CONFIG, param_dtype="float64", compute_dtype="float64")
    batch, indices = random_batch(2), jnp.asarray([3, 1, 0, 2])
    state, step = prepare(config, recorder())
    whole, metrics = jax.jit(step)(state, batch, indices)
    state, step = prepare(config, recorder(), accumulate=accumulate)
    parts, accumulated = jax.jit(step)(state, batch, indices)
    assert_close(parts.optimizer_state, whole.optimizer_state, rtol=1e-10, atol=1e-14)
    np.testing.assert_allclose(accumulated, metrics, rtol=1e-12)


def test_a_batch_of_nothing_but_padding_has_no_gradient_in_microbatches_either():
    state, step = prepare(optimizer=recorder(), accumulate=2)
    batch = random_batch(2)
    after, metrics = jax.jit(step)(state, batch._replace(weights=0 * batch.weights), jnp.arange(B))
    assert not any(np.any(leaf) for leaf in after.optimizer_state.values())
    np.testing.assert_array_equal(metrics, 0.0)


def test_every_microbatch_takes_equally_many_rows_of_every_part():
    rows = np.arange(12 * 5).reshape(12, 5)
    whole = training.microbatches({"rows": rows}, 3)["rows"]
    np.testing.assert_array_equal(whole, rows.reshape(3, 4, 5))
    spread = training.microbatches({"rows": rows}, 3, parts=2)["rows"]
    np.testing.assert_array_equal(spread[..., 0] // 5, [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]])
    with pytest.raises(ValueError, match=r"a multiple of 5 microbatches x 2 parts = 10, got 12 rows"):
        training.microbatches({"rows": rows}, 5, parts=2)


def test_a_shared_module_gets_the_sum_of_its_gradients_once():
    config = ft.DecoderOnlyConfig.document(vocab_size=V, d_model=6, num_heads=3, max_length=T)
    batch = random_batch(3)
    state, step = prepare(config, recorder())
    state, _ = jax.jit(step)(state, batch, jnp.arange(B))
    shared = [name for name in state.parameters if ".norm." in name]
    assert len(shared) == 2  # scale and bias of the one norm that the block applies twice

    structure, parameters, buffers = build(config)
    name = next(name for name in shared if name.endswith("scale"))

    def loss(value):
        model = structure.merge({**parameters, name: value}, buffers)
        return cross_entropy(model(batch.inputs), batch.labels, weights=batch.weights).mean

    epsilon = 1e-2
    for unit in np.eye(6, dtype=np.float32)[:2]:
        slope = (loss(parameters[name] + epsilon * unit) - loss(parameters[name] - epsilon * unit)) / (2 * epsilon)
        np.testing.assert_allclose((state.optimizer_state[name] * unit).sum(), slope, rtol=2e-2, atol=1e-4)


def test_a_step_applies_the_optimizer_and_counts_itself():
    state, step = prepare()
    after, _ = jax.jit(step)(state, random_batch(4), jnp.arange(B))
    gradients = prepare(optimizer=recorder())
    recorded, _ = jax.jit(gradients[1])(gradients[0], random_batch(4), jnp.arange(B))
    updates, _ = adamw().update(recorded.optimizer_state, state.optimizer_state, state.parameters)
    expected = jax.tree.map(jnp.add, state.parameters, updates)
    assert_close(after.parameters, expected, rtol=1e-4, atol=1e-5)
    assert (int(state.step), int(after.step)) == (0, 1)
    assert_close(after.buffers, state.buffers, rtol=0)


def test_training_lowers_the_loss_of_what_it_sees():
    state, step = prepare()
    compiled = jax.jit(step, donate_argnums=0)
    losses = []
    for _ in range(30):
        state, metrics = compiled(state, random_batch(5), jnp.arange(B))
        losses.append(float(metrics.loss))
    assert losses[-1] < 0.7 * losses[0]


def test_dropout_depends_on_seed_step_and_global_example_and_on_nothing_else():
    state, _ = prepare()
    keys = training.dropout_keys(state, jnp.asarray([0, 1, 2, 3]))
    moved = training.dropout_keys(state, jnp.asarray([2, 0]))
    bits = jax.random.key_data
    np.testing.assert_array_equal(bits(moved), bits(keys)[jnp.asarray([2, 0])])
    others = [
        keys,
        training.dropout_keys(dataclasses.replace(state, step=state.step + 1), jnp.arange(4)),
        training.dropout_keys(dataclasses.replace(state, seed=state.seed + 1), jnp.arange(4)),
    ]
    assert len({tuple(row) for other in others for row in np.asarray(bits(other)).tolist()}) == 12


def test_dropout_is_on_in_training_and_off_in_evaluation():
    batch = random_batch(6)
    structure, parameters, buffers = build()
    evaluate = jax.jit(training.make_eval_step(structure, training.next_token_loss))
    expected = training.next_token_loss(structure.merge(parameters, buffers), batch)
    np.testing.assert_allclose(evaluate(parameters, buffers, batch), expected, rtol=1e-5)
    state, step = prepare()
    _, metrics = jax.jit(step)(state, batch, jnp.arange(B))
    assert abs(float(metrics.loss) - float(expected.mean)) > 1e-4


def test_the_second_step_does_not_recompile():
    traces = []
    structure, parameters, buffers = build()

    def counting_loss(model, batch, *, dropout):
        traces.append(1)
        return training.next_token_loss(model, batch, dropout=dropout)

    state = training.init_state(parameters, buffers, adamw(), seed=0)
    step: Any = jax.jit(training.make_train_step(structure, counting_loss, adamw()), donate_argnums=0)
    for seed in range(3):
        state, _ = step(state, random_batch(seed), jnp.arange(B))
    assert (len(traces), step._cache_size()) == (1, 1)


def test_a_donated_state_takes_none_of_the_models_arrays_with_it():
    model = ft.DecoderOnly(CONFIG, rngs=nnx.Rngs(0))
    structure, parameters, buffers = training.split_model(model)
    parameters, buffers = jax.device_put((parameters, buffers), jax.devices()[0])
    state = training.init_state(parameters, buffers, adamw(), seed=0)
    step = jax.jit(training.make_train_step(structure, training.next_token_loss, adamw()), donate_argnums=0)
    new_state, _ = step(state, random_batch(7), jnp.arange(B))
    assert all(leaf.is_deleted() for leaf in state.parameters.values()), "the state was not donated"
    jax.block_until_ready(new_state)
    assert np.all(np.isfinite(model(random_batch(7).inputs)))


def test_label_smoothing_reaches_the_loss():
    batch = random_batch(8)
    structure, parameters, buffers = build()
    model = structure.merge(parameters, buffers)
    expected = cross_entropy(model(batch.inputs), batch.labels, weights=batch.weights, label_smoothing=0.2)
    actual = training.next_token_loss(model, batch, label_smoothing=0.2)
    assert isinstance(actual, LossSums)
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_that_its_array_cannot_hold_is_refused(seed):
    _, parameters, buffers = build()
    with pytest.raises(ValueError, match="seed"):
        training.init_state(parameters, buffers, adamw(), seed=seed)
