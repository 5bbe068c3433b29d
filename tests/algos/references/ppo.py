"""Proximal policy optimisation, step by step."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.distributions import Categorical, Normal
from torch.nn.utils import clip_grad_norm_, vector_to_parameters

from references.surroundings import Copies, Outcome, Statistics, network, optimised
from rltemplate.algos.ppo_config import PPOConfig
from runlab.rng import Streams


class Encoder(nn.Module):
    """Features of the pixels, from 0 to 1, and behind them the numbers beside the image."""

    def __init__(self, config: PPOConfig, image: int) -> None:
        super().__init__()
        self.image, self.standardized = image, config.standardize_images
        filters = [(16, 2, 1), (32, 2, 1), (64, 2, 2)] if image < 36 else [(32, 8, 4), (64, 4, 2), (64, 3, 1)]
        layers: list[nn.Module] = []
        if config.encoder == "impala":
            for size, width in ((3, 16), (16, 32), (32, 32)):
                layers += [
                    nn.Conv2d(size, width, 3, padding=1),
                    nn.MaxPool2d(3, 2, 1),
                    Block(width),
                    Block(width),
                ]
        else:
            for size, (width, kernel, stride) in zip((3, *(w for w, *_ in filters)), filters, strict=False):
                layers += [nn.Conv2d(size, width, kernel, stride), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.ReLU(), nn.Flatten())
        size = self.layers(torch.zeros(1, 3, image, image)).numel()
        self.last = nn.Linear(size, config.encoder_size)

    def forward(self, obs: Tensor) -> Tensor:
        """(B, F)."""
        colors, values = obs[:, : 3 * self.image**2], obs[:, 3 * self.image**2 :]
        pixels = torch.stack([color.view(-1, self.image, self.image) for color in colors.chunk(3, 1)], 1)
        scaled = torch.stack([standardized(each) if self.standardized else each / 255 for each in pixels])
        return torch.cat([self.last(self.layers(scaled)).relu(), values], 1)


def standardized(image: Tensor) -> Tensor:
    """Pixels of mean 0 and deviation 1, or a little less; the smallest deviation is of a grey level."""
    return (image - image.mean()) / (image.var(correction=0) + 1e-5 * 255**2).sqrt()


class Block(nn.Module):
    """Two convolutions and what went into them (Espeholt et al. 2018, figure 3)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W)."""
        return x + self.second(self.first(x.relu()).relu())  # type: ignore[no-any-return]


class ActorCritic(nn.Module):
    """Policy and value."""

    def __init__(self, config: PPOConfig, obs_size: int, space: spaces.Space[Any], image: int = 0) -> None:
        super().__init__()
        if isinstance(space, spaces.Box):
            self.choices: list[int] = []
            out = int(np.prod(space.shape))
            self.log_std = nn.Parameter(torch.zeros(out))
        else:
            self.choices = [int(space.n)] if isinstance(space, spaces.Discrete) else space.nvec.tolist()  # type: ignore[attr-defined]
            out = sum(self.choices)
        activation = config.activation
        if image:
            self.encoder = Encoder(config, image)
            size = config.encoder_size + obs_size - 3 * image * image
            self.actor: nn.Module = nn.Sequential(self.encoder, nn.Linear(size, out))
            self.critic = nn.Sequential(self.encoder, nn.Linear(size, 1))
            return
        self.actor = network([obs_size, *config.hidden_sizes, out], activation)
        self.critic = network([obs_size, *config.hidden_sizes, 1], activation)

    def features(self, rows: Tensor, length: int) -> Tensor:
        """What both networks see (B, ...) of rows; `length` that follow each other belong together."""
        return rows

    def value(self, features: Tensor) -> Tensor:
        """(B,)."""
        return self.critic(features)[:, 0]  # type: ignore[no-any-return]

    def sample(self, features: Tensor, mask: Tensor, stream: torch.Generator) -> Tensor:
        """Actions (B, A) among the choices of the mask (B, P)."""
        out = self.actor(features)
        if not self.choices:
            return out + self.log_std.exp() * torch.randn(out.shape, generator=stream)  # type: ignore[no-any-return]
        uniform = torch.rand(out.shape, generator=stream).clamp(1e-20, 1.0 - 1e-7)
        perturbed = out - (-uniform.log()).log()  # Gumbel noise makes the argmax a sample
        return self.best(perturbed, mask)

    def best(self, score: Tensor, mask: Tensor) -> Tensor:
        """For each component the allowed choice with the highest score (B, P)."""
        allowed = torch.where(mask, score, -math.inf).split(self.choices, 1)
        return torch.stack([part.argmax(1) for part in allowed], 1)

    def log_prob_and_entropy(self, features: Tensor, mask: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """(B,) each."""
        out = self.actor(features)
        if not self.choices:
            normal = Normal(out, self.log_std.exp().expand_as(out))
            return normal.log_prob(action).sum(1), normal.entropy().sum(1)
        weights = (out.exp() * mask).split(self.choices, 1)  # Categorical divides by their sum
        parts = [Categorical(probs=weight) for weight in weights]
        log_prob = sum(part.log_prob(action[:, i]) for i, part in enumerate(parts))
        return log_prob, sum(part.entropy() for part in parts)


class ReferencePPO:
    """The algorithm over N environments."""

    def __init__(
        self, config: PPOConfig, envs: Copies, streams: Streams, total_env_steps: int, weights: Tensor
    ) -> None:
        self.config, self.envs, self.streams, self.total = config, envs, streams, total_env_steps
        self.obs, self.mask = envs.first_obs, envs.first_mask
        self.ended = torch.ones(len(envs.envs))  # 1 where an episode begins
        self.length = 1  # steps of a sample
        self.net = self.network()
        vector_to_parameters(weights, self.net.parameters())
        self.adam = torch.optim.Adam(self.net.parameters(), eps=config.adam_eps, foreach=False)
        self.obs_norm = Statistics(
            bool(config.normalize_obs), config.obs_clip, 0 if envs.image else self.obs.shape[1]
        )
        self.return_norm = Statistics(config.normalize_reward, config.reward_clip, 1)
        self.running = [0.0 for _ in envs.envs]  # discounted return of each environment's episode
        self.env_steps = 0

    def network(self) -> ActorCritic:
        """Policy and value."""
        return ActorCritic(self.config, self.obs.shape[1], self.envs.space, self.envs.image)

    def train_iteration(self) -> dict[str, float]:
        """One rollout and the passes over it; the metrics."""
        config = self.config
        left = max(0.0, 1.0 - self.env_steps / self.total)
        rate, self.clip, self.ent_coef = config.learning_rate, config.clip_coef, config.ent_coef
        rate *= left if config.learning_rate_schedule.name == "linear" else 1.0
        self.clip *= left if config.clip_coef_schedule.name == "linear" else 1.0
        self.ent_coef *= left if config.ent_coef_schedule.name == "linear" else 1.0
        self.adam.param_groups[0]["lr"] = rate
        if config.normalize_obs and self.env_steps == 0:
            raw, *_, outcomes = self.collect()
            self.scaled(outcomes)
            self.obs_norm.see(list(raw.flatten(0, 1)))
        raw, obs, masks, actions, outcomes = self.collect()
        reward = self.scaled(outcomes)
        chosen = masks.flatten(0, 1), actions.flatten(0, 1)
        log_prob = self.log_prob(self.acting(), obs, *chosen)
        metrics = self.learn(obs, *chosen, log_prob, reward, outcomes)
        self.obs_norm.see(list(raw.flatten(0, 1)))
        return {**metrics, "optim/learning_rate": rate}

    def collect(self) -> tuple[Tensor, Tensor, Tensor, Tensor, list[list[Outcome]]]:
        """Observations as they came (T, N, O) and as they were seen, masks, actions, and what followed."""
        stream = self.streams.torch("action")
        raw, seen, masks, actions, outcomes = [], [], [], [], []
        for _ in range(self.config.num_steps):
            raw.append(self.obs)
            seen.append(self.seen())
            masks.append(self.mask)
            with torch.no_grad():
                net = self.acting()
                actions.append(net.sample(net.features(seen[-1], 1), self.mask, stream))
            outcomes.append(self.envs.step(actions[-1]))
            self.obs = torch.stack([one.obs for one in outcomes[-1]])
            self.mask = torch.stack([one.mask for one in outcomes[-1]])
            self.ended = torch.tensor([float(one.terminated or one.truncated) for one in outcomes[-1]])
            self.env_steps += len(self.envs.envs)
        return torch.stack(raw), torch.stack(seen), torch.stack(masks), torch.stack(actions), outcomes

    def acting(self) -> ActorCritic:
        """The networks of a rollout."""
        return self.net

    def seen(self) -> Tensor:
        """What the networks are given for the observations (N, O), in the rollout and in updates."""
        return self.obs_norm.shifted(self.obs)

    def rows(self, samples: Tensor) -> Tensor:
        """Numbers t * N + n of the rows of samples, whose numbers are in `samples`."""
        num_envs = len(self.envs.envs)
        first, n = samples // num_envs * self.length, samples % num_envs
        return ((first[:, None] + torch.arange(self.length)) * num_envs + n[:, None]).flatten()

    def log_prob(self, net: ActorCritic, obs: Tensor, mask: Tensor, action: Tensor) -> Tensor:
        """Log-probabilities (T * N,) of all actions (T * N, A)."""
        rows = self.rows(torch.arange(len(action) // self.length))
        with torch.no_grad():
            features = net.features(obs.flatten(0, 1)[rows], self.length)
            log_prob, _ = net.log_prob_and_entropy(features, mask[rows], action[rows])
        return torch.zeros(len(action)).index_copy(0, rows, log_prob)

    def scaled(self, outcomes: list[list[Outcome]]) -> Tensor:
        """Rewards (T, N) over the deviation of all discounted returns so far."""
        returns = []
        for step in outcomes:
            for n, one in enumerate(step):
                self.running[n] = self.config.gamma * self.running[n] + one.reward
                returns.append(torch.tensor([self.running[n]]))
                if one.terminated or one.truncated:
                    self.running[n] = 0.0
        self.return_norm.see(returns)
        return self.return_norm.scaled(torch.tensor([[one.reward for one in step] for step in outcomes]))

    @torch.no_grad()
    def targets(self, obs: Tensor, reward: Tensor, outcomes: list[list[Outcome]]) -> tuple[Tensor, Tensor]:
        """Advantages and values (T, N)."""
        gamma, gae_lambda = self.config.gamma, self.config.gae_lambda
        advantage, (value, next_value) = torch.zeros_like(reward), self.values(obs, outcomes)
        for n in range(reward.shape[1]):
            following = torch.tensor(0.0)
            for t in reversed(range(len(reward))):
                one = outcomes[t][n]
                delta = reward[t, n] - value[t, n]
                if not one.terminated:
                    delta += gamma * next_value[t, n]
                if one.terminated or one.truncated:
                    following = torch.tensor(0.0)
                following = delta + gamma * gae_lambda * following
                advantage[t, n] = following
        return advantage, value

    def values(self, obs: Tensor, outcomes: list[list[Outcome]]) -> tuple[Tensor, Tensor]:
        """Values (T, N) of all observations, and of those that followed them before any reset."""
        value, next_value = torch.zeros(obs.shape[:2]), torch.zeros(obs.shape[:2])
        for t, step in enumerate(outcomes):
            for n, one in enumerate(step):
                value[t, n] = self.net.value(obs[t, n][None])
                next_value[t, n] = self.net.value(self.obs_norm.shifted(one.next_obs)[None])[0]
        return value, next_value

    def learn(
        self,
        obs: Tensor,
        mask: Tensor,
        action: Tensor,
        old: Tensor,
        reward: Tensor,
        outcomes: list[list[Outcome]],
    ) -> dict[str, float]:
        """All passes over the rollout: metrics, averaged over updates."""
        config, total = self.config, reward.numel()
        size = total // config.num_minibatches
        advantage, value = self.targets(obs, reward, outcomes)
        ret = advantage + value
        explained = 1.0 - float((ret - value).var() / ret.var())
        apart = self.log_prob(self.net, obs, mask, action) - old
        updates: list[dict[str, float]] = []
        for epoch in range(config.update_epochs):
            if config.recompute_advantage and epoch:
                advantage, value = self.targets(obs, reward, outcomes)
                ret = advantage + value
            order = torch.randperm(total // self.length, generator=self.streams.torch("minibatch"))
            for rows in self.rows(order).split(size):
                parts = (x.flatten()[rows] for x in (old, advantage, ret, value))
                updates.append(self.update(obs.flatten(0, 1)[rows], mask[rows], action[rows], *parts))
            log_ratio = self.log_prob(self.net, obs, mask, action) - old
            if config.target_kl is not None and (log_ratio.exp() - 1.0 - log_ratio).mean() > config.target_kl:
                break
        metrics = {name: sum(update[name] for update in updates) / len(updates) for name in updates[0]}
        metrics["value/explained_variance"] = explained
        metrics["policy/rollout_kl"] = float((apart.exp() - 1.0 - apart).mean())
        metrics["policy/rollout_extreme"] = float(((apart.exp() > 2.0) | (apart.exp() < 0.5)).double().mean())
        metrics["policy/first_ratio_max_error"] = float((apart.exp() - 1.0).abs().max())
        return metrics if config.target_kl is None else {**metrics, "optim/epochs": float(epoch + 1)}

    def update(
        self,
        obs: Tensor,
        mask: Tensor,
        action: Tensor,
        old: Tensor,
        advantage: Tensor,
        ret: Tensor,
        old_value: Tensor,
    ) -> dict[str, float]:
        """One minibatch."""
        config, clip = self.config, self.clip
        features = self.net.features(obs, self.length)
        log_prob, entropy = self.net.log_prob_and_entropy(features, mask, action)
        value = self.net.value(features)
        if config.normalize_advantage:
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        ratio = (log_prob - old).exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(1.0 - clip, 1.0 + clip) * advantage).mean()
        error = (value - ret) ** 2
        if config.clip_value_loss:
            clipped = old_value + (value - old_value).clamp(-clip, clip)
            error = torch.maximum(error, (clipped - ret) ** 2)
        value_loss = error.mean() / 2.0
        self.adam.zero_grad()
        loss = -gain + config.vf_coef * value_loss - self.ent_coef * entropy.mean()
        (loss + self.further_loss(obs)).backward()
        norm = clip_grad_norm_(self.net.parameters(), config.max_grad_norm)
        self.adam.step()
        ratio = ratio.detach()
        return {
            "loss/policy": -gain.item(),
            "loss/value": value_loss.item(),
            "policy/entropy": entropy.mean().item(),
            "policy/approx_kl": (ratio - 1.0 - ratio.log()).mean().item(),
            "policy/clip_fraction": ((ratio - 1.0).abs() > clip).double().mean().item(),
            "optim/grad_norm": norm.item(),
        }

    def further_loss(self, obs: Tensor) -> Tensor:
        """What a variant adds."""
        return torch.tensor(0.0)

    @torch.no_grad()
    def act(self, obs: Tensor) -> Tensor:
        """The most probable actions (B, A), for observations with a mask of those that it allows."""
        size = self.obs.shape[1]
        obs = obs.to(self.obs)
        return self.best(self.obs_norm.shifted(obs[:, :size]), obs[:, size:] > 0.5)

    def best(self, features: Tensor, mask: Tensor) -> Tensor:
        """The most probable actions (B, A) that the mask allows; all may be taken without one."""
        out = self.net.actor(features)
        if not self.net.choices:
            return out  # type: ignore[no-any-return]
        return self.net.best(out, mask if mask.shape[1] else out < math.inf)

    def state(self) -> dict[str, Tensor]:
        """All that has been learned and counted, by name."""
        state = optimised(self.adam, "net")
        state |= self.obs_norm.state("obs_norm") | self.return_norm.state("return_norm")
        used = self.config.normalize_reward
        return {**state, "running_return": torch.tensor(self.running) * self.config.gamma * used}
