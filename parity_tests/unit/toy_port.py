"""A small stranger: a PyTorch module that is not ours, and its port, for the tests of the parity tool."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

B, T, D, V = 2, 7, 5, 3


class Reference(torch.nn.Module):
    """One head of attention, a linear map that is used twice, a norm, a table."""

    def __init__(self) -> None:
        super().__init__()
        linear = torch.nn.Linear
        self.first = linear(D, D)
        self.norm = torch.nn.LayerNorm(D)
        self.query, self.key = linear(D, D), linear(D, D)
        self.second = self.first
        self.dropout = torch.nn.Dropout(0.5)
        self.head = linear(D, V)
        self.register_buffer("table", torch.randn(T, D))

    def forward(self, x, mask):
        x = self.norm(self.first(x + self.table))
        scores = self.query(x) @ self.key(x).transpose(-2, -1)
        weights = torch.softmax(scores.masked_fill(~mask, -1e9), -1)
        return self.head(self.dropout(self.second(weights @ x)))


class Linear(nnx.Module):
    def __init__(self, layer) -> None:
        self.kernel = nnx.Param(jnp.asarray(layer.weight.detach().numpy().T))
        self.bias: nnx.Param | None = nnx.Param(jnp.asarray(layer.bias.detach().numpy()))

    def __call__(self, x):
        y = jnp.einsum("...i,io->...o", x, self.kernel[...])
        return y if self.bias is None else y + jnp.broadcast_to(self.bias[...], y.shape)


class Norm(nnx.Module):
    def __init__(self, norm) -> None:
        self.scale: nnx.Variable = nnx.Param(jnp.asarray(norm.weight.detach().numpy()))
        self.bias = nnx.Param(jnp.asarray(norm.bias.detach().numpy()))
        self.eps = 1e-5

    def __call__(self, x):
        x = x - x.mean(-1, keepdims=True)
        x = x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + self.eps)
        return x * jnp.broadcast_to(self.scale[...], x.shape) + jnp.broadcast_to(self.bias[...], x.shape)


class Port(nnx.Module):
    def __init__(self, reference: Reference) -> None:
        self.key, self.query = Linear(reference.key), Linear(reference.query)
        self.first = Linear(reference.first)
        self.second = self.first
        self.norm = Norm(reference.norm)
        self.head = Linear(reference.head)
        self.table = nnx.Variable(jnp.asarray(np.asarray(reference.table)))

    def normalise(self, x):
        return self.norm(x)

    def __call__(self, x, mask):
        x = self.normalise(self.first(x + jnp.broadcast_to(self.table[...].astype(x.dtype), x.shape)))
        scores = jnp.einsum("btd,bsd->bts", self.query(x), self.key(x))
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1)
        return self.head(self.second(weights @ x))


def draw(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(seed).standard_normal((B, T, D)).astype(np.float32)
    return x, np.broadcast_to(np.tril(np.ones((T, T), bool)), (B, T, T))
