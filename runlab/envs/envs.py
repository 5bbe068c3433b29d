"""Environments as algorithms see them: flat float observations, plain actions, no hidden resets.

From the inside out: gymnasium.make with its time limit, wrappers, `ActionRecorder`, `EnvGroup`,
`WorkerPool` and the codec. An episode begins only by an explicit reset mask: no phantom step enters a buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple

import numpy as np

from runlab.config.schema import EnvConfig
from runlab.envs.make import codec_of
from runlab.envs.vector import WorkerPool, step_dtype
from runlab.errors import ConfigError, RunError
from runlab.interfaces import Episode, Probe


class Step(NamedTuple):
    """The results of one step of N environments."""

    reward: np.ndarray  # (N,) float64, as the environment gives it
    terminated: np.ndarray  # (N,) bool: the task ended, no reward can follow
    truncated: np.ndarray  # (N,) bool: the clock ended the episode, reward would have followed
    next_obs: np.ndarray  # (N, O) the true successor, before any reset
    obs: np.ndarray  # (N, O) to act on next: after a reset where an episode ended
    episodes: list[Episode]  # episodes that ended in this step
    # (N, ...) by the names of `env.infos`, with next_obs and with obs. As in Gymnasium's vector environments
    # `_name` (N,) is true for the environments with this entry. Other rows are zero. Without any such
    # environment both are missing.
    next_infos: dict[str, np.ndarray]
    infos: dict[str, np.ndarray]


class Envs:
    """Copies of one environment, one for each of `seeds`, stepped together.

    Every method raises `RunError` where an environment returns an invalid observation, reward or flag, and
    where its worker process dies. An environment's own exceptions are not caught. After either only
    `close` may be called. A `pool` of another class than `WorkerPool` has its methods. It may have `notes`:
    lines about what its environments cannot do, which the run prints and records.
    """

    def __init__(
        self, config: EnvConfig, seeds: Sequence[int], pool: Callable[..., Any] = WorkerPool
    ) -> None:
        self.config = config
        self.num_envs = num_envs = len(seeds)
        self.probe = Probe()
        self._seeds, self._no_seeds = [int(seed) for seed in seeds], [None] * num_envs
        self.codec = codec_of(config)  # before any worker starts, because it may refuse
        dtype = step_dtype(self.codec.obs_space, self.codec.action_space)
        self._vector = pool(config, self._seeds, dtype)
        self.notes: list[str] = getattr(self._vector, "notes", [])
        self._returns = np.zeros(num_envs)
        self._lengths = np.zeros(num_envs, np.int64)
        self.infos: dict[str, np.ndarray] = {}  # of the observations to act on, as in `Step`

    def reset(self) -> np.ndarray:
        """Seed every environment, start its first episode and return the observations (N, O)."""
        self._returns[:] = 0.0
        self._lengths[:] = 0
        obs = self.codec.encode_obs(self._vector.reset(np.ones(self.num_envs, np.bool_), self._seeds))
        self.infos = self._infos()
        self.probe.results("reset", {"obs": obs, "infos": self.infos})
        return obs

    def step(self, action: np.ndarray) -> Step:
        """Step every environment with `action` (N, A), and start a new episode where one ended."""
        raw, *rest = self._vector.step(self.codec.decode_action(action))
        next_obs = obs = self.codec.encode_obs(raw)
        reward, terminated, truncated = (array.copy() for array in rest)
        self._returns += reward
        self._lengths += 1
        next_infos = self.infos = self._infos()
        episodes: list[Episode] = []
        done = terminated | truncated
        if np.count_nonzero(done):
            logged = self._vector.call("episode_infos") if self.config.logged_infos else [{}] * self.num_envs
            infos = compress(logged, done)
            episodes += map(Episode, self._returns[done].tolist(), self._lengths[done].tolist(), infos)
            self._returns[done] = 0.0
            self._lengths[done] = 0
            obs = next_obs.copy()
            obs[done] = self.codec.encode_obs(self._vector.reset(done, self._no_seeds)[done])
            self.infos = self._infos()
        step = Step(reward, terminated, truncated, next_obs, obs, episodes, next_infos, self.infos)
        self.probe.results("step", step)
        return step

    def _infos(self) -> dict[str, np.ndarray]:
        arrays: dict[str, np.ndarray] = {}
        names = self.config.infos
        entries = self._vector.call("infos", [names] * self.num_envs) if names else []
        for name in names:
            mask = [name in infos for infos in entries]
            if any(mask):
                zeros = np.zeros_like(entries[mask.index(True)][name])
                each = [infos.get(name, zeros) for infos in entries]
                if len({array.shape for array in each}) > 1:
                    raise RunError(f"{self.config.id}: info has {name} in several shapes")
                arrays[name] = np.stack(each)
                arrays[f"_{name}"] = np.array(mask)
        return arrays

    def state_dict(self) -> dict[str, Any]:
        """The state of every environment: a copy, of tensors, numbers and strings in dicts and lists."""
        import torch  # slow, and the check of a command does not get here

        recordings = self._vector.call("recording")
        return {
            "id": self.config.id,
            "states": [
                recording and {**recording, "actions": torch.from_numpy(recording["actions"])}
                for recording in recordings
            ],
            "returns": torch.from_numpy(self._returns.copy()),
            "lengths": torch.from_numpy(self._lengths.copy()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state` instead of calling `reset`, in environments not used before.

        Replays episodes. ConfigError if the environment is another one, or does not repeat itself.
        """
        if state["id"] != self.config.id:
            raise ConfigError(f"env.id={self.config.id}: the checkpoint holds {state['id']}")
        self._returns[:] = state["returns"].numpy()
        self._lengths[:] = state["lengths"].numpy()
        recordings = [each and {**each, "actions": each["actions"].numpy()} for each in state["states"]]
        # Workers replay at the same time, and report failures as values.
        same, lengths, returns = zip(*self._vector.call("restore", recordings), strict=True)
        # The return covers the rewards of all steps, of which the recording holds only the last.
        same_returns = np.array(returns).tobytes() == self._returns.tobytes()
        if not (all(same) and list(lengths) == self._lengths.tolist() and same_returns):
            raise ConfigError(
                f"the environment {self.config.id} does not repeat itself from its generator state and "
                "actions: runs in it cannot be resumed exactly.\n"
                "It keeps state that neither of them shows, or it or its libraries have changed since"
            )
        self.infos = self._infos()

    def close(self) -> None:
        """Release the environments and their worker processes, also where a worker has died or hangs."""
        self._vector.close()
