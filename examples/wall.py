"""A grid world whose best policy is random: `make train env=examples.wall:Wall-v0 eval_policy=sample`.

The short corridor of Sutton & Barto, Reinforcement Learning, second edition, example 13.1: three cells look
alike, and in the middle one the actions are exchanged. A policy that always takes its most probable action
walks into the wall of the first cell, or back and forth, and never arrives.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

GOAL, EXCHANGED = 3, 1  # cells; the first one is 0


class Wall(gym.Env[np.ndarray, int]):
    """A reward of 1 for the goal, which ends the episode; `success` in the info says the same."""

    observation_space = spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space = spaces.Discrete(2)  # left, right

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Begin an episode at the wall."""
        super().reset(seed=seed)
        self.cell = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> Any:
        """One step."""
        right = (int(action) == 1) != (self.cell == EXCHANGED)
        self.cell = max(0, self.cell + (1 if right else -1))
        arrived = self.cell == GOAL
        return np.zeros(1, np.float32), float(arrived), arrived, False, {"success": arrived}


gym.register("Wall-v0", Wall, max_episode_steps=20)
