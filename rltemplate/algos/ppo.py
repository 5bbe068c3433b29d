"""Proximal policy optimisation (Schulman et al. 2017, arXiv 1707.06347).

Where the details are that decide whether it learns (numbers as in Huang et al. 2022, "The 37 implementation
details of proximal policy optimization"):
  orthogonal initialisation, small last policy layer (2)      ActorCritic
  state-independent log standard deviation (c1-c3)            ActorCritic
  generalised advantage estimation (5)                        compute_gae
  truncation bootstraps with the value of the final obs       PPO._targets
  advantage normalisation per minibatch (7)                   ppo_loss
  clipped policy loss (8), optional value clipping (9)        ppo_loss
  global gradient clipping (11), Adam eps (3), decay (4)      PPO._one_update, PPO.learning_rate
  observation and reward scaling (c7, c8)                     PPO.train_iteration
What may surprise: observation statistics are frozen during an iteration and merged at its end, so that the
rollout and all passes over it see one and the same normalisation, and the first ratio is 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from rltemplate.config.algorithms import PPOConfig, Schedule
from rltemplate.determinism import kernels
from rltemplate.envs.envs import Envs
from rltemplate.learning.distributions import Categorical, DiagGaussian
from rltemplate.learning.engine import Engine
from rltemplate.learning.networks import mlp
from rltemplate.learning.normalize import RunningNorm
from rltemplate.learning.optim import (
    AdamState,
    FlatModule,
    adam,
    adam_init,
    clip_by_norm,
    gradient,
    shown,
)
from rltemplate.rng import Streams
from rltemplate.types import Experience, ForwardPass, IterationResult, Probe


class ActorCritic(nn.Module):
    """Separate networks for policy and value."""

    def __init__(
        self, config: PPOConfig, obs_size: int, dist: Categorical | DiagGaussian, rng: torch.Generator
    ):
        super().__init__()
        gaussian = isinstance(dist, DiagGaussian)
        out = dist.size if isinstance(dist, DiagGaussian) else dist.param_size
        build = partial(mlp, activation=config.activation.name, generator=rng)
        gain = (0.01, 1.0) if config.orthogonal_init else (None, None)
        self.actor = build([obs_size, *config.hidden_sizes, out], orthogonal_gain=gain[0])
        self.critic = build([obs_size, *config.hidden_sizes, 1], orthogonal_gain=gain[1])
        self.log_std = nn.Parameter(torch.full((out,), config.log_std_init)) if gaussian else None

    def policy(self, obs: Tensor) -> Tensor:
        """Parameters of the action distribution (B, P)."""
        head = self.actor(obs)
        return head if self.log_std is None else torch.cat([head, self.log_std.expand_as(head)], -1)

    def value(self, obs: Tensor) -> Tensor:
        """Expected discounted (and scaled) return (B,)."""
        return self.critic(obs).squeeze(-1)  # type: ignore[no-any-return]

    def forward(self, obs: Tensor, policy_only: bool = False) -> Any:
        """Policy parameters (B, P) and value (B,), or the former alone."""
        return self.policy(obs) if policy_only else (self.policy(obs), self.value(obs))


class Rollout(NamedTuple):
    """T steps of N environments. Observations are normalised, rewards as the environment gave them."""

    obs: Tensor  # (T, N, O)
    action: Tensor  # (T, N, A)
    log_prob: Tensor  # (T, N)
    reward: Tensor  # (T, N)
    terminated: Tensor  # (T, N) 1.0 where the task ended
    truncated: Tensor  # (T, N) 1.0 where the clock ended the episode
    last_obs: Tensor  # (N, O) after the last step
    final_obs: Tensor  # (K, O) the observations in which the K truncated episodes ended, in order of (t, n)


class Minibatch(NamedTuple):
    """The data of one update."""

    obs: Tensor  # (B, O)
    action: Tensor  # (B, A)
    log_prob: Tensor  # (B,) under the policy that acted
    advantage: Tensor  # (B,)
    ret: Tensor  # (B,) target of the value
    value: Tensor  # (B,) estimate when the target was made


DECISION = ("normalized_obs", "policy", "noise", "action", "log_prob")
METRICS = (
    "loss/policy",
    "loss/value",
    "policy/entropy",
    "policy/approx_kl",
    "policy/clip_fraction",
    "policy/max_ratio_error",
    "optim/grad_norm",
)


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


def ppo_loss(
    flat: Tensor, net: FlatModule, dist: Categorical | DiagGaussian, config: PPOConfig, mb: Minibatch
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The clipped surrogate, value and entropy losses, and what to report of them."""
    params, value = net.call(flat, mb.obs)
    log_ratio = dist.log_prob(params, mb.action) - mb.log_prob  # (B,)
    ratio = kernels.exp(log_ratio)  # (B,)
    advantage = mb.advantage
    if config.normalize_advantage:
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    clipped = ratio.clamp(1.0 - config.clip_coef, 1.0 + config.clip_coef)
    policy_loss = torch.maximum(-advantage * ratio, -advantage * clipped).mean()  # eq. 7
    assert ratio.shape == value.shape == mb.ret.shape == advantage.shape
    error = (value - mb.ret).square()
    if config.clip_value_loss:
        near = mb.value + (value - mb.value).clamp(-config.clip_coef, config.clip_coef)
        error = torch.maximum(error, (near - mb.ret).square())
    value_loss = 0.5 * error.mean()
    entropy = dist.entropy(params).mean()
    loss = policy_loss + config.vf_coef * value_loss - config.ent_coef * entropy
    approx_kl = (ratio - 1.0 - log_ratio).mean()  # the k3 estimator of Schulman, joschu.net/blog/kl-approx
    clip_fraction = ((ratio - 1.0).abs() > config.clip_coef).to(ratio.dtype).mean()
    return loss, (policy_loss, value_loss, entropy, approx_kl, clip_fraction, (ratio - 1.0).abs().max())


class PPO:
    """The algorithm over N environments."""

    def __init__(
        self, config: PPOConfig, envs: Envs, streams: Streams, total_env_steps: int, engine: Engine
    ) -> None:
        self.config = config
        self.envs = envs
        self.streams = streams
        self.device = streams.device
        self.total_env_steps = total_env_steps
        self.env_steps = 0
        self.probe = Probe()
        self.engine = engine
        codec = envs.codec
        self.dist = DiagGaussian(codec.action_size) if codec.continuous else Categorical(codec.nvec)
        init = streams.torch("init", device="cpu")  # the same weights whatever the device
        self.net = FlatModule(ActorCritic(config, codec.obs_size, self.dist, init).to(self.device))
        self.adam = adam_init(self.net.flat)
        self.obs_norm = RunningNorm(codec.obs_size, config.obs_clip).to(self.device)
        self.return_norm = RunningNorm(1, config.reward_clip).to(self.device)
        self._running_return = torch.zeros(envs.num_envs, device=self.device)  # (N,) discounted, unscaled
        self._decide = engine(self._one_decision)
        self._update = engine(self._one_update)
        self._num_updates = 0  # in this iteration
        self._obs: Tensor | None = None  # (N, O) unscaled, to act on next

    @property
    def agent(self) -> ActorCritic:
        """The networks, holding the current parameters."""
        assert isinstance(self.net.module, ActorCritic)
        return self.net.module

    @property
    def learning_rate(self) -> float:
        """Adam's step size for the coming iteration."""
        linear = self.config.learning_rate_schedule is Schedule.linear
        left = max(0.0, 1.0 - self.env_steps / self.total_env_steps) if linear else 1.0
        return self.config.learning_rate * left

    def train_iteration(self) -> IterationResult:
        """One rollout, and the passes over it."""
        rate = torch.tensor(self.learning_rate, device=self.device)
        with torch.no_grad():
            rollout, raw_obs, episodes = self._collect()
            reward = self._scaled_reward(rollout) if self.config.normalize_reward else rollout.reward
            metrics, probes = self._learn(rollout, reward, rate)
            self.probe.event("end")
            if self.config.normalize_obs:
                self.obs_norm.update(raw_obs.flatten(0, 1))
                probes |= self.obs_norm.show("obs_norm", self.probe)
            if self.config.normalize_reward:
                probes |= self.return_norm.show("return_norm", self.probe)
        metrics["optim/learning_rate"] = rate
        seen = {"obs": raw_obs, "normalized_obs": rollout.obs}
        seen |= {name: value for name, value in rollout._asdict().items() if name != "obs"}
        return IterationResult(metrics, episodes, seen | {"scaled_reward": reward} | probes)

    def _begin(self) -> Tensor:
        """The first weights and observations."""
        self.probe.event("init")
        self.net.show(self.probe)
        self.probe.event("reset")
        return self._to_device(self.probe("obs", self.envs.reset()))

    # Collecting

    def _normalized(self, obs: Tensor) -> Tensor:
        return self.obs_norm(obs) if self.config.normalize_obs else obs

    def _collect(self) -> tuple[Rollout, Tensor, list[Any]]:
        """T steps with the present policy: the rollout, its unscaled observations, and ended episodes."""
        num_steps, num_envs, codec = self.config.num_steps, self.envs.num_envs, self.envs.codec
        noise_stream, probe = self.streams.torch("action"), self.probe
        if self._obs is None:
            self._obs = self._begin()
        probe.begin(self)
        flat = self.net.current
        scaling = self.obs_norm.scaling if self.config.normalize_obs else ()
        scalars = np.empty((3, num_steps, num_envs), np.float32)  # reward, terminated, truncated
        raw_obs: list[Tensor] = []  # (N, O) of each step, unscaled
        decisions: list[tuple[Tensor, ...]] = []  # observation, action, log-probability of each step
        final_obs, episodes = [], []
        for t in range(num_steps):
            probe.event("step", t)
            raw_obs.append(probe("obs", self._obs))
            decision = self._decide(flat, scaling, raw_obs[-1], self._noise(noise_stream))
            obs, _, _, action, log_prob = decision
            if self.engine.compiles:
                for item, value in zip(DECISION, decision, strict=True):
                    probe(item, value)
            decisions.append((obs, action, log_prob))
            step = self.envs.step(action.cpu().numpy())
            scalars[0, t] = probe("reward", step.reward.astype(np.float32))
            scalars[1, t] = probe("terminated", step.terminated)
            scalars[2, t] = probe("truncated", step.truncated)
            next_obs = probe("next_obs", step.next_obs)
            if step.episodes:
                cut = step.truncated & ~step.terminated
                final_obs.append(next_obs[cut])
                episodes += step.episodes
            self._obs = self._to_device(step.obs)
        self.env_steps += num_steps * num_envs
        obs, action, log_prob = (torch.stack(values) for values in zip(*decisions, strict=True))
        reward, terminated, truncated = self._to_device(scalars).unbind(0)
        ends = np.concatenate(final_obs) if final_obs else np.empty((0, codec.obs_size), np.float32)
        last = self._normalized(self._obs)
        final = self._normalized(self._to_device(ends))
        truncated = truncated * (1.0 - terminated)  # an end that is both is an end
        rollout = Rollout(obs, action, log_prob, reward, terminated, truncated, last, final)
        return rollout, torch.stack(raw_obs), episodes

    def _one_decision(
        self, flat: Tensor, scaling: tuple[Tensor, ...], obs: Tensor, noise: Tensor
    ) -> tuple[Tensor, ...]:
        """The values that DECISION names, for unscaled observations (N, O)."""
        show = self._inside
        if scaling:
            obs = self.obs_norm.scaled(obs, *scaling)
        obs = show("normalized_obs", obs)
        params = show("policy", self.net.call(flat, obs, True))
        noise = show("noise", noise)
        action = show("action", self.dist.sample(params, noise))
        log_prob = show("log_prob", self.dist.log_prob(params, action))
        return obs, params, noise, action, log_prob

    def _noise(self, stream: torch.Generator) -> Tensor:
        return self.dist.noise(self.envs.num_envs, stream)

    def _to_device(self, array: np.ndarray) -> Tensor:
        # Nothing waits for a GPU: what the system may page out is taken over before the call returns.
        return torch.from_numpy(array).to(self.device, torch.get_default_dtype(), non_blocking=True)

    def _scaled_reward(self, rollout: Rollout) -> Tensor:
        """Rewards (T, N) divided by the running deviation of the discounted return."""
        keep = self.config.gamma * (1.0 - torch.maximum(rollout.terminated, rollout.truncated))
        running = self._running_return
        returns = []  # (N,) of each step
        for reward, keep_t in zip(rollout.reward.unbind(), keep.unbind(), strict=True):
            returns.append(running + reward)
            running = returns[-1] * keep_t
        self._running_return = running
        self.return_norm.update(torch.cat(returns)[:, None])
        return self.return_norm.scale_only(rollout.reward)

    # Learning

    def _targets(self, rollout: Rollout, reward: Tensor, epoch: int = 0) -> tuple[Tensor, Tensor]:
        """Advantages and values (T, N), from one pass of the value network."""
        self.probe.event("targets", epoch)
        reward = self.probe("scaled_reward", reward)
        num_steps, num_envs = reward.shape
        every = torch.cat([rollout.obs.flatten(0, 1), rollout.last_obs, rollout.final_obs])
        value, last, final = self.probe("value", self.agent.value(every)).split(
            [num_steps * num_envs, num_envs, len(rollout.final_obs)]
        )
        value = value.view(num_steps, num_envs)
        next_value = torch.cat([value[1:], last[None]])  # (T, N)
        next_value[rollout.truncated > 0] = final  # the successor before the reset, not the one after
        done = torch.maximum(rollout.terminated, rollout.truncated)
        gamma, gae_lambda = self.config.gamma, self.config.gae_lambda
        advantage = compute_gae(reward, value, next_value, rollout.terminated, done, gamma, gae_lambda)
        return self.probe("advantage", advantage), value

    def _learn(
        self, rollout: Rollout, reward: Tensor, rate: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """All passes over the rollout; metrics are means over updates."""
        config, probe = self.config, self.probe
        total = reward.numel()
        size = total // config.num_minibatches
        shuffle = self.streams.torch("minibatch", device="cpu")
        params = self.agent.policy(rollout.obs.flatten(0, 1))
        log_ratio = self.dist.log_prob(params, rollout.action.flatten(0, 1)) - rollout.log_prob.flatten()
        first_error = (kernels.exp(log_ratio) - 1.0).abs().max()
        advantage, value = self._targets(rollout, reward)
        probes = {"value": value, "advantage": advantage}
        flat, state = self.net.flat.clone(), self.adam
        reports: list[Tensor] = []
        orders: list[Tensor] = []
        self._num_updates = 0
        explained = 1.0 - advantage.var() / ((advantage + value).var() + 1e-8)
        for epoch in range(config.update_epochs):
            if epoch > 0 and config.recompute_advantage:
                self.net.assign(flat)
                advantage, value = self._targets(rollout, reward, epoch)
            data = (rollout.obs, rollout.action, rollout.log_prob, advantage, advantage + value, value)
            probe.event("epoch", epoch)
            order = probe("order", torch.randperm(total, generator=shuffle).to(self.device))
            orders.append(order)
            shuffled = [x.flatten(0, 1).index_select(0, order).unflatten(0, (-1, size)) for x in data]
            flat, state, seen = self._one_epoch(flat, state, Minibatch(*shuffled), rate)
            reports += seen
            if config.target_kl is not None:
                recent = torch.stack(reports[-config.num_minibatches :])[:, METRICS.index("policy/approx_kl")]
                if recent.mean().item() > config.target_kl:
                    break
        self.net.assign(flat)
        self.adam = state
        table = torch.stack(reports)  # (updates, len(METRICS))
        metrics = dict(zip(METRICS, table.mean(0).unbind(), strict=True))
        # The largest over the whole rollout, and over the first minibatch in the shape that updates have.
        del metrics["policy/max_ratio_error"]
        first_seen = table[0, METRICS.index("policy/max_ratio_error")]
        metrics["policy/first_ratio_max_error"] = torch.maximum(first_error, first_seen)
        metrics["value/explained_variance"] = explained
        probes |= {"order": torch.stack(orders), "loss": table}
        return metrics, probes | {"optimizer/mu": state.mu, "optimizer/nu": state.nu, "params": flat}

    def _one_epoch(
        self, flat: Tensor, state: AdamState, minibatches: Minibatch, rate: Tensor
    ) -> tuple[Tensor, AdamState, list[Tensor]]:
        """One update after the other, from minibatches (M, B, ...)."""
        probe = self.probe
        reports = []
        for parts in zip(*minibatches, strict=True):
            probe.event("update", self._num_updates)
            self._num_updates += 1
            flat, state, report = self._update(flat, state, Minibatch(*parts), rate)
            reports.append(probe("loss", report) if self.engine.compiles else report)
            state = shown(probe, "optimizer", state)
            flat = probe("params", flat)
        return flat, state, reports

    def _one_update(
        self, flat: Tensor, state: AdamState, mb: Minibatch, rate: Tensor
    ) -> tuple[Tensor, AdamState, Tensor]:
        """Loss, gradient, clipping and Adam: parameters in, parameters out, nothing else touched."""
        grad, report = gradient(ppo_loss, flat, self.net, self.dist, self.config, mb)
        losses = self._inside("loss", torch.stack(report))
        grad, norm = clip_by_norm(self._inside("gradient", grad), self.config.max_grad_norm)
        flat, state = adam(flat, grad, state, rate, self.config.adam_eps)
        return flat, state, torch.cat([losses, norm[None]])

    def _inside(self, item: str, value: Tensor) -> Tensor:
        """`value` through the probe, where it can be reached: from a compiled program it cannot."""
        return value if self.engine.compiles else self.probe(item, value)

    # Acting and state

    def forward_passes(self) -> Mapping[str, ForwardPass]:
        """Policy and value, with the batches of rollout, targets and updates."""
        num_envs, rollout = self.envs.num_envs, self.config.num_steps * self.envs.num_envs
        batches = (num_envs, rollout // self.config.num_minibatches, rollout, rollout + num_envs)
        size = self.envs.codec.obs_size
        return {
            "policy": ForwardPass(self.agent.policy, size, batches),
            "value": ForwardPass(self.agent.value, size, batches),
        }

    @torch.no_grad()
    def act(self, obs: np.ndarray, deterministic: bool = True) -> np.ndarray:
        """Actions (N, A) for encoded observations (N, O); random ones come from a stream of their own."""
        params = self.agent.policy(self._normalized(self._to_device(obs)))
        if deterministic:
            return self.dist.mode(params).cpu().numpy()
        return self.dist.sample(params, self.dist.noise(len(obs), self.streams.torch("act"))).cpu().numpy()

    def state_dict(self) -> dict[str, Any]:
        """Copies of parameters, optimiser, statistics, streams and counters."""
        return {
            "env_steps": self.env_steps,
            "net": self.net.flat.clone(),
            "adam": [x.clone() for x in self.adam],
            "obs_norm": self.obs_norm.snapshot(),
            "return_norm": self.return_norm.snapshot(),
            "running_return": self._running_return.clone(),
            "streams": self.streams.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over `state`."""
        self.env_steps = int(state["env_steps"])
        self.net.assign(state["net"].to(self.device))
        self.adam = AdamState(*(x.to(self.device) for x in state["adam"]))
        self.obs_norm.load_state_dict(state["obs_norm"])
        self.return_norm.load_state_dict(state["return_norm"])
        self._running_return = state["running_return"].to(self.device)
        self.streams.load_state_dict(state["streams"])

    def progress(self) -> dict[str, Any]:
        """The environments, and what they showed last."""
        return {} if self._obs is None else {"obs": self._obs.clone(), "envs": self.envs.state_dict()}

    def load_progress(self, state: Mapping[str, Any], experience: Iterable[Mapping[str, Tensor]]) -> None:
        """Go on there; a rollout ends with its iteration, so there is no experience to take over."""
        if state:
            self.envs.load_state_dict(state["envs"])
            self._obs = state["obs"].to(self.device)

    def experience(self, first: int) -> Experience | None:
        """None: a rollout is learned from at once."""
        return None

    def close(self) -> None:
        """Release the environments."""
        self.envs.close()
