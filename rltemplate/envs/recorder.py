"""Exact state of a running environment: the start of an episode, and every action since.

Most environments cannot be copied. Box2D has no state to read, and pickling a MuJoCo environment silently
makes a fresh one. The way to a state can be had of all of them: the seed of the first reset, the generator's
state before a later one, and the actions. Restoring replays these and compares the outcome bit for bit.

The episode before the running one is replayed too. An environment that keeps state elsewhere, such as in a
generator of its own or across episodes, may begin an episode alike and part from it later; a whole episode
nearly always shows it, and the environment is refused. State that shows in neither of the two remains unseen.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import gymnasium as gym
import numpy as np

from rltemplate.determinism import denormals
from rltemplate.envs import validity
from rltemplate.interfaces import RunError


@dataclass(slots=True)
class _Episode:
    from_seed: bool
    generator: str | None  # its state before the reset; None where the seed decides, or where there is none
    outcome: str = ""  # digest of its last step, once it has ended
    packed: list[np.ndarray] = field(default_factory=list)  # at most one array, of the first actions
    newest: list[np.ndarray] = field(default_factory=list)  # the actions after these

    @property
    def length(self) -> int:
        return sum(map(len, self.packed)) + len(self.newest)

    def actions(self) -> list[np.ndarray]:
        """All actions as at most one array; packed once, since an episode may be long and is often asked."""
        if self.newest:
            self.packed, self.newest = [np.concatenate([*self.packed, np.array(self.newest)])], []
        return self.packed


class ActionRecorder:
    """One environment, whose results are checked and whose actions are remembered.

    `RunError` names the environment, the invalid value and the step. An exception of the environment passes,
    with a note that names the step.
    """

    def __init__(self, env: gym.Env[Any, Any], name: str) -> None:
        self.env = env
        self._name = name
        self._info: Any = {}  # of the last reset or step
        self._check_obs = validity.obs_check(env.observation_space)
        self._seed: int | None = None  # the last one given
        self._episodes: deque[_Episode] = deque(maxlen=2)  # the last one is running
        self._last: tuple[Any, ...] = ()  # observation, reward, terminated, truncated

    def reset(self, seed: int | None = None) -> Any:
        """Begin an episode; the observation."""
        if seed is not None:
            self._seed = seed
            self._episodes.clear()
            _seed_spaces(self.env, seed)
        elif self._episodes:
            self._episodes[-1].outcome = self._outcome()
        generator = _generator_state(self.env) if seed is None else None
        try:
            obs, self._info = self.env.reset(seed=seed)
            denormals.keep()
            checked = self._check_obs(obs)
        except Exception as error:
            self._explain(error, "reset")
            raise
        self._episodes.append(_Episode(seed is not None, generator))
        self._last = (obs, 0.0, False, False)
        return checked

    def step(self, action: Any) -> tuple[Any, float, bool, bool]:
        """Observation, reward, terminated and truncated."""
        running = self._episodes[-1]
        running.newest.append(np.array(action))  # a copy: some environments change it in place
        try:
            obs, reward, terminated, truncated, self._info = self.env.step(action)
            denormals.keep()  # many load their libraries where they first need them
            checked = self._check_obs(obs)
            reward = validity.checked_reward(reward)
            terminated = validity.checked_flag("terminated", terminated)
            truncated = validity.checked_flag("truncated", truncated)
        except Exception as error:
            self._explain(error, f"step {running.length} of its episode")
            raise
        self._last = (obs, reward, terminated, truncated)
        return checked, reward, terminated, truncated

    def infos(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Entries of the last info, as far as they are there; `a.b` is the entry b of a."""
        found = {}
        for name in names:
            value: Any = self._info
            for key in name.split("."):
                value = value.get(key) if isinstance(value, Mapping) else None
            array = np.array(value)
            if array.dtype.kind in "biuf":
                found[name] = array
            elif value is not None:
                raise RunError(f"{self._name}: info has {value!r:.80} as {name}, expected numbers")
        return found

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
            # Things that an environment makes or draws with a seed, such as parts that share its generator,
            # have to be there even if the episode with the seed is long past.
            self.reset(seed)
            self._episodes.clear()
            seed = None
            if generator is not None:
                try:  # in place, because parts of the environment may hold it too
                    self.env.unwrapped.np_random.bit_generator.state = json.loads(generator)
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
    # As text, because numpy's generators count further than the 64 bits that a checkpoint is sure to keep.
    # Not `np_random`, which would make a generator out of thin air where none was used.
    generator = env.unwrapped._np_random
    if not isinstance(generator, np.random.Generator):
        return None
    return json.dumps(generator.bit_generator.state, default=lambda value: value.tolist())
