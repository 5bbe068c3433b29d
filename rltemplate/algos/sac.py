"""Soft actor-critic with a learned temperature (Haarnoja et al. 2018, arXiv 1812.05905).

Where the details are that decide whether it learns:
  two critics, the smaller one in targets and policy loss      critic_loss, actor_loss
  squashed Gaussian with bounded log standard deviation        distributions.SquashedGaussian
  temperature adapted to a target entropy of -A                alpha_loss
  truncation bootstraps, termination does not                  critic_loss, through `terminated`
  policy updated every `policy_delay` critic updates, and then as often in a row SAC.update
  uniform random actions before `learning_starts`              SAC.explore
What may surprise: updates are counted per environment step, summed over parallel environments. With 8
environments and updates_per_step=1 every vector step is followed by 8 updates, so that the number of
environments changes the speed and not the ratio of learning to data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from rltemplate.config.algorithms import SACConfig, check_actions
from rltemplate.determinism import kernels
from rltemplate.envs.envs import Envs
from rltemplate.learning.algorithm import StatefulAlgorithm, named
from rltemplate.learning.distributions import SquashedGaussian
from rltemplate.learning.engine import Engine
from rltemplate.learning.networks import mlp
from rltemplate.learning.normalize import Scaling, Statistics, normalize
from rltemplate.learning.optim import AdamState, FlatModule, adam, gradient, polyak
from rltemplate.learning.replay_buffer import Batch, ReplayBuffer
from rltemplate.rng import Streams
from rltemplate.types import Episode, ForwardPass, IterationResult


class Actor(nn.Module):
    """Observations (B, O) to parameters of the squashed Gaussian (B, 2A)."""

    def __init__(self, config: SACConfig, obs_size: int, out: int, rng: torch.Generator) -> None:
        super().__init__()
        self.net = mlp([obs_size, *config.hidden_sizes, out], config.activation.name, rng)

    def forward(self, obs: Tensor) -> Tensor:
        """Mean and raw log standard deviation side by side."""
        return self.net(obs)  # type: ignore[no-any-return]


class TwinCritic(nn.Module):
    """Two independent estimates of the soft action value, (2, B)."""

    def __init__(self, config: SACConfig, obs_size: int, action_size: int, rng: torch.Generator) -> None:
        super().__init__()
        build = partial(mlp, [obs_size + action_size, *config.hidden_sizes, 1], config.activation.name)
        self.q1, self.q2 = build(rng), build(rng)

    def forward(self, obs: Tensor, action: Tensor) -> Tensor:
        """Both estimates, each from its own layers: a batched product would round differently."""
        x = torch.cat([obs, action], -1)  # (B, O + A)
        return torch.stack([self.q1(x).squeeze(-1), self.q2(x).squeeze(-1)])  # (2, B)


class Learned(NamedTuple):
    """All that an update reads and returns."""

    actor: AdamState
    critic: AdamState
    target: Tensor  # (P,) the critics' slowly moving copy
    alpha: AdamState  # the logarithm of the temperature (1,)


class TrainState(NamedTuple):
    """All that learning changes."""

    learned: Learned
    obs_norm: Statistics
    num_updates: int = 0
    updates_due: float = 0.0


class LearningRates(NamedTuple):
    """Step sizes, 0-d."""

    actor: Tensor
    critic: Tensor
    alpha: Tensor


class PolicyStep(NamedTuple):
    """One decision."""

    policy: Tensor  # (N, 2A) parameters of the action distribution
    action: Tensor  # (N, A)


class CriticMetrics(NamedTuple):
    """Metrics of every update, each 0-d: `loss_critic` is logged as loss/critic."""

    loss_critic: Tensor
    critic_q_mean: Tensor


class ActorMetrics(NamedTuple):
    """Metrics of the updates that change the policy."""

    loss_policy: Tensor
    policy_entropy: Tensor
    loss_alpha: Tensor
    alpha_value: Tensor


class Inputs(NamedTuple):
    """The data of one update."""

    batch: Batch
    actor_noise: tuple[Tensor, ...]  # (B, A) for each update of the policy, perhaps none
    critic_noise: Tensor  # (B, A)


class CriticReport(NamedTuple):
    """The results of an update of the critics besides new parameters."""

    td_target: Tensor  # (B,)
    metrics: Tensor  # CriticMetrics, stacked
    gradient: Tensor  # (P,)


class ActorReport(NamedTuple):
    """The results of an update of policy and temperature besides new parameters."""

    metrics: Tensor  # ActorMetrics, stacked
    gradient: Tensor  # (P,) of the policy
    alpha_gradient: Tensor  # (1,)


class Report(NamedTuple):
    """The results of an update besides new parameters."""

    critic: CriticReport
    actor: tuple[ActorReport, ...]  # of each update of the policy


class Nets(NamedTuple):
    """The constant parts: the shapes of the networks and the distribution."""

    actor: FlatModule
    critic: FlatModule
    dist: SquashedGaussian


def critic_loss(
    critic: Tensor, learned: Learned, nets: Nets, batch: Batch, noise: Tensor, gamma: float
) -> tuple[Tensor, tuple[CriticMetrics, Tensor]]:
    """Squared error against the soft Bellman target, summed over the two critics (eq. 5, 6)."""
    params = nets.actor.call(learned.actor.params, batch.next_obs)
    next_action, next_log_prob = nets.dist.sample_log_prob(params, noise)
    next_q = torch.minimum(*nets.critic.call(learned.target, batch.next_obs, next_action))  # (B,)
    soft_value = next_q - kernels.exp(learned.alpha.params) * next_log_prob
    td_target = (batch.reward + gamma * (1.0 - batch.terminated) * soft_value).detach()  # (B,)
    q = nets.critic.call(critic, batch.obs, batch.action)  # (2, B)
    assert q.shape == (2, *td_target.shape)
    loss = (q - td_target).square().mean(1).sum()
    return loss, (CriticMetrics(loss_critic=loss, critic_q_mean=q.mean()), td_target)


def actor_loss(
    actor: Tensor, learned: Learned, nets: Nets, obs: Tensor, noise: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """alpha * log pi - min Q for actions of the present policy (eq. 9), and the mean of log pi."""
    action, log_prob = nets.dist.sample_log_prob(nets.actor.call(actor, obs), noise)
    # Of `min(0)` the gradient is a scatter, with which a compiled program cannot join anything.
    q = torch.minimum(*nets.critic.call(learned.critic.params, obs, action))  # (B,)
    assert q.shape == log_prob.shape
    loss = (kernels.exp(learned.alpha.params) * log_prob - q).mean()
    return loss, (loss, log_prob.mean())


def alpha_loss(log_alpha: Tensor, log_prob: Tensor, target_entropy: float) -> tuple[Tensor, Tensor]:
    """Raises the temperature while the entropy is below its target (eq. 18); `log_prob` is a mean ()."""
    loss = -(kernels.exp(log_alpha) * (log_prob + target_entropy)).sum()
    return loss, loss


class SAC(StatefulAlgorithm):
    """The algorithm over N environments."""

    config: SACConfig
    state: TrainState
    envs: Envs
    replay: ReplayBuffer

    def __init__(
        self, config: SACConfig, envs: Envs, streams: Streams, total_env_steps: int, engine: Engine
    ) -> None:
        super().__init__(envs, streams, total_env_steps, engine)
        self.config, codec = config, envs.codec
        check_actions(config.name, codec)
        self.dist = SquashedGaussian(codec.action_size, config.log_std_min, config.log_std_max)
        init, obs_size, action_size = streams.torch("init"), codec.obs_size, codec.action_size
        actor = FlatModule(Actor(config, obs_size, self.dist.param_size, init).to(self.device))
        critic = FlatModule(TwinCritic(config, obs_size, action_size, init).to(self.device))
        self.nets = Nets(actor, critic, self.dist)
        log_alpha = torch.full((1,), float(np.log(config.alpha_init)), device=self.device)
        learned = Learned(
            actor=AdamState.start(actor.initial),
            critic=AdamState.start(critic.initial),
            target=critic.initial.clone(),
            alpha=AdamState.start(log_alpha),
        )
        self.state = TrainState(learned, Statistics.empty(obs_size, self.device))
        chosen = config.target_entropy
        self.target_entropy = -float(action_size) if chosen is None else chosen
        self.replay = ReplayBuffer(config.buffer_size, obs_size, action_size, self.device, envs.num_envs)
        self._policy_step = engine(self.policy_step, self.policy_step_examples)
        self._update = engine(self.update, self.update_examples)

    @torch.no_grad()
    def train_iteration(self) -> IterationResult:
        """`steps_per_iteration` environment steps, each followed by its updates."""
        config, obs = self.config, self.begin_iteration()
        initial = config.actor_learning_rate, config.critic_learning_rate, config.alpha_learning_rate
        rates = LearningRates(*map(self.rate, initial))
        raw_obs, episodes, reports = list[Tensor](), list[Episode](), list[Report]()
        for _ in range(max(1, config.steps_per_iteration // self.envs.num_envs)):
            action = self.explore(obs)
            step = self.envs.step(action.cpu().numpy())
            self.env_steps += self.envs.num_envs
            rest = (self.to_device(each) for each in (step.reward, step.next_obs, step.terminated))
            self.replay.add(Batch(obs, action, *rest))
            raw_obs.append(obs)
            episodes += step.episodes
            obs = self.to_device(step.obs)
            learned, seen = self.engine.scan(self._update, self.state.learned, self.due_inputs(), rates)
            self.state = self.state._replace(learned=learned)
            reports += seen
        self.obs = obs
        if config.normalize_obs:
            self.state = self.state._replace(obs_norm=self.state.obs_norm.merged(torch.cat(raw_obs)))
        metrics = {"optim/learning_rate": rates.actor}
        if reports:
            stacked = torch.stack([report.critic.metrics for report in reports])
            metrics |= named(CriticMetrics(*stacked.mean(0)))
        if both := [report.actor for report in reports if report.actor]:
            means = [torch.stack([each.metrics for each in parts]).mean(0) for parts in both]
            metrics |= named(ActorMetrics(*torch.stack(means).mean(0)))
        return IterationResult(metrics, episodes)

    # Collecting

    def explore(self, obs: Tensor) -> Tensor:
        """Actions (N, A) to learn from: uniform at first, then drawn from the policy."""
        num_envs = self.envs.num_envs
        if self.env_steps < self.config.learning_starts:
            noise = self.streams.draw("warmup", torch.rand, num_envs, self.envs.codec.action_size)
            return (2.0 * noise - 1.0).to(self.device)
        noise = self.streams.draw("action", self.dist.noise, num_envs)
        decision: PolicyStep = self._policy_step(self.state.learned.actor.params, self.scaling(), obs, noise)
        return decision.action

    def policy_step(self, flat: Tensor, scaling: Scaling | None, obs: Tensor, noise: Tensor) -> PolicyStep:
        """Actions for unscaled observations (N, O)."""
        params = self.nets.actor.call(flat, normalize(obs, scaling, self.config.obs_clip))
        return PolicyStep(params, self.dist.sample(params, noise))

    def scaling(self) -> Scaling | None:
        """The normalisation of observations, frozen during an iteration."""
        return self.state.obs_norm.scaling() if self.config.normalize_obs else None

    # Learning

    def due_inputs(self) -> Iterator[Inputs]:
        """Fresh batches and noise for the updates that are due after the last step."""
        config, state = self.config, self.state
        due = state.updates_due
        if self.env_steps > config.learning_starts:
            due += config.updates_per_step * self.envs.num_envs
        number, scaling = int(due), self.scaling()
        self.state = state._replace(updates_due=due - number, num_updates=state.num_updates + number)
        for update in range(state.num_updates + 1, state.num_updates + number + 1):
            batch = self.batch(self.streams.draw("replay", self.replay.draw, config.batch_size), scaling)
            both = update % config.policy_delay == 0
            noise = [
                self.streams.draw("update", self.dist.noise, config.batch_size)
                for _ in range(1 + config.policy_delay * both)
            ]
            yield Inputs(batch, tuple(noise[:-1]), noise[-1])

    def batch(self, index: Tensor, scaling: Scaling | None) -> Batch:
        """The transitions in the places `index` (B,), as the networks see them."""
        batch, clip = self.replay.take(index), self.config.obs_clip
        next_obs = normalize(batch.next_obs, scaling, clip)
        return batch._replace(obs=normalize(batch.obs, scaling, clip), next_obs=next_obs)

    def update(self, learned: Learned, inputs: Inputs, rates: LearningRates) -> tuple[Report, Learned]:
        """Critics and their targets, then policy and temperature once for every noise."""
        config, batch, noise = self.config, inputs.batch, inputs.critic_noise
        grad, (metrics, td_target) = gradient(
            critic_loss, learned.critic.params, learned, self.nets, batch, noise, config.gamma
        )
        critic = adam(learned.critic, grad, rates.critic, config.adam_eps)
        learned = learned._replace(critic=critic, target=polyak(learned.target, critic.params, config.tau))
        critic_report = CriticReport(td_target, torch.stack(metrics), grad)
        actor_reports = []
        for noise in inputs.actor_noise:
            learned, report = self.actor_update(learned, batch.obs, noise, rates)
            actor_reports.append(report)
        return Report(critic_report, tuple(actor_reports)), learned

    def actor_update(
        self, learned: Learned, obs: Tensor, noise: Tensor, rates: LearningRates
    ) -> tuple[Learned, ActorReport]:
        """Policy and temperature."""
        eps, log_alpha = self.config.adam_eps, learned.alpha.params
        actor_grad, (loss, log_prob) = gradient(
            actor_loss, learned.actor.params, learned, self.nets, obs, noise
        )
        alpha_grad, loss_alpha = gradient(alpha_loss, log_alpha, log_prob, self.target_entropy)
        metrics = ActorMetrics(
            loss_policy=loss,
            policy_entropy=-log_prob,
            loss_alpha=loss_alpha,
            alpha_value=kernels.exp(log_alpha).squeeze(),
        )
        learned = learned._replace(actor=adam(learned.actor, actor_grad, rates.actor, eps))
        if self.config.learn_alpha:
            learned = learned._replace(alpha=adam(learned.alpha, alpha_grad, rates.alpha, eps))
        return learned, ActorReport(torch.stack(metrics), actor_grad, alpha_grad)

    # Compilation: neither function is called before `learning_starts`.

    def policy_step_examples(self) -> Iterator[tuple[Any, ...]]:
        """Arguments of the shapes that `policy_step` has."""
        sizes = self.envs.codec.obs_size, self.envs.codec.action_size
        zeros = (torch.zeros(self.envs.num_envs, size, device=self.device) for size in sizes)
        yield self.state.learned.actor.params, self.scaling(), *zeros

    def update_examples(self) -> Iterator[tuple[Any, ...]]:
        """Arguments of the shapes that `update` has; no tensor twice, or the program would rely on that."""
        config = self.config
        rates = LearningRates(*(torch.zeros((), device=self.device) for _ in range(3)))
        for number in {0 if config.policy_delay > 1 else 1, config.policy_delay}:
            batch = self.batch(
                torch.zeros(config.batch_size, dtype=torch.int64, device=self.device), self.scaling()
            )
            noise = torch.zeros(
                1 + number, config.batch_size, self.envs.codec.action_size, device=self.device
            )
            *actor_noise, critic_noise = map(torch.clone, noise)
            yield self.state.learned, Inputs(batch, tuple(actor_noise), critic_noise), rates

    # Acting

    def policy(self, obs: Tensor) -> Tensor:
        """Parameters of the action distribution (B, 2A) for unscaled observations (B, O)."""
        scaled = normalize(obs, self.scaling(), self.config.obs_clip)
        return self.nets.actor.call(self.state.learned.actor.params, scaled)  # type: ignore[no-any-return]

    def forward_passes(self) -> Mapping[str, ForwardPass]:
        """Policy and both critics, with the batches of acting and learning."""
        codec, learned = self.envs.codec, self.state.learned
        batches = (self.envs.num_envs, self.config.batch_size)

        def values(rows: Tensor) -> Tensor:
            parts = rows.split([codec.obs_size, codec.action_size], 1)
            return self.nets.critic.call(learned.critic.params, *parts).T  # type: ignore[no-any-return]

        policy = partial(self.nets.actor.call, learned.actor.params)
        return {
            "policy": ForwardPass(policy, codec.obs_size, batches),
            "value": ForwardPass(values, codec.obs_size + codec.action_size, batches),
        }
