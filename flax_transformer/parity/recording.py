"""A recording: everything that one framework computed in one run, as arrays and names, in memory and on disk.

On disk a recording is a directory: one safetensors file a section, and ``recording.json``, written last, with the format's
version, the order of the names, the aliases, the provenance, and the size and SHA-256 of every file.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from safetensors.numpy import save_file

try:
    from ml_dtypes import bfloat16
except ModuleNotFoundError:  # where the recorder was copied to alone: there is no bfloat16 without it
    BFLOAT16 = None
else:
    BFLOAT16 = np.dtype(bfloat16)

Arrays = Mapping[str, np.ndarray]
Names = Mapping[str, tuple[str, ...]]
Masks = Mapping[str, np.ndarray] | Sequence[np.ndarray]

FORMAT = "flax_transformer.parity recording"
VERSION = 2
MANIFEST = "recording.json"
SECTIONS = (
    *(
        "inputs",
        "batches",
        "masks",
        "dropout",
        "parameters",
        "buffers",
        "activations",
        "outputs",
        "losses",
        "gradients",
    ),
    *("activation_gradients", "updates", "moments", "trained", "decoded"),
)

# safetensors.numpy 0.8.0 writes bfloat16 and cannot read it back, hence a table of our own.
DTYPES = {
    "BOOL": np.dtype(bool),
    **{f"{kind}{bits}": np.dtype(f"{kind.lower()}{bits // 8}") for kind in "IU" for bits in (8, 16, 32, 64)},
    **{f"F{bits}": np.dtype(f"f{bits // 8}") for bits in (16, 32, 64)},
    **({} if BFLOAT16 is None else {"BF16": BFLOAT16}),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recording:
    """One run of one model.

    A parameter, buffer or module that is reachable by several names appears once, under its *canonical* name.

    Attributes:
        dtype: name of the floating-point type that the run was made in.
        inputs: what the model was called with; positional inputs are named "0", "1", ...
        masks: boolean masks, True = may attend, that the caller built with the framework's own functions.
        parameters: trainable arrays by canonical name.
        buffers: every other array of the model's state: position tables, running statistics.
        activations: outputs of every submodule, in the order in which the calls ended, under ``activation_key``.
        outputs: the final result, flattened by ``flatten``; a bare array has the name "".
        batches: inputs of the training steps after the first, under "step/name"; step k takes batch k modulo their number.
        dropout: the masks that were applied, True = kept, by ``activation_key`` of the site, in the order of drawing.
        losses: "loss" -> the loss before each step, on its batch; one number where nothing was trained.
        gradients: of the first loss with respect to every parameter; a shared one has the sum over its uses.
        activation_gradients: of the first loss with respect to what left a submodule, under ``activation_key``, in the
            order of ``activations``.
        updates: what the first optimizer step adds to each parameter.
        moments: the optimizer's state after that step, "first/NAME", "second/NAME", "momentum/NAME".
        trained: parameters after the last step, where there were several.
        decoded: token ids of a decoding, by name.
        tensor_names: canonical name of every parameter and buffer -> all its names.
        module_names: canonical path of every module, called or not -> all its paths; the model itself is "".
        provenance: framework, versions, devices, threads, matmul precision, in words.
    """

    dtype: str
    inputs: Arrays
    masks: Arrays
    parameters: Arrays
    buffers: Arrays
    activations: Arrays
    outputs: Arrays
    tensor_names: Names
    module_names: Names
    provenance: Mapping[str, str]
    batches: Arrays = dataclasses.field(default_factory=dict)
    dropout: Arrays = dataclasses.field(default_factory=dict)
    losses: Arrays = dataclasses.field(default_factory=dict)
    gradients: Arrays = dataclasses.field(default_factory=dict)
    activation_gradients: Arrays = dataclasses.field(default_factory=dict)
    updates: Arrays = dataclasses.field(default_factory=dict)
    moments: Arrays = dataclasses.field(default_factory=dict)
    trained: Arrays = dataclasses.field(default_factory=dict)
    decoded: Arrays = dataclasses.field(default_factory=dict)

    @property
    def tensors(self) -> Arrays:
        """Parameters and buffers."""
        return {**self.parameters, **self.buffers}

    def save(self, path: str | Path) -> None:
        """Write the recording to the directory ``path``, replacing a recording that is there.

        Raises:
            ValueError: an array's dtype has no place in the format; all such arrays are named.
        """
        unsupported = [
            f"{section}/{name}: {array.dtype}"
            for section in SECTIONS
            for name, array in getattr(self, section).items()
            if array.dtype not in DTYPES.values()
        ]
        if unsupported:
            known = ", ".join(str(dtype) for dtype in DTYPES.values())
            raise ValueError(f"a recording holds {known}; got {'; '.join(unsupported)}; convert these before saving")
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        # An interrupted save must not look like a recording, so the manifest goes first and comes last.
        (folder / MANIFEST).unlink(missing_ok=True)
        sections = {}
        for section in SECTIONS:
            arrays: Arrays = getattr(self, section)
            file = folder / f"{section}.safetensors"
            # save_file 0.8.0 writes the memory of a non-contiguous array as if it were contiguous.
            save_file({name: np.array(array, order="C") for name, array in arrays.items()}, file)
            sections[section] = {"bytes": file.stat().st_size, "sha256": _sha256(file), "names": list(arrays)}
        content = {
            "format": FORMAT,
            "version": VERSION,
            "dtype": self.dtype,
            "sections": sections,
            "tensor_names": {name: list(names) for name, names in self.tensor_names.items()},
            "module_names": {name: list(names) for name, names in self.module_names.items()},
            "provenance": dict(self.provenance),
        }
        (folder / MANIFEST).write_text(
            json.dumps({**content, "sha256": _digest(content)}, indent=1, ensure_ascii=False), encoding="utf-8"
        )


def load(path: str | Path) -> Recording:
    """Read the recording in the directory ``path``, checking every byte of it.

    Raises:
        ValueError: ``path`` is no recording, or of another version, or any of its files is missing, truncated, changed or
            foreign; every offending file is named.
    """
    folder = Path(path)
    content = _read_manifest(folder)
    sections = content["sections"]
    problems = [problem for section in SECTIONS for problem in _file_problems(folder, section, sections[section])]
    foreign = sorted(file.name for file in folder.glob("*.safetensors") if file.stem not in SECTIONS)
    problems += [f"{name}: is not part of the recording" for name in foreign]
    arrays: dict[str, Arrays] = {}
    if not problems:
        for section in SECTIONS:
            try:
                stored = _read_arrays(folder / f"{section}.safetensors")
            except (safetensors.SafetensorError, KeyError) as error:  # KeyError: a dtype that is not in the table
                problems.append(f"{section}.safetensors: cannot be read ({error})")
                continue
            names = sections[section]["names"]
            if sorted(names) == sorted(stored):
                arrays[section] = {name: stored[name] for name in names}
            else:
                problems.append(f"{section}.safetensors: holds {sorted(stored)}, not {sorted(names)}")
    if problems:
        raise ValueError(f"the recording {folder} is damaged, record it again: " + "; ".join(problems))
    return Recording(
        dtype=content["dtype"],
        tensor_names={name: tuple(names) for name, names in content["tensor_names"].items()},
        module_names={name: tuple(names) for name, names in content["module_names"].items()},
        provenance=content["provenance"],
        **arrays,
    )


def _read_manifest(folder: Path) -> dict[str, Any]:
    file = folder / MANIFEST
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{folder} is no recording: {MANIFEST} cannot be read ({error.strerror})") from error
    except ValueError as error:  # covers JSONDecodeError and UnicodeDecodeError
        raise ValueError(f"the recording {folder} is damaged, record it again: {MANIFEST}: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{folder} is no recording: the format in {MANIFEST} must be {FORMAT!r}")
    if content.get("version") != VERSION:
        raise ValueError(
            f"the recording {folder} has version {content.get('version')!r} and this program reads {VERSION}; "
            "record it again with the same flax-transformer"
        )
    if content.pop("sha256", None) != _digest(content):
        raise ValueError(
            f"the recording {folder} is damaged, record it again: {MANIFEST}: changed since it was written"
        )
    if missing := _missing(content):
        raise ValueError(
            f"{folder} is no recording of this format: {MANIFEST} has no right {', no right '.join(missing)}"
        )
    return content


def _missing(content: Mapping[str, Any]) -> list[str]:
    """Entries of a manifest that are absent or of another kind: a foreign program may write an intact file."""

    def words(value: Any) -> bool:
        return isinstance(value, list) and all(isinstance(word, str) for word in value)

    def mapping(name: str, right: Callable[[Any], bool]) -> bool:
        return isinstance(content.get(name), dict) and all(map(right, content[name].values()))

    right = {
        "dtype": isinstance(content.get("dtype"), str),
        "tensor_names": mapping("tensor_names", words),
        "module_names": mapping("module_names", words),
        "provenance": mapping("provenance", lambda value: isinstance(value, str)),
        "sections": mapping("sections", lambda value: isinstance(value, dict))
        and {*SECTIONS} <= content["sections"].keys(),
    }
    if right["sections"]:
        kinds: dict[str, Callable[[Any], bool]] = {
            "bytes": lambda value: isinstance(value, int),
            "sha256": lambda value: isinstance(value, str),
            "names": words,
        }
        right |= {
            f"{kind} of {section}": fits(content["sections"][section].get(kind))
            for section in SECTIONS
            for kind, fits in kinds.items()
        }
    return [name for name, fits in right.items() if not fits]


def _file_problems(folder: Path, section: str, expected: Mapping[str, Any]) -> Iterator[str]:
    file = folder / f"{section}.safetensors"
    if not file.is_file():
        yield f"{file.name}: missing"
    elif file.stat().st_size != expected["bytes"]:
        yield f"{file.name}: has {file.stat().st_size} bytes, not {expected['bytes']}"
    elif _sha256(file) != expected["sha256"]:
        yield f"{file.name}: changed since it was written (SHA-256 differs)"


def _read_arrays(file: Path) -> dict[str, np.ndarray]:
    return {
        name: np.frombuffer(entry["data"], dtype=DTYPES[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in safetensors.deserialize(file.read_bytes())
    }


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def activation_key(path: str, call: int, suffix: str = "") -> str:
    """The name of one output: module path, "#", how often the module was called before, place in a nested output."""
    return f"{path}#{call}{suffix}"


def split_activation_key(key: str) -> tuple[str, int]:
    """The module path and the call number in an ``activation_key``."""
    path, _, rest = key.partition("#")
    return path, int(rest.partition("/")[0])


def pair_places(ours: Iterable[str], theirs: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The places in two nested outputs: by name where the names are the same, for a dict has no order, else in order."""
    ours, theirs = list(ours), list(theirs)
    return zip(ours, ours if set(ours) == set(theirs) else theirs, strict=False)


def names_of(parts: Iterable[tuple[str, Any]]) -> dict[str, tuple[str, ...]]:
    """Canonical name, the first -> every name of the same object."""
    groups: dict[int, list[str]] = {}
    for name, part in parts:
        groups.setdefault(id(part), []).append(name)
    return {names[0]: tuple(names) for names in groups.values()}


def given_mask(given: Masks, key: str, place: int, shape: tuple[int, ...]) -> np.ndarray:
    """The mask for the site ``key``, the ``place``-th that drops something: by its name, or in order; True = kept.

    Raises:
        ValueError: there is none, or one of another shape.
    """
    mask = given.get(key) if isinstance(given, Mapping) else (given[place] if place < len(given) else None)
    if mask is None or tuple(mask.shape) != shape:
        found = "none" if mask is None else f"one of shape {tuple(mask.shape)}"
        raise ValueError(f"dropout needs a mask of shape {shape} for the site {key}, got {found}")
    return np.asarray(mask) != 0


def require_all_used(given: Masks | None, sites: int) -> None:
    """Raise if there are more masks than sites that drop something."""
    if given is not None and sites != len(given):
        raise ValueError(f"dropout holds {len(given)} masks, and the model has {sites} sites")


def flatten(value: Any, leaf_type: type | tuple[type, ...], suffix: str = "") -> Iterator[tuple[str, Any]]:
    """The arrays of a nested output, each with its place ("" for a bare array, "/0", "/weights/1"); the rest is dropped."""
    if isinstance(value, leaf_type):
        yield suffix, value
        return
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        children = value.items()
    elif isinstance(value, (tuple, list)):
        children = enumerate(value)
    else:
        return
    for name, child in children:
        yield from flatten(child, leaf_type, f"{suffix}/{name}")


def as_inputs(inputs: Any, dtype: str) -> dict[str, np.ndarray]:
    """Arrays by name, floats cast to ``dtype``, so that both frameworks are fed the same numbers.

    Args:
        inputs: one array, a tuple or list of arrays, or a mapping of arrays.
        dtype: "float64", "float32", "float16" or "bfloat16".
    Raises:
        ValueError: ``dtype`` is another, or an entry is no array of booleans, integers or floats; all are named.
    """
    known = ("float64", "float32", "float16", *(() if BFLOAT16 is None else ("bfloat16",)))
    if dtype not in known:
        raise ValueError(f"the dtype of a recording must be one of {', '.join(known)}, got {dtype!r}")
    if isinstance(inputs, Mapping):
        named = {str(name): np.asarray(value) for name, value in inputs.items()}
    elif isinstance(inputs, (tuple, list)):
        named = {str(place): np.asarray(value) for place, value in enumerate(inputs)}
    else:
        named = {"0": np.asarray(inputs)}
    offenders = [f"{name}: {array.dtype}" for name, array in named.items() if array.dtype not in DTYPES.values()]
    if offenders or not named:
        raise ValueError(
            "inputs must be one or more arrays of booleans, integers or floats, got "
            f"{'; '.join(offenders) or 'none'}; other arguments go into a function given as `call`"
        )
    return {name: array.astype(dtype) if is_floating(array) else array for name, array in named.items()}


def as_batches(batches: Sequence[Any], inputs: Any, dtype: str) -> list[dict[str, np.ndarray]]:
    """Every batch as ``as_inputs``, with the names of ``inputs``.

    Raises:
        ValueError: a batch has other names than ``inputs``.
    """
    converted = [as_inputs(batch, dtype) for batch in batches]
    names = list(as_inputs(inputs, dtype))
    offenders = [f"batch {number}: {list(batch)}" for number, batch in enumerate(converted) if list(batch) != names]
    if offenders:
        raise ValueError(f"batches must have the names of the inputs, {names}, got {'; '.join(offenders)}")
    return converted


def name_batches(batches: Sequence[Arrays]) -> dict[str, np.ndarray]:
    """Batches under the names of a recording, "step/name"."""
    return {f"{number}/{name}": array for number, batch in enumerate(batches) for name, array in batch.items()}


def as_masks(masks: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Masks as booleans: document-style 0/1 floats say the same."""
    return {name: np.asarray(mask) != 0 for name, mask in masks.items()}


def is_floating(array: np.ndarray) -> bool:
    """Whether the dtype is a floating-point type, bfloat16 included (NumPy calls that a void type)."""
    return array.dtype in [DTYPES[name] for name in ("F64", "F32", "F16", "BF16") if name in DTYPES]
