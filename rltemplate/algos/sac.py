"""Soft actor-critic with a learned temperature (Haarnoja et al. 2018, arXiv 1812.05905).

Where the details are that decide whether it learns:
  two critics, the smaller one in targets and policy loss      critic_loss, actor_loss
  squashed Gaussian with bounded log standard deviation        networks.SquashedGaussian
  temperature adapted to a target entropy of -A                alpha_loss
  truncation bootstraps, termination does not                  critic_loss, through `terminated`
  policy updated every `policy_delay` critic updates, and then as often in a row
                                                               SAC._update_both
  uniform random actions before `learning_starts`              SAC._explore
What may surprise: updates are counted per environment step, summed over parallel environments. With 8
environments and updates_per_step=1 every vector step is followed by 8 updates, so that the number of
environments changes the speed and not the ratio of learning to data.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from rltemplate.algos import SACConfig, Schedule, check_actions
from rltemplate.buffers import Batch, ReplayBuffer
from rltemplate.envs import Envs
from rltemplate.networks import SquashedGaussian, mlp
from rltemplate.normalize import RunningNorm
from rltemplate.optim import AdamState, FlatModule, adam, adam_init, compiled, gradient, polyak
from rltemplate.rng import Streams
from rltemplate.types import Episode, IterationResult


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


class Learner(NamedTuple):
    """All that an update reads and returns: parameters as flat vectors, and their optimisers."""

    actor: Tensor
    critic: Tensor
    target: Tensor  # the critics' slowly moving copy
    log_alpha: Tensor  # (1,)
    actor_adam: AdamState
    critic_adam: AdamState
    alpha_adam: AdamState


class Rates(NamedTuple):
    """Step sizes, as 0-d tensors so that a schedule recompiles nothing."""

    actor: Tensor
    critic: Tensor
    alpha: Tensor


class Nets(NamedTuple):
    """What stays the same during a run: the shapes of the networks and the distribution.

    The actor's module always has the parameters that act. The critic's is a shape only: values come from
    `critic.call` with the parameters of the learner.
    """

    actor: FlatModule
    critic: FlatModule
    dist: SquashedGaussian


CRITIC_METRICS = ("loss/critic", "critic/q_mean")
ACTOR_METRICS = ("loss/policy", "policy/entropy", "loss/alpha", "alpha/value")


def critic_loss(
    critic: Tensor, learner: Learner, nets: Nets, batch: Batch, noise: Tensor, gamma: float
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Squared error against the soft Bellman target, summed over the two critics (eq. 5, 6)."""
    next_action, next_log_prob = nets.dist.sample(nets.actor.call(learner.actor, batch.next_obs), noise)
    next_q = nets.critic.call(learner.target, batch.next_obs, next_action).min(0).values  # (B,)
    soft_value = next_q - learner.log_alpha.exp() * next_log_prob
    td_target = (batch.reward + gamma * (1.0 - batch.terminated) * soft_value).detach()  # (B,)
    q = nets.critic.call(critic, batch.obs, batch.action)  # (2, B)
    assert q.shape == (2, *td_target.shape)
    loss = (q - td_target).square().mean(1).sum()
    return loss, (loss, q.mean())


def actor_loss(
    actor: Tensor, learner: Learner, nets: Nets, obs: Tensor, noise: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """alpha * log pi - min Q for actions of the present policy (eq. 9)."""
    action, log_prob = nets.dist.sample(nets.actor.call(actor, obs), noise)
    q = nets.critic.call(learner.critic, obs, action).min(0).values  # (B,)
    assert q.shape == log_prob.shape
    loss = (learner.log_alpha.exp() * log_prob - q).mean()
    return loss, (loss, log_prob.mean())


def alpha_loss(log_alpha: Tensor, log_prob: Tensor, target_entropy: float) -> tuple[Tensor, Tensor]:
    """Raises the temperature while the entropy is below its target (eq. 18); `log_prob` is a mean ()."""
    loss = -(log_alpha.exp() * (log_prob + target_entropy)).sum()
    return loss, loss


class SAC:
    """The algorithm over N environments."""

    def __init__(
        self, config: SACConfig, envs: Envs, streams: Streams, total_env_steps: int, compile_update: bool
    ) -> None:
        codec = envs.codec
        check_actions(config.name, codec)
        self.config = config
        self.envs = envs
        self.streams = streams
        self.device = streams.device
        self.total_env_steps = total_env_steps
        self.env_steps = 0
        init = streams.torch("init", device="cpu")  # the same weights whatever the device
        dist = SquashedGaussian(codec.action_size, config.log_std_min, config.log_std_max)
        actor = FlatModule(Actor(config, codec.obs_size, dist.param_size, init).to(self.device))
        critic = FlatModule(TwinCritic(config, codec.obs_size, codec.action_size, init).to(self.device))
        self.nets = Nets(actor, critic, dist)
        log_alpha = torch.full((1,), float(np.log(config.alpha_init)), device=self.device)
        self.learner = Learner(
            actor.flat.clone(),
            critic.flat.clone(),
            critic.flat.clone(),
            log_alpha,
            adam_init(actor.flat),
            adam_init(critic.flat),
            adam_init(log_alpha),
        )
        chosen = config.target_entropy
        self.target_entropy = -float(codec.action_size) if chosen is None else chosen
        self.obs_norm = RunningNorm(codec.obs_size, config.obs_clip).to(self.device)
        self.replay = ReplayBuffer(config.buffer_size, codec.obs_size, codec.action_size, self.device)
        self._update_critic = compiled(self._one_critic_update, compile_update)
        self._update_both = compiled(self._one_full_update, compile_update)
        self._num_updates = 0
        self._updates_due = 0.0
        self._obs: np.ndarray | None = None  # (N, O) unscaled, to act on next

    def rates(self) -> Rates:
        """The three step sizes for the coming iteration."""
        config = self.config
        linear = config.learning_rate_schedule is Schedule.linear
        left = max(0.0, 1.0 - self.env_steps / self.total_env_steps) if linear else 1.0
        initial = (config.actor_learning_rate, config.critic_learning_rate, config.alpha_learning_rate)
        return Rates(*(torch.tensor(rate * left, device=self.device) for rate in initial))

    def train_iteration(self) -> IterationResult:
        """`steps_per_iteration` environment steps, each followed by its updates."""
        rates = self.rates()
        critic_reports: list[Tensor] = []
        actor_reports: list[Tensor] = []
        episodes: list[Episode] = []
        seen: list[np.ndarray] = []
        if self._obs is None:
            self._obs = self.envs.reset()
        with torch.no_grad():
            for _ in range(max(1, self.config.steps_per_iteration // self.envs.num_envs)):
                action = self._explore(self._obs)
                step = self.envs.step(action)
                self.replay.add(self._obs, action, step.reward, step.next_obs, step.terminated)
                seen.append(self._obs)
                self._obs = step.obs
                episodes += step.episodes
                self.env_steps += self.envs.num_envs
                if self.env_steps > self.config.learning_starts:
                    self._updates_due += self.config.updates_per_step * self.envs.num_envs
                while self._updates_due >= 1.0:
                    self._updates_due -= 1.0
                    self._learn(rates, critic_reports, actor_reports)
            if self.config.normalize_obs:
                self.obs_norm.update(torch.from_numpy(np.concatenate(seen)).to(self.device))
        metrics = {"optim/learning_rate": rates.actor}
        for names, reports in ((CRITIC_METRICS, critic_reports), (ACTOR_METRICS, actor_reports)):
            if reports:
                metrics.update(zip(names, torch.stack(reports).mean(0).unbind(), strict=True))
        probes = {
            "critic": self.learner.critic,
            "actor": self.learner.actor,
            "target": self.learner.target,
            "log_alpha": self.learner.log_alpha,
        }
        return IterationResult(metrics, episodes, probes)

    # Collecting

    def _explore(self, obs: np.ndarray) -> np.ndarray:
        """Actions (N, A) to learn from: uniform at first, then drawn from the policy."""
        codec = self.envs.codec
        if self.env_steps < self.config.learning_starts:
            stream = self.streams.torch("warmup", device="cpu")
            return (2.0 * torch.rand(len(obs), codec.action_size, generator=stream) - 1.0).numpy()
        noise = self.nets.dist.noise(len(obs), self.streams.torch("action"))
        return self.nets.dist.sample(self._policy(obs), noise)[0].cpu().numpy()

    def _policy(self, obs: np.ndarray) -> Tensor:
        return self.nets.actor.module(self._normalized(torch.from_numpy(obs).to(self.device)))  # type: ignore[no-any-return]

    def _normalized(self, obs: Tensor) -> Tensor:
        return self.obs_norm(obs) if self.config.normalize_obs else obs

    # Learning

    def _learn(self, rates: Rates, critic_reports: list[Tensor], actor_reports: list[Tensor]) -> None:
        """One update from a fresh batch."""
        batch = self.replay.sample(self.config.batch_size, self.streams.torch("replay"))
        batch = batch._replace(obs=self._normalized(batch.obs), next_obs=self._normalized(batch.next_obs))
        draw = partial(self.nets.dist.noise, self.config.batch_size, self.streams.torch("update"))
        self._num_updates += 1
        if self._num_updates % self.config.policy_delay:
            self.learner, report = self._update_critic(self.learner, batch, draw(), rates)
        else:
            noise = [draw() for _ in range(self.config.policy_delay)]
            self.learner, report, actor_report = self._update_both(self.learner, batch, draw(), noise, rates)
            actor_reports.append(actor_report)
            self.nets.actor.assign(self.learner.actor)
        critic_reports.append(report)

    def _one_critic_update(
        self, learner: Learner, batch: Batch, noise: Tensor, rates: Rates
    ) -> tuple[Learner, Tensor]:
        """Critics and their targets; nothing else is touched."""
        grad, report = gradient(
            critic_loss, learner.critic, learner, self.nets, batch, noise, self.config.gamma
        )
        critic, state = adam(learner.critic, grad, learner.critic_adam, rates.critic, self.config.adam_eps)
        target = polyak(learner.target, critic, self.config.tau)
        return learner._replace(critic=critic, critic_adam=state, target=target), torch.stack(report)

    def _one_full_update(
        self, learner: Learner, batch: Batch, noise: Tensor, actor_noise: list[Tensor], rates: Rates
    ) -> tuple[Learner, Tensor, Tensor]:
        """Critics, then policy and temperature once for every noise in `actor_noise`."""
        eps = self.config.adam_eps
        learner, critic_report = self._one_critic_update(learner, batch, noise, rates)
        reports = []
        for draw in actor_noise:
            grad, (loss, log_prob) = gradient(actor_loss, learner.actor, learner, self.nets, batch.obs, draw)
            actor, state = adam(learner.actor, grad, learner.actor_adam, rates.actor, eps)
            grad, loss_alpha = gradient(alpha_loss, learner.log_alpha, log_prob, self.target_entropy)
            reports.append(torch.stack([loss, -log_prob, loss_alpha, learner.log_alpha.exp().squeeze()]))
            learner = learner._replace(actor=actor, actor_adam=state)
            if self.config.learn_alpha:
                log_alpha, state = adam(learner.log_alpha, grad, learner.alpha_adam, rates.alpha, eps)
                learner = learner._replace(log_alpha=log_alpha, alpha_adam=state)
        return learner, critic_report, torch.stack(reports).mean(0)

    # Acting and state

    @torch.no_grad()
    def act(self, obs: np.ndarray, deterministic: bool = True) -> np.ndarray:
        """Actions (N, A) for encoded observations (N, O); random ones come from a stream of their own."""
        params = self._policy(obs)
        if deterministic:
            return self.nets.dist.mode(params).cpu().numpy()
        noise = self.nets.dist.noise(len(obs), self.streams.torch("act"))
        return self.nets.dist.sample(params, noise)[0].cpu().numpy()

    def state_dict(self) -> dict[str, Any]:
        """Copies of parameters, optimisers, statistics, streams and counters; no transitions."""
        tensors = {
            name: [x.clone() for x in value] if isinstance(value, AdamState) else value.clone()
            for name, value in self.learner._asdict().items()
        }
        return {
            "env_steps": self.env_steps,
            "num_updates": self._num_updates,
            "updates_due": self._updates_due,
            "learner": tensors,
            "obs_norm": self.obs_norm.snapshot(),
            "streams": self.streams.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over `state`."""
        self.env_steps = int(state["env_steps"])
        self._num_updates = int(state["num_updates"])
        self._updates_due = float(state["updates_due"])
        values: dict[str, Any] = {
            name: AdamState(*(x.to(self.device) for x in value))
            if isinstance(value, list)
            else value.to(self.device)
            for name, value in state["learner"].items()
        }
        self.learner = Learner(**values)
        self.nets.actor.assign(self.learner.actor)
        self.nets.critic.assign(self.learner.critic)
        self.obs_norm.load_state_dict(state["obs_norm"])
        self.streams.load_state_dict(state["streams"])

    def close(self) -> None:
        """Release the environments."""
        self.envs.close()
