"""Linear layers by numpy's OpenBLAS and elementary functions by numpy, the way `blas` of `kernels`.

OpenBLAS uses several kernels for one product. For float32 on Haswell (kernel/x86_64 in its sources,
sgemm_kernel_8x4_haswell_2.c) it goes over 16 rows of a batch at a time and 12 outputs of a layer at a time,
and adds the terms of an element one after the other, acc = fma(w_k, x_k, acc) for k = 0, 1, ... Only the
first and the last 8 rows of a block of at most 320 are added in another way, the even k and the odd k apart,
and the outputs after the last 12 have a way of their own for 8 whole rows and another for fewer. So a batch
is laid out in blocks of at most 304 rows with 8 rows of zeros before and after, all multiples of 8. Then
neither the position of a row nor the rows beside it change its result. A single block of 8 rows needs no
zeros. From 384 terms on OpenBLAS adds partial sums, in an order that depends on their number only. Float64
needs only a part of this.

Rows are the columns of these blocks, (features, rows), as OpenBLAS reads them: weights need no copy.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Array = np.ndarray[Any, Any]

_PANEL = 8  # rows that one kernel computes together; other kernels compute the first and the last of a block
_BLOCK = 304  # rows; with both ends 320


class _Linear(torch.autograd.Function):
    """x W^T + b, (B, in) to (B, out)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.blocks = _blocks(x.shape[0])
        ctx.columns = _columns(_array(x), ctx.blocks)
        with np.errstate(all="ignore"):  # inf and nan are no errors, as in torch
            y = _product(_array(weight), ctx.columns, ctx.blocks)
            if bias is not None:
                y += _array(bias)[:, None]
        return _rows(y, ctx.blocks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight = _array(ctx.saved_tensors[0])
        x_wanted, weight_wanted, bias_wanted = ctx.needs_input_grad
        g = _columns(_array(grad), ctx.blocks)
        with np.errstate(all="ignore"):
            # With one output there is one term: numpy would loop over such a product by itself.
            x = (weight.T @ g if len(g) > 1 else weight.T * g) if x_wanted else None
            return (
                None if x is None else _rows(x, ctx.blocks),
                torch.from_numpy(g @ ctx.columns.T) if weight_wanted else None,
                torch.from_numpy(g @ np.ones(g.shape[1], g.dtype)) if bias_wanted else None,
            )


linear: Callable[[Tensor, Tensor, Tensor | None], Tensor] = _Linear.apply  # x, weight, bias


def _array(x: Tensor) -> Array:
    return x.detach().numpy()


class _Block(NamedTuple):
    columns: slice  # of the layout
    inner: slice  # its columns without the zeros
    rows: slice  # of the batch


@lru_cache(maxsize=256)
def _blocks(rows: int) -> list[_Block]:
    blocks: list[_Block] = []
    end = 0
    for first in range(0, max(rows, 1), _BLOCK):
        size = min(_BLOCK, rows - first)
        edge = 0 if size <= _PANEL else _PANEL
        start, end = end, end + 2 * edge + max(-(-size // _PANEL), 1) * _PANEL
        inner = slice(start + edge, start + edge + size)
        blocks.append(_Block(slice(start, end), inner, slice(first, first + size)))
    return blocks


def _columns(x: Array, blocks: list[_Block]) -> Array:
    """Rows (B, N) as columns in blocks, zeros around them, (N, columns)."""
    columns = np.zeros((x.shape[1], blocks[-1].columns.stop), x.dtype)
    for block in blocks:
        columns[:, block.inner] = x[block.rows].T
    return columns


def _rows(columns: Array, blocks: list[_Block]) -> Tensor:
    """The inverse of `_columns`. One block gives a view, which the next layer need not transpose."""
    parts = [columns[:, block.inner].T for block in blocks]
    return torch.from_numpy(parts[0] if len(parts) == 1 else np.concatenate(parts))


def _product(weight: Array, x: Array, blocks: list[_Block]) -> Array:
    if weight.shape[0] == 1:  # other code computes products with a vector
        return _product(np.concatenate([weight, weight]), x, blocks)[:1]
    product = np.empty((weight.shape[0], x.shape[1]), x.dtype)
    for block in blocks:
        np.matmul(weight, x[:, block.columns], out=product[:, block.columns])
    return product


class _Tanh(torch.autograd.Function):
    """The hyperbolic tangent of a layer. Its gradient rounds twice, the one of torch once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = elementary("tanh", x.detach())
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        square: Tensor = ctx.saved_tensors[0].square()
        return grad * (1.0 - square)


tanh: Callable[[Tensor], Tensor] = _Tanh.apply
_UFUNCS = {"exp": np.exp, "log": np.log, "sqrt": np.sqrt, "tanh": np.tanh}


def elementary(name: str, x: Tensor) -> Tensor:
    """`exp`, `log`, `sqrt` or `tanh`, with its gradient."""
    with np.errstate(all="ignore"):
        if not torch.is_grad_enabled() or not x.requires_grad:
            return torch.from_numpy(np.asarray(_UFUNCS[name](_array(x))))
        # Torch computes the gradients of these functions from the values in x and y with products and
        # quotients. So the values of y are replaced in place. An autograd function takes four times as long.
        y: Tensor = getattr(torch, name)(x)
        _UFUNCS[name](_array(x), out=_array(y))
        return y
