"""Layers that compute in the way that `kernels` has chosen."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rltemplate.determinism import blas, kernels

_ROWS_PADDED, _ROWS_TILED = 16, 256


class Rows(nn.Sequential):
    """Layers in a row, whose every output row depends on its input row alone where the level promises so."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, in) to (B, out)."""
        groups = kernels.chosen.row_groups
        if groups and not torch.is_grad_enabled() and x.shape[0] > groups:
            return torch.cat([self._forward(part) for part in x.split(groups)])
        return self._forward(x)

    def _forward(self, x: Tensor) -> Tensor:
        products, rows = kernels.chosen.products, x.shape[0]
        network: Callable[[Tensor], Tensor] = super().forward
        if products == "padded" and rows % _ROWS_PADDED:
            return network(F.pad(x, (0, 0, 0, -rows % _ROWS_PADDED)))[:rows]
        if products == "tiled":
            tiles = F.pad(x, (0, 0, 0, -rows % _ROWS_TILED)).split(_ROWS_TILED)
            return torch.cat([network(tile) for tile in tiles])[:rows]
        return network(x).contiguous()


class Tanh(nn.Module):
    """The hyperbolic tangent as a layer."""

    def forward(self, x: Tensor) -> Tensor:
        """Same shape."""
        return blas.tanh(x) if kernels.chosen.products == "blas" else kernels.tanh(x)


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
        if kernels.chosen.products == "blas":
            return blas.linear(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)
