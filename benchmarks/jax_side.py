"""Ours: the model split once, and one pure step, compiled, whose state is donated."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import flax_transformer as ft
from benchmarks import chain
from benchmarks.rows import LEARNING_RATE, PAD_ID, START_ID, Row, make_batch
from flax_transformer import decoding, optimizers, training
from flax_transformer.commands.train_options import PRECISIONS, TrainingPrecision
from flax_transformer.data import Batch, PairBatch
from flax_transformer.dropout import DropoutSource
from flax_transformer.flops import count_flops
from flax_transformer.losses import LossSums, cross_entropy
from flax_transformer.numerics import Numerics, mixed_einsum
from flax_transformer.vocabulary_loss import default_kind, fused_cross_entropy


class Side:
    """A model with the weights that PyTorch wrote, and its train state.

    Args:
        variant: a training precision, as of `--precision`.
        device: "cpu", where attention is plain products, or an accelerator, where it is the platform's kernel.
    """

    def __init__(
        self,
        row: Row,
        *,
        weights: Path,
        seed: int,
        threads: int,
        variant: TrainingPrecision = "float32",
        device: str = "cpu",
    ) -> None:
        del threads  # as many as the process has processors: XLA counts those that it may run on
        if row.model == "chain":
            model, batch, loss = chain.build(row, seed=seed), chain.make_inputs(row, seed=seed), _chain_loss
        else:
            model = _build(row, **PRECISIONS[variant], attention="einsum" if device == "cpu" else "flash")
            with np.load(weights) as state:
                ft.weights.load_torch(model, dict(state))
            batch, loss = _batch(row, seed=seed), _loss(row, variant)
        structure, parameters, buffers = training.split_model(model)
        optimizer = optimizers.adamw(optimizers.constant(LEARNING_RATE), weight_decay=0.0)
        self._state = training.init_state(parameters, buffers, optimizer, seed=seed)
        train_step = training.make_train_step(structure, loss, optimizer)
        self._step = jax.jit(train_step, donate_argnums=0)
        self._several = jax.jit(_repeated(train_step, row.steps_per_dispatch), donate_argnums=0)
        self._batch = jax.tree.map(jnp.asarray, batch)
        self._examples = jnp.arange(row.batch_size)
        self._metrics: training.Metrics | None = None

    def step(self) -> float:
        """Takes one step; the loss before it, in nats per token."""
        return self._call(self._step)

    def dispatch(self) -> float:
        """Takes the row's `steps_per_dispatch` steps in one call; the loss before the last."""
        return self._call(self._several)

    def _call(self, step: Any) -> float:
        self._state, self._metrics = step(self._state, self._batch, self._examples)
        return float(jax.block_until_ready(self._metrics).loss)

    def gradient_norm(self) -> float:
        """Of the latest step."""
        if self._metrics is None:
            raise ValueError("there is no gradient before the first step; take one")
        return float(self._metrics.grad_norm)


class Translator:
    """The same for decoding: a step is a whole translation, with a key/value cache."""

    def __init__(
        self, row: Row, *, weights: Path, seed: int, threads: int, variant: TrainingPrecision = "float32"
    ) -> None:
        del threads
        config = ft.EncoderDecoderConfig.paper_base(
            vocab_size=row.vocab_size,
            max_length=max(row.length, row.source_length),
            embedding_tying="none",
            d_model=row.d_model,
            d_ff=row.d_ff,
            num_heads=row.num_heads,
            num_layers=row.num_layers,
            **PRECISIONS[variant],
        )
        self._model = ft.EncoderDecoder(config, rngs=nnx.Rngs(0))
        with np.load(weights) as state:
            ft.weights.load_torch(self._model, dict(state))
        self._source = jnp.asarray(make_batch(row, seed=seed).source)
        self._mask = ft.masks.padding_mask(self._source, pad_id=PAD_ID)
        self._length = row.length

    def step(self) -> list[list[int]]:
        """The ids of the translations."""
        ids = decoding.translate_greedy(self._model, self._source, self._mask, start_id=START_ID, length=self._length)
        return np.asarray(ids).tolist()


def device_peak() -> int:
    """Bytes of a GPU."""
    return (jax.devices()[0].memory_stats() or {})["peak_bytes_in_use"]


def count_step(row: Row) -> int:
    """The operations of a train step: those of the products of a forward pass, and twice as many backward."""
    structure, parameters, buffers = training.split_model(_build(row))
    plain = dataclasses.replace(row, vocabulary_loss="plain")  # without what is computed twice to save memory
    step = training.make_eval_step(structure, _loss(plain))
    return 3 * count_flops(step, parameters, buffers, jax.tree.map(jnp.asarray, _batch(row, seed=0))).useful


def make_product(size: int, *, threads: int, variant: str = "float32") -> Callable[[], jax.Array]:
    """A product of two square float32 matrices, as precise as those of the variant."""
    del threads
    left, right = jax.random.uniform(jax.random.key(0), (2, size, size))
    if variant == "mixed":
        product = jax.jit(functools.partial(mixed_einsum, "ij,jk->ik"))
    else:
        product = jax.jit(functools.partial(jnp.matmul, precision="highest"))
    return lambda: jax.block_until_ready(product(left, right))


def head_memory(row: Row, *, variant: TrainingPrecision) -> dict[str, int]:
    """Bytes of temporary memory that the output projection and its loss take, forward and backward, with either loss."""
    options: dict[str, Any] = dict(PRECISIONS[variant])
    config = ft.DecoderOnlyConfig.document(
        vocab_size=row.vocab_size, d_model=row.d_model, num_heads=row.num_heads, **options
    )
    numerics = Numerics.of(config)

    def fused(features: jax.Array, kernel: jax.Array, labels: jax.Array) -> jax.Array:
        return fused_cross_entropy(features, kernel, labels=labels, numerics=numerics).loss

    def plain(features: jax.Array, kernel: jax.Array, labels: jax.Array) -> jax.Array:
        logits = numerics.einsum("...d,vd->...v", features, kernel, result=numerics.compute)
        return cross_entropy(logits, labels).loss

    shapes = (
        jax.ShapeDtypeStruct((row.batch_size * row.length, row.d_model), jnp.float32),
        jax.ShapeDtypeStruct((row.vocab_size, row.d_model), jnp.float32),
        jax.ShapeDtypeStruct((row.batch_size * row.length,), jnp.int32),
    )
    found = {}
    for loss in (fused, plain):
        analysis: Any = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*shapes).compile().memory_analysis()
        found[loss.__name__] = analysis.temp_size_in_bytes
    return found


def _repeated(step: Any, count: int) -> Any:
    """Several steps, as `Layout.compile_train_step` takes them, all on the same batch."""

    def steps(state: training.TrainState, batch: Any, examples: jax.Array) -> tuple[training.TrainState, Any]:
        state, metrics = jax.lax.scan(lambda state, _: step(state, batch, examples), state, length=count)
        return state, jax.tree.map(lambda metric: metric[-1], metrics)

    return steps


def _build(row: Row, **options: Any) -> nnx.Module:
    sizes = dict(d_model=row.d_model, num_heads=row.num_heads)
    layers = dict(d_ff=row.d_ff, num_layers=row.num_layers)
    none: dict[str, Any] = dict(dropout=0.0, attention_dropout=0.0)
    match row.model:
        case "gpt":
            config = ft.DecoderOnlyConfig.gpt2_small(
                vocab_size=row.vocab_size, max_length=row.length, **sizes, **layers, **none, **options
            )
            return ft.DecoderOnly(config, rngs=nnx.Rngs(0))
        case "decoder-only":
            config = ft.DecoderOnlyConfig.document(vocab_size=row.vocab_size, max_length=row.length, **sizes, **options)
            return ft.DecoderOnly(config, rngs=nnx.Rngs(0))
        case "encoder-decoder":
            config = ft.EncoderDecoderConfig.document(
                source_vocab_size=row.vocab_size, target_vocab_size=row.vocab_size, **sizes, **layers, **none, **options
            )
            return ft.EncoderDecoder(config, rngs=nnx.Rngs(0))
    raise ValueError(f"{row.model} is not trained here")


def _batch(row: Row, *, seed: int) -> Batch | PairBatch:
    source, inputs, labels = make_batch(row, seed=seed)
    weights = (labels != PAD_ID).astype(np.float32)
    if row.model == "encoder-decoder":
        return PairBatch(source, inputs, labels, weights)
    return Batch(inputs, labels, weights)


def _loss(row: Row, variant: TrainingPrecision = "float32") -> training.LossFunction:
    """The trainer's, with the loss over the vocabulary that it takes for so many tokens and classes."""
    kind = row.vocabulary_loss
    if kind == "auto":
        precision = PRECISIONS[variant]["precision"]
        kind = default_kind(row.batch_size * row.length, row.vocab_size, precision=precision)
    loss = training.translation_loss if row.model == "encoder-decoder" else training.next_token_loss
    return functools.partial(loss, vocabulary_loss=kind)


def _chain_loss(model: chain.Chain, batch: jax.Array, *, dropout: DropoutSource | None) -> LossSums:
    del dropout
    return LossSums(chain.mean_loss(model, batch), jnp.float32(1))
