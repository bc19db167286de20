"""How parameters start.

==================  =============================================  ===================  =====================
``initialisation``  weights                                        biases               embeddings
==================  =============================================  ===================  =====================
``torch_default``   U(-b, b), b = 1 / sqrt(fan_in)                 U(-b, b), the same   N(0, 1)
``xavier_uniform``  U(-b, b), b = sqrt(6 / (fan_in + fan_out))     0                    N(0, 1 / D)
``gpt2``            N(0, 0.02^2); into a residual / sqrt(2 L)      0                    N(0, 0.02^2)
==================  =============================================  ===================  =====================

``torch_default`` has the distributions of ``torch.nn.Linear`` and ``torch.nn.Embedding``, not their draws: the two
frameworks' generators differ, so equal weights come only from loading them. Sources: PyTorch ``nn.Linear.reset_parameters``;
Glorot & Bengio 2010; Radford et al. 2019, section 2.3.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from flax_transformer.config import TransformerConfig

GPT2_STD = 0.02


@dataclasses.dataclass(frozen=True)
class Initialiser:
    """Draws the parameters of one model, all in ``dtype``. Weights are (fan_in, fan_out), as ``x @ weight`` wants them."""

    weight_scale: Callable[[int, int], float]
    weight_law: Callable[..., Array]
    bias_scale: Callable[[int], float]
    embedding_scale: Callable[[int], float]
    residual_scale: float
    dtype: jnp.dtype

    def weight(self, key: PRNGKeyArray, fan_in: int, fan_out: int) -> Float[Array, "fan_in fan_out"]:
        return self.weight_law(key, (fan_in, fan_out), self.dtype) * self.weight_scale(fan_in, fan_out)

    def bias(self, key: PRNGKeyArray, fan_in: int, fan_out: int) -> Float[Array, " fan_out"]:
        return _uniform(key, (fan_out,), self.dtype) * self.bias_scale(fan_in)

    def embedding(self, key: PRNGKeyArray, rows: int, d_model: int) -> Float[Array, "rows d_model"]:
        return jax.random.normal(key, (rows, d_model), self.dtype) * self.embedding_scale(d_model)

    def into_residual(self) -> "Initialiser":
        """The initialiser of weights whose output is added to the residual stream."""
        scale, factor = self.weight_scale, self.residual_scale
        return dataclasses.replace(self, weight_scale=lambda fan_in, fan_out: factor * scale(fan_in, fan_out))


def initialiser(config: TransformerConfig) -> Initialiser:
    """The initialiser that ``config.initialisation`` names."""
    dtype = jnp.dtype(config.param_dtype)
    match config.initialisation:
        case "torch_default":
            return Initialiser(
                weight_law=_uniform,
                weight_scale=lambda fan_in, fan_out: 1 / math.sqrt(fan_in),
                bias_scale=lambda fan_in: 1 / math.sqrt(fan_in),
                embedding_scale=lambda d_model: 1.0,
                residual_scale=1.0,
                dtype=dtype,
            )
        case "xavier_uniform":
            return Initialiser(
                weight_law=_uniform,
                weight_scale=lambda fan_in, fan_out: math.sqrt(6 / (fan_in + fan_out)),
                bias_scale=lambda fan_in: 0.0,
                embedding_scale=lambda d_model: 1 / math.sqrt(d_model),
                residual_scale=1.0,
                dtype=dtype,
            )
        case "gpt2":
            return Initialiser(
                weight_law=jax.random.normal,
                weight_scale=lambda fan_in, fan_out: GPT2_STD,
                bias_scale=lambda fan_in: 0.0,
                embedding_scale=lambda d_model: GPT2_STD,
                residual_scale=1 / math.sqrt(2 * config.num_layers),
                dtype=dtype,
            )


def _uniform(key: PRNGKeyArray, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
    return jax.random.uniform(key, shape, dtype, minval=-1.0, maxval=1.0)
