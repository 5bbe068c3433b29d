"""The distance of two arrays, against what IEEE 754 says about neighbours and spacing."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from rltemplate.rerun.ulp import compare_arrays, ulp_distance, ulp_of

FLOATS = [np.float16, np.float32, np.float64]
WORDS: dict[Any, Any] = {np.float16: np.uint16, np.float32: np.uint32, np.float64: np.uint64}


def of_all_magnitudes(dtype: Any, count: int = 4000) -> np.ndarray:
    """Random finite floats: every exponent is equally likely, both signs, subnormal ones included."""
    rng = np.random.default_rng(7)
    words = rng.integers(0, np.iinfo(WORDS[dtype]).max, count, dtype=WORDS[dtype], endpoint=True)
    subnormal = (rng.integers(0, 40, 50) * np.finfo(dtype).smallest_subnormal).astype(dtype)
    values: np.ndarray = np.concatenate([words.view(dtype), subnormal, -subnormal])
    finite: np.ndarray = values[np.isfinite(values)]
    return finite


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_distance_is_the_number_of_floats_in_between_whatever_the_signs(dtype: Any) -> None:
    """In exact integers: the largest distances do not fit into 64 bits with a sign."""
    rng = np.random.default_rng(3)
    values = of_all_magnitudes(dtype)
    neighbours = np.nextafter(values, dtype(np.inf))
    assert set(ulp_distance(values, neighbours).tolist()) == {1}
    a, b = rng.permutation(values), rng.permutation(values)
    bits: int = 8 * np.dtype(dtype).itemsize

    def place(value: Any) -> int:
        word: int = np.array([value], dtype).view(WORDS[dtype])[0].item()
        sign, magnitude = word >> (bits - 1), word & ~(1 << (bits - 1))
        return -magnitude if sign else magnitude

    assert ulp_distance(a, b).tolist() == [abs(place(x) - place(y)) for x, y in zip(a, b, strict=True)]
    zero, small = dtype(0), np.finfo(dtype).smallest_subnormal
    a, b = np.array([-small, -zero, -3 * small], dtype), np.array([small, zero, 2 * small], dtype)
    assert ulp_distance(a, b).tolist() == [2, 0, 5]


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_unit_is_the_distance_to_the_next_float(dtype: Any) -> None:
    values = np.abs(of_all_magnitudes(dtype))
    values = values[values < np.finfo(dtype).max]
    expected = np.nextafter(values, dtype(np.inf)).astype(np.float64) - values.astype(np.float64)
    assert np.array_equal(ulp_of(values, np.dtype(dtype)), expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_one_element_in_its_last_bit(dtype: Any) -> None:
    a = np.linspace(1, 2, 24, dtype=dtype, endpoint=False).reshape(2, 3, 4)
    b = a.copy(order="F")  # the first element is that of the array, not of memory
    b[1, 0, 2] = np.nextafter(b[1, 0, 2], dtype(9))
    found = compare_arrays(a, b)
    assert (found.kind, found.size, found.differing, found.only_bits) == ("last bits", 24, 1, 0)
    assert (found.max_ulp, found.median_ulp, found.max_scaled) == (1, 1.0, 1.0)
    assert found.first is not None
    assert (found.first.index, found.first.coordinates) == (14, [1, 0, 2])
    assert float.fromhex(found.first.hex_a) == float(a[1, 0, 2])
    assert dtype(found.first.b) == b[1, 0, 2]
    assert int(found.first.bits_b, 16) == int(found.first.bits_a, 16) + 1
    assert len(found.first.bits_a) == 2 + 2 * a.dtype.itemsize


def test_a_cancelling_sum_is_off_by_many_raw_units_and_few_scaled_ones() -> None:
    a = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    a[17] = 1e-7
    b = a.copy()
    b[17] = np.float32(1.5e-7)  # half a unit of numbers near one
    found = compare_arrays(a, b)
    assert found.max_ulp is not None
    assert found.max_scaled is not None
    assert (found.max_ulp > 1e6, found.max_scaled < 1, found.kind) == (True, True, "last bits")
    # In an array of numbers of its own size the same difference is no rounding.
    alone = compare_arrays(a[17:18], b[17:18])
    assert alone.kind == "different"
    assert alone.max_over_rms == pytest.approx(1 / 3, rel=1e-3)


def rounded(values: np.ndarray, bits: int) -> np.ndarray:
    """float32 with only so many bits of its fraction."""
    drop = 23 - bits
    words = values.view(np.uint32) + np.uint32(1 << (drop - 1))
    return (words >> np.uint32(drop) << np.uint32(drop)).view(np.float32)


@pytest.mark.parametrize("bits", [10, 7])  # TF32, bfloat16
def test_products_of_a_shorter_type_are_of_another_precision(bits: int) -> None:
    rng = np.random.default_rng(2)
    x, w = rng.normal(size=(64, 128)).astype(np.float32), rng.normal(size=(128, 64)).astype(np.float32)
    assert compare_arrays(x @ w, rounded(x, bits) @ rounded(w, bits)).kind == "precision"


def test_the_kinds_in_between_and_beyond() -> None:
    a = np.ones(100, np.float32)
    for units, kind in [(64, "amplified"), (8, "last bits"), (9, "amplified"), (2**13, "precision")]:
        assert compare_arrays(a, a + np.float32(units * 2.0**-23)).kind == kind, units
    assert compare_arrays(a, -a).kind == compare_arrays(a, a * np.float32(1.1)).kind == "different"
    terms = np.random.default_rng(1).normal(size=(500, 256)).astype(np.float32)
    assert compare_arrays(terms.sum(1), np.add.reduce(terms.T.copy(), axis=0)).kind == "last bits"
    largest = np.finfo(np.float64).max
    found = compare_arrays(np.array([largest, 1.0]), np.array([-largest, 1.0]))
    assert (found.kind, found.differing, found.max_scaled) == ("different", 1, 2.0**54 - 2)


def test_special_values() -> None:
    a = np.array([1, np.nan, np.nan, 4, np.nan], np.float32)
    b = np.array([1, np.nan, 3, np.nan, 5], np.float32)
    found = compare_arrays(a, b)  # NaN equals NaN
    assert (found.differing, found.nan_a, found.nan_b, found.kind) == (3, 2, 1, "different")
    assert found.first is not None
    assert (found.first.coordinates, found.first.a, found.first.b) == ([2], "nan", "3.0")
    assert compare_arrays(a, a).kind == "equal"
    # The digests of a trace see zeros of the other sign, so a difference must be shown.
    found = compare_arrays(np.array([1.0, 0.0]), np.array([1.0, -0.0]))
    assert (found.kind, found.differing, found.only_bits) == ("bits only", 0, 1)
    payload = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    assert compare_arrays(payload[:1], payload[1:]).kind == "bits only"
    for x, y in [(np.inf, 1.0), (np.inf, -np.inf), (1.0, -np.inf)]:
        found = compare_arrays(np.array([x, 2.0], np.float32), np.array([y, 2.0], np.float32))
        assert (found.kind, found.differing, found.max_scaled) == ("different", 1, None)
        json.dumps(asdict(found), allow_nan=False)


@pytest.mark.parametrize(
    ("a", "b", "by"),
    [
        (np.array([3, -2, 7]), np.array([3, 5, 7]), 7),
        (np.array([-(2**63)]), np.array([2**63 - 1]), 2**64 - 1),
        (np.array([0], np.uint64), np.array([2**64 - 1], np.uint64), 2**64 - 1),
        (np.array([True, False]), np.array([True, True]), 1),
    ],
)
def test_integers_and_truth_values_are_equal_or_different(a: np.ndarray, b: np.ndarray, by: int) -> None:
    found = compare_arrays(a, b)
    assert (found.kind, found.differing, found.max_difference) == ("different", 1, by)
    assert found.max_ulp is None
    assert found.first is not None
    assert (found.first.a, found.first.b) == tuple(str(x[found.first.index]) for x in (a, b))
    assert compare_arrays(a, a.copy()).kind == "equal"


def test_other_shapes_and_types_are_different_without_a_look_at_elements() -> None:
    a = np.zeros((2, 3), np.float32)
    for b in (np.zeros((3, 2), np.float32), np.zeros((2, 3)), np.zeros((2, 3), np.int32)):
        found = compare_arrays(a, b)
        shown = (found.kind, found.first, found.shape_b, found.dtype_b)
        assert shown == ("different", None, list(b.shape), str(b.dtype))
    with pytest.raises(TypeError, match="complex128"):
        compare_arrays(np.zeros(1, complex), np.zeros(1, complex))
    assert compare_arrays(np.zeros((0, 3)), np.zeros((0, 3))).kind == "equal"
