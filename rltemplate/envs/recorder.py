"""What stands between an environment and the rest: checks of what it gives, and its exact state.

The checks are always on. Whatever is no finite observation of the announced kind, no finite reward or no flag
ends the run with one line that says which environment gave it and when, before anything learns from it.

The exact state of a running environment is where an episode began, and every action since.

Most environments cannot be copied. Box2D has no state to read, and pickling a MuJoCo environment silently
makes a fresh one. What can be had of all of them is what led to where they are: the seed of the first
reset, the generator's state before a later one, and the actions. Putting an environment back replays these
and compares what must come out the same, bit for bit.

The episode before the running one is replayed too. An environment that keeps state elsewhere, such as in a
generator of its own or across episodes, may begin an episode alike and part from it later; a whole one
nearly always gives it away, and it is refused. What shows in neither of the two remains unseen.
Gymnasium's own MuJoCo environments forget everything at a reset (`mj_resetData`, and a few attributes that
are set anew), so that the running episode is enough there.

A Box2D world that outlives its episodes (BipedalWalker) is such state, but repeats itself: there the whole
run is replayed, which takes as long as its steps took.
"""

from __future__ import annotations

import copy
import hashlib
import json
import numbers
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rltemplate.determinism import denormals
from rltemplate.types import ConfigError, RunError

# Algorithms compute in float32: what is greater becomes infinite there.
_LARGEST = float(np.finfo(np.float32).max)
_FORGETFUL = "gymnasium.envs.mujoco."  # modules whose environments keep nothing across episodes
# Up to so many components Python's own sum is faster than NumPy's functions.
_FEW = 32
_PARTS = {
    "reset": "2 parts (observation, info)",
    "step": "5 parts (observation, reward, terminated, truncated, info)",
}


class Vector(Protocol):
    """As much of a vector environment as states need."""

    def call(self, name: str, arguments: Sequence[Any] | None = None) -> list[Any]:
        """The results of a method of every environment, in order, called with one argument each or none."""
        ...


class _Unfit(Exception):
    """What an environment gave is not what it has to give; the message says both."""


class _BoxCheck:
    """What the observations of one environment have to be where they are arrays of numbers.

    Values may lie outside the bounds: these are often rough, and nothing here relies on them.
    """

    def __init__(self, space: spaces.Box) -> None:
        self._shape, self._dtype = space.shape, space.dtype
        self._fitting = {space.dtype}  # and what has turned out to cast to it
        few = len(space.shape) == 1 and space.shape[0] <= _FEW
        # Arrays of this type and the shape are fine if what their components have without sign does not sum
        # up to more than one of them may have: NaN and infinities stay in a sum.
        self.summed = space.dtype if few and space.dtype.kind == "f" else None

    def __call__(self, obs: Any) -> np.ndarray:
        """The observation as an array; `_Unfit` if it is none, or not finite."""
        array: np.ndarray = obs
        if obs.__class__ is not np.ndarray or obs.shape != self._shape or obs.dtype not in self._fitting:
            array = self._as_array(obs)
        if self.summed is not None and sum(map(abs, array.tolist())) <= _LARGEST:
            return array
        if array.dtype.kind == "f":
            finite = np.abs(array) <= np.float64(_LARGEST)
            if not finite.all():
                raise _Unfit(_not_finite(array.reshape(-1), finite.reshape(-1)))
        return array

    def _as_array(self, obs: Any) -> np.ndarray:
        """The slow way, for whatever is not exactly as announced."""
        try:
            array = np.asarray(obs)
        except (TypeError, ValueError, RuntimeError):  # ragged lists, tensors that lie elsewhere
            array = np.asarray(None)
        if not np.can_cast(array.dtype, self._dtype, "same_kind"):
            expected = f"an array of {self._dtype} with the shape {self._shape}"
            raise _Unfit(f"the observation is {_shown(obs)}, expected {expected}")
        if array.shape != self._shape:
            raise _Unfit(f"the observation has the shape {array.shape}, expected {self._shape}")
        self._fitting.add(array.dtype)
        return array


class _DiscreteCheck:
    """What the observations of one environment have to be where they are choices."""

    summed = None

    def __init__(self, space: spaces.Discrete) -> None:
        self._first, self._last = int(space.start), int(space.start + space.n - 1)

    def __call__(self, obs: Any) -> int:
        """The observation as a number; `_Unfit` if it is none of the choices."""
        whole = isinstance(obs, int | np.integer | np.bool_)
        if whole or (isinstance(obs, np.ndarray) and obs.shape == () and obs.dtype.kind in "biu"):
            number = int(obs)
            if self._first <= number <= self._last:
                return number
        expected = f"a whole number from {self._first} to {self._last}"
        raise _Unfit(f"the observation is {_shown(obs)}, expected {expected}")


def _obs_check(space: spaces.Space[Any]) -> _BoxCheck | _DiscreteCheck:
    if isinstance(space, spaces.Discrete):
        return _DiscreteCheck(space)
    assert isinstance(space, spaces.Box), space  # the others were refused before
    return _BoxCheck(space)


def _not_finite(values: np.ndarray, finite: np.ndarray) -> str:
    place = int(np.argmin(finite))
    value = values[place]
    great = f", more than the {_LARGEST:.3g} that float32 holds" if np.isfinite(value) else ""
    return f"the observation has {value} in place {place + 1} of {len(values)}{great}"


def _real_number(reward: Any) -> float:
    """A reward as the number that it is; `_Unfit` if it is none."""
    if isinstance(reward, float):
        return float(reward)
    try:
        array = np.asarray(reward)
        if array.size == 1 and (array.dtype.kind in "biuf" or isinstance(reward, numbers.Real)):
            return float(array.reshape(()))
    except OverflowError:
        return float("inf")  # an integer beyond all floats
    except (TypeError, ValueError, RuntimeError):  # ragged lists, tensors that lie elsewhere
        pass
    raise _Unfit(f"the reward is {_shown(reward)}, expected a real number")


def _flag(name: str, value: Any) -> bool:
    """Whether an episode has ended, for whoever says it with another type than bool."""
    if value.__class__ is np.bool_:
        return bool(value)
    try:
        array = np.asarray(value)
        if array.size == 1 and array.dtype.kind in "biu" and array.item() in (0, 1):
            return bool(array.item())
    except (TypeError, ValueError, RuntimeError):  # ragged lists, tensors that lie elsewhere
        pass
    raise _Unfit(f"{name} is {_shown(value)}, expected true or false")


def _check_parts(method: str, result: Any) -> None:
    expected = _PARTS[method]
    if not isinstance(result, tuple | list):
        raise _Unfit(f"{method}() gave {_shown(result)}, expected {expected}")
    if len(result) != int(expected[0]):
        raise _Unfit(f"{method}() gave {len(result)} parts, expected {expected}")


def _shown(value: Any) -> str:
    """A value in a few words and one line."""
    if isinstance(value, np.ndarray) and value.size != 1:
        return f"an array of {value.dtype} with the shape {value.shape}"
    kind = type(value).__name__
    if isinstance(value, np.ndarray | np.generic):
        return f"{' '.join(reprlib.repr(value.item()).split())} ({kind})"
    if value is None or isinstance(value, str):
        return reprlib.repr(value)
    if isinstance(value, numbers.Number):
        return f"{reprlib.repr(value)} ({kind})"
    return f"{'an' if kind[0].lower() in 'aeiou' else 'a'} {kind}"


def _came_apart(error: Exception) -> str | None:
    """The method whose result a wrapper of Gymnasium could not take apart, if that is what happened."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or not isinstance(error, TypeError | ValueError) or "unpack" not in str(error):
        return None
    method = trace.tb_frame.f_code.co_name
    wrapper = str(trace.tb_frame.f_globals.get("__name__")).startswith("gymnasium.wrappers.")
    return method if wrapper and method in _PARTS else None


@dataclass(slots=True)
class _Episode:
    """What led to the end of an episode, or to where it is."""

    seed: int | None
    options: dict[str, Any] | None
    generator: Any  # its state before the reset; None where the seed decides, or where there is none
    actions: list[Any]  # arrays or numbers of NumPy, one by one; one array of all of them in the end
    last: tuple[Any, ...] = ()  # what the last step gave and the generator's state, once the episode is over
    outcome: str = ""  # a digest of that in the end

    def close(self) -> None:
        """Put it into the form that it is kept in. Most episodes are forgotten before."""
        if not self.outcome:
            self.actions = [np.stack(self.actions)] if self.actions else []
            self.outcome, self.last = _digest(*self.last), ()


class Recorder(gym.Wrapper[Any, Any, Any, Any]):
    """Checks what one environment gives, and remembers what led to where it is. The outermost wrapper.

    `RunError` says which environment gave what, and when. An exception of the environment's own passes,
    with a note about the same. What comes out fits the spaces; infos are left out, as nobody asks for them.
    """

    def __init__(self, env: gym.Env[Any, Any], name: str) -> None:
        super().__init__(env)
        self.name = name  # for messages
        self._check_obs = _obs_check(env.observation_space)
        self._summed, self._shape = self._check_obs.summed, env.observation_space.shape
        self._replaying = False
        self._forgetful = type(env.unwrapped).__module__.startswith(_FORGETFUL)
        self._forget()

    def _forget(self) -> None:
        self._seed: int | None = None  # the last one given
        self._seed_options: dict[str, Any] | None = None
        self._episodes: list[_Episode] = []  # the last one is under way
        self._actions: list[Any] = []  # its actions
        self._last: tuple[Any, ...] = ()  # observation, reward, terminated, truncated
        self._whole = False  # whether all episodes since the seed count
        self._begun = 0  # episodes in all

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Begin an episode, and remember from what."""
        worlds = [] if seed is None else _worlds(self.env)
        generator = None if seed is not None else _generator_state(self.env)
        begun = _Episode(seed, copy.deepcopy(options), generator, [])
        if seed is None and self._episodes and not self._forgetful:
            ended = self._episodes[-1]
            ended.last = (np.array(self._last[0]), *self._last[1:], generator)
            if self._whole:
                ended.close()  # or there would be many small arrays
            else:
                del self._episodes[:-1]
        else:
            self._episodes = []
        self._begun += 1
        try:
            result = self.env.reset(seed=seed, options=options)
            denormals.keep()
            _check_parts("reset", result)
            obs = result[0]
            checked = self._check_obs(obs)
        except Exception as error:
            self._explain(error, "reset", f"reset to its episode {self._begun}")
            raise
        if seed is not None:
            self._seed, self._seed_options = seed, begun.options
            self._whole = bool(worlds) and worlds == _worlds(self.env)
        self._episodes.append(begun)
        self._actions = begun.actions
        self._last = (obs, 0.0, False, False)
        return checked, {}

    def step(self, action: Any) -> Any:
        """Step, and remember the action as it was given: some environments change it in place."""
        self._actions.append(np.array(action))
        fitting: Any
        try:
            result = self.env.step(action)
            denormals.keep()  # many load their libraries where they first need them
            if result.__class__ is not tuple or len(result) != 5:
                _check_parts("step", result)
            obs, reward, terminated, truncated, _ = result
            # No call is made that need not be: environments of a few lines would feel it.
            if (
                obs.__class__ is np.ndarray
                and obs.dtype is self._summed
                and obs.shape == self._shape
                and sum(map(abs, obs.tolist())) <= _LARGEST
            ):
                fitting = obs
            else:
                fitting = self._check_obs(obs)
            if reward.__class__ is not float:
                reward = _real_number(reward)
            if not -_LARGEST <= reward <= _LARGEST:
                raise _Unfit(f"the reward is {reward}, expected a finite number that float32 holds")
            if terminated.__class__ is not bool:
                terminated = _flag("terminated", terminated)
            if truncated.__class__ is not bool:
                truncated = _flag("truncated", truncated)
        except Exception as error:
            self._explain_step(error)
            raise
        self._last = (obs, reward, terminated, truncated)
        return fitting, reward, terminated, truncated, {}

    def _explain_step(self, error: Exception) -> None:
        step = f"step {len(self._actions)} of its episode"
        self._explain(error, step, f"{step} {self._begun}")

    def _explain(self, error: Exception, briefly: str, exactly: str) -> None:
        """Raise RunError if the environment gave what does not fit; note where an error of its own arose."""
        replayed = ", replayed" if self._replaying else ""
        if isinstance(error, _Unfit):
            raise RunError(f"{self.name}, {briefly}{replayed}: {error}") from None
        method = _came_apart(error)
        if method is not None:
            parts = f"{method}() did not give {_PARTS[method]}, but {error}"
            raise RunError(f"{self.name}, {briefly}{replayed}: {parts}") from error
        error.add_note(f"{self.name}, {exactly}{replayed}")

    def _outcome(self) -> str:
        obs, reward, terminated, truncated = self._last
        return _digest(obs, reward, terminated, truncated, _generator_state(self.env))

    def recording(self) -> dict[str, Any] | None:
        """All that `restore` needs, as numbers, strings and an array; None before the first reset."""
        if not self._episodes:
            return None
        first, running = self._episodes[0], self._episodes[-1]
        for episode in self._episodes[:-1]:
            episode.close()
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
            "outcomes": [*outcomes, self._outcome()],
            "episode": self._begun,
        }

    def restore(self, recorded: Mapping[str, Any] | None) -> tuple[bool, float]:
        """Go to where something was recorded: whether all came out the same, and the return there."""
        self._forget()
        if recorded is None:
            return True, 0.0
        self._replaying = True
        try:
            return self._replay(recorded)
        finally:
            self._replaying = False

    def _replay(self, recorded: Mapping[str, Any]) -> tuple[bool, float]:
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
        replayed = len(recorded["lengths"])
        self._begun = recorded.get("episode", replayed) - replayed  # earlier versions did not count them
        episodes = zip(recorded["options"], recorded["lengths"], recorded["outcomes"], strict=True)
        for options, length, outcome in episodes:
            self.reset(seed=seed, options=options)
            seed, episode_return = None, 0.0
            for action in recorded["actions"][done : done + length]:
                if self._last[2] or self._last[3]:  # over too early; stepping on may raise anything
                    return False, episode_return
                episode_return += float(self.step(action.copy())[1])
            done += length
            if self._outcome() != outcome:
                return False, episode_return
        return done == len(recorded["actions"]), episode_return


def _digest(obs: Any, reward: float, terminated: bool, truncated: bool, generator: Any) -> str:
    """Of what a step gave, and of the generator's state after it."""
    obs = np.asarray(obs)
    plain = (obs.dtype.str, obs.shape, obs.tobytes(), np.float64(reward).tobytes())
    flags = (bool(terminated), bool(truncated), _to_text(generator))
    return hashlib.sha256(repr((plain, flags)).encode()).hexdigest()


def read_states(vector: Vector) -> list[dict[str, Any] | None]:
    """The recordings of environments that are all wrapped in `Recorder`, with tensors for arrays."""
    import torch

    return [
        recording
        and {**copy.deepcopy(recording), "actions": torch.from_numpy(np.array(recording["actions"]))}
        for recording in vector.call("recording")
    ]


def restore_states(
    vector: Vector,
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
    reached = vector.call("restore", recordings)
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
