"""How matrix products and elementary functions are computed, chosen once for the process.

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

import ctypes
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

PRODUCTS = ("plain", "strict", "padded", "tiled", "blas")
ROWS_PADDED = 16
ROWS_TILED = 256
# Torch splits a sum over its threads from this many elements on; shorter ones have one order.
SPLIT = 32_768
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
    if products == "blas":
        # Threads divide a product where it suits them, and another kernel computes what lies at the seams.
        use_blas_threads(1)


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
        if _in_force.products == "blas":
            found = _chain(self)
            if found is not None:
                return by_row(lambda part: _through(*found, part), x)
        return by_row(super().forward, x)


def total(x: Tensor) -> Tensor:
    """The sum of all elements, in an order that does not depend on the number of threads."""
    if _in_force.products == "plain" or x.numel() < SPLIT:
        return x.sum()
    flat = x.reshape(-1)
    whole = flat.numel() // CHUNK * CHUNK
    parts = flat[:whole].view(-1, CHUNK).sum(1).sum()
    return parts + flat[whole:].sum() if whole < flat.numel() else parts


# Torch computes these four with MKL's vector library, which has other code for each vendor's CPUs. All other
# elementary functions that this package uses are torch's own code.


def exp(x: Tensor) -> Tensor:
    """e^x."""
    return _elementary("exp", x) if _in_force.products == "blas" else torch.exp(x)


def log(x: Tensor) -> Tensor:
    """The natural logarithm."""
    return _elementary("log", x) if _in_force.products == "blas" else torch.log(x)


def sqrt(x: Tensor) -> Tensor:
    """The square root."""
    return _elementary("sqrt", x) if _in_force.products == "blas" else torch.sqrt(x)


def tanh(x: Tensor) -> Tensor:
    """The hyperbolic tangent."""
    return _elementary("tanh", x) if _in_force.products == "blas" else torch.tanh(x)


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
        if _in_force.products == "blas":
            return _through((None,), [self.weight, self.bias], x)
        return F.linear(x, self.weight, self.bias)


# --- The way `blas` --------------------------------------------------------------------------------------
#
# OpenBLAS takes several kernels for one product. For float32 on Haswell (kernel/x86_64 in its sources,
# sgemm_kernel_8x4_haswell_2.c) it goes over 16 rows of a batch at a time and 12 outputs of a layer at a time,
# and adds the terms of an element one after the other, acc = fma(w_k, x_k, acc) for k = 0, 1, ... Only the
# first and the last 8 rows of a block of at most 320 are added in another way, the even k and the odd k
# apart, and what is left of the outputs after the last 12 has a way of its own for 8 whole rows and another
# for fewer. So a batch is laid out in blocks of at most 304 rows with 8 rows of zeros before and after, all
# multiples of 8, and a row's place or company changes nothing. A single block of 8 rows needs no others
# around it. From 384 terms on OpenBLAS adds partial sums, in an order that their number decides. For float64
# all of this is more than enough.
#
# Values are kept with a batch's rows as columns, (features, rows), which is the layout that OpenBLAS reads
# them in; then weights need no copy, and biases and activations go over whole arrays.

Array = np.ndarray[Any, Any]

_PANEL = 8  # rows that one kernel computes together, and of which other kernels compute the ends of a block
_BLOCK = 304  # rows; with both ends 320


def blas_library() -> ctypes.CDLL | None:
    """Numpy's own OpenBLAS, or None where numpy has another BLAS."""
    for path in Path(np.__file__).parent.with_name("numpy.libs").glob("libscipy_openblas*"):
        try:
            library = ctypes.CDLL(str(path))
        except OSError:
            continue
        if hasattr(library, "scipy_openblas_set_num_threads64_"):
            return library
    return None


def use_blas_threads(number: int) -> int | None:
    """Have numpy's OpenBLAS compute with so many threads, or with as many as it can.

    Returns how many these are, None where numpy has another BLAS.
    """
    library = blas_library()
    if library is None:
        return None
    library.scipy_openblas_get_config64_.restype = ctypes.c_char_p
    built_for = re.search(rb"MAX_THREADS=(\d+)", library.scipy_openblas_get_config64_())
    number = min(number, int(built_for[1])) if built_for else number
    library.scipy_openblas_set_num_threads64_(number)
    return number


def blas_threads() -> int | None:
    """The number of threads of numpy's OpenBLAS, or None where numpy has another BLAS."""
    library = blas_library()
    return None if library is None else int(library.scipy_openblas_get_num_threads64_())


def _chain(layers: nn.Sequential) -> tuple[tuple[str | None, ...], list[Tensor | None]] | None:
    """Activation, weight and bias of each linear layer, or None where there are layers of another kind."""
    activations: list[str | None] = []
    parameters: list[Tensor | None] = []
    for layer in layers._modules.values():
        if type(layer) is Linear:
            activations.append(None)
            parameters += layer._parameters.values()  # weight and bias; as attributes they cost 1 us each
        elif type(layer) in _ACTIVATIONS and activations and activations[-1] is None:
            activations[-1] = _ACTIVATIONS[type(layer)]
        else:
            return None
    return (tuple(activations), parameters) if activations else None


def _through(activations: tuple[str | None, ...], parameters: Sequence[Tensor | None], x: Tensor) -> Tensor:
    """Linear layers with their activations, (..., in) to (..., out)."""
    weight = parameters[0]
    if weight is None or x.dtype != weight.dtype or x.shape[-1] != weight.shape[1]:
        shape = None if weight is None else tuple(weight.shape)
        raise TypeError(f"{x.dtype} {tuple(x.shape)} does not fit a layer of weights {shape}")
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    if torch.is_grad_enabled():
        y: Tensor = _Chain.apply(activations, rows, *parameters)  # type: ignore[no-untyped-call]
    else:
        layout = _layout(rows.shape[0])
        values = _values(activations, _arrays(parameters), _array(rows), layout)
        y = torch.from_numpy(_rows(values[-1], layout))
    return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1])


class _Chain(torch.autograd.Function):
    """Linear layers with their activations as one step of the tape, which a chain of small layers takes much
    longer to write than the layers take to compute.
    """

    @staticmethod
    def forward(ctx: Any, activations: tuple[str | None, ...], x: Tensor, *parameters: Tensor) -> Tensor:
        """(B, in) to (B, out)."""
        arrays = _arrays(parameters)
        ctx.save_for_backward(*parameters[::2])  # to be told if somebody changes them
        ctx.activations, ctx.weights, ctx.layout = activations, arrays[::2], _layout(x.shape[0])
        ctx.values = _values(activations, arrays, _array(x), ctx.layout)
        return torch.from_numpy(_rows(ctx.values[-1], ctx.layout))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, weights and biases, where they are wanted."""
        (_, x_wanted, *wanted), _ = ctx.needs_input_grad, ctx.saved_tensors
        found: list[Tensor | None] = []
        g = _columns(_array(grad), ctx.layout)
        ones = np.ones(g.shape[1], g.dtype)
        with np.errstate(all="ignore"):
            for i in range(len(ctx.weights) - 1, -1, -1):
                if ctx.activations[i] is not None:
                    _back(ctx.activations[i], ctx.values[i + 1], g)
                found.append(torch.from_numpy(g @ ones) if wanted[2 * i + 1] else None)
                found.append(torch.from_numpy(g @ ctx.values[i].T) if wanted[2 * i] else None)
                if i > 0 or x_wanted:
                    # With one output there is one term: numpy would loop over such a product by itself.
                    g = ctx.weights[i].T @ g if len(g) > 1 else ctx.weights[i].T * g
        x = torch.from_numpy(_rows(g, ctx.layout)) if x_wanted else None
        return None, x, *reversed(found)


def _array(x: Tensor) -> Array:
    return x.detach().numpy()


def _arrays(parameters: Sequence[Tensor | None]) -> list[Any]:
    return [None if x is None else x.detach().numpy() for x in parameters]


class _Layout(NamedTuple):
    """How many columns hold a batch; and for each block its columns, those with rows in them, and which rows
    these are.
    """

    width: int
    blocks: tuple[tuple[slice, slice, slice], ...]


@lru_cache(maxsize=256)
def _layout(rows: int) -> _Layout:
    blocks: list[tuple[slice, slice, slice]] = []
    end = 0
    for first in range(0, max(rows, 1), _BLOCK):
        here = min(_BLOCK, rows - first)
        edge = 0 if here <= _PANEL else _PANEL
        start, width = end, 2 * edge + max(-(-here // _PANEL), 1) * _PANEL
        end = start + width
        inner = slice(start + edge, start + edge + here)
        blocks.append((slice(start, end), inner, slice(first, first + here)))
    return _Layout(end, tuple(blocks))


def _columns(x: Array, layout: _Layout) -> Array:
    """Rows (B, N) as columns in blocks, zeros around them, (N, columns)."""
    columns = np.zeros((x.shape[1], layout.width), x.dtype)
    for _, inner, rows in layout.blocks:
        columns[:, inner] = x[rows].T
    return columns


def _rows(columns: Array, layout: _Layout) -> Array:
    """The inverse of `_columns`."""
    parts = [columns[:, inner].T for _, inner, _ in layout.blocks]
    return np.ascontiguousarray(parts[0]) if len(parts) == 1 else np.concatenate(parts)


def _values(
    activations: tuple[str | None, ...], parameters: list[Any], x: Array, layout: _Layout
) -> list[Array]:
    """The input (B, in) and what each layer makes of it, as columns in blocks."""
    value = _columns(x, layout)
    values = [value]
    given = iter(parameters)
    with np.errstate(all="ignore"):  # inf and nan are no errors, as in torch
        for activation, weight, bias in zip(activations, given, given, strict=True):
            value = _product(weight, value, layout)
            if bias is not None:
                value += bias[:, None]
            if activation is not None:
                _activate(activation, value)
            values.append(value)
    return values


def _product(weight: Array, x: Array, layout: _Layout) -> Array:
    if weight.shape[0] == 1:  # a product with a vector would be computed by other code
        return _product(np.concatenate([weight, weight]), x, layout)[:1]
    if len(layout.blocks) == 1:
        whole: Array = weight @ x
        return whole
    product = np.empty((weight.shape[0], layout.width), x.dtype)
    for block, _, _ in layout.blocks:
        np.matmul(weight, x[:, block], out=product[:, block])
    return product


def _activate(name: str, z: Array) -> None:
    """An activation, in place."""
    if name == "tanh":
        np.tanh(z, out=z)
    elif name == "relu":
        torch.from_numpy(z).relu_()
    elif name == "elu":
        x = torch.from_numpy(z)
        negative = torch.expm1(x.clamp(max=0.0))
        x.relu_().add_(negative)


def _back(name: str, y: Array, grad: Array) -> None:
    """The gradient before an activation, in place of that after it, from the activation's result y."""
    if name == "relu":
        g = torch.from_numpy(grad)
        torch.ops.aten.threshold_backward.grad_input(g, torch.from_numpy(y), 0, grad_input=g)
    elif name == "tanh":
        slope = y * y
        np.subtract(1, slope, out=slope)
        grad *= slope
    elif name == "elu":
        grad *= np.minimum(y, 0) + 1


_ACTIVATIONS: dict[type[nn.Module], str] = {Tanh: "tanh", nn.ReLU: "relu", Elu: "elu"}
_UFUNCS = {"exp": np.exp, "log": np.log, "sqrt": np.sqrt, "tanh": np.tanh}


def _elementary(name: str, x: Tensor) -> Tensor:
    with np.errstate(all="ignore"):
        if not torch.is_grad_enabled() or not x.requires_grad:
            return torch.from_numpy(np.asarray(_UFUNCS[name](_array(x))))
        # Torch's gradients of these are but products and quotients of what stands in x and y: its values are
        # replaced where they stand, which takes a quarter of the time of a step of the tape of our own.
        y: Tensor = getattr(torch, name)(x)
        _UFUNCS[name](_array(x), out=_array(y))
        return y
