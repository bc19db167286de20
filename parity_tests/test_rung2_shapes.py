"""Rung 2: shapes and dtypes of everything, and the loaded parameters' values."""

import pytest

from parity_tests.ladder import CLIMBS, require


@pytest.mark.parametrize(("case", "dtype", "execution"), CLIMBS)
def test_every_array_has_the_shape_and_dtype_of_the_reference(case, dtype, execution):
    require(case, dtype, execution, "shapes")
