"""What default products of a TPU and a GPU do to our models, emulated here: `python -m benchmarks.precision --help`."""

import dataclasses
import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx

import flax_transformer as ft
from flax_transformer.config import TransformerConfig
from flax_transformer.losses import cross_entropy
from flax_transformer.masks import causal_mask, combine_masks, padding_mask
from flax_transformer.parity import tolerances
from flax_transformer.parity.emulation import MODES, Mode, products_in_sequence
from flax_transformer.parity.precision import LossFunction, precision_table
from flax_transformer.training import split_model

ModelName = Literal["decoder-only-document", "decoder-only-small", "encoder-decoder-small", "paper-base"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A model of ours at a size that two processors manage, and the sizes of its batch."""

    config: Callable[..., TransformerConfig]
    note: str
    batch_size: int
    length: int
    source_length: int = 0


def _decoder_only_document(**options) -> TransformerConfig:
    return ft.DecoderOnlyConfig.document(vocab_size=4096, **options)


def _decoder_only_small(**options) -> TransformerConfig:
    return ft.DecoderOnlyConfig.small(vocab_size=4096, **options)


def _encoder_decoder_small(**options) -> TransformerConfig:
    return ft.EncoderDecoderConfig.small(source_vocab_size=2048, target_vocab_size=3072, **options)


def _paper_base(**options) -> TransformerConfig:
    return ft.EncoderDecoderConfig.paper_base(vocab_size=4096, num_layers=2, **options)


MODELS: dict[ModelName, Model] = {
    "decoder-only-document": Model(
        config=_decoder_only_document, note="the document's sizes, a smaller vocabulary", batch_size=4, length=16
    ),
    "decoder-only-small": Model(config=_decoder_only_small, note="the preset", batch_size=4, length=64),
    "encoder-decoder-small": Model(
        config=_encoder_decoder_small, note="the preset", batch_size=4, length=20, source_length=24
    ),
    "paper-base": Model(
        config=_paper_base, note="the preset, 2 of 6 layers", batch_size=4, length=20, source_length=24
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How far lower precision in matrix products moves logits, loss and gradients of our models, without a TPU or a GPU.

    docs/precision.md says what the modes are and how to read the table. Weights are as a new model draws them.
    """

    models: Annotated[tuple[ModelName, ...], tyro.conf.arg(metavar="MODEL ...")] = tuple(MODELS)
    """Which models."""
    modes: Annotated[tuple[Mode, ...], tyro.conf.arg(metavar="MODE ...")] = MODES
    """Which hardware's products."""
    seed: int = 0
    """Decides weights and batches."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    options = tyro.cli(Options, prog="python -m benchmarks.precision", args=arguments)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib", "flax", "numpy"))
    print(f"python {platform.python_version()}, {versions}; {os.cpu_count()} processors\n", flush=True)
    for name in options.models:
        print(describe(MODELS[name], name, modes=options.modes, seed=options.seed), end="\n\n", flush=True)
    return 0


def describe(model: Model, name: str, *, modes: Sequence[Mode], seed: int) -> str:
    """The table of a model, with a heading that says which, and the budget of its correct ports below."""
    config = model.config()
    loss, parameters, buffers = _functions(_new(config, seed=seed))
    with jax.enable_x64(True):
        double = model.config(param_dtype="float64", compute_dtype="float64")
        truth, _, _ = _functions(nnx.eval_shape(lambda: _new(double, seed=seed)))
    batch = {"buffers": buffers, **_ids(config, model, seed=seed)}
    table = precision_table(loss, parameters, batch, truth=truth, modes=modes)

    forward = products_in_sequence(loss, parameters, batch)
    backward = products_in_sequence(jax.grad(loss, has_aux=True), parameters, batch)
    activation = "relu" if config.activation == "relu" else "smooth"
    budgets = [
        f"{mode}: outputs {tolerances.budget(mode, 'outputs', products=forward):.1e}, "
        f"gradients {tolerances.budget(mode, 'gradients', products=backward, activation=activation):.1e}"
        for mode in modes
        if mode in tolerances.PRODUCT_ERROR
    ]
    size = sum(leaf.size for leaf in jax.tree.leaves(parameters))
    source = f"{model.source_length} + " if model.source_length else ""
    return (
        f"### {name}\n\n{model.note}: width {config.d_model}, {config.num_layers} layers, {size:,} parameters, "
        f"batch {model.batch_size} x {source}{model.length}; {forward} products in sequence, {backward} with the "
        f"backward pass.\n\n{table}\n\nBudget, relative rms: {'; '.join(budgets)}."
    )


def _new(config: TransformerConfig, *, seed: int) -> Any:
    kind: Any = ft.EncoderDecoder if isinstance(config, ft.EncoderDecoderConfig) else ft.DecoderOnly
    return kind(config, rngs=nnx.Rngs(seed))


def _functions(model: Any) -> tuple[LossFunction, dict[str, Any], dict[str, Any]]:
    """The model's loss as a function of arrays, its parameters, and its buffers."""
    structure, parameters, buffers = split_model(model)

    def loss(parameters: Any, batch: Any) -> tuple[jax.Array, Any]:
        merged = structure.merge(parameters, batch["buffers"])
        if "source" in batch:
            masks = combine_masks(padding_mask(batch["target"]), causal_mask(batch["target"].shape[1]))
            logits = merged(batch["source"], batch["target"], padding_mask(batch["source"]), masks)
        else:
            logits = merged(batch["target"])
        return cross_entropy(logits, batch["labels"]).mean, {"logits": logits}

    return loss, parameters, buffers


def _ids(config: TransformerConfig, model: Model, *, seed: int) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    draw = lambda size, length: jnp.asarray(rng.integers(1, size, (model.batch_size, length), np.int32))  # noqa: E731
    if isinstance(config, ft.EncoderDecoderConfig):
        source = draw(config.source_vocab_size, model.source_length)
        target, labels = draw(config.target_vocab_size, model.length), draw(config.target_vocab_size, model.length)
        return {"source": source.at[0, -5:].set(0), "target": target, "labels": labels}
    assert isinstance(config, ft.DecoderOnlyConfig)
    return {"target": draw(config.vocab_size, model.length), "labels": draw(config.vocab_size, model.length)}


if __name__ == "__main__":
    sys.exit(main())
