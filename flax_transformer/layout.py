"""What the layouts of a training run have in common: states, batches and steps that belong together.

The layouts themselves, and how to use one, are in `parallel.py`.
"""

import abc
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from flax_transformer.losses import LossSums
from flax_transformer.sharding import MeshShape
from flax_transformer.training import (
    LossFunction,
    Metrics,
    ModelStructure,
    TrainState,
    make_eval_step,
    make_train_step,
)

Devices = Sequence[Any]  # of jax.Device, which jax exports as a value and not as a type


class PlacedBatch(NamedTuple):
    """A global batch on the devices of a layout.

    Attributes:
        batch: the batch that `place_batch` was given, its leaves as arrays of the layout.
        examples: int32, the places of its examples in the global batch.
    """

    batch: Any
    examples: jax.Array


TrainStep = Callable[[TrainState, PlacedBatch], tuple[TrainState, Metrics]]
EvalStep = Callable[[TrainState, PlacedBatch], LossSums]


class Layout(abc.ABC):
    """Where the state, the batches and the step of a training run are.

    What its methods return belongs together: steps take the states and batches of the layout that compiled them. The
    metrics and sums that a step returns are scalars on the device in every layout; `jax.device_get` waits for them.

    Args:
        devices: those to train on, in several processes the same in each.
        mesh: their arrangement.

    Attributes:
        devices: the same, those of one process after those of another.
        mesh: the same, every size filled in. The devices of `tensor` are neighbours, those of `data` far apart.

    Raises:
        ValueError: no device, one twice, not equally many of every process, or not as many as the mesh has.
    """

    def __init__(self, devices: Devices, mesh: MeshShape) -> None:
        self.devices = tuple(sorted(devices, key=lambda device: device.process_index))
        _check_devices(self.devices)
        self.mesh = mesh.of_devices(len(self.devices))

    @abc.abstractmethod
    def place_state(self, state: TrainState) -> TrainState:
        """The state on the devices. Nothing of `state` is shared: a step deletes what it is given."""

    @abc.abstractmethod
    def abstract_state(self, state: TrainState) -> TrainState:
        """The shapes and shardings of what `place_state` makes of a state, by its shapes. For `train_program`."""

    @abc.abstractmethod
    def unplace_state(self, state: TrainState) -> TrainState:
        """One whole copy of the state as numpy arrays, to be saved, or merged after a `jax.device_put`.

        All processes have to ask for it together: each may hold only a part.
        """

    def replicas(self, state: TrainState) -> list[list[jax.Array]]:
        """For each device of this process, its own copies of those arrays of the state that every device has a copy of."""
        own: dict[Any, list[jax.Array]] = {
            device: [] for device in self.devices if device.process_index == jax.process_index()
        }
        for leaf in jax.tree.leaves(state):
            if self._is_copied(leaf):
                for shard in leaf.addressable_shards:
                    own.setdefault(shard.device, []).append(shard.data)
        return list(own.values())

    def place_batch(self, batch: Any) -> PlacedBatch:
        """A global batch, spread over the devices: the first of B / parts examples on the first, and so on.

        Args:
            batch: a pytree of numpy arrays whose first axis is the examples, B. Every process gives the same one; the
                rows that its own devices hold are what it puts there.

        Raises:
            ValueError: the leaves differ in B, or see `check_batch_size`.
        """
        size = self._examples_of(batch)
        rows = (batch, np.arange(size, dtype=np.int32))
        return PlacedBatch(*jax.tree.map(lambda leaf: self._put_rows(np.asarray(leaf)), rows))

    def place(self, batches: Sequence[Any]) -> PlacedBatch:
        """The global batches of the steps that one call takes: one as `place_batch` does it, several of one shape stacked.

        Raises:
            ValueError: their shapes differ, or see `place_batch`.
        """
        if len(batches) == 1:
            return self.place_batch(batches[0])
        shapes = {tuple(np.shape(leaf) for leaf in jax.tree.leaves(batch)) for batch in batches}
        if len(shapes) != 1:
            raise ValueError(f"steps that are taken at once need batches of one shape, got {sorted(shapes)}.")
        size = self._examples_of(batches[0])
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *batches)
        rows = (stacked, np.tile(np.arange(size, dtype=np.int32), (len(batches), 1)))
        return PlacedBatch(*jax.tree.map(self._put_rows_of_steps, rows))

    def _examples_of(self, batch: Any) -> int:
        """B, once it is one that the devices can share."""
        shapes = [np.shape(leaf) for leaf in jax.tree.leaves(batch)]
        sizes = {shape[:1] for shape in shapes}
        if len(sizes) != 1 or () in sizes:
            raise ValueError(
                f"the arrays of a batch must have one first axis, its examples; got shapes {shapes}. Give the global "
                "batch, padded to one size."
            )
        ((size,),) = sizes
        self.check_batch_size(size)
        return size

    def abstract_batch(self, batch: Any) -> PlacedBatch:
        """The shapes and shardings of what `place_batch` makes of a batch, by its shapes. For `train_program`.

        Raises:
            ValueError: see `check_batch_size`.
        """
        size = jax.tree.leaves(batch)[0].shape[0]
        self.check_batch_size(size)
        rows = (batch, jax.ShapeDtypeStruct((size,), np.int32))
        return PlacedBatch(*jax.tree.map(self._abstract_rows, rows))

    def check_batch_size(self, batch_size: int, *, accumulate: int = 1) -> None:
        """Raises ValueError if so many examples, the global batch, cannot be spread equally over the devices.

        Args:
            accumulate: in how many microbatches, which each are spread.
        """
        if accumulate < 1:
            raise ValueError(f"a batch is taken in at least 1 microbatch, got accumulate {accumulate}; give 1 or more.")
        count = self.mesh.parts * accumulate
        if batch_size < 1 or batch_size % count:
            below = batch_size // count * count
            sizes = " or ".join(str(size) for size in (below, below + count) if size > 0)
            which = "the number of devices" if self.mesh.tensor == 1 else "the devices along data and fsdp"
            share = f"{self.mesh.parts}, which share its examples equally"
            if accumulate > 1:
                share = (
                    f"{self.mesh.parts}, times that of microbatches, {accumulate}, which are shared equally: {count}"
                )
            raise ValueError(
                f"the batch size must be a multiple of {which}, {share}; got {batch_size}. Give {sizes}, or other devices."
            )

    def compile_train_step(
        self,
        structure: ModelStructure,
        loss: LossFunction,
        optimizer: optax.GradientTransformation,
        *,
        accumulate: int = 1,
        steps: int = 1,
    ) -> TrainStep:
        """`training.make_train_step` for this layout. It compiles when it is first called, and donates its state.

        Args:
            structure, loss, optimizer, accumulate: see there.
            steps: how many steps one call takes, on the batches that `place` placed; the metrics are those of the last.
                The host then has little to do for each, which is what small models wait for.
        """
        return self._in_turn(self.train_program(structure, loss, optimizer, accumulate=accumulate, steps=steps))

    def train_program(
        self,
        structure: ModelStructure,
        loss: LossFunction,
        optimizer: optax.GradientTransformation,
        *,
        accumulate: int = 1,
        steps: int = 1,
    ) -> Any:
        """What `compile_train_step` calls: a jitted function, which can be lowered for devices that are not here.

        shapes = layout.abstract_state(state), layout.abstract_batch(batch)
        compiled = layout.train_program(structure, loss, optimizer).lower(*shapes).compile()
        """
        train_step = make_train_step(
            structure,
            loss,
            optimizer,
            accumulate=accumulate,
            parts=self._parts_of_a_batch,
            gather=self._gather,
            reduce=self._reduce,
        )

        def step(state: TrainState, placed: PlacedBatch) -> tuple[TrainState, Metrics]:
            return train_step(state, placed.batch, placed.examples)

        def several(state: TrainState, placed: PlacedBatch) -> tuple[TrainState, Metrics]:
            state, metrics = jax.lax.scan(step, state, placed)
            return state, jax.tree.map(lambda metric: metric[-1], metrics)

        return self._compile_train(step if steps == 1 else several)

    def compile_eval_step(self, structure: ModelStructure, loss: LossFunction) -> EvalStep:
        """`training.make_eval_step` for this layout: the sums over the global batch, without dropout."""
        eval_step = make_eval_step(structure, loss)

        def step(state: TrainState, placed: PlacedBatch) -> LossSums:
            return self._reduce(eval_step(self._gather(state.parameters), state.buffers, placed.batch))

        return self._in_turn(self._compile_eval(step))

    @property
    @abc.abstractmethod
    def _parts_of_a_batch(self) -> int:
        """Over how many devices the batch that a step is given is spread."""

    @abc.abstractmethod
    def _is_copied(self, leaf: jax.Array) -> bool:
        """Whether every device has a copy of an array of the state."""

    @abc.abstractmethod
    def _put_rows(self, leaf: np.ndarray) -> jax.Array:
        """A leaf of a global batch, on the devices."""

    def _gather(self, parameters: Any) -> Any:
        """The parameters as they are computed with, from how they are kept; inside the step."""
        return parameters

    @abc.abstractmethod
    def _put_rows_of_steps(self, leaf: np.ndarray) -> jax.Array:
        """The same leaf of several global batches, steps x examples x the rest."""

    @abc.abstractmethod
    def _abstract_rows(self, leaf: Any) -> jax.ShapeDtypeStruct:
        """The shape and sharding of what `_put_rows` makes of a leaf."""

    @abc.abstractmethod
    def _reduce(self, tree: Any) -> Any:
        """The sum over the parts of the global batch, from inside the step of one part."""

    @abc.abstractmethod
    def _compile_train(self, step: TrainStep) -> TrainStep: ...

    @abc.abstractmethod
    def _compile_eval(self, step: EvalStep) -> EvalStep: ...

    def _in_turn(self, step: Callable[..., Any]) -> Callable[..., Any]:
        # The CPU devices of a process share one pool of threads, and one that waits for the others in a sum keeps its
        # thread. With two steps under way there may be no thread left for the one that all wait for.
        if self.devices[0].platform != "cpu" or len(self.devices) == 1:
            return step
        return functools.wraps(step)(lambda *arguments: jax.block_until_ready(step(*arguments)))


def _check_devices(devices: Devices) -> None:
    if not devices:
        raise ValueError("a layout needs at least one device, got none; give some of jax.devices().")
    if len(set(devices)) != len(devices):
        raise ValueError(f"the devices of a layout must differ, got {[device.id for device in devices]}.")
    # Devices of a slice that is only compiled for are of processes that are not here.
    held = dict.fromkeys(sorted({*range(jax.process_count()), *(device.process_index for device in devices)}), 0)
    for device in devices:
        held[device.process_index] += 1
    if len(set(held.values())) > 1:
        raise ValueError(
            "every process must hold equally many devices of a layout; process "
            f"{', '.join(f'{process} holds {count}' for process, count in held.items())}. Leave some out, or start the "
            "processes with equally many."
        )
