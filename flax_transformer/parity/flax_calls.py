"""Watching the calls of a Flax model: every submodule's output, and changing it on its way. Imports jax and flax."""

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import get_opaque_trace_state

from flax_transformer.parity.recording import Masks, activation_key, flatten, given_mask, require_all_used


class Watch:
    """The outputs of a module and its submodules, collected while ``watching`` is open, by wrapping their classes.

    Args:
        module: what is watched.
        paths: ``id`` of a module -> its canonical path.
        taps: numbers that are added to the output of that key; with zeros, their gradients are those of the outputs.
        replay: what stands in for the output of that key, after it was recorded.
        dropout: masks for ``nnx.Dropout``, by site or in order of execution; None: it draws its own.

    Attributes:
        activations: what left every module, tapped and not yet replayed, in the order in which the calls ended.
        masks: what ``nnx.Dropout`` kept, by site, in the order of drawing.
    """

    def __init__(
        self,
        module: nnx.Module,
        paths: Mapping[int, str],
        *,
        taps: Mapping[str, jax.Array] | None = None,
        replay: Mapping[str, Any] | None = None,
        dropout: Masks | None = None,
    ) -> None:
        self.activations: dict[str, jax.Array] = {}
        self.masks: dict[str, Any] = {}
        self._module, self._paths = module, paths
        self._taps, self._replay, self._dropout = taps or {}, replay or {}, dropout
        self._calls: Counter[str] = Counter()
        self._sites: Counter[str] = Counter()
        self._hidden: set[str] = set()
        self._trace: Any = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Wraps the calls of all classes of the module while the context is open.

        Raises:
            ValueError: a module was called where its output cannot be seen; all such modules are named. Or the masks of
                dropout are not those of the sites.
        """
        self._trace = get_opaque_trace_state()
        parts = nnx.iter_graph(self._module, graph=True)
        classes = {type(part) for _, part in parts if isinstance(part, nnx.Module)}
        # Found before any is replaced, since a class may inherit the call of another.
        originals = {cls: call for cls in classes if (call := _find_call(cls)) is not None}
        inherited = [cls for cls in originals if "__call__" not in vars(cls)]
        try:
            for cls, original in originals.items():
                cls.__call__ = self._wrapped(cls, original)
            yield
        finally:
            for cls, original in originals.items():
                if cls in inherited:
                    del cls.__call__
                else:
                    cls.__call__ = original
        if self._hidden:
            raise ValueError(
                "outputs of these modules cannot be seen, since they are called inside a jax transform of the model's own "
                f"(jit, scan, vmap, remat) or made during the call: {'; '.join(sorted(self._hidden))}; "
                "record the model without it"
            )
        require_all_used(self._dropout, len(self.masks))

    def _wrapped(self, cls: type, original: Any) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            bound = original.__get__(module, cls)
            drops = isinstance(module, nnx.Dropout) and id(module) in self._paths
            output = self._drop(module, bound, *args, **kwargs) if drops else bound(*args, **kwargs)
            if type(module) is cls:  # else a subclass came here by super(), and records the whole
                output = self._record(module, output)
            return output

        return call

    def _record(self, part: nnx.Module, output: Any) -> Any:
        path = self._paths.get(id(part))
        # Inside a transform the outputs are tracers that die with it, and nnx transforms work on copies of modules.
        if path is None or self._trace != get_opaque_trace_state():
            self._hidden.add(f"{path or '(unknown)'}: {type(part).__name__}")
            return output
        number = self._calls[path]
        self._calls[path] += 1
        changed = {}
        for suffix, array in flatten(output, (jax.Array, np.ndarray)):
            key = activation_key(path, number, suffix)
            tapped = array + self._taps[key] if key in self._taps else array
            self.activations[key] = tapped
            changed[id(array)] = _stand_in(tapped, self._replay[key]) if key in self._replay else tapped
        return _replaced(output, changed)

    def _drop(
        self,
        module: nnx.Dropout,
        bound: Callable[..., Any],
        x: jax.Array,
        *,
        deterministic: bool | None = None,
        **kwargs: Any,
    ) -> jax.Array:
        """``nnx.Dropout`` with the next mask of those given, or with its own, which is recorded."""
        choices = (choice for choice in (deterministic, module.deterministic) if choice is not None)
        if next(choices, False) or module.rate == 0:
            return x
        path = self._paths[id(module)]
        key = activation_key(path, self._sites[path])
        self._sites[path] += 1
        if self._dropout is None:
            # What it keeps depends on its key and the shape alone, so that ones show it.
            keep = bound(jnp.ones_like(x), deterministic=False, **kwargs) != 0
        else:
            keep = jnp.asarray(given_mask(self._dropout, key, len(self.masks), x.shape))
        self.masks[key] = keep
        return x * (keep.astype(x.dtype) / jnp.asarray(1 - module.rate, x.dtype))


@jax.custom_vjp
def _stand_in(array: jax.Array, other: jax.Array) -> jax.Array:
    """``other`` on the way forward, through which gradients pass as if it were ``array``."""
    del array
    return other


_stand_in.defvjp(lambda array, other: (other, None), lambda _, gradient: (gradient, None))


def _replaced(output: Any, changed: Mapping[int, Any]) -> Any:
    """``output`` with other arrays, by ``id``; its dicts keep their order, which ``jax.tree.map`` would sort."""
    if type(output) is dict:
        return {name: _replaced(value, changed) for name, value in output.items()}
    if type(output) in (tuple, list):
        return type(output)(_replaced(value, changed) for value in output)
    return jax.tree.map(lambda leaf: changed.get(id(leaf), leaf), output)


def walk(node: Any, path: str = "", above: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every module, variable and array under every name by which it can be reached, in order of assignment."""
    if isinstance(node, (nnx.Variable, jax.Array)):
        if not isinstance(node, nnx.RngState) and isinstance(value_of(node), (jax.Array, np.ndarray)):
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
        yield from walk(child, f"{path}.{name}" if path else str(name), (*above, id(node)))


def value_of(tensor: Any) -> Any:
    """The array of a variable, or the array itself."""
    return tensor.get_value() if isinstance(tensor, nnx.Variable) else tensor


def _find_call(cls: type) -> Any:
    # getattr would find the metaclass's own call in classes that have none.
    return next((vars(base)["__call__"] for base in cls.__mro__ if "__call__" in vars(base)), None)
