"""The PyTorch side. With ``torch_calls`` and ``recording`` it needs torch, numpy and safetensors alone (``standalone``)."""

import contextlib
import copy
import platform
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from flax_transformer.parity.recording import (
    Masks,
    Recording,
    as_batches,
    as_inputs,
    as_masks,
    flatten,
    name_batches,
    names_of,
)
from flax_transformer.parity.torch_calls import Watch, to_numpy, to_tensor, unfused

if TYPE_CHECKING:
    import torch

Mode = Literal["eval", "train"]

# The names of optimizers' states, for what other libraries call mu, nu and trace.
MOMENTS = {"exp_avg": "first", "exp_avg_sq": "second", "momentum_buffer": "momentum"}


def record_torch(
    module: "torch.nn.Module",
    inputs: Any,
    *,
    dtype: str = "float64",
    mode: Mode = "eval",
    call: Callable[..., Any] | None = None,
    masks: Mapping[str, Any] | None = None,
    dropout: Masks | None = None,
    loss: "Callable[[Any, Any], torch.Tensor] | None" = None,
    optimizer: "Callable[[torch.nn.Module], torch.optim.Optimizer] | None" = None,
    schedule: "Callable[[Any], Any] | None" = None,
    max_norm: float | None = None,
    steps: int = 1,
    batches: Sequence[Any] = (),
    decode: Callable[..., Any] | None = None,
) -> Recording:
    """Run a copy of ``module``, cast to ``dtype``, and record every submodule's output, and on request how it learns.

    The module itself is left as it is. PyTorch's fused attention path is switched off for the run, since it would bypass
    the submodules.

    Args:
        module: any module; floating-point parameters and buffers of the copy are cast to ``dtype``.
        inputs: an array, a tuple of arrays (positional) or a mapping (by keyword). Floats are cast to ``dtype``, integers
            to int64, PyTorch's index type.
        dtype: "float64", "float32", "float16" or "bfloat16".
        mode: "train" switches dropout on, whose masks are then recorded.
        call: what to run, as ``call(module, *inputs)`` or ``call(module, **inputs)``; the default calls the module.
        masks: masks that were built with the reference's own functions, to be compared on the rung of that name.
        dropout: masks to apply instead of drawing them (mode "train" only), as another recording's ``dropout``: by
            site, or a sequence in order of execution; True = kept.
        loss: ``loss(output, inputs)``, a scalar, of what ``call`` returns and the tensors that it was given. Its gradients
            are recorded.
        optimizer: ``optimizer(module)`` builds it, for example ``lambda module: torch.optim.Adam(module.parameters())``.
            The first update is recorded, and the weights after the last.
        schedule: ``schedule(optimizer)`` builds a scheduler, which is stepped after each step.
        max_norm: gradients are clipped to this joint norm before each step, by ``clip_grad_norm_``.
        steps: how many optimizer steps to take.
        batches: inputs of the steps after the first, taken in turn; by default every step takes ``inputs``.
        decode: ``decode(module, *inputs)`` or ``decode(module, **inputs)``, token ids or a mapping of them.
    Raises:
        ModuleNotFoundError: torch is not installed.
        ValueError: an option or an input is of another kind, or the masks are not those of the sites.
    """
    try:
        import torch
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'record_torch needs PyTorch: pip install "flax-transformer[test]", or torch itself; recordings that were '
            "made elsewhere load without it"
        ) from error

    _require_options(
        mode, dropout, loss, optimizer, steps, schedule is not None or max_norm is not None or len(batches)
    )
    arrays = as_inputs(inputs, dtype)
    later = as_batches(batches, inputs, dtype)
    copied = _copy(module).to(getattr(torch, dtype)).train(mode == "train")
    module_names = names_of(module.named_modules(remove_duplicate=False))
    parameter_names = names_of(module.named_parameters(remove_duplicate=False))
    buffer_names = names_of(module.named_buffers(remove_duplicate=False))
    parameters, buffers = (dict(named) for named in (copied.named_parameters(), copied.named_buffers()))
    device = next((tensor.device for tensor in [*parameters.values(), *buffers.values()]), torch.device("cpu"))

    def batch_of(named: Mapping[str, np.ndarray]) -> Any:
        tensors = {name: to_tensor(array).to(device) for name, array in named.items()}
        return tensors if isinstance(inputs, Mapping) else tuple(tensors.values())

    def run(function: Callable[..., Any], batch: Any) -> Any:
        return function(copied, **batch) if isinstance(inputs, Mapping) else function(copied, *batch)

    forward = call or (lambda model, *args, **kwargs: model(*args, **kwargs))
    start = {name: to_numpy(tensor) for name, tensor in parameters.items()}
    state = {name: to_numpy(tensor) for name, tensor in buffers.items()}
    decoded: dict[str, np.ndarray] = {}
    if decode is not None:
        with torch.no_grad(), unfused():
            decoded = {k: to_numpy(v) for k, v in flatten(run(decode, batch_of(arrays)), torch.Tensor)}
    watch = Watch(dict(copied.named_modules()), dropout, gradients=loss is not None)
    learned: dict[str, dict[str, np.ndarray]] = {}
    with unfused():
        with watch.watching(), torch.set_grad_enabled(loss is not None):
            batch = batch_of(arrays)
            result = run(forward, batch)
            outputs = {suffix: to_numpy(tensor) for suffix, tensor in flatten(result, torch.Tensor)}
            if loss is not None:
                value = _scalar(loss(result, batch))
                value.backward()
        if loss is not None:
            learned["losses"] = {"loss": np.array([to_numpy(value)])}
            learned["gradients"] = {name: _gradient(tensor) for name, tensor in parameters.items()}
        if loss is not None and optimizer is not None:

            def next_loss(number: int) -> Any:
                batch = batch_of([arrays, *later][number % (1 + len(later))])
                again = Watch(watch.modules, dropout, gradients=False)
                with again.watching() if dropout is not None else contextlib.nullcontext(), torch.enable_grad():
                    return _scalar(loss(run(forward, batch), batch))

            learned |= _train(copied, value, next_loss, optimizer, schedule, max_norm, steps, start)
    return Recording(
        dtype=dtype,
        inputs=arrays,
        batches=name_batches(later),
        masks=as_masks(masks or {}),
        dropout=watch.masks,
        parameters={name: start[name] for name in parameter_names},
        buffers={name: state[name] for name in buffer_names},
        activations=watch.activations,
        activation_gradients={k: watch.gradients[k] for k in watch.activations if k in watch.gradients},
        outputs=outputs,
        decoded=decoded,
        tensor_names={**parameter_names, **buffer_names},
        module_names=module_names,
        provenance={
            "framework": "torch",
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
            "device": str(device),
            "threads": str(torch.get_num_threads()),
            "matmul precision": _effective_precision(device),
        },
        **learned,
    )


def live_torch(
    module: "torch.nn.Module",
    *,
    dtype: str = "float64",
    call: Callable[..., Any] | None = None,
    by_keyword: bool = False,
) -> Callable[..., Any]:
    """A copy of ``module`` in eval mode as a function of arrays that also tells gradients, for ``parity.search``.

    Args:
        dtype, call: as for ``record_torch``.
        by_keyword: whether inputs are passed by name.
    """
    import torch

    copied = _copy(module).to(getattr(torch, dtype)).eval()
    run = call or (lambda model, *args, **kwargs: model(*args, **kwargs))

    def live(inputs: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], Callable[..., dict[str, np.ndarray]]]:
        tensors = {name: to_tensor(array) for name, array in inputs.items()}
        changed = {name: tensor.requires_grad_() for name, tensor in tensors.items() if tensor.is_floating_point()}
        with torch.enable_grad(), unfused():
            result = run(copied, **tensors) if by_keyword else run(copied, *tensors.values())
        outputs = dict(flatten(result, torch.Tensor))

        def pullback(gradients: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
            reached = [name for name, output in outputs.items() if output.requires_grad]
            if not reached or not changed:
                return {name: np.zeros_like(inputs[name]) for name in changed}
            found = torch.autograd.grad(
                [outputs[name] for name in reached],
                list(changed.values()),
                [to_tensor(gradients[name]).to(outputs[name].dtype) for name in reached],
                allow_unused=True,
            )
            return {
                name: np.zeros_like(inputs[name]) if gradient is None else to_numpy(gradient)
                for name, gradient in zip(changed, found, strict=True)
            }

        return {name: to_numpy(output) for name, output in outputs.items()}, pullback

    return live


def _train(
    module: "torch.nn.Module",
    value: "torch.Tensor",
    next_loss: "Callable[[int], torch.Tensor]",
    optimizer: "Callable[[torch.nn.Module], torch.optim.Optimizer]",
    schedule: Callable[[Any], Any] | None,
    max_norm: float | None,
    steps: int,
    start: Mapping[str, np.ndarray],
) -> dict[str, dict[str, np.ndarray]]:
    """The sections of a training run; ``value`` is the first loss, whose gradients are there already."""
    import torch

    parameters = dict(module.named_parameters())
    names = {id(parameter): name for name, parameter in parameters.items()}
    built = optimizer(module)
    scheduler = schedule(built) if schedule is not None else None
    learned: dict[str, dict[str, np.ndarray]] = {}
    losses = [to_numpy(value)]
    for number in range(steps):
        if number:
            built.zero_grad()
            value = next_loss(number)
            value.backward()
            losses.append(to_numpy(value))
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm)
        built.step()
        if scheduler is not None:
            scheduler.step()
        if number == 0:
            learned["updates"] = {name: to_numpy(tensor) - start[name] for name, tensor in parameters.items()}
            learned["moments"] = {
                f"{MOMENTS[kind]}/{names[id(parameter)]}": to_numpy(moment)
                for parameter, state in built.state.items()
                for kind, moment in state.items()
                if kind in MOMENTS and isinstance(moment, torch.Tensor)
            }
    learned["losses"] = {"loss": np.array(losses)}
    if steps > 1:
        learned["trained"] = {name: to_numpy(tensor) for name, tensor in parameters.items()}
    return learned


def _require_options(mode: str, dropout: object, loss: object, optimizer: object, steps: int, training: object) -> None:
    problems = []
    if mode not in ("eval", "train"):
        problems.append(f"mode must be 'eval' or 'train', got {mode!r}")
    if dropout is not None and mode != "train":
        problems.append("dropout masks are applied in mode='train' only")
    if optimizer is not None and loss is None:
        problems.append("an optimizer needs a loss")
    if optimizer is None and (training or steps != 1):
        problems.append("schedule, max_norm, steps and batches need an optimizer")
    if steps < 1:
        problems.append(f"steps must be at least 1, got {steps}")
    if problems:
        raise ValueError("; ".join(problems))


def _copy(module: "torch.nn.Module") -> "torch.nn.Module":
    import torch

    # deepcopy refuses tensors with a history, such as attention weights that a forward pass left in an attribute.
    results = (value for part in module.modules() for value in vars(part).values() if isinstance(value, torch.Tensor))
    copied = copy.deepcopy(module, {id(value): value.detach().clone() for value in results if not value.is_leaf})
    copied.zero_grad(set_to_none=True)
    return copied


def _scalar(value: "torch.Tensor") -> "torch.Tensor":
    if value.numel() != 1:
        raise ValueError(f"loss must return one number, got shape {tuple(value.shape)}; take its mean or sum")
    return value.reshape(())


def _gradient(parameter: "torch.Tensor") -> np.ndarray:
    return np.zeros_like(to_numpy(parameter)) if parameter.grad is None else to_numpy(parameter.grad)


def _effective_precision(device: "torch.device") -> str:
    """What a float32 product is computed in on ``device``, in words."""
    import torch

    setting = torch.get_float32_matmul_precision()
    if device.type != "cuda":
        return f"float32 on {device.type} (setting: {setting})"
    reduced = torch.backends.cuda.matmul.allow_tf32
    return f"{'TF32' if reduced else 'float32'} on {torch.cuda.get_device_name(device)} (setting: {setting})"
