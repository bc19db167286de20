"""The PyTorch side. This file needs torch, numpy, and of this library ``recording`` alone (numpy and safetensors)."""

import copy
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from flax_transformer.parity.recording import Recording, activation_key, as_inputs, as_masks, flatten

if TYPE_CHECKING:
    import torch


def record_torch(
    module: "torch.nn.Module",
    inputs: Any,
    *,
    dtype: str = "float64",
    call: Callable[..., Any] | None = None,
    masks: Mapping[str, Any] | None = None,
) -> Recording:
    """Run a copy of ``module`` in eval mode, cast to ``dtype``, and record every submodule's output.

    The module itself is left as it is. PyTorch's fused attention path is switched off for the run, since it would bypass
    the submodules.

    Args:
        module: any module; floating-point parameters and buffers of the copy are cast to ``dtype``.
        inputs: an array, a tuple of arrays (positional) or a mapping (by keyword). Floats are cast to ``dtype``, integers
            to int64, PyTorch's index type.
        dtype: "float64", "float32", "float16" or "bfloat16".
        call: what to run, as ``call(module, *inputs)`` or ``call(module, **inputs)``; the default calls the module.
        masks: masks that were built with the reference's own functions, to be compared on the rung of that name.
    Raises:
        ModuleNotFoundError: torch is not installed.
        ValueError: ``dtype`` or an input is of another kind.
    """
    try:
        import torch
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'record_torch needs PyTorch: pip install "flax-transformer[test]", or torch itself; recordings that were '
            "made elsewhere load without it"
        ) from error

    arrays = as_inputs(inputs, dtype)
    tensors = {name: _to_tensor(array) for name, array in arrays.items()}
    copied = _copy(module).to(getattr(torch, dtype)).eval()
    module_names = _names(module.named_modules(remove_duplicate=False))
    parameter_names = _names(module.named_parameters(remove_duplicate=False))
    buffer_names = _names(module.named_buffers(remove_duplicate=False))
    parameters, buffers = (dict(named) for named in (copied.named_parameters(), copied.named_buffers()))
    device = next((tensor.device for tensor in [*parameters.values(), *buffers.values()]), torch.device("cpu"))
    tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    activations: dict[str, np.ndarray] = {}
    calls: Counter[str] = Counter()

    def hook_of(path: str) -> Callable[..., None]:
        def hook(_module: Any, _args: Any, output: Any) -> None:
            for suffix, tensor in flatten(output, torch.Tensor):
                activations[activation_key(path, calls[path], suffix)] = _to_numpy(tensor)
            calls[path] += 1

        return hook

    for path, submodule in copied.named_modules():
        submodule.register_forward_hook(hook_of(path))
    run = call or (lambda model, *args, **kwargs: model(*args, **kwargs))
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            result = run(copied, **tensors) if isinstance(inputs, Mapping) else run(copied, *tensors.values())
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
    return Recording(
        dtype=dtype,
        inputs=arrays,
        masks=as_masks(masks or {}),
        parameters={name: _to_numpy(parameters[name]) for name in parameter_names},
        buffers={name: _to_numpy(buffers[name]) for name in buffer_names},
        activations=activations,
        outputs={suffix: _to_numpy(tensor) for suffix, tensor in flatten(result, torch.Tensor)},
        tensor_names={**parameter_names, **buffer_names},
        module_names=module_names,
        provenance={
            "framework": "torch",
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
            "device": str(device),
            "threads": str(torch.get_num_threads()),
            "matmul precision": torch.get_float32_matmul_precision(),
        },
    )


def _copy(module: "torch.nn.Module") -> "torch.nn.Module":
    import torch

    # deepcopy refuses tensors with a history, such as attention weights that a forward pass left in an attribute.
    results = (value for part in module.modules() for value in vars(part).values() if isinstance(value, torch.Tensor))
    return copy.deepcopy(module, {id(value): value.detach().clone() for value in results if not value.is_leaf})


def _names(named: Iterable[tuple[str, object]]) -> dict[str, tuple[str, ...]]:
    """Canonical name, the first -> every name of the same object."""
    groups: dict[int, list[str]] = {}
    for name, item in named:
        groups.setdefault(id(item), []).append(name)
    return {names[0]: tuple(names) for names in groups.values()}


def _to_tensor(array: np.ndarray) -> "torch.Tensor":
    import torch

    array = np.array(array, order="C")
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array.astype(np.int64) if array.dtype.kind in "iu" else array)


def _to_numpy(tensor: "torch.Tensor") -> np.ndarray:
    import torch

    # A copy: a later operation may work in place.
    tensor = tensor.detach().to("cpu", copy=True).contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()
