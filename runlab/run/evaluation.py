"""Evaluation of a policy: whole episodes in new environments, by a run in progress or of a recorded one."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from runlab.envs.global_rng import own_global_rng
from runlab.envs.recorder import ActionRecorder
from runlab.interfaces import Act, Codec, Episode
from runlab.rng import Streams

if TYPE_CHECKING:
    import gymnasium as gym

# Bound, in steps, for environments without a longer time limit: a good policy might never end an episode.
_LONGEST_EPISODE = 10_000
LONGEST_VIDEO = 1_000  # steps of an episode that a video shows


def evaluate(
    make_env: Callable[[], gym.Env[Any, Any]],
    codec: Codec,
    act: Act,
    seeds: Sequence[int],
    taken: list[Any] | None = None,
    most_beside: int = 50,  # no fewer than the recipes' `eval_episodes`: other batches may round otherwise
    logged: Sequence[str] = (),
) -> list[Episode]:
    """One whole episode for each of `seeds`, up to `most_beside` side by side with one policy call per step.

    Every episode has a new environment, because some keep state between episodes, such as Box2D's worlds, and
    a generator of its own for the actions of a policy that draws them. So the result depends on the policy
    and the seeds alone. `taken` gets the actions of all steps; `logged` are names of infos of the episodes.
    """
    episodes = list[Episode]()
    with own_global_rng(seeds[0]):
        for first in range(0, len(seeds), most_beside):
            batch = seeds[first : first + most_beside]
            episodes += _evaluate_batch(make_env, codec, act, batch, taken, logged)
    return episodes


def _evaluate_batch(
    make_env: Callable[[], gym.Env[Any, Any]],
    codec: Codec,
    act: Act,
    seeds: Sequence[int],
    taken: list[Any] | None,
    logged: Sequence[str],
) -> list[Episode]:
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(contextlib.closing(make_env())) for _ in seeds]
        longest = max(_LONGEST_EPISODE, (made[0].spec and made[0].spec.max_episode_steps) or 0)
        # They check observations and rewards.
        envs = [ActionRecorder(env, codec.env_id, logged) for env in made]
        rngs = [Streams(seed).torch("evaluation/action") for seed in seeds]
        obs = [env.reset(seed) for env, seed in zip(envs, seeds, strict=True)]
        returns, lengths = [0.0] * len(seeds), [0] * len(seeds)
        running, memory = list(range(len(seeds))), None
        while running:
            rows = codec.encode_obs([obs[i] for i in running])
            encoded, memory = act(rows, memory, [rngs[i] for i in running])
            actions = codec.decode_action(encoded)
            if taken is not None:
                taken.extend(copy.deepcopy(actions))  # some environments change an action in place
            still = []  # rows of this step whose episodes go on
            for row, (i, action) in enumerate(zip(running, actions, strict=True)):
                obs[i], reward, terminated, truncated = envs[i].step(action)
                returns[i] += reward
                lengths[i] += 1
                if not (terminated or truncated or lengths[i] == longest):
                    still.append(row)
            running = [running[row] for row in still]
            memory = None if memory is None else memory[still]
        infos = [env.episode_infos() for env in envs]
    return [Episode(*each) for each in zip(returns, lengths, infos, strict=True)]
