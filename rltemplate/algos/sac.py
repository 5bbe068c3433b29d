"""Soft actor-critic with a learned temperature (Haarnoja et al. 2018, arXiv 1812.05905).

Where the details are that decide whether it learns:
  two critics, the smaller one in targets and policy loss      critic_loss, actor_loss
  squashed Gaussian with bounded log standard deviation        distributions.SquashedGaussian
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

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from rltemplate.config.algorithms import SACConfig, Schedule, check_actions
from rltemplate.determinism import kernels
from rltemplate.envs.envs import Envs
from rltemplate.learning.distributions import SquashedGaussian
from rltemplate.learning.engine import Engine
from rltemplate.learning.networks import mlp
from rltemplate.learning.normalize import RunningNorm
from rltemplate.learning.optim import (
    AdamState,
    FlatModule,
    Show,
    adam,
    adam_init,
    gradient,
    polyak,
    shown,
)
from rltemplate.learning.replay_buffer import Batch, ReplayBuffer
from rltemplate.rng import Streams
from rltemplate.types import Episode, Experience, ForwardPass, IterationResult, Probe


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
    """The constant parts of a run: the shapes of the networks and the distribution.

    The actor's module always has the parameters that act. The critic's is a shape only: values come from
    `critic.call` with the parameters of the learner.
    """

    actor: FlatModule
    critic: FlatModule
    dist: SquashedGaussian


class Seen:
    """The steps and reports of one iteration."""

    def __init__(self) -> None:
        self.steps: list[tuple[np.ndarray, ...]] = []
        self.index: list[Tensor] = []  # (B,) replay places of each update
        self.critic: list[Tensor] = []  # (2,) CRITIC_METRICS of each update
        self.actor: list[Tensor] = []  # (4,) ACTOR_METRICS of each update that had them

    def probes(self) -> dict[str, Tensor]:
        """Named and in causal order, stacked over steps or updates."""
        names = ("obs", "action", "reward", "terminated", "truncated", "next_obs")
        stacked = zip(names, zip(*self.steps, strict=True), strict=True)
        probes = {name: torch.from_numpy(np.stack(values)) for name, values in stacked}
        named = (("replay_index", self.index), ("critic/loss", self.critic), ("actor/loss", self.actor))
        return probes | {name: torch.stack(values) for name, values in named if values}


CRITIC_METRICS = ("loss/critic", "critic/q_mean")
ACTOR_METRICS = ("loss/policy", "policy/entropy", "loss/alpha", "alpha/value")


def critic_loss(
    critic: Tensor,
    learner: Learner,
    nets: Nets,
    batch: Batch,
    noise: Tensor,
    gamma: float,
    show: Show,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Squared error against the soft Bellman target, summed over the two critics (eq. 5, 6)."""
    next_action, next_log_prob = nets.dist.sample(nets.actor.call(learner.actor, batch.next_obs), noise)
    next_q = torch.minimum(*nets.critic.call(learner.target, batch.next_obs, next_action))  # (B,)
    soft_value = next_q - kernels.exp(learner.log_alpha) * next_log_prob
    td_target = (batch.reward + gamma * (1.0 - batch.terminated) * soft_value).detach()  # (B,)
    td_target = show("critic/target", td_target)
    q = nets.critic.call(critic, batch.obs, batch.action)  # (2, B)
    assert q.shape == (2, *td_target.shape)
    loss = (q - td_target).square().mean(1).sum()
    return loss, (loss, q.mean())


def actor_loss(
    actor: Tensor, learner: Learner, nets: Nets, obs: Tensor, noise: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """alpha * log pi - min Q for actions of the present policy (eq. 9)."""
    action, log_prob = nets.dist.sample(nets.actor.call(actor, obs), noise)
    # Of `min(0)` the gradient is a scatter, with which a compiled program cannot join anything.
    q = torch.minimum(*nets.critic.call(learner.critic, obs, action))  # (B,)
    assert q.shape == log_prob.shape
    loss = (kernels.exp(learner.log_alpha) * log_prob - q).mean()
    return loss, (loss, log_prob.mean())


def alpha_loss(log_alpha: Tensor, log_prob: Tensor, target_entropy: float) -> tuple[Tensor, Tensor]:
    """Raises the temperature while the entropy is below its target (eq. 18); `log_prob` is a mean ()."""
    loss = -(kernels.exp(log_alpha) * (log_prob + target_entropy)).sum()
    return loss, loss


class SAC:
    """The algorithm over N environments."""

    def __init__(
        self, config: SACConfig, envs: Envs, streams: Streams, total_env_steps: int, engine: Engine
    ) -> None:
        codec = envs.codec
        check_actions(config.name, codec)
        self.config = config
        self.envs = envs
        self.streams = streams
        self.device = streams.device
        self.total_env_steps = total_env_steps
        self.env_steps = 0
        self.probe = Probe()
        self.engine = engine
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
        self.replay = ReplayBuffer(
            config.buffer_size, codec.obs_size, codec.action_size, self.device, envs.num_envs
        )
        self._decide = engine(self._one_decision)
        self._update_critic = engine(self._one_critic_update)
        self._update_both = engine(self._one_full_update)
        self._compiled = not engine.compiles or total_env_steps <= config.learning_starts
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
        rates, probe = self.rates(), self.probe
        seen = Seen()
        episodes: list[Episode] = []
        with torch.no_grad():
            if not self._compiled:
                self._compile(rates)
            if self._obs is None:
                self._obs = self._begin()
            probe.begin(self)
            for k in range(max(1, self.config.steps_per_iteration // self.envs.num_envs)):
                probe.event("step", k)
                obs = probe("obs", self._obs)
                action = probe("action", self._explore(obs))
                step = self.envs.step(action)
                self.env_steps += self.envs.num_envs
                reward = probe("reward", step.reward.astype(np.float32))
                terminated = probe("terminated", step.terminated)
                truncated = probe("truncated", step.truncated)
                next_obs = probe("next_obs", step.next_obs)
                self.replay.add(obs, action, reward, next_obs, terminated)
                seen.steps.append((obs, action, reward, terminated, truncated, next_obs))
                self._obs = step.obs
                episodes += step.episodes
                for _ in range(self._due_updates()):
                    self._learn(rates, seen)
            probe.event("end")
            probes = seen.probes() | self._probes()
            if self.config.normalize_obs:
                every = np.concatenate([obs for obs, *_ in seen.steps])
                self.obs_norm.update(torch.from_numpy(every).to(self.device))
                probes |= self.obs_norm.show("obs_norm", probe)
        metrics = {"optim/learning_rate": rates.actor}
        for names, reports in ((CRITIC_METRICS, seen.critic), (ACTOR_METRICS, seen.actor)):
            if reports:
                metrics.update(zip(names, torch.stack(reports).mean(0).unbind(), strict=True))
        return IterationResult(metrics, episodes, probes)

    def _begin(self) -> np.ndarray:
        """The first weights and observations."""
        self.probe.event("init")
        self.nets.actor.show(self.probe, "actor.")
        self.nets.critic.show(self.probe, "critic.")
        actor, critic = self.nets.actor.flat.clone(), self.nets.critic.flat.clone()
        log_alpha = self.probe("init/log_alpha", self.learner.log_alpha)
        self.learner = self.learner._replace(
            actor=actor, critic=critic, target=critic.clone(), log_alpha=log_alpha
        )
        self.probe.event("reset")
        return self.probe("obs", self.envs.reset())

    def _probes(self) -> dict[str, Tensor]:
        learner = self.learner
        return {
            "critic/optimizer/mu": learner.critic_adam.mu,
            "critic/optimizer/nu": learner.critic_adam.nu,
            "critic/params": learner.critic,
            "critic/target_params": learner.target,
            "actor/optimizer/mu": learner.actor_adam.mu,
            "actor/optimizer/nu": learner.actor_adam.nu,
            "actor/params": learner.actor,
            "alpha/optimizer/mu": learner.alpha_adam.mu,
            "alpha/optimizer/nu": learner.alpha_adam.nu,
            "alpha/log_alpha": learner.log_alpha,
        }

    def _compile(self, rates: Rates) -> None:
        """Compile now, on rows that mean nothing, and drop the results.

        It takes a while, and a signal that arrives in it costs nothing as long as nothing is under way.
        """
        rows, delay = self.config.batch_size, self.config.policy_delay
        batch = self._batch(torch.zeros(rows, dtype=torch.int64, device=self.device))
        noise = list(torch.zeros(1 + delay, rows, self.envs.codec.action_size, device=self.device))
        self._update_both(self.learner, batch, noise[-1], noise[:-1], rates)
        if delay > 1:
            self._update_critic(self.learner, batch, noise[0], rates)
        obs, action = (
            torch.zeros(self.envs.num_envs, size, device=self.device)
            for size in (self.envs.codec.obs_size, self.envs.codec.action_size)
        )
        self._decide(self.nets.actor.current, self._scaling(), obs, action)
        self._compiled = True

    # Collecting

    def _explore(self, obs: np.ndarray) -> np.ndarray:
        """Actions (N, A) to learn from: uniform at first, then drawn from the policy."""
        codec = self.envs.codec
        if self.env_steps < self.config.learning_starts:
            stream = self.streams.torch("warmup", device="cpu")
            noise = self.probe("noise", torch.rand(len(obs), codec.action_size, generator=stream))
            return (2.0 * noise - 1.0).numpy()
        noise = self.nets.dist.noise(len(obs), self.streams.torch("action"))
        rows = self._to_device(obs)
        params, noise, action = self._decide(self.nets.actor.current, self._scaling(), rows, noise)
        if self.engine.compiles:
            self.probe("policy", params)
            self.probe("noise", noise)
        return action.cpu().numpy()  # type: ignore[no-any-return]

    def _one_decision(
        self, flat: Tensor, scaling: tuple[Tensor, ...], obs: Tensor, noise: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The policy's parameters, the noise and the actions, for observations (N, O) as they came."""
        if scaling:
            obs = self.obs_norm.scaled(obs, *scaling)
        params = self._inside("policy", self.nets.actor.call(flat, obs))
        noise = self._inside("noise", noise)
        return params, noise, self.nets.dist.sample(params, noise)[0]

    def _scaling(self) -> tuple[Tensor, ...]:
        return self.obs_norm.scaling if self.config.normalize_obs else ()

    def _policy(self, obs: np.ndarray) -> Tensor:
        return self.nets.actor.module(self._normalized(self._to_device(obs)))  # type: ignore[no-any-return]

    def _normalized(self, obs: Tensor) -> Tensor:
        return self.obs_norm(obs) if self.config.normalize_obs else obs

    def _to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device, torch.get_default_dtype(), non_blocking=True)

    # Learning

    def _due_updates(self) -> int:
        """Number of updates that are due after the last step."""
        if self.env_steps > self.config.learning_starts:
            self._updates_due += self.config.updates_per_step * self.envs.num_envs
        due = int(self._updates_due)
        self._updates_due -= due
        return due

    def _learn(self, rates: Rates, seen: Seen) -> None:
        """One update from a fresh batch."""
        probe = self.probe
        probe.event("update", len(seen.critic))
        index = self.replay.draw(self.config.batch_size, self.streams.torch("replay"))
        index = probe("replay_index", index)
        batch = self._batch(index)
        self._num_updates += 1
        both = self._num_updates % self.config.policy_delay == 0
        stream, rows = self.streams.torch("update"), self.config.batch_size
        # The policy's noise (B, A) is drawn first, the critics' last.
        draws = [
            probe("update_noise", self.nets.dist.noise(rows, stream))
            for _ in range(1 + self.config.policy_delay * both)
        ]
        if both:
            self.learner, report, actor_report = self._update_both(
                self.learner, batch, draws[-1], draws[:-1], rates
            )
            if self.engine.compiles:
                report, actor_report = probe("critic/loss", report), probe("actor/loss", actor_report)
            seen.actor.append(actor_report)
        else:
            self.learner, report = self._update_critic(self.learner, batch, draws[0], rates)
            report = probe("critic/loss", report) if self.engine.compiles else report
        if self.engine.compiles:
            self._show_learner(probe)
        if both:
            self.nets.actor.assign(self.learner.actor)
        seen.index.append(index)
        seen.critic.append(report)

    def _batch(self, index: Tensor) -> Batch:
        """The transitions in the places `index` (B,), as the networks see them."""
        batch = self.replay.take(index)
        return batch._replace(obs=self._normalized(batch.obs), next_obs=self._normalized(batch.next_obs))

    def _show_learner(self, probe: Probe) -> None:
        """Show the values that a compiled update cannot show while it works."""
        for item, value in self._probes().items():
            probe(item, value)

    def _one_critic_update(
        self, learner: Learner, batch: Batch, noise: Tensor, rates: Rates
    ) -> tuple[Learner, Tensor]:
        """Critics and their targets; nothing else is touched."""
        show, config = self._inside, self.config
        grad, parts = gradient(
            critic_loss, learner.critic, learner, self.nets, batch, noise, config.gamma, show
        )
        report = show("critic/loss", torch.stack(parts))
        grad = show("critic/gradient", grad)
        critic, state = adam(learner.critic, grad, learner.critic_adam, rates.critic, config.adam_eps)
        state = shown(show, "critic/optimizer", state)
        critic = show("critic/params", critic)
        target = show("critic/target_params", polyak(learner.target, critic, config.tau))
        return learner._replace(critic=critic, critic_adam=state, target=target), report

    def _one_full_update(
        self, learner: Learner, batch: Batch, noise: Tensor, actor_noise: list[Tensor], rates: Rates
    ) -> tuple[Learner, Tensor, Tensor]:
        """Critics, then policy and temperature once for every noise in `actor_noise`."""
        eps, show = self.config.adam_eps, self._inside
        learner, critic_report = self._one_critic_update(learner, batch, noise, rates)
        reports = []
        for draw in actor_noise:
            grad, (loss, log_prob) = gradient(actor_loss, learner.actor, learner, self.nets, batch.obs, draw)
            loss = show("actor/loss", loss)
            grad = show("actor/gradient", grad)
            actor, state = adam(learner.actor, grad, learner.actor_adam, rates.actor, eps)
            state = shown(show, "actor/optimizer", state)
            actor = show("actor/params", actor)
            grad, loss_alpha = gradient(alpha_loss, learner.log_alpha, log_prob, self.target_entropy)
            loss_alpha = show("alpha/loss", loss_alpha)
            grad = show("alpha/gradient", grad)
            alpha = kernels.exp(learner.log_alpha).squeeze()
            reports.append(torch.stack([loss, -log_prob, loss_alpha, alpha]))
            learner = learner._replace(actor=actor, actor_adam=state)
            if self.config.learn_alpha:
                log_alpha, state = adam(learner.log_alpha, grad, learner.alpha_adam, rates.alpha, eps)
                state = shown(show, "alpha/optimizer", state)
                log_alpha = show("alpha/log_alpha", log_alpha)
                learner = learner._replace(log_alpha=log_alpha, alpha_adam=state)
        return learner, critic_report, torch.stack(reports).mean(0)

    def _inside(self, item: str, value: Tensor) -> Tensor:
        """`value` through the probe, where it can be reached: from a compiled program it cannot."""
        return value if self.engine.compiles else self.probe(item, value)

    # Acting and state

    def forward_passes(self) -> Mapping[str, ForwardPass]:
        """Policy and both critics, with the batches of acting and learning."""
        actor, critic, codec = self.nets.actor, self.nets.critic, self.envs.codec
        batches = (self.envs.num_envs, self.config.batch_size)

        def values(rows: Tensor) -> Tensor:
            q: Tensor = critic.call(self.learner.critic, *rows.split([codec.obs_size, codec.action_size], 1))
            return q.T

        return {
            "policy": ForwardPass(actor.module, codec.obs_size, batches),
            "value": ForwardPass(values, codec.obs_size + codec.action_size, batches),
        }

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

    def progress(self) -> dict[str, Any]:
        """The environments, what they showed last, and how many transitions there were."""
        if self._obs is None:
            return {}
        obs = torch.from_numpy(self._obs.copy())
        return {"obs": obs, "envs": self.envs.state_dict(), "added": self.replay.added}

    def load_progress(self, state: Mapping[str, Any], experience: Iterable[Mapping[str, Tensor]]) -> None:
        """Go on there, with the transitions held then."""
        if state:
            self.envs.load_state_dict(state["envs"])
            self._obs = state["obs"].numpy()
            self.replay.restore(int(state["added"]), experience)

    def experience(self, first: int) -> Experience | None:
        """Transitions from number `first` on."""
        return self.replay.since(first)

    def close(self) -> None:
        """Release the environments."""
        self.envs.close()
