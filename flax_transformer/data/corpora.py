"""Text to train on: a default that every Python carries, and anyone's UTF-8 file."""

import hashlib
import importlib
import os
import platform
import shlex
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Corpus:
    """A text and where it comes from.

    Attributes:
      name: for people, in messages and provenance.
      text: all of it.
    """

    name: str
    text: str

    @property
    def sha256(self) -> str:
        """The hexadecimal sha256 of the text's UTF-8 bytes: `sha256sum FILE`, where the file has no byte order mark."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def default_corpus() -> Corpus:
    """Returns the texts of CPython's `pydoc_data.topics` in the order of their sorted keys, joined by a blank line.

    About 460,000 characters of English prose, the Python reference, with no download. The text differs between versions of
    Python; `Corpus.sha256` tells which one a run had.

    Raises:
      ValueError: this Python was packaged without `pydoc_data`.
    """
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise ValueError(
            f"the default corpus is the module pydoc_data.topics, which this Python {platform.python_version()} lacks "
            f"({error}); give a UTF-8 text file of your own, or install the full standard library"
        ) from error
    name = f"pydoc_data.topics of Python {platform.python_version()}"
    return Corpus(name, "\n\n".join(topics[key] for key in sorted(topics)))


def read_text(path: str | os.PathLike[str]) -> str:
    """Returns the text of a UTF-8 file as it is, carriage returns included.

    The one thing left out is a byte order mark at the very start: it marks the encoding and is no part of the text.

    Raises:
      ValueError: the file is missing, a directory, unreadable, empty (or white space only), or not UTF-8.
    """
    shown = f"text file {str(path)!r}"  # a repr has no line breaks, whatever the file's name has
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{shown} cannot be read: {error.strerror}; give a readable UTF-8 text file") from error
    try:
        text = content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        encoding = "UTF-16" if content.startswith((b"\xff\xfe", b"\xfe\xff")) else "WINDOWS-1252"
        raise ValueError(
            f"{shown} must be UTF-8, but byte {content[error.start]:#04x} at offset {error.start} (line {line}) is not; "
            f"convert it from what it is, for instance: iconv -f {encoding} -t UTF-8 {shlex.quote(str(path))} > utf8.txt"
        ) from error
    if not text.strip():
        raise ValueError(f"{shown} must hold text, but its {len(content)} bytes have none; give a file that does")
    return text


def read_corpus(path: str | os.PathLike[str]) -> Corpus:
    """Returns a UTF-8 file as a corpus that is named by its path; see `read_text`."""
    return Corpus(str(path), read_text(path))
