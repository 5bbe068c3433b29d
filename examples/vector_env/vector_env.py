"""Environments that step N copies by themselves: `pip install ./examples/vector_env`, and a line in train.py.

`env=EnvPool/Hopper-v5` trains in EnvPool, `env=AleVector/Pong-v5` in the vector class of ALE, and
`env=Vector/CartPole-v1` in what `gymnasium.make_vec` makes. Evaluations and films take the same environment
from `gymnasium.make`. A function of yours in `BACKENDS` brings another library, such as a simulator on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

from runlab.config.schema import EnvConfig
from runlab.envs.images import channels_last
from runlab.envs.vector import StepResult, WorkerPool
from runlab.errors import ConfigError, RunError

LOST = (
    "checkpoints have no state of these environments: a run that ends early cannot be resumed",
    "a trial of 50 steps shows whether they repeat themselves; EnvPool and ALE take seeds of 31 bits",
    "of observations and rewards only NaN and infinities are found, without the number of their environment",
    "evaluations and films are of the same environment from gymnasium.make, which may differ in details",
)
_TRIED_STEPS = 50
_BITS = 0x7FFFFFFF  # of the seeds of EnvPool and ALE
_OF_VECTORS = ("num_threads", "thread_affinity_offset", "vectorization_mode")  # arguments of no single one


class MaskedEnvPool:
    """Environments of EnvPool, which begin an episode where the mask of a reset is true."""

    metadata = {"autoreset_mode": AutoresetMode.DISABLED}

    def __init__(self, envs: Any) -> None:
        self.action_space = batch_space(envs.action_space, envs.config["num_envs"])
        self.single_observation_space = envs.observation_space
        self._envs, self.step, self.close = envs, envs.step, envs.close

    def reset(self, seed: None = None, options: Mapping[str, Any] | None = None) -> tuple[np.ndarray, Any]:
        if options is None:
            self._obs, info = self._envs.reset()
        else:
            ids = np.flatnonzero(options["reset_mask"]).astype(np.int32)
            self._obs[ids], info = self._envs.reset(ids)
        return self._obs, info


def make_gymnasium(name: str, seeds: Sequence[int], **kwargs: Any) -> tuple[Any, Any]:
    """Copies in this process, or in those of another `vectorization_mode`."""
    mode = kwargs.pop("vectorization_mode", "sync")
    own = {"autoreset_mode": AutoresetMode.DISABLED} if mode in ("sync", "async") else {}
    return gym.make_vec(name, len(seeds), vectorization_mode=mode, vector_kwargs=own, **kwargs), [*seeds]


def make_ale(name: str, seeds: Sequence[int], **kwargs: Any) -> tuple[Any, Any]:
    """The vector class of ALE. As in `single`, no button is pressed to begin an episode.

    Rewards are clipped in training, and evaluations count points.
    """
    alike = {"autoreset_mode": AutoresetMode.SAME_STEP, "use_fire_reset": False, "reward_clipping": True}
    made = gym.make_vec(f"ALE/{name}", len(seeds), vectorization_mode="vector_entry_point", **alike | kwargs)
    return made, np.array(seeds) & _BITS


def make_envpool(name: str, seeds: Sequence[int], **kwargs: Any) -> tuple[Any, Any]:
    """Environments of EnvPool, in its threads. They are seeded when they are made."""
    import envpool

    alike = {"use_fire_reset": False, "reward_clip": True} if f"ALE/{name}" in gym.registry else {}
    alike |= {"num_envs": len(seeds), "seed": [seed & _BITS for seed in seeds]}
    return MaskedEnvPool(envpool.make_gymnasium(name, **alike | kwargs)), None


# The part of an id before its slash, and the function that makes the environments: it returns a
# `gymnasium.vector.VectorEnv` and the seed of its first reset.
BACKENDS: dict[str, Callable[..., tuple[Any, Any]]] = {
    "Vector": make_gymnasium,
    "AleVector": make_ale,
    "EnvPool": make_envpool,
}


def single(name: str, render_mode: str | None = None, **kwargs: Any) -> gym.Env[Any, Any]:
    """One environment for evaluations. A game of Atari is prepared as the vector classes prepare it."""
    shared = {"render_mode": render_mode, "disable_env_checker": True}
    if not name.startswith("ALE/"):
        own = {key: value for key, value in kwargs.items() if key not in _OF_VECTORS}
        return gym.make(name, **shared, **own)
    game = gym.make(name, frameskip=1, repeat_action_probability=0.0, **shared)
    return FrameStackObservation(AtariPreprocessing(game), 4)


def register() -> None:
    """Register an id of each backend for every environment of Gymnasium and each game of Atari."""
    with suppress(ImportError):
        import ale_py

        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    for name, spec in [*gym.registry.items()]:
        if spec.namespace in (None, "ALE"):
            for backend in {*BACKENDS} - {"Vector" if spec.namespace else "AleVector"}:
                gym.register(f"{backend}/{name.rpartition('/')[2]}", partial(single, name))


class VectorPool:
    """Environments of a backend in the place of a `WorkerPool`. An episode begins only by an explicit reset.

    Of an environment that begins the next episode in the same step, the first observation waits for the
    reset. One that can begin it in the next step only is refused: that step would belong to no episode.
    """

    def __init__(self, config: EnvConfig, seeds: Sequence[int], dtype: np.dtype[Any]) -> None:
        name = config.id.rpartition(":")[2]
        (backend, _, own), self._name = name.partition("/"), name
        if config.num_workers:
            raise ConfigError(f"env.num_workers={config.num_workers}: {name} has none; use env.num_workers=0")
        for key in ("wrappers", "training_wrappers", "infos", "logged_infos", "max_episode_steps"):
            if getattr(config, key):
                raise ConfigError(f"env.{key}: not for {name}; leave it out, or use another environment")
        self.notes = [f"{backend}: {text}" for text in LOST]
        self._num_envs, self._shape = len(seeds), (len(seeds), *dtype["obs"].shape)
        self._dtype = dtype["obs"].base
        self._make = partial(BACKENDS[backend], own, seeds, **config.kwargs)
        if self._trial() != self._trial():
            raise ConfigError(
                f"env={name}: two trials with the same seeds and actions gave different results"
            )
        self._env = self._made()

    def reset(self, mask: np.ndarray, seeds: Sequence[int | None]) -> np.ndarray:
        """Begin an episode where `mask` (N,) is true; of the result (N, ...) only these rows count."""
        if seeds[0] is not None:  # the first episodes
            self._obs = np.array(self._env.reset(seed=self._seed)[0]).reshape(self._shape)
        elif not self._same_step:
            self._obs = np.array(self._env.reset(options={"reset_mask": mask})[0]).reshape(self._shape)
        return self._checked(self._obs)

    def step(self, actions: np.ndarray) -> StepResult:
        """Step with `actions` (N, ...); ended episodes were reset before."""
        obs, reward, *flags, info = self._env.step(actions)
        terminated, truncated = (np.asarray(flag, np.bool_) for flag in flags)
        self._obs = obs = np.array(obs).reshape(self._shape)
        if self._same_step and (done := terminated | truncated).any():
            if "final_obs" not in info:  # the next episode's first observation would stand in its place
                raise RunError(f"{self._name}: an episode ended, and info has no final_obs")
            obs = obs.copy()
            for row in np.flatnonzero(done):
                obs[row] = np.reshape(info["final_obs"][row], self._shape[1:])
        reward = self._checked(np.asarray(reward, np.float64))
        return StepResult(self._checked(obs), reward, terminated, truncated)

    def call(self, name: str, arguments: Sequence[Any] | None = None) -> list[Any]:
        """No state of any environment for a checkpoint; `ConfigError` instead of leading them to one."""
        if name == "recording":
            return [None] * self._num_envs
        raise ConfigError(self.notes[0])

    def close(self) -> None:
        """Close all environments."""
        self._env.close()

    def _made(self) -> Any:
        env, self._seed = self._make()
        space, mode = env.single_observation_space, env.metadata.get("autoreset_mode")
        size, self._same_step = math.prod(space.shape or ()), mode == AutoresetMode.SAME_STEP
        problem = ""
        if not (self._same_step or mode == AutoresetMode.DISABLED):
            problem = (
                "begins episodes in the step after their end; it needs autoreset_mode SAME_STEP or DISABLED"
            )
        elif (space.dtype, size) != (self._dtype, math.prod(self._shape[1:])) or channels_last(space.shape):
            problem = f"observes {space}, and evaluations {self._shape[1:]} {self._dtype} with channels first"
        if problem:
            env.close()
            raise ConfigError(f"env={self._name}: {problem}")
        return env

    def _trial(self) -> list[bytes]:
        """The results of a few steps with drawn actions."""
        with closing(self._made()) as self._env:
            self._env.action_space.seed(0)
            seen = [self.reset(np.ones(self._num_envs, np.bool_), [0]).tobytes()]
            for _ in range(_TRIED_STEPS):
                results = self.step(self._env.action_space.sample())
                seen += [array.tobytes() for array in results]
                if (done := results.terminated | results.truncated).any():
                    seen.append(self.reset(done, [None])[done].tobytes())
        return seen

    def _checked(self, values: np.ndarray) -> np.ndarray:
        if not np.isfinite(values).all():
            raise RunError(f"{self._name}: NaN or infinity in observations or rewards")
        return values


def vector_pool(config: EnvConfig, seeds: Sequence[int], dtype: np.dtype[Any]) -> Any:
    """The environments of a run: those of a backend, or one after the other for any other id."""
    own = config.id.rpartition(":")[2].partition("/")[0] in BACKENDS
    return (VectorPool if own else WorkerPool)(config, seeds, dtype)


register()
