"""Evaluation on environments and random streams of its own, so that it cannot change training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rltemplate.envs.codec import Codec

if TYPE_CHECKING:
    import gymnasium as gym
    import numpy as np


# Bound for environments without a time limit of their own, which a good policy might never leave.
_LONGEST_EPISODE = 10_000

Act = Callable[["np.ndarray"], "np.ndarray"]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One undiscounted return and one length for each episode."""

    returns: list[float]
    lengths: list[int]

    def metrics(self) -> dict[str, float]:
        """Means over episodes, under the names that every log uses."""
        return {
            "eval/return": sum(self.returns) / len(self.returns),
            "eval/length": sum(self.lengths) / len(self.lengths),
        }


class Evaluator:
    """Runs whole episodes side by side, one environment for each, with one policy call per step.

    Every episode starts from its own seed, so the result depends on the policy and on the seeds alone. An
    environment that has finished is not stepped on, so short episodes are not counted more often than long
    ones.
    """

    def __init__(self, make_env: Callable[[], gym.Env[Any, Any]], codec: Codec) -> None:
        self._make_env = make_env
        self._codec = codec
        self._envs: list[gym.Env[Any, Any]] = []

    def run(self, act: Act, seeds: Sequence[int]) -> Evaluation:
        """One episode for each of `seeds`."""
        self.close()  # what outlives an episode, such as Box2D's worlds, must not reach the next evaluation
        self._envs = [self._make_env() for _ in seeds]
        obs = [env.reset(seed=seed)[0] for env, seed in zip(self._envs, seeds, strict=True)]
        returns, lengths = [0.0] * len(seeds), [0] * len(seeds)
        running = list(range(len(seeds)))
        while running:
            actions = self._codec.decode_action(act(self._codec.encode_obs([obs[i] for i in running])))
            still = []
            for i, action in zip(running, actions, strict=True):
                obs[i], reward, terminated, truncated, _ = self._envs[i].step(action)
                returns[i] += float(reward)
                lengths[i] += 1
                if not (terminated or truncated or lengths[i] == _LONGEST_EPISODE):
                    still.append(i)
            running = still
        return Evaluation(returns, lengths)

    def close(self) -> None:
        """Release the environments."""
        for env in self._envs:
            env.close()
        self._envs.clear()
