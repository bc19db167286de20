"""What README shows is run."""

import re
from pathlib import Path

from parity_tests.faults.documents import PAGE, table
from parity_tests.faults.planting import FAULTS
from parity_tests.references import needs_torch

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


@needs_torch
def test_the_library_example_runs():
    example = re.search(r"## As a library\n\n```python\n(.*?)```", README, re.DOTALL)
    assert example is not None
    names: dict = {}
    exec(compile(example[1], "README.md", "exec"), names)
    assert names["logits"].shape == (4, 16, 1000)
    assert names["text"].shape == (4, 25)
    assert names["arrays"].keys() == names["reference"].state_dict().keys()


def test_the_table_of_what_is_caught_is_that_of_the_kill_matrix():
    assert table() in PAGE.read_text(encoding="utf-8"), "run python -m parity_tests.faults.documents"


def test_the_number_of_planted_mistakes_is_the_one_that_readme_gives():
    assert f"plants {len(FAULTS)} porting mistakes" in README


def test_every_file_of_the_tree_in_readme_exists():
    tree = README.split("## Where things are")[1].split("```")[1]
    folder = Path()
    for line in tree.strip().splitlines():
        name = line.split()[0]
        indented = line.startswith("  ")
        path = folder / name if indented else Path(name)
        if not indented:
            folder = Path(name)
        assert (Path(__file__).parents[2] / path).exists(), f"README names {path}"
