"""Rung 8: the gradient that reaches every submodule's output, and that of every parameter, shared ones as a sum."""

import pytest

from parity_tests.ladder import LEARNING_CLIMBS, require, verdict
from parity_tests.references import reference


@pytest.mark.parametrize(("case", "dtype", "execution"), LEARNING_CLIMBS)
def test_the_gradient_that_reaches_every_submodule_is_that_of_the_reference(case, dtype, execution):
    require(case, dtype, execution, "backward")


@pytest.mark.parametrize(("case", "dtype", "execution"), LEARNING_CLIMBS)
def test_the_gradient_of_every_parameter_is_that_of_the_reference(case, dtype, execution):
    rung = require(case, dtype, execution, "gradients")
    assert {row.name for row in rung.rows} == set(reference(case, dtype, 0).parameters)


@pytest.mark.parametrize(("case", "dtype", "execution"), LEARNING_CLIMBS)
def test_zero_by_structure_are_the_biases_of_keys_alone(case, dtype, execution):
    """Softmax ignores what is the same for all keys; a projection that is query and value too is no such thing."""
    zeros = verdict(case, dtype, execution).structural_zeros
    assert set(zeros) == set(case.structural_zeros)
