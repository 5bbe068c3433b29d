"""Ways of computing matrix products and elementary functions, chosen once for the process.

Which kernel a library picks depends on the shape of its input: an 8-row product and a 64-row product of the
same rows may add in another order, and then the policy that acts is not the policy that learns. The levels
of determinism above `repeat` choose other ways here, and everything that acts or learns goes through them:

    plain    whatever torch picks
    strict   torch's own products under an MKL branch that Intel documents as reproducible; a single row is
             filled up to two, since torch leaves convolutions of one image to other code
    padded   rows are filled up to a multiple of 16, so that no product takes a kernel for few rows, and for
             few outputs to a multiple of 4 inputs
    tiled    rows are filled up to tiles of 256, and every product has one and the same shape
    blas     products by numpy's BLAS and elementary functions by numpy, in the code path that the profile
             names: the same machine instructions on CPUs of all vendors. On the CPU only
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from runlab.determinism import blas

# Torch splits a sum over its threads from this many elements on; shorter ones have one order.
SPLIT = 32_768
CHUNK = 4096
_ROWS_PADDED, _ROWS_TILED = 16, 256
_FEW_OUTPUTS, _ALIGNED = 16, 4


@dataclass(slots=True)
class Ways:
    """The choices in force in this process."""

    products: str = "plain"
    # Forward passes without gradient are split into groups of this many rows; 0: no split. The split must
    # change nothing where a row's result depends on that row alone: `make prove` tests this.
    row_groups: int = 0


chosen = Ways()


def use(products: str, row_groups: int = 0) -> None:
    """Set the way of matrix products for the whole process."""
    chosen.products, chosen.row_groups = products, row_groups


def total(x: Tensor) -> Tensor:
    """The sum of all elements, in an order that does not depend on the number of threads."""
    if chosen.products == "plain" or x.numel() < SPLIT:
        return x.sum()
    flat = x.reshape(-1)
    whole = flat.numel() // CHUNK * CHUNK
    parts = flat[:whole].view(-1, CHUNK).sum(1).sum()
    return parts + flat[whole:].sum() if whole < flat.numel() else parts


def _elementary(name: str) -> Callable[[Tensor], Tensor]:
    plain: Callable[[Tensor], Tensor] = getattr(torch, name)

    def function(x: Tensor) -> Tensor:
        return blas.elementary(name, x) if chosen.products == "blas" else plain(x)

    return function


# Torch computes these four with MKL's vector library, which has other code for each vendor's CPUs. All other
# elementary functions that this package uses are torch's own code.
exp, log, sqrt, tanh = map(_elementary, ("exp", "log", "sqrt", "tanh"))


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x W^T + b, (B, in) to (B, out)."""
    if chosen.products == "blas":
        return blas.linear(x, weight, bias)
    if chosen.products in ("padded", "tiled") and len(weight) < _FEW_OUTPUTS:
        # For few outputs MKL has another order in rows that do not begin at multiples of 16 bytes.
        fill = (0, -weight.shape[1] % _ALIGNED)
        x, weight = (F.pad(x, fill), F.pad(weight, fill)) if fill[1] else (x, weight)
    return F.linear(x, weight, bias)


@contextlib.contextmanager
def threads_of_gradients() -> Iterator[None]:
    """Above `repeat`, gradients that are computed in this block have one thread.

    With another number convolutions add in another order, and so does MKL for the weights of layers with few
    outputs.
    """
    threads = torch.get_num_threads()
    if chosen.products == "plain" or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def tanh_of_layer(x: Tensor) -> Tensor:
    """The hyperbolic tangent of a layer. At `blas` its gradient rounds in another way than that of `tanh`."""
    return blas.tanh(x) if chosen.products == "blas" else torch.tanh(x)


def elu(x: Tensor) -> Tensor:
    """x for x > 0, else e^x - 1 (Clevert et al. 2016, arXiv 1511.07289), from operations that do not depend
    on where in a tensor an element stands, as those of torch's own ELU do.
    """
    return F.relu(x) + torch.expm1(x.clamp(max=0.0))


def by_rows(network: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`network(x)` (B, out). Where the level promises it, an output row depends on its input row alone."""
    groups = chosen.row_groups
    if groups and not torch.is_grad_enabled() and x.shape[0] > groups:
        return torch.cat([_filled_up(network, part) for part in x.split(groups)])
    return _filled_up(network, x)


def _filled_up(network: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    rows = x.shape[0]
    more = {"padded": -rows % _ROWS_PADDED, "strict": int(rows == 1)}.get(chosen.products)
    if more:
        return network(F.pad(x, (0, 0, 0, more)))[:rows]
    if chosen.products == "tiled":
        tiles = F.pad(x, (0, 0, 0, -rows % _ROWS_TILED)).split(_ROWS_TILED)
        return torch.cat([network(tile) for tile in tiles])[:rows]
    return network(x).contiguous()
