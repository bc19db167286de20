"""``python -m benchmarks.gpu_training``: step time, MFU and peak memory on one GPU, ours beside PyTorch's best.

Both in bfloat16 with float32 parameters, in a process each, in turns (docs/benchmarks.md).
"""

import dataclasses
import importlib.metadata
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import jax
import tyro

from benchmarks.contenders import CONTENDERS, Contender, has_compiler
from benchmarks.jax_side import count_step
from benchmarks.measure import Result, WorkerProcess, measure_row, median, ratio
from benchmarks.rows import Row, VocabularyLoss
from flax_transformer.chips import chip

THEIRS = CONTENDERS["autocast-compiled"]
OURS = Contender("jax", "bfloat16", "everything bfloat16", "ours with bfloat16 activations")
GIB = 2**30
ROWS = (
    Row(
        name="gpt", model="gpt", batch_size=16, length=1024,
        vocab_size=50_257, d_model=768, d_ff=3072, num_heads=12, num_layers=12,
    ),
    Row(
        name="encoder-decoder-base", model="encoder-decoder", batch_size=64, length=128, source_length=128,
        vocab_size=8192, d_model=512, d_ff=2048, num_heads=8, num_layers=6,
    ),
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Train steps of GPT-2 small and of the encoder-decoder document's model on one GPU, beside torch.compile."""

    vocabulary_loss: VocabularyLoss = "auto"
    """Ours; `auto` is what the trainer chooses for so many tokens and classes."""
    rounds: int = 5
    """Turns of each."""
    steps: int = 8
    """Steps that are timed in a turn."""
    quick: bool = False
    """Toy sizes on the CPU: to see that everything runs. The numbers mean nothing."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = tyro.cli(Options, prog="python -m benchmarks.gpu_training", args=arguments)
    jax.config.update("jax_platforms", "cpu")  # this process only counts; the GPU is for the others
    began = time.perf_counter()
    device: Literal["cpu", "cuda"] = "cpu" if options.quick else "cuda"
    card = "toy sizes on a CPU" if options.quick else _card()
    if card is None:
        print("gpu_training: nvidia-smi finds no GPU; --quick runs toy sizes on the CPU", file=sys.stderr)
        return 2
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "jax", "flax", "optax"))
    print(f"{card}, {versions}\n")
    print("| row | contender | step, ms | MFU | peak memory, GiB | PyTorch's time / ours |")
    print("|---|---|---|---|---|---|")
    known = chip(card)
    theirs = THEIRS if has_compiler() else CONTENDERS["autocast"]
    for row in ROWS:
        row = dataclasses.replace(row.quick() if options.quick else row, vocabulary_loss=options.vocabulary_loss)
        try:
            row, result = _measure(row, [theirs, OURS], options, device=device)
        except (RuntimeError, ValueError) as error:
            print(f"gpu_training: {error}", file=sys.stderr)
            return 1
        speed = ratio(result.steps[theirs.name], result.steps[OURS.name])
        flops = count_step(row)
        for contender in (theirs, OURS):
            seconds = median(result.steps[contender.name])
            use = "-" if known is None else f"{flops / seconds / known.flops:.1%}"
            memory = result.memory[contender.name] / GIB
            print(
                f"| {row} | {contender.about} | {1e3 * seconds:.1f} | {use} | {memory:.2f} | "
                f"{speed if contender is OURS else ''} |",
                flush=True,
            )
    print(f"\nMFU: of the operations of a step (flax_transformer/flops.py); all in {time.perf_counter() - began:.0f} s")
    return 0


def _measure(
    row: Row, contenders: Sequence[Contender], options: Options, *, device: Literal["cpu", "cuda"]
) -> tuple[Row, Result]:
    """The row with the largest batch that fits, of halves of what it asks for."""
    environment = {
        "JAX_PLATFORMS": device,
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "OMP_WAIT_POLICY": "passive",
    }
    threads = len(os.sched_getaffinity(0))

    def start(contender: Contender) -> WorkerProcess:
        return WorkerProcess(contender.framework, variant=contender.name, threads=threads, environment=environment)

    while True:
        try:
            with tempfile.TemporaryDirectory() as folder:
                return row, measure_row(
                    row,
                    contenders,
                    start=start,
                    weights=Path(folder) / "weights.npz",
                    rounds=2 if options.quick else options.rounds,
                    steps=2 if options.quick else options.steps,
                    seed=0,
                    device=device,
                )
        except RuntimeError as error:
            if row.batch_size == 1 or not any(words in str(error) for words in ("out of memory", "RESOURCE_EXHAUSTED")):
                raise
            row = dataclasses.replace(row, batch_size=row.batch_size // 2)


def _card() -> str | None:
    try:
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()
    except (FileNotFoundError, subprocess.CalledProcessError, IndexError):
        return None


if __name__ == "__main__":
    sys.exit(main())
