"""What the manifest adds to the time that training waits for a save."""

import dataclasses
import tempfile
import time
from pathlib import Path
from unittest import mock

import jax
import numpy as np

from flax_transformer import manifest
from flax_transformer.checkpoint import Checkpoints


@dataclasses.dataclass(frozen=True)
class SaveWait:
    """Save a state of random numbers with and without a manifest, in turns. Training waits while the state is copied and
    handed over; when a save is asked for before the last is complete, it waits for that too, which is the worst case."""

    megabytes: int = 500
    """Of the state."""
    rounds: int = 5
    """Saves with, and as many without."""

    def run(self) -> bool:
        """Whether the manifest adds at most 5 % to the wait of a save that finds no other under way."""
        rng = np.random.default_rng(0)
        pieces = 20
        size = self.megabytes * 250_000 // pieces
        state = {f"parameters/{number}": rng.standard_normal(size, np.float32) for number in range(pieces)}
        waits: dict[str, list[float]] = {"with": [], "without": []}
        wholes: dict[str, list[float]] = {"with": [], "without": []}
        manifest_times = []
        write = manifest.write

        def timed(directory: Path) -> None:
            began = time.perf_counter()
            write(directory)
            manifest_times.append(time.perf_counter() - began)

        with tempfile.TemporaryDirectory() as folder:
            for number in range(2 * self.rounds):
                kind = "without" if number % 2 else "with"
                with (
                    mock.patch.object(manifest, "write", timed if kind == "with" else lambda directory: None),
                    Checkpoints(Path(folder), keep=1, saving="asynchronous") as checkpoints,
                ):
                    began = time.perf_counter()
                    checkpoints.save(number + 1, jax.tree.map(np.array, state))  # as `Layout.unplace_state` copies it
                    waits[kind].append(time.perf_counter() - began)
                    checkpoints.close()
                    wholes[kind].append(time.perf_counter() - began)
                print(
                    f"save {number + 1} of {2 * self.rounds}, {kind} a manifest: waited {waits[kind][-1]:.3f} s, "
                    f"complete after {wholes[kind][-1]:.2f} s",
                    flush=True,
                )
        # The least of several: whatever else the machine does only ever adds.
        print(f"\n| {self.megabytes} MB, least of {self.rounds} | with | without | added |\n|---|---|---|---|")
        for name, times in (("training waits", waits), ("until the save is complete", wholes)):
            one, other = (min(times[kind]) for kind in ("with", "without"))
            print(f"| {name} | {one:.3f} s | {other:.3f} s | {one / other - 1:+.1%} |")
        alone = min(manifest_times)
        print(f"| of which the manifest, in the other thread | {alone:.3f} s | | |")
        one, other = (min(waits[kind]) for kind in ("with", "without"))
        return one <= 1.05 * other
