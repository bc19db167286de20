"""Sentences and their translations: anyone's two files line by line, or one tab-separated file.

A pair that cannot be used is never used in silence and never left out in silence: it is counted, shown with its line
number, and either refused or, on request, skipped.
"""

import codecs
import hashlib
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Literal, final, get_args

BadPairs = Literal["refuse", "skip"]

MAX_CHARACTERS = 10_000  # of one side; a longer one is no sentence, but a file that has lost its line breaks
_SHOWN_LINES = 5

_NO_TAB = "no tab"
_MANY_TABS = "more than one tab"
_NOT_UTF8 = "bytes that are not UTF-8 in its {}"
_EMPTY = "an empty {}"
_LONG = "a {} of more than {} characters"

# How to mend a kind, where that is not plain.
_REMEDIES = {
    _NO_TAB: "a line is a source, one tab and its target",
    _MANY_TABS: "keep two columns of more with cut -f1,2",
    _NOT_UTF8.format("source"): "convert the file, for instance with iconv -f WINDOWS-1252 -t UTF-8",
    _NOT_UTF8.format("target"): "convert the file, for instance with iconv -f WINDOWS-1252 -t UTF-8",
}
_UNEVEN_REMEDY = "look for a line that is missing before the end, since it makes every pair after it wrong"


@dataclass(frozen=True)
class ParallelText:
    """Sentences and their translations, and where they come from.

    Attributes:
      name: for people, in messages and provenance.
      sources: the sentences.
      targets: `targets[i]` is the translation of `sources[i]`.
    """

    name: str
    sources: tuple[str, ...]
    targets: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.sources) != len(self.targets):
            raise ValueError(
                f"every source needs a target, got {len(self.sources)} sources and {len(self.targets)} targets"
            )

    def __len__(self) -> int:
        return len(self.sources)

    @property
    def sha256(self) -> str:
        """A digest of the pairs and their order: equal for two texts exactly where all of their pairs are."""
        return hashlib.sha256(json.dumps([self.sources, self.targets]).encode()).hexdigest()


@dataclass(frozen=True)
class Defect:
    """Bad pairs of one kind.

    Attributes:
      kind: what is wrong with them, as in "a pair with an empty target".
      count: how many there are.
      lines: the line numbers of the first few, counted from 1.
    """

    kind: str
    count: int
    lines: tuple[int, ...]

    def __str__(self) -> str:
        more = ", ..." if self.count > len(self.lines) else ""
        return f"{self.count} with {self.kind} (line{'s' * (self.count > 1)} {', '.join(map(str, self.lines))}{more})"


@dataclass(frozen=True)
class PairReport:
    """What was found in a parallel text; `str` of it is a sentence.

    Attributes:
      name: of the file or files.
      lines: how many there are, in the longer file if there are two.
      defects: the kinds of bad pairs in the order in which they first occur. A pair counts once, for the first kind.
    """

    name: str
    lines: int
    defects: tuple[Defect, ...]

    @property
    def bad(self) -> int:
        return sum(defect.count for defect in self.defects)

    def __str__(self) -> str:
        listing = ": " + "; ".join(map(str, self.defects)) if self.defects else ""
        return f"{self.name}: {self.bad} of {self.lines} pairs are bad{listing}"


@dataclass(frozen=True)
class CheckedText:
    """A parallel text as it was read.

    Attributes:
      text: the good pairs, in their order.
      report: what was left out. A command that skips bad pairs prints it if `report.bad`.
    """

    text: ParallelText
    report: PairReport


@dataclass(frozen=True)
class PairSplit:
    """The pairs of a text, each in one of two parts, in their order.

    Attributes:
      train: to train on.
      validation: held out.
    """

    train: ParallelText
    validation: ParallelText


def read_tab_separated(
    path: str | os.PathLike[str], *, bad_pairs: BadPairs = "refuse", max_characters: int = MAX_CHARACTERS
) -> CheckedText:
    r"""Reads a UTF-8 file of lines "source, tab, target". Quotation marks mean nothing special.

    Line ends are `\n` and `\r\n`, and nothing else ends a line: U+2028 and its like are characters of a sentence. A byte
    order mark at the start is left out. All else is kept as it is.

    Args:
      bad_pairs: what to do with a line that has not exactly one tab, or a side that is empty (or white space only), is not
        UTF-8, or is too long: `refuse` the text, or `skip` the line.
      max_characters: of one side.

    Raises:
      ValueError: a bad pair and `refuse`, no good pair, or a file that is missing, unreadable, empty or UTF-16.
    """
    checker = _Checker(bad_pairs, max_characters)
    for number, line in enumerate(_lines(path), 1):
        sides = line.split(b"\t")
        if len(sides) == 2:
            checker.add(number, sides)
        else:
            checker.reject(number, _NO_TAB if len(sides) == 1 else _MANY_TABS)
    return checker.result(repr(str(path)), _REMEDIES)


def read_two_files(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    bad_pairs: BadPairs = "refuse",
    max_characters: int = MAX_CHARACTERS,
) -> CheckedText:
    """Reads two UTF-8 files, line by line: line i of the second translates line i of the first.

    Files, `bad_pairs` and `max_characters` are as in `read_tab_separated`, except that a tab is a character like any other.
    Where one file is longer, its surplus lines at the end are bad pairs: they have no partner. To skip them is right if
    the other file was cut at its end. It is not if a line is missing before, which nobody can see from here: from there on
    every pair is wrong. That is one more reason why `refuse` is the default.

    Raises:
      ValueError: as `read_tab_separated`.
    """
    checker = _Checker(bad_pairs, max_characters)
    sources, targets = _lines(source), _lines(target)
    lacking = "target" if len(sources) > len(targets) else "source"
    uneven = f"no {lacking}, since the files have {len(sources)} and {len(targets)} lines"
    for number, sides in enumerate(zip_longest(sources, targets), 1):
        if None in sides:
            checker.reject(number, uneven)
        else:
            checker.add(number, sides)
    return checker.result(f"{str(source)!r} and {str(target)!r}", _REMEDIES | {uneven: _UNEVEN_REMEDY})


def split_pairs(text: ParallelText, *, seed: int, fraction: float = 0.02, at_most: int = 1000) -> PairSplit:
    """Holds out about a share of the pairs, at least one, so that no source is on both sides.

    Equal sources go together, since a pair that was trained on tests nothing. They are taken in the order of a hash of the
    seed and the source, as long as they fit; where not even the rarest fits, it alone is held out. So a text has one
    split for every seed, whatever the order of its pairs.

    Args:
      seed: in [0, 2^64).
      fraction: the share to hold out.
      at_most: how many pairs to hold out, whatever the share.

    Raises:
      ValueError: fewer than two different sources, or a number out of its range.
    """
    if not 0 < fraction < 1:
        raise ValueError(f"fraction, the share of pairs to hold out, must be between 0 and 1, got {fraction}")
    if at_most < 1:
        raise ValueError(f"at_most, the pairs to hold out, must be at least 1, got {at_most}")
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed must be in [0, 2^64), got {seed}")
    counts = Counter(text.sources)
    if len(counts) < 2:
        raise ValueError(
            f"{text.name}: a split needs at least 2 different sources, one to train on and one to hold out, "
            f"got {len(counts)} in {len(text)} pairs; give more text"
        )
    key = seed.to_bytes(8, "little")
    places = {source: hashlib.blake2b(source.encode(), key=key, digest_size=16).digest() for source in counts}
    room = min(round(fraction * len(text)), at_most, len(text) - 1)
    held: set[str] = set()
    for source in sorted(counts, key=places.__getitem__):
        if counts[source] <= room:
            held.add(source)
            room -= counts[source]
    held = held or {min(counts, key=lambda source: (counts[source], places[source]))}
    return PairSplit(_part(text, held, inside=False), _part(text, held, inside=True))


def _part(text: ParallelText, sources: set[str], *, inside: bool) -> ParallelText:
    pairs = [pair for pair in zip(text.sources, text.targets, strict=True) if (pair[0] in sources) is inside]
    return ParallelText(text.name, *zip(*pairs, strict=True))


@final
class _Checker:
    """Sorts pairs into good and bad ones."""

    def __init__(self, bad_pairs: BadPairs, max_characters: int) -> None:
        if bad_pairs not in get_args(BadPairs):
            raise ValueError(f"bad_pairs must be one of {get_args(BadPairs)}, got {bad_pairs!r}")
        if max_characters < 1:
            raise ValueError(f"max_characters must be at least 1, got {max_characters}")
        self._bad_pairs = bad_pairs
        self._max_characters = max_characters
        self._good: list[list[str]] = []
        self._bad: dict[str, list[int]] = {}

    def reject(self, number: int, kind: str) -> None:
        self._bad.setdefault(kind, []).append(number)

    def add(self, number: int, sides: Sequence[bytes]) -> None:
        pair = []
        for name, side in zip(("source", "target"), sides, strict=True):
            try:
                pair.append(side.decode("utf-8"))
            except UnicodeDecodeError:
                return self.reject(number, _NOT_UTF8.format(name))
            if not pair[-1].strip():
                return self.reject(number, _EMPTY.format(name))
            if len(pair[-1]) > self._max_characters:
                return self.reject(number, _LONG.format(name, self._max_characters))
        self._good.append(pair)

    def result(self, name: str, remedies: dict[str, str]) -> CheckedText:
        defects = [Defect(kind, len(lines), tuple(lines[:_SHOWN_LINES])) for kind, lines in self._bad.items()]
        report = PairReport(name, len(self._good) + sum(map(len, self._bad.values())), tuple(defects))
        hints = dict.fromkeys(remedies[kind] for kind in self._bad if kind in remedies)
        mend = "mend them" + (": " + "; ".join(hints) if hints else "")
        if report.bad and self._bad_pairs == "refuse":
            raise ValueError(f"{report}; leave them out with bad_pairs 'skip' (--bad-pairs skip), or {mend}")
        if not self._good:
            raise ValueError(f"{report}; at least one must be good, so {mend}")
        return CheckedText(ParallelText(name, *zip(*self._good, strict=True)), report)


def _lines(path: str | os.PathLike[str]) -> list[bytes]:
    shown = f"the file of pairs {str(path)!r}"
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{shown} cannot be read: {error.strerror}; give a readable UTF-8 text file") from error
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError(f"{shown} must be UTF-8, but it is UTF-16; convert it with iconv -f UTF-16 -t UTF-8")
    lines = content.removeprefix(codecs.BOM_UTF8).split(b"\n")
    if not lines[-1]:
        lines.pop()  # what follows the last line end is no line
    if not lines:
        raise ValueError(f"{shown} must hold a line for each pair, but it is empty; give a file that does")
    return [line.removesuffix(b"\r") for line in lines]
