"""The Flax side: the one file of this package that imports jax and flax."""

import contextlib
import functools
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import get_opaque_trace_state

from flax_transformer.parity.recording import Recording, activation_key, as_inputs, as_masks, flatten

Execution = Literal["eager", "jit"]


def record_flax(
    module: nnx.Module,
    inputs: Any,
    *,
    dtype: str = "float64",
    execution: Execution = "eager",
    call: Callable[..., Any] | None = None,
    masks: Mapping[str, Any] | None = None,
) -> Recording:
    """Run a copy of ``module`` in eval mode, cast to ``dtype``, and record every submodule's output.

    The module itself is left as it is. Casting reaches variables only: a module that was told to compute in float32 does so
    in a float64 recording too, and the comparison says where.

    Args:
        module: any NNX module; its floating-point variables are cast to ``dtype`` in a copy.
        inputs: an array, a tuple of arrays (positional) or a mapping (by keyword); floats are cast to ``dtype``.
        dtype: "float64" (64-bit types are switched on for this run only), "float32", "float16" or "bfloat16".
        execution: operation by operation, or compiled as one program that returns every submodule's output too.
        call: what to run, as ``call(module, *inputs)`` or ``call(module, **inputs)``; the default calls the module.
        masks: masks that were built with the candidate's own functions, to be compared on the rung of that name.
    Raises:
        ValueError: an option has another value, or a submodule is called where its output cannot be seen: inside
            ``jax.jit``, ``scan``, ``vmap``, ``remat`` of the model's own; all are named.
    """
    if execution not in ("eager", "jit"):
        raise ValueError(f"execution must be 'eager' or 'jit', got {execution!r}")
    arrays = as_inputs(inputs, dtype)
    run = call or (lambda model, *args, **kwargs: model(*args, **kwargs))
    parts = list(_walk(module))
    module_names = _names((path, part) for path, part in parts if isinstance(part, nnx.Module))
    tensors = {path: part for path, part in parts if not isinstance(part, nnx.Module)}
    tensor_names = _names(tensors.items())
    canonical = {alias: path for path, aliases in module_names.items() for alias in aliases}
    graph, state = nnx.split(module)
    keys: list[str] = []
    suffixes: list[str] = []

    def forward(state: Any, inputs_: dict[str, jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        copied = nnx.merge(graph, state)
        copied.eval()
        paths = {id(part): canonical[path] for path, part in _walk(copied) if path in canonical}
        with _recorded(copied, paths) as activations:
            result = run(copied, **inputs_) if isinstance(inputs, Mapping) else run(copied, *inputs_.values())
        outputs = dict(flatten(result, (jax.Array, np.ndarray)))
        # A compiled function returns arrays only, in one order; their names leave by the side.
        keys[:], suffixes[:] = activations, outputs
        return list(activations.values()), list(outputs.values())

    with jax.enable_x64(dtype == "float64"):
        values = {name: np.asarray(_cast(_value(tensors[name]), dtype)) for name in tensor_names}
        results = (jax.jit(forward) if execution == "jit" else forward)(
            jax.tree.map(lambda value: _cast(value, dtype), state),
            {name: jnp.asarray(array) for name, array in arrays.items()},
        )
    activations, outputs = ([np.asarray(value) for value in arrays_] for arrays_ in results)
    trained = {name for name in tensor_names if isinstance(tensors[name], nnx.Param)}
    return Recording(
        dtype=dtype,
        inputs=arrays,
        masks=as_masks(masks or {}),
        parameters={name: values[name] for name in tensor_names if name in trained},
        buffers={name: values[name] for name in tensor_names if name not in trained},
        activations=dict(zip(keys, activations, strict=True)),
        outputs=dict(zip(suffixes, outputs, strict=True)),
        tensor_names=tensor_names,
        module_names=module_names,
        provenance={
            "framework": "flax",
            "flax": flax.__version__,
            "jax": jax.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
            "device": jax.devices()[0].device_kind,
            "execution": execution,
            "matmul precision": str(jax.config.jax_default_matmul_precision),  # pyright: ignore[reportAttributeAccessIssue]
        },
    )


@contextlib.contextmanager
def _recorded(module: nnx.Module, paths: Mapping[int, str]) -> Iterator[dict[str, jax.Array]]:
    """The outputs of ``module`` and its submodules, collected while the context is open, by wrapping their classes."""
    activations: dict[str, jax.Array] = {}
    calls: Counter[str] = Counter()
    hidden: set[str] = set()
    trace = get_opaque_trace_state()

    def record(part: nnx.Module, output: Any) -> None:
        path = paths.get(id(part))
        # Inside a transform the outputs are tracers that die with it, and nnx transforms work on copies of modules.
        if path is None or trace != get_opaque_trace_state():
            hidden.add(f"{path or '(unknown)'}: {type(part).__name__}")
            return
        for suffix, array in flatten(output, (jax.Array, np.ndarray)):
            activations[activation_key(path, calls[path], suffix)] = array
        calls[path] += 1

    classes = {type(part) for _, part in nnx.iter_graph(module, graph=True) if isinstance(part, nnx.Module)}
    # Found before any is replaced, since a class may inherit the call of another.
    originals = {cls: call for cls in classes if (call := _find_call(cls)) is not None}
    inherited = [cls for cls in originals if "__call__" not in vars(cls)]
    try:
        for cls, original in originals.items():
            cls.__call__ = _wrapped(cls, original, record)
        yield activations
    finally:
        for cls, original in originals.items():
            if cls in inherited:
                del cls.__call__
            else:
                cls.__call__ = original
    if hidden:
        raise ValueError(
            "outputs of these modules cannot be seen, since they are called inside a jax transform of the model's own "
            f"(jit, scan, vmap, remat) or made during the call: {'; '.join(sorted(hidden))}; record the model without it"
        )


def _find_call(cls: type) -> Any:
    # getattr would find the metaclass's own call in classes that have none.
    return next((vars(base)["__call__"] for base in cls.__mro__ if "__call__" in vars(base)), None)


def _wrapped(cls: type, original: Any, record: Callable[[Any, Any], None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original.__get__(self, cls)(*args, **kwargs)
        if type(self) is cls:  # else a subclass came here by super(), and records the whole
            record(self, output)
        return output

    return call


def _walk(node: Any, path: str = "", above: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every module, variable and array under every name by which it can be reached, in order of assignment."""
    if isinstance(node, (nnx.Variable, jax.Array)):
        if not isinstance(node, nnx.RngState) and isinstance(_value(node), (jax.Array, np.ndarray)):
            yield path, node
        return
    if id(node) in above:
        return
    if isinstance(node, nnx.Module):
        yield path, node
    if isinstance(node, nnx.Pytree):
        children = ((name, child) for name, child in vars(node).items() if not name.startswith("_pytree__"))
    elif isinstance(node, Mapping):
        children = node.items()
    elif isinstance(node, (list, tuple)):
        children = enumerate(node)
    else:
        return
    for name, child in children:
        yield from _walk(child, f"{path}.{name}" if path else str(name), (*above, id(node)))


def _names(parts: Iterable[tuple[str, Any]]) -> dict[str, tuple[str, ...]]:
    """Canonical name, the first -> every name of the same object."""
    groups: dict[int, list[str]] = {}
    for path, part in parts:
        groups.setdefault(id(part), []).append(path)
    return {paths[0]: tuple(paths) for paths in groups.values()}


def _value(tensor: Any) -> Any:
    return tensor.get_value() if isinstance(tensor, nnx.Variable) else tensor


def _cast(value: Any, dtype: str) -> Any:
    return value.astype(dtype) if jnp.issubdtype(value.dtype, jnp.floating) else value
