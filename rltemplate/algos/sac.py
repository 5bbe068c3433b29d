"""Soft actor-critic with a learned temperature (Haarnoja et al. 2018, arXiv 1812.05905).

Details that decide whether it learns, and their places:
  two critics, the smaller one in targets and policy loss      SAC.critic_loss, SAC.actor_loss
  squashed Gaussian with bounded log standard deviation        distributions.SquashedGaussian
  temperature adapted to a target entropy of -A                SAC.alpha_loss
  truncation bootstraps, termination does not                  SAC.critic_loss, through `terminated`
  every `policy_delay` critic updates, as many of the policy   SAC.inputs
  uniform random actions before `learning_starts`              OffPolicyAlgorithm.explore
Form: functional, as in flax and optax: `update` takes all that is learned and returns it anew. The parameters
of a network are one flat vector, and `actor.apply(params, obs)` calls it. `engine` (runlab/engine.py) runs a
function as written or compiled. Inherited: `train_iteration`, `policy_step`, `batch`, `start`, `replay`
(learning/off_policy.py), and `scheduled`, `act`, `state_dict`, `envs`, `streams` (learning/algorithm.py).
What may surprise: updates are counted per environment step, summed over parallel environments. With 8
environments and updates_per_step=1 every vector step is followed by 8 updates, so that the number of
environments changes the speed and not the ratio of learning to data.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from runlab.determinism import kernels
from runlab.engine import Engine
from runlab.envs.envs import Envs
from runlab.rng import Streams

from ..learning.distributions import SquashedGaussian
from ..learning.networks import NETWORKS
from ..learning.off_policy import Noise, OffPolicyAlgorithm, TwinCritic, UpdateReport
from ..learning.optim import AdamState, FlatModule, adam, gradient, polyak
from ..learning.replay_buffer import Batch
from .sac_config import SACConfig


class Learned(NamedTuple):
    """Everything that an update changes."""

    actor: AdamState
    critic: AdamState
    target: Tensor  # (P,) of the target critics, which follow slowly
    alpha: AdamState  # the logarithm of the temperature (1,)


class LearningRates(NamedTuple):
    """Step sizes, 0-d."""

    actor: Tensor
    critic: Tensor
    alpha: Tensor


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


class SAC(OffPolicyAlgorithm[Learned, Inputs, LearningRates]):
    """The algorithm over N environments."""

    config: SACConfig
    dist: SquashedGaussian
    critic_metrics, actor_metrics = CriticMetrics, ActorMetrics

    def __init__(
        self, config: SACConfig, envs: Envs, streams: Streams, total_env_steps: int, engine: Engine
    ) -> None:
        super().__init__(envs, streams, total_env_steps, engine)
        self.config, obs_size, action_size = config, envs.codec.obs_size, envs.codec.action_size
        self.dist = SquashedGaussian(action_size, config.log_std_min, config.log_std_max)
        init = streams.torch("init")
        network = NETWORKS[config.network]
        policy = network([obs_size, *config.hidden_sizes, 2 * action_size], config.activation, init)
        self.actor = FlatModule(policy.to(self.device))
        critics = TwinCritic(config, obs_size, action_size, init, network)
        self.critic = FlatModule(critics.to(self.device))
        log_alpha = torch.full((1,), float(np.log(config.alpha_init)), device=self.device)
        self.target_entropy = -float(action_size) if config.target_entropy is None else config.target_entropy
        actor, critic = AdamState.init(self.actor.init_params), AdamState.init(self.critic.init_params)
        self.start(Learned(actor, critic, target=critic.params.clone(), alpha=AdamState.init(log_alpha)))

    def rates(self) -> LearningRates:
        config = self.config
        initial = config.actor_learning_rate, config.critic_learning_rate, config.alpha_learning_rate
        return LearningRates(*(self.scheduled(rate, config.learning_rate_schedule) for rate in initial))

    def inputs(self, index: Tensor, number: int, noise: Noise) -> Inputs:
        """The data of update `number`, counted from 1, from the rows `index` (B,) of the buffer."""
        delay = self.config.policy_delay
        actor_noise = tuple(noise() for _ in range(delay if number % delay == 0 else 0))
        return Inputs(self.batch(index), actor_noise, critic_noise=noise())

    def update(self, learned: Learned, inputs: Inputs, rates: LearningRates) -> tuple[UpdateReport, Learned]:
        """Critics and their targets, then policy and temperature once for every noise."""
        config, batch, reports = self.config, inputs.batch, []
        # The critics, by targets from the policy, target networks and temperature of before.
        critic_grad, (critic_metrics, td_target) = gradient(
            self.critic_loss, learned.critic.params, learned, batch, inputs.critic_noise
        )
        critic = adam(learned.critic, critic_grad, rates.critic, config.adam_eps)
        target, alpha = polyak(learned.target, critic.params, config.tau), learned.alpha
        learned = Learned(learned.actor, critic, target, alpha)
        for noise in inputs.actor_noise:
            # The policy, by the new critics; and the temperature, by the entropy before this step.
            log_alpha = alpha.params
            actor_grad, (loss, log_prob) = gradient(
                self.actor_loss, learned.actor.params, learned, batch.obs, noise
            )
            alpha_grad, loss_alpha = gradient(self.alpha_loss, log_alpha, log_prob)
            metrics = ActorMetrics(loss, -log_prob, loss_alpha, kernels.exp(log_alpha).squeeze())
            reports.append((torch.stack([*metrics]), actor_grad))
            actor = adam(learned.actor, actor_grad, rates.actor, config.adam_eps)
            if config.learn_alpha:
                alpha = adam(alpha, alpha_grad, rates.alpha, config.adam_eps)
            learned = Learned(actor, critic, target, alpha)
        actor_metrics, actor_grads = zip(*reports, strict=True) if reports else ((), ())
        stacked = torch.stack([*critic_metrics])  # a list: torch caches no program with a NamedTuple
        report = UpdateReport(td_target, stacked, critic_grad, actor_metrics, actor_grads)
        return report, learned

    def critic_loss(
        self, critic: Tensor, learned: Learned, batch: Batch, noise: Tensor
    ) -> tuple[Tensor, tuple[CriticMetrics, Tensor]]:
        """Squared error against the soft Bellman target, summed over the two critics (eq. 5, 6)."""
        dist_params = self.actor.apply(learned.actor.params, batch.next_obs)
        next_action, next_log_prob = self.dist.sample_log_prob(dist_params, noise)
        next_q = torch.minimum(*self.critic.apply(learned.target, batch.next_obs, next_action))  # (B,)
        soft_value = next_q - kernels.exp(learned.alpha.params) * next_log_prob
        td_target = batch.reward + self.config.gamma * (1.0 - batch.terminated) * soft_value  # (B,)
        td_target = td_target.detach()
        q = self.critic.apply(critic, batch.obs, batch.action)  # (2, B)
        assert q.shape == (2, *td_target.shape)
        loss = kernels.total((q - td_target).square().mean(1))
        return loss, (CriticMetrics(loss_critic=loss, critic_q_mean=q.mean()), td_target)

    def actor_loss(
        self, actor: Tensor, learned: Learned, obs: Tensor, noise: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """alpha * log pi - min Q for actions of the present policy (eq. 9), and the mean of log pi."""
        action, log_prob = self.dist.sample_log_prob(self.actor.apply(actor, obs), noise)
        # Not `min(0)`: its gradient is a scatter, which the compiler cannot fuse with other operations.
        q = torch.minimum(*self.critic.apply(learned.critic.params, obs, action))  # (B,)
        assert q.shape == log_prob.shape
        loss = (kernels.exp(learned.alpha.params) * log_prob - q).mean()
        return loss, (loss, log_prob.mean())

    def alpha_loss(self, log_alpha: Tensor, log_prob: Tensor) -> tuple[Tensor, Tensor]:
        """Raises the temperature while the entropy is below its target (eq. 18); `log_prob` is a mean ()."""
        loss = -kernels.total(kernels.exp(log_alpha) * (log_prob + self.target_entropy))
        return loss, loss
