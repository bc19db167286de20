"""The Flax side: with ``flax_calls`` the only file of this package that imports jax and flax."""

import platform
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flax_transformer.parity.flax_calls import Masks, Watch, value_of, walk
from flax_transformer.parity.recording import Recording, as_batches, as_inputs, as_masks, flatten, name_batches

Execution = Literal["eager", "jit"]
Mode = Literal["eval", "train"]
Named = dict[str, Any]

# optax's names of an optimizer's moments, in the words of a recording.
MOMENTS = {"mu": "first", "nu": "second", "trace": "momentum"}


def record_flax(
    module: nnx.Module,
    inputs: Any,
    *,
    dtype: str = "float64",
    mode: Mode = "eval",
    execution: Execution = "eager",
    call: Callable[..., Any] | None = None,
    masks: Mapping[str, Any] | None = None,
    dropout: Masks | None = None,
    replay: Mapping[str, np.ndarray] | None = None,
    loss: Callable[[Any, Any], Any] | None = None,
    optimizer: Any = None,
    steps: int = 1,
    batches: Sequence[Any] = (),
    decode: Callable[..., Any] | None = None,
) -> Recording:
    """Run a copy of ``module``, cast to ``dtype``, and record every submodule's output, and on request how it learns.

    The module itself is left as it is. Casting reaches variables only: a module that was told to compute in float32 does so
    in a float64 recording too, and the comparison says where.

    Args:
        module: any NNX module; its floating-point variables are cast to ``dtype`` in a copy.
        inputs: an array, a tuple of arrays (positional) or a mapping (by keyword); floats are cast to ``dtype``.
        dtype: "float64" (64-bit types are switched on for this run only), "float32", "float16" or "bfloat16".
        mode: "train" calls ``module.train()`` instead of ``module.eval()``; what ``nnx.Dropout`` keeps is then recorded.
        execution: operation by operation, or compiled as one program that returns every submodule's output too. Training
            steps after the first are compiled in any case.
        call: what to run, as ``call(module, *inputs)`` or ``call(module, **inputs)``; the default calls the module.
        masks: masks that were built with the candidate's own functions, to be compared on the rung of that name.
        dropout: masks that ``nnx.Dropout`` applies instead of drawing them (mode "train" only), as another recording's
            ``dropout``: by site, or a sequence in order of execution; True = kept. A model with dropout of another
            kind is given its masks by ``call``.
        replay: arrays that stand in for outputs after these were recorded, by ``activation_key`` (``parity.localise``).
        loss: ``loss(output, inputs)``, a scalar, of what ``call`` returns and the arrays that it was given. Its gradients
            are recorded.
        optimizer: an ``optax.GradientTransformation``, schedule and clipping included; it sees parameters as a flat
            ``dict`` by name. The first update is recorded, and the weights after the last.
        steps: how many optimizer steps to take.
        batches: inputs of the steps after the first, taken in turn; by default every step takes ``inputs``.
        decode: ``decode(module, *inputs)`` or ``decode(module, **inputs)``, token ids or a mapping of them.
    Raises:
        ValueError: an option has another value, or a submodule is called where its output cannot be seen: inside
            ``jax.jit``, ``scan``, ``vmap``, ``remat`` of the model's own; all are named.
    """
    _require_options(execution, mode, dropout, loss, optimizer, steps, batches)
    arrays = as_inputs(inputs, dtype)
    later = as_batches(batches, inputs, dtype)
    with jax.enable_x64(dtype == "float64"):
        program = _Program(module, dtype, mode, call, by_keyword=isinstance(inputs, Mapping))
        batch = {name: jnp.asarray(array) for name, array in arrays.items()}
        learn = _Learning(program, loss, dropout)
        first = learn.first_pass(program.start, program.rest, batch, replay or {}, execution)
        sections: dict[str, dict[str, np.ndarray]] = {}
        if loss is not None:
            rest = [{name: jnp.asarray(array) for name, array in other.items()} for other in later]
            sections = learn.train(first, optimizer, steps, [batch, *rest])
        if decode is not None:
            found = program.run(decode, program.merge(program.start, program.rest), batch)
            sections["decoded"] = {k: np.asarray(v) for k, v in flatten(found, (jax.Array, np.ndarray))}
        precision = program.effective_precision(batch)
        values = {name: np.asarray(_cast(value_of(program.tensors[name]), dtype)) for name in program.tensor_names}
    trained = {name for name in program.tensor_names if isinstance(program.tensors[name], nnx.Param)}
    return Recording(
        dtype=dtype,
        inputs=arrays,
        batches=name_batches(later),
        masks=as_masks(masks or {}),
        dropout={name: np.asarray(mask) for name, mask in first["masks"].items()},
        parameters={name: values[name] for name in program.tensor_names if name in trained},
        buffers={name: values[name] for name in program.tensor_names if name not in trained},
        activations=_arrays(first["activations"]),
        outputs=_arrays(first["outputs"]),
        tensor_names=program.tensor_names,
        module_names=program.module_names,
        provenance={
            "framework": "flax",
            "flax": flax.__version__,
            "jax": jax.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
            "device": jax.devices()[0].device_kind,
            "execution": execution,
            "matmul precision": precision,
        },
        **sections,
    )


class _Program:
    """A module as a function of its arrays, with the names of everything in it."""

    def __init__(
        self, module: nnx.Module, dtype: str, mode: Mode, call: Callable[..., Any] | None, *, by_keyword: bool
    ) -> None:
        self.mode, self.by_keyword = mode, by_keyword
        self.forward = call or (lambda model, *args, **kwargs: model(*args, **kwargs))
        parts = list(walk(module))
        self.module_names = _names((path, part) for path, part in parts if isinstance(part, nnx.Module))
        self.tensors = {path: part for path, part in parts if not isinstance(part, nnx.Module)}
        self.tensor_names = _names(self.tensors.items())
        self._module_aliases = {alias: path for path, aliases in self.module_names.items() for alias in aliases}
        aliases = {alias: path for path, names in self.tensor_names.items() for alias in names}
        self._graph, parameters, rest = nnx.split(module, nnx.Param, ...)
        leaves, self._parameters = jax.tree_util.tree_flatten_with_path(nnx.as_pure(parameters))
        # A state names a shared parameter by the first of its paths in the alphabet, a recording by the first assigned.
        self._order = [aliases[jax.tree_util.keystr(path, simple=True, separator=".")] for path, _ in leaves]
        named = dict(zip(self._order, (_cast(leaf, dtype) for _, leaf in leaves), strict=True))
        self.start: Named = {name: named[name] for name in self.tensor_names if name in named}
        self.rest = jax.tree.map(lambda value: _cast(value, dtype), nnx.as_pure(rest))

    def merge(self, parameters: Named, rest: Any) -> Any:
        """The module with these arrays, in its mode."""
        model = nnx.merge(self._graph, self._parameters.unflatten([parameters[name] for name in self._order]), rest)
        model.train() if self.mode == "train" else model.eval()
        return model

    def paths(self, model: nnx.Module) -> dict[int, str]:
        """``id`` of every module of a merged model -> its canonical path."""
        aliases = self._module_aliases
        return {id(part): aliases[path] for path, part in walk(model) if path in aliases}

    def rest_of(self, model: nnx.Module) -> Any:
        """What is no parameter, after a call may have changed it."""
        return nnx.as_pure(nnx.split(model, nnx.Param, ...)[2])

    def run(self, function: Callable[..., Any], model: Any, batch: Named) -> Any:
        return function(model, **batch) if self.by_keyword else function(model, *batch.values())

    def batch(self, batch: Named) -> Any:
        """What a loss is given."""
        return batch if self.by_keyword else tuple(batch.values())

    def effective_precision(self, batch: Named) -> str:
        """The precision of the forward pass's products as traced, and the device, in words."""

        def forward(parameters: Named, rest: Any, batch: Named) -> list[Any]:
            return jax.tree.leaves(self.run(self.forward, self.merge(parameters, rest), batch))

        counts = Counter(_products(jax.make_jaxpr(forward)(self.start, self.rest, batch).jaxpr))
        found = ", ".join(f"{precision} in {count} products" for precision, count in counts.items())
        return f"{found or 'no products'} on {jax.default_backend()}"


class _Learning:
    """The first pass of a program, recorded, with its gradients, and the training steps after it."""

    def __init__(self, program: _Program, loss: Callable[[Any, Any], Any] | None, dropout: Masks | None) -> None:
        self.program, self.loss, self.dropout = program, loss, dropout

    def first_pass(
        self, parameters: Named, rest: Any, batch: Named, replay: Mapping[str, np.ndarray], execution: Execution
    ) -> dict[str, Any]:
        """Every output of the first forward pass, and with a loss every gradient."""
        # A compiled function returns dicts in the order of their names; the order of execution leaves by the side.
        order: dict[str, list[str]] = {}

        def observed(parameters: Named, taps: Named, rest: Any, batch: Named) -> tuple[Any, dict[str, Any]]:
            model = self.program.merge(parameters, rest)
            paths = self.program.paths(model)
            watch = Watch(model, paths, taps=taps, replay=replay, dropout=self.dropout)
            with watch.watching():
                result = self.program.run(self.program.forward, model, batch)
            found = {
                "activations": watch.activations,
                "masks": watch.masks,
                "outputs": dict(flatten(result, (jax.Array, np.ndarray))),
            }
            order.update({kind: list(named) for kind, named in found.items()})
            value = jnp.zeros(()) if self.loss is None else _scalar(self.loss(result, self.program.batch(batch)))
            return value, {**found, "rest": self.program.rest_of(model)}

        def everything(parameters: Named, taps: Named, rest: Any, batch: Named) -> dict[str, Any]:
            if self.loss is None:
                return observed(parameters, taps, rest, batch)[1]
            (value, found), (gradients, arriving) = jax.value_and_grad(observed, argnums=(0, 1), has_aux=True)(
                parameters, taps, rest, batch
            )
            return {**found, "loss": value, "gradients": gradients, "arriving": arriving}

        taps: Named = {}
        if self.loss is not None:
            shapes = jax.eval_shape(observed, parameters, {}, rest, batch)[1]["activations"]
            floating = {key: leaf for key, leaf in shapes.items() if jnp.issubdtype(leaf.dtype, jnp.floating)}
            taps = {key: jnp.zeros(leaf.shape, leaf.dtype) for key, leaf in floating.items()}
        run = jax.jit(everything) if execution == "jit" else everything
        found = run(parameters, taps, rest, batch)
        return {**found, **{kind: {key: found[kind][key] for key in keys} for kind, keys in order.items()}}

    def train(self, first: dict[str, Any], optimizer: Any, steps: int, batches: list[Named]) -> dict[str, Named]:
        """The sections of what was learned."""
        program = self.program
        arriving = {key: first["arriving"][key] for key in first["activations"] if key in first["arriving"]}
        sections = {
            "losses": {"loss": np.asarray(first["loss"])[None]},
            "gradients": _arrays({name: first["gradients"][name] for name in program.start}),
            "activation_gradients": _arrays(arriving),
        }
        if optimizer is None:
            return sections

        def loss_of(parameters: Named, rest: Any, batch: Named) -> tuple[Any, Any]:
            model = program.merge(parameters, rest)
            with Watch(model, program.paths(model), dropout=self.dropout).watching():
                result = program.run(program.forward, model, batch)
            assert self.loss is not None
            return _scalar(self.loss(result, program.batch(batch))), program.rest_of(model)

        gradients_of = jax.jit(jax.value_and_grad(loss_of, has_aux=True))

        @jax.jit
        def apply(gradients: Named, state: Any, parameters: Named) -> tuple[Named, Named, Any]:
            # optax mixes integer counts and floats, which a strict promotion of the caller's would forbid.
            with jax.numpy_dtype_promotion("standard"):
                updates, state = optimizer.update(gradients, state, parameters)
            return updates, jax.tree.map(jnp.add, parameters, updates), state

        parameters, state, rest = program.start, optimizer.init(program.start), first["rest"]
        losses, gradients = [first["loss"]], first["gradients"]
        for number in range(steps):
            if number:
                (value, rest), gradients = gradients_of(parameters, rest, batches[number % len(batches)])
                losses.append(value)
            updates, parameters, state = apply(gradients, state, parameters)
            if number == 0:
                sections["updates"] = _arrays({name: updates[name] for name in program.start})
                sections["moments"] = dict(_moments(state, program.start))
        sections["losses"] = {"loss": np.asarray(jnp.stack(losses))}
        if steps > 1:
            sections["trained"] = _arrays({name: parameters[name] for name in program.start})
        return sections


def _require_options(
    execution: str, mode: str, dropout: object, loss: object, optimizer: object, steps: int, batches: Sequence[Any]
) -> None:
    problems = []
    if execution not in ("eager", "jit"):
        problems.append(f"execution must be 'eager' or 'jit', got {execution!r}")
    if mode not in ("eval", "train"):
        problems.append(f"mode must be 'eval' or 'train', got {mode!r}")
    if dropout is not None and mode != "train":
        problems.append("dropout masks are applied in mode='train' only")
    if optimizer is not None and loss is None:
        problems.append("an optimizer needs a loss")
    if optimizer is None and (len(batches) or steps != 1):
        problems.append("steps and batches need an optimizer")
    if steps < 1:
        problems.append(f"steps must be at least 1, got {steps}")
    if problems:
        raise ValueError("; ".join(problems))


def _scalar(value: Any) -> Any:
    if value.size != 1:
        raise ValueError(f"loss must return one number, got shape {value.shape}; take its mean or sum")
    return value.reshape(())


def _moments(state: Any, parameters: Named) -> Iterator[tuple[str, np.ndarray]]:
    """Moments anywhere in an optax state: a field of one of the known names that holds a leaf for a parameter."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        fields = [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)]
        kinds = [MOMENTS[field] for field in fields if field in MOMENTS]
        last = path[-1] if path else None
        if kinds and isinstance(last, jax.tree_util.DictKey) and last.key in parameters:
            yield f"{kinds[-1]}/{last.key}", np.asarray(leaf)


def _products(jaxpr: Any) -> Iterator[str]:
    """The precision of every matrix product and convolution in a program, inner programs included."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("dot_general", "conv_general_dilated"):
            precision = equation.params["precision"]
            precision = precision[0] if isinstance(precision, tuple) else precision
            yield "default precision" if precision is None else str(getattr(precision, "name", precision)).lower()
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if isinstance(inner, type(jaxpr)):
                    yield from _products(inner)


def _names(parts: Iterable[tuple[str, Any]]) -> dict[str, tuple[str, ...]]:
    """Canonical name, the first -> every name of the same object."""
    groups: dict[int, list[str]] = {}
    for path, part in parts:
        groups.setdefault(id(part), []).append(path)
    return {paths[0]: tuple(paths) for paths in groups.values()}


def _arrays(named: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.asarray(value) for name, value in named.items()}


def _cast(value: Any, dtype: str) -> Any:
    return value.astype(dtype) if jnp.issubdtype(value.dtype, jnp.floating) else value
