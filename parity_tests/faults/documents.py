"""``python -m parity_tests.faults.documents``: docs/kill-matrix.md's table, and its picture, of kill_matrix.json."""

import sys
from pathlib import Path

from flax_transformer.parity.verdict import RUNGS
from parity_tests.faults import ALL
from parity_tests.faults.planting import expected
from parity_tests.faults.sources import SOURCES

DOCS = Path(__file__).parents[2] / "docs"
PAGE, PICTURE = DOCS / "kill-matrix.md", DOCS / "images" / "kill-matrix.png"
BEGIN, END = "<!-- table -->", "<!-- end of table -->"


def table() -> str:
    """Markdown: mistakes by cases, and in each cell the rung that catches it."""
    lines = ["| mistake | " + " | ".join(ALL) + " | seen |", "|---|" + "---|" * (len(ALL) + 1)]
    for name, row in expected().items():
        cells = [row[case][0] if case in row else "" for case in ALL]
        seen = f"[here]({SOURCES[name]})" if name in SOURCES else ""
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {seen} |")
    return "\n".join(lines)


def draw() -> None:
    """The same as a picture: a column a rung, the colour the number of cases."""
    import matplotlib.pyplot as plt
    import numpy as np

    matrix = expected()
    rungs = [rung for rung in RUNGS if any(found[0] == rung for row in matrix.values() for found in row.values())]
    counts = np.array([[sum(found[0] == rung for found in row.values()) for rung in rungs] for row in matrix.values()])
    figure, axes = plt.subplots(figsize=(7, 0.19 * len(matrix) + 1), layout="constrained")
    image = axes.imshow(np.where(counts, counts, np.nan), aspect="auto", cmap="viridis", vmin=0, vmax=len(ALL))
    axes.set_xticks(range(len(rungs)), rungs, rotation=30, ha="left")
    axes.xaxis.tick_top()
    axes.set_yticks(range(len(matrix)), list(matrix), fontsize=7)
    axes.set_xticks(np.arange(len(rungs) + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(len(matrix) + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="lightgrey", linewidth=0.5)
    axes.tick_params(which="both", length=0)
    figure.colorbar(image, label="cases on which it is caught there", shrink=0.3)
    figure.savefig(PICTURE, dpi=110)
    plt.close(figure)


def main() -> int:
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}", encoding="utf-8")
    draw()
    return 0


if __name__ == "__main__":
    sys.exit(main())
