"""Perceptrons, residual blocks, encoders of images, a recurrent unit, and their initialisation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runlab.determinism import kernels

Layer = TypeVar("Layer", bound="Linear | Conv2d")

# Larger batches are convolved in parts, whose numbers stay in a CPU's cache.
_IMAGES_AT_ONCE = 256


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


class Conv2d(nn.Conv2d):
    """A convolution with uninitialised weights, as `Linear`."""

    bias: Tensor  # never None

    def reset_parameters(self) -> None:
        """Draw nothing."""


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
    sizes: Sequence[int], activation: str, generator: torch.Generator, orthogonal_gain: float | None = None
) -> Rows:
    """Linear layers of the given sizes with `activation` between them.

    With `orthogonal_gain`, weights are orthogonal with gain sqrt(2) in hidden layers and `orthogonal_gain`
    in the last, biases zero (Engstrom et al. 2020, arXiv 2005.12729). Without, torch's own initialisation of
    linear layers, U(-1/sqrt(in), 1/sqrt(in)). All draws come from `generator`, on the CPU.
    """
    layers: list[nn.Module] = []
    for i, (size_in, size_out) in enumerate(pairwise(sizes)):
        last = i == len(sizes) - 2
        gain = orthogonal_gain if last or orthogonal_gain is None else math.sqrt(2.0)
        layers.append(drawn(Linear(size_in, size_out), gain, generator))
        if not last:
            layers.append(ACTIVATIONS[activation]())
    return Rows(*layers)


def drawn(layer: Layer, gain: float | None, generator: torch.Generator) -> Layer:
    """The layer with new weights: orthogonal ones and biases zero, or with gain None torch's own, uniform."""
    weight = layer.weight.data.flatten(1)
    if gain is None:
        _fill(layer, 1.0 / math.sqrt(weight.shape[1]), generator)
    else:
        weight.copy_(gain * orthogonal(weight.shape[0], weight.shape[1], generator))
        nn.init.zeros_(layer.bias)
    return layer


def _fill(layer: Linear | Conv2d, bound: float, generator: torch.Generator) -> None:
    """Weights and biases from U(-bound, bound)."""
    nn.init.uniform_(layer.weight, -bound, bound, generator=generator)
    nn.init.uniform_(layer.bias, -bound, bound, generator=generator)


class Residual(nn.Sequential):
    """Layers whose input is added to their output."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)  # type: ignore[no-any-return,no-untyped-call]


def residual_blocks(sizes: Sequence[int], activation: str, generator: torch.Generator) -> Rows:
    """A linear layer, a block for each hidden size, and a linear layer (SimBa, Lee et al. 2024).

    A block normalises, and has an inner layer of four times its size (arXiv 2410.09754). All hidden sizes are
    the same. The initialisation is torch's own, not SimBa's.
    """
    size_in, *hidden, size_out = sizes
    layers: list[nn.Module] = [drawn(Linear(size_in, hidden[0]), None, generator)]
    for size in hidden:
        wide = drawn(Linear(size, 4 * size), None, generator)
        narrow = drawn(Linear(4 * size, size), None, generator)
        layers.append(Residual(nn.LayerNorm(size), wide, ACTIVATIONS[activation](), narrow))
    return Rows(*layers, nn.LayerNorm(hidden[-1]), drawn(Linear(hidden[-1], size_out), None, generator))


NETWORKS = {"mlp": mlp, "residual": residual_blocks}


def convolutions(name: str, channels: int, orthogonal_init: bool, generator: torch.Generator) -> nn.Module:
    """The layers of an encoder from images (B, C, H, W) to (B, F), in front of its linear layer.

    nature: Mnih et al. 2015. impala: Espeholt et al. 2018, arXiv 1802.01561. small: three layers, for images
    of few pixels such as those of MiniGrid.
    """
    gain = math.sqrt(2.0) if orthogonal_init else None
    size, layers = channels, list[nn.Module]()

    def conv(size_out: int, kernel: int, stride: int = 1, padding: int = 0) -> nn.Module:
        return drawn(Conv2d(size, size_out, kernel, stride, padding), gain, generator)

    if name == "impala":
        gain = None  # with gain sqrt(2) its sums would grow from block to block
        for size_out in (16, 32, 32):
            layers += [conv(size_out, 3, padding=1), nn.MaxPool2d(3, stride=2, padding=1)]
            size = size_out
            for _ in range(2):
                block = (nn.ReLU(), conv(size, 3, padding=1), nn.ReLU(), conv(size, 3, padding=1))
                layers.append(Residual(*block))
        return nn.Sequential(*layers, nn.ReLU(), nn.Flatten())
    for size_out, kernel, stride in {
        "nature": ((32, 8, 4), (64, 4, 2), (64, 3, 1)),
        "small": ((16, 2, 1), (32, 2, 1), (64, 2, 2)),
    }[name]:
        layers += [conv(size_out, kernel, stride), nn.ReLU()]
        size = size_out
    return nn.Sequential(*layers, nn.Flatten())


class Encoder(nn.Module):
    """Features (B, F) of observations (B, O) that begin with an image, and behind them the other numbers."""

    def __init__(
        self,
        name: str,
        image_shape: Sequence[int],
        size: int,
        orthogonal_init: bool,
        rng: torch.Generator,
        standardize: bool = False,
    ) -> None:
        super().__init__()
        self.image_shape, self.num_pixels = tuple(image_shape), math.prod(image_shape)
        self.standardize = standardize
        self.convolutions = convolutions(name, image_shape[0], orthogonal_init, rng)
        width = self.convolutions(torch.zeros(1, *image_shape)).shape[1]
        self.linear = drawn(Linear(width, size), math.sqrt(2.0) if orthogonal_init else None, rng)

    def forward(self, obs: Tensor) -> Tensor:
        image, beside = obs.tensor_split([self.num_pixels], 1)
        flat = torch.cat([self._convolved(few) for few in image.split(_IMAGES_AT_ONCE)])
        features = torch.relu(self.linear(flat))
        return torch.cat([features, beside.to(features.dtype)], 1)

    def _convolved(self, image: Tensor) -> Tensor:
        """(B, F) from pixels (B, C * H * W); with `standardize` each image has mean 0 and deviation 1."""
        scaled = image / 255.0
        if self.standardize:
            scaled = F.layer_norm(scaled, scaled.shape[1:])
        # With channels last in memory, the gradients of convolutions take half the time on a CPU. Always a
        # copy: with one channel, the kernel would depend on where the pixels were before.
        pixels = scaled.unflatten(1, self.image_shape).clone(memory_format=torch.channels_last)
        return self.convolutions(pixels)  # type: ignore[no-any-return]


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
