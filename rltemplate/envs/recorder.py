"""Exact state of a running environment: the start of an episode, and every action since.

Most environments cannot be copied. Box2D has no state to read, and pickling a MuJoCo environment silently
makes a fresh one. The way to a state can be had of all of them: the seed of the first reset, the generator's
state before a later one, and the actions. Restoring replays these and compares the outcome bit for bit.

The episode before the running one is replayed too. An environment that keeps state elsewhere, such as in a
generator of its own or across episodes, may begin an episode alike and part from it later; a whole episode
nearly always shows it, and the environment is refused. State that shows in neither of the two remains unseen.
Gymnasium's own MuJoCo environments forget everything at a reset (`mj_resetData`, and a few attributes that
are set anew), so that the running episode is enough there.

A Box2D world that outlives its episodes (BipedalWalker) is such state, but repeats itself: there the whole
run is replayed, which takes as long as its steps took.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

from rltemplate.determinism import denormals
from rltemplate.envs import validity
from rltemplate.types import RunError

_FORGETFUL = "gymnasium.envs.mujoco."  # modules whose environments keep nothing across episodes


@dataclass(slots=True)
class _Episode:
    """The way to the end of an episode, or to the running step."""

    from_seed: bool
    generator: Any  # its state before the reset; None where the seed decides, or where there is none
    actions: Any  # a list of arrays or numbers of NumPy, or one array of all of them
    last: tuple[Any, ...] = ()  # of an ended episode: results of the last step, and the generator's state


class ActionRecorder:
    """One environment, whose results are checked and whose actions are remembered.

    `RunError` names the environment, the invalid value and the step. An exception of the environment passes,
    with a note that names the step.
    """

    def __init__(self, env: gym.Env[Any, Any], name: str) -> None:
        self.env = env
        self._name = name
        self._check_obs = validity.obs_check(env.observation_space)
        self._replaying = False
        self._forgetful = type(env.unwrapped).__module__.startswith(_FORGETFUL)
        self._forget()

    def _forget(self) -> None:
        self._seed: int | None = None  # the last one given
        self._episodes: list[_Episode] = []  # those to be replayed; the last one is running
        self._actions: list[Any] = []  # of the running episode
        self._last: tuple[Any, ...] = ()  # observation, reward, terminated, truncated
        self._whole = False  # all episodes since the seed are replayed
        self._begun = 0  # episodes in all

    def reset(self, seed: int | None = None) -> Any:
        """Begin an episode; the observation."""
        worlds = [] if seed is None else _worlds(self.env)
        generator = None if seed is not None else _generator_state(self.env)
        if seed is None and self._episodes and not self._forgetful:
            ended = self._episodes[-1]
            ended.last = (np.array(self._last[0]), *self._last[1:], generator)
            if self._whole:
                ended.actions = np.array(ended.actions)  # or there would be many small arrays
            else:
                del self._episodes[:-1]
        else:
            self._episodes = []
        self._begun += 1
        try:
            result = self.env.reset(seed=seed)
            denormals.keep()
            validity.check_parts("reset", result)
            obs = self._check_obs(result[0])
        except Exception as error:
            self._explain(error, "reset", f"reset to its episode {self._begun}")
            raise
        if seed is not None:
            self._seed = seed
            self._whole = bool(worlds) and worlds == _worlds(self.env)
        self._actions = []
        self._episodes.append(_Episode(seed is not None, generator, self._actions))
        self._last = (result[0], 0.0, False, False)
        return obs

    def step(self, action: Any) -> tuple[Any, float, bool, bool]:
        """Observation, reward, terminated and truncated."""
        self._actions.append(np.array(action))  # some environments change it in place
        try:
            result = self.env.step(action)
            denormals.keep()  # many load their libraries where they first need them
            if result.__class__ is not tuple or len(result) != 5:
                validity.check_parts("step", result)
            obs, reward, terminated, truncated, _ = result
            checked = self._check_obs(obs)
            reward = validity.checked_reward(reward)
            # Environments of a few lines would feel two more calls.
            if terminated.__class__ is not bool:
                terminated = validity.checked_flag("terminated", terminated)
            if truncated.__class__ is not bool:
                truncated = validity.checked_flag("truncated", truncated)
        except Exception as error:
            step = f"step {len(self._actions)} of its episode"
            self._explain(error, step, f"{step} {self._begun}")
            raise
        self._last = (obs, reward, terminated, truncated)
        return checked, reward, terminated, truncated

    def close(self) -> None:
        """Close the environment."""
        self.env.close()

    def _explain(self, error: Exception, briefly: str, exactly: str) -> None:
        """Raise RunError for an invalid value; note the step of an exception of the environment."""
        replayed = ", replayed" if self._replaying else ""
        reason = str(error) if isinstance(error, validity.InvalidValue) else validity.unpacking_failure(error)
        if reason is not None:
            raise RunError(f"{self._name}, {briefly}{replayed}: {reason}") from None
        error.add_note(f"{self._name}, {exactly}{replayed}")

    def recording(self) -> dict[str, Any] | None:
        """The input of `restore`, as numbers, strings and an array; None before the first reset."""
        if not self._episodes:
            return None
        actions = [np.array(each.actions) for each in self._episodes if len(each.actions)]
        return {
            "seed": self._seed,
            "from_seed": self._episodes[0].from_seed,
            "generator": _to_text(self._episodes[0].generator),
            "actions": np.concatenate(actions) if actions else np.zeros(0),  # of all episodes, end to end
            "lengths": [len(each.actions) for each in self._episodes],
            "outcomes": [*(_digest(*each.last) for each in self._episodes[:-1]), self._outcome()],
            "episode": self._begun,
        }

    def restore(self, recorded: Mapping[str, Any] | None) -> tuple[bool, int, float]:
        """Replay a recording: True if all came out the same; length and return of the running episode."""
        self._forget()
        if recorded is None:
            return True, 0, 0.0
        self._replaying = True
        try:
            return self._replay(recorded)
        finally:
            self._replaying = False

    def _replay(self, recorded: Mapping[str, Any]) -> tuple[bool, int, float]:
        differs = (False, 0, 0.0)
        seed = recorded["seed"]
        if not recorded["from_seed"]:
            # Things that an environment makes or draws with a seed, such as parts that share its generator,
            # have to be there even if the episode with the seed is long past.
            if seed is not None:
                self.reset(seed)
                self._episodes = []
            generator = recorded["generator"]
            if generator is not None and not _set_generator_state(self.env, json.loads(generator)):
                return differs
            seed = None
        lengths, actions = recorded["lengths"], iter(recorded["actions"])
        episode_return = 0.0
        self._begun = recorded["episode"] - len(lengths)
        for length, outcome in zip(lengths, recorded["outcomes"], strict=True):
            self.reset(seed)
            seed, episode_return = None, 0.0
            for _ in range(length):
                action = next(actions, None)
                # Stepping on after an early end may raise anything.
                if action is None or self._last[2] or self._last[3]:
                    return differs
                episode_return += self.step(action.copy())[1]
            if self._outcome() != outcome:
                return differs
        return next(actions, None) is None, lengths[-1], episode_return

    def _outcome(self) -> str:
        obs, reward, terminated, truncated = self._last
        return _digest(obs, reward, terminated, truncated, _generator_state(self.env))


def _digest(obs: Any, reward: float, terminated: bool, truncated: bool, generator: Any) -> str:
    obs = np.asarray(obs)
    plain = (obs.dtype.str, obs.shape, obs.tobytes(), np.float64(reward).tobytes())
    flags = (bool(terminated), bool(truncated), _to_text(generator))
    return hashlib.sha256(repr((plain, flags)).encode()).hexdigest()


def _worlds(env: gym.Env[Any, Any]) -> list[int]:
    """The Box2D worlds that an environment holds right now."""
    return [id(value) for value in vars(env.unwrapped).values() if type(value).__name__ == "b2World"]


def _generator_state(env: gym.Env[Any, Any]) -> Any:
    base = env.unwrapped
    # Asking for a generator that was never used would make one out of thin air.
    if type(base).np_random is gym.Env.np_random and base._np_random is None:
        return None
    generator: Any = base.np_random
    if hasattr(generator, "bit_generator"):
        return generator.bit_generator.state
    if hasattr(generator, "get_state"):  # numpy's older kind, which environments of dm_control have
        return generator.get_state(legacy=False)
    return None


def _set_generator_state(env: gym.Env[Any, Any], state: Mapping[str, Any]) -> bool:
    """True if the generator took `state`. In place, because parts of the environment may hold it too."""
    generator: Any = env.unwrapped.np_random
    try:
        if hasattr(generator, "bit_generator"):
            generator.bit_generator.state = state
        else:
            generator.set_state(state)
    except (AttributeError, TypeError, ValueError):  # numpy's ways of refusing the state of another kind
        return False
    return True


def _to_text(state: Any) -> str | None:
    # As text, because numpy's generators count further than the 64 bits that a checkpoint is sure to keep.
    return None if state is None else json.dumps(state, default=lambda value: value.tolist())
