"""Which name of the reference means which name of the candidate: by rule, by name, by convention, by shape and order."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np

from flax_transformer.parity.layouts import LAYOUTS, Transform, as_transform, from_kernel, in_words, joins
from flax_transformer.parity.recording import Names, Recording, split_activation_key

How = Literal["rule", "name", "convention", "value", "shape and order", "parameters"]

# PyTorch's last name component -> Flax's.
CONVENTIONS = {"weight": ("kernel", "scale", "embedding"), "running_mean": ("mean",), "running_var": ("var",)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """How a candidate names and lays out what the reference has. A name that no rule claims still matches an equal name.

    Any name by which a shared parameter or module can be reached may be used, on both sides.

    Attributes:
        parameters: reference name of a parameter or buffer -> candidate name, several names (then ``transforms`` says how
            they make one array), or None: it has no counterpart, on purpose.
        modules: reference path -> candidate path, or None. The model itself is "".
        transforms: reference name or path -> the layout of the candidate's array, in words (``layouts``): "same" (default),
            "kernel" (Flax's kernels), "transpose 0 2 1", "kernel, concatenate 0"; or a function of the candidate's arrays
            that gives one in the reference's layout. For a path it applies to all outputs of that module; for "" to the
            final output too.
    """

    parameters: Mapping[str, str | tuple[str, ...] | None] = dataclasses.field(default_factory=dict)
    modules: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    transforms: Mapping[str, str | Transform] = dataclasses.field(default_factory=dict)

    def transform(self, names: Iterable[str], default: str = "same") -> Transform:
        """The transform of whatever has one of these names."""
        chosen = next((self.transforms[name] for name in names if name in self.transforms), default)
        return as_transform(chosen)


@dataclasses.dataclass(frozen=True)
class Match:
    """One reference name and the candidate names that it is compared with, all canonical; more than one means untied."""

    reference: str
    candidates: Sequence[tuple[str, ...]]
    how: How
    transform: Transform = LAYOUTS["same"]

    def __str__(self) -> str:
        names = " and ".join("+".join(name or "(model)" for name in group) for group in self.candidates)
        layout = f" ({in_words(self.transform)} layout)" if self.transform is not LAYOUTS["same"] else ""
        return f"{self.reference or '(model)'} = {names}{layout}, by {self.how}"


def require_known(rules: Rules, reference: Recording, candidate: Recording) -> None:
    """Raise unless every name in the rules exists, listing all that do not."""
    sides = {
        "parameter": (by_any_name(reference.tensor_names), by_any_name(candidate.tensor_names), rules.parameters),
        "module": (by_any_name(reference.module_names), by_any_name(candidate.module_names), rules.modules),
    }
    unknown = []
    for kind, (ours, theirs, mapping) in sides.items():
        unknown += [f"{kind} {name!r} of the reference" for name in mapping if name not in ours]
        unknown += [f"{kind} {name!r} of the candidate" for name in _targets(mapping.values()) if name not in theirs]
    references = sides["parameter"][0].keys() | sides["module"][0].keys()
    unknown += [f"{name!r} of the reference (a transform)" for name in rules.transforms if name not in references]
    for layout in sorted({value for value in rules.transforms.values() if isinstance(value, str)}):
        try:
            as_transform(layout)
        except ValueError as error:
            unknown.append(str(error))
    unknown += [
        f"function in transforms that makes one array of {target} for {name!r}, or layout with concatenate or stack"
        for name, target in rules.parameters.items()
        if isinstance(target, tuple) and len(target) != 1 and not joins(rules.transforms.get(name, "same"))
    ]
    if unknown:
        raise ValueError("rules must name what the recordings hold; there is no " + ", no ".join(unknown))


def require_fitting(tensors: Sequence[Match], modules: Sequence[Match], candidate: Recording) -> None:
    """Raise unless every layout can be applied to the candidate's arrays, listing all that cannot."""
    arrays = [(match, [candidate.tensors[n] for n in group]) for match in tensors for group in match.candidates]
    answers = {other: match for match in modules for (other,) in match.candidates}
    for key, array in candidate.activations.items():
        if match := answers.get(split_activation_key(key)[0]):
            arrays.append((match, [array]))
    problems: dict[str, None] = {}
    for match, group in arrays:
        try:
            match.transform(*group)
        except ValueError as error:
            problems[f"{match.reference or '(model)'}: {error}"] = None
    if problems:
        raise ValueError("layouts in rules must fit the candidate's arrays; " + "; ".join(problems))


def by_any_name(names: Names) -> dict[str, str]:
    """Every name -> the canonical one."""
    return {alias: name for name, aliases in names.items() for alias in aliases}


def match_tensors(reference: Recording, candidate: Recording, rules: Rules | None) -> list[Match]:
    """Counterparts of parameters and buffers, in the reference's order. Guessing is for comparisons without rules."""
    theirs = by_any_name(candidate.tensor_names)
    matches = _match_by_names(reference.tensor_names, theirs, (rules or Rules()).parameters, rules or Rules())
    if rules is None:
        for name in reference.tensor_names.keys() - matches.keys():
            if found := _by_convention(name, reference, candidate, theirs):
                matches[name] = found
        _guess(matches, reference, candidate)
    return [matches[name] for name in reference.tensor_names if name in matches]


def match_modules(reference: Recording, candidate: Recording, rules: Rules | None, tensors: list[Match]) -> list[Match]:
    """Counterparts of modules, in the reference's order; without rules also those made of the same parameters."""
    theirs = by_any_name(candidate.module_names)
    matches = _match_by_names(reference.module_names, theirs, (rules or Rules()).modules, rules or Rules())
    if rules is None:
        taken = {name for match in matches.values() for group in match.candidates for name in group}
        counterparts = {match.reference: {n for group in match.candidates for n in group} for match in tensors}
        ours = _by_parameters(reference, counterparts, without=matches.keys())
        alike = _by_parameters(candidate, {name: {name} for name in candidate.parameters}, without=taken)
        for parameters, paths in ours.items():
            # A chain of wrappers around the same parameters: paired from the inside if it is equally long.
            if len(paths) == len(alike.get(parameters, ())):
                found = zip(paths, alike[parameters], strict=True)
                matches.update({path: Match(path, ((other,),), "parameters") for path, other in found})
    return [matches[path] for path in reference.module_names if path in matches]


def _by_parameters(
    recording: Recording, counterparts: Mapping[str, set[str]], without: Iterable[str]
) -> dict[frozenset[str], list[str]]:
    """Sets of the candidate's parameters -> the called modules that hold just these, in order of execution."""
    groups: dict[frozenset[str], list[str]] = {}
    for path in execution_order(recording):
        prefixes = tuple(f"{name}." if name else "" for name in recording.module_names[path])
        held = [n for n in recording.parameters if any(a.startswith(prefixes) for a in recording.tensor_names[n])]
        parameters = frozenset().union(*(counterparts.get(name, {name}) for name in held))
        if parameters and path not in without:
            groups.setdefault(parameters, []).append(path)
    return groups


def exempt(names: Iterable[str], mapping: Mapping[str, object]) -> bool:
    """Whether a rule says that whatever has one of these names has no counterpart."""
    return any(name in mapping and mapping[name] is None for name in names)


def owner(tensor_name: str, modules: Mapping[str, str]) -> str:
    """The canonical path of the module that holds a parameter or buffer, perhaps in a plain list of its own."""
    path = tensor_name.rpartition(".")[0]
    while path not in modules:
        path = path.rpartition(".")[0]
    return modules[path]


def execution_order(recording: Recording) -> dict[str, int]:
    """Module path -> when its first call ended."""
    order: dict[str, int] = {}
    for key in recording.activations:
        order.setdefault(split_activation_key(key)[0], len(order))
    return order


def _targets(values: Iterable[str | tuple[str, ...] | None]) -> Iterator[str]:
    for value in values:
        if value is not None:
            yield from (value,) if isinstance(value, str) else value


def _match_by_names(
    ours: Names, theirs: Mapping[str, str], mapping: Mapping[str, str | tuple[str, ...] | None], rules: Rules
) -> dict[str, Match]:
    claimed = set(_targets(mapping.values()))
    matches = {}
    for canonical, names in ours.items():
        ruled = [tuple(theirs[name] for name in _targets([mapping[name]])) for name in names if name in mapping]
        named = [(theirs[n],) for n in names if n not in mapping and n in theirs and n not in claimed]
        groups = tuple(dict.fromkeys(group for group in ruled + named if group))
        if groups and not exempt(names, mapping):
            how = "rule" if ruled else "name"
            matches[canonical] = Match(canonical, groups, how, rules.transform(names))
    return matches


def _by_convention(
    canonical: str, reference: Recording, candidate: Recording, theirs: Mapping[str, str]
) -> Match | None:
    groups: dict[tuple[str, ...], None] = {}
    for name in reference.tensor_names[canonical]:
        path, dot, leaf = name.rpartition(".")
        found = (path + dot + other for other in CONVENTIONS.get(leaf, ()))
        groups.update({(theirs[other],): None for other in found if other in theirs})
    if not groups:
        return None
    first = next(iter(groups))[0]
    shapes = ((layout(candidate.tensors[first]).shape, layout) for layout in _layouts(first))
    fitting = (layout for shape, layout in shapes if shape == reference.tensors[canonical].shape)
    return Match(canonical, tuple(groups), "convention", next(fitting, _layouts(first)[0]))


def _guess(matches: dict[str, Match], reference: Recording, candidate: Recording) -> None:
    """Pair what is left: first where a layout makes the values equal, then by shape, both in order of execution."""
    ours, theirs = reference.tensors, candidate.tensors
    taken = {name for match in matches.values() for group in match.candidates for name in group}
    free = [name for name in _in_order(candidate) if name not in taken]
    for how in ("value", "shape and order"):
        for name in [name for name in _in_order(reference) if name not in matches]:
            fits = np.array_equal if how == "value" else _same_shape
            found = next(
                (
                    Match(name, ((other,),), how, transform)
                    for other in free
                    for transform in _layouts(other)
                    if fits(transform(theirs[other]), ours[name])
                ),
                None,
            )
            if found is not None:
                matches[name] = found
                free.remove(found.candidates[0][0])


def _layouts(name: str) -> list[Transform]:
    """The layouts to try, the likeliest first; for a square matrix every one fits, so that the name decides."""
    layouts = [LAYOUTS["same"], from_kernel]
    return layouts[::-1] if name.rpartition(".")[2] == "kernel" else layouts


def _same_shape(array: np.ndarray, other: np.ndarray) -> bool:
    return array.shape == other.shape


def _in_order(recording: Recording) -> list[str]:
    order, modules = execution_order(recording), by_any_name(recording.module_names)
    return sorted(recording.tensor_names, key=lambda name: order.get(owner(name, modules), len(order)))
