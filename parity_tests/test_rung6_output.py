"""Rung 6: the final output, probabilities and logits."""

import pytest

from parity_tests.ladder import CLIMBS, require


@pytest.mark.parametrize(("case", "dtype", "execution"), CLIMBS)
def test_probabilities_and_logits_are_those_of_the_reference(case, dtype, execution):
    require(case, dtype, execution, "output")
