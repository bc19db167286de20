"""The rules: what they allow, and what they do not."""

import math

import numpy as np
import pytest

from flax_transformer.parity import judgement, measures, tolerances
from flax_transformer.parity.judgement import Sample


def noise(shape=(7, 11), seed=0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def test_the_meaning_rule_allows_rounding_noise_and_no_more():
    a = noise()
    scale = np.abs(a).max()
    assert judgement.judge_values([Sample(a, a * (1 + 2**-52))]).passed
    wrong = a.copy()
    wrong[3, 5] += 1.5e-12 * scale
    finding = judgement.judge_values([Sample(a, wrong)])
    assert not finding.passed
    assert finding.measures is not None
    assert finding.measures.where == (3, 5)


def test_a_small_element_must_be_right_in_float32_though_a_large_one_sets_the_scale():
    a = noise()
    a[0, 0] = 1e9  # as a score that a mask filled
    wrong = a.copy()
    wrong[3, 5] *= 1 + 1e-6
    finding = judgement.judge_values([Sample(a, wrong)])
    assert not finding.passed
    assert "1 elements differ after rounding to float32" in finding.detail


def test_noise_that_straddles_a_float32_boundary_is_forgiven_and_a_larger_difference_is_not():
    a = noise()
    a[3, 5] = 1 + 2**-24 + 2**-52  # just above the middle between 1 and its neighbour in float32
    below, beyond = a.copy(), a.copy()
    below[3, 5] = 1 + 2**-24 - 2**-52
    beyond[3, 5] = 1 + 2**-24 - 2e-14 * np.abs(a).max()
    assert tolerances.float32_misses(a, below) == 1
    assert judgement.judge_values([Sample(a, below)]).passed
    assert not judgement.judge_values([Sample(a, beyond)]).passed


def test_nan_and_infinity_must_be_at_the_same_place_and_of_the_same_sign():
    a = noise()
    a[1, 2], a[3, 4], a[5, 6] = np.nan, np.inf, -np.inf
    assert judgement.judge_values([Sample(a, a.copy())]).passed
    for place, value in (((1, 2), 0.0), ((0, 0), np.nan), ((3, 4), -np.inf), ((5, 6), np.nan), ((2, 2), np.inf)):
        wrong = a.copy()
        wrong[place] = value
        assert tolerances.misplaced(a, wrong) == 1
        finding = judgement.judge_values([Sample(a, wrong)])
        assert not finding.passed
        assert "NaN or infinite on one side only" in finding.detail


def single(truth: np.ndarray, reference_error: float, candidate_error: float, seed: int = 1) -> Sample:
    """Float32 arrays whose rms errors against ``truth`` are about those given, in units of 2^-24 of its largest value."""
    unit = 2**-24 * np.abs(truth).max()
    signs = np.sign(noise(truth.shape, seed))
    reference, candidate = (
        (truth + size * unit * signs).astype(np.float32) for size in (reference_error, candidate_error)
    )
    return Sample(reference, candidate, truth)


@pytest.mark.parametrize(
    ("reference", "candidate", "passed"), [(1, 15, True), (1, 17, False), (100, 390, True), (100, 410, False)]
)
def test_a_single_float32_case_may_err_four_times_as_much_as_the_reference_above_a_floor(reference, candidate, passed):
    assert judgement.judge_values([single(noise(), reference, candidate)]).passed is passed


@pytest.mark.parametrize(
    ("reference", "candidate", "passed"), [(1, 7, True), (1, 9, False), (100, 190, True), (100, 210, False)]
)
def test_pooled_float32_cases_may_err_twice_as_much_as_the_reference_above_a_floor(reference, candidate, passed):
    samples = []
    for seed in range(tolerances.POOLED_SEEDS):
        truth = noise(seed=seed)
        truth /= np.abs(truth).max()  # one scale, so that the floor is the same for all
        samples.append(single(truth, reference, candidate, seed + 100))
    assert judgement.judge_values(samples).passed is passed


def test_one_bad_case_is_not_hidden_by_pooling():
    samples = [single(noise(seed=seed), 1, 40 if seed == 5 else 0.5, seed + 100) for seed in range(32)]
    finding = judgement.judge_values(samples)
    assert not finding.passed
    assert "in case 5" in finding.detail


def test_infinities_at_the_same_place_leave_the_error_of_the_rest():
    sample = single(noise(), 1, 15)
    for array in (sample.reference, sample.candidate):
        array[3, 5] = -np.inf
    assert judgement.judge_values([sample]).passed
    sample.candidate[0, 0] += 1
    assert not judgement.judge_values([sample]).passed


def test_what_is_copied_may_hold_nan_at_the_same_place():
    a = noise()
    a[1, 2] = np.nan
    assert judgement.judge_equal([Sample(a, a.copy())]).passed
    assert not judgement.judge_equal([Sample(a, noise())]).passed


def test_a_dtype_without_a_rule_does_not_pass():
    a = noise().astype(np.float16)
    assert not judgement.judge_values([Sample(a, a, a.astype(np.float64))]).passed


def test_integers_are_equal_or_they_differ():
    ids = np.random.default_rng(0).integers(0, 11, (3, 5))
    wrong = ids.copy()
    wrong[2, 3] += 1
    assert judgement.judge_values([Sample(ids, ids.astype(np.int32))]).passed
    assert "1 of 15 elements differ" in judgement.judge_values([Sample(ids, wrong)]).detail


def test_layouts_differ_by_shape_and_by_floating_type_but_not_by_the_width_of_an_integer():
    a = noise()
    assert judgement.judge_layout([Sample(a, a)]).passed
    assert "shape (11, 7)" in judgement.judge_layout([Sample(a, a.T)]).detail
    assert "is float32" in judgement.judge_layout([Sample(a, a.astype(np.float32))]).detail
    assert judgement.judge_layout([Sample(a.astype(np.int64), a.astype(np.int32))]).passed
    assert not judgement.judge_layout([Sample(a > 0, a.astype(np.int32))]).passed


def test_measures_are_what_they_are_called():
    a = np.array([[3.0, -4.0], [np.inf, 8.0]])
    b = np.array([[3.0, -4.0 - 2**-50], [np.inf, 7.0]])
    found = measures.measure(a, b)
    assert (found.max_abs, found.where, found.relative) == (1.0, (1, 1), 1 / 8)
    assert found.ulp == 2.0**49  # 1 in units of 2^-49, the spacing at 8
    assert found.rms == pytest.approx(math.sqrt((1 + 2**-100) / 4))
    assert found.cosine == pytest.approx((9 + 16 + 56) / math.sqrt(89 * 74))
    assert found.float32_misses == 1


def test_measures_survive_extreme_values_and_nothing_at_all():
    huge = np.array([1e300, -1e300])
    assert measures.measure(huge, -huge).cosine == pytest.approx(-1)
    assert measures.rms(huge) == pytest.approx(1e300)
    assert measures.measure(np.zeros((0, 3)), np.zeros((0, 3))).max_abs == 0
    assert measures.measure(np.zeros(3), np.full(3, 2.0)).relative == np.inf


def test_the_spacing_is_numpys_in_every_dtype():
    for dtype in (np.float64, np.float32, np.float16):
        values = np.abs(noise((50,))).astype(dtype) * np.array(37, dtype)
        np.testing.assert_array_equal(tolerances.spacing(values, dtype), np.spacing(values).astype(np.float64))
    assert tolerances.spacing(np.zeros(1), np.float32)[0] == np.finfo(np.float32).smallest_subnormal


def sinusoidal(frequencies: np.ndarray, length: int) -> np.ndarray:
    angle = np.arange(length, dtype=np.float32)[:, None] * frequencies
    pairs = np.stack([np.sin(angle.astype(np.float64)), np.cos(angle.astype(np.float64))], -1)
    return pairs.reshape(length, -1).astype(np.float32)


def test_position_tables_may_differ_by_a_last_place_of_the_frequency_times_the_position_and_not_by_a_formula():
    frequencies = np.exp(np.arange(0, 22, 2) * -(np.log(10000) / 22)).astype(np.float32)
    neighbour = np.nextafter(frequencies, np.float32(1))
    table = sinusoidal(frequencies, 5000)
    found = judgement.judge_position_table(table, sinusoidal(neighbour, 5000), frequencies=frequencies)
    assert found.passed
    assert found.measures is not None
    assert found.measures.max_abs > 1e-5, "a plain tolerance of 1e-5 would be too small"
    off_by_one = np.roll(table, 1, axis=0)
    assert not judgement.judge_position_table(table, off_by_one, frequencies=frequencies).passed
    other_base = sinusoidal((frequencies**1.0001).astype(np.float32), 5000)
    assert not judgement.judge_position_table(table, other_base, frequencies=frequencies).passed
    assert not judgement.judge_position_table(table, table[:-1], frequencies=frequencies).passed
    with_nan = table.copy()
    with_nan[3, 5] = np.nan
    assert not judgement.judge_position_table(table, with_nan, frequencies=frequencies).passed
