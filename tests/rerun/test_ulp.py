"""The distance of two arrays, against what IEEE 754 says about neighbours and spacing."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from rltemplate.rerun.ulp import compare_arrays, ulp_distance

FLOATS = [np.float16, np.float32, np.float64]


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_distance_is_the_number_of_floats_in_between_whatever_the_signs(dtype: Any) -> None:
    """In exact integers: the largest distances do not fit into 64 bits with a sign."""
    bits = 8 * np.dtype(dtype).itemsize
    words = np.random.default_rng(3).integers(0, 2**bits - 1, 4000, dtype=f"u{bits // 8}", endpoint=True)
    # Every exponent, both signs, and the smallest numbers.
    smallest = (np.arange(-9, 9) * np.finfo(dtype).smallest_subnormal).astype(dtype)
    values = np.concatenate([words.view(dtype), smallest])
    values = values[np.isfinite(values)]
    with np.errstate(over="ignore"):  # the largest number has infinity beside it
        assert set(ulp_distance(values, np.nextafter(values, dtype(np.inf))).tolist()) == {1}

    def place(value: Any) -> int:
        magnitude = int(np.abs(value).view(f"u{bits // 8}"))
        return -magnitude if value < 0 else magnitude

    a, b = values, values[::-1].copy()
    assert ulp_distance(a, b).tolist() == [abs(place(x) - place(y)) for x, y in zip(a, b, strict=True)]


@pytest.mark.parametrize("dtype", FLOATS)
def test_one_element_in_its_last_bit(dtype: Any) -> None:
    a = np.linspace(1, 2, 24, dtype=dtype, endpoint=False).reshape(2, 3, 4)
    b = a.copy(order="F")  # the first element is that of the array, not of memory
    b[1, 0, 2] = np.nextafter(b[1, 0, 2], dtype(9))
    found = compare_arrays(a, b)
    assert (found.kind, found.size, found.differing) == ("last bits", 24, 1)
    assert (found.max_ulp, found.median_ulp, found.max_scaled) == (1, 1.0, 1.0)
    assert found.first == [1, 0, 2]
    assert found.hexes is not None
    assert [float.fromhex(digits) for digits in found.hexes] == [float(a[1, 0, 2]), float(b[1, 0, 2])]


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
    assert compare_arrays(a[17:18], b[17:18]).kind == "different"


def test_each_kind_of_distance_has_its_name() -> None:
    a = np.ones(100, np.float32)
    for units, kind in [(64, "amplified"), (8, "last bits"), (9, "amplified"), (2**13, "precision")]:
        assert compare_arrays(a, a + np.float32(units * 2.0**-23)).kind == kind, units
    assert compare_arrays(a, -a).kind == compare_arrays(a, a * np.float32(1.1)).kind == "different"
    terms = np.random.default_rng(1).normal(size=(500, 256)).astype(np.float32)
    assert compare_arrays(terms.sum(1), np.add.reduce(terms.T.copy(), axis=0)).kind == "last bits"
    x, w = terms[:64], terms[64:128].T.copy()
    for bits in (10, 7):  # of the fraction of TF32 and bfloat16
        drop = np.uint32(23 - bits)
        short = [
            (each.view(np.uint32) + (np.uint32(1) << (drop - 1)) >> drop << drop).view(np.float32)
            for each in (x, w)
        ]
        assert compare_arrays(x @ w, short[0] @ short[1]).kind == "precision"


def test_special_values() -> None:
    largest = np.finfo(np.float64).max
    found = compare_arrays(np.array([largest, 1.0]), np.array([-largest, 1.0]))
    assert (found.kind, found.differing, found.max_scaled) == ("different", 1, 2.0**54 - 2)
    a, b = (np.array([1, np.nan, value, 4], np.float32) for value in (np.nan, 3))
    found = compare_arrays(a, b)  # NaN equals NaN
    assert (found.differing, found.kind, found.first) == (1, "different", [2])
    assert found.values == ["nan", "3.0"]
    # The digests of a trace see zeros of the other sign, so a difference must be shown.
    found = compare_arrays(np.array([1.0, 0.0]), np.array([1.0, -0.0]))
    assert (found.kind, found.differing, found.max_ulp) == ("last bits", 1, 0)
    for x, y in [(np.inf, 1.0), (np.inf, -np.inf), (1.0, -np.inf)]:
        found = compare_arrays(np.array([x, 2.0], np.float32), np.array([y, 2.0], np.float32))
        assert (found.kind, found.differing, found.max_scaled) == ("different", 1, None)
        json.dumps(asdict(found), allow_nan=False)


def test_integers_truth_values_and_other_shapes_are_equal_or_different() -> None:
    for a, b in ([3, -2], [3, 5]), ([-(2**63)], [2**63 - 1]), ([True, False], [True, True]):
        found = compare_arrays(np.array(a), np.array(b))
        assert (found.kind, found.differing, found.max_ulp) == ("different", 1, None)
        assert found.values == [str(a[-1]), str(b[-1])]
    zeros = np.zeros((2, 3), np.float32)
    for other in (np.zeros((3, 2), np.float32), np.zeros((2, 3)), np.zeros((2, 3), np.int32)):
        assert compare_arrays(zeros, other).kind == "different"
    assert compare_arrays(np.zeros((0, 3)), np.zeros((0, 3))).kind == "equal"
