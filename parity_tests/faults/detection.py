"""How small a mistake may be and still be caught: a detection curve for every mistake that has a size.

``python -m parity_tests.faults.detection`` prints the table of docs/kill-matrix.md.
"""

import dataclasses
import functools
import math
import sys
import types
from collections.abc import Callable
from typing import get_args

from flax_transformer import attention, layers, parity
from flax_transformer.config import Dtype
from flax_transformer.parity.verdict import RungName
from parity_tests.faults import DECODER_ONLY, Fault, OptimizerFault
from parity_tests.faults.forward import original_embedding, patched
from parity_tests.faults.learning import NOAM, right_but
from parity_tests.faults.planting import CASES, verdict_on

# Sizes from 10^0 down; a curve ends where the mistake is no longer caught on any rung.
EXPONENTS = range(0, -17, -1)
RUNGS: tuple[RungName, ...] = ("modules", "output", "loss", "backward", "gradients", "updates")


def _eps(size: float) -> Fault:
    def config(right):
        return dataclasses.replace(right, norm_eps=right.norm_eps * (1 + size))

    return Fault(name="eps of the norm", cases=(), config=config, backward=True)


def _scores(size: float) -> Fault:
    wrong = types.SimpleNamespace(sqrt=lambda heads: math.sqrt(heads) * (1 + size))
    return Fault(name="scale of the scores", cases=(), patch=patched(attention, "math", wrong), backward=True)


def _embeddings(size: float) -> Fault:
    def scaled(self, ids):
        return original_embedding(self, ids) * (1 + size)

    return Fault(
        name="scale of the embeddings", cases=(), patch=patched(layers.Embedding, "__call__", scaled), backward=True
    )


def _optimizer(name: str, options: Callable[[float], dict]) -> Callable[[float], OptimizerFault]:
    return lambda size: OptimizerFault(name=name, optimizer=right_but(**options(size)))


SIZED: dict[str, Callable[[float], Fault | OptimizerFault]] = {
    "eps of the norm": _eps,
    "scale of the scores": _scores,
    "scale of the embeddings": _embeddings,
    "learning rate": _optimizer(
        "learning rate", lambda size: {"learning_rate": lambda count: NOAM(count) * (1 + size)}
    ),
    "eps of Adam": _optimizer("eps of Adam", lambda size: {"eps": 1e-9 * (1 + size)}),
    "b2 of Adam (1 - b2 changed)": _optimizer("b2 of Adam", lambda size: {"b2": 1 - 0.02 * (1 + size)}),
    "weight decay": _optimizer("weight decay", lambda size: {"weight_decay": 0.3 * (1 + size)}),
    "limit of clipping": _optimizer("limit of clipping", lambda size: {"max_norm": 0.5 * (1 + size)}),
}


@functools.cache
def failed(name: str, exponent: int, dtype: Dtype) -> frozenset[str]:
    """The rungs on which a mistake of relative size 10^exponent is caught."""
    verdict = verdict_on(SIZED[name](10.0**exponent), CASES[DECODER_ONLY], dtype)
    return frozenset(rung.name for rung in verdict.rungs if not rung.passed)


def curve(name: str, dtype: Dtype) -> dict[str, int]:
    """Rung -> the exponent of the smallest size that it catches, of those that it catches."""
    smallest: dict[str, int] = {}
    for exponent in EXPONENTS:
        caught = failed(name, exponent, dtype)
        if not caught:
            break
        smallest |= dict.fromkeys(caught, exponent)
    return smallest


def table() -> str:
    """Markdown: a row for every mistake and dtype."""
    lines = ["| mistake, relative size | dtype | " + " | ".join(RUNGS) + " |", "|---|---|" + "---|" * len(RUNGS)]
    for name in SIZED:
        for dtype in ("float64", "float32"):
            found = curve(name, dtype)
            cells = [f"1e{found[rung]}" if rung in found else "-" for rung in RUNGS]
            lines.append(f"| {name} | {dtype} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    assert set(RUNGS) <= set(get_args(RungName))
    with parity.shared_traces():
        print(table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
