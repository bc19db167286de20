"""Masks and fill values against expectations written by hand."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_transformer.masks import (
    FILL_VALUES,
    causal_mask,
    combine_masks,
    fill_value,
    from_document_mask,
    padding_mask,
    require_mask,
)


# Typed as anything, since these functions take and refuse more than their annotations say.
def array(values: Any, dtype: Any = None) -> Any:
    return np.array(values, dtype)


def ones(shape: tuple[int, ...], dtype: Any) -> Any:
    return np.ones(shape, dtype)


IDS = array([[4, 9, 0, 2, 0], [0, 0, 0, 0, 0], [1, 2, 3, 4, 5]])
PADDING = array([[1, 1, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]], bool)[:, None, None, :]
CAUSAL = array(
    [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]],
    bool,
)[None, None]


def assert_mask(actual: jax.Array, expected: Any) -> None:
    assert isinstance(actual, jax.Array)
    assert actual.dtype == bool
    np.testing.assert_array_equal(actual, expected, strict=True)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8, np.int16])
def test_padding_is_where_the_pad_id_stands(dtype):
    assert_mask(padding_mask(IDS.astype(dtype)), PADDING)
    assert_mask(padding_mask(jnp.asarray(IDS, jnp.int32), pad_id=2), (IDS != 2)[:, None, None, :])
    assert_mask(padding_mask(IDS.tolist()), PADDING)


@pytest.mark.parametrize("shape", [(5,), (2, 3, 5), ()])
def test_a_padding_mask_of_ids_that_are_not_two_axes_is_refused(shape):
    with pytest.raises(ValueError, match=r"ids of shape \(B, S\), got .*; one sequence is ids\[None, :\]"):
        padding_mask(ones(shape, np.int32))


def test_the_causal_mask_shows_each_position_itself_and_what_is_before():
    assert_mask(causal_mask(5), CAUSAL)
    assert_mask(causal_mask(1), np.ones((1, 1, 1, 1), bool))


@pytest.mark.parametrize("length", [0, -1])
def test_a_causal_mask_of_no_length_is_refused(length):
    with pytest.raises(ValueError, match=f"length of at least 1, got {length}"):
        causal_mask(length)


def test_combined_masks_allow_what_each_allows():
    assert_mask(combine_masks(padding_mask(IDS), causal_mask(5)), PADDING & CAUSAL)
    first = array([[[[True, True, False, True, True]]]])
    assert_mask(combine_masks(causal_mask(5), padding_mask(IDS), first), PADDING & CAUSAL & first)
    assert_mask(combine_masks(PADDING), PADDING)
    assert_mask(jax.jit(combine_masks)(PADDING, CAUSAL), PADDING & CAUSAL)


def test_combining_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one mask, got none; pass None to a model"):
        combine_masks()


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint8])
def test_a_mask_that_is_not_boolean_is_refused(dtype):
    wrong = CAUSAL.astype(dtype)
    words = f"must be boolean, True = may attend, got dtype {np.dtype(dtype)}; .*from_document_mask"
    with pytest.raises(ValueError, match=f"mask 1 of combine_masks {words}"):
        combine_masks(PADDING, wrong)
    with pytest.raises(ValueError, match=f"source_mask {words}"):
        require_mask(wrong, (3, 5, 5), name="source_mask")


@pytest.mark.parametrize("wrong", [CAUSAL[0], CAUSAL[0, 0], CAUSAL[None], array(True)])
def test_a_mask_that_does_not_have_four_axes_is_refused(wrong):
    words = r"must have four axes, broadcastable to \(B, 1, T, S\), got shape"
    with pytest.raises(ValueError, match=f"mask 0 of combine_masks {words}"):
        combine_masks(wrong, PADDING)
    with pytest.raises(ValueError, match=words):
        require_mask(wrong, (3, 5, 5), name="target_mask")


@pytest.mark.parametrize("wrong", [None, [[[[True]]]], "causal", True])
def test_a_mask_that_is_no_array_is_refused(wrong):
    with pytest.raises(ValueError, match=f"mask 1 of combine_masks must be a boolean array .*{type(wrong).__name__}"):
        combine_masks(PADDING, wrong)


def test_masks_that_do_not_broadcast_are_refused():
    with pytest.raises(ValueError, match=r"Incompatible shapes .*\(1, 1, 5, 5\), \(1, 1, 7, 7\)"):
        combine_masks(CAUSAL, causal_mask(7))


@pytest.mark.parametrize("shape", [(3, 1, 5, 7), (1, 1, 5, 7), (3, 1, 1, 7), (3, 1, 5, 1), (1, 1, 1, 1)])
def test_what_broadcasts_to_the_models_shape_is_required_and_no_more(shape):
    require_mask(ones(shape, bool), (3, 5, 7), name="mask")
    require_mask(None, (3, 5, 7), name="mask")


@pytest.mark.parametrize(
    "shape", [(2, 1, 5, 7), (3, 4, 5, 7), (3, 1, 7, 5), (3, 1, 5, 5), (3, 1, 7, 7), (0, 1, 5, 7), (4, 1, 6, 8)]
)
def test_another_shape_is_refused(shape):
    words = f"source_mask of decode must be broadcastable to (B, 1, T, S) = (3, 1, 5, 7), got shape {shape}"
    with pytest.raises(ValueError, match=re.escape(words)):
        require_mask(ones(shape, bool), (3, 5, 7), name="source_mask of decode")


@pytest.mark.parametrize("dtype", [np.bool_, np.float32, np.float64, np.int32])
def test_a_document_mask_gets_a_head_axis_and_becomes_boolean(dtype):
    document = (PADDING & CAUSAL)[:, 0].astype(dtype)
    assert_mask(from_document_mask(document), PADDING & CAUSAL)
    assert_mask(from_document_mask(PADDING[:, 0].astype(dtype)), PADDING)
    if dtype is not np.float64:  # JAX has none outside its 64-bit mode
        assert_mask(from_document_mask(jnp.asarray(document)), PADDING & CAUSAL)
        assert_mask(jax.jit(from_document_mask)(jnp.asarray(document)), PADDING & CAUSAL)


def test_anything_but_zero_may_be_attended_to_in_a_document_mask():
    document = array([[[0.0, -0.0, 0.5, -2.0, np.inf, np.nan]]], np.float32)
    assert_mask(from_document_mask(document), array([[[[False, False, True, True, True, True]]]]))


@pytest.mark.parametrize("shape", [(5, 5), (3, 1, 5, 5), (5,)])
def test_a_document_mask_without_three_axes_is_refused(shape):
    with pytest.raises(ValueError, match=re.escape(f"a document mask has three axes, B T S, got shape {shape}")):
        from_document_mask(ones(shape, np.float32))


def test_the_masks_of_the_document_itself_are_ours():
    torch = pytest.importorskip("torch")
    from torch_reference.encoder_decoder import create_pad_mask, subsequent_mask

    ids = torch.from_numpy(IDS)
    padding: Any = create_pad_mask(ids)
    causal: Any = subsequent_mask(5)
    assert_mask(from_document_mask(padding), padding_mask(IDS))
    assert_mask(from_document_mask(causal), causal_mask(5))
    assert_mask(from_document_mask(padding * causal), combine_masks(padding_mask(IDS), causal_mask(5)))
    with pytest.raises(ValueError, match=r"must be a boolean array of JAX or NumPy, got Tensor; .*from_document_mask"):
        combine_masks(causal)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_fill_values_are_those_that_their_names_say(dtype):
    assert fill_value("minus_1e9", jnp.dtype(dtype)) == -1e9
    assert fill_value("minus_inf", jnp.dtype(dtype)) == -np.inf
    lowest = fill_value("dtype_min", jnp.dtype(dtype))
    assert lowest == {"float32": -3.4028234663852886e38, "bfloat16": -3.3895313892515355e38, "float16": -65504.0}[dtype]
    assert set(FILL_VALUES) == {"minus_1e9", "minus_inf", "dtype_min"}
