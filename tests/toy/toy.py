"""REINFORCE with a linear policy (Williams 1992): about the least that learns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from rltemplate.config.algorithms import ToyConfig  # type: ignore[attr-defined]  # put there with this file
from rltemplate.envs.envs import Envs
from rltemplate.learning.algorithm import StatefulAlgorithm, named
from rltemplate.learning.distributions import Categorical, DiagGaussian
from rltemplate.learning.engine import Engine
from rltemplate.learning.networks import mlp
from rltemplate.learning.optim import FlatModule, gradient
from rltemplate.rng import Streams
from rltemplate.types import ForwardPass, IterationResult


class TrainState(NamedTuple):
    params: Tensor  # (P,)


class PolicyStep(NamedTuple):
    policy: Tensor  # (N, P)
    action: Tensor  # (N, A)


class Metrics(NamedTuple):
    loss_policy: Tensor
    policy_entropy: Tensor


class Toy(StatefulAlgorithm):
    """The algorithm over N environments."""

    config: ToyConfig
    state: TrainState

    def __init__(self, config: ToyConfig, envs: Envs, streams: Streams, steps: int, engine: Engine) -> None:
        super().__init__(envs, streams, steps, engine)
        self.config, codec = config, envs.codec
        self.dist = DiagGaussian(codec.action_size) if codec.continuous else Categorical(codec.nvec)
        sizes = [codec.obs_size, self.dist.param_size]
        network = mlp(sizes, "tanh", streams.torch("init"), orthogonal_gain=0.01)
        self.net = FlatModule(network.to(self.device))
        self.state = TrainState(self.net.initial)
        self._policy_step = engine(self.policy_step)
        self._update = engine(self.update)

    @torch.no_grad()
    def train_iteration(self) -> IterationResult:
        """T steps with the present policy, and one update."""
        obs, rate = self.begin_iteration(), torch.tensor(self.config.learning_rate)
        steps: list[tuple[Tensor, ...]] = []
        episodes = []
        for _ in range(self.config.num_steps):
            noise = self.streams.draw("action", self.dist.noise, self.envs.num_envs)
            action = self._policy_step(self.state.params, obs, noise).action
            step = self.envs.step(action.cpu().numpy())
            done = torch.from_numpy(step.terminated | step.truncated)
            steps.append((obs, action, self.to_device(step.reward), done))
            episodes += step.episodes
            self.obs = obs = self.to_device(step.obs)
        self.env_steps += self.config.num_steps * self.envs.num_envs
        all_obs, actions, rewards, done = (torch.stack(values) for values in zip(*steps, strict=True))
        returns = [rewards[-1]]  # (N,) until the end of the episode or of these steps, the last step first
        for reward, ends in zip(reversed(rewards[:-1]), reversed(done[:-1]), strict=True):
            returns.append(reward + ~ends * returns[-1])
        data = all_obs.flatten(0, 1), actions.flatten(0, 1), torch.stack(returns[::-1]).flatten()
        metrics, self.state = self._update(self.state, *data, rate)
        return IterationResult(named(metrics) | {"optim/learning_rate": rate}, episodes)

    def policy_step(self, flat: Tensor, obs: Tensor, noise: Tensor) -> PolicyStep:
        params = self.net.call(flat, obs)
        return PolicyStep(params, self.dist.sample(params, noise))

    def update(
        self, state: TrainState, obs: Tensor, action: Tensor, ret: Tensor, rate: Tensor
    ) -> tuple[Metrics, TrainState]:
        """One step up the gradient of the return."""

        def loss(flat: Tensor) -> tuple[Tensor, Metrics]:
            params = self.net.call(flat, obs)
            advantage = (ret - ret.mean()) / (ret.std() + 1e-8)
            value = -(advantage * self.dist.log_prob(params, action)).mean()
            return value, Metrics(loss_policy=value, policy_entropy=self.dist.entropy(params).mean())

        grad, metrics = gradient(loss, state.params)
        return metrics, TrainState(state.params - rate * grad)

    def policy(self, obs: Tensor) -> Tensor:
        return self.net.call(self.state.params, obs)  # type: ignore[no-any-return]

    def forward_passes(self) -> Mapping[str, ForwardPass]:
        batches = (self.envs.num_envs, self.envs.num_envs * self.config.num_steps)
        return {"policy": ForwardPass(self.policy, self.envs.codec.obs_size, batches)}
