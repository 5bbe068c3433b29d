"""An environment of pseudo-random data, N copies of it, and statistics over everything seen."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

ACTIONS: dict[str, spaces.Space[Any]] = {
    "box": spaces.Box(np.array([[-2.0], [0.0]], np.float32), np.array([[1.0], [0.5]], np.float32)),
    "discrete": spaces.Discrete(3, start=-1),
    "several": spaces.MultiDiscrete([2, 3]),
}
NETWORKS = {"tanh": nn.Tanh, "relu": nn.ReLU, "elu": nn.ELU}


class Noisy(gym.Env[np.ndarray, Any]):
    """Walks at random: observations of unequal size and offset, short episodes that end in both ways.

    Every observation and reward depends on the action, and on nothing before the last step. Both are exact in
    float32. `image` is the edge of a picture of noise: all that is observed, or with `beside` a part of it.
    """

    observation_space: spaces.Space[Any] = spaces.Box(-np.inf, np.inf, (4,), np.float32)

    def __init__(
        self,
        actions: str = "box",
        masked: bool = False,
        image: int = 0,
        beside: bool = False,
        render_mode: str | None = None,
    ) -> None:
        self.action_space, self.masked, self.image = ACTIONS[actions], masked, image
        parts = {"values": self.observation_space} if beside or not image else {}
        if masked:
            parts["action_mask"] = spaces.MultiBinary(spaces.flatdim(self.action_space))
        if image:
            parts["image"] = spaces.Box(0, 255, (image, image, 3), np.uint8)
        self.observation_space = spaces.Dict(parts) if len(parts) > 1 else next(iter(parts.values()))

    def _obs(self, push: float, ended: bool = False) -> Any:
        draws = self.np_random.standard_normal(4) * [1.0, 3.0, 0.2, 8.0] + [0.0, 5.0, -1.0, 0.0]
        obs: dict[str, Any] = {"values": (draws + push).astype(np.float32)}
        if self.masked:
            obs["action_mask"] = self._mask(ended)
        if self.image:
            noise = self.np_random.integers(200, size=(self.image, self.image, 3))
            obs["image"] = (noise + round(10 * push) % 50).astype(np.uint8)
        if isinstance(self.observation_space, spaces.Dict):
            return {name: obs[name] for name in self.observation_space}
        return obs["image" if self.image else "values"]

    def _mask(self, ended: bool) -> np.ndarray:
        """Half of the choices and at least one of each component, and none where no action follows."""
        mask = self.np_random.random(spaces.flatdim(self.action_space)) < 0.5 * (not ended)
        nvec = getattr(self.action_space, "nvec", [len(mask)])
        for first, choices in zip(np.cumsum([0, *nvec[:-1]]), nvec, strict=True):
            mask[first + self.np_random.integers(choices)] |= not ended
        return mask.astype(np.int8)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Start somewhere else than where an episode ends."""
        super().reset(seed=seed)
        return self._obs(-2.0), {}

    def step(self, action: Any) -> Any:
        """One step; now and then both ends at once."""
        push = float(np.dot(np.ravel(action), [1.0, -0.5][: np.size(action)]))
        reward = float(np.float32(3.0 * self.np_random.standard_normal() - push * push + 1.0))
        terminated, truncated = (self.np_random.random(2) < 0.1).tolist()
        return self._obs(push, terminated or truncated), reward, terminated, truncated, {}


class Outcome(NamedTuple):
    """One step of one environment."""

    obs: Tensor  # (O,) to act on next: after a reset where the episode ended
    reward: float
    terminated: bool
    truncated: bool
    next_obs: Tensor  # (O,) before any reset
    mask: Tensor  # (P,) bool, the choices to take next


class Copies:
    """N environments, one after the other."""

    def __init__(self, env_id: str, seeds: Sequence[int], **kwargs: Any) -> None:
        self.envs = [gym.make(env_id, disable_env_checker=True, **kwargs) for _ in seeds]
        self.space, self.image = self.envs[0].action_space, int(kwargs.get("image", 0))
        pairs = zip(self.envs, seeds, strict=True)
        first = [env.reset(seed=seed)[0] for env, seed in pairs]
        self.first_obs = torch.stack([_tensor(obs) for obs in first])  # (N, O)
        self.first_mask = torch.stack([self._mask(obs) for obs in first])  # (N, P)

    def step(self, actions: Tensor) -> list[Outcome]:
        """What each environment makes of its action (N, A), in [-1, 1] where it is continuous."""
        outcomes = []
        for env, action in zip(self.envs, actions.numpy(), strict=True):
            next_obs, reward, terminated, truncated, _ = env.step(self._native(action))
            obs = env.reset()[0] if terminated or truncated else next_obs
            ends = terminated, truncated, _tensor(next_obs)
            outcomes.append(Outcome(_tensor(obs), float(reward), *ends, self._mask(obs)))
        return outcomes

    def _mask(self, obs: Any) -> Tensor:
        every = [1] * spaces.flatdim(self.space)
        return torch.tensor(obs.get("action_mask", every) if isinstance(obs, dict) else every) > 0

    def _native(self, action: np.ndarray) -> Any:
        space = self.space
        if isinstance(space, spaces.Box):
            share = (action.clip(-1.0, 1.0).reshape(space.shape) + 1.0) / 2.0
            return (space.low + share * (space.high - space.low)).astype(np.float32)
        return int(action[0] + space.start) if isinstance(space, spaces.Discrete) else action


def _tensor(obs: Any) -> Tensor:
    """The numbers of an observation (O,) without its mask: an image color by color, then the values."""
    parts = obs if isinstance(obs, dict) else {"image" if obs.ndim == 3 else "values": obs}
    image = [parts["image"][:, :, color].ravel() for color in range(3)] if "image" in parts else []
    values = [parts["values"]] if "values" in parts else []
    return torch.from_numpy(np.concatenate([*image, *values]).astype(np.float64))


class Statistics:
    """Mean and variance of all rows ever seen, from a list of them; if not `used`, they change nothing."""

    def __init__(self, used: bool, clip: float, size: int) -> None:
        self.used, self.clip = used, clip
        self.rows: list[Tensor] = []  # (size,) each
        self.mean, self.var = torch.zeros(size), torch.ones(size)

    def see(self, rows: Sequence[Tensor]) -> None:
        """Take further rows into account."""
        if self.used:
            self.rows += rows
            every = torch.stack(self.rows)
            self.mean = every.mean(0)
            self.var = (every - self.mean).pow(2).mean(0)

    def shifted(self, x: Tensor) -> Tensor:
        """`x` with zero mean and unit deviation, clipped."""
        return self.scaled(x - self.mean) if self.used else x

    def scaled(self, x: Tensor) -> Tensor:
        """`x` with unit deviation, clipped."""
        return (x / (self.var + 1e-8).sqrt()).clamp(-self.clip, self.clip) if self.used else x

    def state(self, name: str) -> dict[str, Tensor]:
        """What has been found, by name."""
        count = torch.tensor(float(len(self.rows)))
        return {f"{name}/mean": self.mean, f"{name}/var": self.var, f"{name}/num_rows": count}


def network(sizes: Sequence[int], activation: str) -> nn.Sequential:
    """A multi-layer perceptron."""
    *hidden, last = pairwise(sizes)
    layers: list[nn.Module] = []
    for size_in, size_out in hidden:
        layers += [nn.Linear(size_in, size_out), NETWORKS[activation]()]
    return nn.Sequential(*layers, nn.Linear(*last))


class Blocks(nn.Module):
    """A linear layer, blocks around which their input goes, and a linear layer."""

    def __init__(self, size_in: int, width: int, number: int, size_out: int, activation: str) -> None:
        super().__init__()
        self.first = nn.Linear(size_in, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                NETWORKS[activation](),
                nn.Linear(4 * width, width),
            )
            for _ in range(number)
        )
        self.last = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, size_out))

    def forward(self, x: Tensor) -> Tensor:
        """(B, in) to (B, out)."""
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.last(x)
        return out


def optimised(optimizer: torch.optim.Adam, name: str) -> dict[str, Tensor]:
    """Parameters, both moments and the number of steps of torch's Adam, by name."""
    parameters = optimizer.param_groups[0]["params"]
    states = [optimizer.state[p] for p in parameters]
    steps = states[0].get("step", torch.tensor(0.0)).double()
    found = {f"{name}/params": parameters_to_vector(parameters), f"{name}/steps": steps}
    for moment, own in (("mu", "exp_avg"), ("nu", "exp_avg_sq")):
        values = (each.get(own, torch.zeros_like(p)) for each, p in zip(states, parameters, strict=True))
        found[f"{name}/{moment}"] = parameters_to_vector(values)
    return found
