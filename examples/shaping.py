"""A wrapper of one's own: 'env.training_wrappers={examples.shaping:Upright:{gamma:0.99}}' shapes rewards."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np


class Upright(gym.Wrapper[Any, Any, Any, Any]):
    """CartPole whose reward grows as the pole rises: shaping by a potential (Ng, Harada, Russell 1999)."""

    def __init__(self, env: gym.Env[Any, Any], gamma: float = 0.99) -> None:
        super().__init__(env)
        self.gamma = gamma

    def reset(self, **kwargs: Any) -> Any:
        """Begin an episode."""
        obs, info = self.env.reset(**kwargs)
        self.potential = -abs(float(np.ravel(obs)[-2]))  # the angle, of the newest frame
        return obs, info

    def step(self, action: Any) -> Any:
        """One step."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        before, self.potential = self.potential, -abs(float(np.ravel(obs)[-2])) * (not terminated)
        return obs, float(reward) + self.gamma * self.potential - before, terminated, truncated, info
