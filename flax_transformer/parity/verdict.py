"""What a comparison found: rows, rungs, the first divergence, and all of it as text."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from flax_transformer.parity.layouts import in_words
from flax_transformer.parity.matching import Match
from flax_transformer.parity.measures import Measures
from flax_transformer.parity.report import write_report

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
        return f"rung {self.rung}, module {self.path or '(the model itself)'}, {_shown(self.row)}: {self.row.detail}"


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
        conditioning: how strongly each module amplifies rounding, by path, where that was measured.
    """

    rule: str
    rungs: tuple[Rung, ...]
    matches: tuple[Match, ...]
    unmatched: tuple[str, ...]
    structural_zeros: tuple[str, ...] = ()
    curves: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    provenance: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)
    conditioning: Mapping[str, float] = dataclasses.field(default_factory=dict)

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

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON can hold it. Of a rung with nothing to compare, "passed" is None; a number that is none is
        "NaN", "Infinity" or "-Infinity"."""
        found = self.first_divergence
        climbed = {rung.name: rung for rung in self.rungs}
        return {
            "format": "flax_transformer.parity verdict",
            "version": 1,
            "passed": self.passed,
            "rule": self.rule,
            "first_divergence": found and {"rung": found.rung, **_plain(found.row)},
            "rungs": [
                {
                    "name": name,
                    "meaning": meaning,
                    "passed": climbed[name].passed if name in climbed else None,
                    "rows": _plain(climbed[name].rows) if name in climbed else [],
                }
                for name, meaning in RUNGS.items()
            ],
            **{
                name: _plain(getattr(self, name))
                for name in ("matches", "unmatched", "structural_zeros", "curves", "conditioning", "provenance")
            },
        }

    def report(self, path: str | Path) -> None:
        """Write the verdict as one HTML page that needs no other file and no network."""
        write_report(self.to_dict(), path)

    def __str__(self) -> str:
        lines = [f"{'PASSED' if self.passed else 'DIVERGED'} ({self.rule})"]
        for rung in self.rungs:
            failed = [row for row in rung.rows if not row.passed]
            held = f"{len(rung.rows) - len(failed)} of {len(rung.rows)}"
            lines.append(f"  {'ok  ' if rung.passed else 'FAIL'} {rung.name:9} {held:>12}  {RUNGS[rung.name]}")
            lines += _first([f"{_shown(row)}: {row.detail}" for row in failed], 5, indent=9)
        if self.first_divergence:
            lines.append(f"first divergence: {self.first_divergence}")
        guessed = [match for match in self.matches if match.how not in ("rule", "name")]
        lines += ["matched by more than the name:"] if guessed else []
        lines += _first(guessed, 20, indent=2)
        if self.structural_zeros:
            lines.append("zero by structure, exempt from updates and training: " + ", ".join(self.structural_zeros))
        lines += ["not compared:"] if self.unmatched else []
        lines += _first(self.unmatched, 10, indent=2)
        return "\n".join(lines)


def _shown(row: Row) -> str:
    """The model's own outputs have no path before the number of the call."""
    return f"(model){row.name}" if row.name.startswith("#") else row.name or "(output)"


def _first(entries: Sequence[object], most: int, *, indent: int) -> list[str]:
    """Lines of the first entries, and how many more there are."""
    lines = [" " * indent + str(entry) for entry in entries[:most]]
    return lines + [" " * indent + f"and {len(entries) - most} more"] * (len(entries) > most)


def _plain(value: Any) -> Any:
    """Dictionaries, lists, numbers and text."""
    if isinstance(value, Match):
        return {
            "reference": value.reference,
            "candidates": [list(group) for group in value.candidates],
            "layout": in_words(value.transform),
            "how": value.how,
        }
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, np.ndarray):
        value = value.astype(np.float64).tolist()
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[repr(value)]
    return value
