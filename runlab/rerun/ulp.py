"""The difference of two arrays: how many elements, by how many units in the last place, and the first one.

A unit in the last place (ULP) is the distance between neighbouring floating-point numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True, slots=True)
class ArrayDifference:
    """The result of `compare_arrays`.

    `differing` of `size` elements have different bits; None for different shapes or types. Distances are over
    these elements. They are None for integers, with infinity or NaN, and if nothing differs. `first` are the
    coordinates of the first difference, `values` its values in a and b, `hexes` the same in hexadecimal.
    """

    shapes: list[list[int]]
    dtypes: list[str]
    size: int
    differing: int | None = None
    median_ulp: float | None = None
    max_ulp: int | None = None
    first: list[int] | None = None
    values: list[str] | None = None
    hexes: list[str] | None = None


def compare_arrays(a: np.ndarray, b: np.ndarray) -> ArrayDifference:
    diff = ArrayDifference([list(a.shape), list(b.shape)], [str(a.dtype), str(b.dtype)], a.size)
    if a.shape != b.shape or a.dtype != b.dtype:
        return diff
    flat_a, flat_b = (np.ascontiguousarray(array).reshape(-1) for array in (a, b))
    differs = flat_a.view(f"u{a.dtype.itemsize}") != flat_b.view(f"u{a.dtype.itemsize}")
    one, other = flat_a[differs], flat_b[differs]
    if not one.size:
        return replace(diff, differing=0)
    pair, is_float = (one[0], other[0]), a.dtype.kind == "f"
    diff = replace(
        diff,
        differing=one.size,
        first=[int(i) for i in np.unravel_index(np.argmax(differs), a.shape)],
        values=[str(value) for value in pair],
        hexes=[float(value).hex() if is_float else hex(int(value)) for value in pair],
    )
    if not is_float or not np.isfinite([one, other]).all():
        return diff
    distance = ulp_distance(one, other)
    return replace(diff, median_ulp=float(np.median(distance)), max_ulp=int(distance.max()))


def ulp_distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Distance (uint64) from a to b, counted in neighbouring floats; zero from -0 to +0."""
    # The bits of a magnitude count the floats below it (Dawson 2012, comparing floats).
    a, b = (np.copysign(1, x).astype(int) * np.abs(x).view(f"i{x.dtype.itemsize}") for x in (a, b))
    distance: np.ndarray = np.maximum(a, b).view(np.uint64) - np.minimum(a, b).view(np.uint64)
    return distance
