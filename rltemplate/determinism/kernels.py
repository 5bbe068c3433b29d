"""Ways of computing matrix products and elementary functions, chosen once for the process.

Which kernel a library picks depends on the shape of its input: an 8-row product and a 64-row product of the
same rows may add in another order, and then the policy that acts is not the policy that learns. The levels
of determinism above `repeat` choose other ways here, and everything that acts or learns goes through them:

    plain    whatever torch picks
    strict   torch's own products under an MKL branch that Intel documents as reproducible
    padded   rows are filled up to a multiple of 16, so that no product takes a kernel for few rows
    tiled    rows are filled up to tiles of 256, and every product has one and the same shape
    blas     products by numpy's BLAS and elementary functions by numpy, in the code path that the profile
             names: the same machine instructions on CPUs of all vendors. On the CPU only
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rltemplate.determinism import blas

# Torch splits a sum over its threads from this many elements on; shorter ones have one order.
SPLIT = 32_768
CHUNK = 4096


@dataclass(slots=True)
class _InForce:
    products: str = "plain"
    row_groups: int = 0  # forward passes without gradient are split into groups of so many rows; 0: never


chosen = _InForce()


def use(products: str) -> None:
    """Compute matrix products in this way from now on, in the whole process."""
    chosen.products = products


def group_rows(rows: int) -> None:
    """Split every forward pass without gradient into groups of `rows` rows (0: not at all).

    Changes nothing where a row's result depends on that row alone, and is there to try that.
    """
    chosen.row_groups = rows


def in_force() -> dict[str, Any]:
    """The choices in force."""
    return {"products": chosen.products, "row_groups": chosen.row_groups}


def total(x: Tensor) -> Tensor:
    """The sum of all elements, in an order that does not depend on the number of threads."""
    if chosen.products == "plain" or x.numel() < SPLIT:
        return x.sum()
    flat = x.reshape(-1)
    whole = flat.numel() // CHUNK * CHUNK
    parts = flat[:whole].view(-1, CHUNK).sum(1).sum()
    return parts + flat[whole:].sum() if whole < flat.numel() else parts


# Torch computes these four with MKL's vector library, which has other code for each vendor's CPUs. All other
# elementary functions that this package uses are torch's own code.


def exp(x: Tensor) -> Tensor:
    """e^x."""
    return blas.elementary("exp", x) if chosen.products == "blas" else torch.exp(x)


def log(x: Tensor) -> Tensor:
    """The natural logarithm."""
    return blas.elementary("log", x) if chosen.products == "blas" else torch.log(x)


def sqrt(x: Tensor) -> Tensor:
    """The square root."""
    return blas.elementary("sqrt", x) if chosen.products == "blas" else torch.sqrt(x)


def tanh(x: Tensor) -> Tensor:
    """The hyperbolic tangent."""
    return blas.elementary("tanh", x) if chosen.products == "blas" else torch.tanh(x)
