"""Soft actor-critic, step by step."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Normal, TanhTransform, TransformedDistribution
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from references.surroundings import Blocks, Copies, Outcome, Statistics, network, optimised
from rltemplate.algos.sac_config import SACConfig
from runlab.rng import Streams

Transition = tuple[Tensor, Tensor, Outcome]  # observation (O,), action (A,) and what followed


def built(sizes: list[int], config: SACConfig) -> nn.Module:
    """The network of `config`."""
    if config.network == "mlp":
        return network(sizes, config.activation)
    size_in, *hidden, size_out = sizes
    return Blocks(size_in, hidden[0], len(hidden), size_out, config.activation)


class Critics(nn.Module):
    """Two estimates of one value."""

    def __init__(self, sizes: list[int], config: SACConfig) -> None:
        super().__init__()
        self.q1, self.q2 = (built(sizes, config) for _ in range(2))

    def forward(self, obs: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """(B,) each."""
        both = torch.cat([obs, action], 1)
        return self.q1(both)[:, 0], self.q2(both)[:, 0]


class ReferenceSAC:
    """The algorithm over N environments."""

    def __init__(
        self, config: SACConfig, envs: Copies, streams: Streams, total: int, actor: Tensor, critics: Tensor
    ) -> None:
        self.config, self.envs, self.streams, self.total = config, envs, streams, total
        self.obs = envs.first_obs
        obs_size, hidden = self.obs.shape[1], config.hidden_sizes
        self.size = int(np.prod(envs.space.shape or ()))
        self.actor = built([obs_size, *hidden, 2 * self.size], config)
        self.critics = Critics([obs_size + self.size, *hidden, 1], config)
        vector_to_parameters(actor, self.actor.parameters())
        vector_to_parameters(critics, self.critics.parameters())
        self.targets = copy.deepcopy(self.critics)
        self.average = AveragedModel(self.actor, multi_avg_fn=self.averaged)
        self.average.update_parameters(self.actor)  # the first call copies
        self.log_alpha = nn.Parameter(torch.tensor(config.alpha_init).log())
        learned = {
            "actor": self.actor.parameters(),
            "critic": self.critics.parameters(),
            "alpha": [self.log_alpha],
        }
        self.optimizers = {
            name: torch.optim.Adam(parameters, eps=config.adam_eps, foreach=False)
            for name, parameters in learned.items()
        }
        self.obs_norm = Statistics(bool(config.normalize_obs), config.obs_clip, obs_size)
        self.replay: dict[int, Transition] = {}  # by place
        self.added = self.env_steps = self.updates = 0
        self.due = 0.0

    def sample(self, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions (B, A) and their log-densities (B,)."""
        mean, raw = self.actor(obs).chunk(2, 1)
        low, high = self.config.log_std_min, self.config.log_std_max
        deviation = (low + (high - low) * (raw.tanh() + 1.0) / 2.0).exp()
        squash = TanhTransform(cache_size=1)  # remembers what an action was before it was squashed
        action = squash(mean + deviation * noise)
        density = TransformedDistribution(Normal(mean, deviation), squash)
        return action, density.log_prob(action).sum(1)

    def averaged(self, averages: Any, newest: Any, count: Any) -> None:
        """Each iteration counts as much until what is older than `policy_average_steps` counts 1/e."""
        num = len(self.envs.envs)
        steps = max(1, self.config.steps_per_iteration // num) * num
        iterations = max(1.0, (self.env_steps - self.config.learning_starts) / steps)
        kept = min(math.exp(-steps / max(1, self.config.policy_average_steps)), 1.0 - 1.0 / iterations)
        get_ema_multi_avg_fn(kept)(averages, newest, count)

    def train_iteration(self) -> dict[str, float]:
        """Environment steps, each followed by its updates; the metrics, averaged over updates."""
        config, num = self.config, len(self.envs.envs)
        left = 1.0
        if config.learning_rate_schedule.name == "linear":
            left = max(0.0, 1.0 - self.env_steps / self.total)
        for name, optimizer in self.optimizers.items():
            optimizer.param_groups[0]["lr"] = left * getattr(config, f"{name}_learning_rate")
        raw: list[Tensor] = []
        seen: list[dict[str, float]] = []
        for _ in range(max(1, config.steps_per_iteration // num)):
            raw += list(self.obs)
            action = self.explore()
            outcomes = self.envs.step(action)
            for transition in zip(self.obs, action, outcomes, strict=True):
                self.replay[self.added % config.buffer_size] = transition
                self.added += 1
            self.obs = torch.stack([one.obs for one in outcomes])
            self.env_steps += num
            if self.env_steps > config.learning_starts:
                self.due = round(self.due + config.updates_per_step * num, 9)
            while self.due >= 1.0:
                self.due -= 1.0
                seen += self.update()
        self.obs_norm.see(raw)
        self.average.update_parameters(self.actor)
        names = {name for update in seen for name in update}
        means = {name: [update[name] for update in seen if name in update] for name in names}
        metrics = {name: sum(values) / len(values) for name, values in means.items()}
        return {**metrics, "optim/learning_rate": left * config.actor_learning_rate}

    def explore(self) -> Tensor:
        """Actions (N, A)."""
        shape = len(self.envs.envs), self.size
        if self.env_steps < self.config.learning_starts:
            return torch.rand(shape, generator=self.streams.torch("warmup")) * 2.0 - 1.0
        noise = torch.randn(shape, generator=self.streams.torch("action"))
        with torch.no_grad():
            return self.sample(self.obs_norm.shifted(self.obs), noise)[0]

    def update(self) -> list[dict[str, float]]:
        """One update of the critics, and as many of policy and temperature as are due; their metrics."""
        config, stream = self.config, self.streams.torch("update")
        self.updates += 1
        stream_of_places, size = self.streams.torch("replay"), (config.batch_size,)
        places = torch.randint(len(self.replay), size, generator=stream_of_places)
        batch = [self.replay[place] for place in places.tolist()]
        obs = self.obs_norm.shifted(torch.stack([obs for obs, _, _ in batch]))
        times = config.policy_delay if self.updates % config.policy_delay == 0 else 0
        shape = config.batch_size, self.size
        noises = [torch.randn(shape, generator=stream) for _ in range(times)]
        seen = [self.update_critics(obs, batch, torch.randn(shape, generator=stream))]
        return seen + [self.update_actor(obs, noise) for noise in noises]

    def update_critics(self, obs: Tensor, batch: list[Transition], noise: Tensor) -> dict[str, float]:
        """Both critics, and then their targets."""
        config = self.config
        outcomes = [outcome for _, _, outcome in batch]
        next_obs = self.obs_norm.shifted(torch.stack([one.next_obs for one in outcomes]))
        with torch.no_grad():
            next_action, log_prob = self.sample(next_obs, noise)
            soft = torch.minimum(*self.targets(next_obs, next_action)) - self.log_alpha.exp() * log_prob
            target = torch.tensor([one.reward for one in outcomes])
            target += config.gamma * torch.where(
                torch.tensor([one.terminated for one in outcomes]), 0.0, soft
            )
        q1, q2 = self.critics(obs, torch.stack([action for _, action, _ in batch]))
        loss = nn.functional.mse_loss(q1, target) + nn.functional.mse_loss(q2, target)
        self.descend("critic", loss)
        with torch.no_grad():
            for slow, fast in zip(self.targets.parameters(), self.critics.parameters(), strict=True):
                slow.mul_(1.0 - config.tau).add_(config.tau * fast)
        return {"loss/critic": loss.item(), "critic/q_mean": (q1.mean() + q2.mean()).item() / 2.0}

    def update_actor(self, obs: Tensor, noise: Tensor) -> dict[str, float]:
        """The policy, and then the temperature."""
        action, log_prob = self.sample(obs, noise)
        alpha = self.log_alpha.exp().detach()
        loss = (alpha * log_prob - torch.minimum(*self.critics(obs, action))).mean()
        self.descend("actor", loss)
        chosen = self.config.target_entropy
        excess = log_prob.detach().mean() + (-float(self.size) if chosen is None else chosen)
        loss_alpha = -self.log_alpha.exp() * excess
        if self.config.learn_alpha:
            self.descend("alpha", loss_alpha)
        return {
            "loss/policy": loss.item(),
            "policy/entropy": -log_prob.mean().item(),
            "loss/alpha": loss_alpha.item(),
            "alpha/value": alpha.item(),
        }

    def descend(self, name: str, loss: Tensor) -> None:
        """One step of one optimiser."""
        self.optimizers[name].zero_grad()
        loss.backward()
        self.optimizers[name].step()

    @torch.no_grad()
    def act(self, obs: Tensor) -> Tensor:
        """Actions (B, A) without noise."""
        acting = self.average if self.config.policy_average_steps else self.actor
        return acting(self.obs_norm.shifted(obs)).chunk(2, 1)[0].tanh()  # type: ignore[no-any-return]

    def state(self) -> dict[str, Tensor]:
        """All that has been learned and counted, by name."""
        state = {
            "learned/target": parameters_to_vector(self.targets.parameters()),
            "num_updates": torch.tensor(self.updates),
            **self.obs_norm.state("obs_norm"),
        }
        if self.config.policy_average_steps:
            state["average"] = parameters_to_vector(self.average.module.parameters())
        for name, optimizer in self.optimizers.items():
            state |= optimised(optimizer, f"learned/{name}")
        return state
