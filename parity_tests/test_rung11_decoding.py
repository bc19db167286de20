"""Rung 11: greedy decoding, token for token."""

import jax
import numpy as np
import pytest

from parity_tests.cases import all_cases, load_reference
from parity_tests.references import as_tensors, module_and_inputs, needs_torch, reference

DECODING = [
    pytest.param(case, id=str(case), marks=[pytest.mark.document_size] * (case.size == "document"))
    for case in all_cases()
    if case.decode_reference is not None
]


SEEDS = range(3)


@needs_torch
@pytest.mark.parametrize("case", DECODING)
def test_greedy_sequences_are_those_of_the_reference(case):
    longest_alphabet = 0
    for seed in SEEDS:
        module, inputs = module_and_inputs(case, seed)
        expected = case.decode_reference(module.double(), **as_tensors(inputs)).numpy()
        with jax.enable_x64(True):
            model = case.model(case.config("float64"))
            load_reference(case, model, reference(case, "float64", seed))
            tokens = np.asarray(case.decode_model(model, **inputs))
        np.testing.assert_array_equal(tokens, expected)
        longest_alphabet = max(longest_alphabet, *(len(set(row)) for row in expected.tolist()))
    assert longest_alphabet > 2, "an untrained model likes to repeat itself; sequences of one token prove little"
