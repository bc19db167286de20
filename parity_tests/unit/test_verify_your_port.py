"""What docs/verify-your-port.md shows is run, and prints what it says."""

import contextlib
import io
import re
from pathlib import Path

import jax
import pytest

from flax_transformer import parity
from parity_tests.references import needs_torch

PAGE = (Path(__file__).parents[2] / "docs" / "verify-your-port.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```(?:\n```text\n(.*?)```)?", PAGE, re.DOTALL)


@needs_torch
def test_every_block_runs_and_prints_what_stands_below_it():
    assert len(BLOCKS) > 10
    names: dict = {}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # a reader's JAX has its defaults
        for number, (code, expected) in enumerate(BLOCKS):
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(code, f"docs/verify-your-port.md, block {number}", "exec"), names)
            assert printed.getvalue() == expected, f"block {number}"


def test_the_rules_file_says_what_the_rules_in_python_say(tmp_path):
    (tmp_path / "rules.toml").write_text(re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)[0], encoding="utf-8")
    source = next(code for code, _ in BLOCKS if "rules = parity.Rules(" in code)
    names: dict = {"parity": parity}
    exec(source.split("verdict =")[0], names)
    loaded = parity.load_rules(tmp_path / "rules.toml")
    assert dict(loaded.parameters) == dict(names["rules"].parameters)
    assert dict(loaded.transforms) == dict(names["rules"].transforms)


@pytest.mark.parametrize("code", [code for code, _ in BLOCKS])
def test_lines_are_short_enough_to_read(code):
    assert max(map(len, code.splitlines())) <= 120
