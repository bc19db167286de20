"""How much of the devices a run makes use of: model FLOPs utilisation and memory, where they can be told; and a trace."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from flax_transformer.chips import chip
from flax_transformer.flops import count_flops
from flax_transformer.training import LossFunction, ModelStructure, TrainState, make_eval_step

TRACED = range(11, 16)  # steps of a launch: the program is compiled, and the caches are warm


class Utilisation:
    """What share of its devices' peak a step uses. On devices whose peak is not known, such as CPUs, nothing is counted.

    Args:
        structure: of the model.
        loss: of a batch, without dropout.
        state: whose shapes are what counts.
        devices: all that share a step.
    """

    def __init__(
        self, structure: ModelStructure, loss: LossFunction, state: TrainState, devices: Sequence[Any]
    ) -> None:
        known = chip(devices[0].device_kind)
        self._peak = None if known is None else known.flops * len(devices)
        self._own = [device for device in devices if device.process_index == jax.process_index()]
        self._step = make_eval_step(structure, loss)
        self._arrays = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (state.parameters, state.buffers)
        )
        self._counted: dict[Any, int] = {}

    def flops(self, batch: Any) -> int:
        """The operations that the model needs for a step on a batch: forward, and twice that backward."""
        if self._peak is None:
            return 0
        shapes = tuple(leaf.shape for leaf in jax.tree.leaves(batch))
        if shapes not in self._counted:
            self._counted[shapes] = 3 * count_flops(self._step, *self._arrays, batch).useful
        return self._counted[shapes]

    def mfu(self, flops_per_second: float | None) -> float | None:
        """Model FLOPs utilisation (Chowdhery et al. 2022, appendix B); None where the peak is not known."""
        return None if self._peak is None or flops_per_second is None else flops_per_second / self._peak

    def peak_memory(self) -> int | None:
        """The most bytes that were ever in use on one of this process's devices; None where they do not say."""
        found = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in self._own]
        return max((size for size in found if size is not None), default=None)


class Trace(contextlib.AbstractContextManager):
    """A `jax.profiler` trace of the steps `TRACED` of a launch.

    Args:
        directory: for the trace, made when it begins; None: none is made.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._running = False
        self._taken = 0

    def before_step(self) -> None:
        self._taken += 1
        if self._directory is not None and self._taken == TRACED.start:
            jax.profiler.start_trace(str(self._directory))
            self._running = True

    def after_step(self, result: Any) -> None:
        """`result` is what the step will have computed; it is waited for at the end of the trace."""
        if self._running and self._taken >= TRACED.stop - 1:
            jax.block_until_ready(result)
            self.__exit__()

    def __exit__(self, *exception: object) -> None:
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
