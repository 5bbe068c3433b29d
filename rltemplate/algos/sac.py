"""Soft actor-critic with a learned temperature (Haarnoja et al. 2018, arXiv 1812.05905).

Where the details are that decide whether it learns:
  two critics, the smaller one in targets and policy loss      SAC.critic_loss, SAC.actor_loss
  squashed Gaussian with bounded log standard deviation        distributions.SquashedGaussian
  temperature adapted to a target entropy of -A                SAC.alpha_loss
  truncation bootstraps, termination does not                  SAC.critic_loss, through `terminated`
  policy updated every `policy_delay` critic updates, and then as often in a row SAC.update
  uniform random actions before `learning_starts`              SAC.explore
What may surprise: updates are counted per environment step, summed over parallel environments. With 8
environments and updates_per_step=1 every vector step is followed by 8 updates, so that the number of
environments changes the speed and not the ratio of learning to data.
"""

from __future__ import annotations

import math
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


class TwinCritic(nn.Module):
    """Two independent estimates of the soft action value, (2, B)."""

    def __init__(self, config: SACConfig, obs_size: int, action_size: int, rng: torch.Generator) -> None:
        super().__init__()
        build = partial(mlp, [obs_size + action_size, *config.hidden_sizes, 1], config.activation)
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


class Report(NamedTuple):
    """The results of an update besides new parameters; of the policy one for each of its updates."""

    td_target: Tensor  # (B,)
    critic_metrics: Tensor  # CriticMetrics, stacked
    critic_gradient: Tensor  # (P,)
    actor_metrics: tuple[Tensor, ...]  # ActorMetrics, stacked
    actor_gradient: tuple[Tensor, ...]  # (P,)


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
        actor = mlp([obs_size, *config.hidden_sizes, 2 * action_size], config.activation, init)
        self.actor = FlatModule(actor.to(self.device))
        self.critic = FlatModule(TwinCritic(config, obs_size, action_size, init).to(self.device))
        log_alpha = torch.full((1,), float(np.log(config.alpha_init)), device=self.device)
        learned = Learned(
            actor=AdamState.start(self.actor.initial),
            critic=AdamState.start(self.critic.initial),
            target=self.critic.initial.clone(),
            alpha=AdamState.start(log_alpha),
        )
        self.state = TrainState(learned, Statistics.empty(obs_size, self.device))
        chosen = config.target_entropy
        self.target_entropy = -float(action_size) if chosen is None else chosen
        self.replay = ReplayBuffer(config.buffer_size, obs_size, action_size, self.device, envs.num_envs)
        learns = total_env_steps > config.learning_starts  # or there is nothing to compile
        self._policy_step = engine(self.policy_step, self.policy_step_examples if learns else None)
        self._update = engine(self.update, self.update_examples if learns else None)

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
            metrics |= named(CriticMetrics(*torch.stack([each.critic_metrics for each in reports]).mean(0)))
        # Of several updates of the policy in a row, first the mean.
        means = [torch.stack(each.actor_metrics).mean(0) for each in reports if each.actor_metrics]
        if means:
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
        params = self.actor.call(flat, normalize(obs, scaling, self.config.obs_clip))
        return PolicyStep(params, self.dist.sample(params, noise))

    # Learning

    def due_inputs(self) -> Iterator[Inputs]:
        """Fresh batches and noise for the updates that are due after the last step."""
        config, done, draw = self.config, self.state.num_updates, self.streams.draw
        num_envs = self.envs.num_envs
        steps = max(0, self.env_steps // num_envs - config.learning_starts // num_envs)
        # A sum of fractions would lose updates by rounding, and a product just below a whole number as well.
        due = math.floor(config.updates_per_step * num_envs * steps + 1e-9)
        self.state = self.state._replace(num_updates=due)
        for update in range(done + 1, due + 1):
            batch = self.batch(draw("replay", self.replay.draw, config.batch_size))
            both = update % config.policy_delay == 0
            draws = range(1 + config.policy_delay * both)
            noise = [draw("update", self.dist.noise, config.batch_size) for _ in draws]
            yield Inputs(batch, tuple(noise[:-1]), noise[-1])

    def batch(self, index: Tensor) -> Batch:
        """The transitions in the places `index` (B,), as the networks see them."""
        batch = self.replay.take(index)
        return batch._replace(obs=self.normalized(batch.obs), next_obs=self.normalized(batch.next_obs))

    def update(self, learned: Learned, inputs: Inputs, rates: LearningRates) -> tuple[Report, Learned]:
        """Critics and their targets, then policy and temperature once for every noise."""
        config, batch, reports = self.config, inputs.batch, []
        critic_grad, (critic_metrics, td_target) = gradient(
            self.critic_loss, learned.critic.params, learned, batch, inputs.critic_noise
        )
        critic = adam(learned.critic, critic_grad, rates.critic, config.adam_eps)
        learned = learned._replace(critic=critic, target=polyak(learned.target, critic.params, config.tau))
        for noise in inputs.actor_noise:
            log_alpha = learned.alpha.params
            actor_grad, (loss, log_prob) = gradient(
                self.actor_loss, learned.actor.params, learned, batch.obs, noise
            )
            alpha_grad, loss_alpha = gradient(self.alpha_loss, log_alpha, log_prob)
            metrics = ActorMetrics(
                loss_policy=loss,
                policy_entropy=-log_prob,
                loss_alpha=loss_alpha,
                alpha_value=kernels.exp(log_alpha).squeeze(),
            )
            reports.append((torch.stack(metrics), actor_grad))
            actor = adam(learned.actor, actor_grad, rates.actor, config.adam_eps)
            learned = learned._replace(actor=actor)
            if config.learn_alpha:
                alpha = adam(learned.alpha, alpha_grad, rates.alpha, config.adam_eps)
                learned = learned._replace(alpha=alpha)
        actor_metrics, actor_grads = zip(*reports, strict=True) if reports else ((), ())
        report = Report(td_target, torch.stack(critic_metrics), critic_grad, actor_metrics, actor_grads)
        return report, learned

    def critic_loss(
        self, critic: Tensor, learned: Learned, batch: Batch, noise: Tensor
    ) -> tuple[Tensor, tuple[CriticMetrics, Tensor]]:
        """Squared error against the soft Bellman target, summed over the two critics (eq. 5, 6)."""
        params = self.actor.call(learned.actor.params, batch.next_obs)
        next_action, next_log_prob = self.dist.sample_log_prob(params, noise)
        next_q = torch.minimum(*self.critic.call(learned.target, batch.next_obs, next_action))  # (B,)
        soft_value = next_q - kernels.exp(learned.alpha.params) * next_log_prob
        td_target = batch.reward + self.config.gamma * (1.0 - batch.terminated) * soft_value  # (B,)
        td_target = td_target.detach()
        q = self.critic.call(critic, batch.obs, batch.action)  # (2, B)
        assert q.shape == (2, *td_target.shape)
        loss = (q - td_target).square().mean(1).sum()
        return loss, (CriticMetrics(loss_critic=loss, critic_q_mean=q.mean()), td_target)

    def actor_loss(
        self, actor: Tensor, learned: Learned, obs: Tensor, noise: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """alpha * log pi - min Q for actions of the present policy (eq. 9), and the mean of log pi."""
        action, log_prob = self.dist.sample_log_prob(self.actor.call(actor, obs), noise)
        # Of `min(0)` the gradient is a scatter, with which a compiled program cannot join anything.
        q = torch.minimum(*self.critic.call(learned.critic.params, obs, action))  # (B,)
        assert q.shape == log_prob.shape
        loss = (kernels.exp(learned.alpha.params) * log_prob - q).mean()
        return loss, (loss, log_prob.mean())

    def alpha_loss(self, log_alpha: Tensor, log_prob: Tensor) -> tuple[Tensor, Tensor]:
        """Raises the temperature while the entropy is below its target (eq. 18); `log_prob` is a mean ()."""
        loss = -(kernels.exp(log_alpha) * (log_prob + self.target_entropy)).sum()
        return loss, loss

    # Compilation: neither function is called before `learning_starts`. No tensor is given twice, or the
    # programs would rely on that.

    def policy_step_examples(self) -> Iterator[tuple[Any, ...]]:
        """Arguments of the shapes that `policy_step` has."""
        sizes = self.envs.codec.obs_size, self.envs.codec.action_size
        zeros = (torch.zeros(self.envs.num_envs, size, device=self.device) for size in sizes)
        yield self.state.learned.actor.params, self.scaling(), *zeros

    def update_examples(self) -> Iterator[tuple[Any, ...]]:
        """Arguments of the shapes that `update` has."""
        rows, delay = self.config.batch_size, self.config.policy_delay
        rates = LearningRates(*(torch.zeros((), device=self.device) for _ in range(3)))
        for number in (0, delay) if delay > 1 else (1,):
            batch = self.batch(torch.zeros(rows, dtype=torch.int64, device=self.device))
            noise = torch.zeros(1 + number, rows, self.envs.codec.action_size, device=self.device)
            *actor_noise, critic_noise = map(torch.clone, noise)
            yield self.state.learned, Inputs(batch, tuple(actor_noise), critic_noise), rates

    # Acting

    def policy(self, obs: Tensor) -> Tensor:
        """Parameters of the action distribution (B, 2A) for unscaled observations (B, O)."""
        return self.actor.call(self.state.learned.actor.params, self.normalized(obs))  # type: ignore[no-any-return]

    def forward_passes(self) -> Mapping[str, ForwardPass]:
        """Policy and both critics, with the batches of acting and learning."""
        codec, learned = self.envs.codec, self.state.learned
        batches = (self.envs.num_envs, self.config.batch_size)

        def values(rows: Tensor) -> Tensor:
            parts = rows.split([codec.obs_size, codec.action_size], 1)
            return self.critic.call(learned.critic.params, *parts).T  # type: ignore[no-any-return]

        return {
            "policy": ForwardPass(partial(self.actor.call, learned.actor.params), codec.obs_size, batches),
            "value": ForwardPass(values, codec.obs_size + codec.action_size, batches),
        }
