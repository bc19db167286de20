"""What reduced precision costs: the table, and the budget that correct models keep and wrong ones exceed."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import precision
from flax_transformer.config import EncoderDecoderConfig
from flax_transformer.losses import cross_entropy
from flax_transformer.masks import causal_mask
from flax_transformer.parity import tolerances
from flax_transformer.parity.emulation import Mode, emulate, products_in_sequence
from flax_transformer.parity.precision import precision_table
from flax_transformer.training import split_model
from parity_tests.unit import small_models

LABELS = np.random.default_rng(12).integers(0, 13, (3, 5), np.int32)


def two_layers(parameters, batch):
    hidden = jnp.tanh(batch["x"] @ parameters["first"]["kernel"] + parameters["first"]["bias"][None])
    logits = hidden @ parameters["second"]["kernel"]
    # The bias is as that of a key: a softmax ignores what is added to all of its arguments.
    weights = jax.nn.softmax(logits @ parameters["key"]["kernel"] + parameters["key"]["bias"][None], axis=0)
    return jnp.sum(jnp.square(weights.T @ logits)), {"logits": logits, "weights": weights}


def parameters_of_two_layers() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shapes: dict[str, Any] = {
        "first": {"kernel": (11, 13), "bias": (13,)}, "second": {"kernel": (13, 5)},
        "key": {"kernel": (5, 7), "bias": (7,)},
    }  # fmt: skip
    draw = lambda shape: np.asarray(rng.standard_normal(shape) / 3, np.float32)  # noqa: E731
    return jax.tree.map(draw, shapes, is_leaf=lambda leaf: isinstance(leaf, tuple))


BATCH = {"x": np.random.default_rng(1).standard_normal((17, 11), np.float32)}


@functools.cache
def table_of_two_layers():
    return precision_table(two_layers, parameters_of_two_layers(), BATCH, truth=two_layers)


def test_the_table_orders_the_modes_as_their_roundoffs_do():
    table = table_of_two_layers()
    assert [row.mode for row in table.rows[::3]] == ["float32", "tpu_default", "tpu_high", "tpu_highest", "gpu_tf32"]
    for quantity in ("outputs", "gradients"):
        errors = [table.row(mode, quantity).relative_rms for mode in ("tpu_default", "gpu_tf32", "tpu_high", "float32")]
        assert errors[0] > 3 * errors[1] > 9 * errors[2] > 27 * errors[3] > 0
        assert table.row("tpu_highest", quantity).relative_rms < 8 * errors[3]
        assert table.row("tpu_default", quantity).cosine < 1 - 1e-6


def test_a_gradient_that_is_zero_by_structure_is_never_the_worst():
    table = table_of_two_layers()
    worst = {row.worst for row in table.rows if row.quantity == "gradients"}
    assert worst <= {"first.kernel", "first.bias", "second.kernel", "key.kernel"}
    assert all(row.worst_relative_rms < 1 for row in table.rows)
    float32 = precision_table(two_layers, parameters_of_two_layers(), BATCH, modes=["tpu_default"])
    assert {row.mode for row in float32.rows} == {"tpu_default"}
    assert float32.row("tpu_default", "gradients").worst != "key.bias"


def test_the_table_is_markdown_with_aligned_columns():
    lines = str(table_of_two_layers()).splitlines()
    assert len(lines) == 2 + 5 * 3
    assert len({len(line) for line in lines}) == 1
    assert lines[0].startswith("| mode ")
    assert set(lines[1]) == set("|- ")


def test_outputs_that_are_nan_in_one_mode_alone_are_an_infinite_error():
    def overflows(parameters, batch):
        # 1 + 2^-9 is 1 in bfloat16.
        logits = jnp.log(batch["x"] @ parameters["w"] - 1)
        return jnp.sum(parameters["w"]), {"logits": logits}

    parameters, batch = {"w": np.full((1, 3), 1 + 2**-9, np.float32)}, {"x": np.ones((2, 1), np.float32)}
    rows = precision_table(overflows, parameters, batch, modes=["tpu_default", "gpu_tf32"])
    assert rows.row("tpu_default", "outputs").relative_rms == np.inf
    assert rows.row("gpu_tf32", "outputs").relative_rms < 1e-6


def test_products_in_sequence_are_counted_through_loops_and_not_side_by_side():
    x, w = np.zeros((5, 7), np.float32), np.zeros((7, 7), np.float32)

    def chain(x, w):
        side_by_side = jnp.tanh(x @ w + x @ (w + w))
        return jax.lax.scan(lambda x, _: (jnp.tanh(jax.jit(jnp.matmul)(x, w)), None), side_by_side, length=3)[0]

    assert products_in_sequence(chain, x, w) == 4
    assert products_in_sequence(jax.grad(lambda x: chain(x, w).sum()), x) == 8
    assert products_in_sequence(lambda x, w: jnp.tanh(x) + w[:5], x, w) == 0


# Encoder and decoder of one layer each have as many products in sequence as a decoder of two.
MODELS = {
    "decoder_only": small_models.PRESETS["decoder_only_small"],
    "encoder_decoder": functools.partial(small_models.PRESETS["encoder_decoder_small"], num_layers=1),
}


@dataclasses.dataclass(frozen=True)
class Study:
    """A small model in float32 and in reduced precision, each compiled once, for many draws of its weights."""

    name: str

    @functools.cached_property
    def structure(self):
        return split_model(small_models.hollow(MODELS[self.name]()))[0]

    def draw(self, seed: int) -> tuple[dict[str, Any], Any]:
        """Weights and buffers."""
        _, parameters, buffers = split_model(small_models.build(MODELS[self.name](), seed=seed))
        return parameters, buffers

    def loss(self, parameters, buffers):
        model = self.structure.merge(parameters, buffers)
        if isinstance(model.config, EncoderDecoderConfig):
            source, target = small_models.SOURCE_IDS, small_models.TARGET_IDS
            everything = jnp.ones((source.shape[0], 1, 1, source.shape[1]), bool)
            logits = model(source, target, everything, causal_mask(target.shape[1]))
        else:
            logits = model(small_models.TARGET_IDS)
        return cross_entropy(logits, jnp.asarray(LABELS)).mean, logits

    @functools.cached_property
    def gradient(self):
        return jax.value_and_grad(self.loss, has_aux=True)

    @functools.cached_property
    def products(self) -> dict[str, int]:
        drawn = self.draw(0)
        backward = products_in_sequence(self.gradient, *drawn)
        return {"outputs": products_in_sequence(self.loss, *drawn), "gradients": backward, "worst gradient": backward}

    def compiled(self, mode: Mode | None):
        return _compiled(self, mode)

    def errors(self, truth, found) -> dict[str, float]:
        (_, logits), gradients = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), truth)
        (_, other_logits), others = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), found)
        relative = lambda a, b: float(np.linalg.norm(a - b) / np.linalg.norm(a))  # noqa: E731
        every = lambda tree: np.concatenate([leaf.ravel() for leaf in tree.values()])  # noqa: E731
        # A key bias has no gradient.
        names = [name for name in gradients if not name.endswith("attention.key.bias")]
        return {
            "outputs": relative(logits.ravel(), other_logits.ravel()),
            "gradients": relative(every(gradients), every(others)),
            "worst gradient": max(relative(gradients[name].ravel(), others[name].ravel()) for name in names),
        }


@functools.cache
def _compiled(study: Study, mode: Mode | None):
    function = study.gradient if mode is None else emulate(study.gradient, mode)
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})  # compiling is what takes the time


@pytest.mark.parametrize(
    ("name", "mode"),
    [("decoder_only", "tpu_default"), ("decoder_only", "gpu_tf32"), ("encoder_decoder", "tpu_default")],
)
def test_correct_models_keep_the_budget_and_one_without_the_scale_of_attention_exceeds_it(name, mode):
    study = Study(name)
    correct: dict[str, list[float]] = {quantity: [] for quantity in tolerances.BUDGETS}
    wrong = []
    for seed in range(tolerances.BUDGET_SEEDS):
        parameters, buffers = study.draw(seed)
        # float32 is truth enough: it is off by a thousandth of TF32's error.
        truth = study.compiled(None)(parameters, buffers)
        for quantity, error in study.errors(truth, study.compiled(mode)(parameters, buffers)).items():
            correct[quantity].append(error)
        # q . k without its 1 / sqrt(H) is (sqrt(H) q) . k / sqrt(H).
        head_size = small_models.SIZES["d_model"] // small_models.SIZES["num_heads"]
        unscaled = {
            name: value * np.float32(np.sqrt(head_size)) if "attention.query." in name else value
            for name, value in parameters.items()
        }
        wrong.append(study.errors(truth, study.compiled(mode)(unscaled, buffers))["outputs"])
    for quantity, errors in correct.items():
        allowed = tolerances.budget(
            mode,
            quantity,
            products=study.products[quantity],
            activation="relu" if name == "encoder_decoder" else "smooth",
        )
        # Within it, and not so far that the budget says nothing.
        assert allowed / 40 < np.median(errors) < allowed, quantity
    allowed = tolerances.budget(mode, "outputs", products=study.products["outputs"])
    assert max(correct["outputs"]) < allowed
    assert min(wrong) > 2 * allowed


def test_a_budget_grows_with_the_root_of_depth_and_allows_for_the_jumps_of_a_relu():
    deep, shallow = (tolerances.budget("tpu_default", "outputs", products=n) for n in (36, 9))
    assert deep == 2 * shallow == pytest.approx(3 * 0.6 * 2**-8 * 6)
    assert deep == tolerances.budget("tpu_default", "outputs", products=36, activation="relu")
    # What it is for: 2^-9 of the error leaves more than a twentieth of the jumps' part.
    modes: list[Mode] = ["tpu_default", "tpu_high"]
    relu = [tolerances.budget(mode, "gradients", products=90, activation="relu") for mode in modes]
    assert relu[0] / 512 < relu[0] / 64 < relu[1] < relu[0] / 22
    # Measured on an encoder-decoder of 3 layers (docs/precision.md).
    assert relu[0] > 1.8e-2
    assert relu[1] > 2.5e-4


def test_the_command_describes_a_model_with_its_depth_and_its_budget():
    model = precision.Model(config=small_models.PRESETS["decoder_only_document"], note="a toy", batch_size=3, length=5)
    text = precision.describe(model, "toy", modes=["tpu_default"], seed=1)
    assert text.startswith("### toy\n\na toy: width 12, 1 layers,")
    assert "batch 3 x 5; 7 products in sequence, 14 with the backward pass." in text
    assert text.count("| tpu_default") == text.count("| float32") == 3
    assert "Budget, relative rms: tpu_default: outputs 1.9e-02, gradients 5.4e-02." in text
