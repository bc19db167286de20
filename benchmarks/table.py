"""What was measured, as lines of a Markdown table."""

from collections.abc import Iterable, Mapping

from benchmarks.contenders import CONTENDERS, Contender
from benchmarks.measure import Ratio, Result, ratio
from benchmarks.rows import Row

COLUMNS = (
    "row",
    "ours",
    "vs eager",
    "vs fused",
    "vs compiled",
    "vs best at any precision",
    "vs Flax's own",
    "matrix product",
    "peak memory",
    "goal",
)
NOTHING = "-"


def heading() -> str:
    return f"{_line(COLUMNS)}\n{_line(['---'] * len(COLUMNS))}"


def lines(row: Row, result: Result) -> str:
    """A line for each of our contenders in a row."""
    best = result.fastest("torch")
    found = []
    for ours in (name for name in result.steps if CONTENDERS[name].framework == "jax"):
        against = [_against(result, name, ours) for name in ("eager", "fused", "compiled")]
        best_of_all = NOTHING if best is None else f"{_against(result, best, ours)} {best}"
        # PyTorch's product is in float32, whatever ours is: what the ratio to eager can reach.
        torch = next((name for name in result.products if CONTENDERS[name].framework == "torch"), None)
        product = NOTHING if torch is None else str(ratio(result.products[torch], result.products[ours]))
        cells = [*against, best_of_all, _against(result, "flax", ours), product, _memory(result, ours)]
        found.append(_line([str(row), ours, *cells, row.goals.get(ours, NOTHING)]))
    return "\n".join(found)


def head_line(row: Row, ours: Contender, found: Mapping[str, int]) -> str:
    """The line of a row that is compiled and not run."""
    small, large = found["fused"], found["plain"]
    cell = f"1/{large / small:.1f} ({small / 1e6:.1f} of {large / 1e6:.1f} MB, fused and plain)"
    return _line([str(row), ours.name, *[NOTHING] * 6, cell, row.goals.get(ours.name, NOTHING)])


def _against(result: Result, name: str, ours: str) -> Ratio | str:
    return ratio(result.steps[name], result.steps[ours]) if name in result.steps else NOTHING


def _memory(result: Result, ours: str) -> str:
    """Ours over that of PyTorch in float32 with all that makes it faster, or else of eager."""
    theirs = next((name for name in ("fused", "eager", "flax") if name in result.memory), None)
    if theirs is None:
        return NOTHING
    beyond = {name: result.memory[name] - result.imported[name] for name in (theirs, ours)}
    whole = result.memory[ours] / result.memory[theirs]
    return f"{whole:.2f} of {theirs} ({beyond[ours] / beyond[theirs]:.2f} beyond imports)"


def _line(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"
