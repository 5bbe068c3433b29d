"""Six environments with one idea each, whose values and best actions are known exactly.

After the probe environments of A. Jones (andyljones.com/posts/rl-debugging.html). Each needs one part of an
algorithm more than those before it, so the first one that is not learned points to the part that is wrong.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

ACTIONS: dict[str, spaces.Space[Any]] = {
    "discrete": spaces.Discrete(2),
    "box": spaces.Box(-1.0, 1.0, (1,), np.float32),
}


class ProbeEnv(gym.Env[np.ndarray, Any]):
    """Episodes of `length` steps with one reward: the first action decides it, and the last step pays it.

    The observation (2,) is [cue, 0] in the first step and [0, coming reward] in the second one. The episode
    ends with its first observation, whose value is learned: an algorithm that wrongly lets a value follow a
    termination then differs for certain.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    length = 1
    cues: tuple[float, ...] = (0.0,)  # each episode draws one
    action_matters = False

    def __init__(self, actions: str, render_mode: str | None = None) -> None:
        self.action_space = ACTIONS[actions]

    def episode_return(self, cue: float, action: Any) -> float:
        """The return of an episode with this cue and first action."""
        return 1.0

    def best_return(self, cue: float) -> float:
        """The largest return of an episode with this cue."""
        return 1.0

    def value(self, cue: float, gamma: float) -> float:
        """The value of the first observation under the best policy."""
        return self.best_return(cue) * gamma ** (self.length - 1)

    def quality(self, cue: float, action: Any) -> float:
        """1 if the action fits the cue; -1 for the other one, or in the Box less with the squared distance.

        Action 1 fits the cue 1, and action 0 the cue -1; in the Box 0.5 and -0.5 fit them.
        """
        share = float(np.ravel(action)[0]) - (0.5 if isinstance(self.action_space, spaces.Discrete) else 0.0)
        return 1.0 - 2.0 * (share - cue / 2.0) ** 2

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Begin an episode with one of the cues."""
        super().reset(seed=seed)
        self.num_steps, self.cue = 0, float(self.np_random.choice(self.cues))
        return np.array([self.cue, 0.0], np.float32), {}

    def step(self, action: Any) -> Any:
        """One step; only the first action of an episode has an effect."""
        self.num_steps += 1
        if self.num_steps == 1:
            self.reward = self.episode_return(self.cue, action)
        if self.num_steps < self.length:
            return np.array([0.0, self.reward], np.float32), 0.0, False, False, {}
        return np.array([self.cue, 0.0], np.float32), self.reward, True, False, {}


class Value(ProbeEnv):
    """A reward of 1 in a single step: the value becomes 1, and nothing follows a termination."""


class Discount(ProbeEnv):
    """A reward of 1 in the second step: it is worth gamma in the first one."""

    length = 2


class Truncation(ProbeEnv):
    """A reward of 1 in every step, each of which may be the last by the clock: the value goes on after it.

    With one length for all, an algorithm with a memory would never learn the value of the last one.
    """

    def value(self, cue: float, gamma: float) -> float:
        """The value of a reward of 1 in every step without an end."""
        return 1.0 / (1.0 - gamma)

    def step(self, action: Any) -> Any:
        """Truncated or not."""
        return np.array([0.0, 0.0], np.float32), 1.0, False, self.np_random.random() < 0.5, {}


class Observation(ProbeEnv):
    """The reward is the cue: the value follows the observation."""

    cues = (-1.0, 1.0)

    def episode_return(self, cue: float, action: Any) -> float:
        """The cue."""
        return cue

    def best_return(self, cue: float) -> float:
        """The cue."""
        return cue


class Action(ProbeEnv):
    """The reward depends on the action: the policy takes the one that pays most."""

    action_matters = True

    def episode_return(self, cue: float, action: Any) -> float:
        """1 for action 1, or 0.5 in the Box."""
        return self.quality(1.0, action)


class Credit(ProbeEnv):
    """The second step pays for a first action that fits the cue: credit goes back over two steps."""

    length, cues, action_matters = 2, (-1.0, 1.0), True

    def episode_return(self, cue: float, action: Any) -> float:
        """1 for the action that fits the cue."""
        return self.quality(cue, action)


PROBES: dict[str, type[ProbeEnv]] = {
    kind.__name__: kind for kind in (Value, Discount, Truncation, Observation, Action, Credit)
}
for name in PROBES:
    gym.register(f"{name}-v0", f"{__name__}:{name}")
