"""Multi-layer perceptrons and their initialisation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from runlab.determinism import kernels


class Rows(nn.Sequential):
    """A sequence of layers. Where the level promises it, an output row depends on its input row alone."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, in) to (B, out)."""
        return kernels.by_rows(super().forward, x)


class Linear(nn.Linear):
    """A linear layer with uninitialised weights: torch would draw them from the global generator."""

    def reset_parameters(self) -> None:
        """Draw nothing."""

    def forward(self, x: Tensor) -> Tensor:
        """x W^T + b, (B, in) to (B, out)."""
        return kernels.linear(x, self.weight, self.bias)


class Tanh(nn.Module):
    """The hyperbolic tangent."""

    def forward(self, x: Tensor) -> Tensor:
        return kernels.tanh_of_layer(x)


class Elu(nn.Module):
    """The exponential linear unit."""

    def forward(self, x: Tensor) -> Tensor:
        return kernels.elu(x)


ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": Tanh, "relu": nn.ReLU, "elu": Elu}


def mlp(
    sizes: Sequence[int],
    activation: str,
    generator: torch.Generator,
    orthogonal_gain: float | None = None,
    layer_norm: bool = False,
) -> Rows:
    """Linear layers of the given sizes with `activation` between them; `layer_norm` normalises before it.

    With `orthogonal_gain`, weights are orthogonal with gain sqrt(2) in hidden layers and `orthogonal_gain`
    in the last, biases zero (Engstrom et al. 2020, arXiv 2005.12729). Without, torch's own initialisation of
    linear layers, U(-1/sqrt(in), 1/sqrt(in)). All draws come from `generator`, on the CPU.
    """
    layers: list[nn.Module] = []
    for i, (size_in, size_out) in enumerate(pairwise(sizes)):
        last = i == len(sizes) - 2
        layer = Linear(size_in, size_out)
        if orthogonal_gain is None:
            bound = 1.0 / math.sqrt(size_in)
            nn.init.uniform_(layer.weight, -bound, bound, generator=generator)
            nn.init.uniform_(layer.bias, -bound, bound, generator=generator)
        else:
            gain = orthogonal_gain if last else math.sqrt(2.0)
            layer.weight.data.copy_(gain * orthogonal(size_out, size_in, generator))
            nn.init.zeros_(layer.bias)
        layers.append(layer)
        if layer_norm and not last:
            layers.append(nn.LayerNorm(size_out))  # Ba et al. 2016, arXiv 1607.06450
        if not last:
            layers.append(ACTIVATIONS[activation]())
    return Rows(*layers)


def orthogonal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """A random matrix (rows, columns) whose rows or columns, whichever are fewer, are orthonormal.

    Saxe et al. 2014, arXiv 1312.6120. Gram-Schmidt in float64, each vector made orthogonal twice (Giraud et
    al. 2005). Torch's own initialisation calls LAPACK, whose bits depend on CPU and number of threads.
    """
    few, many = sorted((rows, columns))
    vectors = torch.randn(few, many, generator=generator, dtype=torch.float64).numpy()
    for i in range(few):
        for _ in range(2):
            along = (vectors[:i] * vectors[i]).sum(1)
            vectors[i] -= (vectors[:i] * along[:, None]).sum(0)
        vectors[i] /= np.sqrt((vectors[i] * vectors[i]).sum())
    matrix = torch.from_numpy(vectors).float()
    return matrix if rows <= columns else matrix.T.contiguous()
