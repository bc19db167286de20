"""The reference's side of every case: recorded with PyTorch where it is installed, read from a folder where it is not.

With ``PARITY_RECORDINGS=DIR`` recordings of small cases are written to DIR where PyTorch is installed, and read from it
where it is not: so the PyTorch side is recorded on one machine and checked on another.
"""

import functools
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from flax_transformer import parity
from parity_tests.cases import Case, reference_loss
from parity_tests.recipes import RECIPE

if TYPE_CHECKING:
    import torch

HAS_TORCH = importlib.util.find_spec("torch") is not None
needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="needs PyTorch beside JAX in one process")


@functools.lru_cache(maxsize=40)  # the 16 seeds of a case in two types, and not many large ones
def reference(case: Case, dtype: str, seed: int) -> parity.Recording:
    """The recording of the case's PyTorch module with weights and inputs drawn from ``seed``."""
    folder = os.environ.get("PARITY_RECORDINGS")
    path = Path(folder) / f"{case.name}-{dtype}-{seed}" if folder and case.size == "small" else None
    if HAS_TORCH:
        recording = record(case, dtype, seed)
        if path is not None and not path.exists():
            recording.save(path)
        return recording
    if path is None:
        raise RuntimeError(
            "without torch, PARITY_RECORDINGS must name a folder of recordings, and only small cases run"
        )
    return parity.load(path)


def module_and_inputs(case: Case, seed: int) -> "tuple[torch.nn.Module, dict[str, np.ndarray]]":
    """The case's PyTorch module in float32, weights drawn from ``seed``, and its inputs."""
    import torch

    torch.manual_seed(seed)
    module = case.reference()
    with torch.no_grad():
        # PyTorch starts norms at 1 and 0 and the document's copies at equal values, which would hide permutations.
        for parameter in module.parameters():
            size = 0.1 if parameter.ndim < 2 else 0.3 * parameter.std()
            parameter.add_(size * torch.randn_like(parameter))
    return module, case.inputs(np.random.default_rng(seed))


def later_batches(case: Case) -> list[dict[str, np.ndarray]]:
    """What the training steps after the first take in turn; the first takes the inputs of the seed."""
    return [case.inputs(np.random.default_rng(seed)) for seed in (1, 2, 3)]


def as_tensors(inputs: Mapping[str, np.ndarray]) -> "dict[str, torch.Tensor]":
    """Token ids as PyTorch wants them."""
    import torch

    return {name: torch.from_numpy(array.astype(np.int64)) for name, array in inputs.items()}


def record(case: Case, dtype: str, seed: int) -> parity.Recording:
    """The recording, made now."""
    module, inputs = module_and_inputs(case, seed)
    training: dict[str, Any] = dict(optimizer=RECIPE.optimizer, schedule=RECIPE.schedule, max_norm=RECIPE.max_norm)
    return parity.record_torch(
        module,
        inputs,
        dtype=dtype,
        call=case.call_reference,
        masks=case.reference_masks(as_tensors(inputs)),
        loss=reference_loss(case),
        **(training if case.size == "small" else {}),
    )
