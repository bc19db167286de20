"""Rules as a file that a person writes: TOML, whose three tables are the fields of ``Rules``."""

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flax_transformer.parity.layouts import as_transform
from flax_transformer.parity.matching import Rules

TABLES = ("parameters", "modules", "transforms")


def load_rules(path: str | Path) -> Rules:
    """Read rules from a TOML file::

        [parameters]                    # the reference's name = the candidate's
        "head.weight" = "head.kernel"
        "attention.in_proj_weight" = ["query.kernel", "key.kernel", "value.kernel"]
        "position.scale" = []           # no counterpart, on purpose

        [modules]                       # the reference's path = the candidate's; "" is the model itself
        "encoder.0" = "blocks.0"

        [transforms]                    # the reference's name or path = the layout of the candidate's array
        "head.weight" = "kernel"
        "attention.in_proj_weight" = "kernel, concatenate 0"

    Without quotation marks TOML reads ``head.weight`` as a table in a table, which means the same here.

    Raises:
        ValueError: the file cannot be read as TOML, or holds other tables, names or layouts; every such entry is named.
    """
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"the rules {path} cannot be read ({error.strerror})") from error
    except ValueError as error:  # covers TOMLDecodeError and UnicodeDecodeError
        raise ValueError(f"the rules {path} are no TOML in UTF-8: {error}") from error
    problems = [f"{name}: is none of the tables {', '.join(TABLES)}" for name in content if name not in TABLES]
    problems += [f"{name}: must be a table, [{name}]" for name in TABLES if not isinstance(content.get(name, {}), dict)]
    found: dict[str, dict[str, Any]] = {name: {} for name in TABLES}
    for table in TABLES:
        entries = content.get(table, {})
        for name, value in _flat(entries) if isinstance(entries, dict) else ():
            if name in found[table]:
                problems.append(f"{table}: {name!r} is there twice, with and without quotation marks")
            elif problem := _problem(table, value):
                problems.append(f"{table}: {name!r} = {value!r} {problem}")
            else:
                found[table][name] = _value(value)
    if problems:
        raise ValueError(f"the rules {path} are not right; " + "; ".join(problems))
    return Rules(**found)


def _flat(entries: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in entries.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _problem(table: str, value: Any) -> str:
    if table == "transforms":
        if not isinstance(value, str):
            return "must be the words of a layout"
        try:
            as_transform(value)
        except ValueError as error:
            return f"is no {error}"
        return ""
    names = value if isinstance(value, list) else [value]
    if not all(isinstance(name, str) for name in names):
        return "must be a name, or [] for none"
    if table == "modules" and len(names) > 1:
        return "must be one path, or [] for none"
    return ""


def _value(value: str | list[str]) -> str | tuple[str, ...] | None:
    """What ``Rules`` has for it: no name is None, and one name in a list is that name."""
    if isinstance(value, str):
        return value
    return (tuple(value) if len(value) > 1 else value[0]) if value else None
