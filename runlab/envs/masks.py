"""Masks of actions: which choices of a discrete action are allowed next.

A mask has a 1 for each allowed choice and a 0 for each forbidden one: those of the action's first component,
then those of the next. It is a part of the observation, so that evaluations, videos and resumed runs have it
as training does. In flat observations it comes last.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from runlab.envs.validity import obs_check, shown
from runlab.errors import ConfigError, RunError

MASK = "action_mask"  # its name in an info and in a Dict observation


class MaskedBox(spaces.Box):
    """Flat observations that end with a mask."""


def choices_of(space: spaces.Space[Any]) -> tuple[int, ...]:
    """Choices of each component of a discrete action; () for other spaces."""
    if isinstance(space, spaces.Discrete):
        return (int(space.n),)
    if isinstance(space, spaces.MultiDiscrete):
        return tuple(space.nvec.reshape(-1).tolist())
    return (2,) * int(np.prod(space.shape)) if isinstance(space, spaces.MultiBinary) else ()


def has_mask(env: gym.Env[Any, Any]) -> bool:
    """True for a Dict observation with a mask of discrete actions."""
    space = env.observation_space
    return isinstance(space, spaces.Dict) and MASK in space.spaces and choices_of(env.action_space) != ()


class ActionMask(gym.Wrapper[Any, Any, Any, Any]):
    """Observations as a Dict whose last part is the mask, from the observation itself or else from the info.

    `RunError` for a mask that has not a 0 or 1 for each choice, or leaves none where an action must follow.
    """

    def __init__(self, env_id: str, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self._nvec, space, self._in_obs = choices_of(env.action_space), env.observation_space, has_mask(env)
        if not self._nvec:
            raise ConfigError(f"env.infos=[{MASK}]: {env_id} has no discrete actions, but {env.action_space}")
        self._expected = f"{sum(self._nvec)} numbers, one for each choice of {env.action_space}"
        self._first = np.cumsum((0, *self._nvec[:-1]))  # place of each component's first choice
        # Before it is flattened, which would take -1 for the last choice.
        self._form = obs_check(space) if isinstance(space, spaces.Box | spaces.Discrete) else lambda obs: obs
        parts = {**space} if isinstance(space, spaces.Dict) and self._in_obs else {"observation": space}
        parts.pop(MASK, None)
        last = spaces.MultiBinary(sum(self._nvec))
        self.observation_space = spaces.Dict([*parts.items(), (MASK, last)])

    def reset(self, **kwargs: Any) -> Any:
        obs, info = self.env.reset(**kwargs)
        return self._checked(obs, info, ended=False), info

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = self.env.step(action)
        return self._checked(obs, info, terminated or truncated), reward, terminated, truncated, info

    def _checked(self, obs: Any, info: Any, ended: bool) -> dict[str, Any]:
        mask = (obs if self._in_obs else info).get(MASK)
        try:
            flat = np.asarray(mask).reshape(-1)
        except ValueError:  # lists of several lengths
            flat = np.empty(0)
        if len(flat) != sum(self._nvec) or flat.dtype.kind not in "biuf":
            has = f"no {MASK}" if mask is None else f"{shown(mask)} as {MASK}"
            source = "the observation" if self._in_obs else "info"
            raise RunError(f"{source} has {has}, expected {self._expected}")
        allowed = flat == 1
        if (allowed != flat).any():
            raise RunError(f"the {MASK} has {flat[allowed != flat][0]}, expected 0 or 1")
        if not ended and not (possible := np.logical_or.reduceat(allowed, self._first)).all():
            component = f" in component {possible.argmin() + 1} of {len(self._nvec)}"
            raise RunError(f"the {MASK} forbids everything{component if len(self._nvec) > 1 else ''}")
        return {**(obs if self._in_obs else {"observation": self._form(obs)}), MASK: allowed.astype(np.int8)}
