"""The Flax side of a recording."""

import platform
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flax_transformer.parity.flax_calls import value_of, walk
from flax_transformer.parity.flax_program import (
    Mode,
    Named,
    Program,
    Traces,
    cast,
    current_traces,
    observe,
    observe_gradients,
    split,
)
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

Execution = Literal["eager", "jit"]

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

    The module itself is left as it is. Casting reaches variables, and layers whose ``dtype`` is that of their parameters, as
    ``nnx.Embed`` is built; a module that was told otherwise to compute in float32 does so in a float64 recording too, and
    the comparison says where.

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
    given = dropout if dropout is None or isinstance(dropout, Mapping) else list(dropout)
    parts = list(walk(module))
    module_names = names_of((path, part) for path, part in parts if isinstance(part, nnx.Module))
    tensors = {path: part for path, part in parts if not isinstance(part, nnx.Module)}
    tensor_names = names_of(tensors.items())
    traces = current_traces()
    with jax.enable_x64(dtype == "float64"):
        values = {name: np.asarray(cast(value_of(tensors[name]), dtype)) for name in tensor_names}
        program, parameters, rest = split(
            module,
            dtype,
            module_names,
            tensor_names,
            mode=mode,
            call=call,
            loss=loss,
            by_keyword=isinstance(inputs, Mapping),
        )
        data = [{name: jnp.asarray(array) for name, array in batch.items()} for batch in (arrays, *later)]
        first = _first_pass(traces, program, parameters, rest, data[0], dict(replay or {}), given, execution)
        sections = {name: _arrays(first[name]) for name in ("dropout", "activations", "outputs")}
        if loss is not None:
            sections |= {name: _arrays(first[name]) for name in ("gradients", "activation_gradients")}
            sections["losses"] = {"loss": np.asarray(first["loss"])[None]}
        if optimizer is not None:
            sections |= _train(traces, program, parameters, first, optimizer, steps, data, given)
        if decode is not None:
            found = program.run(decode, program.merge(parameters, rest), data[0])
            sections["decoded"] = _arrays(dict(flatten(found, (jax.Array, np.ndarray))))
        precision = _effective_precision(traces, program, parameters, rest, data[0], given)
    trained = {name for name in tensor_names if isinstance(tensors[name], nnx.Param)}
    return Recording(
        dtype=dtype,
        inputs=arrays,
        batches=name_batches(later),
        masks=as_masks(masks or {}),
        parameters={name: values[name] for name in tensor_names if name in trained},
        buffers={name: values[name] for name in tensor_names if name not in trained},
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
            "matmul precision": precision,
        },
        **sections,
    )


def live_flax(
    module: nnx.Module, *, dtype: str = "float64", call: Callable[..., Any] | None = None, by_keyword: bool = False
) -> Callable[..., Any]:
    """A copy of ``module`` in eval mode as a function of arrays that also tells gradients, for ``parity.search``.

    Args:
        dtype, call: as for ``record_flax``.
        by_keyword: whether inputs are passed by name.
    """
    forward = call or (lambda model, *args, **kwargs: model(*args, **kwargs))
    graph, state = nnx.split(module)

    def outputs_of(changed: Named, fixed: Named, state: Any, names: tuple[str, ...]) -> dict[str, Any]:
        model = nnx.merge(graph, state)
        model.eval()
        inputs = {name: (changed | fixed)[name] for name in names}
        result = forward(model, **inputs) if by_keyword else forward(model, *inputs.values())
        return OrderedDict(flatten(result, (jax.Array, np.ndarray)))  # jit sorts the names of a dict

    def gradients_of(changed: Named, fixed: Named, state: Any, names: tuple[str, ...], gradients: Named) -> Named:
        return jax.vjp(lambda changed: outputs_of(changed, fixed, state, names), changed)[1](gradients)[0]

    compiled_outputs = jax.jit(outputs_of, static_argnums=3)
    compiled_gradients = jax.jit(gradients_of, static_argnums=3)

    def live(inputs: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], Callable[..., dict[str, np.ndarray]]]:
        with jax.enable_x64(dtype == "float64"):
            cast_state = jax.tree.map(lambda value: cast(value, dtype), state)
            arrays = {name: jnp.asarray(array) for name, array in inputs.items()}
            changed = {name: array for name, array in arrays.items() if jnp.issubdtype(array.dtype, jnp.floating)}
            arguments = changed, {n: a for n, a in arrays.items() if n not in changed}, cast_state, tuple(arrays)
            outputs = compiled_outputs(*arguments)

        def pullback(gradients: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
            with jax.enable_x64(dtype == "float64"):
                wanted = OrderedDict((name, jnp.asarray(gradients[name], outputs[name].dtype)) for name in outputs)
                return _arrays(compiled_gradients(*arguments, wanted))

        return _arrays(outputs), pullback

    return live


def _first_pass(
    traces: Traces,
    program: Program,
    parameters: Named,
    rest: Any,
    batch: Named,
    replay: Named,
    dropout: Any,
    execution: Execution,
) -> dict[str, Any]:
    """Every output of the first forward pass, and with a loss every gradient."""
    if program.loss is None:
        run = traces.observe if execution == "jit" else observe
        return run(parameters, {}, program, rest, batch, replay, dropout)[1]
    shapes = traces.observe.eval_shape(parameters, {}, program, rest, batch, replay, dropout)[1]["activations"]
    floating = {key: leaf for key, leaf in shapes.items() if jnp.issubdtype(leaf.dtype, jnp.floating)}
    taps = {key: jnp.zeros(leaf.shape, leaf.dtype) for key, leaf in floating.items()}
    run = traces.observe_gradients if execution == "jit" else observe_gradients
    found = run(parameters, taps, program, rest, batch, replay, dropout)
    found["gradients"] = {name: found["gradients"][name] for name in parameters}
    found["activation_gradients"] = {key: found["activation_gradients"][key] for key in floating}
    return found


def _train(
    traces: Traces,
    program: Program,
    parameters: Named,
    first: dict[str, Any],
    optimizer: Any,
    steps: int,
    batches: list[Named],
    dropout: Any,
) -> dict[str, Named]:
    """The sections of a training run, whose first loss and gradients are there already."""

    @jax.jit
    def apply(gradients: Named, state: Any, parameters: Named) -> tuple[Named, Named, Any]:
        # optax mixes integer counts and floats, which a strict promotion of the caller's would forbid.
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimizer.update(gradients, state, parameters)
        return updates, jax.tree.map(jnp.add, parameters, updates), state

    names = list(parameters)
    state, rest, gradients, losses = optimizer.init(parameters), first["rest"], first["gradients"], [first["loss"]]
    sections: dict[str, Named] = {}
    for number in range(steps):
        if number:
            (value, rest), gradients = traces.next_gradients(
                parameters, program, rest, batches[number % len(batches)], dropout
            )
            losses.append(value)
        updates, parameters, state = apply(gradients, state, parameters)
        if number == 0:
            sections["updates"] = _arrays({name: updates[name] for name in names})
            sections["moments"] = dict(_moments(state, parameters))
    sections["losses"] = {"loss": np.asarray(jnp.stack(losses))}
    if steps > 1:
        sections["trained"] = _arrays({name: parameters[name] for name in names})
    return sections


def _effective_precision(
    traces: Traces, program: Program, parameters: Named, rest: Any, batch: Named, dropout: Any
) -> str:
    """The precision of the forward pass's products as traced, and the device, in words."""
    jaxpr = traces.observe.trace(parameters, {}, program, rest, batch, {}, dropout).jaxpr
    counts = Counter(_products(jaxpr.jaxpr))
    found = ", ".join(f"{precision} in {count} products" for precision, count in counts.items())
    return f"{found or 'no products'} on {jax.default_backend()}"


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


def _moments(state: Any, parameters: Named) -> Iterator[tuple[str, np.ndarray]]:
    """Moments anywhere in an optax state: a field of one of the known names that holds a leaf for a parameter."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        fields = [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)]
        kinds = [MOMENTS[field] for field in fields if field in MOMENTS]
        names = [key.key for key in path[-1:] if isinstance(key, jax.tree_util.DictKey) and key.key in parameters]
        if kinds and names:
            yield f"{kinds[-1]}/{names[0]}", np.asarray(leaf)


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


def _arrays(named: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.asarray(value) for name, value in named.items()}
