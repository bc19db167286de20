"""Rung 3: masks, bit for bit, and what a row that is masked everywhere gives."""

import jax
import numpy as np
import pytest

from flax_transformer.attention import attention_weights
from flax_transformer.config import DecoderOnlyConfig
from flax_transformer.numerics import Numerics
from parity_tests.ladder import CLIMBS, require
from parity_tests.references import needs_torch


@pytest.mark.parametrize(("case", "dtype", "execution"), CLIMBS)
def test_masks_are_bit_equal(case, dtype, execution):
    require(case, dtype, execution, "masks")


@needs_torch
@pytest.mark.parametrize("mask_fill", ["minus_1e9", "minus_inf"])
def test_weights_of_fully_and_partly_masked_rows_are_those_of_pytorch(mask_fill, float64):
    import torch

    rng = np.random.default_rng(5)
    query, key = rng.normal(size=(3, 7, 5, 4)), rng.normal(size=(3, 9, 5, 4))
    mask = rng.random((3, 1, 7, 9)) < 0.6
    mask[1, 0, 2] = mask[2] = False  # one row, and one whole example

    scores = torch.einsum("btnh,bsnh->bnts", torch.from_numpy(query), torch.from_numpy(key)) / 4**0.5
    fill = -1e9 if mask_fill == "minus_1e9" else float("-inf")
    expected = torch.softmax(scores.masked_fill(torch.from_numpy(~mask), fill), dim=-1).numpy()

    numerics = Numerics.of(DecoderOnlyConfig.small(vocab_size=11, param_dtype="float64", compute_dtype="float64"))
    arrays = jax.tree.map(jax.numpy.asarray, (query, key, mask))
    weights = np.asarray(attention_weights(*arrays[:2], mask=arrays[2], mask_fill=mask_fill, numerics=numerics))

    np.testing.assert_array_equal(np.isnan(weights), np.isnan(expected))
    np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-15)
    if mask_fill == "minus_inf":
        assert np.isnan(weights[1, :, 2]).all()
        assert np.isnan(weights[2]).all()
    else:
        np.testing.assert_array_equal(weights[1, :, 2], np.full((5, 9), 1 / 9))
