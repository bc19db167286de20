"""A model's weights in one safetensors file, under our own names, bit for bit.

A shared tensor is stored once, under the first path that reaches it.
"""

from pathlib import Path

import numpy as np
import safetensors
import safetensors.numpy
from flax import nnx

from flax_transformer.weights.rules import Rule, copy
from flax_transformer.weights.transfer import export, load, variables

FORMAT = "flax-transformer weights 1"


def save_safetensors(model: nnx.Module, path: str | Path) -> None:
    """Write every parameter and buffer of ``model`` to ``path``, replacing the file only when all is written."""
    # safetensors 0.8.0 writes a transposed array's memory as if it were contiguous; export() returns contiguous ones.
    state = export(model, _own_names(model))
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    try:
        safetensors.numpy.save_file(state, partial, metadata={"format": FORMAT})
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def load_safetensors(model: nnx.Module, path: str | Path) -> None:
    """Fill ``model`` from a file of ``save_safetensors``, strictly: every name, shape and dtype must agree.

    Raises:
        ValueError: not such a file, damaged or truncated, or not this model's: nothing was loaded.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} is not a file; save_safetensors writes one")
    try:
        with safetensors.safe_open(path, framework="np") as file:
            found = (file.metadata() or {}).get("format")
            if found != FORMAT:
                raise ValueError(
                    f"{path} is not written by save_safetensors: its format is {found!r}, expected {FORMAT!r}; load the "
                    "tensors of another model with load_torch(model, safetensors.numpy.load_file(path))"
                )
        state: dict[str, np.ndarray] = safetensors.numpy.load_file(path)
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is damaged or no safetensors file ({error}); nothing was loaded") from error
    wrong = [
        f"{name} is stored as {state[name].dtype} but the model keeps {variable.dtype}"
        for name, variable in variables(model)
        if name in state and state[name].dtype != variable.dtype
    ]
    if wrong:
        raise ValueError(f"{path} does not fit the model; nothing was loaded: " + "; ".join(wrong))
    load(model, state, _own_names(model), cast="exact")


def _own_names(model: nnx.Module) -> list[Rule]:
    return [copy(name, name) for name, _ in variables(model)]
