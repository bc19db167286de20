"""Flipped bits, cut and lost files, in every file of a checkpoint: is each found and named, and an earlier one used?"""

import dataclasses
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from flax_transformer.checkpoint import Checkpoints
from flax_transformer.commands.runs import restore_newest


def _flip(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def _truncate(path: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])


def _delete(path: Path, rng: random.Random) -> None:
    del rng
    path.unlink()


def _add(path: Path, rng: random.Random) -> None:
    path.with_name("more").write_bytes(rng.randbytes(5))


_DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    "one bit flipped": _flip,
    "truncated": _truncate,
    "deleted": _delete,
    "a file added": _add,
}


@dataclasses.dataclass(frozen=True)
class Bitrot:
    """Damage every file of a checkpoint, once for each trial in each of four ways at seeded random places, and load the
    newest checkpoint: is the damaged file named, and the checkpoint before it loaded, bit for bit?"""

    trials: int = 10
    """Of each kind of damage, for each file."""
    seed: int = 0
    """Decides the places."""

    def run(self) -> bool:
        """Whether every damage was found and named, and the earlier checkpoint loaded."""
        rng = random.Random(self.seed)
        table: dict[str, list[int]] = {name: [0, 0, 0] for name in _DAMAGES}
        with tempfile.TemporaryDirectory() as folder:
            good, bad = Path(folder) / "good", Path(folder) / "bad"
            states = {step: _random_state(step) for step in (1, 2)}
            with Checkpoints(good) as checkpoints:
                for step, state in states.items():
                    checkpoints.save(step, state, validation_loss=1.5)
            files = sorted(path.relative_to(good) for path in (good / "2").rglob("*") if path.is_file())
            for place, name in enumerate(files):
                print(f"file {place + 1} of {len(files)}: {name}", flush=True)
                for damage, apply in _DAMAGES.items():
                    for _ in range(self.trials):
                        shutil.copytree(good, bad)
                        apply(bad / name, rng)
                        step, state, problems = restore_newest(Checkpoints(bad), states[1])
                        blamed = bad / name.with_name("more") if damage == "a file added" else bad / name
                        table[damage][0] += 1
                        table[damage][1] += f"{blamed} " in problems.get(2, "")
                        table[damage][2] += step == 1 and _same(state, states[1])
                        shutil.rmtree(bad)
        print("\n| damage | trials | named | the earlier checkpoint loaded |\n|---|---|---|---|")
        for damage, (trials, named, loaded) in table.items():
            print(f"| {damage} | {trials} | {named} | {loaded} |")
        return all(trials == named == loaded for trials, named, loaded in table.values())


def _random_state(seed: int) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    shapes = {"kernel": (11, 7), "bias": (7,), "table": (3, 5)}
    return {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}


def _same(actual: dict[str, jax.Array], expected: dict[str, jax.Array]) -> bool:
    return all(np.asarray(actual[name]).tobytes() == np.asarray(expected[name]).tobytes() for name in expected)
