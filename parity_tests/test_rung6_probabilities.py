"""Rung 6: the probabilities that both documents' models return."""

import pytest

from parity_tests.ladder import CLIMBS, require


@pytest.mark.parametrize(("case", "dtype", "execution"), CLIMBS)
def test_probabilities_are_those_of_the_reference(case, dtype, execution):
    require(case, dtype, execution, "output")
