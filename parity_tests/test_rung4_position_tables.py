"""Rung 4: position tables. Loaded ones are equal; freshly built ones differ by no more than their frequencies' rounding."""

import numpy as np
import pytest

from flax_transformer import parity
from flax_transformer.layers import sinusoidal_table
from parity_tests.ladder import climbs, require
from parity_tests.references import needs_torch

# A learned table is a parameter.
TABLES = climbs(of=lambda case: case.config("float32").position_table != "learned")


@pytest.mark.parametrize(("case", "dtype", "execution"), TABLES)
def test_loaded_tables_are_equal(case, dtype, execution):
    require(case, dtype, execution, "buffers")


@needs_torch
@pytest.mark.parametrize("d_model", [20, 64, 512])
@pytest.mark.parametrize("formula", ["exp", "pow"])
def test_all_5000_rows_of_a_fresh_table_are_within_the_rounding_of_the_frequencies(formula, d_model):
    from torch_reference.decoder_only import position_embedding
    from torch_reference.encoder_decoder import PositionalEncoding

    if formula == "exp":
        expected = PositionalEncoding(d_model, 0.0).pe[0].numpy()
    else:
        expected = position_embedding(5000, d_model).numpy()
    table = sinusoidal_table(5000, d_model, formula=formula)
    frequencies = (10000.0 ** (-np.arange(0, d_model, 2) / d_model)).astype(np.float32)
    finding = parity.judge_position_table(expected, table, frequencies=frequencies)
    assert finding.passed, finding.detail


@needs_torch
def test_the_tolerance_of_tables_tells_a_table_off_by_one_position():
    from torch_reference.decoder_only import position_embedding

    table = sinusoidal_table(5000, 64, formula="pow")
    frequencies = (10000.0 ** (-np.arange(0, 64, 2) / 64)).astype(np.float32)
    shifted = np.roll(position_embedding(5000, 64).numpy(), 1, axis=0)
    assert not parity.judge_position_table(shifted, table, frequencies=frequencies).passed
