"""Every layer against its formula, written out in NumPy, in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.test_util import check_grads

from flax_transformer.config import DecoderOnlyConfig
from flax_transformer.dropout import DropoutSource
from flax_transformer.initialisation import initialiser
from flax_transformer.layers import (
    ACTIVATIONS,
    Buffer,
    Embedding,
    FeedForward,
    Identity,
    LayerNorm,
    Linear,
    OutputProjection,
    Positions,
    Residual,
    final_norm,
    require_ids,
    sinusoidal_table,
)
from flax_transformer.numerics import Numerics

EPSILON64 = 2.0**-52


def small(**options) -> DecoderOnlyConfig:
    sizes = dict(vocab_size=11, d_model=14, d_ff=20, num_heads=2, num_layers=3, max_length=17)
    return DecoderOnlyConfig(**{**sizes, **options})


def double(**options) -> DecoderOnlyConfig:
    return small(param_dtype="float64", compute_dtype="float64", **options)


def randomised(module, seed: int = 0):
    """``module`` with random parameters, so that no bias is zero and no scale one."""
    rng = np.random.default_rng(seed)
    for _, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Param):
            node[...] = jnp.asarray(rng.standard_normal(node.shape), node.dtype)
    return module


def random_activations(*shape: int, seed: int = 1) -> np.ndarray:
    return 2 * np.random.default_rng(seed).standard_normal(shape) + 1


def value(parameter) -> np.ndarray:
    return np.asarray(parameter[...])


class KeepFirstFeatures(DropoutSource):
    """A mask that can be written down: the first half of the features is kept, and scaled."""

    def keep(self, shape, rate):
        return jnp.broadcast_to(jnp.arange(shape[-1]) < shape[-1] // 2, shape)


# Linear maps


@pytest.mark.parametrize("bias", ["with", "without"])
def test_a_linear_map_multiplies_by_its_kernel_of_in_by_out(float64, bias):
    config = double()
    linear = randomised(
        Linear(5, 7, bias=bias, init=initialiser(config), numerics=Numerics.of(config), rngs=nnx.Rngs(0))
    )
    assert linear.kernel.shape == (5, 7)
    x = random_activations(2, 3, 5)
    expected = np.zeros((2, 3, 7)) if bias == "without" else np.broadcast_to(value(linear.bias), (2, 3, 7)).copy()
    for i in range(5):
        for o in range(7):
            expected[..., o] += x[..., i] * value(linear.kernel)[i, o]
    np.testing.assert_allclose(linear(jnp.asarray(x)), expected, rtol=1e-13, atol=1e-13)
    assert (linear.bias is None) == (bias == "without")


@pytest.mark.parametrize("bias", ["with", "without"])
def test_the_output_projection_has_the_layout_of_an_embedding(float64, bias):
    config = double(output_bias=bias)
    output = randomised(OutputProjection(config, 11, tied_to=None, rngs=nnx.Rngs(0)))
    assert output.kernel.shape == (11, 14)
    x = random_activations(2, 3, 14)
    expected = x @ value(output.kernel).T + (value(output.bias) if bias == "with" else 0)
    np.testing.assert_allclose(output(jnp.asarray(x)), expected, rtol=1e-13, atol=1e-13)


def test_a_tied_output_projection_is_the_embedding_itself():
    embedding = Embedding(small(), 11, rngs=nnx.Rngs(0))
    output = OutputProjection(small(), 11, tied_to=embedding.embedding, rngs=nnx.Rngs(1))
    assert output.kernel is embedding.embedding


# Norms


def norm_by_hand(x, norm, *, variance, placement, eps):
    rows = []
    for row in x.reshape(-1, x.shape[-1]):
        deviation = row - row.sum() / len(row)
        var = (deviation**2).sum() / (len(row) - (variance == "unbiased"))
        denominator = math.sqrt(var + eps) if placement == "inside_sqrt" else math.sqrt(var) + eps
        rows.append(value(norm.scale) * deviation / denominator + value(norm.bias))
    return np.array(rows).reshape(x.shape)


every_norm = pytest.mark.parametrize(
    ("variance", "placement"),
    [(variance, placement) for variance in ("biased", "unbiased") for placement in ("inside_sqrt", "outside_sqrt")],
)


def norm_of(variance: str, placement: str, eps: float) -> LayerNorm:
    return randomised(LayerNorm(double(norm_variance=variance, norm_eps_placement=placement, norm_eps=eps)))


@every_norm
@pytest.mark.parametrize("eps", [0.5, 1e-6])
def test_a_norm_is_its_formula(float64, variance, placement, eps):
    norm = norm_of(variance, placement, eps)
    x = random_activations(2, 3, 14)
    expected = norm_by_hand(x, norm, variance=variance, placement=placement, eps=eps)
    np.testing.assert_allclose(norm(jnp.asarray(x)), expected, rtol=1e-12, atol=1e-13)


def test_a_new_norm_starts_as_the_plain_normalisation():
    norm = LayerNorm(small())
    np.testing.assert_array_equal(norm.scale[...], np.ones(14, np.float32))
    np.testing.assert_array_equal(norm.bias[...], np.zeros(14, np.float32))


@every_norm
def test_a_constant_row_passes_no_gradient_through_its_deviation(float64, variance, placement):
    eps = 0.25
    norm = norm_of(variance, placement, eps)
    upstream = random_activations(3, 14, seed=2)
    x = jnp.asarray(np.repeat([[3.0], [-0.5], [0.0]], 14, axis=1))
    gradient = jax.grad(lambda x: (norm(x) * upstream).sum())(x)
    # The deviation is at its minimum there: only the numerator depends on x.
    through_numerator = upstream * value(norm.scale) / (math.sqrt(eps) if placement == "inside_sqrt" else eps)
    expected = through_numerator - through_numerator.mean(-1, keepdims=True)
    np.testing.assert_allclose(gradient, expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(norm(x), np.broadcast_to(value(norm.bias), x.shape), rtol=1e-14)


@every_norm
def test_the_gradient_of_a_norm_is_its_slope(float64, variance, placement):
    norm = norm_of(variance, placement, 0.1)
    upstream = random_activations(3, 14, seed=3)
    x, direction, step = random_activations(3, 14), random_activations(3, 14, seed=4), 1e-6

    def loss(x):
        return (norm(jnp.asarray(x)) * upstream).sum()

    slope = (loss(x + step * direction) - loss(x - step * direction)) / (2 * step)
    np.testing.assert_allclose((jax.grad(loss)(jnp.asarray(x)) * direction).sum(), slope, rtol=1e-7)


@every_norm
def test_a_variance_that_overflows_leaves_a_gradient_of_zero(variance, placement):
    norm = LayerNorm(small(norm_variance=variance, norm_eps_placement=placement, norm_eps=0.1))
    x = jnp.asarray(random_activations(3, 14) * 1e20, jnp.float32)
    np.testing.assert_array_equal(norm(x), np.zeros((3, 14)))
    upstream = jnp.asarray(random_activations(3, 14, seed=3), jnp.float32)
    np.testing.assert_array_equal(jax.grad(lambda x: (norm(x) * upstream).sum())(x), np.zeros((3, 14)))


@every_norm
def test_the_derivatives_of_a_norm_are_those_of_the_chain_rule_forwards_and_backwards(float64, variance, placement):
    structure, state = nnx.split(norm_of(variance, placement, 0.1))

    def call(state, x):
        return nnx.merge(structure, state)(jnp.asarray(x))

    check_grads(call, (state, jnp.asarray(random_activations(3, 14))), order=2, modes=("fwd", "rev"), rtol=1e-5)


@every_norm
def test_bfloat16_norms_take_their_statistics_in_float32(variance, placement):
    options = dict(norm_variance=variance, norm_eps_placement=placement, norm_eps=1e-5, compute_dtype="bfloat16")
    norm = randomised(LayerNorm(small(**options)))
    # A mean of 100 in bfloat16 is known to a half only, which would show in a deviation of about 2.
    x = jnp.asarray(random_activations(3, 14) + 100, jnp.bfloat16)
    result = norm(x)
    assert result.dtype == jnp.bfloat16
    expected = norm_by_hand(np.asarray(x, np.float64), norm, variance=variance, placement=placement, eps=1e-5)
    np.testing.assert_allclose(np.asarray(result, np.float64), expected, rtol=2.0**-8, atol=1e-6)


def test_the_final_norm_is_a_norm_or_nothing():
    assert isinstance(final_norm(small(final_norm="stack_end")), LayerNorm)
    nothing = final_norm(small(final_norm="none"))
    assert isinstance(nothing, Identity)
    x = jnp.asarray(random_activations(2, 3, 14))
    assert nothing(x) is x


# Embeddings and positions


@pytest.mark.parametrize(("option", "factor"), [("none", 1.0), ("sqrt_d_model", math.sqrt(14))])
def test_an_embedding_is_a_row_times_the_scale(float64, option, factor):
    embedding = randomised(Embedding(double(embedding_scale=option), 11, rngs=nnx.Rngs(0)))
    ids = np.array([[3, 10, 0], [7, 7, 1]])
    np.testing.assert_allclose(embedding(jnp.asarray(ids)), value(embedding.embedding)[ids] * factor, rtol=1e-15)


def test_unchecked_ids_outside_the_vocabulary_read_the_nearest_row():
    embedding = randomised(Embedding(small(check_ids="off"), 11, rngs=nnx.Rngs(0)))
    rows = embedding(jnp.array([[-1, -9, 11, 900]]))
    np.testing.assert_array_equal(rows[0], value(embedding.embedding)[[0, 0, 10, 10]])


OUTSIDE = [([[3, 11, 0]], "from 0 to 11"), ([[3, -1, 10]], "from -1 to 10"), ([[900, 3, -7]], "from -7 to 900")]


@pytest.mark.parametrize(("ids", "range_"), OUTSIDE)
def test_checked_ids_outside_the_vocabulary_raise(ids, range_):
    embedding = Embedding(small(check_ids="on"), 11, rngs=nnx.Rngs(0))
    words = rf"ids must be in \[0, 11\), the vocabulary, got ids {range_}; was the text encoded with another tokenizer"
    with pytest.raises(ValueError, match=words):
        embedding(jnp.array(ids))
    with pytest.raises(jax.errors.JaxRuntimeError, match=words):
        jax.block_until_ready(jax.jit(lambda ids: embedding(ids))(jnp.array(ids)))


def test_checked_ids_inside_the_vocabulary_give_what_unchecked_ids_give():
    ids = jnp.array([[3, 10, 0]])
    on, off = (Embedding(small(check_ids=check), 11, rngs=nnx.Rngs(0)) for check in ("on", "off"))
    np.testing.assert_array_equal(on(ids), off(ids))
    np.testing.assert_array_equal(jax.jit(lambda ids: on(ids))(ids), off(ids))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32"])
def test_ids_of_a_narrow_type_fit_a_wide_vocabulary(dtype):
    ids = jnp.array([[100, 3]], dtype)
    embedding = randomised(Embedding(small(check_ids="on"), 300, rngs=nnx.Rngs(0)))
    np.testing.assert_array_equal(embedding(ids)[0], value(embedding.embedding)[[100, 3]])
    jax.block_until_ready(jax.jit(lambda ids: [require_ids(ids, 300), ids])(ids))
    with pytest.raises(ValueError, match="from 3 to 100"):
        require_ids(ids, 100)


def independent_angles(length: int, d_model: int) -> np.ndarray:
    """p / 10000^(2i / D) in the longest type of this machine, (length, D / 2)."""
    columns = []
    for i in range(d_model // 2):
        frequency = np.longdouble(10000) ** (-np.longdouble(2 * i) / d_model)
        columns.append(np.arange(length).astype(np.longdouble) * frequency)
    return np.stack(columns, axis=1)


@pytest.mark.parametrize("formula", ["exp", "pow"])
@pytest.mark.parametrize("d_model", [14, 512])
def test_a_sinusoidal_table_is_exact_in_float64(formula, d_model):
    table = sinusoidal_table(5000, d_model, formula=formula, dtype=np.float64)
    assert table.shape == (5000, d_model)
    assert table.dtype == np.float64
    angles = independent_angles(5000, d_model)
    # An exponent of up to ln 10000 rounded three times, and the product, move the angle by so many parts of itself.
    bound = 30 * EPSILON64 * angles + EPSILON64
    assert np.all(np.abs(table[:, 0::2] - np.sin(angles)) <= bound)
    assert np.all(np.abs(table[:, 1::2] - np.cos(angles)) <= bound)


@pytest.mark.parametrize("formula", ["exp", "pow"])
@pytest.mark.parametrize("d_model", [14, 512])
def test_a_float32_table_is_off_by_the_rounding_of_its_frequency_only(formula, d_model):
    table = sinusoidal_table(5000, d_model, formula=formula)
    assert table.dtype == np.float32
    angles = independent_angles(5000, d_model)
    bound = 30 * 2.0**-24 * angles + 2.0**-23
    assert np.all(np.abs(table[:, 0::2] - np.sin(angles)) <= bound)
    assert np.all(np.abs(table[:, 1::2] - np.cos(angles)) <= bound)


def test_the_two_formulas_differ_in_float32_and_in_the_last_bits_only():
    by_exp, by_pow = (sinusoidal_table(5000, 64, formula=formula) for formula in ("exp", "pow"))
    difference = np.abs(by_exp - by_pow)
    assert difference.max() > 0
    assert difference[:16].max() < 1e-5
    np.testing.assert_array_equal(by_exp[:, :2], by_pow[:, :2])  # a frequency of 1 is exact


def test_the_first_rows_of_a_table_are_those_known_by_heart():
    table = sinusoidal_table(2, 4, formula="exp", dtype=np.float64)
    expected = [[0, 1, 0, 1], [math.sin(1), math.cos(1), math.sin(0.01), math.cos(0.01)]]
    np.testing.assert_allclose(table, expected, rtol=1e-14)


def test_an_unknown_formula_is_refused():
    with pytest.raises(ValueError, match="must be 'exp' or 'pow', got 'learned'"):
        sinusoidal_table(3, 4, formula="learned")


@pytest.mark.parametrize("table", ["exp", "pow"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_sinusoidal_positions_keep_the_float32_table_in_every_model(float64, table, dtype):
    positions = Positions(small(position_table=table, param_dtype=dtype, compute_dtype=dtype), rngs=nnx.Rngs(0))
    assert isinstance(positions.table, Buffer)
    assert not isinstance(positions.table, nnx.Param)
    assert positions.table.dtype == (jnp.float64 if dtype == "float64" else jnp.float32)
    expected = sinusoidal_table(17, 14, formula=table)
    np.testing.assert_array_equal(positions.table[...], expected)
    x = jnp.asarray(random_activations(2, 5, 14), dtype)
    assert positions(x).dtype == dtype
    np.testing.assert_array_equal(positions(x), x + jnp.asarray(expected[None, :5], dtype).repeat(2, axis=0))


def test_learned_positions_are_a_parameter_whose_first_rows_are_added(float64):
    positions = randomised(Positions(double(position_table="learned"), rngs=nnx.Rngs(0)))
    assert isinstance(positions.table, nnx.Param)
    assert positions.table.shape == (17, 14)
    x = random_activations(2, 5, 14)
    np.testing.assert_array_equal(positions(jnp.asarray(x)), x + value(positions.table)[:5])


def test_positions_are_added_before_the_dropout(float64):
    positions = randomised(Positions(double(position_table="learned", dropout=0.2), rngs=nnx.Rngs(0)))
    x = random_activations(2, 5, 14)
    expected = (x + value(positions.table)[:5]) * np.where(np.arange(14) < 7, 1 / 0.8, 0)
    np.testing.assert_allclose(positions(jnp.asarray(x), KeepFirstFeatures()), expected, rtol=1e-13)


# Feed-forward and residuals


ACTIVATIONS_BY_HAND = {
    "relu": lambda x: max(x, 0.0),
    "gelu": lambda x: x * 0.5 * (1 + math.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1 + math.exp(-x)),
}


@pytest.mark.parametrize("name", ACTIVATIONS_BY_HAND)
def test_an_activation_is_its_formula(float64, name):
    x = np.linspace(-6, 6, 101)
    expected = [ACTIVATIONS_BY_HAND[name](float(v)) for v in x]
    np.testing.assert_allclose(ACTIVATIONS[name](jnp.asarray(x)), expected, rtol=1e-11, atol=1e-14)
    assert set(ACTIVATIONS) == set(ACTIVATIONS_BY_HAND)


@pytest.mark.parametrize("name", ACTIVATIONS_BY_HAND)
@pytest.mark.parametrize("source", [None, KeepFirstFeatures()], ids=["deterministic", "dropout"])
def test_the_feed_forward_network_is_its_formula(float64, name, source):
    network = randomised(FeedForward(double(activation=name, activation_dropout=0.2), rngs=nnx.Rngs(0)))
    assert (network.up.kernel.shape, network.down.kernel.shape) == ((14, 20), (20, 14))
    x = random_activations(2, 3, 14)
    inner = x @ value(network.up.kernel) + value(network.up.bias)
    active = np.vectorize(ACTIVATIONS_BY_HAND[name])(inner)
    if source is not None:
        active *= np.where(np.arange(20) < 10, 1 / 0.8, 0)
    expected = active @ value(network.down.kernel) + value(network.down.bias)
    np.testing.assert_allclose(network(jnp.asarray(x), source), expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("position", ["pre", "post", "both"])
@pytest.mark.parametrize("source", [None, KeepFirstFeatures()], ids=["deterministic", "dropout"])
def test_a_residual_connection_is_its_formula(float64, position, source):
    residual = randomised(Residual(double(norm_position=position, dropout=0.2)))
    x = random_activations(2, 3, 14)

    def norm(x):
        return norm_by_hand(x, residual.norm, variance="biased", placement="inside_sqrt", eps=1e-5)

    def dropped(x):
        return x if source is None else x * np.where(np.arange(14) < 7, 1 / 0.8, 0.0)

    def sublayer(x):
        return x[..., ::-1] ** 2 - 1.5

    expected = {
        "pre": x + dropped(sublayer(norm(x))),
        "post": norm(x + dropped(sublayer(x))),
        "both": norm(x + dropped(sublayer(norm(x)))),
    }[position]
    np.testing.assert_allclose(residual(jnp.asarray(x), sublayer, source), expected, rtol=1e-11, atol=1e-12)
