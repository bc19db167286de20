"""The laws that parameters are drawn from, and which parameter follows which."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flax_transformer as ft
from flax_transformer.config import DecoderOnlyConfig, EncoderDecoderConfig
from flax_transformer.initialisation import Initialiser, initialiser

NAMES = ("torch_default", "xavier_uniform", "gpt2")


def config_of(name: str, **options) -> DecoderOnlyConfig:
    sizes = dict(vocab_size=97, d_model=64, d_ff=144, num_heads=4, num_layers=3, max_length=51)
    return DecoderOnlyConfig(**{**sizes, "initialisation": name, **options})


def init_of(name: str, **options) -> Initialiser:
    return initialiser(config_of(name, **options))


def assert_uniform(sample, bound: float) -> None:
    sample = np.asarray(sample, np.float64).ravel() / bound
    assert np.abs(sample).max() <= 1
    assert_law(sample, lambda x: (x + 1) / 2)


def assert_normal(sample, std: float) -> None:
    assert_law(
        np.asarray(sample, np.float64).ravel() / std, np.vectorize(lambda x: (1 + math.erf(x / math.sqrt(2))) / 2)
    )


def assert_law(sample: np.ndarray, cumulative) -> None:
    """Kolmogorov-Smirnov: the chance of a distance of 2.2 / sqrt(n) is 1.3e-4, and the seeds are fixed."""
    expected = cumulative(np.sort(sample))
    steps = np.arange(len(sample) + 1) / len(sample)
    distance = max((steps[1:] - expected).max(), (expected - steps[:-1]).max())
    assert distance < 2.2 / math.sqrt(len(sample))


def test_weights_follow_their_law():
    key, fan_in, fan_out = jax.random.key(1), 90, 160
    assert_uniform(init_of("torch_default").weight(key, fan_in, fan_out), 1 / math.sqrt(90))
    assert_uniform(init_of("xavier_uniform").weight(key, fan_in, fan_out), math.sqrt(6 / 250))
    assert_normal(init_of("gpt2").weight(key, fan_in, fan_out), 0.02)
    for name in NAMES:
        assert init_of(name).weight(key, fan_in, fan_out).shape == (90, 160)


def test_biases_follow_their_law():
    key, fan_in, fan_out = jax.random.key(2), 90, 3000
    assert_uniform(init_of("torch_default").bias(key, fan_in, fan_out), 1 / math.sqrt(90))
    for name in ("xavier_uniform", "gpt2"):
        np.testing.assert_array_equal(init_of(name).bias(key, fan_in, fan_out), np.zeros(3000))


def test_embeddings_follow_their_law():
    key = jax.random.key(3)
    for name, std in (("torch_default", 1.0), ("xavier_uniform", 1 / 8), ("gpt2", 0.02)):
        embedding = init_of(name).embedding(key, 97, 64)
        assert embedding.shape == (97, 64)
        assert_normal(embedding, std)


def test_weights_into_the_residual_stream_are_smaller_in_gpt2_only():
    key = jax.random.key(4)
    for name in NAMES:
        init = init_of(name)
        factor = 1 / math.sqrt(6) if name == "gpt2" else 1.0
        np.testing.assert_allclose(
            init.into_residual().weight(key, 90, 160), factor * init.weight(key, 90, 160), rtol=1e-6
        )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parameters_are_drawn_in_their_own_type(name, dtype):
    init = init_of(name, param_dtype=dtype)
    key = jax.random.key(5)
    for drawn in (init.weight(key, 5, 7), init.bias(key, 5, 7), init.embedding(key, 3, 5)):
        assert drawn.dtype == dtype


def parameters_of(model) -> dict[str, np.ndarray]:
    return {
        ".".join(map(str, path)): np.asarray(node[...])
        for path, node in nnx.iter_graph(model)
        if isinstance(node, nnx.Param)
    }


def test_each_parameter_of_a_gpt2_model_follows_its_law():
    model = ft.DecoderOnly(config_of("gpt2"), rngs=nnx.Rngs(0))
    for name, array in parameters_of(model).items():
        if name.endswith(("attention.output.kernel", "feed_forward.down.kernel")):
            assert_normal(array, 0.02 / math.sqrt(6))
        elif name.endswith(("kernel", "embedding", "table")):
            assert_normal(array, 0.02)
        else:
            np.testing.assert_array_equal(array, np.full(array.shape, 1.0 if name.endswith("norm.scale") else 0.0))


def test_each_parameter_of_a_torch_default_model_follows_its_law():
    config = config_of("torch_default", embedding_tying="none", output_bias="with", position_table="exp")
    for name, array in parameters_of(ft.DecoderOnly(config, rngs=nnx.Rngs(0))).items():
        fan_in = 144 if "down" in name else 64
        if "norm" in name:
            np.testing.assert_array_equal(array, np.full(array.shape, 1.0 if name.endswith("scale") else 0.0))
        elif name.endswith("embedding"):
            assert_normal(array, 1.0)
        else:
            assert_uniform(array, 1 / math.sqrt(fan_in))


def test_each_kernel_of_a_paper_model_follows_its_law():
    config = EncoderDecoderConfig.paper_base(vocab_size=97, d_model=64, d_ff=144, num_heads=4, num_layers=2)
    for name, array in parameters_of(ft.EncoderDecoder(config, rngs=nnx.Rngs(0))).items():
        if name.endswith("kernel") and name != "output.kernel":
            assert_uniform(array, math.sqrt(6 / sum(array.shape)))
        elif name.endswith("embedding"):
            assert_normal(array, 1 / 8)


@pytest.mark.parametrize("name", NAMES)
def test_no_two_parameters_are_the_same_draw_and_a_seed_decides_all(name):
    config = config_of(name, embedding_tying="none", output_bias="with")
    first, again, other = (parameters_of(ft.DecoderOnly(config, rngs=nnx.Rngs(seed))) for seed in (0, 0, 1))
    drawn = {path: array for path, array in first.items() if len(np.unique(array)) > 1}
    firsts = [array.ravel()[0] / array.std() for array in drawn.values()]
    assert len(np.unique(firsts)) == len(drawn) >= 3 * 6 + 3
    for path, array in drawn.items():
        np.testing.assert_array_equal(array, again[path])
        assert not np.any(array == other[path])


def test_torch_default_has_the_distributions_of_pytorch():
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    linear, embedding = torch.nn.Linear(90, 160), torch.nn.Embedding(97, 64)
    assert_uniform(linear.weight.detach(), 1 / math.sqrt(90))
    assert_uniform(linear.bias.detach(), 1 / math.sqrt(90))
    assert_normal(embedding.weight.detach(), 1.0)


def test_a_law_check_refuses_another_law():
    normal = jax.random.normal(jax.random.key(6), (20_000,), jnp.float32)
    uniform = jax.random.uniform(jax.random.key(7), (20_000,), jnp.float32, minval=-1.0, maxval=1.0)
    for wrong in (
        lambda: assert_normal(normal, 1.2),
        lambda: assert_normal(uniform, 1 / math.sqrt(3)),
        lambda: assert_uniform(uniform, 1.2),
        lambda: assert_uniform(uniform, 0.9),
    ):
        with pytest.raises(AssertionError):
            wrong()
