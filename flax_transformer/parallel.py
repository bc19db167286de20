"""How a pure step is laid over devices: `jit` over a mesh, or `pmap`. The only file that says pmap.

    layout = parallel.layout("jit")                     # or "pmap"; all devices of all processes
    step = layout.compile_train_step(structure, next_token_loss, optimizer)
    state = layout.place_state(state)
    for batch in batches:                               # the global batch, in every process the same
        state, metrics = step(state, layout.place_batch(batch))
    state = layout.unplace_state(state)                 # one copy on the host

Every device holds an equal share of the examples, and the whole state or, on a mesh with the axes `fsdp` and `tensor`
(see `sharding`), its part of it. Losses and gradients are sums over all devices, divided once by the weight of the global
batch: never means of means, which weigh the tokens of a device with much padding more. Dropout depends on the place of
an example in the global batch. So every layout takes the same step, up to the order in which numbers are added.

Several processes (see `distributed`) run the same program on the same global batches, each on its own devices.
"""

import contextlib
import dataclasses
from typing import Any, Literal, final

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from flax_transformer import flash_attention, sharding
from flax_transformer.layout import Devices, EvalStep, Layout, PlacedBatch, TrainStep
from flax_transformer.losses import LossSums
from flax_transformer.sharding import AXES, DATA, FSDP, TENSOR, MeshShape
from flax_transformer.training import Metrics, TrainState

Kind = Literal["jit", "pmap"]


@final
class JitLayout(Layout):
    """Global arrays on a mesh: the compiler splits one program for the whole batch.

    Parameters and optimizer state lie as `sharding.RULES` says. A step gathers the parameters over `fsdp`, so that
    products are split by example and along `tensor` alone; what it computes of them is spread again.
    """

    def __init__(self, devices: Devices, mesh: MeshShape) -> None:
        super().__init__(devices, mesh)
        grid = np.reshape(np.asarray(self.devices), tuple(self.mesh.sizes.values()))
        self._mesh = Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))
        self._everywhere = NamedSharding(self._mesh, PartitionSpec())
        self._rows = NamedSharding(self._mesh, PartitionSpec((DATA, FSDP)))

    def __str__(self) -> str:
        return f"jit over {self.mesh}"

    def place_state(self, state: TrainState) -> TrainState:
        return jax.tree.map(_put, jax.device_get(state), self._kept(state))

    def abstract_state(self, state: TrainState) -> TrainState:
        return jax.tree.map(_abstract, state, self._kept(state))

    def unplace_state(self, state: TrainState) -> TrainState:
        # Copied: on a CPU the array on the host may be the one that the next step deletes.
        return jax.tree.map(lambda leaf: np.array(self._whole(leaf)), state)

    def _whole(self, leaf: jax.Array) -> Any:
        if leaf.is_fully_addressable or leaf.is_fully_replicated:
            return jax.device_get(leaf)
        return multihost_utils.process_allgather(leaf, tiled=True)  # one by one: a device has no room for all

    def _kept(self, tree: Any) -> Any:
        """Where the parts of a state, or of a pytree of parameters, are kept."""
        kept = self._on_mesh(sharding.partition_all(tree, self.mesh))
        if not isinstance(tree, TrainState):
            return kept
        return dataclasses.replace(kept, buffers=jax.tree.map(lambda leaf: self._everywhere, tree.buffers))

    def _on_mesh(self, specs: Any) -> Any:
        return jax.tree.map(lambda spec: NamedSharding(self._mesh, spec), specs)

    @property
    def _parts_of_a_batch(self) -> int:
        return self.mesh.parts

    def _is_copied(self, leaf: jax.Array) -> bool:
        return leaf.is_fully_replicated

    def _put_rows(self, leaf: np.ndarray) -> jax.Array:
        return _put(leaf, self._rows)

    def _put_rows_of_steps(self, leaf: np.ndarray) -> jax.Array:
        return _put(leaf, NamedSharding(self._mesh, PartitionSpec(None, (DATA, FSDP))))

    def _abstract_rows(self, leaf: Any) -> jax.ShapeDtypeStruct:
        return _abstract(leaf, self._rows)

    def _gather(self, parameters: Any) -> Any:
        used = self._on_mesh(sharding.partition_all(parameters, self.mesh, over=(TENSOR,)))
        return jax.lax.with_sharding_constraint(parameters, used)

    def _reduce(self, tree: Any) -> Any:
        # The batch is whole, and so is a sum. Of gradients every device needs only what it updates; said of the sums
        # alone, that would reach back into the products that are summed, and split those by width.
        return jax.lax.with_sharding_constraint(self._gather(tree), self._kept(tree))

    def _compile_train(self, step: TrainStep) -> TrainStep:
        def laid_out(state: TrainState, placed: PlacedBatch) -> tuple[TrainState, Metrics]:
            with self._kernels_over_mesh():
                state, metrics = step(state, placed)
            return jax.lax.with_sharding_constraint((state, metrics), (self._kept(state), self._everywhere))

        return jax.jit(laid_out, donate_argnums=0)

    def _compile_eval(self, step: EvalStep) -> EvalStep:
        def laid_out(state: TrainState, placed: PlacedBatch) -> LossSums:
            with self._kernels_over_mesh():
                return step(state, placed)

        return jax.jit(laid_out, out_shardings=self._everywhere)

    def _kernels_over_mesh(self) -> contextlib.AbstractContextManager[None]:
        return flash_attention.over_mesh(self._mesh, examples=(DATA, FSDP), heads=TENSOR)


@final
class PmapLayout(Layout):
    """One program per device, which sums over all devices by itself.

    Arrays have a first axis more, the devices of this process: states are stacks of equal copies, leaves of a batch
    are devices x examples per device x the rest. The mesh has no axis but `data`.
    """

    def __init__(self, devices: Devices, mesh: MeshShape) -> None:
        super().__init__(devices, mesh)
        if self.mesh.parts != self.mesh.data or self.mesh.tensor != 1:
            raise ValueError(
                f"under pmap every device holds all parameters, and a mesh has no axis but data; got {self.mesh}. Give "
                "--parallel jit, or no mesh."
            )
        own = [place for place, device in enumerate(self.devices) if device.process_index == jax.process_index()]
        self._own = slice(own[0], own[-1] + 1)
        # The sharding of what pmap returns; an argument that has another one would be moved at every step.
        line = Mesh(np.asarray(self.devices), (DATA,), axis_types=(AxisType.Auto,))
        self._all = NamedSharding(line, PartitionSpec(DATA))
        self._stacked = NamedSharding(line.local_mesh, PartitionSpec(DATA))

    def __str__(self) -> str:
        return "pmap"

    def place_state(self, state: TrainState) -> TrainState:
        copies = len(self.devices[self._own])
        return jax.tree.map(
            lambda leaf: _put(np.broadcast_to(leaf, (copies, *leaf.shape)), self._stacked), jax.device_get(state)
        )

    def abstract_state(self, state: TrainState) -> TrainState:
        return jax.tree.map(
            lambda leaf: _abstract(jax.ShapeDtypeStruct((len(self.devices), *leaf.shape), leaf.dtype), self._all), state
        )

    def unplace_state(self, state: TrainState) -> TrainState:
        first = jax.tree.map(lambda leaf: leaf.addressable_shards[0].data, state)
        return jax.tree.map(lambda leaf: np.array(leaf[0]), jax.device_get(first))

    @property
    def _parts_of_a_batch(self) -> int:
        return 1  # a step has the rows of its own device

    def _is_copied(self, leaf: jax.Array) -> bool:
        return True

    def _put_rows(self, leaf: np.ndarray) -> jax.Array:
        return _put(np.reshape(leaf, (len(self.devices), -1, *leaf.shape[1:]))[self._own], self._stacked)

    def _put_rows_of_steps(self, leaf: np.ndarray) -> jax.Array:
        by_device = np.reshape(leaf, (len(leaf), len(self.devices), -1, *leaf.shape[2:])).swapaxes(0, 1)
        return _put(by_device[self._own], self._stacked)

    def _abstract_rows(self, leaf: Any) -> jax.ShapeDtypeStruct:
        count = len(self.devices)
        stacked = (count, leaf.shape[0] // count, *leaf.shape[1:])
        return _abstract(jax.ShapeDtypeStruct(stacked, leaf.dtype), self._all)

    def _reduce(self, tree: Any) -> Any:
        return jax.lax.psum(tree, DATA)

    def _compile_train(self, step: TrainStep) -> TrainStep:
        return jax.pmap(step, axis_name=DATA, devices=self.devices, out_axes=(0, None), donate_argnums=0)

    def _compile_eval(self, step: EvalStep) -> EvalStep:
        return jax.pmap(step, axis_name=DATA, devices=self.devices, out_axes=None)


_LAYOUTS: dict[Kind, type[Layout]] = {"jit": JitLayout, "pmap": PmapLayout}


def layout(kind: Kind, *, devices: int | Devices | None = None, mesh: MeshShape = MeshShape()) -> Layout:  # noqa: B008
    """The layout of a training run.

    Args:
        kind: see `JitLayout` and `PmapLayout`.
        devices: None: all devices of all processes; a number: so many of them, equally many of every process.
        mesh: how they are arranged; without an argument, all of them along `data`.

    Raises:
        ValueError: a kind that there is not, more devices than there are, a mesh for pmap, or see `Layout`.
    """
    if kind not in _LAYOUTS:
        raise ValueError(f"the layout must be one of {', '.join(_LAYOUTS)}, got {kind!r}.")
    if devices is None:
        return _LAYOUTS[kind](jax.devices(), mesh)
    return _LAYOUTS[kind](_so_many(devices) if isinstance(devices, int) else devices, mesh)


def _put(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """The parts of an array that the devices of this process hold, copied there.

    `jax.device_put` may make the very array that it is given the part of one device, also of several, and to delete
    that with a donated state deletes the caller's. In several processes it also compares the array between them.
    """
    return jax.make_array_from_callback(array.shape, sharding, lambda index: np.array(array[index]))


def _abstract(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _so_many(count: int) -> Devices:
    present, processes = jax.devices(), jax.process_count()
    if not 0 < count <= len(present):
        raise ValueError(
            f"{count} devices were asked for, but the number must be from 1 to {len(present)}, those that are present "
            f"({present[0].platform}, {processes} process{'es' * (processes > 1)}). To simulate more on a CPU, set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={count} before Python starts."
        )
    if count % processes:
        raise ValueError(
            f"{count} devices were asked for, but they must be shared equally by {processes} processes; give a multiple "
            f"of {processes}."
        )
    share = count // processes
    return [device for process in range(processes) for device in jax.local_devices(process)[:share]]
