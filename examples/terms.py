"""Hopper with a mistake that many environments have.

Its reward is added up, in single precision, over a set of names. Python orders a set of strings by their
hashes, which change with every process unless PYTHONHASHSEED is fixed; a sum in another order may differ in
its last bit; and reinforcement learning makes another run of it.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

TERMS = {"reward_forward", "reward_ctrl", "reward_survive"}  # the mistake: a set has no order of its own


class HopperTerms(gym.Wrapper[Any, Any, Any, Any]):
    """The same task, observations and actions as Hopper-v5, and rewards that are equal up to rounding."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(gym.make("Hopper-v5", disable_env_checker=True, **kwargs).unwrapped)

    def step(self, action: Any) -> Any:
        """One step, with the reward in terms."""
        obs, _, terminated, truncated, info = self.env.step(action)
        reward = np.float32(0.0)
        for name in TERMS:
            reward += np.float32(info[name])
        return obs, float(reward), terminated, truncated, info


gym.register("HopperTerms-v0", HopperTerms, max_episode_steps=1000)
