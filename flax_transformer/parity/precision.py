"""How far other hardware's default products move a model's outputs, loss and gradients: a table, before renting any."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np

from flax_transformer.parity import tolerances
from flax_transformer.parity.emulation import MODES, Mode, emulate
from flax_transformer.parity.measures import measure

Quantity = Literal["outputs", "loss", "gradients"]
LossFunction = Callable[[Any, Any], tuple[jax.Array, Any]]


@dataclasses.dataclass(frozen=True)
class PrecisionRow:
    """The error of one quantity in one mode, over all of its tensors.

    Attributes:
        mode: see ``emulation.emulate``; "float32" is what this machine computes.
        quantity: outputs, loss or gradients.
        relative_rms: root mean square of the error over that of the truth. Infinite if NaN or infinity stand elsewhere.
        relative_max: the largest error, over the largest magnitude of the truth of its tensor; the largest over tensors.
        cosine: cosine of the angle between the two, all tensors as one vector.
        worst: the tensor with the largest relative root mean square error.
        worst_relative_rms: that error.
    """

    mode: Mode | Literal["float32"]
    quantity: Quantity
    relative_rms: float
    relative_max: float
    cosine: float
    worst: str
    worst_relative_rms: float


@dataclasses.dataclass(frozen=True)
class PrecisionTable:
    """Rows by mode and quantity; ``str`` makes a table of them that is readable as text and as Markdown."""

    rows: tuple[PrecisionRow, ...]

    def row(self, mode: str, quantity: Quantity) -> PrecisionRow:
        """The row of a mode and a quantity."""
        return next(row for row in self.rows if (row.mode, row.quantity) == (mode, quantity))

    def __str__(self) -> str:
        head = ("mode", "quantity", "relative rms", "max / scale", "1 - cosine", "worst tensor", "its relative rms")
        lines = [head] + [_cells(row) for row in self.rows]
        widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
        lines.insert(1, tuple("-" * width for width in widths))
        return "\n".join(
            "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
            for line in lines
        )


def precision_table(
    loss_function: LossFunction,
    parameters: Any,
    batch: Any,
    *,
    truth: LossFunction | None = None,
    modes: Sequence[Mode] = MODES,
) -> PrecisionTable:
    """What each mode of ``emulation.emulate`` makes of a model's outputs, its loss and the gradients of its parameters.

    Args:
        loss_function: ``(parameters, batch) -> (loss, outputs)`` in float32, of pytrees of arrays; outputs are whatever
            is to be watched, such as logits. It should ask for no reduced precision itself.
        parameters: a pytree of float32 arrays; its paths are the names in the table.
        batch: a pytree of arrays.
        truth: the same function in float64. It is called in JAX's 64-bit mode with the floating-point arrays of
            parameters and batch in float64; build its model in that mode too. With it, the first rows say what float32
            itself costs. None: ``loss_function`` in float32 is the truth.
        modes: which to show.

    A gradient that is zero by structure (that of a key bias: softmax ignores a constant) is nothing but rounding noise
    and never the worst: one below ``tolerances.STRUCTURAL_ZERO`` of its module's largest, or, without a float64 truth,
    below 64 times float32's unit roundoff of it.
    """
    gradient = jax.value_and_grad(loss_function, has_aux=True)
    float32 = _run(jax.jit(gradient), parameters, batch)
    if truth is None:
        negligible, expected, candidates = 64 * tolerances.UNIT_ROUNDOFF["float32"], float32, {}
    else:
        with jax.enable_x64(True):
            doubled = jax.tree.map(_double, (parameters, batch))
            expected = _run(jax.jit(jax.value_and_grad(truth, has_aux=True)), *doubled)
        negligible, candidates = tolerances.STRUCTURAL_ZERO, {"float32": float32}
    for mode in modes:
        candidates[mode] = _run(jax.jit(emulate(gradient, mode)), parameters, batch)
    return PrecisionTable(
        tuple(
            _row(mode, quantity, expected[quantity], candidate[quantity], negligible=negligible)
            for mode, candidate in candidates.items()
            for quantity in expected
        )
    )


def _run(gradient: Callable[..., Any], parameters: Any, batch: Any) -> dict[Quantity, dict[str, np.ndarray]]:
    (loss, outputs), gradients = gradient(parameters, batch)
    return {"outputs": _named(outputs), "loss": _named({"loss": loss}), "gradients": _named(gradients)}


def _named(tree: Any) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf, np.float64) for path, leaf in leaves
    }


def _double(leaf: Any) -> np.ndarray:
    array = np.asarray(leaf)
    return array.astype(np.float64) if array.dtype == "float32" else array


def _row(
    mode: Any, quantity: Quantity, truth: dict[str, np.ndarray], found: dict[str, np.ndarray], *, negligible: float
) -> PrecisionRow:
    modules: dict[str, float] = {}
    for name, array in truth.items():
        module = name.rpartition(".")[0]
        modules[module] = max(modules.get(module, 0.0), tolerances.scale(array))
    relative, largest = {}, 0.0
    for name, array in truth.items():
        if tolerances.scale(array) <= negligible * modules[name.rpartition(".")[0]]:
            continue
        relative[name] = _relative_rms(array, found[name])
        largest = max(largest, measure(array, found[name]).relative)
    worst = max(relative, key=lambda name: relative[name], default="")
    a, b = (np.concatenate([side[name].ravel() for name in truth]) for side in (truth, found))
    return PrecisionRow(
        mode=mode,
        quantity=quantity,
        relative_rms=_relative_rms(a, b),
        relative_max=largest,
        cosine=measure(a, b).cosine,
        worst=worst or "output",
        worst_relative_rms=relative.get(worst, 0.0),
    )


def _relative_rms(truth: np.ndarray, found: np.ndarray) -> float:
    """Of the difference, over that of the truth, where the two are finite."""
    if tolerances.misplaced(truth, found):
        return float("inf")
    finite = np.isfinite(truth)
    size = np.linalg.norm(truth[finite])
    error = np.linalg.norm(found[finite] - truth[finite])
    return float(error / size) if size else (0.0 if error == 0 else float("inf"))


def _cells(row: PrecisionRow) -> tuple[str, ...]:
    numbers = (row.relative_rms, row.relative_max, max(1 - row.cosine, 0.0))
    return (
        row.mode,
        row.quantity,
        *(f"{number:.1e}" for number in numbers),
        row.worst,
        f"{row.worst_relative_rms:.1e}",
    )
