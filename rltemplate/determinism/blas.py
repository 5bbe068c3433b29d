"""Networks by numpy's OpenBLAS and elementary functions by numpy, the way `blas` of `kernels`.

OpenBLAS takes several kernels for one product. For float32 on Haswell (kernel/x86_64 in its sources,
sgemm_kernel_8x4_haswell_2.c) it goes over 16 rows of a batch at a time and 12 outputs of a layer at a time,
and adds the terms of an element one after the other, acc = fma(w_k, x_k, acc) for k = 0, 1, ... Only the
first and the last 8 rows of a block of at most 320 are added in another way, the even k and the odd k apart,
and the outputs after the last 12 have a way of their own for 8 whole rows and another for fewer. So a batch
is laid out in blocks of at most 304 rows with 8 rows of zeros before and after, all multiples of 8, and a
row's place or company changes nothing. A single block of 8 rows needs no others around it. From 384 terms on
OpenBLAS adds partial sums, in an order that their number decides. Float64 needs less than all of this.

Values are kept with a batch's rows as columns, (features, rows), which is the layout that OpenBLAS reads them
in; then weights need no copy, and biases and activations go over whole arrays.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

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


def through(activations: tuple[str | None, ...], parameters: Sequence[Tensor | None], x: Tensor) -> Tensor:
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
    """The number of columns that hold a batch, and for each block three slices: its columns, its columns with
    rows in them, and these rows.
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


_UFUNCS = {"exp": np.exp, "log": np.log, "sqrt": np.sqrt, "tanh": np.tanh}


def elementary(name: str, x: Tensor) -> Tensor:
    """`exp`, `log`, `sqrt` or `tanh`, with its gradient."""
    with np.errstate(all="ignore"):
        if not torch.is_grad_enabled() or not x.requires_grad:
            return torch.from_numpy(np.asarray(_UFUNCS[name](_array(x))))
        # Torch's gradients of these are but products and quotients of what stands in x and y: its values are
        # replaced where they stand, which takes a quarter of the time of a step of the tape of our own.
        y: Tensor = getattr(torch, name)(x)
        _UFUNCS[name](_array(x), out=_array(y))
        return y
