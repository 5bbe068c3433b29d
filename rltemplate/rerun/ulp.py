"""The difference of two arrays: how many elements, by how many units in the last place, and the first one.

A unit in the last place (ULP) is the distance between neighbouring floating-point numbers. Counted in raw
units, a sum that cancels to nearly nothing looks far off although it is as good as its terms; so differences
are also given in units of the largest of the two values and the array's root mean square (RMS).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

EQUAL = "equal"
BITS_ONLY = "bits only"  # the same values: zeros of the other sign, or NaNs with another payload
LAST_BITS = "last bits"  # as after another order of additions
AMPLIFIED = "amplified"  # more than that and less than another precision, as after many steps
PRECISION = "precision"  # as if one side had computed with a shorter type, such as TF32 or bfloat16
DIFFERENT = "different"  # other numbers

# The limits of the kinds, in scaled units; measured for float32, whose fraction has 23 bits.
_LAST_BITS_MAX = 64.0
_LAST_BITS_MEDIAN = 8.0
_PRECISION_MIN = 2.0**13  # TF32 keeps 10 of the 23 bits
_PRECISION_LARGEST = 2.0**-6  # of the value: bfloat16 rounds to 2^-9, and sums collect a few of these


@dataclass(frozen=True, slots=True)
class Element:
    """One element on both sides: as short decimals that mean exactly this value, as hex, and as raw bits."""

    index: int  # in row-major order
    coordinates: list[int]
    a: str
    b: str
    hex_a: str
    hex_b: str
    bits_a: str
    bits_b: str


@dataclass(frozen=True, slots=True)
class ArrayDifference:
    """The result of `compare_arrays`; `kind` is one of this module's words.

    `differing` of `size` elements have another value, `only_bits` further ones the same value in other bits.
    NaN equals NaN; `nan_a` and `nan_b` count elements that are NaN on that side alone. Distances are over the
    other differing elements: raw, scaled, and the largest as a part of the RMS. They are None for integers
    (then `max_difference` counts), for other shapes and types, with infinities and where nothing differs.
    """

    kind: str
    shape_a: list[int]
    shape_b: list[int]
    dtype_a: str
    dtype_b: str
    size: int
    differing: int = 0
    only_bits: int = 0
    nan_a: int = 0
    nan_b: int = 0
    median_ulp: float | None = None
    max_ulp: int | None = None
    median_scaled: float | None = None
    max_scaled: float | None = None
    max_over_rms: float | None = None
    max_difference: int | None = None
    first: Element | None = None


def compare_arrays(a: np.ndarray, b: np.ndarray) -> ArrayDifference:
    """Compare two arrays of floats, integers or truth values. Raises TypeError for other types."""
    for array in (a, b):
        if array.dtype.kind not in "fiub" or array.dtype.itemsize > 8:
            raise TypeError(f"cannot compare arrays of {array.dtype}: floats, integers and truth values only")
    facts: dict[str, Any] = {
        "shape_a": list(a.shape),
        "shape_b": list(b.shape),
        "dtype_a": str(a.dtype),
        "dtype_b": str(b.dtype),
        "size": a.size,
    }
    if a.shape != b.shape or a.dtype != b.dtype:
        return ArrayDifference(kind=DIFFERENT, **facts)
    flat_a, flat_b = np.ascontiguousarray(a).reshape(-1), np.ascontiguousarray(b).reshape(-1)
    other_bits = _bits(flat_a) != _bits(flat_b)
    if not other_bits.any():
        return ArrayDifference(kind=EQUAL, **facts)
    differs, kind = other_bits, DIFFERENT
    if flat_a.dtype.kind == "f":
        differs, kind, distances = _floats(flat_a, flat_b, other_bits)
        facts |= distances
    else:
        facts["max_difference"] = int(_distance(flat_a[differs], flat_b[differs]).max())
    return ArrayDifference(
        kind=kind,
        **facts,
        differing=int(differs.sum()),
        only_bits=int((other_bits & ~differs).sum()),
        first=_element(flat_a, flat_b, int(np.argmax(differs if differs.any() else other_bits)), a.shape),
    )


def ulp_distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Steps (uint64) from each float to its counterpart through all floats in between; none from -0 to +0.

    Both arrays have the same shape and float type, and no NaN. Infinity is the neighbour of the largest.
    """
    return _distance(_ordered(a), _ordered(b))


def ulp_of(values: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """The unit in the last place of floats `dtype` as large as each of the finite `values`, in float64."""
    info = np.finfo(dtype)
    _, exponent = np.frexp(values.astype(np.float64))
    lowest = int(info.minexp)
    exponent = np.where(values == 0, lowest, np.maximum(exponent - 1, lowest))
    unit: np.ndarray = np.ldexp(1.0, exponent - int(info.nmant))
    return unit


def _bits(flat: np.ndarray) -> np.ndarray:
    return flat.view(f"u{flat.dtype.itemsize}")


def _ordered(values: np.ndarray) -> np.ndarray:
    """Integers in the order of the floats, neighbours for neighbours (Dawson 2012, comparing floats)."""
    bits = values.view(f"i{values.dtype.itemsize}")
    lowest = np.iinfo(bits.dtype).min
    # Negative floats count up from the lowest integer, as their magnitude grows; both zeros become 0.
    ordered: np.ndarray = np.where(bits < 0, lowest - np.minimum(bits, 0), bits).astype(np.int64)
    return ordered


def _distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """|a - b| as uint64, which holds numbers that int64 does not."""
    wide = np.uint64 if a.dtype.kind in "ub" else np.int64
    high, low = np.maximum(a, b).astype(wide), np.minimum(a, b).astype(wide)
    distance: np.ndarray = high.view(np.uint64) - low.view(np.uint64)  # wraps to the right number
    return distance


def _floats(a: np.ndarray, b: np.ndarray, other_bits: np.ndarray) -> tuple[np.ndarray, str, dict[str, Any]]:
    """Elements that have another value, the kind of difference, and its distances."""
    nan_a, nan_b = np.isnan(a), np.isnan(b)
    one_nan = nan_a != nan_b
    differ = other_bits & ~nan_a & ~nan_b & (a != b)
    facts: dict[str, Any] = {"nan_a": int((nan_a & ~nan_b).sum()), "nan_b": int((nan_b & ~nan_a).sum())}
    kind = DIFFERENT if one_nan.any() else BITS_ONLY
    if differ.any():
        of_a, of_b = a[differ], b[differ]
        distance = ulp_distance(of_a, of_b)
        facts |= {"median_ulp": float(np.median(distance)), "max_ulp": int(distance.max())}
        if np.isfinite(of_a).all() and np.isfinite(of_b).all():
            rms = max(_rms(a), _rms(b))
            wide_a, wide_b = of_a.astype(np.float64), of_b.astype(np.float64)
            size = np.maximum(np.maximum(np.abs(wide_a), np.abs(wide_b)), rms)
            unit = ulp_of(size, a.dtype)
            scaled = np.abs(wide_a / unit - wide_b / unit)  # divided first: the difference may overflow
            facts |= {"median_scaled": float(np.median(scaled)), "max_scaled": float(scaled.max())}
            over_rms = float(np.abs(wide_a / rms - wide_b / rms).max())
            facts["max_over_rms"] = over_rms if np.isfinite(over_rms) else None
            if kind != DIFFERENT:
                kind = _kind(scaled, np.abs(wide_a / size - wide_b / size))
        else:
            kind = DIFFERENT
    return one_nan | differ, kind, facts


def _kind(scaled: np.ndarray, relative: np.ndarray) -> str:
    """By the largest and the median difference in scaled units, and the largest as a part of the value."""
    if scaled.max() <= _LAST_BITS_MAX and np.median(scaled) <= _LAST_BITS_MEDIAN:
        return LAST_BITS
    if relative.max() > _PRECISION_LARGEST:
        return DIFFERENT
    return PRECISION if scaled.max() >= _PRECISION_MIN else AMPLIFIED


def _rms(values: np.ndarray) -> float:
    """Root mean square of the finite values, or 0."""
    wide = values[np.isfinite(values)].astype(np.float64)
    largest = float(np.abs(wide).max(initial=0.0))
    return largest * float(np.sqrt(np.mean(np.square(wide / largest)))) if largest else 0.0  # no overflow


def _element(a: np.ndarray, b: np.ndarray, index: int, shape: tuple[int, ...]) -> Element:
    values, digits = (a[index], b[index]), 2 * a.dtype.itemsize
    decimals = [str(value) for value in values]
    hexes = [float(v).hex() if a.dtype.kind == "f" else hex(int(v)) for v in values]
    bits = [f"0x{int(_bits(array)[index]):0{digits}x}" for array in (a, b)]
    return Element(index, [int(place) for place in np.unravel_index(index, shape)], *decimals, *hexes, *bits)
