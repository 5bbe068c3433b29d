"""The action distributions, each written once.

A distribution is a set of pure functions of network outputs and of noise that the caller draws: one function
gives the log-probability in the rollout and in the update, can be compiled, and is traced with its noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from runlab.determinism import kernels

LOG_SQRT_2PI = 0.5 * math.log(2.0 * math.pi)


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), from operations whose bits do not depend on the tensor's size or stride.

    At x = 0 exactly its gradient is 0 instead of 0.5, since both kinks meet there.
    """
    return F.relu(x) + torch.log1p(kernels.exp(-x.abs()))


class Distribution(Protocol):
    """The functions of a distribution that acting needs; `params` (B, P) come from a network."""

    def noise(self, batch: int, generator: torch.Generator) -> Tensor: ...
    def sample(self, params: Tensor, noise: Tensor) -> Tensor: ...
    def mode(self, params: Tensor) -> Tensor: ...


class Categorical:
    """Independent categorical components: one for Discrete actions, several for MultiDiscrete.

    Parameters are logits (B, sum(nvec)); actions are integers (B, len(nvec)).
    """

    def __init__(self, nvec: Sequence[int]) -> None:
        self.nvec = list(nvec)
        self.size = sum(nvec)

    def noise(self, batch: int, generator: torch.Generator) -> Tensor:
        """Uniform noise (B, sum(nvec)) for `sample`."""
        return torch.rand(batch, self.size, generator=generator, device=generator.device)

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


class _Gaussian:
    """The noise of normal distributions over actions of `size` numbers."""

    def __init__(self, size: int) -> None:
        self.size = size

    def noise(self, batch: int, generator: torch.Generator) -> Tensor:
        """Standard normal noise (B, A) for `sample`."""
        return torch.randn(batch, self.size, generator=generator, device=generator.device)


class DiagGaussian(_Gaussian):
    """Normal distribution with diagonal covariance over unbounded actions (B, A).

    Parameters are mean and log standard deviation side by side, (B, 2A).
    """

    def sample(self, params: Tensor, noise: Tensor) -> Tensor:
        mean, log_std = params.chunk(2, -1)
        return mean + kernels.exp(log_std) * noise  # (B, A)

    def mode(self, params: Tensor) -> Tensor:
        return params.chunk(2, -1)[0]  # (B, A)

    def log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        """Log-density (B,), summed over components."""
        mean, log_std = params.chunk(2, -1)
        z = (action - mean) * kernels.exp(-log_std)
        return (-0.5 * z * z - log_std - LOG_SQRT_2PI).sum(-1)  # (B,)

    def entropy(self, params: Tensor) -> Tensor:
        """Differential entropy (B,) in nats."""
        return (params.chunk(2, -1)[1] + 0.5 + LOG_SQRT_2PI).sum(-1)  # (B,)


Unsquashed = Categorical | DiagGaussian  # those of PPO


class SquashedGaussian(_Gaussian):
    """tanh of a diagonal normal: actions in (-1, 1) (Haarnoja et al. 2018, arXiv 1812.05905, appendix C).

    Parameters are the mean and a raw value that a tanh maps into [log_std_min, log_std_max], (B, 2A).
    """

    def __init__(self, size: int, log_std_min: float, log_std_max: float) -> None:
        super().__init__(size)
        self.log_std_min = log_std_min
        self.log_std_max = log_std_max

    def sample(self, params: Tensor, noise: Tensor) -> Tensor:
        return kernels.tanh(self._unsquashed(params, noise)[0])  # (B, A)

    def sample_log_prob(self, params: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions (B, A) and their log-densities (B,), differentiable through the noise.

        log(1 - tanh(u)^2) is written as 2 (log 2 - u - softplus(-2u)), which stays finite for large |u|.
        """
        u, log_std = self._unsquashed(params, noise)
        log_normal = -0.5 * noise * noise - log_std - LOG_SQRT_2PI
        log_jacobian = 2.0 * (math.log(2.0) - u - softplus(-2.0 * u))
        return kernels.tanh(u), (log_normal - log_jacobian).sum(-1)  # (B, A), (B,)

    def _unsquashed(self, params: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        mean, raw = params.chunk(2, -1)
        log_std = self.log_std_min + 0.5 * (self.log_std_max - self.log_std_min) * (kernels.tanh(raw) + 1.0)
        return mean + kernels.exp(log_std) * noise, log_std  # (B, A) each

    def mode(self, params: Tensor) -> Tensor:
        """tanh of the mean: not the density's mode, but the deterministic policy of the paper."""
        return kernels.tanh(params.chunk(2, -1)[0])  # (B, A)
