"""Gymnasium environments as algorithms see them: flat float observations, plain actions, no hidden resets.

From the inside out: gymnasium.make (with its time limit), in training `Recorder` and a `VectorEnv` of many
(vector.py), then `Codec`, which is the only place that knows spaces. Episodes begin where an explicit mask
says so, and never by themselves, so that no phantom step enters a buffer; the observation in which an episode
ended is kept apart from the one that the next episode starts with.
"""

from __future__ import annotations

import difflib
import importlib
import logging
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rltemplate.determinism import denormals
from rltemplate.envs.vector import Kind, Serial, VectorEnv
from rltemplate.envs.workers import Workers
from rltemplate.types import ConfigError, Episode

_log = logging.getLogger(__name__)
_AGAIN = " was raised from the environment creator"


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """Which environment, without saying how many: what `gymnasium.make` needs to know."""

    id: str
    max_episode_steps: int | None
    kwargs: Mapping[str, Any]


def make_env(spec: EnvSpec, render_mode: str | None = None, **extra: Any) -> gym.Env[Any, Any]:
    """One environment; `ConfigError` in one line for whatever the user can mend."""
    try:
        module, _, name = spec.id.rpartition(":")
        if module:  # the form package:Id-v0, whose package registers Id-v0 when it is imported
            importlib.import_module(module)
        if uses_mujoco(name):
            _quiet_mujoco()
        env = gym.make(
            spec.id,
            max_episode_steps=spec.max_episode_steps,
            render_mode=render_mode,
            disable_env_checker=True,
            **{**spec.kwargs, **extra},
        )
    except gym.error.DependencyNotInstalled as error:
        raise ConfigError(f"env.id={spec.id}: {_first_line(error)}") from error
    except (gym.error.UnregisteredEnv, ModuleNotFoundError) as error:
        near = difflib.get_close_matches(spec.id, list(gym.registry), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"env.id={spec.id}: {_first_line(error)}{hint}") from error
    except gym.error.Error as error:
        raise ConfigError(f"env.id={spec.id}: {_first_line(error)}") from error
    except ImportError as error:
        raise ConfigError(f"env.id={spec.id}: {_first_line(error)}") from error
    except (TypeError, ValueError, LookupError, AttributeError, AssertionError) as error:
        # What an environment raises about the user's arguments is the user's to read.
        if spec.kwargs:
            reason = _first_line(error).partition(_AGAIN)[0]
            kind = "" if isinstance(error, TypeError) else f"{type(error).__name__}: "
            raise ConfigError(f"env.kwargs={dict(spec.kwargs)}: {kind}{reason}") from error
        raise
    denormals.keep()
    return env


def uses_mujoco(env_id: str) -> bool:
    """Whether a registered environment is one of Gymnasium's that simulate with MuJoCo."""
    return "mujoco" in str(gym.spec(env_id.rpartition(":")[2]).entry_point)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].strip("'\" ")


def _quiet_mujoco() -> None:
    """MuJoCo writes warnings to a file in the working folder; send them to the log instead.

    The one about `settotalmass` comes with every HalfCheetah and means nothing to a user.
    """
    import mujoco

    def note(message: str) -> None:
        if "settotalmass" not in message:
            _log.warning("mujoco: %s", message)

    mujoco.set_mju_user_warning(note)


class Codec:
    """Translates between an environment's spaces and the flat arrays that algorithms use.

    Observations become float32 (N, O): Box of any shape flattened, Discrete one-hot. Actions are float32
    (N, A) in [-1, 1], scaled to the bounds of the Box (components without finite bounds pass unchanged), or
    integers (N, A) from zero for Discrete and MultiDiscrete.
    """

    def __init__(self, env_id: str, obs_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> None:
        self.env_id = env_id
        self.obs_space = obs_space
        self.action_space = action_space
        self.obs_size = self._check_obs(obs_space)
        self._check_size("observation", obs_space)
        self._check_size("action", action_space)
        self.nvec: tuple[int, ...] = ()  # choices per component; empty for continuous actions
        self.bounded = False  # whether actions are continuous and every component has finite bounds
        if isinstance(action_space, spaces.Box):
            self.action_size = int(np.prod(action_space.shape))
            low, high = action_space.low.reshape(-1), action_space.high.reshape(-1)
            self._bounded = np.isfinite(low) & np.isfinite(high)
            self.bounded = bool(self._bounded.all())
            bottom, top = np.where(self._bounded, low, -1.0), np.where(self._bounded, high, 1.0)
            self._center = _one_if_same((bottom / 2 + top / 2).astype(np.float32))
            self._half = _one_if_same((top / 2 - bottom / 2).astype(np.float32))
            # No -0.0 among the bounds, for of two zeros NumPy takes either.
            self._low, self._high = _one_if_same(low + 0.0), _one_if_same(high + 0.0)
        elif isinstance(action_space, spaces.Discrete):
            self.nvec = (int(action_space.n),)
            self.action_size = 1
        elif isinstance(action_space, spaces.MultiDiscrete) and action_space.nvec.ndim == 1:
            self.nvec = tuple(int(n) for n in action_space.nvec)
            self.action_size = len(self.nvec)
        else:
            raise ConfigError(
                f"{env_id} has the action space {action_space}; supported: Box, Discrete and one-dimensional "
                "MultiDiscrete. Wrap the environment (gymnasium.wrappers.TransformAction) to get there"
            )

    @property
    def continuous(self) -> bool:
        """Whether actions are real numbers."""
        return not self.nvec

    def _check_size(self, what: str, space: spaces.Space[Any]) -> None:
        """Refuse a space without numbers in it, and a Box of actions that leaves nothing to choose."""
        if 0 in (space.shape or ()):
            raise ConfigError(f"env.id={self.env_id}: its {what} space {space} holds no numbers")
        if isinstance(space, spaces.Discrete) and space.n == 1 and what == "action":
            raise ConfigError(f"env.id={self.env_id}: its action space {space} has one action only")
        if what == "action" and isinstance(space, spaces.Box) and (space.low == space.high).all():
            raise ConfigError(
                f"env.id={self.env_id}: its action space {space} leaves nothing to choose: all lower bounds "
                "equal the upper ones"
            )

    def _check_obs(self, space: spaces.Space[Any]) -> int:
        if isinstance(space, spaces.Discrete):
            return int(space.n)
        if not isinstance(space, spaces.Box):
            raise ConfigError(
                f"{self.env_id} has the observation space {type(space).__name__}; supported: Box and "
                "Discrete. Register a variant wrapped in gymnasium.wrappers.FlattenObservation and name that"
            )
        if space.dtype == np.uint8 and len(space.shape) >= 2:
            raise ConfigError(
                f"{self.env_id} observes images {space.shape}, and the networks are multi-layer perceptrons; "
                "use an environment with vector observations, such as the -ram variant where there is one"
            )
        return int(np.prod(space.shape))

    def encode_obs(self, obs: Any) -> np.ndarray:
        """A batch of raw observations as float32 (N, O)."""
        batch = np.asarray(obs)
        if isinstance(self.obs_space, spaces.Discrete):
            one_hot = np.zeros((len(batch), self.obs_size), np.float32)
            one_hot[np.arange(len(batch)), batch - self.obs_space.start] = 1.0
            return one_hot
        return batch.reshape(len(batch), -1).astype(np.float32)

    def decode_action(self, action: np.ndarray) -> np.ndarray:
        """Algorithm actions (N, A) as a batch of the environment's own actions."""
        if isinstance(self.action_space, spaces.Box):
            # np.clip does the same in twice the time.
            native: np.ndarray = np.minimum(np.maximum(action, -1.0), 1.0)
            if not self.bounded:
                native = np.where(self._bounded, native, action)
            native = native * self._half + self._center
            # Rounding in the scaling may step over a bound by one ulp, which some environments reject.
            native = np.minimum(np.maximum(native, self._low), self._high)
            return native.reshape(-1, *self.action_space.shape).astype(self.action_space.dtype, copy=False)
        if isinstance(self.action_space, spaces.Discrete):
            return action[:, 0] + int(self.action_space.start)
        assert isinstance(self.action_space, spaces.MultiDiscrete)
        return action + self.action_space.start


def _one_if_same(values: np.ndarray) -> Any:
    """One number in place of several that are all the same: NumPy is faster with it."""
    return values[0] if len(values) and (values == values[0]).all() else values


class Step(NamedTuple):
    """What one step of N environments gives."""

    obs: np.ndarray  # (N, O) to act on next: after a reset where an episode ended
    reward: np.ndarray  # (N,) float64, as the environment gives it
    terminated: np.ndarray  # (N,) bool: the task ended, no reward can follow
    truncated: np.ndarray  # (N,) bool: the clock ended the episode, reward would have followed
    next_obs: np.ndarray  # (N, O) the true successor, before any reset
    episodes: list[Episode]  # episodes that ended in this step


def check_env(spec: EnvSpec) -> Codec:
    """Make an environment once, and what translates for it; `ConfigError` if it cannot be had."""
    try:
        env = make_env(spec)
        codec = Codec(spec.id, env.observation_space, env.action_space)
        env.close()
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # whatever the user's environment raises is the user's to read
        # Gymnasium raises a TypeError of the environment again, with more words.
        origin = error.__context__ if _AGAIN in str(error) and error.__context__ is not None else error
        frames = traceback.extract_tb(origin.__traceback__)
        at = [frame for frame in frames if not frame.filename.endswith("run/exits.py")][-1]
        raise ConfigError(
            f"env.id={spec.id}: cannot be made, {type(error).__name__} in {at.filename}, line {at.lineno}: "
            f"{_first_line(error).partition(_AGAIN)[0]}"
        ) from error
    return codec


def _open(spec: EnvSpec, seeds: Sequence[int], num_workers: int) -> tuple[Codec, VectorEnv]:
    """Environments, and what translates for them: the one place that knows who steps which."""
    first = make_env(spec)  # refuses, as the codec does, before any worker starts
    codec = Codec(spec.id, first.observation_space, first.action_space)
    num_envs = len(seeds)
    kind = Kind(partial(make_env, spec), spec.id, num_envs, first.observation_space, first.action_space)
    if num_workers:
        return codec, Workers(kind, num_workers, seeds, first)
    return codec, Serial(kind, kind.members(range(num_envs), first))


class Envs:
    """N copies of one environment, stepped together.

    Every method raises `RunError` where an environment gives what is no observation, reward or flag, and
    where its worker process dies; what an environment raises passes. None of them is fit for use then.
    """

    def __init__(
        self,
        spec: EnvSpec,
        num_envs: int,
        seeds: Sequence[int],
        num_workers: int = 0,
    ) -> None:
        if len(seeds) != num_envs:
            raise ValueError(f"{len(seeds)} seeds for {num_envs} environments")
        self.spec = spec
        self.num_envs = num_envs
        self._seeds = [int(seed) for seed in seeds]
        self.codec, self._vector = _open(spec, self._seeds, num_workers)
        self._returns = np.zeros(num_envs)
        self._lengths = np.zeros(num_envs, np.int64)

    def reset(self) -> np.ndarray:
        """Seed every environment, start its first episode and return the observations (N, O)."""
        raw = self._vector.reset(self._seeds)
        self._returns[:] = 0.0
        self._lengths[:] = 0
        return self.codec.encode_obs(raw)

    def step(self, action: np.ndarray) -> Step:
        """Step every environment with `action` (N, A), and start a new episode where one ended."""
        raw, *rest = self._vector.step(self.codec.decode_action(action))
        next_obs = self.codec.encode_obs(raw)
        reward, terminated, truncated = (array.copy() for array in rest)
        self._returns += reward
        self._lengths += 1
        done = terminated | truncated
        if not np.count_nonzero(done):
            return Step(next_obs, reward, terminated, truncated, next_obs, [])
        episodes = [
            Episode(float(r), int(n)) for r, n in zip(self._returns[done], self._lengths[done], strict=True)
        ]
        self._returns[done] = 0.0
        self._lengths[done] = 0
        obs = next_obs.copy()
        obs[done] = self.codec.encode_obs(self._vector.reset_some(done)[done])
        return Step(obs, reward, terminated, truncated, next_obs, episodes)

    def state_dict(self) -> dict[str, Any]:
        """Where every environment is: a copy, of tensors, numbers and strings, nested in dicts and lists."""
        import torch  # too long for a check of the configuration

        return {
            "id": self.spec.id,
            "states": self._vector.states(),
            "returns": torch.from_numpy(self._returns.copy()),
            "lengths": torch.from_numpy(self._lengths.copy()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state` with the next `step`: instead of `reset`, in environments not used before.

        Replays episodes. Raises ConfigError if `state` is not of `num_envs` copies of this environment, or
        if the environment does not repeat itself; none of them is fit for use then.
        """
        if state["id"] != self.spec.id:
            raise ConfigError(f"env.id={self.spec.id}: the checkpoint holds {state['id']}")
        if len(state["states"]) != self.num_envs:
            raise ConfigError(
                f"env.num_envs={self.num_envs}: the checkpoint holds {len(state['states'])} environments"
            )
        returns, lengths = state["returns"].numpy(), state["lengths"].numpy()
        self._vector.restore(state["states"], returns, lengths)
        self._returns[:] = returns
        self._lengths[:] = lengths

    def close(self) -> None:
        """Release the environments and their worker processes, also where a worker has died or hangs."""
        self._vector.close()
