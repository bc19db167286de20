"""Reading PyTorch's own files. With parity's torch_recorder, the only place in the library that imports torch."""

from pathlib import Path

import numpy as np

from flax_transformer.weights.transfer import as_arrays


def read_torch_file(path: str | Path) -> dict[str, np.ndarray]:
    """The tensors of a file of ``torch.save(module.state_dict(), path)``, through ``weights_only=True`` alone.

    Raises:
        ValueError: torch is not installed; no such file; a file that holds anything but tensors by name (a pickle may run
            any code, so nothing else is read).
    """
    try:
        import torch
    except ImportError as error:
        raise ValueError(
            "reading a PyTorch file needs torch: pip install torch, or convert it to safetensors"
        ) from error
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} is not a file")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # on bytes that it does not know torch raises anything, KeyError and struct.error too
        raise ValueError(
            f"{path} is damaged, or holds more than tensors, which only an unsafe load would run; "
            "save module.state_dict() instead of the module"
        ) from error
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise ValueError(
            f"{path} holds {type(state).__name__}, not a dict of tensors; save module.state_dict(), or pass that part of it"
        )
    problems: list[str] = []
    arrays = as_arrays({str(key): value for key, value in state.items()}, problems)
    if problems:
        raise ValueError(f"{path} cannot be read: " + "; ".join(problems))
    return arrays
