"""A point that steers towards beacons, with a mistake that many environments have.

The reward is added up over a set of names. Python orders a set of strings by their hashes, which change with
every process unless PYTHONHASHSEED is fixed; a sum of float32 numbers in another order may differ in its last
bit; and reinforcement learning makes another run of it.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

BEACONS = {"north": (0.0, 0.8), "east": (0.7, 0.1), "south": (-0.2, -0.9), "west": (-0.6, 0.3)}


class Beacons(gym.Env[np.ndarray, np.ndarray]):
    """Observes position and velocity (4,), accelerates in both directions (2,), and is paid for light."""

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.lit = set(BEACONS)  # the mistake: its order is the order of the names' hashes

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Start anywhere, at rest."""
        super().reset(seed=seed)
        self.state = np.zeros(4, np.float32)
        self.state[:2] = self.np_random.uniform(-1.0, 1.0, 2)
        return self.state.copy(), {}

    def step(self, action: np.ndarray) -> Any:
        """One twentieth of a second."""
        self.state[2:] = 0.95 * self.state[2:] + 0.1 * np.clip(action, -1.0, 1.0)
        self.state[:2] = np.clip(self.state[:2] + 0.05 * self.state[2:], -1.5, 1.5)
        reward = np.float32(0.0)
        for name in self.lit:
            distance = np.float32(np.hypot(*(self.state[:2] - np.array(BEACONS[name], np.float32))))
            reward += np.exp(-np.float32(3.0) * distance)
        return self.state.copy(), float(reward), False, False, {}


gym.register("Beacons-v0", Beacons, max_episode_steps=200)
