"""Exact state of a running environment: the start of an episode, and every action since.

Most environments cannot be copied. Box2D has no state to read, and pickling a MuJoCo environment silently
makes a fresh one. But each environment can be led to the same state again: by the seed of its first reset or
the generator's state before a later one, and the actions. Restoring replays these and compares the outcome
bit for bit.

The episode before the running one is replayed too. An environment that keeps state elsewhere, such as in a
generator of its own or across episodes, may begin an episode in the same way and differ later. A whole
episode nearly always shows this, and the environment is refused. State that changes neither episode is not
detected.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import gymnasium as gym
import numpy as np

from runlab.config.texts import first_line
from runlab.determinism import denormals
from runlab.envs import validity
from runlab.envs.exits import end_forked
from runlab.errors import RunError

SEED_BITS = 63
# Of environments that do not take a seed as long as this.
_SEED_ERRORS = (ValueError, TypeError, ArithmeticError, AssertionError)
_OLD_RESET = re.compile(r"\breset\(\) got an unexpected keyword argument '(seed|options)'")
_OF_RESET = ("observation", "info")
_OF_STEP = ("observation", "reward", "terminated", "truncated", "info")


@dataclass(slots=True)
class _Episode:
    from_seed: bool
    generator: str | None  # its state before the reset; None after a reset with a seed, or without one
    outcome: str = ""  # digest of the last step, once the episode has ended
    packed: list[np.ndarray] = field(default_factory=list)  # at most one array, of the first actions
    newest: list[np.ndarray] = field(default_factory=list)  # later actions

    @property
    def length(self) -> int:
        return sum(map(len, self.packed)) + len(self.newest)

    def actions(self) -> list[np.ndarray]:
        """All actions as at most one array. They are packed once: long episodes are often asked for."""
        if self.newest:
            self.packed, self.newest = [np.concatenate([*self.packed, np.array(self.newest)])], []
        return self.packed


class ActionRecorder:
    """One environment with checked results and recorded actions.

    `RunError` names the environment, the invalid value and the step. An exception of the environment gets a
    note that names the step.
    """

    def __init__(self, env: gym.Env[Any, Any], name: str, logged: Sequence[str] = ()) -> None:
        self.env = env
        self._name = name
        self._logged = logged  # `env.logged_infos`
        self._process = os.getpid()
        self._info: Any = {}  # of the last reset or step
        self._check_obs = validity.obs_check(env.observation_space)
        self.seed_bits = SEED_BITS  # of the seeds that the environment takes; known after the first reset
        self._seed: int | None = None  # of the last reset with a seed
        self._episodes: deque[_Episode] = deque(maxlen=2)  # the last one is running
        self._last: tuple[Any, ...] = ()  # observation, reward, terminated, truncated

    def reset(self, seed: int | None = None) -> Any:
        """Begin an episode; the observation."""
        if seed is not None:
            self._seed = seed
            self._episodes.clear()
        elif self._episodes:
            self._episodes[-1].outcome = self._outcome()
        generator = _generator_state(self.env) if seed is None else None
        try:
            try:
                if seed is None:
                    result = self.env.reset(seed=None)
                else:
                    result, self.seed_bits = seeded_reset(self.env, seed)
            finally:
                end_forked(self._process)
            obs, self._info = validity.checked_parts(result, _OF_RESET)
            denormals.keep()
            checked = self._check_obs(obs)
        except Exception as error:
            self._explain(error, "reset")
            raise
        self._episodes.append(_Episode(seed is not None, generator))
        self._episode_infos = dict.fromkeys(self._logged, math.nan)
        self._last = (obs, 0.0, False, False)
        return checked

    def step(self, action: Any) -> tuple[Any, float, bool, bool]:
        """Observation, reward, terminated and truncated."""
        running = self._episodes[-1]
        running.newest.append(np.array(action))  # a copy: some environments change it in place
        try:
            try:
                results = self.env.step(action)
            finally:
                end_forked(self._process)
            parts = validity.checked_parts(results, _OF_STEP)
            obs, reward, terminated, truncated, self._info = parts
            denormals.keep()  # environments load libraries when they first need them
            checked = self._check_obs(obs)
            reward = validity.checked_reward(reward)
            terminated = validity.checked_flag("terminated", terminated)
            truncated = validity.checked_flag("truncated", truncated)
        except Exception as error:
            self._explain(error, f"step {running.length} of its episode")
            raise
        self._last = (obs, reward, terminated, truncated)
        if self._logged:
            for name, array in self.infos(self._logged).items():
                if array.size != 1:
                    raise RunError(f"{self._name}: info has {array.size} numbers as {name}, expected one")
                self._episode_infos[name] = float(array.item())
        return checked, reward, terminated, truncated

    def episode_infos(self) -> dict[str, float]:
        """The last value of each logged entry of info in the steps of this episode; NaN if none was given."""
        return self._episode_infos

    def infos(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        """The entries of the last info that exist; `a.b` is the entry b of a."""
        arrays = {}
        for name in names:
            value: Any = self._info
            for key in name.split("."):
                value = value.get(key) if isinstance(value, Mapping) else None
            array = np.array(value)
            if array.dtype.kind in "biuf":
                arrays[name] = array
            elif value is not None:
                raise RunError(f"{self._name}: info has {value!r:.80} as {name}, expected numbers")
        return arrays

    def _explain(self, error: Exception, moment: str) -> None:
        if isinstance(error, RunError):
            raise RunError(f"{self._name}, {moment}: {error}") from None
        error.add_note(f"{self._name}, {moment}")

    def recording(self) -> dict[str, Any] | None:
        """The input of `restore`, as numbers, strings and an array; None before the first reset."""
        if not self._episodes:
            return None
        first, running = self._episodes[0], self._episodes[-1]
        running.outcome = self._outcome()
        arrays = [array for each in self._episodes for array in each.actions()]
        return {
            "seed": self._seed,
            "from_seed": first.from_seed,
            "generator": first.generator,
            "actions": np.concatenate(arrays) if arrays else np.array([]),
            "lengths": [each.length for each in self._episodes],
            "outcomes": [each.outcome for each in self._episodes],
        }

    def restore(self, recorded: Mapping[str, Any] | None) -> tuple[bool, int, float]:
        """Replay a recording in an environment that was not used before.

        True if all came out the same; length and return of the running episode.
        """
        if recorded is None:
            return True, 0, 0.0
        seed, generator = recorded["seed"], recorded["generator"]
        if not recorded["from_seed"]:
            # An environment may make things in a reset with a seed, such as parts that share its generator.
            # They are needed even if that reset was many episodes ago.
            self.reset(seed)
            self._episodes.clear()
            seed = None
            if generator is not None:
                try:  # in place, because parts of the environment may hold it too
                    own: Any = self.env.unwrapped._np_random
                    own.bit_generator.state = json.loads(generator)
                except (AttributeError, TypeError, ValueError):  # damaged, or of another kind of generator
                    return False, 0, 0.0
        actions, same, episode_return = iter(recorded["actions"]), True, 0.0
        for length, outcome in zip(recorded["lengths"], recorded["outcomes"], strict=True):
            self.reset(seed)
            seed, episode_return = None, 0.0
            for action in islice(actions, length):
                if self._last[2] or self._last[3]:  # stepping on after an early end may raise anything
                    return False, 0, 0.0
                episode_return += self.step(action.copy())[1]
            running = self._episodes[-1]
            same = same and running.length == length and self._outcome() == outcome
        return same, running.length, episode_return

    def _outcome(self) -> str:
        obs, reward, terminated, truncated = self._last
        obs = np.asarray(obs)
        plain = (obs.dtype.str, obs.shape, obs.tobytes(), np.float64(reward).tobytes())
        others = (terminated, truncated, _generator_state(self.env))
        return hashlib.sha256(repr((plain, others)).encode()).hexdigest()


def seeded_reset(env: gym.Env[Any, Any], seed: int) -> tuple[Any, int]:
    """The result of a reset with a seed, and the number of its bits that the environment takes.

    numpy's old generator takes seeds of 32 bits, an int of C those of 31. An environment that refuses long
    seeds, this one and another, gets the lower bits. This is tried at every reset with a seed. So one seed
    gives one episode in training, evaluations, videos and after a resume, and no decision has to be kept.
    """
    failures: list[Exception] = []
    for bits, number in ((SEED_BITS, seed), (SEED_BITS, seed ^ 1), (32, seed % 2**32), (31, seed % 2**31)):
        _seed_spaces(env, number)
        try:
            result = env.reset(seed=number)
        except _SEED_ERRORS as error:
            failures.append(error)
            if _OLD_RESET.search(str(error)):
                raise RunError(
                    f"{first_line(error)}; expected Gymnasium's reset(*, seed=None, options=None), which "
                    "returns an observation and an info"
                ) from error
            if seed < 2**31:
                raise
        else:
            if number == seed ^ 1:  # the length of the seed is not what it fails for
                break
            return result, bits
    raise failures[0]


def _seed_spaces(env: gym.Env[Any, Any], seed: int) -> None:
    """Seed the generators of the spaces, from which some environments draw their resets.

    Their states are not recorded: an environment that draws from them later is refused when it is restored.
    """
    layer = env
    while True:
        layer.action_space.seed(seed)
        layer.observation_space.seed(seed)
        if not isinstance(layer, gym.Wrapper):
            return
        layer = layer.env


def _generator_state(env: gym.Env[Any, Any]) -> str | None:
    # As text, because numpy's generators have integers of more than the 64 bits that a checkpoint can hold.
    # Not `np_random`, which would make a generator in an environment that uses none.
    generator = env.unwrapped._np_random
    if not isinstance(generator, np.random.Generator):
        return None
    return json.dumps(generator.bit_generator.state, default=lambda value: value.tolist())
