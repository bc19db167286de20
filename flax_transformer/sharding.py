"""A mesh of devices, and which of its axes a parameter is spread over: names and shapes, whatever the model.

A mesh has three axes:

    data     every device along it holds all parameters, and its own part of the batch
    fsdp     parameters and optimizer state are spread over it, and the batch is too
    tensor   every product is spread over it, and a batch is the same for all of it

`RULES` says how, by a parameter's name. Along `tensor` it follows Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053,
section 3): the first product of a pair keeps its columns apart (query, key, value; the feed-forward's up), the second
one its rows (output, down), so that one sum over the axis ends the pair; tables of the vocabulary are split by tokens.
Along `fsdp` whichever dimension is left is split (as Rajbhandari et al. 2020, arXiv:1910.02054): a step gathers the
parameters from it, and keeps of gradients and updates only what each device owns.

A dimension that the size of an axis does not divide is not split along that axis: every size works, at the price of
copies. Nothing else depends on the sizes, neither what is computed nor its meaning. A number of heads that `tensor` does
not divide is correct too, and moves activations once more.
"""

import dataclasses
import re
from typing import Any, Self

import jax
from jax.sharding import PartitionSpec

DATA, FSDP, TENSOR = "data", "fsdp", "tensor"
AXES = (DATA, FSDP, TENSOR)

# One axis, or none, for each dimension; the first pattern that matches the whole name of a parameter decides. What none
# matches is copied to every device.
RULES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    # Kernels are (in, out). Where one projection is query, key, value and output at once, its name is that of the key:
    # three of its four uses want columns, and the fourth gathers them.
    (r".*attention\.(query|key|value)\.kernel", (FSDP, TENSOR)),
    (r".*attention\.(query|key|value)\.bias", (TENSOR,)),
    (r".*attention\.output\.kernel", (TENSOR, FSDP)),
    (r".*feed_forward\.up\.kernel", (FSDP, TENSOR)),
    (r".*feed_forward\.up\.bias", (TENSOR,)),
    (r".*feed_forward\.down\.kernel", (TENSOR, FSDP)),
    # Added once to a sum over `tensor`, hence whole.
    (r".*(attention\.output|feed_forward\.down)\.bias", (None,)),
    # Tables are (V, D).
    (r"(|source_|target_)embedding\.embedding", (TENSOR, FSDP)),
    (r"output\.kernel", (TENSOR, FSDP)),
    (r"output\.bias", (TENSOR,)),
    # Positions are (T, D).
    (r"(|source_|target_)positions\.table", (None, FSDP)),
    (r".*norm\.(scale|bias)", (None,)),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshShape:
    """How many devices lie along each axis; `str` of it is what `parse` reads.

    Attributes:
        data: -1: as many as the other two leave.

    Raises:
        ValueError: a size below 1 (and, of `data`, other than -1).
    """

    data: int = -1
    fsdp: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        wrong = [f"{axis}={size}" for axis, size in self.sizes.items() if size < 1 and (axis, size) != (DATA, -1)]
        if wrong:
            raise ValueError(
                f"the axes of a mesh have at least 1 device each, got {', '.join(wrong)}; leave an axis out for 1, and "
                "data for all devices that are left."
            )

    @classmethod
    def parse(cls, text: str) -> Self:
        """The mesh that a text such as "data=4,fsdp=2" describes; an axis that is left out has its default.

        Raises:
            ValueError: not such a text, an axis that there is not or is there twice, or see the class.
        """
        sizes: dict[str, int] = {}
        for part in text.split(","):
            axis, equals, size = (word.strip() for word in part.partition("="))
            if axis not in AXES or axis in sizes or not equals or not re.fullmatch(r"-?[0-9]+", size):
                raise ValueError(
                    f"a mesh is written as AXIS=NUMBER for each of its axes, which are {', '.join(AXES)}, with a comma "
                    f"between, such as data=4,fsdp=2; got {part.strip()!r} in {text!r}."
                )
            sizes[axis] = int(size)
        return cls(**sizes)

    @property
    def sizes(self) -> dict[str, int]:
        return {DATA: self.data, FSDP: self.fsdp, TENSOR: self.tensor}

    @property
    def parts(self) -> int:
        """How many parts a batch is spread over."""
        return self.data * self.fsdp

    def of_devices(self, count: int) -> "MeshShape":
        """The same mesh with the number along `data` filled in.

        Raises:
            ValueError: its axes do not multiply to `count`.
        """
        rest = self.fsdp * self.tensor
        data = count // rest if self.data == -1 else self.data
        if data * rest != count:
            rule = "divide" if self.data == -1 else "multiply to"
            raise ValueError(
                f"the axes of a mesh must {rule} the number of devices, {count}; got {self}. Give other sizes, or other "
                "devices."
            )
        return dataclasses.replace(self, data=data)

    def __str__(self) -> str:
        sizes = {axis: size for axis, size in self.sizes.items() if size != (-1 if axis == DATA else 1)}
        return ",".join(f"{axis}={size}" for axis, size in sizes.items()) or f"{DATA}=-1"


def partition(name: str, shape: tuple[int, ...], mesh: MeshShape, *, over: tuple[str, ...] = AXES) -> PartitionSpec:
    """Which axes of a mesh an array is spread over, dimension by dimension, by `RULES`.

    Args:
        name: of a parameter ("blocks.0.attention.query.kernel").
        shape: of the parameter, or of what an optimizer keeps of it; of another rank than the rule's: not spread at all.
        mesh: without -1.
        over: only these axes.
    """
    axes = next((axes for pattern, axes in RULES if re.fullmatch(pattern, name)), ())
    if len(axes) != len(shape):
        return PartitionSpec()
    used = [
        axis if axis in over and mesh.sizes[axis] > 1 and size % mesh.sizes[axis] == 0 else None
        for axis, size in zip(axes, shape, strict=True)
    ]
    while used and used[-1] is None:  # the one way to write it, which JAX compares
        used.pop()
    return PartitionSpec(*used)


def partition_all(tree: Any, mesh: MeshShape, *, over: tuple[str, ...] = AXES) -> Any:
    """`partition` of every leaf of a pytree, under the last key of a dictionary on the way to it.

    So what an optimizer keeps of each parameter (`{"mu": {NAME: ...}, "nu": {NAME: ...}}`) lies where the parameter does,
    and what has no name, or another shape, is copied to every device.
    """

    def of_leaf(path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
        names = [str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey)]
        return partition(names[-1] if names else "", leaf.shape, mesh, over=over)

    return jax.tree_util.tree_map_with_path(of_leaf, tree)
