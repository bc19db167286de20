"""What accelerators can do at most, by the name that JAX gives them: what a measured or planned step is compared with.

Sources: Google Cloud's pages "TPU v4", "v5e", "v5p" and "v6e" (interconnect: all links of a chip, both directions);
NVIDIA's data sheets of A100 SXM, H100 SXM and H200 SXM (bfloat16 without sparsity; NVLink, both directions).
"""

from typing import NamedTuple


class Chip(NamedTuple):
    """Peaks of one chip.

    Attributes:
        flops: operations a second on bfloat16 operands, accumulated in float32.
        memory: bytes of high-bandwidth memory, as sold; a compiler keeps a part of it for itself.
        bandwidth: bytes a second between that memory and the chip.
        interconnect: bytes a second to and from other chips.
    """

    flops: float
    memory: int
    bandwidth: float
    interconnect: float


_CHIPS = {
    "TPU v4": Chip(275e12, 32 * 2**30, 1228e9, 600e9),
    "TPU v5 lite": Chip(197e12, 16 * 2**30, 819e9, 400e9),
    "TPU v5e": Chip(197e12, 16 * 2**30, 819e9, 400e9),
    "TPU v5": Chip(459e12, 95 * 2**30, 2765e9, 1200e9),
    "TPU v5p": Chip(459e12, 95 * 2**30, 2765e9, 1200e9),
    "TPU v6 lite": Chip(918e12, 32 * 2**30, 1638e9, 800e9),
    "TPU v6e": Chip(918e12, 32 * 2**30, 1638e9, 800e9),
    "NVIDIA A100": Chip(312e12, 80 * 10**9, 2039e9, 600e9),
    "NVIDIA H100": Chip(989e12, 80 * 10**9, 3350e9, 900e9),
    "NVIDIA H200": Chip(989e12, 141 * 10**9, 4800e9, 900e9),
}


def chip(device_kind: str) -> Chip | None:
    """The chip of a `jax.Device.device_kind`; None: one whose peak is not known here, as of every CPU.

    A GPU's kind may go on after its name ("NVIDIA H100 80GB HBM3"); a TPU's is its name.
    """
    exact = _CHIPS.get(device_kind)
    if exact is not None or not device_kind.startswith("NVIDIA"):
        return exact
    return next((known for name, known in _CHIPS.items() if device_kind.startswith(name)), None)
