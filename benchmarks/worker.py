"""A process that is one contender, and takes steps when it is told to.

    python -m benchmarks.worker FRAMEWORK THREADS VARIANT

A request is a line of JSON on standard input, its reply a line of JSON on standard output:

    {"do": "prepare", "row": {...}, "weights": PATH, "seed": 0}  ->  {"loss": [3 of them], "gradient_norm": of the first}
                                                                     or, of a row that translates, {"ids": [B, length]}
    {"do": "prepare_product", "size": 1024}                     ->  {}
    {"do": "turn", "steps": 5}                                  ->  {"seconds": [5 of them]}
    {"do": "memory"}                                            ->  {"imported": bytes, "peak": bytes}
    {"do": "head_memory", "row": {...}}                         ->  {"fused": bytes, "plain": bytes}

Whatever goes wrong is a reply too: {"error": words}.
"""

import importlib
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Protocol

from benchmarks import memory
from benchmarks.rows import Row

CHECKED_STEPS = 3


class Side(Protocol):
    """A model in training, of one framework."""

    def step(self) -> float: ...

    def gradient_norm(self) -> float: ...


def first_steps(side: Side) -> dict[str, Any]:
    """Takes a few steps; what `measure.require_alike` compares."""
    losses = [side.step()]
    norm = side.gradient_norm()
    losses += [side.step() for _ in range(CHECKED_STEPS - 1)]
    return {"loss": losses, "gradient_norm": norm}


class Worker:
    """Answers requests."""

    def __init__(self, framework: str, *, threads: int, variant: str) -> None:
        self._options: dict[str, Any] = dict(threads=threads, variant=variant)
        self._module = importlib.import_module(f"benchmarks.{framework}_side")
        self._imported = memory.resident()
        self._step: Any = None
        self._device = "cpu"

    def prepare(self, *, row: dict[str, Any], weights: str, seed: int, device: str = "cpu") -> dict[str, Any]:
        """Builds the model and takes a few steps: JAX compiles, and what is compared is known to be the same."""
        wanted = Row(**row)
        translates = wanted.model == "translation"
        make = self._module.Translator if translates else self._module.Side
        elsewhere = {} if device == "cpu" else {"device": device}
        side = make(wanted, weights=Path(weights), seed=seed, **self._options, **elsewhere)
        evidence = {"ids": side.step()} if translates else first_steps(side)
        self._step, self._device = side.step, device
        if wanted.steps_per_dispatch > 1:
            self._step = side.dispatch
            self._step()  # compiles, which must not count in the peak
        memory.reset_peak()
        return evidence

    def prepare_product(self, *, size: int) -> dict[str, Any]:
        """From now on, a step is a product of two square float32 matrices."""
        self._step = self._module.make_product(size, **self._options)
        return {}

    def turn(self, *, steps: int) -> dict[str, Any]:
        """The time of every step. One goes before that is not counted: the other processes had the caches until now.

        What is free is given back afterwards: all of them together would need more than a machine has.
        """
        self._step()
        times = [time.perf_counter()]
        for _ in range(steps):
            self._step()
            times.append(time.perf_counter())
        memory.give_back()
        return {"seconds": [end - start for start, end in itertools.pairwise(times)]}

    def memory(self) -> dict[str, Any]:
        """Resident memory after the imports, and the peak since `prepare`; on an accelerator, its peak since the start."""
        if self._device != "cpu":
            return {"imported": 0, "peak": self._module.device_peak()}
        return {"imported": self._imported, "peak": memory.peak()}

    def head_memory(self, *, row: dict[str, Any]) -> dict[str, Any]:
        """Of the loss over a vocabulary, which is compiled and not run."""
        return self._module.head_memory(Row(**row), variant=self._options["variant"])


def main(framework: str, threads: int, variant: str) -> None:
    # What the frameworks print must not be taken for a reply.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    # Before the frameworks start: both count the processors that they may use.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    worker = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            worker = worker or Worker(framework, threads=threads, variant=variant)
            reply = getattr(worker, request.pop("do"))(**request)
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
