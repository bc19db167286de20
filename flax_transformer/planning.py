"""Compiling a training step for hardware that is not here: whether it fits, and how long it takes at least.

    target = planning.target("v5e:2x4")                     # needs libtpu, and no TPU
    layout = parallel.layout("jit", devices=target.devices)
    plan = planning.plan(layout, structure, loss, optimizer, state, batch)

The compiler is the one that would compile the step on the slice, so its memory is what the step would take there. Time is
not measured but bounded, see `Plan`.
"""

import dataclasses
import importlib.util
import math
import os
import re
from typing import Any, Literal

import jax
import optax

from flax_transformer.chips import Chip, chip
from flax_transformer.collectives import sent_bytes
from flax_transformer.flops import Flops, count_flops
from flax_transformer.parallel import Layout
from flax_transformer.training import LossFunction, ModelStructure, TrainState, make_eval_step

# What libtpu asks a TPU VM's surroundings for. Where there is none it complains about each, page after page.
_SURROUNDINGS = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # compiling takes no TPU from anybody
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
}


@dataclasses.dataclass(frozen=True)
class Target:
    """A slice of TPUs that a step is compiled for.

    Attributes:
        name: as it was given, such as "v5e:2x4".
        devices: to lay a step over; nothing can be put on them.
        chip: its peaks; None where they are not known.
    """

    name: str
    devices: tuple[Any, ...]
    chip: Chip | None


def target(name: str) -> Target:
    """The slice of a topology's name: a generation and the chips along each side of it.

    Args:
        name: such as "v5e:2x4", "v6e:4x4" or "v5p:2x2x2".

    Raises:
        ValueError: libtpu is not installed, or it knows no such slice.
    """
    from jax.experimental import topologies

    if not re.fullmatch(r"v\d+[a-z]*:\d+(x\d+)+", name):
        raise ValueError(
            f"a slice of TPUs is GENERATION:CHIPSxCHIPS, such as v5e:2x4, v6e:4x4 or v5p:2x2x1, got {name!r}."
        )
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            f"to plan for {name} takes the TPU compiler, which is not installed: pip install 'flax-transformer[tpu]'."
        )
    for variable, value in _SURROUNDINGS.items():
        os.environ.setdefault(variable, value)
    try:
        devices = tuple(topologies.get_topology_desc(name, platform="tpu").devices)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"the TPU compiler knows no slice {name!r} ({' '.join(str(error).split())}).") from error
    return Target(name, devices, chip(devices[0].device_kind))


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the compiler and a count of operations say about one training step. Bytes and seconds are those of one chip.

    Attributes:
        batch_size: the global batch.
        devices: how many share it.
        needed: the most memory that is in use at once. Where the step does not fit, what the compiler says it would need.
        limit: the memory that the compiler may use; None where it did not say.
        fits: whether the compiler could place the step.
        parameters, optimizer, batch: the part of `needed` that is there between steps.
        flops: of the whole step, all devices, what is computed twice counted twice.
        model_flops: of the model and its loss, forward and twice that backward: what counts in MFU.
        sent: bytes by kind of collective, see `collectives.sent_bytes`; nothing where it does not fit.
        moved: bytes between the chip and its memory as the compiler counts them, loops once; 0 where it does not fit.
    """

    batch_size: int
    devices: int
    needed: int
    limit: int | None
    fits: bool
    parameters: int
    optimizer: int
    batch: int
    flops: Flops
    model_flops: int
    sent: dict[str, float]
    moved: float

    @property
    def activations(self) -> int:
        """The rest of `needed`: what the backward pass keeps of the forward one, gradients, and room to work in."""
        return self.needed - self.parameters - self.optimizer - self.batch

    def seconds(self, chip: Chip) -> dict[Literal["compute", "memory", "network"], float]:
        """The least time that each part of the chip is busy for one step: a roofline.

        compute = multiplier passes / (chips x peak), memory = bytes moved / bandwidth, network = bytes sent / bandwidth.
        A step takes at least the largest of the three, and about their sum where none hides behind another.
        """
        return {
            "compute": self.flops.passes / (self.devices * chip.flops),
            "memory": self.moved / chip.bandwidth,
            "network": sum(self.sent.values()) / chip.interconnect,
        }

    def mfu(self, chip: Chip, *, seconds: float) -> float:
        """Model FLOPs utilisation of a step of so many seconds: the share of the peak that the model's own products take."""
        return self.model_flops / (seconds * self.devices * chip.flops)


def plan(
    layout: Layout,
    structure: ModelStructure,
    loss: LossFunction,
    optimizer: optax.GradientTransformation,
    state: TrainState,
    batch: Any,
    *,
    accumulate: int = 1,
) -> Plan:
    """Compiles the step of `layout.compile_train_step` for the devices of the layout.

    Args:
        layout: over the devices of a `Target`.
        structure, loss, optimizer: see `training.make_train_step`.
        accumulate: see there.
        state, batch: their shapes are what counts; arrays or `jax.ShapeDtypeStruct`s.

    Raises:
        ValueError: a batch that the devices cannot share.
        jax.errors.JaxRuntimeError: the compiler fails for another reason than memory.
    """
    shapes = layout.abstract_state(state), layout.abstract_batch(batch)
    program = layout.train_program(structure, loss, optimizer, accumulate=accumulate)
    sizes = _sizes_on_one(*shapes)
    known = dict(
        batch_size=jax.tree.leaves(batch)[0].shape[0],
        devices=len(layout.devices),
        parameters=sizes[0],
        optimizer=sizes[1],
        batch=sizes[2],
        flops=count_flops(program, *shapes),
        model_flops=3 * _forward_flops(structure, loss, state, batch).useful,
    )
    try:
        compiled = program.lower(*shapes).compile()
    except jax.errors.JaxRuntimeError as error:
        needed, limit = _exhausted(error, beside=sum(sizes))
        return Plan(**known, needed=needed, limit=limit, fits=False, sent={}, moved=0.0)
    memory = compiled.memory_analysis()
    needed = memory.peak_memory_in_bytes or (  # not every compiler says it
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.generated_code_size_in_bytes
    )
    moved = (compiled.cost_analysis() or {}).get("bytes accessed", 0.0)
    return Plan(**known, needed=needed, limit=None, fits=True, sent=sent_bytes(compiled.as_text()), moved=moved)


def _sizes_on_one(state: TrainState, batch: Any) -> tuple[int, int, int]:
    def size(tree: Any) -> int:
        shards = [(leaf.sharding.shard_shape(leaf.shape), leaf.dtype.itemsize) for leaf in jax.tree.leaves(tree)]
        return sum(math.prod(shape) * itemsize for shape, itemsize in shards)

    return size((state.parameters, state.buffers)), size(state.optimizer_state), size(batch)


def _forward_flops(structure: ModelStructure, loss: LossFunction, state: TrainState, batch: Any) -> Flops:
    return count_flops(make_eval_step(structure, loss), state.parameters, state.buffers, batch)


_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([KMGT]?)"
# The first says what all would take, the second what does beside parameters, optimizer state and batch.
_EXHAUSTED = re.compile(rf"Used {_SIZE} of {_SIZE} hbm")
_EXHAUSTED_BESIDE = re.compile(rf"temporaries \({_SIZE}\) exceeds available HBM \({_SIZE}\)")


def _exhausted(error: Exception, *, beside: int) -> tuple[int, int]:
    """What the compiler says it would need, and what there is."""
    whole, rest = _EXHAUSTED.search(str(error)), _EXHAUSTED_BESIDE.search(str(error))
    found = whole or rest
    if "RESOURCE_EXHAUSTED" not in str(error) or found is None:
        raise error
    used, used_unit, limit, limit_unit = found.groups()
    needed = int(float(used) * _UNITS[used_unit]) + (0 if whole else beside)
    return needed, int(float(limit) * _UNITS[limit_unit])
