"""Moving arrays between a foreign state and a model by a table of rules: strict both ways, all or nothing."""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flax_transformer.weights.rules import Rule, alias

Cast = Literal["exact", "round"]


@dataclasses.dataclass(frozen=True)
class Table:
    """How one foreign model corresponds to one of ours: its modules' names, and the rules for its tensors.

    ``modules`` maps a foreign module path to our attribute path, for whoever compares the two module by module.
    """

    modules: Mapping[str, str]
    rules: tuple[Rule, ...]


def find(model: nnx.Module, path: str) -> Any:
    """The attribute of ``model`` at a dotted path; numbers index lists."""
    node: Any = model
    for part in path.split("."):
        node = node[int(part)] if part.isdigit() else getattr(node, part)
    return node


def mark_aliases(model: nnx.Module, rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """``rules`` where each that would fill a variable a second time is an alias of the rule that filled it first.

    Which tensors a model shares is thereby read off the model itself: one table serves shared and independent layers.
    """
    first: dict[tuple[int, ...], str] = {}
    marked = []
    for rule in rules:
        variables = tuple(id(find(model, target)) for target in rule.targets)
        if variables in first and len(rule.sources) == 1:
            marked.append(alias(rule.sources[0], of=first[variables]))
        else:
            first.setdefault(variables, rule.sources[0])
            marked.append(rule)
    return tuple(marked)


def load(model: nnx.Module, state: Mapping[str, Any], rules: Sequence[Rule], *, cast: Cast) -> None:
    """Fill ``model`` from ``state``: every source key consumed once, every variable filled once, or nothing is loaded.

    Raises:
        ValueError: listing every problem: missing and unexpected keys, shapes, dtypes, aliases that hold other values,
            casts that would lose bits (unless ``cast="round"``), and variables that no rule fills.
    """
    if not isinstance(state, Mapping):
        raise ValueError(f"a state maps names to arrays, got {type(state).__name__}; pass module.state_dict()")
    problems: list[str] = []
    arrays = as_arrays(state, problems)
    expected = {source: rule for rule in rules for source in rule.sources}
    problems += [f"unexpected key {key} of shape {arrays[key].shape}" for key in arrays if key not in expected]
    filled: dict[int, tuple[nnx.Variable, np.ndarray]] = {}
    for rule in rules:
        missing = [source for source in rule.sources if source not in state]
        if missing:
            if not rule.optional:
                problems += [f"missing key {source} ({_wanted(model, rule, source)})" for source in missing]
        elif all(source in arrays for source in rule.sources):
            problems += _load_rule(model, rule, arrays, filled, cast)
    covered = {id(find(model, target)) for rule in rules for target in rule.targets}
    problems += [f"no rule fills {path}" for path, variable in variables(model) if id(variable) not in covered]
    loaded = [(variable, jnp.array(value)) for variable, value in filled.values()]
    if any(array.dtype != variable.dtype for variable, array in loaded):
        problems.append("float64 parameters need JAX's 64-bit mode; load inside `with jax.enable_x64(True):`")
    if problems:
        listing = "\n  ".join(problems)
        raise ValueError(
            f"the state does not fit the model; nothing was loaded. {len(problems)} problem(s):\n  {listing}"
        )
    for variable, array in loaded:
        variable[...] = array


def export(model: nnx.Module, rules: Sequence[Rule]) -> dict[str, np.ndarray]:
    """The foreign state that ``load`` would read back bit for bit. Optional buffers are left out."""
    state: dict[str, np.ndarray] = {}
    for rule in rules:
        if rule.alias_of is not None:
            state[rule.sources[0]] = state[rule.alias_of].copy()
        elif not rule.optional:
            values = [np.asarray(find(model, target)[...]) for target in rule.targets]
            for source, array in zip(rule.sources, rule.export(values), strict=True):
                state[source] = np.array(array, order="C")
    return state


def as_array(value: Any) -> np.ndarray:
    """``value`` (NumPy, JAX or PyTorch) as a NumPy array; PyTorch itself is not imported.

    Raises:
        ValueError: not an array, or one that NumPy cannot hold (sparse, without data).
    """
    torch = sys.modules.get("torch")  # whoever holds a tensor has imported it
    if torch is not None and isinstance(value, torch.Tensor):
        try:
            value = value.detach().cpu()
            # NumPy has no bfloat16 of its own, so PyTorch refuses to convert it; DLPack hands the bits over.
            return np.array(
                jax.dlpack.from_dlpack(value.contiguous()) if value.dtype == torch.bfloat16 else value.numpy()
            )
        except (TypeError, RuntimeError) as error:
            raise ValueError(f"a tensor that NumPy cannot hold ({error})") from error
    array = np.asarray(value)
    if array.dtype == object:
        raise ValueError(f"not an array but {type(value).__name__}")
    return array


def as_arrays(state: Mapping[str, Any], problems: list[str]) -> dict[str, np.ndarray]:
    """``state`` in NumPy, without the values that are no arrays: ``problems`` gets a sentence for each."""
    arrays = {}
    for key, value in state.items():
        try:
            arrays[key] = as_array(value)
        except ValueError as error:
            problems.append(f"{key} is {error}")
    return arrays


def _load_rule(
    model: nnx.Module,
    rule: Rule,
    arrays: Mapping[str, np.ndarray],
    filled: dict[int, tuple[nnx.Variable, np.ndarray]],
    cast: Cast,
) -> list[str]:
    """Check one rule whose sources are all there, add its values to ``filled``, and return its problems."""
    given = [arrays[source] for source in rule.sources]
    if rule.alias_of is not None:
        return _alias_problems(rule, given[0], arrays.get(rule.alias_of))
    variables = [find(model, target) for target in rule.targets]
    wanted = _foreign_shapes(model, rule)
    problems = [
        f"{source} has shape {array.shape}, expected {shape} ({rule})"
        for source, array, shape in zip(rule.sources, given, wanted, strict=True)
        if array.shape != shape
    ]
    if problems:
        return problems
    for target, variable, value in zip(rule.targets, variables, rule.load(given), strict=True):
        if id(variable) in filled:
            problems.append(f"{target} is filled twice ({rule})")
        if not jnp.issubdtype(value.dtype, jnp.floating):
            problems.append(f"{', '.join(rule.sources)} has dtype {value.dtype}, expected a floating one ({rule})")
            continue
        with np.errstate(over="ignore"):
            stored = value.astype(variable.dtype)
        if cast == "exact" and not np.array_equal(stored.astype(value.dtype), value, equal_nan=True):
            problems.append(
                f"{', '.join(rule.sources)} would lose bits from {value.dtype} to {variable.dtype}; build the model with "
                f"param_dtype={value.dtype.name!r}, or pass cast='round'"
            )
        filled[id(variable)] = (variable, stored)
    return problems


def _alias_problems(rule: Rule, array: np.ndarray, original: np.ndarray | None) -> list[str]:
    if original is None:
        return []  # the original's absence is reported by its own rule
    same = array.shape == original.shape and array.dtype == original.dtype and array.tobytes() == original.tobytes()
    if same:
        return []
    return [
        f"{rule.sources[0]} must equal {rule.alias_of}, since the model shares them, but they differ "
        f"({_difference(array, original)}); a model with sharing='none' keeps them apart"
    ]


def _difference(left: np.ndarray, right: np.ndarray) -> str:
    if left.shape != right.shape or left.dtype != right.dtype:
        return f"{left.dtype} {left.shape} against {right.dtype} {right.shape}"
    return f"{np.count_nonzero(left != right)} of {left.size} values"


def _foreign_shapes(model: nnx.Module, rule: Rule) -> list[tuple[int, ...]]:
    """The shapes that the rule's sources should have, from those of its targets."""
    hollow = [np.broadcast_to(np.float32(0), find(model, target).shape) for target in rule.targets]
    return [array.shape for array in rule.export(hollow)]


def _wanted(model: nnx.Module, rule: Rule, source: str) -> str:
    if rule.alias_of is not None:
        return str(rule)
    return f"shape {_foreign_shapes(model, rule)[rule.sources.index(source)]}, {rule}"


def variables(model: nnx.Module) -> list[tuple[str, nnx.Variable]]:
    """Every parameter and buffer once, by the first path that reaches it."""
    return [
        (".".join(map(str, path)), node)
        for path, node in nnx.iter_graph(model)
        if isinstance(node, nnx.Variable) and not isinstance(node, nnx.RngState)
    ]
