"""Rung 9: what the first step of an optimizer adds to every parameter, relative to that, and its moments."""

import pytest

from parity_tests.ladder import UPDATE_CLIMBS, require
from parity_tests.references import reference


@pytest.mark.parametrize(("case", "dtype", "execution"), UPDATE_CLIMBS)
def test_the_first_update_of_every_parameter_is_that_of_the_reference(case, dtype, execution):
    rung = require(case, dtype, execution, "updates")
    assert {row.name for row in rung.rows} >= set(reference(case, dtype, 0).parameters) - set(case.structural_zeros)
