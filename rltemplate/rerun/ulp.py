"""The difference of two arrays: how many elements, by how many units in the last place, and the first one.

A unit in the last place (ULP) is the distance between neighbouring floating-point numbers. Counted in raw
units, a sum that cancels to nearly nothing looks far off although it is as good as its terms; so differences
are also given in units of the largest of the two values and the array's root mean square (`scaled`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

EQUAL = "equal"
LAST_BITS = "last bits"  # as after another order of additions
AMPLIFIED = "amplified"  # more than that and less than another precision, as after many steps
PRECISION = "precision"  # as if one side had computed with a shorter type, such as TF32 or bfloat16
DIFFERENT = "different"  # other numbers

# The limits of the kinds, in scaled units; measured for float32, whose fraction has 23 bits.
_LAST_BITS_MAX, _LAST_BITS_MEDIAN = 64.0, 8.0
_PRECISION_MIN = 2.0**13  # TF32 keeps 10 of the 23 bits
_PRECISION_LARGEST = 2.0**-6  # of the value: bfloat16 rounds to 2^-9, and sums collect a few of these


@dataclass(frozen=True, slots=True)
class ArrayDifference:
    """The result of `compare_arrays`; `kind` is one of this module's words.

    `differing` of `size` elements have other bits. Distances are over these; they are None for integers, for
    other shapes and types, with infinity or NaN, and where nothing differs. `first` are the coordinates of
    the first that differs, `values` its values in a and b, `hexes` the same in hexadecimal.
    """

    kind: str
    shapes: list[list[int]]
    dtypes: list[str]
    size: int
    differing: int = 0
    median_ulp: float | None = None
    max_ulp: int | None = None
    max_scaled: float | None = None
    first: list[int] | None = None
    values: list[str] | None = None
    hexes: list[str] | None = None


def compare_arrays(a: np.ndarray, b: np.ndarray) -> ArrayDifference:
    """Compare two arrays of floats, integers or truth values."""
    shapes, dtypes = [list(a.shape), list(b.shape)], [str(a.dtype), str(b.dtype)]
    found = ArrayDifference(EQUAL, shapes, dtypes, a.size)
    if a.shape != b.shape or a.dtype != b.dtype:
        return replace(found, kind=DIFFERENT)
    flat_a, flat_b = (np.ascontiguousarray(array).reshape(-1) for array in (a, b))
    differs = flat_a.view(f"u{a.dtype.itemsize}") != flat_b.view(f"u{a.dtype.itemsize}")
    if not differs.any():
        return found
    index = int(np.argmax(differs))
    pair = flat_a[index], flat_b[index]
    is_float = a.dtype.kind == "f"
    found = replace(
        found,
        kind=DIFFERENT,
        differing=int(differs.sum()),
        first=[int(place) for place in np.unravel_index(index, a.shape)],
        values=[str(value) for value in pair],
        hexes=[float(value).hex() if is_float else hex(int(value)) for value in pair],
    )
    if not is_float or not (np.isfinite(flat_a[differs]).all() and np.isfinite(flat_b[differs]).all()):
        return found
    distance = ulp_distance(flat_a[differs], flat_b[differs])
    wide_a, wide_b = (flat[differs].astype(np.float64) for flat in (flat_a, flat_b))
    size = np.maximum(np.maximum(np.abs(wide_a), np.abs(wide_b)), max(_rms(flat_a), _rms(flat_b)))
    below = np.nextafter(np.finfo(a.dtype).max, a.dtype.type(0))  # the largest number has no next one
    unit = np.spacing(np.minimum(size.astype(a.dtype), below)).astype(np.float64)
    scaled = np.abs(wide_a / unit - wide_b / unit)  # divided first: the difference may overflow
    kind = AMPLIFIED
    if scaled.max() <= _LAST_BITS_MAX and np.median(scaled) <= _LAST_BITS_MEDIAN:
        kind = LAST_BITS
    elif np.abs(wide_a / size - wide_b / size).max() > _PRECISION_LARGEST:
        kind = DIFFERENT
    elif scaled.max() >= _PRECISION_MIN:
        kind = PRECISION
    return replace(
        found,
        kind=kind,
        median_ulp=float(np.median(distance)),
        max_ulp=int(distance.max()),
        max_scaled=float(scaled.max()),
    )


def ulp_distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Steps (uint64) from each float to its counterpart through all floats in between; none from -0 to +0."""
    a, b = _ordered(a), _ordered(b)
    distance: np.ndarray = np.maximum(a, b).view(np.uint64) - np.minimum(a, b).view(np.uint64)
    return distance


def _ordered(values: np.ndarray) -> np.ndarray:
    """Integers in the order of the floats, neighbours for neighbours (Dawson 2012, comparing floats)."""
    bits: Any = values.view(f"i{values.dtype.itemsize}")
    # Negative floats count up from the lowest integer, as their magnitude grows; both zeros become 0.
    ordered: np.ndarray = np.where(bits < 0, np.iinfo(bits.dtype).min - np.minimum(bits, 0), bits)
    return ordered.astype(np.int64)


def _rms(values: np.ndarray) -> float:
    """Root mean square of the finite values, or 0."""
    wide = values[np.isfinite(values)].astype(np.float64)
    largest = float(np.abs(wide).max(initial=0.0))
    return largest * float(np.sqrt(np.mean(np.square(wide / largest)))) if largest else 0.0  # no overflow
