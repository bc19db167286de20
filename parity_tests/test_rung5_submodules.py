"""Rung 5: the output of every submodule, call by call; the logits among them."""

import pytest

from parity_tests.ladder import CLIMBS, require


@pytest.mark.parametrize(("case", "dtype", "execution"), CLIMBS)
def test_every_submodule_gives_the_output_of_its_counterpart(case, dtype, execution):
    require(case, dtype, execution, "modules")


@pytest.mark.parametrize(("case", "dtype", "execution"), CLIMBS)
def test_logits_are_those_of_the_reference(case, dtype, execution):
    rung = require(case, dtype, execution, "modules")
    assert [row.name for row in rung.rows if row.path == case.logits] == [f"{case.logits}#0"]
