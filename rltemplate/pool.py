"""EnvPool's environments in the place of Gymnasium's: the same ids, spaces and meaning, other bits.

EnvPool steps environments written in C++ in threads of its own. Its random numbers and its rounding are its
own too, so that to train on it is another experiment. Evaluation and videos stay with Gymnasium's environment
of the same id, which is why spaces and arguments have to be the same in both.

What is made alike here: each environment has a seed of its own, an episode ends with the observation that it
ended in, and nothing is reset unless it was asked for. Left alone, EnvPool resets in the step after an end,
and does not say that a task ended where the clock did in the same step. Hence its clock never gets that far:
steps are held against the limit here, as Gymnasium's TimeLimit does, and what ended is reset at once.

The exact state of a running environment is what led to it (see `env_state.py`): its seed, how often it was
reset, and the actions since. That is enough where random numbers are drawn in resets alone and nothing is
kept across them, as in MuJoCo's and the classic ones. All others are replayed from their first reset on,
which takes as long as their steps took: LunarLander draws in every step, BipedalWalker keeps its world.
"""

from __future__ import annotations

import difflib
import hashlib
import inspect
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rltemplate.env_state import read_states, restore_states, surely_finite, unfit_observation, unfit_reward
from rltemplate.types import ConfigError, RunError
from rltemplate.vector import Kind, Outcome

# Families that draw random numbers in resets alone, and keep nothing across them.
_FORGETFUL = ("envpool.mujoco.mujoco_gym_envpool", "envpool.classic_control.classic_control_envpool")
_INSTEAD = "use env.backend=gymnasium"
_INSTALL = ".venv/bin/pip install -e '.[envpool]'"
# What is an argument in Gymnasium and an id of its own in EnvPool.
_IDS = {"LunarLander-v3": ("continuous", {False: "LunarLander-v3", True: "LunarLanderContinuous-v3"})}
# Arguments of the same name with another meaning: a path there, and one of its own files here.
_ALIKE_IN_NAME_ONLY = ("xml_file",)
_NO_LIMIT = 2**31 - 2  # in steps, which EnvPool counts in 32 bits
_FIRST_ROWS = 256  # for which there is room at first, of the actions of an environment


class Model(NamedTuple):
    """An environment of EnvPool's, without saying how many."""

    id: str
    options: dict[str, Any]
    action_dtype: np.dtype[Any]
    forgetful: bool


class Pool:
    """A `VectorEnv` of EnvPool's environments. How many threads step them changes no bit."""

    def __init__(self, kind: Kind, kwargs: Mapping[str, Any], limit: int | None, num_threads: int) -> None:
        """`kind` as Gymnasium makes it with `kwargs`, and `limit` the steps after which it truncates.

        Raises ConfigError if EnvPool is not installed, or has not this environment with these arguments.
        """
        self._kind = kind
        self._model = find_model(kind.env_id, kind.obs_space, kind.action_space, kwargs)
        self._limit = _NO_LIMIT if limit is None else min(limit, _NO_LIMIT)
        self._num_threads = min(num_threads, kind.num_envs)
        self._all = np.arange(kind.num_envs, dtype=np.int32)
        self._pool: Any = None
        self._seeds: list[int] = []
        self._forget()

    def _forget(self) -> None:
        num = self._kind.num_envs
        self._skipped = np.zeros(num, np.int64)  # resets before the first episode that is kept
        self._ended: list[list[int]] = [[] for _ in range(num)]  # lengths of the kept episodes that are over
        self._kept = np.zeros(num, np.int64)  # actions in these and the running ones
        self._actions = np.zeros((num, 0, *(self._kind.action_space.shape or ())), self._model.action_dtype)
        self._room = 0  # steps for which there surely is room in it
        self._lengths = np.zeros(num, np.int32)  # of the running episodes
        self._obs = np.zeros(0)  # what was given last
        self._reward = np.zeros(num)
        self._terminated = np.zeros(num, np.bool_)

    def reset(self, seeds: Sequence[int]) -> np.ndarray:
        """As `VectorEnv.reset`."""
        self._forget()
        self._start(seeds)
        self._obs = self._reset(self._all)
        return self._obs

    def reset_some(self, mask: np.ndarray) -> np.ndarray:
        """As `VectorEnv.reset_some`."""
        chosen = np.flatnonzero(mask).astype(np.int32)
        for number in chosen.tolist():
            if self._model.forgetful:
                self._skipped[number] += 1
                self._kept[number] = 0
            else:
                self._ended[number].append(int(self._lengths[number]))
        self._obs[chosen] = self._reset(chosen)
        return self._obs

    def begin(self, actions: np.ndarray) -> None:
        """As `VectorEnv.begin`: the threads begin at once."""
        actions = np.ascontiguousarray(actions, self._model.action_dtype)
        self._keep(actions)
        self._pool._send([self._all, self._all, actions])

    def end(self) -> Outcome:
        """As `VectorEnv.end`."""
        obs, reward, self._terminated, self._lengths = self._receive()
        self._obs, self._reward = obs, reward.astype(np.float64)
        self._check_obs(obs, self._all)
        self._check_reward()
        return Outcome(obs, self._reward, self._terminated, self._lengths >= self._limit)

    def states(self) -> list[Any]:
        """As `VectorEnv.states`."""
        return read_states(self)

    def restore(self, states: Sequence[Any], returns: np.ndarray, lengths: np.ndarray) -> None:
        """As `VectorEnv.restore`."""
        restore_states(self, self._kind.env_id, states, returns, lengths)

    def call(self, name: str, arguments: Sequence[Any] | None = None) -> list[Any]:
        """What the states of all environments are made of: `recording`, or `restore` with one for each."""
        if name == "recording":
            return [self._recording(number) for number in self._all.tolist()]
        assert name == "restore", name
        assert arguments is not None
        return self._restore(arguments)

    def close(self) -> None:
        """As `VectorEnv.close`."""
        self._pool = None  # which ends its threads

    def _start(self, seeds: Sequence[int]) -> None:
        import envpool

        self._seeds = [int(seed) for seed in seeds]
        self._pool = envpool.make_gymnasium(
            self._model.id,
            num_envs=self._kind.num_envs,
            num_threads=self._num_threads,
            seed=pool_seeds(seeds),
            max_episode_steps=self._limit + 1,
            **self._model.options,
        )
        keys = self._pool._state_keys
        self._places = [keys.index(key) for key in ("obs", "reward", "done", "elapsed_step")]

    def _receive(self) -> tuple[np.ndarray, ...]:
        """Observations, rewards, whether the task ended and lengths of the episodes, new arrays each time.

        In the order in which the environments were sent for. What the public methods of EnvPool's add to this
        takes longer than a step of a small environment.
        """
        parts = self._pool._recv()
        return tuple(parts[place] for place in self._places)

    def _reset(self, chosen: np.ndarray) -> np.ndarray:
        """The first observations of new episodes, of the chosen ones only."""
        self._pool._reset(chosen)
        obs = self._receive()[0]
        self._lengths[chosen] = 0
        self._reward[chosen] = 0.0
        self._terminated[chosen] = False
        self._check_obs(obs, chosen)
        return obs

    def _check_obs(self, obs: np.ndarray, numbers: np.ndarray) -> None:
        """Raise RunError if one of these observations, of the environments `numbers`, is none."""
        space = self._kind.obs_space
        if isinstance(space, spaces.Discrete):
            if space.start <= obs.min() and obs.max() < space.start + space.n:
                return
        elif obs.dtype.kind != "f" or surely_finite(obs.reshape(-1)):
            return
        for number, row in zip(numbers.tolist(), obs, strict=True):
            unfit = unfit_observation(space, row)
            if unfit is not None:
                raise RunError(f"{self._name(number)}, {self._moment(number)}: {unfit}")

    def _check_reward(self) -> None:
        if surely_finite(self._reward):
            return
        for number, reward in enumerate(self._reward.tolist()):
            unfit = unfit_reward(reward)
            if unfit is not None:
                raise RunError(f"{self._name(number)}, {self._moment(number)}: {unfit}")

    def _name(self, number: int) -> str:
        return self._kind.name(range(number, number + 1))

    def _moment(self, number: int) -> str:
        length = self._lengths[number]
        return f"step {length} of its episode" if length else "reset"

    def _keep(self, actions: np.ndarray) -> None:
        if self._room == 0:
            length = self._actions.shape[1]
            self._room = length - int(self._kept.max())
            if self._room == 0:
                self._room = max(length, _FIRST_ROWS)
                more = np.zeros_like(self._actions, shape=(len(actions), self._room, *actions.shape[1:]))
                self._actions = np.concatenate([self._actions, more], axis=1)
        self._room -= 1
        self._actions[self._all, self._kept] = actions
        self._kept += 1

    def _recording(self, number: int) -> dict[str, Any] | None:
        """What leads to where an environment is; None before the first reset."""
        if self._pool is None:
            return None
        return {
            "seed": self._seeds[number],
            "skipped": int(self._skipped[number]),
            "lengths": [*self._ended[number], int(self._lengths[number])],
            "actions": self._actions[number, : self._kept[number]],  # of these episodes, end to end
            "outcome": self._outcome(number),
        }

    def _outcome(self, number: int) -> str:
        """A digest of what an environment gave last."""
        obs, reward, terminated = self._obs[number], self._reward[number], self._terminated[number]
        plain = (obs.dtype.str, obs.shape, obs.tobytes(), reward.tobytes(), bool(terminated))
        return hashlib.sha256(repr(plain).encode()).hexdigest()

    def _restore(self, recordings: Sequence[Mapping[str, Any] | None]) -> list[tuple[bool, float]]:
        """Go to where these were recorded: whether all came out the same, and the return there."""
        self._forget()
        self._pool = None
        given = [recording for recording in recordings if recording is not None]
        if len(given) < len(recordings):
            return [(not given, 0.0)] * len(recordings)
        self._start([recording["seed"] for recording in given])
        self._skipped[:] = [recording["skipped"] for recording in given]
        self._ended = [list(recording["lengths"][:-1]) for recording in given]
        self._kept[:] = [len(recording["actions"]) for recording in given]
        room = (self._kind.num_envs, int(self._kept.max()) + _FIRST_ROWS, *self._actions.shape[2:])
        self._actions = np.zeros(room, self._actions.dtype)
        for row, recording in zip(self._actions, given, strict=True):
            row[: len(recording["actions"])] = recording["actions"]
        whole = np.array([sum(recording["lengths"]) for recording in given])
        same = self._kept == whole
        returns = self._replay([recording["lengths"] for recording in given]) if same.all() else None
        if returns is None:  # ended where no episode did
            return [(False, 0.0)] * len(recordings)
        outcomes = [self._outcome(number) == recording["outcome"] for number, recording in enumerate(given)]
        return list(zip(outcomes, returns.tolist(), strict=True))

    def _replay(self, lengths: Sequence[Sequence[int]]) -> np.ndarray | None:
        """Reset and step all as it was done before, by lengths of episodes; returns (N,) of the last ones.

        All at the same time, each on its way. None if an episode is over before its length.
        """
        # An episode that was skipped is one without a step.
        ahead = [
            [0] * int(skipped) + list(kept) for skipped, kept in zip(self._skipped, lengths, strict=True)
        ]
        ways = [iter(each) for each in ahead]
        to_begin = np.array([len(each) for each in ahead])
        num = len(ways)
        returns, stepped, left = np.zeros(num), np.zeros(num, np.int64), np.zeros(num, np.int64)
        while True:
            due = self._all[(left == 0) & (to_begin > 0)]
            if len(due):
                obs = self._reset(due)
                if len(due) == num:  # as at the very first
                    self._obs = obs
                self._obs[due] = obs
                left[due] = [next(ways[number]) for number in due.tolist()]
                to_begin[due] -= 1
                returns[due] = 0.0
                continue
            under_way = self._all[left > 0]
            if not len(under_way):
                return returns
            actions = self._actions[under_way, stepped[under_way]]
            self._pool._send([under_way, under_way, actions])
            obs, reward, terminated, length = self._receive()
            self._obs[under_way], self._reward[under_way] = obs, reward
            self._terminated[under_way], self._lengths[under_way] = terminated, length
            returns[under_way] += reward.astype(np.float64)
            stepped[under_way] += 1
            left[under_way] -= 1
            if (terminated & (left[under_way] > 0)).any():
                return None


def pool_seeds(seeds: Sequence[int]) -> list[int]:
    """Seeds of 32 bits for environments of EnvPool's, which take no more, all different.

    They are the last bits of `seeds`, or the next that are free. Each is the seed of one Mersenne Twister,
    hence two runs of N environments have one in common with a probability of N * N / 2**32.
    """
    taken: dict[int, None] = {}
    for seed in seeds:
        low = seed % 2**32
        while low in taken:
            low = (low + 1) % 2**32
        taken[low] = None
    return [low - 2**32 if low >= 2**31 else low for low in taken]


def find_model(
    env_id: str, obs_space: spaces.Space[Any], action_space: spaces.Space[Any], kwargs: Mapping[str, Any]
) -> Model:
    """What EnvPool calls an environment of Gymnasium that has these spaces when it is made with `kwargs`.

    Raises ConfigError if EnvPool is not installed, or has no such environment.
    """
    try:
        import envpool
    except ImportError as error:
        raise ConfigError(
            f"env.backend=envpool: it cannot be imported ({error}); {_INSTALL}, where there is a wheel for "
            f"this Python and machine, or {_INSTEAD}"
        ) from error
    pool_id, options, more = env_id, dict(kwargs), list[str]()
    if pool_id in _IDS:
        argument, names = _IDS[pool_id]
        pool_id, more = names[bool(options.pop(argument, False))], [argument]
    ids = envpool.list_all_envs()
    if pool_id not in ids:
        near = difflib.get_close_matches(pool_id, [each for each in ids if each in gym.registry], n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"env.id={env_id}: EnvPool has no such environment; {hint}{_INSTEAD}")
    defaults = envpool.make_spec(pool_id).config._asdict()
    if "env_seed" not in defaults:
        raise ConfigError(
            f"env.backend=envpool: this version takes one seed for all environments; {_INSTALL}"
        )
    _check_options(env_id, options, defaults, more)
    model = envpool.make_spec(pool_id, **options)
    with warnings.catch_warnings():  # about the rounding of bounds, which nobody here looks at
        warnings.simplefilter("ignore")
        theirs = model.gymnasium_observation_space, model.gymnasium_action_space
    for what, own, other in zip(("observations", "actions"), (obs_space, action_space), theirs, strict=True):
        if not _alike(own, other, bounds=what == "actions"):
            raise ConfigError(
                f"env.id={env_id}: its {what} are {_brief(other)} in EnvPool and {_brief(own)} in "
                f"Gymnasium, which evaluates; {_INSTEAD}"
            )
    dtype = next(reversed(model.action_array_spec.values())).dtype
    forgetful = any(base.__module__ in _FORGETFUL for base in type(model).__mro__)
    return Model(pool_id, options, np.dtype(dtype), forgetful)


def _check_options(
    env_id: str, options: Mapping[str, Any], defaults: Mapping[str, Any], more: Sequence[str]
) -> None:
    """Raise ConfigError for the first argument that EnvPool does not take as Gymnasium does.

    `defaults` are those of EnvPool's arguments; `more` can be had otherwise.
    """
    entry: Any = gym.spec(env_id.rpartition(":")[2]).entry_point
    creator = gym.envs.registration.load_env_creator(entry) if isinstance(entry, str) else entry
    both = [name for name in inspect.signature(creator).parameters if name in defaults]
    allowed = [name for name in both if name not in _ALIKE_IN_NAME_ONLY]
    for name, value in options.items():
        if name not in allowed:
            names = [*allowed, *more]
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            takes = f"allowed: {', '.join(names)}" if names else "it takes none"
            raise ConfigError(
                f"env.kwargs.{name}: EnvPool's {env_id} does not take it, {_INSTEAD} for that; {hint}{takes}"
            )
        default = defaults[name]
        kinds: tuple[type, ...] = (int, float) if isinstance(default, float) else (type(default),)
        if not isinstance(value, kinds) or isinstance(value, bool) != isinstance(default, bool):
            expected = {bool: "true or false", int: "a whole number", float: "a number"}.get(
                type(default), type(default).__name__
            )
            raise ConfigError(f"env.kwargs.{name}={value}: expected {expected}")


def _alike(own: spaces.Space[Any], other: spaces.Space[Any], *, bounds: bool) -> bool:
    """Whether two spaces mean the same to a `Codec`, which reads the bounds of actions only."""
    if not isinstance(own, spaces.Box) or not isinstance(other, spaces.Box):
        return own == other
    same = own.shape == other.shape and own.dtype.kind == other.dtype.kind
    return same and (not bounds or (np.allclose(own.low, other.low) and np.allclose(own.high, other.high)))


def _brief(space: spaces.Space[Any]) -> str:
    return f"Box{space.shape}" if isinstance(space, spaces.Box) else str(space)
