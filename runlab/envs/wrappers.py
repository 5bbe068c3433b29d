"""Wrappers of this project, which `env.wrappers` takes by their names like those of Gymnasium."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class SeededEpisodes(gym.Wrapper[Any, Any, Any, Any]):
    """Begins every episode with a seed of its own, drawn from the seed of the first one.

    An environment that repeats itself from the seed of a reset alone, such as one with generators of its own,
    then repeats whole runs, and they can be resumed.
    """

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        env = self.unwrapped
        # Kept where the recorder finds the state of a generator. The reset puts another one there.
        seeds: Any = env._np_random
        if seed is not None or seeds is None:
            seeds = np.random.default_rng(seed)
        result = self.env.reset(seed=int(seeds.integers(2**31)), options=options)
        env._np_random = seeds
        return result


class KeepObservations(gym.ObservationWrapper[np.ndarray, Any, np.ndarray]):
    """Keeps the numbers at some `places` of a flat observation, such as positions without velocities."""

    def __init__(self, env: gym.Env[np.ndarray, Any], places: Sequence[int]) -> None:
        super().__init__(env)
        space = env.observation_space
        if not isinstance(space, spaces.Box) or len(space.shape) != 1:
            raise ValueError(f"takes observations in a Box of one axis, and not {space}")
        size, kept = space.shape[0], [*places] if isinstance(places, list | tuple) else [places]
        fits = all(type(place) is int and 0 <= place < size for place in kept)
        if not fits or not kept or len({*kept}) < len(kept):
            raise ValueError(f"places={places}: expected different whole numbers from 0 to {size - 1}")
        self._places = kept
        low, high = space.low[kept], space.high[kept]
        self.observation_space = spaces.Box(low, high, dtype=space.dtype.type)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        return observation[self._places]
