"""N environments stepped together: in this process one after the other, or with others beside it.

`VectorEnv` is all that `Envs` needs of them, whoever steps them. Episodes begin only where that is asked for:
nothing is reset by itself, so that no phantom step enters a buffer. Infos are left out, as nobody reads them,
and what comes out lies in arrays that are written again and again.

`Serial` and `Workers` (workers.py) do it. Gymnasium's own SyncVectorEnv takes more time for infos and copies
than small environments take.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rltemplate.envs.recorder import Recorder, read_states, restore_states
from rltemplate.types import ConfigError, RunError


class Outcome(NamedTuple):
    """What one step of N environments gave, in arrays of theirs that the next call overwrites."""

    obs: np.ndarray  # (N, ...) as the environment's space has them, before any reset
    reward: np.ndarray  # (N,) float64
    terminated: np.ndarray  # (N,) bool
    truncated: np.ndarray  # (N,) bool


@dataclass(frozen=True, slots=True)
class Kind:
    """Copies of one environment of Gymnasium: how one is made, and what all of them have in common."""

    make: Callable[[], gym.Env[Any, Any]]  # one that survives a pickle where processes are not forked
    env_id: str
    num_envs: int
    obs_space: spaces.Space[Any]
    action_space: spaces.Space[Any]

    def name(self, numbers: range) -> str:
        """The environments of these numbers, counted from 0, for messages."""
        if self.num_envs == 1:
            return self.env_id
        if len(numbers) == 1:
            return f"{self.env_id}, environment {numbers[0] + 1} of {self.num_envs}"
        return f"{self.env_id}, environments {numbers[0] + 1} to {numbers[-1] + 1} of {self.num_envs}"

    def member(self, number: int, env: gym.Env[Any, Any] | None = None) -> Recorder:
        """One of them, made here unless it is given."""
        name = self.name(range(number, number + 1))
        try:
            recorder = Recorder(self.make() if env is None else env, name)
        except Exception as error:
            if not isinstance(error, ConfigError):
                error.add_note(f"{name}, when it was made")
            raise
        if (recorder.observation_space, recorder.action_space) != (self.obs_space, self.action_space):
            raise RunError(f"{name}: its spaces are not those of the first one")
        return recorder

    def members(self, numbers: range, first: gym.Env[Any, Any] | None = None) -> list[Recorder]:
        """Those of these numbers; `first`, which has been made already, takes the place of the first."""
        return [self.member(number, first if number == numbers[0] else None) for number in numbers]


class Arrays(NamedTuple):
    """Where environments write what they give, and where those who step them elsewhere find the actions."""

    action: np.ndarray  # (N, ...) of the action space's type, or int64 for choices
    obs: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray

    @staticmethod
    def _forms(kind: Kind) -> list[tuple[tuple[int, ...], np.dtype[Any]]]:
        action, obs, num = kind.action_space, kind.obs_space, kind.num_envs
        real = isinstance(action, spaces.Box)
        return [
            ((num, *(action.shape or ())), np.dtype(action.dtype if real else np.int64)),
            ((num, *(obs.shape or ())), np.dtype(obs.dtype)),
            ((num,), np.dtype(np.float64)),
            ((num,), np.dtype(np.bool_)),
            ((num,), np.dtype(np.bool_)),
        ]

    @classmethod
    def _places(cls, kind: Kind) -> list[int]:
        """Where in a buffer each begins, and where the last one ends: each on a cache line of its own."""
        places = [0]
        for shape, dtype in cls._forms(kind):
            places.append(places[-1] + -(-int(np.prod(shape)) * dtype.itemsize // 64) * 64)
        return places

    @classmethod
    def size(cls, kind: Kind) -> int:
        """Of the buffer, in bytes."""
        return cls._places(kind)[-1]

    @classmethod
    def within(cls, buffer: Any, kind: Kind) -> Arrays:
        """The arrays in a buffer of that size."""
        forms = zip(cls._forms(kind), cls._places(kind), strict=False)
        return cls(*(np.ndarray(shape, dtype, buffer, place) for (shape, dtype), place in forms))

    def part(self, numbers: range) -> Arrays:
        """The rows of some of the environments."""
        return Arrays(*(array[numbers.start : numbers.stop] for array in self))

    def outcome(self) -> Outcome:
        """What the environments gave."""
        return Outcome(*self[1:])


class VectorEnv:
    """N environments, each wrapped in `Recorder`, wherever they are.

    Observations (N, ...) are as the space of one environment has them, actions are such as it takes, N of
    them. Results are the same whoever steps the environments and however many do. Every method raises
    `RunError` where an environment gives what is no finite observation or reward, and where it dies; what an
    environment raises itself passes. Then only `close` may follow.
    """

    def __init__(self, kind: Kind) -> None:
        self._kind = kind

    def reset(self, seeds: Sequence[int]) -> np.ndarray:
        """Seed each environment and begin its first episode; the observations (N, ...)."""
        raise NotImplementedError

    def reset_some(self, mask: np.ndarray) -> np.ndarray:
        """Begin another episode where `mask` (N,) is true; of the result (N, ...) only these rows count."""
        raise NotImplementedError

    def step(self, actions: np.ndarray) -> Outcome:
        """Step with `actions` (N, ...), which nobody writes to any more; ended episodes were reset before."""
        raise NotImplementedError

    def call(self, name: str, arguments: Sequence[Any] | None = None) -> list[Any]:
        """The results of a method of each environment, in order, called with one argument each or none."""
        raise NotImplementedError

    def close(self) -> None:
        """Release everything; also after a failure, and more than once."""
        raise NotImplementedError

    def states(self) -> list[Any]:
        """State of each of the N environments: tensors, numbers and strings, nested in dicts and lists."""
        return read_states(self)

    def restore(self, states: Sequence[Any], returns: np.ndarray, lengths: np.ndarray) -> None:
        """Go where `states` were taken, in place of `reset` and in environments not used before.

        `returns` and `lengths` (N,) are those of the running episodes. Raises ConfigError if an environment
        does not come out there, bit for bit.
        """
        restore_states(self, self._kind.env_id, states, returns, lengths)


class Serial(VectorEnv):
    """Environments in this process, one after the other. The first one that fails ends the step."""

    def __init__(self, kind: Kind, members: Sequence[Recorder], arrays: Arrays | None = None) -> None:
        """`members` are all of a kind, or some of them that have a part of its `arrays`."""
        super().__init__(kind)
        if arrays is None:
            arrays = Arrays.within(bytearray(Arrays.size(kind)), kind)
        self._members, self._arrays = members, arrays
        self._steps = [member.step for member in members]
        self._outcome = arrays.outcome()

    def reset(self, seeds: Sequence[int]) -> np.ndarray:
        """As `VectorEnv.reset`."""
        obs = self._outcome.obs
        for row, (member, seed) in enumerate(zip(self._members, seeds, strict=True)):
            obs[row] = member.reset(seed=seed)[0]
        return obs

    def reset_some(self, mask: np.ndarray) -> np.ndarray:
        """As `VectorEnv.reset_some`."""
        obs = self._outcome.obs
        for row in np.flatnonzero(mask).tolist():
            obs[row] = self._members[row].reset()[0]
        return obs

    def step(self, actions: np.ndarray) -> Outcome:
        """See `VectorEnv.step`."""
        obs, reward, terminated, truncated = self._outcome
        for row, (step, action) in enumerate(zip(self._steps, actions, strict=True)):
            obs[row], reward[row], terminated[row], truncated[row], _ = step(action)
        return self._outcome

    def step_from_arrays(self) -> None:
        """Step with the actions that lie there; a copy, because an environment may keep its action."""
        self.step(self._arrays.action.copy())

    def call(self, name: str, arguments: Sequence[Any] | None = None) -> list[Any]:
        """See `VectorEnv.call`."""
        if arguments is None:
            return [getattr(member, name)() for member in self._members]
        pairs = zip(self._members, arguments, strict=True)
        return [getattr(member, name)(argument) for member, argument in pairs]

    def close(self) -> None:
        """As `VectorEnv.close`; one that raises leaves none of the others open."""
        with contextlib.ExitStack() as closing:
            for member in self._members:
                closing.callback(member.close)


def even_parts(num: int, count: int) -> list[range]:
    """The numbers from 0 to `num` in `count` parts as even as possible, the last ones the smaller."""
    small, larger = divmod(num, count)
    starts = [number * small + min(number, larger) for number in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def available_cores() -> int:
    """How many cores this process and what it starts can keep busy."""
    affinity = hasattr(os, "sched_getaffinity")  # not everywhere
    cores = len(os.sched_getaffinity(0)) if affinity else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # a container may have fewer than it sees
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, int(quota) // int(period))
    return cores
