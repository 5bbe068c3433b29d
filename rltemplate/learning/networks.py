"""Multi-layer perceptrons and the three action distributions, each written once.

A distribution here is a set of pure functions of network outputs and of noise that the caller draws: the
same function gives the log-probability in the rollout and in the update, it can be compiled, and it can be
traced with its noise as an input.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rltemplate.determinism import kernels

ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": kernels.Tanh, "relu": nn.ReLU, "elu": kernels.Elu}

LOG_SQRT_2PI = 0.5 * math.log(2.0 * math.pi)


def mlp(
    sizes: Sequence[int],
    activation: str,
    generator: torch.Generator,
    orthogonal_gain: float | None = None,
) -> kernels.Rows:
    """Linear layers of the given sizes with `activation` between them.

    With `orthogonal_gain`, weights are orthogonal with gain sqrt(2) in hidden layers and `orthogonal_gain`
    in the last, biases zero (Engstrom et al. 2020, arXiv 2005.12729). Without, torch's own initialisation of
    linear layers, U(-1/sqrt(in), 1/sqrt(in)). All draws come from `generator`, on the CPU.
    """
    layers: list[nn.Module] = []
    for i, (size_in, size_out) in enumerate(pairwise(sizes)):
        last = i == len(sizes) - 2
        layer = kernels.Linear(size_in, size_out)
        if orthogonal_gain is None:
            bound = 1.0 / math.sqrt(size_in)
            nn.init.uniform_(layer.weight, -bound, bound, generator=generator)
            nn.init.uniform_(layer.bias, -bound, bound, generator=generator)
        else:
            gain = orthogonal_gain if last else math.sqrt(2.0)
            layer.weight.data.copy_(gain * orthogonal(size_out, size_in, generator))
            nn.init.zeros_(layer.bias)
        layers.append(layer)
        if not last:
            layers.append(ACTIVATIONS[activation]())
    return kernels.Rows(*layers)


def orthogonal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """A random matrix (rows, columns) whose rows or columns, whichever are fewer, are orthonormal.

    Saxe et al. 2014, arXiv 1312.6120. Gram-Schmidt in float64, each vector made orthogonal twice (Giraud et
    al. 2005): LAPACK, which torch's own initialisation calls, gives other bits for another number of threads
    or another CPU.
    """
    few, many = sorted((rows, columns))
    vectors = torch.randn(few, many, generator=generator, dtype=torch.float64).numpy()
    for i in range(few):
        for _ in range(2):
            along = (vectors[:i] * vectors[i]).sum(1)
            vectors[i] -= (vectors[:i] * along[:, None]).sum(0)
        vectors[i] /= np.sqrt((vectors[i] * vectors[i]).sum())
    found = torch.from_numpy(vectors).float()
    return found if rows <= columns else found.T.contiguous()


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), from operations whose bits do not depend on the tensor's size or stride.

    At x = 0 exactly its gradient is 0 instead of 0.5, since both kinks meet there.
    """
    return F.relu(x) + torch.log1p(kernels.exp(-x.abs()))


class Categorical:
    """Independent categorical components: one for Discrete actions, several for MultiDiscrete.

    Parameters are logits (B, sum(nvec)); actions are integers (B, len(nvec)).
    """

    def __init__(self, nvec: Sequence[int]) -> None:
        self.nvec = list(nvec)
        self.param_size = sum(nvec)

    def noise(self, batch: int, generator: torch.Generator) -> Tensor:
        """Uniform noise (B, sum(nvec)) for `sample`."""
        return torch.rand(batch, self.param_size, generator=generator, device=generator.device)

    def sample(self, params: Tensor, noise: Tensor) -> Tensor:
        """Exact samples by the Gumbel-max trick, argmax(logits - log(-log(u)))."""
        gumbel = -kernels.log(-kernels.log(noise.clamp(1e-20, 1.0 - 1e-7)))
        return self.mode(params + gumbel)  # (B, A)

    def mode(self, params: Tensor) -> Tensor:
        """The most probable action; ties go to the lowest index."""
        return torch.stack([logits.argmax(-1) for logits in params.split(self.nvec, -1)], -1)  # (B, A)

    def log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        """Log-probability (B,), summed over components."""
        total = torch.zeros_like(params[..., 0])
        for i, logits in enumerate(params.split(self.nvec, -1)):
            log_p = F.log_softmax(logits, -1)
            total = total + log_p.gather(-1, action[..., i : i + 1]).squeeze(-1)
        return total  # (B,)

    def entropy(self, params: Tensor) -> Tensor:
        """Entropy (B,) in nats, summed over components."""
        total = torch.zeros_like(params[..., 0])
        for logits in params.split(self.nvec, -1):
            log_p = F.log_softmax(logits, -1)
            total = total - (kernels.exp(log_p) * log_p).sum(-1)
        return total  # (B,)


class DiagGaussian:
    """Normal distribution with diagonal covariance over unbounded actions (B, A).

    Parameters are mean and log standard deviation side by side, (B, 2A).
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.param_size = 2 * size

    def noise(self, batch: int, generator: torch.Generator) -> Tensor:
        """Standard normal noise (B, A) for `sample`."""
        return torch.randn(batch, self.size, generator=generator, device=generator.device)

    def sample(self, params: Tensor, noise: Tensor) -> Tensor:
        """mean + exp(log_std) * noise."""
        mean, log_std = params.chunk(2, -1)
        return mean + kernels.exp(log_std) * noise  # (B, A)

    def mode(self, params: Tensor) -> Tensor:
        """The mean."""
        return params.chunk(2, -1)[0]  # (B, A)

    def log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        """Log-density (B,), summed over components."""
        mean, log_std = params.chunk(2, -1)
        z = (action - mean) * kernels.exp(-log_std)
        return (-0.5 * z * z - log_std - LOG_SQRT_2PI).sum(-1)  # (B,)

    def entropy(self, params: Tensor) -> Tensor:
        """Differential entropy (B,) in nats."""
        return (params.chunk(2, -1)[1] + 0.5 + LOG_SQRT_2PI).sum(-1)  # (B,)


class SquashedGaussian:
    """tanh of a diagonal normal: actions in (-1, 1) (Haarnoja et al. 2018, arXiv 1812.05905, appendix C).

    Parameters are the mean and a raw value that a tanh maps into [log_std_min, log_std_max], (B, 2A).
    """

    def __init__(self, size: int, log_std_min: float, log_std_max: float) -> None:
        self.size = size
        self.param_size = 2 * size
        self.log_std_min = log_std_min
        self.log_std_max = log_std_max

    def noise(self, batch: int, generator: torch.Generator) -> Tensor:
        """Standard normal noise (B, A) for `sample`."""
        return torch.randn(batch, self.size, generator=generator, device=generator.device)

    def sample(self, params: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions (B, A) and their log-densities (B,), differentiable through the noise.

        log(1 - tanh(u)^2) is written as 2 (log 2 - u - softplus(-2u)), which stays finite for large |u|.
        """
        mean, raw = params.chunk(2, -1)
        log_std = self.log_std_min + 0.5 * (self.log_std_max - self.log_std_min) * (kernels.tanh(raw) + 1.0)
        u = mean + kernels.exp(log_std) * noise  # (B, A) before squashing
        log_normal = -0.5 * noise * noise - log_std - LOG_SQRT_2PI
        log_jacobian = 2.0 * (math.log(2.0) - u - softplus(-2.0 * u))
        return kernels.tanh(u), (log_normal - log_jacobian).sum(-1)  # (B, A), (B,)

    def mode(self, params: Tensor) -> Tensor:
        """tanh of the mean: not the density's mode, but the deterministic policy of the paper."""
        return kernels.tanh(params.chunk(2, -1)[0])  # (B, A)
