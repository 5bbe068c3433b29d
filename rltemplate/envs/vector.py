"""N environments stepped one after the other in this process.

Nothing is reset by itself. Infos are dropped. Gymnasium's own SyncVectorEnv takes more time for infos and
copies than small environments take for a step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from rltemplate.envs.make import EnvSpec, make_env
from rltemplate.envs.recorder import ActionRecorder
from rltemplate.types import ConfigError


class StepResult(NamedTuple):
    """The results of one step of N environments, in arrays that the next call overwrites."""

    obs: np.ndarray  # (N, ...) as the environment's space has them, before any reset
    reward: np.ndarray  # (N,) float64, as the environment gives it
    terminated: np.ndarray  # (N,) bool
    truncated: np.ndarray  # (N,) bool


def make_recorder(spec: EnvSpec, number: int, num_envs: int) -> ActionRecorder:
    """One of the copies of an environment, by its number from 0."""
    name = spec.id if num_envs == 1 else f"{spec.id}, environment {number + 1} of {num_envs}"
    try:
        return ActionRecorder(make_env(spec), name)
    except Exception as error:
        if not isinstance(error, ConfigError):
            error.add_note(f"{name}, when it was made")
        raise


def step_dtype(obs_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> np.dtype[Any]:
    """The action and the results of one environment in one step, for a structured array of all."""
    action = np.dtype(action_space.dtype if isinstance(action_space, spaces.Box) else np.int64)
    fields: list[Any] = [("action", action, action_space.shape), ("obs", obs_space.dtype, obs_space.shape)]
    fields += [("reward", np.float64), ("terminated", np.bool_), ("truncated", np.bool_)]
    return np.dtype(fields, align=True)


class SerialEnvs:
    """Environments in this process, one after the other. The first one that fails ends the step.

    `table` (N,) of `step_dtype` holds their results. Methods raise `RunError` where an environment returns an
    invalid value; exceptions of an environment pass. Only `close` may follow either.
    """

    def __init__(self, envs: Sequence[ActionRecorder], table: np.ndarray) -> None:
        self._envs = envs
        self._results = StepResult(*(table[name] for name in StepResult._fields))
        self._steps = [env.step for env in envs]

    def reset(self, mask: np.ndarray, seeds: Sequence[int | None]) -> np.ndarray:
        """Begin an episode where `mask` (N,) is true; of the result (N, ...) only these rows count."""
        for row in np.flatnonzero(mask).tolist():
            self._results.obs[row] = self._envs[row].reset(seeds[row])
        return self._results.obs

    def step(self, actions: np.ndarray) -> StepResult:
        """Step with `actions` (N, ...), which are not written to later; ended episodes were reset before."""
        obs, reward, terminated, truncated = self._results
        for row, (step, action) in enumerate(zip(self._steps, actions, strict=True)):
            obs[row], reward[row], terminated[row], truncated[row] = step(action)
        return self._results

    def call(self, name: str, arguments: Sequence[Any] | None = None) -> list[Any]:
        """The results of a method of each environment, in order, called with one argument each or none."""
        given = [()] * len(self._envs) if arguments is None else [(argument,) for argument in arguments]
        return [getattr(env, name)(*each) for env, each in zip(self._envs, given, strict=True)]

    def close(self) -> None:
        """Close the environments; one that raises leaves none of the others open."""
        with contextlib.ExitStack() as closing:
            for env in self._envs:
                closing.callback(env.close)
