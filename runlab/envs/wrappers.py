"""Wrappers of this project, which `env.wrappers` takes by their names like those of Gymnasium."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np


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
