"""Exact states of running environments: where an episode began, and every action since.

Most environments cannot be copied. Box2D has no state to read, and pickling a MuJoCo environment silently
makes a fresh one. What can be had of all of them is what led to where they are: the seed of the first
reset, the generator's state before a later one, and the actions. Putting an environment back replays these
and compares what must come out the same, bit for bit.

The episode before the running one is replayed too. An environment that keeps state elsewhere, such as in a
generator of its own or across episodes, may begin an episode alike and part from it later; a whole one
nearly always gives it away, and it is refused. What shows in neither of the two remains unseen.

A Box2D world that outlives its episodes (BipedalWalker) is such state, but repeats itself: there the whole
run is replayed, which takes as long as its steps took.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from rltemplate.types import ConfigError


@dataclass(slots=True)
class _Episode:
    """What led to the end of an episode, or to where it is."""

    seed: int | None
    options: dict[str, Any] | None
    generator: Any  # its state before the reset; None where the seed decides, or where there is none
    actions: list[np.ndarray]
    outcome: str = ""  # of the last step, once the episode is over


class Recorder(gym.Wrapper[Any, Any, Any, Any]):
    """Remembers what led to where one environment is. The outermost wrapper, and silent until asked."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self.to_restore: Mapping[str, Any] | None = None  # what `restore` goes back to
        self._forget()

    def _forget(self) -> None:
        self._seed: int | None = None  # the last one given
        self._seed_options: dict[str, Any] | None = None
        self._episodes: list[_Episode] = []  # the last one is under way
        self._actions: list[np.ndarray] = []  # its actions
        self._last: tuple[Any, ...] = ()  # observation, reward, terminated, truncated
        self._whole = False  # whether all episodes since the seed count

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Begin an episode, and remember from what."""
        worlds = _worlds(self.env)
        generator = None if seed is not None else _generator_state(self.env)
        begun = _Episode(seed, copy.deepcopy(options), generator, [])
        if seed is None and self._episodes:
            ended = self._episodes[-1]
            ended.outcome = self._outcome(generator)
            # One array for many small ones: with whole runs these are all the actions there ever were.
            ended.actions = [np.stack(ended.actions)] if ended.actions else []
            if not self._whole:
                del self._episodes[:-1]
        else:
            self._episodes = []
        obs, info = self.env.reset(seed=seed, options=options)
        if seed is not None:
            self._seed, self._seed_options = seed, begun.options
            self._whole = bool(worlds) and worlds == _worlds(self.env)
        self._episodes.append(begun)
        self._actions = begun.actions
        self._last = (obs, 0.0, False, False)
        return obs, info

    def step(self, action: Any) -> Any:
        """Step, and remember the action as it was given: some environments change it in place."""
        self._actions.append(np.array(action))
        result = self._last = self.env.step(action)
        return result

    def _outcome(self, generator: Any) -> str:
        """A digest of what the last step gave, and of the generator's state after it."""
        obs, reward, terminated, truncated = self._last[:4]
        obs = np.asarray(obs)
        plain = (obs.dtype.str, obs.shape, obs.tobytes(), np.float64(reward).tobytes())
        flags = (bool(terminated), bool(truncated), _to_text(generator))
        return hashlib.sha256(repr((plain, flags)).encode()).hexdigest()

    def recording(self) -> dict[str, Any] | None:
        """All that `restore` needs, as numbers, strings and an array; None before the first reset."""
        if not self._episodes:
            return None
        first, running = self._episodes[0], self._episodes[-1]
        past = [episode.actions[0] for episode in self._episodes[:-1] if episode.actions]
        parts = [*past, np.stack(running.actions)] if running.actions else past
        lengths = [sum(map(len, episode.actions)) for episode in self._episodes[:-1]]
        outcomes = [episode.outcome for episode in self._episodes[:-1]]
        return {
            "seed": self._seed,
            "seed_options": self._seed_options,
            "from_seed": first.seed is not None,
            "generator": _to_text(first.generator),
            "options": [episode.options for episode in self._episodes],
            "actions": np.concatenate(parts) if parts else np.zeros(0),  # of all episodes, end to end
            "lengths": [*lengths, len(running.actions)],
            "outcomes": [*outcomes, self._outcome(_generator_state(self.env))],
        }

    def restore(self) -> tuple[bool, float]:
        """Go to where `to_restore` was recorded: whether all came out the same, and the return there."""
        recorded, self.to_restore = self.to_restore, None
        self._forget()
        if recorded is None:
            return True, 0.0
        seed = recorded["seed"]
        if not recorded["from_seed"]:
            # What an environment makes or draws with a seed, such as parts that share its generator, has to
            # be there even if the episode with the seed is long past.
            if seed is not None:
                self.reset(seed=seed, options=recorded["seed_options"])
                self._episodes = []
            if recorded["generator"] is not None and not _set_generator_state(
                self.env, json.loads(recorded["generator"])
            ):
                return False, 0.0
            seed = None
        episode_return, done = 0.0, 0
        episodes = zip(recorded["options"], recorded["lengths"], recorded["outcomes"], strict=True)
        for options, length, outcome in episodes:
            self.reset(seed=seed, options=options)
            seed, episode_return = None, 0.0
            for action in recorded["actions"][done : done + length]:
                if self._last[2] or self._last[3]:  # over too early; stepping on may raise anything
                    return False, episode_return
                episode_return += float(self.step(action.copy())[1])
            done += length
            if self._outcome(_generator_state(self.env)) != outcome:
                return False, episode_return
        return done == len(recorded["actions"]), episode_return


def read_states(vector: SyncVectorEnv | AsyncVectorEnv) -> list[dict[str, Any] | None]:
    """The recordings of environments that are all wrapped in `Recorder`, with tensors for arrays."""
    import torch

    return [
        recording
        and {**copy.deepcopy(recording), "actions": torch.from_numpy(np.array(recording["actions"]))}
        for recording in vector.call("recording")
    ]


def restore_states(
    vector: SyncVectorEnv | AsyncVectorEnv,
    env_id: str,
    states: Sequence[Mapping[str, Any] | None],
    returns: np.ndarray,  # (N,) of the running episodes
    lengths: np.ndarray,  # (N,)
) -> None:
    """Put every environment where `read_states` found it.

    Raises ConfigError if one of them comes out elsewhere; none of them is fit for use then.
    """
    # Workers replay at the same time, and tell what they found instead of raising it.
    recordings = [state and {**state, "actions": state["actions"].numpy()} for state in states]
    vector.set_attr("to_restore", recordings)
    reached = vector.call("restore")
    for state, (same, episode_return), expected, length in zip(
        states, reached, returns, lengths, strict=True
    ):
        # The return covers the rewards of all steps, of which the recording holds only the last.
        counted = 0 if state is None else state["lengths"][-1]
        if not same or counted != length or np.float64(episode_return).tobytes() != expected.tobytes():
            raise ConfigError(
                f"the environment {env_id} does not repeat itself from its generator state and actions: "
                "runs in it cannot be resumed exactly.\n"
                "It keeps state that neither of them shows, or it or its libraries have changed since"
            )


def _worlds(env: gym.Env[Any, Any]) -> list[int]:
    """The Box2D worlds that an environment holds right now."""
    return [id(value) for value in vars(env.unwrapped).values() if type(value).__name__ == "b2World"]


def _generator_state(env: gym.Env[Any, Any]) -> Any:
    base = env.unwrapped
    # Asking for a generator that nobody has used yet would make one out of thin air.
    if type(base).np_random is gym.Env.np_random and base._np_random is None:
        return None
    generator: Any = base.np_random
    if hasattr(generator, "bit_generator"):
        return generator.bit_generator.state
    if hasattr(generator, "get_state"):  # numpy's older kind, which environments of dm_control have
        return generator.get_state(legacy=False)
    return None


def _set_generator_state(env: gym.Env[Any, Any], state: Mapping[str, Any]) -> bool:
    """Whether the generator took `state`. In place, because parts of the environment may hold it too."""
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
