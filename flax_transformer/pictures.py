"""Pictures of a run: its loss curve, and where attention looks. The only file that imports matplotlib.

    loss_curve(Path("runs/small/metrics.jsonl"), Path("loss.png"), baseline=7.1)
    tokens = ["The", " cat", " sat"]
    attention_maps(collect_attention(model, ids), rows=tokens, columns=tokens, output=Path("attention.png"))

Figures are drawn without pyplot, so neither a display nor any state of the program is touched. Axis letters: config.py.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from jaxtyping import Float
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from flax_transformer.parity import record_flax
from flax_transformer.parity.recording import split_activation_key
from flax_transformer.stacks import unrolled

MAX_TOKENS = 64  # on one axis; more cannot be told apart
MAX_LABEL = 14  # characters of one token
# Weights are shown by their square root: spread evenly over 30 tokens, on a plain scale they could not be told from none.
SCALE = (0.0, 0.01, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
MAX_PIXELS = 8000  # along either side of a picture
ATTENTION_SUFFIX = "attention.dropout"  # without dropout, what this submodule returns are the weights
OWN_FONT = "DejaVu Sans"  # comes with matplotlib
LAST_RESORT = "Last Resort High-Efficiency"  # matplotlib's own font of empty boxes, which claims every character


def loss_curve(
    metrics: Path, output: Path, *, baseline: float | None = None, in_training_only: Sequence[str] = ()
) -> None:
    """Draws the training loss over the steps, the validation loss where there is one, and a baseline.

    The vertical axis ends where the loss began, so that a later spike does not flatten the rest of the curve.

    Args:
        metrics: `metrics.jsonl` of a run: a JSON object a line, with `step`, `loss` and perhaps `validation_loss`, in
            nats per token. Other entries are ignored. Of several lines of one step, the last counts. A loss that is NaN
            or infinite is a gap in the curve.
        output: the PNG to write.
        baseline: nats per token, a horizontal line; for example the unigram loss.
        in_training_only: what the training loss has that the validation loss has not, as "dropout"; for the legend, since
            it is why the former may lie above the latter.

    Raises:
        ValueError: metrics cannot be read, hold no finite loss or a line that is not such an object.
    """
    entries = _read_metrics(metrics)
    steps = np.array(sorted(entries))
    training = np.array([entries[step]["loss"] for step in steps], float)
    validation = np.array([_number(entries[step].get("validation_loss")) for step in steps], float)
    if not np.isfinite(training).any():
        raise ValueError(f"{metrics} holds no finite loss, so there is no curve to draw; the run has diverged")

    figure, axes = _figure(7.0, 4.2)
    with_what = f", with {' and '.join(in_training_only)}" if in_training_only else ""
    axes.plot(
        steps,
        training,
        color="C0",
        linewidth=1.5,
        marker="." if len(steps) < 50 else "",
        label=f"training{with_what}",
    )
    held_out = np.isfinite(validation)
    if held_out.any():
        axes.plot(
            steps[held_out],
            validation[held_out],
            color="C1",
            linewidth=1,
            marker="o",
            markersize=5,
            label="validation, without" if in_training_only else "validation",
        )
    if baseline is not None:
        axes.axhline(baseline, color="0.35", linestyle="--", linewidth=1.2, label=f"baseline ({baseline:.2f})")
    others = [*validation[held_out], *([] if baseline is None else [baseline])]
    axes.set_ylim(*_limits(training[np.isfinite(training)], others))
    left, right = steps[0], steps[-1]
    axes.set_xlim((left, right) if right > left else (left - 1, right + 1))
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(color="0.9", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(output, format="png", dpi=150)


def collect_attention(model: nnx.Module, *inputs: Any) -> dict[str, Float[np.ndarray, "N T S"]]:
    """The attention weights of every layer, in one call `model(*inputs)` without dropout.

    Args:
        model: a `DecoderOnly` or an `EncoderDecoder`; not changed.
        inputs: what a call takes, with a batch of one example: ids of shape (1, T) for a `DecoderOnly`; source, target,
            source mask and target mask for an `EncoderDecoder`.

    Returns:
        "blocks.0.attention" -> (N, T, T), or "encoder.layers.0.self_attention" -> (N, S, S),
        "decoder.layers.0.self_attention" -> (N, T, T) and "decoder.layers.0.cross_attention" -> (N, T, S); in the order
        of the layers. A layer that the model applies L times stands there L times, as the layers 0 to L - 1. An
        encoder-decoder's three kinds have different axes: one picture each.

    Raises:
        ValueError: the batch has not one example, or the model has no attention.
    """
    arrays = {str(number): value for number, value in enumerate(inputs) if value is not None}
    places = [None if value is None else str(number) for number, value in enumerate(inputs)]

    def call(model: Any, **named: Any) -> Any:
        return model(*(None if place is None else named[place] for place in places))

    recording = record_flax(unrolled(model), arrays, dtype="float32", call=call)
    found = {}
    for key, weights in recording.activations.items():
        path, calls = split_activation_key(key)
        if path.endswith(ATTENTION_SUFFIX):
            if weights.shape[0] != 1:
                raise ValueError(f"attention is collected of one example, got a batch of {weights.shape[0]}")
            found[recording.module_names[path][calls].removesuffix(".dropout")] = weights[0]
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no submodule {ATTENTION_SUFFIX!r}, so there is no attention to see"
        )
    return found


def attention_maps(
    weights: Mapping[str, Float[np.ndarray, "N T S"]], *, rows: Sequence[str], columns: Sequence[str], output: Path
) -> None:
    """Draws one panel for every layer (downwards) and head (to the right): who attends to whom, on one colour scale,
    which follows the square root of the weights.

    A space is shown as "·", a control character as its escape, as is a character that no installed font has.

    Args:
        weights: by the name of the layer, weights in [0, 1]; see `collect_attention`. NaN is left white.
        rows: the T tokens that attend, at most 64.
        columns: the S tokens that are attended to, at most 64.
        output: the PNG to write.

    Raises:
        ValueError: no layer, too many tokens, or weights of other shapes; all are named.
    """
    maps = {name: np.asarray(array, np.float32) for name, array in weights.items()}
    _check_maps(maps, len(rows), len(columns))
    families, (row_labels, column_labels) = _labels(rows, columns)
    heads = next(iter(maps.values())).shape[0]
    cell = max(0.16, 1.3 / max(len(rows), len(columns)))  # inches
    fringe = 0.085 * max(len(label) for label in (*row_labels, *column_labels)) + 0.9
    figure, grid = _grid(len(maps), heads, cell * len(columns), cell * len(rows), fringe)
    as_token: dict[str, Any] = dict(fontfamily=families, fontsize=7, parse_math=False)
    shown: Any = None
    for line, (name, layer) in zip(grid, maps.items(), strict=True):
        for head, (axes, panel) in enumerate(zip(line, layer, strict=True)):
            shown = axes.imshow(panel, cmap="Blues", norm=PowerNorm(0.5, 0.0, 1.0), interpolation="nearest")
            axes.tick_params(length=0)
            axes.set_xticks(range(len(columns)), column_labels if line is grid[-1] else [], rotation=90, **as_token)
            axes.set_yticks(range(len(rows)), row_labels if head == 0 else [], **as_token)
            if line is grid[0]:
                axes.set_title(f"head {head + 1}", fontsize=9)
        line[0].set_ylabel(".\n".join(name.rsplit(".", 1)), fontsize=8, parse_math=False)
    every = [axes for line in grid for axes in line]
    bar = figure.colorbar(shown, ax=every, shrink=min(1.0, 1.5 / len(maps)), aspect=25, ticks=SCALE, format="%g")
    bar.set_label("attention weight\n(row attends to column)", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    dpi = min(150.0, MAX_PIXELS / max(figure.get_size_inches()))
    figure.savefig(output, format="png", dpi=dpi, bbox_inches="tight")


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def _grid(layers: int, heads: int, width: float, height: float, fringe: float) -> tuple[Figure, list[list[Axes]]]:
    """A figure of layers x heads panels of that size, with room for the labels."""
    size = (heads * (width + 0.15) + fringe + 0.6, layers * (height + 0.15) + fringe)
    figure = Figure(figsize=size, layout="compressed")
    FigureCanvasAgg(figure)
    panels = figure.subplots(layers, heads, squeeze=False)
    return figure, [list(line) for line in panels]


def _read_metrics(path: Path) -> dict[int, dict[str, Any]]:
    """The entries by step."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as metrics ({error}); give the metrics.jsonl of a run") from error
    entries = {}
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
            step, loss = entry["step"], entry["loss"]
            fits = isinstance(step, int) and isinstance(loss, int | float) and _is_optional_number(entry)
        except (ValueError, KeyError, TypeError, RecursionError):
            fits = False
        if not fits:
            raise ValueError(
                f"{path}, line {number}: every line must be a JSON object with an integer 'step' and a number 'loss' (and a "
                f"number 'validation_loss', if any), got {line[:60]!r}; if a run was cut off while writing, delete that line"
            )
        entries[step] = entry
    if not entries:
        raise ValueError(f"{path} is empty: it must hold at least one logged step; let the run log one first")
    return entries


def _is_optional_number(entry: Mapping[str, Any]) -> bool:
    return isinstance(entry.get("validation_loss"), int | float | None)


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _limits(training: np.ndarray, others: Sequence[float]) -> tuple[float, float]:
    """From the lowest to the highest value, a later spike left out, and a margin."""
    usual = float(np.quantile(training, 0.98)) if len(training) > 50 else float(training.max())
    low, high = min([training.min(), *others]), max([training[0], usual, *others])
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return low - margin, high + margin


def _check_maps(maps: Mapping[str, np.ndarray], rows: int, columns: int) -> None:
    if not maps:
        raise ValueError("attention_maps needs the weights of at least one layer, got none")
    if not 0 < rows <= MAX_TOKENS or not 0 < columns <= MAX_TOKENS:
        raise ValueError(
            f"attention_maps shows 1 to {MAX_TOKENS} tokens on an axis, got {rows} rows and {columns} columns; "
            "take a shorter sample"
        )
    heads = next(iter(maps.values())).shape[:1]
    wrong = [f"{name}: {array.shape}" for name, array in maps.items() if array.shape != (*heads, rows, columns)]
    if wrong:
        raise ValueError(
            f"attention weights must have shape (N, T, S) = (heads, {rows} rows, {columns} columns) with the same heads in "
            f"every layer, got {'; '.join(wrong)}; an encoder-decoder's three kinds of attention need a picture each"
        )


def _labels(*axes: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Font families, and every token as text that they can show."""
    shortened = [
        [token if len(token) <= MAX_LABEL else token[: MAX_LABEL - 1] + "…" for token in axis] for axis in axes
    ]
    wanted = {ord(letter) for axis in shortened for token in axis for letter in token if letter.isprintable()}
    families, known = _families(wanted)

    def show(letter: str) -> str:
        if letter == " ":
            return "·"
        shown = letter.isprintable() and ord(letter) in known
        return letter if shown else letter.encode("unicode_escape").decode("ascii")

    return families, [["".join(map(show, token)) for token in axis] for axis in shortened]


def _families(wanted: set[int]) -> tuple[list[str], set[int]]:
    """The fonts to take, matplotlib's own first, and what they can show of the code points that are wanted."""
    families, known = [], set()
    upright = {
        entry.name: entry.fname
        for entry in font_manager.fontManager.ttflist
        if entry.style == "normal" and entry.weight in (400, "normal", "regular") and entry.name != LAST_RESORT
    }
    for name in (OWN_FONT, *sorted(upright.keys() - {OWN_FONT})):
        if families and wanted <= known:
            break
        font = font_manager.get_font(upright[name])
        # A font of bitmaps, as those of emoji are, cannot be scaled to the size of a label.
        new = set() if font.num_fixed_sizes else wanted & font.get_charmap().keys() - known
        if new or name == OWN_FONT:
            families.append(name)
            known |= new
    return families, known
