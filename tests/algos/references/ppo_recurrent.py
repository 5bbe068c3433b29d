"""Proximal policy optimisation with a memory, step by step."""

from __future__ import annotations

from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from references.ppo import ActorCritic, Encoder, ReferencePPO
from references.surroundings import Copies, Outcome
from rltemplate.algos.ppo_recurrent_config import PPORecurrentConfig
from runlab.rng import Streams


class RecurrentActorCritic(ActorCritic):
    """Policy and value of rows that have an observation, a 1 where an episode begins, and a memory.

    `length` rows that follow each other are a sequence, of which only the first memory counts.
    """

    def __init__(
        self, config: PPORecurrentConfig, obs_size: int, space: spaces.Space[Any], image: int
    ) -> None:
        super().__init__(config, config.memory_size, space)
        self.obs_size, size = obs_size, obs_size
        self.before: nn.Module = nn.Identity()
        if image:
            self.before, size = Encoder(config, image), config.encoder_size + obs_size - 3 * image**2
        self.of_input = nn.Linear(size, 3 * config.memory_size)
        self.of_memory = nn.Linear(config.memory_size, 3 * config.memory_size)

    def features(self, rows: Tensor, length: int) -> Tensor:
        """The memory (B, M) after each row."""
        memory, found = rows[::length, self.obs_size + 1 :], list[Tensor]()  # (S, M) before each step
        for step in range(length):
            obs, begins = rows[step::length, : self.obs_size], rows[step::length, self.obs_size]
            memory = self.after(obs, torch.where(begins[:, None] == 1.0, 0.0, memory))
            found.append(memory)
        return torch.stack(found, 1).flatten(0, 1)

    def after(self, obs: Tensor, memory: Tensor) -> Tensor:
        """The memories (S, M) after observations (S, O)."""
        x, h = self.of_input, self.of_memory
        return torch.gru_cell(self.before(obs), memory, x.weight, h.weight, x.bias, h.bias)


class ReferencePPORecurrent(ReferencePPO):
    """The algorithm over N environments."""

    config: PPORecurrentConfig
    net: RecurrentActorCritic

    def __init__(
        self,
        config: PPORecurrentConfig,
        envs: Copies,
        streams: Streams,
        total_env_steps: int,
        weights: Tensor,
    ) -> None:
        super().__init__(config, envs, streams, total_env_steps, weights)
        self.length = config.sequence_length
        self.memory = torch.zeros(len(envs.envs), config.memory_size)

    def network(self) -> RecurrentActorCritic:
        return RecurrentActorCritic(self.config, self.obs.shape[1], self.envs.space, self.envs.image)

    def seen(self) -> Tensor:
        """Rows (N, O + 1 + M); the memory then has this observation."""
        rows = torch.cat([super().seen(), self.ended[:, None], self.memory], 1)
        with torch.no_grad():
            self.memory = self.net.features(rows, 1)
        return rows

    @torch.no_grad()
    def values(self, rows: Tensor, outcomes: list[list[Outcome]]) -> tuple[Tensor, Tensor]:
        numbers = self.rows(torch.arange(rows.shape[0] * rows.shape[1] // self.length))
        found = self.net.features(rows.flatten(0, 1)[numbers], self.length)
        memory = torch.zeros_like(found).index_copy(0, numbers, found).unflatten(0, rows.shape[:2])
        value = self.net.value(memory.flatten(0, 1)).view(rows.shape[:2])
        next_value = torch.cat([value[1:], torch.zeros_like(value[:1])])
        for t, step in enumerate(outcomes):
            for n, one in enumerate(step):
                # The end of an episode is seen with its memory, and so is what follows the rollout.
                if one.terminated or one.truncated or t == len(rows) - 1:
                    next_obs = self.obs_norm.shifted(one.next_obs)
                    next_value[t, n] = self.net.value(self.net.after(next_obs[None], memory[t, n][None]))[0]
        return value, next_value

    def act(self, obs: Tensor) -> Tensor:
        """The most probable actions (B, A) at the start of episodes."""
        begins, memory = torch.ones(len(obs), 1), torch.zeros(len(obs), self.config.memory_size)
        rows = torch.cat([self.obs_norm.shifted(obs), begins, memory], 1)
        with torch.no_grad():
            return self.best(self.net.features(rows, 1), obs[:, :0] > 0.5)

    def state(self) -> dict[str, Tensor]:
        return {**super().state(), "carry/begins": self.ended, "carry/memory": self.memory}
