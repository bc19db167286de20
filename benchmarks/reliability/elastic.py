"""Saved on N devices, resumed on M: the same bits, and the same examples in the same order."""

import dataclasses
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

DEVICES = (1, 2, 4, 8)


@dataclasses.dataclass(frozen=True)
class Elastic:
    """Save a train state that lies on 1, 2, 4 or 8 simulated devices, under pmap or spread over a mesh of data, fsdp and
    tensor, load it onto every other such layout, and compare parameters, optimizer state and the next batches bit for
    bit."""

    def run(self) -> bool:
        """Whether all were equal."""
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={max(DEVICES)}",
        }
        command = [sys.executable, "-m", "benchmarks.reliability.elastic"]
        return subprocess.run(command, env=environment, check=False).returncode == 0


def _random_like(state: Any, *, seed: int) -> Any:
    import jax
    import numpy as np

    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: np.asarray(rng.integers(1, 99, leaf.shape), leaf.dtype), state)


def main() -> int:
    """In a process that has the devices; returns its exit status."""
    import jax
    import numpy as np
    import optax
    from flax import nnx

    import flax_transformer as ft
    from flax_transformer import data, parallel, training
    from flax_transformer.checkpoint import Checkpoints
    from flax_transformer.sharding import MeshShape

    def bits(tree) -> list[bytes]:
        return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]

    config = ft.DecoderOnlyConfig.small(vocab_size=24, d_model=8, d_ff=16, num_heads=2, num_layers=1, max_length=5)
    _, parameters, buffers = training.split_model(ft.DecoderOnly(config, rngs=nnx.Rngs(0)))
    optimizer = optax.adam(0.01)
    ids = np.random.default_rng(0).integers(0, 24, 300).astype(np.int32)
    batches = [data.sample_batch(ids, batch_size=16, context_length=5, seed=3, step=step) for step in (2, 3)]
    layouts: dict[str, parallel.Layout] = {}
    for count in DEVICES:
        layouts[f"pmap on {count}"] = parallel.layout("pmap", devices=count)
        for mesh in sorted(
            {MeshShape(data=count), MeshShape(data=1, fsdp=count), MeshShape(data=1, tensor=count)}, key=str
        ):
            layouts[f"jit on {mesh}"] = parallel.layout("jit", devices=count, mesh=mesh)
    layouts["jit on a cube"] = parallel.layout("jit", devices=8, mesh=MeshShape(data=2, fsdp=2, tensor=2))
    like = training.init_state(parameters, buffers, optimizer, seed=5)
    unequal = []
    with tempfile.TemporaryDirectory() as folder:
        for number, (source, layout) in enumerate(layouts.items()):
            saved = layout.unplace_state(layout.place_state(_random_like(like, seed=number)))
            with Checkpoints(Path(folder) / str(number)) as checkpoints:
                checkpoints.save(1, saved)
                restored = checkpoints.restore(like)
            for name, target in layouts.items():
                same = bits(target.unplace_state(target.place_state(restored))) == bits(saved)
                for batch in batches:
                    spread = target.place_batch(batch)
                    rows = np.reshape(np.asarray(spread.examples), -1)
                    inputs = np.reshape(np.asarray(spread.batch.inputs), batch.inputs.shape)
                    same &= rows.tolist() == list(range(16)) and inputs.tobytes() == batch.inputs.tobytes()
                if not same:
                    unequal.append(f"{source} to {name}")
            print(f"saved {number + 1} of {len(layouts)}: {source}", flush=True)
    print("\n| devices | layouts | saved on one, loaded on another | unequal |\n|---|---|---|---|")
    print(f"| {', '.join(map(str, DEVICES))} | {len(layouts)} | {len(layouts) ** 2} | {len(unequal)} |")
    print("".join(f"unequal: {pair}\n" for pair in unequal), end="")
    return 1 if unequal else 0


if __name__ == "__main__":
    sys.exit(main())
