"""A Flax module as a function of its arrays, observed, and the traces of it that recordings may share."""

import contextlib
import contextvars
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flax_transformer.parity.flax_calls import Watch, walk
from flax_transformer.parity.recording import flatten

Mode = Literal["eval", "train"]
Named = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Program:
    """A module as a function of its arrays. Two recordings of one structure have equal programs, and share a trace."""

    # A list or a dict that a module holds as a setting cannot be hashed, but compared.
    graph: nnx.GraphDef = dataclasses.field(hash=False)
    structure: Any  # a PyTreeDef
    names: tuple[str, ...]
    dtype: str
    module_names: tuple[tuple[str, tuple[str, ...]], ...]
    mode: Mode
    by_keyword: bool
    forward: Callable[..., Any]
    loss: Callable[[Any, Any], Any] | None

    def merge(self, parameters: Named, rest: Any) -> Any:
        """The module with these arrays, in its mode."""
        model = nnx.merge(self.graph, self.structure.unflatten([parameters[name] for name in self.names]), rest)
        for _, part in walk(model):
            _follow(part, self.dtype)
        model.train() if self.mode == "train" else model.eval()
        return model

    def paths(self, model: nnx.Module) -> dict[int, str]:
        """``id`` of every module of a merged model -> its canonical path."""
        canonical = {alias: path for path, aliases in self.module_names for alias in aliases}
        return {id(part): canonical[path] for path, part in walk(model) if path in canonical}

    def run(self, function: Callable[..., Any], model: Any, batch: Named) -> Any:
        return function(model, **batch) if self.by_keyword else function(model, *batch.values())

    def loss_of(self, result: Any, batch: Named) -> Any:
        if self.loss is None:
            return jnp.zeros(())
        value = self.loss(result, batch if self.by_keyword else tuple(batch.values()))
        if value.size != 1:
            raise ValueError(f"loss must return one number, got shape {value.shape}; take its mean or sum")
        return value.reshape(())


def _follow(part: Any, dtype: str) -> None:
    """Let a layer compute in ``dtype`` if it was built to compute in the type of its parameters, as ``nnx.Embed`` is."""
    fields = vars(part) if isinstance(part, nnx.Module) else {}
    own, of_parameters = fields.get("dtype"), fields.get("param_dtype")
    if own is not None and of_parameters is not None and jnp.dtype(own) == jnp.dtype(of_parameters):
        setattr(part, "dtype", jnp.dtype(dtype))  # noqa: B010  (no attribute of every module)
        setattr(part, "param_dtype", jnp.dtype(dtype))  # noqa: B010


def _call(model: Any, *args: Any, **kwargs: Any) -> Any:
    return model(*args, **kwargs)


def split(
    module: nnx.Module,
    dtype: str,
    module_names: Mapping[str, tuple[str, ...]],
    tensor_names: Mapping[str, tuple[str, ...]],
    *,
    mode: Mode,
    call: Callable[..., Any] | None,
    loss: Callable[[Any, Any], Any] | None,
    by_keyword: bool,
) -> tuple[Program, Named, Any]:
    """The program of a module, its parameters by canonical name, and whatever else it holds, all cast."""
    graph, parameters, rest = nnx.split(module, nnx.Param, ...)
    leaves, structure = jax.tree_util.tree_flatten_with_path(nnx.as_pure(parameters))
    # A state names a shared parameter by the first of its paths in the alphabet, a recording by the first assigned.
    canonical = {alias: path for path, aliases in tensor_names.items() for alias in aliases}
    names = tuple(canonical[jax.tree_util.keystr(path, simple=True, separator=".")] for path, _ in leaves)
    named = dict(zip(names, (cast(leaf, dtype) for _, leaf in leaves), strict=True))
    program = Program(
        graph, structure, names, dtype, tuple(module_names.items()), mode, by_keyword, call or _call, loss
    )
    ordered = {name: named[name] for name in tensor_names if name in named}
    return program, ordered, jax.tree.map(lambda value: cast(value, dtype), nnx.as_pure(rest))


def observe(
    parameters: Named, taps: Named, program: Program, rest: Any, batch: Named, replay: Named, dropout: Any
) -> tuple[Any, dict[str, Any]]:
    """The loss, and everything that the forward pass showed; ordered, since jit sorts the names of a dict."""
    model = program.merge(parameters, rest)
    watch = Watch(model, program.paths(model), taps=taps, replay=replay, dropout=dropout)
    with watch.watching():
        result = program.run(program.forward, model, batch)
    found = {
        "activations": OrderedDict(watch.activations),
        "dropout": OrderedDict(watch.masks),
        "outputs": OrderedDict(flatten(result, (jax.Array, np.ndarray))),
        "rest": nnx.as_pure(nnx.split(model, nnx.Param, ...)[2]),
    }
    return program.loss_of(result, batch), found


def observe_gradients(
    parameters: Named, taps: Named, program: Program, rest: Any, batch: Named, replay: Named, dropout: Any
) -> dict[str, Any]:
    (value, found), (gradients, arriving) = jax.value_and_grad(observe, argnums=(0, 1), has_aux=True)(
        parameters, taps, program, rest, batch, replay, dropout
    )
    return {**found, "loss": value, "gradients": gradients, "activation_gradients": arriving}


def next_gradients(parameters: Named, program: Program, rest: Any, batch: Named, dropout: Any) -> Any:
    def loss_of(parameters: Named) -> tuple[Any, Any]:
        value, found = observe(parameters, {}, program, rest, batch, {}, dropout)
        return value, found["rest"]

    return jax.value_and_grad(loss_of, has_aux=True)(parameters)


class Traces:
    """The compiled functions of one recording. Functions of their own, since jit finds traces by the function."""

    def __init__(self) -> None:
        self.observe = jax.jit(lambda *args: observe(*args), static_argnums=2)
        self.observe_gradients = jax.jit(lambda *args: observe_gradients(*args), static_argnums=2)
        self.next_gradients = jax.jit(lambda *args: next_gradients(*args), static_argnums=1)


_shared_traces: contextvars.ContextVar[Traces | None] = contextvars.ContextVar("shared traces", default=None)


def current_traces() -> Traces:
    """The shared traces, if there are any, or new ones."""
    return _shared_traces.get() or Traces()


@contextlib.contextmanager
def shared_traces() -> Iterator[None]:
    """Recordings made while this is open trace and compile a structure once: for one model under many seeds.

    What a trace read from outside the arrays, such as a global variable or a patched function, it does not read again.
    """
    token = _shared_traces.set(Traces())
    try:
        yield
    finally:
        _shared_traces.reset(token)


def cast(value: Any, dtype: str) -> Any:
    return value.astype(dtype) if jnp.issubdtype(value.dtype, jnp.floating) else value
