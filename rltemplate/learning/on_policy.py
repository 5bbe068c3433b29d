"""The part that on-policy algorithms share: rollouts, scaled rewards and advantages."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from runlab.interfaces import Episode, ForwardPass

from .algorithm import ActingConfig, AlgorithmState, StatefulAlgorithm
from .normalize import RunningMeanStd, Scaling
from .optim import AdamState, FlatModule, rehearsed

Samples = TypeVar("Samples", bound=tuple[Any, ...])  # tensors in nested NamedTuples
# What an update is given again of a decision besides observation and action, such as a mask of actions or the
# choices of a router: () or a NamedTuple of tensors of any type, whose first axes are those of the actions.
Extras = tuple[Any, ...]


class OnPolicyConfig(ActingConfig, Protocol):
    """The hyperparameters that collecting reads."""

    num_steps: int
    num_minibatches: int
    gamma: float
    reward_clip: float


class OnPolicyState(AlgorithmState, Protocol):
    @property
    def net(self) -> AdamState: ...


class RolloutStep(NamedTuple):
    """The actions of one step, and the data to learn from them."""

    normalized_obs: Tensor  # (N, O)
    extras: Extras  # (N, ...) each; before `policy`, because a trace names the first cause of a difference
    policy: Tensor  # (N, P) parameters of the action distribution
    action: Tensor  # (N, A)
    log_prob: Tensor  # (N,)
    memory: Extras = ()  # (N, ...) each, after the decision


class Rollout(NamedTuple):
    """T steps of N environments, with rewards as the environment gave them."""

    obs: Tensor  # (T, N, O) unscaled
    normalized_obs: Tensor  # (T, N, O)
    extras: Extras  # (T, N, ...) each
    action: Tensor  # (T, N, A)
    log_prob: Tensor  # (T, N)
    reward: Tensor  # (T, N)
    terminated: Tensor  # (T, N) 1.0 where the task ended
    truncated: Tensor  # (T, N) 1.0 where the clock ended the episode
    last_obs: Tensor  # (N, O) after the last step, normalised
    final_obs: Tensor  # (K, O) normalised, in which the K truncated episodes ended, in order of (t, n)
    episodes: list[Episode]


def compute_gae(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    done: Tensor,
    gamma: float,
    gae_lambda: float,
) -> Tensor:
    """Generalised advantage estimates (T, N) (Schulman et al. 2016, arXiv 1506.02438, eq. 16).

    `next_value` (T, N) is the value of the true successor. Two masks do two jobs: `terminated` says that no
    reward can follow, `done` (terminated or truncated) ends the sum over later steps.
    """
    delta = reward + gamma * (1.0 - terminated) * next_value - value  # (T, N)
    decay = gamma * gae_lambda * (1.0 - done)  # (T, N)
    running = torch.zeros_like(delta[0])  # (N,)
    advantages = []  # of the last step first
    for delta_t, decay_t in zip(reversed(delta.unbind()), reversed(decay.unbind()), strict=True):
        running = delta_t + decay_t * running
        advantages.append(running)
    return torch.stack(advantages[::-1])


def shuffled(data: Samples, order: Tensor, num_parts: int) -> Samples:
    """The samples of `data`, whose tensors are (S, ...), in `order` (S,): (num_parts, B, ...)."""
    parts: Samples = pytree.tree_map(lambda x: x.index_select(0, order).unflatten(0, (num_parts, -1)), data)
    return parts


class OnPolicyAlgorithm(StatefulAlgorithm):
    """An algorithm that learns from rollouts of its present policy.

    Its network `net` takes observations and extras, and gives a tensor for each of the parts that are asked
    for: "policy", "value".
    """

    no_extras: Extras = ()  # where a decision has none
    mask_size = 0  # numbers at the end of an observation that are a mask of actions
    image_shape: tuple[int, ...] = ()  # (C, H, W) of the image with which an observation begins

    config: OnPolicyConfig
    state: OnPolicyState
    net: FlatModule[tuple[Tensor, ...]]

    def policy_step(
        self, params: Tensor, scaling: Scaling | None, obs: Tensor, memory: Extras, noise: Tensor
    ) -> RolloutStep:
        """Actions for unscaled observations (N, O)."""
        raise NotImplementedError

    @property
    def num_seen(self) -> int:
        """Numbers of an observation that networks see: all but a mask of actions."""
        return self.envs.codec.obs_size - self.mask_size

    def seen(self, obs: Tensor) -> Tensor:
        """The part of observations (..., O) that networks and statistics see."""
        return obs[..., : self.num_seen].contiguous() if self.mask_size else obs

    def normalized(self, obs: Tensor) -> Tensor:
        return super().normalized(self.seen(obs))

    def acting_params(self) -> Tensor:
        """Parameters (P,) of the policy that acts in the coming rollout."""
        return self.state.net.params

    def extras_of(self, obs: Tensor) -> Extras:
        """The extras that unscaled observations (B, O) show."""
        return self.no_extras

    def memory(self) -> Extras:
        """The memory of the policy before its next decision; () if it has none."""
        return ()

    def remember(self, memory: Extras, done: np.ndarray) -> None:
        """Keep the memory after a decision for the next one; `done` (N,) tells where an episode ended."""

    def samples(self, data: Samples) -> Samples:
        """The data (T, N, ...) of a rollout as samples (T * N, ...), which are shuffled one by one."""
        rows: Samples = pytree.tree_map(lambda x: x.flatten(0, 1), data)
        return rows

    def collect(self, obs: Tensor) -> Rollout:
        """T steps with the present policy from the observations `obs` (N, O) on."""
        num_steps, num_envs = self.config.num_steps, self.envs.num_envs
        params, scaling = self.acting_params(), self.scaling()
        scalars = np.empty((3, num_steps, num_envs), np.float32)  # reward, terminated, truncated
        raw_obs: list[Tensor] = []  # (N, O) of each step, unscaled
        decisions: list[RolloutStep] = []
        final_obs, episodes = [obs[:0]], list[Episode]()
        for t in range(num_steps):
            noise = self.streams.draw("action", self.dist.noise, num_envs)
            decision: RolloutStep = self.engine.run(
                self.policy_step, params, scaling, obs, self.memory(), noise
            )
            step = self.envs.step(decision.action.cpu().numpy())
            raw_obs.append(obs)
            decisions.append(decision)
            self.remember(decision.memory, step.terminated | step.truncated)
            scalars[0, t], scalars[1, t], scalars[2, t] = step.reward, step.terminated, step.truncated
            if step.episodes:
                final_obs.append(self.to_device(step.next_obs[step.truncated & ~step.terminated]))
                episodes += step.episodes
            obs = self.to_device(step.obs)
        self.obs = obs
        self.env_steps += num_steps * num_envs
        reward, terminated, truncated = self.to_device(scalars).unbind(0)
        every_obs, alike = torch.stack(raw_obs), scaling is None and not self.mask_size
        return Rollout(
            obs=every_obs,  # with images most of the memory: where nothing changes them, they are kept once
            normalized_obs=every_obs if alike else torch.stack([each.normalized_obs for each in decisions]),
            extras=pytree.tree_map(lambda *steps: torch.stack(steps), *(each.extras for each in decisions)),
            action=torch.stack([decision.action for decision in decisions]),
            log_prob=torch.stack([decision.log_prob for decision in decisions]),
            reward=reward,
            terminated=terminated,
            truncated=truncated * (1.0 - terminated),  # termination has priority
            last_obs=self.normalized(obs),
            final_obs=self.normalized(torch.cat(final_obs)),
            episodes=episodes,
        )

    def scaled_reward(
        self, rollout: Rollout, norm: RunningMeanStd, running: Tensor
    ) -> tuple[Tensor, RunningMeanStd, Tensor]:
        """Rewards (T, N) divided by the deviation of the discounted return, and both statistics anew."""
        keep = self.config.gamma * (1.0 - torch.maximum(rollout.terminated, rollout.truncated))
        returns = []  # (N,) of each step
        for reward, keep_t in zip(rollout.reward.unbind(), keep.unbind(), strict=True):
            returns.append(running + reward)
            running = returns[-1] * keep_t
        norm = norm.merged(torch.cat(returns)[:, None])
        clip = self.config.reward_clip
        scaled = rollout.reward * norm.scaling().scale  # not shifted: the mean of rewards has a meaning
        return scaled.clamp(-clip, clip), norm, running

    def rehearse_updates(self, net: AdamState, rollout: Rollout) -> None:
        """Call the updates of one epoch over a made-up rollout, by the engine."""
        raise NotImplementedError

    def rehearse(self) -> None:
        """One decision, and the updates of one epoch over a made-up rollout."""
        num_steps, num_envs, net = self.config.num_steps, self.envs.num_envs, rehearsed(self.state.net)
        reward, num_rows = self.made_up(num_steps, num_envs), num_steps * num_envs
        rows, zeros = self.made_up_obs(num_rows), torch.zeros_like(reward)
        noise, row_noise = (self.streams.draw("action", self.dist.noise, n) for n in (num_envs, num_rows))
        memory = pytree.tree_map(lambda x: self.made_up(num_rows, *x.shape[1:]), self.memory())
        present = pytree.tree_map(lambda x: x[:num_envs], memory)
        self.engine.run(self.policy_step, net.params, self.scaling(), rows[:num_envs], present, noise)
        step = self.policy_step(net.params, None, rows, memory, row_noise)
        decisions = rows, step.normalized_obs, step.extras, step.action, step.log_prob
        decided = pytree.tree_map(lambda x: x.unflatten(0, reward.shape), decisions)
        ends = step.normalized_obs[:num_envs], step.normalized_obs[:0]
        self.rehearse_updates(net, Rollout._make([*decided, reward, zeros, zeros, *ends, []]))

    def policy(self, obs: Tensor) -> Tensor:
        return self.net.apply(self.state.net.params, self.normalized(obs), self.extras_of(obs), "policy")[0]

    def forward_passes(self) -> Mapping[str, ForwardPass]:
        """Policy and value, with the batches of rollout, targets (without final observations) and updates.

        With an encoder, which both have, they are one network.
        """
        num_envs, rollout = self.envs.num_envs, self.config.num_steps * self.envs.num_envs
        batches = (num_envs, rollout // self.config.num_minibatches, rollout, rollout + num_envs)
        images = bool(self.image_shape)
        parts = [("policy", "value")] if images else [("policy",), ("value",)]
        return {
            " and ".join(names): ForwardPass(partial(self._rows, names), self.num_seen, batches, images)
            for names in parts
        }

    def _rows(self, parts: tuple[str, ...], rows: Tensor) -> Tensor:
        """Parts of the network side by side, (B, ...), for observations (B, O)."""
        outputs = self.net.apply(self.state.net.params, rows, self.no_extras, *parts)
        return torch.cat([output.reshape(len(rows), -1) for output in outputs], 1)
