"""What several modules of these tests train once."""

from pathlib import Path

import pytest

import train
from parity_tests.unit.small_runs import PATTERN, TINY, call, write


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    """To be read only."""
    return write(tmp_path_factory.mktemp("text"), PATTERN)


@pytest.fixture(scope="session")
def whole(text, tmp_path_factory) -> Path:
    """A run that nothing stops or damages; to be copied, not changed."""
    output = tmp_path_factory.mktemp("whole") / "run"
    assert call(train.main, "--data", text, *TINY, "--output", output)[0] == 0
    return output
