"""Rung 7: the loss on the logits, plain and with label smoothing and padding left out."""

import pytest

from parity_tests.ladder import LEARNING_CLIMBS, require


@pytest.mark.parametrize(("case", "dtype", "execution"), LEARNING_CLIMBS)
def test_the_loss_is_that_of_the_reference(case, dtype, execution):
    require(case, dtype, execution, "loss")
