"""The default corpus is what this Python carries; a file's text is exactly what it holds, or one line says what is wrong."""

import hashlib
import subprocess
import sys
from pathlib import Path
from pydoc_data import topics

import pytest

from flax_transformer.data import Corpus, default_corpus, read_corpus, read_text

TEXT = "First line.\r\nSecond 🙂 line with <|endoftext|> inside,\rthird, naïve 中文\n\ufeff\x00\r\n"


def test_the_default_corpus_is_pydocs_topics_in_sorted_order(monkeypatch):
    corpus = default_corpus()
    rest = corpus.text
    for number, key in enumerate(sorted(topics.topics)):
        separator = "\n\n" if number else ""
        assert rest.startswith(separator + topics.topics[key])
        rest = rest[len(separator + topics.topics[key]) :]
    assert rest == ""
    monkeypatch.setattr(topics, "topics", dict(reversed(topics.topics.items())))
    assert default_corpus() == corpus
    assert "pydoc_data.topics of Python 3." in corpus.name


def test_a_python_without_pydoc_data_is_one_error_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(ValueError, match=r"this Python 3\.\S+ lacks .*give a UTF-8 text file of your own"):
        default_corpus()


def test_the_text_of_a_file_is_what_the_file_holds(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT.encode())
    assert read_text(path) == read_text(str(path)) == TEXT
    assert read_corpus(path) == Corpus(str(path), TEXT)


def test_one_byte_order_mark_at_the_start_is_left_out(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"\xef\xbb\xbf\xef\xbb\xbf" + TEXT.encode())
    assert read_text(path) == "\ufeff" + TEXT


def test_the_digest_of_a_corpus_is_that_of_the_files_bytes(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT.encode())
    assert read_corpus(path).sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert read_corpus(path).sha256 != Corpus(str(path), TEXT + " ").sha256


@pytest.mark.parametrize("content", [b"", b" \r\n\t\n", b"\xef\xbb\xbf"])
def test_a_file_without_text_is_refused(tmp_path, content):
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"text\.txt' must hold text, but its {len(content)} bytes have none; give"):
        read_text(path)


def test_a_missing_file_is_named_on_one_line(tmp_path):
    with pytest.raises(
        ValueError, match=r"absent\\nfile\.txt' cannot be read: No such file or directory; give"
    ) as caught:
        read_text(tmp_path / "absent\nfile.txt")
    assert "\n" not in str(caught.value)


def test_a_directory_is_not_a_text(tmp_path):
    with pytest.raises(ValueError, match="cannot be read: Is a directory; give"):
        read_text(tmp_path)


def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    def read_bytes(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    with pytest.raises(ValueError, match=r"text\.txt' cannot be read: Permission denied; give"):
        read_text(tmp_path / "text.txt")


def test_a_byte_that_is_not_utf8_is_located_even_after_a_byte_order_mark(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes("\ufeffé\r\nsay ".encode() + b"\x93hello\x94")
    with pytest.raises(ValueError, match=r"must be UTF-8, but byte 0x93 at offset 11 \(line 2\) is not"):
        read_text(path)


@pytest.mark.parametrize("encoding", ["cp1252", "utf-16"])
def test_the_remedy_for_another_encoding_can_be_pasted(tmp_path, encoding):
    path = tmp_path / "a text's name.txt"
    path.write_bytes("“naïve”\r\n".encode(encoding))
    with pytest.raises(ValueError, match="for instance: iconv") as caught:
        read_text(path)
    command = str(caught.value).split("for instance: ")[1]
    subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    assert read_text(tmp_path / "utf8.txt") == "“naïve”\r\n"


def test_a_text_cut_inside_a_character_is_refused(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes("end 🙂".encode()[:-1])
    with pytest.raises(ValueError, match="byte 0xf0 at offset 4"):
        read_text(path)
