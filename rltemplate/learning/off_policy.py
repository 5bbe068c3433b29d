"""The part that off-policy algorithms share: exploration, replay, the count of updates, twin critics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from runlab.interfaces import Episode, ForwardPass, IterationResult

from .algorithm import StatefulAlgorithm, mean_metrics
from .config import OffPolicyConfig
from .networks import mlp
from .normalize import RunningMeanStd, Scaling, normalize
from .optim import AdamState, FlatModule, polyak, rehearsed
from .replay_buffer import Batch, ReplayBuffer, Transition

Noise = Callable[[], Tensor]  # draws (B, A)


class TwinCritic(nn.Module):
    """Two independent estimates of the action value, (2, B)."""

    def __init__(
        self,
        config: OffPolicyConfig,
        obs_size: int,
        action_size: int,
        rng: torch.Generator,
        network: Callable[[Sequence[int], str, torch.Generator], nn.Module] = mlp,
    ) -> None:
        super().__init__()
        sizes = [obs_size + action_size, *config.hidden_sizes, 1]
        self.q1, self.q2 = (network(sizes, config.activation, rng) for _ in range(2))

    def forward(self, obs: Tensor, action: Tensor) -> Tensor:
        """Both estimates, each from its own layers: a batched product would round differently."""
        x = torch.cat([obs, action], -1)  # (B, O + A)
        return torch.stack([self.q1(x).squeeze(-1), self.q2(x).squeeze(-1)])  # (2, B)


class ActorAndCritic(Protocol):
    """A NamedTuple of everything that an update changes."""

    @property
    def actor(self) -> AdamState: ...
    @property
    def critic(self) -> AdamState: ...


LearnedT = TypeVar("LearnedT", bound=ActorAndCritic)
InputsT = TypeVar("InputsT")  # a NamedTuple: the data of one update
RatesT = TypeVar("RatesT", bound=tuple[Tensor, ...])  # a NamedTuple: learning rates, first of the policy


class OffPolicyState(NamedTuple, Generic[LearnedT]):
    """Everything that learning changes."""

    learned: LearnedT
    obs_norm: RunningMeanStd
    num_updates: int = 0
    average: Tensor | None = None  # (P,) of the policy; None: evaluations act with the newest


class ExploreStep(NamedTuple):
    """The actions of one step."""

    policy: Tensor  # (N, P) parameters of the action distribution
    action: Tensor  # (N, A)


class UpdateReport(NamedTuple):
    """The results of an update besides new parameters; targets and gradients are for the trace alone."""

    td_target: Tensor  # (B,)
    critic_metrics: Tensor  # stacked, as are those of the policy
    critic_gradient: Tensor  # (P,)
    actor_metrics: tuple[Tensor, ...] = ()  # an entry for each update of the policy
    actor_gradient: tuple[Tensor, ...] = ()  # (P,)


class OffPolicyAlgorithm(StatefulAlgorithm, Generic[LearnedT, InputsT, RatesT]):
    """An algorithm that learns from a replay buffer, with a policy and twin critics.

    A subclass builds its networks, calls `start`, and implements `rates`, `inputs` and `update`.
    """

    config: OffPolicyConfig
    state: OffPolicyState[LearnedT]
    replay: ReplayBuffer
    actor: FlatModule[Tensor]
    critic: FlatModule[Tensor]
    critic_metrics: type[NamedTuple]  # the metrics of every update, each 0-d
    actor_metrics: type[NamedTuple]  # of an update of the policy

    def start(self, learned: LearnedT) -> None:
        """Begin with the networks and optimisers `learned`."""
        sizes = self.envs.codec.obs_size, self.envs.codec.action_size
        average = learned.actor.params.clone() if self.config.policy_average_steps else None
        self.state = OffPolicyState(learned, RunningMeanStd.empty(sizes[0], self.device), average=average)
        self.replay = ReplayBuffer(self.config.buffer_size, *sizes, self.device, self.envs.num_envs)

    def rates(self) -> RatesT:
        """The learning rates of the coming iteration."""
        raise NotImplementedError

    def inputs(self, index: Tensor, number: int, noise: Noise) -> InputsT:
        """The data of update `number`, counted from 1, from the sampled rows `index` (B,) of the buffer."""
        raise NotImplementedError

    def update(self, learned: LearnedT, inputs: InputsT, rates: RatesT) -> tuple[UpdateReport, LearnedT]:
        """One update: its report, and what it has learned."""
        raise NotImplementedError

    @torch.no_grad()
    def train_iteration(self) -> IterationResult:
        """`steps_per_iteration` environment steps, at least one in each; updates follow each vector step."""
        config, obs, rates = self.config, self.begin_iteration(), self.rates()
        raw_obs, episodes = list[Tensor](), list[Episode]()
        critic_metrics, actor_metrics = list[Tensor](), list[Tensor]()  # of each update
        for _ in range(max(1, config.steps_per_iteration // self.envs.num_envs)):
            # Act, and store the transitions.
            action = self.explore(obs)
            step = self.envs.step(action.cpu().numpy())
            self.env_steps += self.envs.num_envs
            rest = step.reward, step.next_obs, step.terminated, step.truncated
            self.replay.add(Transition(obs, action, *map(self.to_device, rest)))
            raw_obs.append(obs)
            episodes += step.episodes
            obs = self.to_device(step.obs)
            # Learn from sampled transitions.
            for inputs in self.due_inputs():
                report: UpdateReport
                report, learned = self.engine.run(self.update, self.state.learned, inputs, rates)
                self.state = self.state._replace(learned=learned)
                critic_metrics.append(report.critic_metrics)
                actor_metrics += report.actor_metrics
        self.obs = obs
        if config.policy_average_steps and self.state.average is not None:
            steps = len(raw_obs) * self.envs.num_envs
            learned_for = max(steps, self.env_steps - config.learning_starts)
            # At first the plain mean of the policies since the first update, without the untrained one.
            share = max(-math.expm1(-steps / config.policy_average_steps), steps / learned_for)
            newest = self.state.learned.actor.params
            self.state = self.state._replace(average=polyak(self.state.average, newest, share))
        # The statistics change after the updates: during an iteration the normalisation is the same.
        if config.normalize_obs:
            self.state = self.state._replace(obs_norm=self.state.obs_norm.merged(torch.cat(raw_obs)))
        metrics = {"optim/learning_rate": rates[0]}
        metrics |= mean_metrics(self.critic_metrics, critic_metrics)
        return IterationResult(metrics | mean_metrics(self.actor_metrics, actor_metrics), episodes)

    def explore(self, obs: Tensor) -> Tensor:
        """Actions (N, A) to learn from: uniform at first, then drawn from the policy."""
        num_envs = self.envs.num_envs
        if self.env_steps < self.config.learning_starts:
            noise = self.streams.draw("warmup", torch.rand, num_envs, self.envs.codec.action_size)
            return (2.0 * noise - 1.0).to(self.device)
        noise = self.streams.draw("action", self.dist.noise, num_envs)
        params, scaling = self.state.learned.actor.params, self.scaling()
        decision: ExploreStep = self.engine.run(self.policy_step, params, scaling, obs, noise)
        return decision.action

    def policy_step(self, params: Tensor, scaling: Scaling | None, obs: Tensor, noise: Tensor) -> ExploreStep:
        """Actions for unscaled observations (N, O)."""
        dist_params = self.actor.apply(params, normalize(obs, scaling, self.config.obs_clip))
        return ExploreStep(dist_params, self.dist.sample(dist_params, noise))

    def due_inputs(self) -> Iterator[InputsT]:
        """Inputs of the updates that are due after the last step, with fresh batches and noise."""
        config, done, draw = self.config, self.state.num_updates, self.streams.draw
        num_envs, size = self.envs.num_envs, config.batch_size
        steps = max(0, self.env_steps // num_envs - config.learning_starts // num_envs)
        # From the number of all steps: a sum of fractions would lose updates by rounding. The small term is
        # for products just below a whole number.
        due = math.floor(config.updates_per_step * num_envs * steps + 1e-9)
        self.state = self.state._replace(num_updates=due)
        for number in range(done + 1, due + 1):
            index = draw("replay", self.replay.draw, size)
            yield self.inputs(index, number, lambda: draw("update", self.dist.noise, size))

    def batch(self, index: Tensor) -> Batch:
        """The transitions in the rows `index` (B,), as the networks see them."""
        batch = self.replay.take(index)
        return batch._replace(obs=self.normalized(batch.obs), next_obs=self.normalized(batch.next_obs))

    def rehearse(self) -> None:
        """One decision, and an update with and one without the policy."""
        num_envs, size = self.envs.num_envs, self.config.batch_size
        obs = self.made_up(num_envs, self.envs.codec.obs_size)
        noise = self.streams.draw("action", self.dist.noise, num_envs)
        params, learned = self.state.learned.actor.params, rehearsed(self.state.learned)
        self.engine.run(self.policy_step, params, self.scaling(), obs, noise)
        index = torch.zeros(size, dtype=torch.int64, device=self.device)  # of rows without a transition
        for number in sorted({1, self.config.policy_delay}):
            empty = self.inputs(index, number, lambda: self.streams.draw("update", self.dist.noise, size))
            inputs = pytree.tree_map_only(Tensor, lambda x: self.made_up(*x.shape), empty)
            self.engine.run(self.update, learned, inputs, self.rates())

    def policy(self, obs: Tensor) -> Tensor:
        # Not by the state alone: a file of somebody may have an average that its configuration does not.
        average, newest = self.state.average, self.state.learned.actor.params
        params = newest if average is None or not self.config.policy_average_steps else average
        return self.actor.apply(params, self.normalized(obs))

    def forward_passes(self) -> Mapping[str, ForwardPass]:
        """Policy and both critics, with the batches of acting and learning."""
        codec, learned = self.envs.codec, self.state.learned
        batches = (self.envs.num_envs, self.config.batch_size)

        def values(rows: Tensor) -> Tensor:
            parts = rows.split([codec.obs_size, codec.action_size], 1)
            return self.critic.apply(learned.critic.params, *parts).T

        return {
            "policy": ForwardPass(partial(self.actor.apply, learned.actor.params), codec.obs_size, batches),
            "value": ForwardPass(values, codec.obs_size + codec.action_size, batches),
        }
