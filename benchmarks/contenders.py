"""Who takes part in a row. Imports neither framework."""

import dataclasses
import os
import shutil
from collections.abc import Sequence
from typing import Literal

from benchmarks.rows import Row

ContenderName = Literal["eager", "fused", "compiled", "autocast", "autocast-compiled", "float32", "mixed", "flax"]


@dataclasses.dataclass(frozen=True)
class Contender:
    """A process that takes the steps of a row.

    Attributes:
        framework: whose: the process imports `benchmarks.<framework>_side`.
        name: which of its variants.
        factors: what the factors of its products are rounded to, or that everything but the parameters is bfloat16.
        about: for people.
    """

    framework: Literal["torch", "jax", "flax"]
    name: str
    factors: Literal["float32", "bfloat16", "everything bfloat16"]
    about: str

    def takes_part(self, row: Row) -> bool:
        """Whether there is something of this row that it can do."""
        match row.model:
            case "translation":
                return self.name in ("eager", "float32")
            case "head":
                return self.framework == "jax"
            case "chain":
                return self.name in ("float32", "flax")
        return self.framework != "flax" or row.model == "gpt"


CONTENDERS: dict[str, Contender] = {
    contender.name: contender
    for contender in (
        Contender("torch", "eager", "float32", "PyTorch eager"),
        Contender("torch", "fused", "float32", "eager with scaled_dot_product_attention and Adam(fused=True)"),
        Contender("torch", "compiled", "float32", "fused, its loss under torch.compile"),
        Contender("torch", "autocast", "bfloat16", "fused under torch.autocast, bfloat16"),
        Contender("torch", "autocast-compiled", "bfloat16", "compiled under the same autocast"),
        Contender("jax", "float32", "float32", "ours"),
        Contender("jax", "mixed", "bfloat16", "ours with precision mixed"),
        Contender("flax", "flax", "float32", "Flax's own modules under nnx.jit"),
    )
}


def choose(row: Row, names: Sequence[str]) -> list[Contender]:
    """Those of the names that can do something of a row, in a fixed order; `torch.compile` only with a C++ compiler."""
    chosen = [contender for name, contender in CONTENDERS.items() if name in names and contender.takes_part(row)]
    return chosen if has_compiler() else [contender for contender in chosen if "compiled" not in contender.name]


def has_compiler() -> bool:
    """Whether `torch.compile` finds a C++ compiler for programs of the CPU."""
    return shutil.which(os.environ.get("CXX", "g++")) is not None
