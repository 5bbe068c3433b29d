"""The distance of two arrays, against what IEEE 754 says about neighbours."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from runlab.rerun.ulp import compare_arrays, ulp_distance


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
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


def test_values_without_a_distance_are_counted_all_the_same() -> None:
    for a, b, distance in (
        ([np.nan, 1.0, np.nan], [np.nan, 1.0, 3.0], None),  # NaN equals NaN
        ([1.0, np.inf], [1.0, -np.inf], None),
        ([1.0, 0.0], [1.0, -0.0], 0),  # the digests of a trace see zeros of the other sign
        ([True, False], [True, True], None),
    ):
        gap = compare_arrays(np.array(a), np.array(b))
        assert (gap.differing, gap.max_ulp, gap.values) == (1, distance, [str(a[-1]), str(b[-1])])
    zeros = np.zeros((2, 3), np.float32)
    for other in (np.zeros((3, 2), np.float32), np.zeros((2, 3))):
        assert compare_arrays(zeros, other).differing is None
    assert compare_arrays(np.zeros((0, 3)), np.zeros((0, 3))).differing == 0
