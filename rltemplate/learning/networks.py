"""Multi-layer perceptrons, a recurrent unit, and their initialisation."""

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
            _fill(layer, 1.0 / math.sqrt(size_in), generator)
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


def _fill(layer: Linear, bound: float, generator: torch.Generator) -> None:
    """Weights and biases from U(-bound, bound)."""
    nn.init.uniform_(layer.weight, -bound, bound, generator=generator)
    nn.init.uniform_(layer.bias, -bound, bound, generator=generator)


class GRU(nn.Module):
    """A gated recurrent unit (Cho et al. 2014, arXiv 1406.1078) with the formulas of torch.nn.GRU.

    It is made of the operations whose bits a level controls; those of torch.nn.GRU are the library's.
    """

    def __init__(self, size_in: int, size: int, orthogonal_init: bool, generator: torch.Generator) -> None:
        super().__init__()
        self.of_input, self.of_memory = Linear(size_in, 3 * size), Linear(size, 3 * size)
        for layer in (self.of_input, self.of_memory):
            if orthogonal_init:
                parts = [orthogonal(size, layer.in_features, generator) for _ in range(3)]
                layer.weight.data.copy_(torch.cat(parts))
                nn.init.zeros_(layer.bias)
            else:
                _fill(layer, 1.0 / math.sqrt(size), generator)

    def forward(self, x: Tensor, begins: Tensor, memory: Tensor) -> Tensor:
        """Memories (S, L, M) after each step of sequences (S, L, in), from those before them (S, M) on."""
        inputs = kernels.by_rows(self.of_input, x.flatten(0, 1)).unflatten(0, begins.shape)  # (S, L, 3M)
        memories = []  # (S, M) after each step
        for t in range(begins.shape[1]):
            kept = memory * (1.0 - begins[:, t, None])
            memory = kernels.by_rows(self.step, torch.cat([inputs[:, t], kept], 1))
            memories.append(memory)
        return torch.stack(memories, 1)

    def step(self, rows: Tensor) -> Tensor:
        """The memories (S, M) after a step, from the parts of its inputs and the memories before, (S, 4M)."""
        size = rows.shape[1] // 4
        inputs, memory = rows.split([3 * size, size], 1)
        own = self.of_memory(memory)  # (S, 3M)
        # The sigmoid of torch has other bits for an element in another place of a tensor.
        gates = 0.5 * (kernels.tanh(0.5 * (inputs[:, : 2 * size] + own[:, : 2 * size])) + 1.0)  # (S, 2M)
        new = kernels.tanh(inputs[:, 2 * size :] + gates[:, :size] * own[:, 2 * size :])
        after: Tensor = new + gates[:, size:] * (memory - new)
        return after


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
