"""Recordings of a model of two layers and of ports of it, right and wrong, for tests of what is done with recordings."""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from flax_transformer import parity

B, T, D, V = 2, 3, 7, 5

# The fused model's names for what the split one has.
RULES = """
[parameters]
"layers.0.norm.scale" = "blocks.0.norm.scale"
"layers.0.norm.bias" = "blocks.0.norm.bias"
"layers.1.norm.scale" = "blocks.1.norm.scale"
"layers.1.norm.bias" = "blocks.1.norm.bias"
"layers.0.both.kernel" = ["blocks.0.query.kernel", "blocks.0.key.kernel"]
"layers.0.both.bias" = ["blocks.0.query.bias", "blocks.0.key.bias"]
"layers.1.both.kernel" = ["blocks.1.query.kernel", "blocks.1.key.kernel"]
"layers.1.both.bias" = ["blocks.1.query.bias", "blocks.1.key.bias"]

[modules]
"layers.0" = "blocks.0"
"layers.0.norm" = "blocks.0.norm"
"layers.1" = "blocks.1"
"layers.1.norm" = "blocks.1.norm"

[transforms]
"layers.0.both.kernel" = "concatenate 1"
"layers.0.both.bias" = "concatenate 0"
"layers.1.both.kernel" = "concatenate 1"
"layers.1.both.bias" = "concatenate 0"
"""


def attend(scores: jax.Array, x: jax.Array) -> jax.Array:
    return jax.nn.softmax(scores, axis=-1) @ x


class SplitBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, epsilon: float) -> None:
        self.query, self.key = (nnx.Linear(D, D, bias_init=nnx.initializers.normal(0.3), rngs=rngs) for _ in range(2))
        self.norm = nnx.LayerNorm(D, epsilon=epsilon, scale_init=nnx.initializers.normal(1.0), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.norm(attend(self.query(x) @ self.key(x).mT, x))


class FusedBlock(nnx.Module):
    def __init__(self, block: SplitBlock) -> None:
        self.both = nnx.Linear(D, 2 * D, rngs=nnx.Rngs(0))
        self.both.kernel[...] = jnp.concatenate([block.query.kernel[...], block.key.kernel[...]], axis=1)
        assert self.both.bias is not None
        assert block.query.bias is not None
        assert block.key.bias is not None
        self.both.bias[...] = jnp.concatenate([block.query.bias[...], block.key.bias[...]])
        self.norm = block.norm

    def __call__(self, x: jax.Array) -> jax.Array:
        query, key = jnp.split(self.both(x), 2, axis=-1)
        return x + self.norm(attend(query @ key.mT, x))


class Split(nnx.Module):
    def __init__(self, epsilon: float = 1e-5) -> None:
        rngs = nnx.Rngs(3)
        self.blocks = nnx.List([SplitBlock(rngs, 1e-5), SplitBlock(rngs, epsilon)])
        self.head = nnx.Linear(D, V, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Fused(nnx.Module):
    def __init__(self, model: Split) -> None:
        self.layers = nnx.List([FusedBlock(block) for block in model.blocks])
        self.head = model.head

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def record(
    model: nnx.Module,
    *,
    dtype: str = "float64",
    execution: Literal["eager", "jit"] = "eager",
    steps: int = 5,
    seed: int = 0,
) -> parity.Recording:
    """A run of ``steps`` of Adam."""
    # Flax's own layers and optax promote dtypes and ranks, which this project's models may not.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return parity.record_flax(
            model,
            np.random.default_rng(seed).standard_normal((B, T, D)).astype(np.float32),
            dtype=dtype,
            execution=execution,
            loss=lambda output, _: jnp.mean(jnp.square(output)),
            optimizer=optax.adam(1e-2),
            steps=steps,
        )
