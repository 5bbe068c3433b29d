"""Evaluation on environments and random streams of its own, so that it cannot change training."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rltemplate.envs.codec import Codec
from rltemplate.types import Episode

if TYPE_CHECKING:
    import gymnasium as gym
    import numpy as np

# Bound for environments without a time limit of their own, which a good policy might never leave.
_LONGEST_EPISODE = 10_000


def evaluate(
    make_env: Callable[[], gym.Env[Any, Any]],
    codec: Codec,
    act: Callable[[np.ndarray], np.ndarray],
    seeds: Sequence[int],
) -> list[Episode]:
    """One whole episode for each of `seeds`, side by side, with one policy call per step.

    Every episode has an environment of its own, new because of what outlives an episode, such as Box2D's
    worlds. So the result depends on the policy and the seeds alone.
    """
    envs = [make_env() for _ in seeds]
    try:
        obs = [env.reset(seed=seed)[0] for env, seed in zip(envs, seeds, strict=True)]
        returns, lengths = [0.0] * len(seeds), [0] * len(seeds)
        running = list(range(len(seeds)))
        while running:
            actions = codec.decode_action(act(codec.encode_obs([obs[i] for i in running])))
            still = []
            for i, action in zip(running, actions, strict=True):
                obs[i], reward, terminated, truncated, _ = envs[i].step(action)
                returns[i] += float(reward)
                lengths[i] += 1
                if not (terminated or truncated or lengths[i] == _LONGEST_EPISODE):
                    still.append(i)
            running = still
    finally:
        for env in envs:
            env.close()
    return [Episode(*each) for each in zip(returns, lengths, strict=True)]


def episode_means(kind: str, episodes: Sequence[Episode]) -> dict[str, float]:
    """Mean return and length under the names that every log uses; nothing without an episode."""
    if not episodes:
        return {}
    return {
        f"{kind}/return": math.fsum(each.episode_return for each in episodes) / len(episodes),
        f"{kind}/length": sum(each.length for each in episodes) / len(episodes),
    }
