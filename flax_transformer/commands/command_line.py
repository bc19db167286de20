"""The command line of `train.py`: what it says of itself, and from its words to options."""

import argparse
import dataclasses
import difflib
import inspect
import shutil
import textwrap
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import tyro

from flax_transformer.checkpoint import RunDirectory
from flax_transformer.commands import runs
from flax_transformer.commands.train_options import COMMANDS, Options, as_arguments

HELP = """Train a Transformer in JAX/Flax.

usage: python train.py [decoder-only | encoder-decoder] [OPTIONS]

  python train.py                                 a small GPT on a built-in English text, in minutes
  python train.py decoder-only --data my.txt      the same on your own text
  python train.py encoder-decoder                 a small translator, from the King James Version to
                                                  modern English (needs the extra `data`)
  python train.py encoder-decoder --pairs my.tsv  the same on your own pairs

  python train.py decoder-only --help
  python train.py encoder-decoder --help          every option

Without the name of a model decoder-only is meant, and its options can follow at once:
python train.py --steps 50

At the end the loss on data that were held out stands beside the unigram baseline: what knowing how
often each token occurs, and nothing else, would give. A model that has learned anything about the
order of words is below it.

Everything about a run is kept in one directory, its --output: the resolved settings, metrics,
checkpoints, pictures and what the trained model wrote. A run that was stopped or killed goes on
with --resume as if nothing had happened.

--plan v5e:2x4 trains nothing: it compiles the step for TPUs that are not here and says whether it
fits, and how long a step takes at least (exit status 0 if it fits, 1 if not).

Exit status: 0 when the run is complete; 1 when its directory can no longer be written, memory does
not suffice, or its processes hold different states; 2 for a mistake in what was asked for; 3 when
the loss or the gradient was not finite in --max-bad-steps steps in a row; 130 after Ctrl-C and 143
after SIGTERM. With 3, 130 and 143 the last finished step is saved.
"""


def parse(arguments: Sequence[str]) -> Options:
    """The options of a command line, whose defaults are those of --config, and of a run to resume.

    Raises:
        ValueError: a command, an option or a value that there is not.
        SystemExit: help was asked for and has been printed.
    """
    arguments = list(arguments)
    if arguments[:1] in (["-h"], ["--help"]):
        print(HELP, end="")
        raise SystemExit(0)
    if not arguments or arguments[0].startswith("-"):
        arguments.insert(0, "decoder-only")
    name, *rest = arguments
    if name not in COMMANDS:
        raise ValueError(f"there is no command {name!r}; {_nearest(name, list(COMMANDS))}train.py --help shows all")
    _check(rest, COMMANDS[name], command=name)

    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in ("--config", "--output"):
        early.add_argument(option, nargs="?", type=Path)
    early.add_argument("--resume", action="store_true")
    known, _ = early.parse_known_args(rest)
    sources = [known.config] if known.config else []
    if known.resume and known.output and (saved := RunDirectory(known.output).config).exists():
        sources.insert(0, saved)
    defaults = [text for path in sources for text in as_arguments(runs.options_of(path, command=name))]
    _check(defaults, COMMANDS[name], command=name)
    if "-h" in rest or "--help" in rest:  # tyro would make one line of every paragraph
        print(_wrapped(inspect.getdoc(COMMANDS[name]) or ""), end="\n\n")
    return tyro.cli(
        COMMANDS[name],
        prog=f"python train.py {name}",
        description="",
        args=[*defaults, *rest],
        config=(tyro.conf.FlagCreatePairsOff,),
    )


def _wrapped(text: str) -> str:
    """Paragraphs in lines that fit the terminal."""
    width = min(shutil.get_terminal_size().columns, 100)
    return "\n\n".join(textwrap.fill(" ".join(part.split()), width) for part in text.split("\n\n"))


def _check(arguments: Sequence[str], options: type, *, command: str) -> None:
    """Raises ValueError for the first word that is no option, or no value of its option."""
    kinds = _kinds(options)
    see = f"train.py {command} --help shows all"
    words = iter(arguments)
    for word in words:
        if word in ("-h", "--help"):
            return
        option, equals, value = word.partition("=")
        kind = kinds.get(option.replace("_", "-"))
        if kind is None:
            if not word.startswith("-"):
                raise ValueError(f"{word!r} follows no option that takes a value; {see}")
            raise ValueError(f"there is no option {option}; {_nearest(option, list(kinds))}{see}")
        if kind == [bool]:
            if equals:
                raise ValueError(f"{option} takes no value, got {value!r}; give it alone or leave it out")
            continue
        if not equals:
            value = next(words, None)
            if value is None or value.startswith("--"):
                raise ValueError(f"{option} must be followed by {_in_words(kind)}, got {value or 'nothing'}")
        if not any(_is(value, part) for part in kind):
            raise ValueError(f"{option} must be {_in_words(kind)}, got {value!r}{_maybe(value, kind)}")


def _kinds(options: type) -> dict[str, list[Any]]:
    """By the name of every option, whatever group it stands in, what its value may be."""
    kinds: dict[str, list[Any]] = {}
    for name, hint in typing.get_type_hints(options).items():
        if dataclasses.is_dataclass(hint):
            kinds |= _kinds(typing.cast(type, hint))
        else:
            kinds["--" + name.replace("_", "-")] = _parts(hint)
    return kinds


def _parts(hint: Any) -> list[Any]:
    return [part for piece in typing.get_args(hint) for part in _parts(piece)] if _is_union(hint) else [hint]


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) not in (None, Literal)


def _is(value: str, kind: Any) -> bool:
    if kind is type(None):
        return value == "None"
    if typing.get_origin(kind) is Literal:
        return value in typing.get_args(kind)
    try:
        kind(value)
    except ValueError:
        return False
    return True


_WORDS = {int: "a whole number", float: "a number", str: "a text", Path: "a path"}


def _choices(kind: list[Any]) -> list[str]:
    return [choice for part in kind for choice in typing.get_args(part)]


def _in_words(kind: list[Any]) -> str:
    choices = _choices(kind)
    return f"one of {', '.join(choices)}" if choices else _WORDS[kind[0]]


def _maybe(value: str, kind: list[Any]) -> str:
    near = difflib.get_close_matches(value, _choices(kind), n=1)
    return f"; perhaps {near[0]}?" if near else ""


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name.replace("_", "-"), known, n=1)
    return f"perhaps {near[0]}? " if near else ""
