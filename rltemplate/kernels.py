"""How matrix products and elementary functions are computed, chosen once for the process.

Which kernel a library picks depends on the shape of its input: an 8-row product and a 64-row product of the
same rows may add in another order, and then the policy that acts is not the policy that learns. The levels
of determinism above `repeat` choose other ways here, and everything that acts or learns goes through them:

    plain    whatever torch picks
    strict   torch's own products under an MKL branch that Intel documents as reproducible
    padded   rows are filled up to a multiple of 16, so that no product takes a kernel for few rows
    tiled    rows are filled up to tiles of 256, and every product has one and the same shape
    blas     products by numpy's BLAS and elementary functions by numpy, in the code path that the profile
             names: the same machine instructions on CPUs of all vendors
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

PRODUCTS = ("plain", "strict", "padded", "tiled", "blas")
ROWS_PADDED = 16
ROWS_TILED = 256
# Torch splits a sum over its threads from 32,768 elements on; shorter ones have one order.
CHUNK = 4096


@dataclass(slots=True)
class _InForce:
    products: str = "plain"
    row_groups: int = 0  # forward passes without gradient are split into groups of so many rows; 0: never


_in_force = _InForce()


def use(products: str) -> None:
    """Compute matrix products in this way from now on, in the whole process."""
    if products not in PRODUCTS:
        raise ValueError(f"products={products}: expected one of {', '.join(PRODUCTS)}")
    _in_force.products = products


def group_rows(rows: int) -> None:
    """Split every forward pass without gradient into groups of `rows` rows (0: not at all).

    Where a row's result depends on that row alone this changes nothing, and that is what it is for: to try.
    """
    _in_force.row_groups = rows


def in_force() -> dict[str, Any]:
    """What is in use."""
    return {"products": _in_force.products, "row_groups": _in_force.row_groups}


@contextmanager
def grouped(rows: int) -> Iterator[None]:
    """`group_rows(rows)` for the block."""
    before = _in_force.row_groups
    group_rows(rows)
    try:
        yield
    finally:
        group_rows(before)


def by_row(network: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`network(x)` for rows x (B, in), computed in the way in force."""
    if _in_force.row_groups and not torch.is_grad_enabled() and x.shape[0] > _in_force.row_groups:
        return torch.cat([_filled(network, part) for part in x.split(_in_force.row_groups)])
    return _filled(network, x)


def _filled(network: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    if _in_force.products == "padded":
        rows = x.shape[0]
        missing = -rows % ROWS_PADDED
        return network(F.pad(x, (0, 0, 0, missing)))[:rows] if missing else network(x)
    if _in_force.products == "tiled":
        rows = x.shape[0]
        tiles = F.pad(x, (0, 0, 0, -rows % ROWS_TILED)).split(ROWS_TILED)
        return torch.cat([network(tile) for tile in tiles])[:rows]
    return network(x)


class Rows(nn.Sequential):
    """Layers in a row, whose every output row depends on its input row alone where the level promises so."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, in) to (B, out)."""
        return by_row(super().forward, x)


def total(x: Tensor) -> Tensor:
    """The sum of all elements, in an order that does not depend on the number of threads."""
    if _in_force.products == "plain" or x.numel() <= CHUNK:
        return x.sum()
    flat = x.reshape(-1)
    whole = flat.numel() // CHUNK * CHUNK
    parts = flat[:whole].view(-1, CHUNK).sum(1).sum()
    return parts + flat[whole:].sum() if whole < flat.numel() else parts


# Torch computes these four with MKL's vector library, which has other code for each vendor's CPUs. All other
# elementary functions that this package uses are torch's own code.


def exp(x: Tensor) -> Tensor:
    """e^x."""
    return torch.exp(x)


def log(x: Tensor) -> Tensor:
    """The natural logarithm."""
    return torch.log(x)


def sqrt(x: Tensor) -> Tensor:
    """The square root."""
    return torch.sqrt(x)


def tanh(x: Tensor) -> Tensor:
    """The hyperbolic tangent."""
    return torch.tanh(x)


class Tanh(nn.Module):
    """`tanh` as a layer."""

    def forward(self, x: Tensor) -> Tensor:
        """Same shape."""
        return tanh(x)


class Elu(nn.Module):
    """x for x > 0, else e^x - 1 (Clevert et al. 2016, arXiv 1511.07289), from operations that do not depend
    on where in a tensor an element stands, as those of torch's own ELU do.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Same shape."""
        return F.relu(x) + torch.expm1(x.clamp(max=0.0))


class Linear(nn.Linear):
    """A linear layer whose weights wait to be filled: torch's own draws from the global generator."""

    def reset_parameters(self) -> None:
        """Draw nothing."""

    def forward(self, x: Tensor) -> Tensor:
        """x W^T + b, (B, in) to (B, out)."""
        return F.linear(x, self.weight, self.bias)
