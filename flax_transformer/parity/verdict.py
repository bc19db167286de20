"""What a comparison found: rows, rungs, the first divergence, and all of it as text."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

import numpy as np

from flax_transformer.parity.matching import Match
from flax_transformer.parity.measures import Measures

RungName = Literal[
    "keys",
    "shapes",
    "masks",
    "buffers",
    "modules",
    "output",
    "loss",
    "backward",
    "gradients",
    "updates",
    "training",
    "decoding",
]

RUNGS: dict[RungName, str] = {
    "keys": "every parameter has its counterpart, and what is shared is shared",
    "shapes": "shapes and dtypes agree, and parameters hold the same numbers",
    "masks": "booleans are equal",
    "buffers": "position tables and other buffers are equal",
    "modules": "every submodule's output agrees, call by call",
    "output": "the final output agrees",
    "loss": "the loss agrees",
    "backward": "the gradient that reaches every submodule's output agrees, from the loss backwards",
    "gradients": "every parameter's gradient agrees",
    "updates": "the first step moves every parameter alike, and leaves like moments",
    "training": "all losses agree, and where every parameter ends",
    "decoding": "the decoded tokens are equal",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One thing compared.

    Attributes:
        name: the reference's name of the tensor, with "#" and the call number for an output.
        path: the reference's path of the module that it belongs to.
        passed: whether it holds.
        detail: what was found, in words.
        measures: how far the values are apart (of the first seed, if several were pooled).
        allowed: the largest value that the rule allows, if it has one.
        judged: the value that is held against ``allowed``: the largest difference, or an rms error against the truth.
    """

    name: str
    path: str
    passed: bool
    detail: str
    measures: Measures | None = None
    allowed: float | None = None
    judged: float | None = None


@dataclasses.dataclass(frozen=True)
class Rung:
    """One step of the ladder, with its rows in the reference's order of execution."""

    name: RungName
    rows: tuple[Row, ...]

    @property
    def passed(self) -> bool:
        return all(row.passed for row in self.rows)


@dataclasses.dataclass(frozen=True)
class Divergence:
    """Where to look first: the lowest rung that does not hold, and there the first row: in order of execution, and on the
    rungs of gradients in the order in which the backward pass comes by."""

    rung: RungName
    path: str
    row: Row

    def __str__(self) -> str:
        return f"rung {self.rung}, module {self.path or '(the model itself)'}, {self.row.name}: {self.row.detail}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of a comparison.

    Attributes:
        rule: the rule for values, in words.
        rungs: the rungs on which there was something to compare, in the ladder's order.
        matches: which reference name was compared with which candidate name, and how the pair was found.
        unmatched: what ran or was stored on one side and was not compared, with the reason.
        structural_zeros: parameters whose gradient is zero but for rounding, and which are therefore exempt from the rungs
            of updates and training: an optimizer such as Adam turns the rounding noise into full steps.
        curves: losses of all steps, by whose they are.
        provenance: how each side was recorded.
    """

    rule: str
    rungs: tuple[Rung, ...]
    matches: tuple[Match, ...]
    unmatched: tuple[str, ...]
    structural_zeros: tuple[str, ...] = ()
    curves: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    provenance: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return all(rung.passed for rung in self.rungs)

    @property
    def first_divergence(self) -> Divergence | None:
        for rung in self.rungs:
            for row in rung.rows:
                if not row.passed:
                    return Divergence(rung.name, row.path, row)
        return None

    def __str__(self) -> str:
        lines = [f"{'PASSED' if self.passed else 'DIVERGED'} ({self.rule})"]
        for rung in self.rungs:
            failed = [row for row in rung.rows if not row.passed]
            held = f"{len(rung.rows) - len(failed)} of {len(rung.rows)}"
            lines.append(f"  {'ok  ' if rung.passed else 'FAIL'} {rung.name:9} {held:>12}  {RUNGS[rung.name]}")
            lines += [f"         {row.name or '(output)'}: {row.detail}" for row in failed[:5]]
            lines += [f"         and {len(failed) - 5} more"] if len(failed) > 5 else []
        if self.first_divergence:
            lines.append(f"first divergence: {self.first_divergence}")
        guessed = [match for match in self.matches if match.how not in ("rule", "name")]
        lines += ["matched by more than the name:"] if guessed else []
        lines += [f"  {match}" for match in guessed]
        if self.structural_zeros:
            lines.append("zero by structure, exempt from updates and training: " + ", ".join(self.structural_zeros))
        lines += ["not compared:"] if self.unmatched else []
        lines += [f"  {entry}" for entry in self.unmatched]
        return "\n".join(lines)
