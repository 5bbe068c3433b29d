"""A game of 36 x 36 pixels that PPO learns in a minute: `make train env=examples.catch:Catch-v0`."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

CELLS, PIXELS = 9, 4  # in each direction; of each cell


class Catch(gym.Env[np.ndarray, int]):
    """A ball falls from a random column, and a paddle moves left, stays or moves right to catch it.

    The episode ends with the ball on the ground, and a reward of 1 or -1 (bsuite, Osband et al. 2020).
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 8}
    observation_space = spaces.Box(0, 255, (CELLS * PIXELS, CELLS * PIXELS), np.uint8)
    action_space = spaces.Discrete(3)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.image = np.zeros((CELLS, CELLS), np.uint8)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Begin an episode."""
        super().reset(seed=seed)
        self.ball, self.height, self.paddle = int(self.np_random.integers(CELLS)), 0, CELLS // 2
        return self.picture(), {}

    def step(self, action: int) -> Any:
        """One step."""
        self.paddle = min(max(self.paddle + int(action) - 1, 0), CELLS - 1)
        self.height += 1
        ended = self.height == CELLS - 1
        reward = (1.0 if self.paddle == self.ball else -1.0) if ended else 0.0
        return self.picture(), reward, ended, False, {}

    def picture(self) -> np.ndarray:
        """The ball and the paddle, white on black."""
        self.image[:] = 0
        self.image[self.height, self.ball] = self.image[-1, self.paddle] = 255
        return self.image.repeat(PIXELS, 0).repeat(PIXELS, 1)

    def render(self) -> Any:
        """A picture in colour, four times as large."""
        return np.repeat(self.picture().repeat(4, 0).repeat(4, 1)[:, :, None], 3, 2)


gym.register("Catch-v0", Catch)
