"""Rung 1: names. Every parameter of the reference has its counterpart, and what is shared there is shared here."""

import pytest

from parity_tests.ladder import CLIMBS, require


@pytest.mark.parametrize(("case", "dtype", "execution"), CLIMBS)
def test_every_parameter_has_its_counterpart(case, dtype, execution):
    require(case, dtype, execution, "keys")
