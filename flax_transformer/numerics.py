"""In which types a model stores and computes, and how precisely it multiplies: the one place that says so."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from flax_transformer.config import TransformerConfig


@dataclasses.dataclass(frozen=True)
class Numerics:
    """Types and precision of one model.

    ``param`` is what parameters are stored in, ``compute`` what activations are, ``statistics`` what norms, softmax and
    position tables are computed in: at least float32, since a bfloat16 sum of D terms loses the mean it looks for.
    """

    param: jnp.dtype
    compute: jnp.dtype
    precision: jax.lax.Precision

    @classmethod
    def of(cls, config: TransformerConfig) -> "Numerics":
        return cls(
            param=jnp.dtype(config.param_dtype),
            compute=jnp.dtype(config.compute_dtype),
            precision=jax.lax.Precision(config.precision),
        )

    @property
    def statistics(self) -> jnp.dtype:
        return jnp.dtype("float64" if self.compute == "float64" else "float32")

    def einsum(self, spec: str, left: Float[Array, "..."], right: Float[Array, "..."], *, result: DTypeLike) -> Array:
        """``jnp.einsum`` of both operands cast to ``compute``, in the model's precision, accumulated into ``result``."""
        return jnp.einsum(
            spec,
            left.astype(self.compute),
            right.astype(self.compute),
            precision=self.precision,
            preferred_element_type=result,
        )

    def rounded(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """A factor as a product reads it, but in ``statistics``."""
        if self.compute == "bfloat16":  # not two conversions: XLA may drop these, and the rounding with them
            return jax.lax.reduce_precision(x.astype(self.statistics), exponent_bits=8, mantissa_bits=7)
        return x.astype(self.statistics)
