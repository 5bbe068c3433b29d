"""The mixture of experts with replay: masks over all experts, where the package has places of a few."""

from __future__ import annotations

from copy import deepcopy
from itertools import pairwise
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from references.ppo import ActorCritic, ReferencePPO
from references.surroundings import NETWORKS, Outcome
from rltemplate.algos.ppo_moe_config import PPOMoEConfig


class Mixture(nn.Module):
    """The policy network. Recorded masks of experts stand in E columns after those of an observation."""

    def __init__(self, config: PPOMoEConfig, obs_size: int, out: int) -> None:
        super().__init__()
        sizes = [obs_size, *config.hidden_sizes]
        hidden = [nn.Linear(*pair) for pair in pairwise(sizes[:-1])]
        self.activation = NETWORKS[config.activation]()
        self.torso = nn.Sequential(*(part for layer in hidden for part in (layer, self.activation)))
        self.router = nn.Linear(sizes[-2], config.num_experts)
        self.experts = nn.Linear(sizes[-2], config.num_experts * sizes[-1])
        self.head = nn.Linear(sizes[-1], out)
        self.obs_size, self.config = obs_size, config

    def probabilities(self, obs: Tensor) -> Tensor:
        """Of all experts (B, E)."""
        return self.router(self.torso(obs[:, : self.obs_size])).softmax(1)  # type: ignore[no-any-return]

    def choice(self, obs: Tensor) -> Tensor:
        """1.0 for the most probable experts, 0.0 for the others (B, E)."""
        mask = torch.zeros(len(obs), self.config.num_experts)
        for row, probabilities in zip(mask, self.probabilities(obs).tolist(), strict=True):
            order = sorted(range(len(row)), key=lambda e: (-probabilities[e], e))
            row[order[: self.config.num_chosen]] = 1.0
        return mask

    def mask(self, obs: Tensor) -> Tensor:
        """The experts that are used (B, E): those recorded, or the choice where none are."""
        recorded = obs[:, self.obs_size :]
        if not recorded.numel():
            return self.choice(obs)
        return torch.where(recorded.sum(1, keepdim=True) > 0.0, recorded, self.choice(obs))

    def forward(self, obs: Tensor) -> Tensor:
        """(B, P)."""
        x, weight = self.torso(obs[:, : self.obs_size]), self.probabilities(obs) * self.mask(obs)
        outputs = self.activation(self.experts(x)).view(len(obs), self.config.num_experts, -1)
        mixed = torch.einsum("be,beh->bh", weight / weight.sum(1, keepdim=True), outputs)
        return self.head(mixed)  # type: ignore[no-any-return]


class MoEActorCritic(ActorCritic):
    """The mixture and the value network."""

    def __init__(self, config: PPOMoEConfig, obs_size: int, space: spaces.Space[Any]) -> None:
        super().__init__(config, obs_size, space)
        *_, bias = self.actor.parameters()
        self.actor = self.mixture = Mixture(config, obs_size, len(bias))

    def value(self, obs: Tensor) -> Tensor:
        return super().value(obs[:, : self.mixture.obs_size])


class ReferencePPOMoE(ReferencePPO):
    """The algorithm over N environments."""

    config: PPOMoEConfig
    net: MoEActorCritic

    def network(self) -> MoEActorCritic:
        return MoEActorCritic(self.config, self.obs.shape[1], self.envs.space)

    def acting(self) -> MoEActorCritic:
        """With weights that are rounded, where this is asked for."""
        if self.config.rollout_bits is None:
            return self.net
        net, weights = deepcopy(self.net), parameters_to_vector(self.net.parameters()).detach()
        unit = 2.0 ** (weights.abs().log2().floor() - self.config.rollout_bits)
        vector_to_parameters(
            torch.where(weights == 0.0, 0.0, (weights / unit).round() * unit), net.parameters()
        )
        return net

    def seen(self) -> Tensor:
        obs = super().seen()
        return torch.cat([obs, self.acting().mixture.choice(obs)], 1)

    def learn(
        self,
        obs: Tensor,
        mask: Tensor,
        action: Tensor,
        old: Tensor,
        reward: Tensor,
        outcomes: list[list[Outcome]],
    ) -> dict[str, float]:
        mixture, config, plain = self.net.mixture, self.config, obs.flatten(0, 1)[:, : self.obs.shape[1]]
        recorded = obs.flatten(0, 1)[:, plain.shape[1] :]
        flipped = (mixture.choice(plain) != recorded).any(1)
        again = {"all": recorded, "none": 0.0 * recorded, "flipped": flipped[:, None] * recorded}
        given = torch.cat([plain, again[config.replay_routing]], 1).view_as(obs)
        metrics = super().learn(given, mask, action, old, reward, outcomes)
        drifted = (mixture.choice(plain) != recorded).any(1)
        return {
            **metrics,
            "moe/flip_fraction": float(flipped.double().mean()),
            "moe/drift_fraction": float(drifted.double().mean()),
            "moe/load_max": float(recorded.mean(0).max()) * config.num_experts / config.num_chosen,
        }

    def further_loss(self, obs: Tensor) -> Tensor:
        """The balance of loads."""
        mixture, config = self.net.mixture, self.config
        shares, mean = mixture.mask(obs).mean(0) / config.num_chosen, mixture.probabilities(obs).mean(0)
        return config.balance_coef * config.num_experts * (shares @ mean)
