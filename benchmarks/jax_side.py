"""Ours: the model split once, and one pure step, compiled, whose state is donated."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import flax_transformer as ft
from benchmarks.rows import LEARNING_RATE, PAD_ID, START_ID, Row, make_batch
from flax_transformer import decoding, optimizers, training
from flax_transformer.dropout import DropoutSource
from flax_transformer.losses import LossSums, cross_entropy


class Side:
    """A model with the weights that the other side wrote, and its train state."""

    def __init__(self, row: Row, *, weights: Path, seed: int, threads: int) -> None:
        del threads  # as many as the process has processors: XLA counts those that it may run on
        model = _build(row)
        with np.load(weights) as state:
            ft.weights.load_torch(model, dict(state))
        structure, parameters, buffers = training.split_model(model)
        optimizer = optimizers.adamw(optimizers.constant(LEARNING_RATE), weight_decay=0.0)
        self._state = training.init_state(parameters, buffers, optimizer, seed=seed)
        self._step = jax.jit(training.make_train_step(structure, _loss, optimizer), donate_argnums=0)
        self._batch = jax.tree.map(jnp.asarray, make_batch(row, seed=seed))
        self._examples = jnp.arange(row.batch_size)
        self._metrics: training.Metrics | None = None

    def step(self) -> float:
        """Takes one step; the loss before it, in nats per token."""
        self._state, metrics = jax.block_until_ready(self._step(self._state, self._batch, self._examples))
        self._metrics = metrics
        return float(metrics.loss)

    def gradient_norm(self) -> float:
        """Of the latest step."""
        if self._metrics is None:
            raise ValueError("there is no gradient before the first step; take one")
        return float(self._metrics.grad_norm)


class Translator:
    """The same for decoding: a step is a whole translation, with a key/value cache."""

    def __init__(self, row: Row, *, weights: Path, seed: int, threads: int) -> None:
        del threads
        config = ft.EncoderDecoderConfig.paper_base(
            vocab_size=row.vocab_size,
            max_length=max(row.length, row.source_length),
            embedding_tying="none",
            d_model=row.d_model,
            d_ff=row.d_ff,
            num_heads=row.num_heads,
            num_layers=row.num_layers,
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


def make_product(size: int, *, threads: int) -> Callable[[], jax.Array]:
    """A product of two square float32 matrices."""
    del threads
    left, right = jax.random.uniform(jax.random.key(0), (2, size, size))
    product = jax.jit(functools.partial(jnp.matmul, precision="highest"))
    return lambda: jax.block_until_ready(product(left, right))


def _build(row: Row) -> nnx.Module:
    sizes = dict(d_model=row.d_model, num_heads=row.num_heads)
    layers = dict(d_ff=row.d_ff, num_layers=row.num_layers)
    none: dict[str, Any] = dict(dropout=0.0, attention_dropout=0.0)
    match row.model:
        case "gpt":
            config = ft.DecoderOnlyConfig.gpt2_small(
                vocab_size=row.vocab_size, max_length=row.length, **sizes, **layers, **none
            )
            return ft.DecoderOnly(config, rngs=nnx.Rngs(0))
        case "decoder-only":
            config = ft.DecoderOnlyConfig.document(vocab_size=row.vocab_size, max_length=row.length, **sizes)
            return ft.DecoderOnly(config, rngs=nnx.Rngs(0))
        case "encoder-decoder":
            config = ft.EncoderDecoderConfig.document(
                source_vocab_size=row.vocab_size, target_vocab_size=row.vocab_size, **sizes, **layers, **none
            )
            return ft.EncoderDecoder(config, rngs=nnx.Rngs(0))
    raise ValueError(f"{row.model} is not trained here")


def _loss(model: Any, batch: Any, *, dropout: DropoutSource | None) -> LossSums:
    if isinstance(model, ft.DecoderOnly):
        logits = model(batch.inputs, dropout=dropout)
    else:
        causal = ft.masks.causal_mask(batch.inputs.shape[1])
        target_mask = ft.masks.combine_masks(ft.masks.padding_mask(batch.inputs, pad_id=PAD_ID), causal)
        source_mask = ft.masks.padding_mask(batch.source, pad_id=PAD_ID)
        logits = model(batch.source, batch.inputs, source_mask, target_mask, dropout=dropout)
    return cross_entropy(logits, batch.labels, weights=batch.labels != PAD_ID)
