"""The loss curves of the default training run in three precisions: `python -m benchmarks.precision_training --help`."""

import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from flax_transformer import training
from flax_transformer.commands.decoder_only_job import prepare_decoder_only
from flax_transformer.commands.train_options import (
    PRECISIONS,
    DecoderOnlyOptions,
    TrainingOptions,
    TrainingPrecision,
)

ROOT = Path(__file__).parents[1]
_COLOURS = {"float32": "black", "mixed": "tab:blue", "bfloat16": "tab:orange"}
_EVERY = 5  # steps between two points of a curve


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Train the default model on the default text in float32, mixed and bfloat16 precision, one after another, and draw
    the three losses, and how far two of them are from the first. Then take steps of all three in turns, and compare the
    processor time of each."""

    steps: int = 150
    """Of each run."""
    batch_size: int = 8
    """Sequences in a batch."""
    turns: int = 12
    """How many steps of each precision are timed."""
    output: Path = ROOT / "docs" / "images" / "precision-training.png"
    """The PNG to write."""


@dataclasses.dataclass(frozen=True)
class Curve:
    """What one run logged."""

    precision: TrainingPrecision
    losses: dict[int, float]
    validation_loss: float


def main(arguments: Sequence[str] | None = None) -> int:
    options = tyro.cli(Options, prog="python -m benchmarks.precision_training", args=arguments)
    curves = [train(precision, options) for precision in PRECISIONS]
    print(table(curves, times(options)))
    draw(curves, options.output)
    print(f"\n{options.output}")
    return 0


def train(precision: TrainingPrecision, options: Options) -> Curve:
    """One run of `train.py`, in a directory that is deleted."""
    with tempfile.TemporaryDirectory() as directory:
        command = [
            sys.executable, "train.py", "decoder-only", "--precision", precision, "--output", f"{directory}/run",
            "--steps", str(options.steps), "--batch-size", str(options.batch_size),
            "--log-every", str(_EVERY), "--validate-every", str(options.steps), "--save-every", str(options.steps),
            "--generate-tokens", "0",
        ]  # fmt: skip
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        lines = (Path(directory) / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    entries: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return Curve(
        precision,
        {entry["step"]: entry["loss"] for entry in entries},
        entries[-1]["validation_loss"],
    )


def times(options: Options) -> dict[TrainingPrecision, float]:
    """Seconds of processor time in a train step, median over the turns. Other programs do not count in it."""
    steps: dict[TrainingPrecision, Callable[[], None]] = {kind: _stepper(kind, options) for kind in PRECISIONS}
    taken: dict[TrainingPrecision, list[float]] = {kind: [] for kind in PRECISIONS}
    for _ in range(options.turns):
        for kind, step in steps.items():
            begun = time.process_time()
            step()
            taken[kind].append(time.process_time() - begun)
    return {kind: statistics.median(seconds) for kind, seconds in taken.items()}


def _stepper(precision: TrainingPrecision, options: Options) -> Callable[[], None]:
    recipe = TrainingOptions(precision=precision, batch_size=options.batch_size)
    job = prepare_decoder_only(DecoderOnlyOptions(training=recipe))
    structure, parameters, buffers = training.split_model(job.build_model())
    state = training.init_state(parameters, buffers, job.optimizer, seed=0)
    batch = jax.tree.map(jnp.asarray, job.batch(0))
    step = jax.jit(training.make_train_step(structure, job.loss, job.optimizer), donate_argnums=0)
    examples = jnp.arange(options.batch_size)

    def take() -> None:
        nonlocal state
        state, _ = jax.block_until_ready(step(state, batch, examples))

    take()  # compiles
    return take


def table(curves: Sequence[Curve], seconds: dict[TrainingPrecision, float]) -> str:
    """A row per precision, in Markdown. Differences are from the first curve, step by step."""
    lines = [
        "| precision | last loss | validation loss | difference of a loss: median, largest | processor time of a step |",
        "|---|---|---|---|---|",
    ]
    for curve in curves:
        differences = [abs(curve.losses[step] - loss) for step, loss in curves[0].losses.items()]
        lines.append(
            f"| {curve.precision} | {curve.losses[max(curve.losses)]:.4f} | {curve.validation_loss:.4f} "
            f"| {statistics.median(differences):.1e}, {max(differences):.1e} "
            f"| {1e3 * seconds[curve.precision]:.0f} ms |"
        )
    return "\n".join(lines)


def draw(curves: Sequence[Curve], output: Path) -> None:
    """The losses above, their differences from the first curve below."""
    figure = Figure(figsize=(7, 5.5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for curve in curves:
        steps = sorted(curve.losses)
        dashes = "--" if curve.precision == "bfloat16" else "-"
        style: dict[str, Any] = dict(color=_COLOURS[curve.precision], linewidth=1.2, linestyle=dashes)
        upper.plot(steps, [curve.losses[step] for step in steps], label=curve.precision, **style)
        if curve is not curves[0]:
            differences = [curve.losses[step] - curves[0].losses[step] for step in steps]
            lower.plot(steps, differences, label=f"{curve.precision} - {curves[0].precision}", **style)
    upper.set_ylabel("training loss, nats per token")
    lower.set_ylabel("difference")
    lower.set_xlabel("step")
    lower.axhline(0, color="grey", linewidth=0.5)
    for axes in (upper, lower):
        axes.legend(frameon=False)
    FigureCanvasAgg(figure).print_png(str(output), metadata={"Software": None})


if __name__ == "__main__":
    sys.exit(main())
