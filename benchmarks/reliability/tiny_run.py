"""The run that is interrupted: a tiny model with dropout, which saves often and logs every step."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import train

ROOT = Path(train.__file__).parent
STEPS, SAVE_EVERY, VALIDATE_EVERY = 60, 3, 7


def arguments(text: Path, output: Path) -> list[str]:
    """Of train.py; the same for the first launch and for those that resume."""
    return [
        *("decoder-only", "--data", str(text), "--d-model", "8", "--num-heads", "2", "--num-layers", "1"),
        *("--dropout", "0.3", "--batch-size", "6", "--context-length", "5", "--learning-rate", "0.03"),
        *("--generate-tokens", "3", "--log-every", "1", "--validate-every", str(VALIDATE_EVERY)),
        *("--save-every", str(SAVE_EVERY), "--steps", str(STEPS), "--output", str(output), "--resume"),
    ]


def write_text(directory: Path) -> Path:
    path = directory / "text.txt"
    path.write_text(" a b c d e f g" * 200, encoding="utf-8")
    return path


def start(phases: Path, text: Path, output: Path) -> subprocess.Popen:
    """A process of its own, which keeps in the file `phases` what it is doing; see `launch`."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(phases.parent / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    command = [sys.executable, "-m", "benchmarks.reliability.launch", str(phases), *arguments(text, output)]
    log = phases.with_suffix(".log").open("ab")
    with log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def curve(output: Path) -> list[dict[str, Any]]:
    """All that a run logged, except for the times that it took."""
    lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{name: value for name, value in json.loads(line).items() if name != "tokens_per_second"} for line in lines]
