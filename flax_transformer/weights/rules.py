"""The vocabulary of weight tables: how a tensor of a foreign model becomes one of ours, and back.

A *table* for a foreign model is a tuple of rules. Each rule names source keys, target paths (attributes of our model,
dotted) and a transform that is a bijection of arrays, so that one table serves loading and exporting alike.

=============  ===================================================================================
``copy``       the array as it is
``transpose``  a matrix, transposed: ``torch.nn.Linear.weight`` is (out, in), our ``kernel`` (in, out)
``split``      one source in equal parts along an axis: fused query, key and value projections
``stack``      several sources along a new first axis: layers of a scanned stack
``buffer``     state that is no parameter, leading axes of size 1 dropped; may be optional
``alias``      a second name of a tensor that another rule loads: must hold equal values
=============  ===================================================================================
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

Arrays = list[np.ndarray]


@dataclasses.dataclass(frozen=True)
class Rule:
    """One row of a table.

    ``load`` maps the sources' arrays to the targets', ``export`` maps them back. An ``alias`` has no targets; its
    ``alias_of`` is the source key that it repeats. Only a buffer may be optional: exporting leaves it out.
    """

    kind: str
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    load: Callable[[Arrays], Arrays]
    export: Callable[[Arrays], Arrays]
    alias_of: str | None = None
    optional: bool = False

    def __str__(self) -> str:
        left, right = ", ".join(self.sources), ", ".join(self.targets) or f"the same as {self.alias_of}"
        return f"{self.kind}: {left} -> {right}"


def _same(arrays: Arrays) -> Arrays:
    return arrays


def transposed(arrays: Arrays) -> Arrays:
    """Each matrix transposed."""
    return [array.T for array in arrays]


def copy(source: str, target: str) -> Rule:
    return Rule("copy", (source,), (target,), load=_same, export=_same)


def transpose(source: str, target: str) -> Rule:
    return Rule("transpose", (source,), (target,), load=transposed, export=transposed)


def split(source: str, targets: Sequence[str], *, axis: int, then: Callable[[Arrays], Arrays] = _same) -> Rule:
    """``source`` in ``len(targets)`` equal parts along ``axis``; ``then=transposed`` transposes each part."""
    count = len(targets)
    return Rule(
        "split",
        (source,),
        tuple(targets),
        load=lambda arrays: then(np.split(arrays[0], count, axis=axis)),
        export=lambda arrays: [np.concatenate(then(arrays), axis=axis)],
    )


def stack(sources: Sequence[str], target: str, *, then: Callable[[Arrays], Arrays] = _same) -> Rule:
    """All ``sources`` along a new first axis; ``then=transposed`` transposes each before."""
    return Rule(
        "stack",
        tuple(sources),
        (target,),
        load=lambda arrays: [np.stack(then(arrays))],
        export=lambda arrays: then(list(arrays[0])),
    )


def buffer(source: str, target: str, *, leading_axes: int = 0, optional: bool = False) -> Rule:
    """State that is no parameter. ``leading_axes`` axes of size 1 stand before ours in the source."""
    return Rule(
        "buffer",
        (source,),
        (target,),
        load=lambda arrays: [np.squeeze(arrays[0], axis=tuple(range(leading_axes)))],
        export=lambda arrays: [np.expand_dims(arrays[0], axis=tuple(range(leading_axes)))],
        optional=optional,
    )


def alias(source: str, *, of: str) -> Rule:
    return Rule("alias", (source,), (), load=_same, export=_same, alias_of=of)
