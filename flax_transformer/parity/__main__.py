"""Compare two recordings, or see what is in one, from the command line.

python -m flax_transformer.parity compare recordings/torch recordings/flax --report report.html
python -m flax_transformer.parity show recordings/torch
python -m flax_transformer.parity recorder torch_recorder.py
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.text import Text

from flax_transformer import parity
from flax_transformer.parity.recording import SECTIONS, Arrays
from flax_transformer.parity.standalone import recorder_source


def _option(metavar: str) -> Any:
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="(default: none)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compare:
    """Climb the ladder of parity with two recordings of one run.

    Prints a line for each rung, what failed on it and where to look first. The exit status is 0 if all rungs hold, 1 if they
    diverge, and 2 if the recordings cannot be compared: then one message says all that is in the way. Where nothing
    was compared the status is never 0.
    """

    reference: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="REFERENCE")]
    """Directory of the recording that is right by definition."""
    candidate: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="CANDIDATE")]
    """Directory of the recording that is to compute the same."""
    rules: Annotated[Path | None, _option("FILE.toml")] = None
    """How the candidate names and lays out what the reference has. Without it, names match by equality, by Flax's
    conventions, by value, by shape and order; with it nothing is guessed."""
    truth: Annotated[Path | None, _option("DIR")] = None
    """The reference's recording in float64 of the same numbers: the yardstick for recordings in float32."""
    envelope: Annotated[tuple[Path, ...], _option("DIR ...")] = ()
    """More float32 recordings of the reference, which only sum in another order: the yardstick for training runs."""
    report: Annotated[Path | None, _option("FILE.html")] = None
    """Write the verdict as one page for a browser, which needs no network."""
    json: Annotated[Path | None, _option("FILE.json")] = None
    """Write the verdict as JSON."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Show:
    """Say what is in a recording: how it was made, its sections, its modules."""

    recording: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RECORDING")]
    """Directory of the recording."""
    modules: Annotated[int, tyro.conf.arg(metavar="N")] = 20
    """How many modules to list."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recorder:
    """Write the PyTorch recorder as one file, which needs torch, numpy and safetensors alone.

    For a repository that has neither JAX nor this library: record there, compare here.
    """

    file: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE.py")]
    """Where to write it; a file that is there is not replaced."""


def compare(options: Compare) -> int:
    """Compares, prints and writes; the exit status.

    Raises:
        ValueError: the recordings cannot be compared.
        OSError: a file cannot be written.
    """
    paths = [options.reference, options.candidate, *filter(None, [options.truth]), *options.envelope]
    loaded: dict[Path, parity.Recording] = {}
    problems = []
    for path in dict.fromkeys(paths):
        try:
            loaded[path] = parity.load(path)
        except ValueError as error:
            problems.append(str(error))
    try:
        rules = None if options.rules is None else parity.load_rules(options.rules)
    except ValueError as error:
        problems.append(str(error))
    if problems:
        raise ValueError("; ".join(problems))
    verdict = parity.compare(
        loaded[options.reference],
        loaded[options.candidate],
        rules,
        truth=None if options.truth is None else loaded[options.truth],
        envelope=[loaded[path] for path in options.envelope],
    )
    text = Text(str(verdict))
    text.highlight_regex(r"^PASSED|^  ok ", "green")
    text.highlight_regex(r"^DIVERGED|^  FAIL|^first divergence:.*", "bold red")
    Console(highlight=False, soft_wrap=True).print(text)
    if options.report is not None:
        verdict.report(options.report)
    if options.json is not None:
        content = json.dumps(verdict.to_dict(), indent=1, allow_nan=False)
        options.json.write_text(content + "\n", encoding="utf-8")
    return 0 if verdict.passed else 1


def describe(recording: parity.Recording, *, modules: int) -> str:
    """What is in a recording, as lines of text, with at most so many modules."""
    steps = len(recording.losses["loss"]) if recording.losses else 0
    lines = [f"{recording.dtype}, {steps} step{'' if steps == 1 else 's'}"]
    lines += [f"  {name:20} {value}" for name, value in recording.provenance.items()]
    lines.append("sections")
    for section in SECTIONS:
        arrays: Arrays = getattr(recording, section)
        kibibytes = sum(array.nbytes for array in arrays.values()) / 1024
        lines += [f"  {section:20} {len(arrays):6} arrays {kibibytes:12,.1f} KiB"] if arrays else []
    lines.append("inputs")
    lines += [f"  {name:20} {array.dtype} {list(array.shape)}" for name, array in recording.inputs.items()]
    lines.append(f"{len(recording.module_names)} modules")
    for path, aliases in list(recording.module_names.items())[:modules]:
        others = f", also {', '.join(aliases[1:])}" if len(aliases) > 1 else ""
        lines.append(f"  {path or '(the model itself)'}{others}")
    if len(recording.module_names) > modules:
        lines.append(f"  and {len(recording.module_names) - modules} more")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    options = tyro.extras.subcommand_cli_from_dict(
        {"compare": Compare, "show": Show, "recorder": Recorder},
        prog="python -m flax_transformer.parity",
        description="The ladder of parity, for recordings: what two frameworks computed in the same run.",
        args=arguments,
    )
    try:
        if isinstance(options, Compare):
            return compare(options)
        if isinstance(options, Recorder):
            with options.file.open("x", encoding="utf-8") as stream:
                stream.write(recorder_source())
            return 0
        print(describe(parity.load(options.recording), modules=options.modules))
    except ValueError as error:
        message = " ".join(str(error).split())
    except OSError as error:
        message = (
            f"{error.filename} cannot be written ({error.strerror}); give --report and --json a place that is there"
        )
    else:
        return 0
    print(f"parity: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
