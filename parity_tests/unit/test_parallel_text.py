"""Files of pairs are read as they are; every bad pair is counted and located, and refused unless skipping was asked for."""

import dataclasses
import hashlib
import json
import re
from pathlib import Path

import pytest

from flax_transformer.data import ParallelText, read_tab_separated, read_two_files, split_pairs

# Characters that `str.splitlines` would split at, a carriage return inside a line among them.
STRANGE = "one\u2028two\x0b\x0c\x1c\x1d\x85\u2029\rthree"


@pytest.fixture
def write(tmp_path):
    def write(name: str, content: bytes | str) -> Path:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("last", [True, False])
def test_pairs_of_one_file_are_what_it_holds(write, end, last):
    path = write("pairs.tsv", end.join(["Hello.\tSalut 🙂", ' "Go" \tVa  ! ', f"{STRANGE}\t中文"]) + end * last)
    checked = read_tab_separated(path)
    assert checked.text == read_tab_separated(str(path)).text
    assert checked.text == ParallelText(repr(str(path)), ("Hello.", ' "Go" ', STRANGE), ("Salut 🙂", "Va  ! ", "中文"))
    assert checked.report.bad == 0
    assert checked.report.lines == 3


@pytest.mark.parametrize(("source_end", "target_end"), [("\n", "\r\n"), ("\r\n", "\n")])
def test_pairs_of_two_files_are_their_lines(write, source_end, target_end):
    source = write("a.en", source_end.join(["Hello\tthere", STRANGE, "Go"]))
    target = write("a.fr", target_end.join(["Salut", "deux", "Va", ""]))
    checked = read_two_files(source, target)
    assert checked.text == ParallelText(
        f"'{source}' and '{target}'", ("Hello\tthere", STRANGE, "Go"), ("Salut", "deux", "Va")
    )
    assert checked.report.bad == 0


def test_one_byte_order_mark_at_the_start_of_each_file_is_left_out(write):
    mark = b"\xef\xbb\xbf"
    assert read_tab_separated(write("a.tsv", mark * 2 + b"a\tb\n")).text.sources == ("\ufeffa",)
    text = read_two_files(write("a.en", mark + b"a\n"), write("a.fr", mark + b"b\n")).text
    assert (text.sources, text.targets) == (("a",), ("b",))


# A line of every kind, and what is said of it.
BAD_LINES = {
    b"no column": "1 with no tab (line 2)",
    b"": "1 with no tab (line 2)",
    b"a\tb\tc": "1 with more than one tab (line 2)",
    b"\tb": "1 with an empty source (line 2)",
    b"a\t \xc2\xa0\r": "1 with an empty target (line 2)",
    b"caf\xe9\tb": "1 with bytes that are not UTF-8 in its source (line 2)",
    b"a\tcaf\xe9": "1 with bytes that are not UTF-8 in its target (line 2)",
    b"a" * 12 + b"\tb": "1 with a source of more than 11 characters (line 2)",
    b"a\t" + b"b" * 12: "1 with a target of more than 11 characters (line 2)",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_bad_line_is_refused_with_its_kind_and_number_or_skipped(write, line):
    path = write("pairs.tsv", b"one\tun\n" + line + b"\nthree\ttrois\n")
    with pytest.raises(
        ValueError, match=r"leave them out with bad_pairs .skip. \(--bad-pairs skip\), or mend them"
    ) as caught:
        read_tab_separated(path, max_characters=11)
    assert str(caught.value).startswith(f"'{path}': 1 of 3 pairs are bad: {BAD_LINES[line]}; leave them out")
    assert "\n" not in str(caught.value)
    skipped = read_tab_separated(path, max_characters=11, bad_pairs="skip")
    assert (skipped.text.sources, skipped.text.targets) == (("one", "three"), ("un", "trois"))
    assert str(skipped.report) == f"'{path}': 1 of 3 pairs are bad: {BAD_LINES[line]}"


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        (b"no column", "one tab and its target"),
        (b"a\tb\tc", "cut -f1,2"),
        (b"a\tcaf\xe9", "iconv -f WINDOWS-1252 -t UTF-8"),
    ],
)
def test_a_kind_that_has_a_remedy_names_it(write, line, remedy):
    with pytest.raises(ValueError, match=re.escape(remedy)):
        read_tab_separated(write("pairs.tsv", b"one\tun\n" + line))


def test_characters_are_counted_not_bytes(write):
    path = write("pairs.tsv", "🙂" * 11 + "\té")
    assert read_tab_separated(path, max_characters=11).report.bad == 0
    with pytest.raises(ValueError, match=r"a source of more than 10 characters .*, or mend them$"):
        read_tab_separated(path, max_characters=10)


def test_a_line_of_ten_thousand_characters_is_a_sentence_and_a_longer_one_is_not(write):
    assert read_tab_separated(write("pairs.tsv", "a" * 10_000 + "\tb")).report.bad == 0
    with pytest.raises(ValueError, match="a source of more than 10000 characters"):
        read_tab_separated(write("pairs.tsv", "a" * 10_001 + "\tb"))


def test_all_kinds_are_listed_at_once_with_their_counts_and_first_lines(write):
    lines = ["a\tb"] * 20
    for number in (3, 5, 7, 8, 11, 13, 17):
        lines[number - 1] = "a\t"
    for number in (2, 19):
        lines[number - 1] = "a\tb\tc"
    path = write("pairs.tsv", "\n".join(lines))
    with pytest.raises(ValueError, match=r"9 of 20 pairs are bad") as caught:
        read_tab_separated(path)
    assert "2 with more than one tab (lines 2, 19); 7 with an empty target (lines 3, 5, 7, 8, 11, ...); leave" in str(
        caught.value
    )
    report = read_tab_separated(path, bad_pairs="skip").report
    assert [dataclasses.astuple(defect) for defect in report.defects] == [
        ("more than one tab", 2, (2, 19)),
        ("an empty target", 7, (3, 5, 7, 8, 11)),
    ]


@pytest.mark.parametrize(("sources", "targets", "lacking"), [(5, 3, "target"), (3, 5, "source")])
def test_surplus_lines_of_one_file_are_refused_or_skipped(write, sources, targets, lacking):
    source = write("a.en", "".join(f"s{i}\n" for i in range(sources)))
    target = write("a.fr", "".join(f"t{i}\n" for i in range(targets)))
    listing = f"2 with no {lacking}, since the files have {sources} and {targets} lines (lines 4, 5)"
    with pytest.raises(ValueError, match="a line that is missing before the end") as caught:
        read_two_files(source, target)
    assert str(caught.value).startswith(f"'{source}' and '{target}': 2 of 5 pairs are bad: {listing}; leave them out")
    skipped = read_two_files(source, target, bad_pairs="skip")
    assert (skipped.text.sources, skipped.text.targets) == (("s0", "s1", "s2"), ("t0", "t1", "t2"))
    assert listing in str(skipped.report)


def test_bad_lines_of_two_files_are_left_out_of_both(write):
    source = write("a.en", b"one\ncaf\xe9\nthree\nfour\n")
    target = write("a.fr", b"un\ndeux\n\t\r\nquatre\n")
    checked = read_two_files(source, target, bad_pairs="skip")
    assert (checked.text.sources, checked.text.targets) == (("one", "four"), ("un", "quatre"))
    assert [(defect.kind, defect.lines) for defect in checked.report.defects] == [
        ("bytes that are not UTF-8 in its source", (2,)),
        ("an empty target", (3,)),
    ]


def test_nothing_left_after_skipping_is_an_error(write):
    path = write("pairs.txt", "one\ntwo\n")
    with pytest.raises(
        ValueError, match=r"2 of 2 pairs are bad: 2 with no tab .*; at least one must be good, so mend them: "
    ):
        read_tab_separated(path, bad_pairs="skip")


@pytest.mark.parametrize("bad_pairs", ["refuse", "skip"])
@pytest.mark.parametrize("content", ["", "\ufeff"])
def test_an_empty_file_is_refused(write, content, bad_pairs):
    with pytest.raises(ValueError, match=r"pairs\.tsv' must hold a line for each pair, but it is empty; give"):
        read_tab_separated(write("pairs.tsv", content), bad_pairs=bad_pairs)


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_a_utf16_file_is_named_as_one_even_when_bad_pairs_are_skipped(write, encoding):
    path = write("pairs.tsv", "\ufeffone\tun\n".encode(encoding))
    with pytest.raises(ValueError, match=r"must be UTF-8, but it is UTF-16; convert it with iconv -f UTF-16"):
        read_tab_separated(path, bad_pairs="skip")


def test_a_missing_file_or_a_directory_is_named_on_one_line(write, tmp_path):
    with pytest.raises(ValueError, match=r"absent\\nfile' cannot be read: No such file or directory; give"):
        read_tab_separated(tmp_path / "absent\nfile")
    with pytest.raises(ValueError, match=r"cannot be read: Is a directory; give"):
        read_two_files(write("a.en", "a"), tmp_path)


def test_options_out_of_range_are_refused(write):
    path = write("pairs.tsv", "a\tb")
    with pytest.raises(ValueError, match=r"bad_pairs must be one of \('refuse', 'skip'\), got 'drop'"):
        read_tab_separated(path, bad_pairs="drop")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_characters must be at least 1, got 0"):
        read_two_files(path, path, max_characters=0)


def test_a_text_needs_a_target_for_every_source():
    with pytest.raises(ValueError, match="got 2 sources and 1 targets"):
        ParallelText("a", ("one", "two"), ("uno",))


def test_the_digest_of_pairs_tells_order_and_sides_apart():
    text = ParallelText("a", ("one", "two"), ("uno", "due"))
    assert text.sha256 == hashlib.sha256(json.dumps([["one", "two"], ["uno", "due"]]).encode()).hexdigest()
    others = [
        ParallelText("a", ("two", "one"), ("due", "uno")),
        ParallelText("a", ("uno", "due"), ("one", "two")),
        ParallelText("a", ("one", "two uno"), ("", "due")),
    ]
    assert len({text.sha256, ParallelText("b", text.sources, text.targets).sha256}) == 1
    assert len({text.sha256, *(other.sha256 for other in others)}) == 4


def text(count: int = 997, distinct: int = 331) -> ParallelText:
    """Every source occurs about three times, with another target each time."""
    return ParallelText("t", tuple(f"s{i * 7 % distinct}" for i in range(count)), tuple(f"t{i}" for i in range(count)))


def test_a_split_keeps_every_pair_in_order_and_no_source_on_both_sides():
    whole = text()
    parts = split_pairs(whole, seed=3, fraction=0.1)
    assert not set(parts.train.sources) & set(parts.validation.sources)
    pairs = list(zip(whole.sources, whole.targets, strict=True))
    for part in (parts.train, parts.validation):
        held = list(zip(part.sources, part.targets, strict=True))
        inside = set(held)
        assert held == [pair for pair in pairs if pair in inside]
        assert part.name == "t"
    assert len(parts.train) + len(parts.validation) == 997
    assert 90 <= len(parts.validation) <= 100


def test_a_split_depends_on_the_seed_and_not_on_the_order_of_the_pairs():
    whole = text()
    backwards = ParallelText("t", whole.sources[::-1], whole.targets[::-1])
    held = [frozenset(split_pairs(whole, seed=seed).validation.targets) for seed in (0, 1, 256, 2**64 - 1)]
    assert len(set(held)) == 4
    assert frozenset(split_pairs(backwards, seed=256).validation.targets) == held[2]


def test_the_held_out_pairs_are_the_same_on_every_machine():
    whole = ParallelText("t", tuple(f"s{i}" for i in range(101)), tuple(f"t{i}" for i in range(101)))
    # Those with the five smallest BLAKE2b hashes of 16 bytes, keyed with the seed's 8 bytes, low end first.
    assert split_pairs(whole, seed=3, fraction=0.05).validation.sources == ("s5", "s9", "s30", "s37", "s67")


def test_at_least_one_pair_and_at_most_the_limit_is_held_out():
    def held(count: int, **kwargs) -> int:
        return len(split_pairs(text(count, distinct=count), seed=5, **kwargs).validation)

    assert held(2) == held(2, fraction=0.99) == held(11) == 1
    assert held(990) == 20
    assert held(990, at_most=7) == 7
    assert held(990, fraction=0.999) == 989
    assert held(60_000) == 1000


def test_where_every_source_is_too_frequent_the_rarest_is_held_out():
    whole = ParallelText("t", ("a",) * 7 + ("b",) * 3 + ("c",) * 5, tuple("abcdefghijklmno"))
    for seed in range(11):
        assert split_pairs(whole, seed=seed).validation.sources == ("b",) * 3


@pytest.mark.parametrize("sources", [(), ("a",), ("a",) * 3])
def test_a_text_with_less_than_two_sources_has_no_split(sources):
    with pytest.raises(
        ValueError, match=rf"^t: a split needs .*, got {len(set(sources))} in {len(sources)} pairs; give"
    ):
        split_pairs(ParallelText("t", sources, sources), seed=3)


@pytest.mark.parametrize(
    ("name", "number"), [("fraction", 0.0), ("fraction", 1.0), ("at_most", 0), ("seed", -1), ("seed", 2**64)]
)
def test_a_split_with_a_number_out_of_range_is_refused(name, number):
    with pytest.raises(ValueError, match=rf"^{name}.* got {number}$"):
        split_pairs(text(), **{"seed": 3, name: number})
