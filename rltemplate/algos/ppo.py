"""Proximal policy optimisation (Schulman et al. 2017, arXiv 1707.06347).

Details that decide whether it learns, and their places (numbers as in Huang et al. 2022, "The 37
implementation details of proximal policy optimization"):
  orthogonal initialisation, small last policy layer (2)      ActorCritic
  state-independent log standard deviation (c1-c3)            ActorCritic
  generalised advantage estimation (5)                        on_policy.compute_gae
  truncation bootstraps with the value of the final obs       PPO.targets
  advantage normalisation per minibatch (7)                   PPO.loss
  clipped policy loss (8), optional value clipping (9)        PPO.loss
  early stopping at target_kl, over the whole rollout         PPO.learn
  global gradient clipping (11), Adam eps (3), decay (4)      PPO.update, PPO.coefficients
  observation and reward scaling and clipping (c6-c9)         normalize, OnPolicyAlgorithm.scaled_reward
Form: functional, as in flax and optax: `update` takes parameters and returns new ones. The parameters of both
networks are one flat vector, and `net.apply(params, obs, ...)` calls them. `engine` (runlab/engine.py) runs a
function as written or compiled. Inherited: `collect`, `scaled_reward`, `policy` (learning/on_policy.py), and
`begin_iteration`, `scheduled`, `act`, `state_dict`, `envs`, `streams`, `obs` (learning/algorithm.py).
What may surprise: observation statistics are frozen during a rollout and merged after it, so that the rollout
and all epochs over it have the same normalisation, and the first ratio is 1. With normalize_obs, a run begins
with a rollout only for statistics. If these came only after the first update, normalising would change the
policy as much as that update.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from runlab.determinism import kernels
from runlab.engine import Engine
from runlab.envs.envs import Envs
from runlab.interfaces import Episode, IterationResult
from runlab.rng import Streams

from ..learning.algorithm import columns_mean, named
from ..learning.distributions import Categorical, DiagGaussian
from ..learning.networks import Encoder, Rows, mlp
from ..learning.normalize import RunningMeanStd, Scaling, normalize
from ..learning.on_policy import Extras, OnPolicyAlgorithm, Rollout, RolloutStep, compute_gae, shuffled
from ..learning.optim import AdamState, FlatModule, adam, clip_by_norm, gradient
from .ppo_config import PPOConfig

FORBIDDEN = -1e9  # logit of an action; the compiler of programs for CPUs cannot write an infinite one


def encoder_of(
    config: PPOConfig, obs_size: int, image_shape: tuple[int, ...], rng: torch.Generator
) -> tuple[Rows | None, int]:
    """An encoder of the observations, None for vectors, and the size of its output."""
    if not image_shape:
        return None, obs_size
    init = config.orthogonal_init, rng
    encoder = Encoder(config.encoder, image_shape, config.encoder_size, *init, config.standardize_images)
    return Rows(encoder), config.encoder_size + obs_size - math.prod(image_shape)


class ActorCritic(nn.Module):
    """Separate networks for policy and value; for images one encoder, and a layer for each of both."""

    def __init__(
        self,
        config: PPOConfig,
        obs_size: int,
        dist: Categorical | DiagGaussian,
        rng: torch.Generator,
        image_shape: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        self.encoder, size = encoder_of(config, obs_size, image_shape, rng)
        sizes = [size] if image_shape else [size, *config.hidden_sizes]
        gaussian = isinstance(dist, DiagGaussian)
        build = partial(mlp, activation=config.activation, generator=rng)
        gain = (0.01, 1.0) if config.orthogonal_init else (None, None)
        self.actor = build([*sizes, dist.size], orthogonal_gain=gain[0])
        self.critic = build([*sizes, 1], orthogonal_gain=gain[1])
        self.log_std = nn.Parameter(torch.full((dist.size,), config.log_std_init)) if gaussian else None

    def forward(self, obs: Tensor, extras: Extras, *parts: str) -> tuple[Tensor, ...]:
        """One tensor per part: "policy" distribution parameters (B, P), "value" scaled returns (B,)."""
        obs = obs if self.encoder is None else self.encoder(obs)
        return tuple(
            self.policy(obs, extras) if part == "policy" else self.critic(obs).squeeze(-1) for part in parts
        )

    def policy(self, obs: Tensor, extras: Extras) -> Tensor:
        """Parameters of the action distribution (B, P)."""
        return self.action_params(self.actor(obs), extras)

    def action_params(self, head: Tensor, extras: Extras) -> Tensor:
        """Parameters (B, P) from the output of the last layer; 0 is the probability of a forbidden action."""
        if self.log_std is not None:
            return torch.cat([head, self.log_std.expand_as(head)], -1)
        mask = getattr(extras, "action_mask", ())
        return head.masked_fill(~mask, FORBIDDEN) if isinstance(mask, Tensor) else head


class PPOExtras(NamedTuple):
    """Data of a decision that an update gets again. Extras of a variant of PPO have an `action_mask` too."""

    action_mask: Tensor | tuple[()] = ()  # (B, P) bool, the allowed choices; () without masks


class PPOState(NamedTuple):
    """Everything that learning changes."""

    net: AdamState  # both networks and their optimiser
    obs_norm: RunningMeanStd
    return_norm: RunningMeanStd
    running_return: Tensor  # (N,) discounted, unscaled


class Targets(NamedTuple):
    """Advantages, and what they are made of."""

    scaled_reward: Tensor  # (T, N) as it is without normalize_reward; for the trace alone
    value: Tensor  # (T, N)
    advantage: Tensor  # (T, N)


class Minibatch(NamedTuple):
    """The data of one update."""

    obs: Tensor  # (B, O) normalised
    extras: Extras  # (B, ...) each
    action: Tensor  # (B, A)
    log_prob: Tensor  # (B,) under the policy that acted
    advantage: Tensor  # (B,)
    value: Tensor  # (B,) estimate from which the advantage was made


class Coefficients(NamedTuple):
    """Coefficients of an update that may follow a schedule, 0-d."""

    learning_rate: Tensor
    clip_coef: Tensor
    ent_coef: Tensor


class Metrics(NamedTuple):
    """Metrics of an update, each 0-d: `loss_policy` is logged as loss/policy."""

    loss_policy: Tensor
    loss_value: Tensor
    policy_entropy: Tensor
    policy_approx_kl: Tensor
    policy_clip_fraction: Tensor
    policy_first_ratio_max_error: Tensor
    optim_grad_norm: Tensor


class PPOReport(NamedTuple):
    """The results of an update besides its new parameters."""

    metrics: Tensor  # Metrics, stacked
    gradient: Tensor  # (P,) before clipping


def approx_kl(log_ratio: Tensor) -> Tensor:
    """Divergence of a policy from the one that acted, 0-d: k3 of Schulman, joschu.net/blog/kl-approx.html.

    Never negative. In float32 it would be, by rounding, where both policies are nearly the same.
    """
    log_ratio = log_ratio.double()
    return (torch.expm1(log_ratio) - log_ratio).clamp(min=0.0).mean().to(torch.get_default_dtype())


class PPO(OnPolicyAlgorithm):
    """The algorithm over N environments."""

    config: PPOConfig
    state: PPOState
    dist: Categorical | DiagGaussian
    # Parts of the network that the loss asks for; those after the second are further terms, weighted.
    parts: tuple[str, ...] = ("policy", "value")
    no_extras: Extras = PPOExtras()

    def __init__(
        self, config: PPOConfig, envs: Envs, streams: Streams, total_env_steps: int, engine: Engine
    ) -> None:
        super().__init__(envs, streams, total_env_steps, engine)
        self.config, codec = config, envs.codec
        self.mask_size, self.image_shape = getattr(codec, "mask_size", 0), getattr(codec, "image_shape", ())
        self.dist = DiagGaussian(codec.action_size) if codec.continuous else Categorical(codec.nvec)
        self.net = FlatModule(self.network(streams.torch("init")).to(self.device))
        self.state = PPOState(
            net=AdamState.init(self.net.init_params),
            obs_norm=RunningMeanStd.empty(0 if self.image_shape else self.num_seen, self.device),
            return_norm=RunningMeanStd.empty(1, self.device),
            running_return=torch.zeros(envs.num_envs, device=self.device),
        )

    def network(self, rng: torch.Generator) -> nn.Module:
        """A new network; a variant of PPO brings its own."""
        return ActorCritic(self.config, self.num_seen, self.dist, rng, self.image_shape)

    @torch.no_grad()
    def train_iteration(self) -> IterationResult:
        """One rollout, and the epochs over it."""
        self.begin_iteration()
        config, coef, episodes = self.config, self.coefficients(), list[Episode]()
        # Collect. A run's first iteration does it twice: its first rollout only fills the statistics.
        for _ in range(2 if config.normalize_obs and self.env_steps == 0 else 1):
            rollout: Rollout = self.engine.run_eager(self.collect, self.obs)
            episodes += rollout.episodes
            reward = rollout.reward
            if config.normalize_reward:
                old = self.state.return_norm, self.state.running_return
                reward, norm, running = self.scaled_reward(rollout, *old)
                self.state = self.state._replace(return_norm=norm, running_return=running)
            if config.normalize_obs:
                rows = self.seen(rollout.obs).flatten(0, 1)
                self.state = self.state._replace(obs_norm=self.state.obs_norm.merged(rows))
        # Learn.
        net, metrics = self.learn(rollout, reward, coef)
        self.state = self.state._replace(net=net)
        return IterationResult(metrics | {"optim/learning_rate": coef.learning_rate}, episodes)

    def coefficients(self) -> Coefficients:
        """The coefficients of the coming iteration."""
        config = self.config
        return Coefficients(
            learning_rate=self.scheduled(config.learning_rate, config.learning_rate_schedule),
            clip_coef=self.scheduled(config.clip_coef, config.clip_coef_schedule),
            ent_coef=self.scheduled(config.ent_coef, config.ent_coef_schedule),
        )

    def policy_step(
        self, params: Tensor, scaling: Scaling | None, obs: Tensor, memory: Extras, noise: Tensor
    ) -> RolloutStep:
        normalized_obs = normalize(self.seen(obs), scaling, self.config.obs_clip)
        dist_params, extras, memory = self.decide(params, normalized_obs, self.extras_of(obs), memory)
        action = self.dist.sample(dist_params, noise)
        log_prob = self.dist.log_prob(dist_params, action)
        return RolloutStep(normalized_obs, extras, dist_params, action, log_prob, memory)

    def extras_of(self, obs: Tensor) -> Extras:
        if not self.mask_size:
            return self.no_extras
        mask = obs[..., -self.mask_size :] > 0.5
        extras: Extras = self.no_extras._replace(action_mask=mask)  # type: ignore[attr-defined]
        return extras

    def decide(
        self, params: Tensor, obs: Tensor, extras: Extras, memory: Extras
    ) -> tuple[Tensor, Extras, Extras]:
        """The policy's output (N, P) in a rollout, the extras that the update gets, and the memory after."""
        return self.net.apply(params, obs, extras, "policy")[0], extras, memory

    def values(self, params: Tensor, rollout: Rollout) -> tuple[Tensor, Tensor, Tensor]:
        """Values (T, N) of all steps, (N,) of the last observations and (K,) of the final ones."""
        num_steps, num_envs = rollout.reward.shape
        every = torch.cat([rollout.normalized_obs.flatten(0, 1), rollout.last_obs, rollout.final_obs])
        sizes = [num_steps * num_envs, num_envs, len(rollout.final_obs)]
        value, last, final = self.net.apply(params, every, self.no_extras, "value")[0].split(sizes)
        return value.view(num_steps, num_envs), last, final

    def targets(self, params: Tensor, rollout: Rollout, reward: Tensor) -> Targets:
        """Advantages from one pass of the value network."""
        value, last, final = self.values(params, rollout)
        next_value = torch.cat([value[1:], last[None]])  # (T, N)
        next_value[rollout.truncated > 0] = final  # the successor before the reset, not the one after
        done = torch.maximum(rollout.terminated, rollout.truncated)
        gamma, gae_lambda = self.config.gamma, self.config.gae_lambda
        advantage = compute_gae(reward, value, next_value, rollout.terminated, done, gamma, gae_lambda)
        return Targets(reward, value, advantage)

    def learn(
        self, rollout: Rollout, reward: Tensor, coef: Coefficients
    ) -> tuple[AdamState, dict[str, Tensor]]:
        """All epochs over the rollout; metrics are means over updates."""
        config, net = self.config, self.state.net
        # Before any update: how far acting is from learning, the targets, and how well values explain them.
        log_ratio = self.log_ratio(net.params, rollout)
        first_error = (kernels.exp(log_ratio) - 1.0).abs().max()
        targets: Targets = self.engine.run_eager(self.targets, net.params, rollout, reward)
        returns = targets.advantage + targets.value
        explained = 1.0 - targets.advantage.var() / returns.var().clamp(min=1e-30)
        # Of equal returns nothing can be explained; their variance is that of rounding.
        explained = torch.where(returns.var() > 1e-12 * returns.square().mean(), explained, 0.0)
        # The epochs, until the policy is too far from the one that acted.
        tables: list[Tensor] = []  # (minibatches, len(Metrics)) of each epoch
        for epoch in range(config.update_epochs):
            if epoch > 0 and config.recompute_advantage:
                targets = self.engine.run_eager(self.targets, net.params, rollout, reward)
            net, metrics_of_epoch = self.one_epoch(net, rollout, targets, coef)
            tables.append(metrics_of_epoch)
            if config.target_kl is not None:
                kl = approx_kl(self.log_ratio(net.params, rollout)).item()
                if kl > config.target_kl:
                    break
        # The larger of two errors: of the rollout in one batch, and of the first minibatch, which may round
        # differently.
        table = torch.cat(tables)  # (updates, len(Metrics))
        error = torch.maximum(first_error, Metrics(*table[0]).policy_first_ratio_max_error)
        metrics = Metrics(*columns_mean(table))._replace(policy_first_ratio_max_error=error)
        further = {
            "value/explained_variance": explained,
            "policy/rollout_kl": approx_kl(log_ratio),
            "policy/rollout_extreme": (log_ratio.abs() > math.log(2.0)).to(log_ratio.dtype).mean(),
        }
        if config.target_kl is not None:
            further["optim/epochs"] = torch.tensor(float(len(tables)), device=self.device)
        return net, named(metrics) | further

    def one_epoch(
        self, net: AdamState, rollout: Rollout, targets: Targets, coef: Coefficients
    ) -> tuple[AdamState, Tensor]:
        """The updates of one epoch in a new order, and their metrics (minibatches, len(Metrics))."""
        decisions = rollout.normalized_obs, rollout.extras, rollout.action, rollout.log_prob
        data = self.samples(Minibatch(*decisions, targets.advantage, targets.value))
        order = self.streams.draw("minibatch", torch.randperm, len(data.obs)).to(self.device)
        return self.engine.scan(self.update, net, shuffled(data, order, self.config.num_minibatches), coef)

    def rehearse_updates(self, net: AdamState, rollout: Rollout) -> None:
        self.one_epoch(net, rollout, self.targets(net.params, rollout, rollout.reward), self.coefficients())

    def log_ratio(self, params: Tensor, rollout: Rollout) -> Tensor:
        """Log-probabilities (T * N,) of all actions of a rollout, less those under the policy that acted."""
        decisions = rollout.normalized_obs, rollout.extras, rollout.action, rollout.log_prob
        obs, extras, action, log_prob = self.samples(decisions)
        (dist_params,) = self.net.apply(params, obs, extras, "policy")  # (T * N, P)
        return self.dist.log_prob(dist_params, action) - log_prob

    def update(self, net: AdamState, mb: Minibatch, coef: Coefficients) -> tuple[PPOReport, AdamState]:
        """Loss, gradient, clipping and Adam: parameters in, parameters out, nothing else touched."""
        config = self.config
        grad, metrics = gradient(self.loss, net.params, mb, coef)
        clipped, norm = clip_by_norm(grad, config.max_grad_norm)
        stacked = torch.stack([*Metrics(**metrics, optim_grad_norm=norm)])
        return PPOReport(stacked, grad), adam(net, clipped, coef.learning_rate, config.adam_eps)

    def loss(self, params: Tensor, mb: Minibatch, coef: Coefficients) -> tuple[Tensor, dict[str, Tensor]]:
        """The clipped surrogate, value and entropy losses, and their metrics."""
        config, clip = self.config, coef.clip_coef
        dist_params, value, *further = self.net.apply(params, mb.obs, mb.extras, *self.parts)
        log_ratio = self.dist.log_prob(dist_params, mb.action) - mb.log_prob  # (B,)
        ratio = kernels.exp(log_ratio)  # (B,)
        advantage, ret = mb.advantage, mb.advantage + mb.value  # (B,) each
        if config.normalize_advantage:
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        clipped = ratio.clamp(1.0 - clip, 1.0 + clip)
        policy_loss = torch.maximum(-advantage * ratio, -advantage * clipped).mean()  # eq. 7
        assert ratio.shape == value.shape == ret.shape == advantage.shape
        error = (value - ret).square()
        if config.clip_value_loss:
            near = mb.value + (value - mb.value).clamp(-clip, clip)
            error = torch.maximum(error, (near - ret).square())
        value_loss = 0.5 * error.mean()
        entropy = self.dist.entropy(dist_params).mean()
        loss = policy_loss + config.vf_coef * value_loss - coef.ent_coef * entropy
        return sum(further, loss), {
            "loss_policy": policy_loss,
            "loss_value": value_loss,
            "policy_entropy": entropy,
            "policy_approx_kl": approx_kl(log_ratio),
            "policy_clip_fraction": ((ratio - 1.0).abs() > clip).to(ratio.dtype).mean(),
            "policy_first_ratio_max_error": (ratio - 1.0).abs().max(),
        }
