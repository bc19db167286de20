"""What a comparison found: rows, rungs, the first divergence, and all of it as text."""

import dataclasses
from typing import Literal

from flax_transformer.parity.matching import Match
from flax_transformer.parity.measures import Measures

RungName = Literal["keys", "shapes", "masks", "buffers", "modules", "output"]

RUNGS: dict[RungName, str] = {
    "keys": "every parameter has its counterpart, and what is shared is shared",
    "shapes": "shapes and dtypes agree, and parameters hold the same numbers",
    "masks": "booleans are equal",
    "buffers": "position tables and other buffers are equal",
    "modules": "every submodule's output agrees, call by call",
    "output": "the final output agrees",
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
        allowed: the largest value that the rule allows for what ``detail`` names, if it has one.
    """

    name: str
    path: str
    passed: bool
    detail: str
    measures: Measures | None = None
    allowed: float | None = None


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
    """Where to look first: the lowest rung that does not hold, and there the first row in order of execution."""

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
    """

    rule: str
    rungs: tuple[Rung, ...]
    matches: tuple[Match, ...]
    unmatched: tuple[str, ...]

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
            lines.append(f"  {'ok  ' if rung.passed else 'FAIL'} {rung.name:8} {held:>12}  {RUNGS[rung.name]}")
            lines += [f"         {row.name or '(output)'}: {row.detail}" for row in failed[:5]]
            lines += [f"         and {len(failed) - 5} more"] if len(failed) > 5 else []
        if self.first_divergence:
            lines.append(f"first divergence: {self.first_divergence}")
        guessed = [match for match in self.matches if match.how not in ("rule", "name")]
        lines += ["matched by more than the name:"] if guessed else []
        lines += [f"  {match}" for match in guessed]
        lines += ["not compared:"] if self.unmatched else []
        lines += [f"  {entry}" for entry in self.unmatched]
        return "\n".join(lines)
