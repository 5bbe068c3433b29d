"""N environments stepped one after the other in this process.

Nothing is reset by itself. Infos are dropped. Gymnasium's own SyncVectorEnv takes more time for infos and
copies than small environments take for a step.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rltemplate.envs.recorder import ActionRecorder
from rltemplate.types import ConfigError, RunError


class StepResult(NamedTuple):
    """The results of one step of N environments, in arrays that the next call overwrites."""

    obs: np.ndarray  # (N, ...) as the environment's space has them, before any reset
    reward: np.ndarray  # (N,) float64
    terminated: np.ndarray  # (N,) bool
    truncated: np.ndarray  # (N,) bool

    def rows(self, numbers: range) -> StepResult:
        """The results of some of the environments."""
        return StepResult(*(array[numbers.start : numbers.stop] for array in self))


@dataclass(frozen=True, slots=True)
class EnvFactory:
    """Makes the copies of one environment, by their numbers from 0."""

    make: Callable[[], gym.Env[Any, Any]]  # can be pickled, for processes that are not forked
    env_id: str
    num_envs: int
    obs_space: spaces.Space[Any]
    action_space: spaces.Space[Any]

    def name(self, numbers: range) -> str:
        """The environments of these numbers in messages."""
        if self.num_envs == 1:
            return self.env_id
        if len(numbers) == 1:
            return f"{self.env_id}, environment {numbers[0] + 1} of {self.num_envs}"
        return f"{self.env_id}, environments {numbers[0] + 1} to {numbers[-1] + 1} of {self.num_envs}"

    def make_env(self, number: int, made: gym.Env[Any, Any] | None = None) -> ActionRecorder:
        """The environment of this number; `made` if it is there already."""
        name = self.name(range(number, number + 1))
        try:
            env = self.make() if made is None else made
        except Exception as error:
            if not isinstance(error, ConfigError):
                error.add_note(f"{name}, when it was made")
            raise
        if (env.observation_space, env.action_space) != (self.obs_space, self.action_space):
            raise RunError(f"{name}: its spaces are not those of the first one")
        return ActionRecorder(env, name)

    def allocate(self, raw_array: Callable[[Any, int], Any]) -> list[Any]:
        """Memory for the actions and results of all environments, from `raw_array(type, size)`."""
        forms = self._forms()
        return [raw_array(ctypes.c_char, int(np.prod(shape)) * dtype.itemsize or 1) for shape, dtype in forms]

    def arrays(self, memory: Sequence[Any] | None = None) -> tuple[np.ndarray, StepResult]:
        """Arrays for the actions and results of all environments, in that memory or in their own."""
        buffers = memory or [None] * len(self._forms())
        forms = zip(self._forms(), buffers, strict=True)
        action, *results = (np.ndarray(shape, dtype, buffer) for (shape, dtype), buffer in forms)
        return action, StepResult(*results)

    def _forms(self) -> list[tuple[tuple[int, ...], np.dtype[Any]]]:
        num, action, obs = self.num_envs, self.action_space, self.obs_space
        kind = np.dtype(action.dtype if isinstance(action, spaces.Box) else np.int64)
        per_env = [((num,), np.dtype(each)) for each in (np.float64, np.bool_, np.bool_)]
        return [((num, *action.shape), kind), ((num, *obs.shape), np.dtype(obs.dtype)), *per_env]  # type: ignore[misc]


class SerialEnvs:
    """Environments in this process, one after the other. The first one that fails ends the step.

    Methods raise `RunError` where an environment returns an invalid value; exceptions of an environment
    pass. Only `close` may follow either.
    """

    def __init__(self, envs: Sequence[ActionRecorder], results: StepResult) -> None:
        self._envs, self._results = envs, results
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
        if arguments is None:
            return [getattr(env, name)() for env in self._envs]
        pairs = zip(self._envs, arguments, strict=True)
        return [getattr(env, name)(argument) for env, argument in pairs]

    def close(self) -> None:
        """Close the environments; one that raises leaves none of the others open."""
        with contextlib.ExitStack() as closing:
            for env in self._envs:
                closing.callback(env.close)
