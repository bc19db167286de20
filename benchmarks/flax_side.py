"""The GPT made of Flax's own modules, and trained as Flax's guides do: `nnx.jit` of a function of model and optimizer.

Not the documents' models: one shares a projection between query, key, value and output, which
`nnx.MultiHeadAttention` cannot, and the other shares a norm.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from benchmarks import chain
from benchmarks.jax_side import make_product as jax_product
from benchmarks.rows import LEARNING_RATE, Row, make_batch


class Block(nnx.Module):
    def __init__(self, row: Row, *, rngs: nnx.Rngs) -> None:
        self.ln_1 = nnx.LayerNorm(row.d_model, epsilon=1e-5, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(row.num_heads, row.d_model, decode=False, rngs=rngs)
        self.ln_2 = nnx.LayerNorm(row.d_model, epsilon=1e-5, rngs=rngs)
        self.c_fc = nnx.Linear(row.d_model, row.d_ff, rngs=rngs)
        self.c_proj = nnx.Linear(row.d_ff, row.d_model, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.attn(self.ln_1(x), mask=mask)
        return x + self.c_proj(nnx.gelu(self.c_fc(self.ln_2(x)), approximate=True))


class GPT(nnx.Module):
    """Ids B T -> logits B T V, the output projection being the embedding table."""

    def __init__(self, row: Row, *, rngs: nnx.Rngs) -> None:
        self.wte = nnx.Embed(row.vocab_size, row.d_model, rngs=rngs)
        self.wpe = nnx.Embed(row.length, row.d_model, rngs=rngs)
        self.h = nnx.List([Block(row, rngs=rngs) for _ in range(row.num_layers)])
        self.ln_f = nnx.LayerNorm(row.d_model, epsilon=1e-5, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.wte(ids) + self.wpe(jnp.arange(ids.shape[1]))[None]
        mask = nnx.make_causal_mask(ids, dtype=jnp.bool_)
        for block in self.h:
            x = block(x, mask)
        return self.wte.attend(self.ln_f(x))

    def load_published(self, state: Mapping[str, np.ndarray]) -> None:
        """GPT-2's published names (`flax_transformer/weights/gpt2.py`)."""
        self.wte.embedding[...] = jnp.asarray(state["transformer.wte.weight"])
        self.wpe.embedding[...] = jnp.asarray(state["transformer.wpe.weight"])
        _load_norm(self.ln_f, state, "transformer.ln_f")
        for index, block in enumerate(self.h):
            name = f"transformer.h.{index}"
            _load_norm(block.ln_1, state, f"{name}.ln_1")
            _load_norm(block.ln_2, state, f"{name}.ln_2")
            attention = block.attn
            parts = (np.split(state[f"{name}.attn.c_attn.{part}"], 3, axis=-1) for part in ("weight", "bias"))
            for linear, kernel, bias in zip((attention.query, attention.key, attention.value), *parts, strict=True):
                _load_linear(linear, kernel, bias)
            for linear, part in (
                (attention.out, "attn.c_proj"),
                (block.c_fc, "mlp.c_fc"),
                (block.c_proj, "mlp.c_proj"),
            ):
                _load_linear(linear, state[f"{name}.{part}.weight"], state[f"{name}.{part}.bias"])


class Side:
    """The model with the weights that PyTorch wrote, and its optimizer."""

    def __init__(self, row: Row, *, weights: Path, seed: int, threads: int, variant: str = "flax") -> None:
        del threads, variant
        if row.model == "chain":
            self._model, self._batch, loss = (
                chain.build(row, seed=seed),
                chain.make_inputs(row, seed=seed),
                chain.mean_loss,
            )
        else:
            self._model, loss = GPT(row, rngs=nnx.Rngs(0)), _gpt_loss
            with np.load(weights) as state:
                self._model.load_published(dict(state))
            batch = make_batch(row, seed=seed)
            self._batch = (jnp.asarray(batch.inputs), jnp.asarray(batch.labels))
        self._optimizer = nnx.Optimizer(self._model, optax.adam(LEARNING_RATE), wrt=nnx.Param)
        self._step = _make_step(loss)
        self._norm: jax.Array | None = None
        self._steps_per_dispatch = row.steps_per_dispatch

    def step(self) -> float:
        """Takes one step; the loss before it, in nats per token."""
        return self._take(1)

    def dispatch(self) -> float:
        """Takes as many steps as ours takes in one call; the loss before the last."""
        return self._take(self._steps_per_dispatch)

    def _take(self, count: int) -> float:
        found = [self._step(self._model, self._optimizer, self._batch) for _ in range(count)]
        loss, self._norm = jax.block_until_ready(found[-1])
        return float(loss)

    def gradient_norm(self) -> float:
        """Of the latest step."""
        if self._norm is None:
            raise ValueError("there is no gradient before the first step; take one")
        return float(self._norm)


def make_product(size: int, *, threads: int, variant: str = "flax") -> Callable[[], jax.Array]:
    """A product of two square float32 matrices."""
    del variant
    return jax_product(size, threads=threads, variant="float32")


def _make_step(loss: Callable[[Any, Any], jax.Array]) -> Callable[..., tuple[jax.Array, jax.Array]]:
    @nnx.jit
    def train_step(model: Any, optimizer: nnx.Optimizer, batch: Any) -> tuple[jax.Array, jax.Array]:
        value, gradients = nnx.value_and_grad(loss)(model, batch)
        optimizer.update(model, gradients)
        return value, optax.tree.norm(gradients)

    return train_step


def _gpt_loss(model: GPT, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    inputs, labels = batch
    return optax.softmax_cross_entropy_with_integer_labels(model(inputs), labels).mean()


def _load_norm(norm: nnx.LayerNorm, state: Mapping[str, np.ndarray], name: str) -> None:
    for parameter, part in ((norm.scale, "weight"), (norm.bias, "bias")):
        assert parameter is not None
        parameter[...] = jnp.asarray(state[f"{name}.{part}"])


def _load_linear(linear: Any, kernel: np.ndarray, bias: np.ndarray) -> None:
    """Attention's projections have an axis for the heads and one for their width."""
    linear.kernel[...] = jnp.asarray(kernel).reshape(linear.kernel.shape)
    linear.bias[...] = jnp.asarray(bias).reshape(linear.bias.shape)
