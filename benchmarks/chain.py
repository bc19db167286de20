"""A model that hardly computes: what a step of it takes is dispatch."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from benchmarks.rows import Row


class Chain(nnx.Module):
    """x + tanh(linear(x)), again and again."""

    def __init__(self, row: Row, *, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(row.d_model, row.d_model, rngs=rngs) for _ in range(row.num_layers)])

    def __call__(self, x: Float[Array, "B D"]) -> Float[Array, "B D"]:
        for layer in self.layers:
            x = x + jnp.tanh(layer(x))
        return x


def build(row: Row, *, seed: int) -> Chain:
    return Chain(row, rngs=nnx.Rngs(seed))


def make_inputs(row: Row, *, seed: int) -> Float[Array, "B D"]:
    return jax.random.normal(jax.random.key(seed), (row.batch_size, row.d_model))


def mean_loss(model: Chain, inputs: Float[Array, "B D"]) -> Float[Array, ""]:
    return jnp.square(model(inputs)).mean()
