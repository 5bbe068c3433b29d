"""PPO whose policy and value remember the episode so far, for tasks that one observation does not show.

A gated recurrent unit reads the observations, and PPO's networks take its memory in the place of the
observation: policy and value share it. An update is given whole sequences, with the memory before their first
step as the rollout had it, and the places where episodes begin. It computes the memories of all steps anew,
and its gradient goes back through a sequence to its start (truncated backpropagation through time).
  memory between steps, iterations and in checkpoints    RecurrentState.carry
  a memory counts for nothing where an episode begins    GRU.forward
  sequences as samples                                   PPORecurrent.samples
  values after the end of an episode                     PPORecurrent.values
Everything else is PPO's.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from runlab.engine import Engine
from runlab.envs.envs import Envs
from runlab.interfaces import ForwardPass
from runlab.rng import Streams

from ..learning.distributions import Unsquashed
from ..learning.networks import GRU
from ..learning.on_policy import Extras, Rollout, Samples
from .ppo import PPO, ActorCritic, PPOState, encoder_of
from .ppo_recurrent_config import PPORecurrentConfig


class Memory(NamedTuple):
    """Data of a decision besides its observation. M is `memory_size`."""

    action_mask: Tensor | tuple[()] = ()
    begins: Tensor = torch.empty(0)  # (N,) 1.0 where an episode begins
    memory: Tensor = torch.empty(0)  # (N, M) after the decision before, which may be of an earlier episode


class Carry(NamedTuple):
    """The memory between two decisions."""

    begins: Tensor  # (N,) 1.0 where an episode begins
    memory: Tensor  # (N, M)


# Everything that learning changes: that of PPO, and the memory before the next decision.
RecurrentState: Any = partial(namedtuple, "RecurrentState")([*PPOState._fields, "carry"])


class RecurrentActorCritic(ActorCritic):
    """Separate networks for policy and value behind one memory.

    With a memory each, CartPole without velocities took more steps on both seeds tried, and nearly twice the
    time for each (results/memory.md).
    """

    def __init__(
        self,
        config: PPORecurrentConfig,
        obs_size: int,
        dist: Unsquashed,
        rng: torch.Generator,
        image_shape: tuple[int, ...],
    ) -> None:
        super().__init__(config, config.memory_size, dist, rng)
        self.encoder, size = encoder_of(config, obs_size, image_shape, rng)
        self.gru = GRU(size, config.memory_size, config.orthogonal_init, rng)

    def forward(self, obs: Tensor, extras: Extras, *parts: str) -> tuple[Tensor, ...]:
        """Parts of sequences (S, L, O): "policy" (S, L, P), "value" (S, L), "memory" after each step."""
        assert isinstance(extras, Memory)
        shape = obs.shape[:2]
        if self.encoder is not None:
            obs = self.encoder(obs.flatten(0, 1)).unflatten(0, shape)  # (S, L, F)
        memory: Tensor = self.gru(obs, extras.begins, extras.memory[:, 0])  # (S, L, M)
        rows = memory.flatten(0, 1)  # (S * L, M)

        def of_steps(part: str) -> Tensor:
            if part == "memory":
                return memory
            output: Tensor = self.critic(rows).squeeze(-1) if part == "value" else self.actor(rows)
            output = output.unflatten(0, shape)
            return output if part == "value" else self.action_params(output, extras)

        return tuple(map(of_steps, parts))


class PPORecurrent(PPO):
    """The algorithm over N environments. A rollout has S sequences of L = `sequence_length` steps."""

    config: PPORecurrentConfig
    state: Any  # RecurrentState, with the fields of PPO's
    no_extras = Memory()

    def __init__(
        self, config: PPORecurrentConfig, envs: Envs, streams: Streams, total_env_steps: int, engine: Engine
    ) -> None:
        super().__init__(config, envs, streams, total_env_steps, engine)
        self.state = RecurrentState(*self.state, self.at_start(envs.num_envs))

    def network(self, rng: torch.Generator) -> nn.Module:
        return RecurrentActorCritic(self.config, self.num_seen, self.dist, rng, self.image_shape)

    def at_start(self, rows: int) -> Carry:
        """The memory at the start of episodes."""
        begins = torch.ones(rows, device=self.device)
        return Carry(begins, begins.new_zeros(rows, self.config.memory_size))

    def memory(self) -> Carry:
        carry: Carry = self.state.carry
        return carry

    def remember(self, memory: Extras, done: np.ndarray) -> None:
        assert isinstance(memory, Carry)
        self.state = self.state._replace(carry=memory._replace(begins=self.to_device(done)))

    def decide(
        self, params: Tensor, obs: Tensor, extras: Extras, memory: Extras
    ) -> tuple[Tensor, Memory, Carry]:
        assert isinstance(extras, Memory)
        assert isinstance(memory, Carry)
        extras = extras._replace(**memory._asdict())
        policy, after = self.one_step(params, obs, extras, "policy", "memory")
        return policy, extras, Carry(torch.zeros_like(memory.begins), after)

    def one_step(self, params: Tensor, obs: Tensor, extras: Memory, *parts: str) -> tuple[Tensor, ...]:
        """Parts of the network (B, ...) for single observations (B, O): sequences of one step."""
        sequences = pytree.tree_map(lambda x: x.unsqueeze(1), (obs, extras))
        return tuple(x.squeeze(1) for x in self.net.apply(params, *sequences, *parts))

    def samples(self, data: Samples) -> Samples:
        """The data (T, N, ...) of a rollout as sequences (S, L, ...), which are shuffled as wholes."""
        found: Samples = pytree.tree_map(partial(_blocks_exchanged, rows=self.config.sequence_length), data)
        return found

    def values(self, params: Tensor, rollout: Rollout) -> tuple[Tensor, Tensor, Tensor]:
        """Values as in PPO; those of final observations (K,) from the memory before the reset."""
        num_envs = self.envs.num_envs
        sequences = self.samples((rollout.normalized_obs, rollout.extras))
        of_sequences = self.net.apply(params, *sequences, "value", "memory")
        value, memory = (_blocks_exchanged(x, num_envs) for x in of_sequences)  # (T, N), (T, N, M)
        # Where an episode ended with the rollout, the value of the last observation counts for nothing.
        ends = torch.cat([rollout.last_obs, rollout.final_obs])
        before = torch.cat([memory[-1], memory[rollout.truncated > 0]])
        (at_ends,) = self.one_step(params, ends, Memory((), torch.zeros_like(before[:, 0]), before), "value")
        return value, at_ends[:num_envs], at_ends[num_envs:]

    def decide_now(self, obs: Tensor, carry: Carry) -> tuple[Tensor, Memory, Carry]:
        """`decide` for unscaled observations (B, O) with the present parameters."""
        return self.decide(self.state.net.params, self.normalized(obs), self.extras_of(obs), carry)

    def policy(self, obs: Tensor) -> Tensor:
        """Parameters of the action distribution (B, P) at the start of episodes."""
        return self.decide_now(obs, self.at_start(len(obs)))[0]

    @torch.no_grad()
    def act_from(
        self,
        obs: np.ndarray,
        memory: np.ndarray | None,
        rngs: Sequence[torch.Generator] | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """An `Act` of runlab/interfaces.py."""
        carry = self.at_start(len(obs))
        if memory is not None:
            carry = Carry(torch.zeros_like(carry.begins), self.to_device(memory))
        policy, _, after = self.decide_now(self.to_device(obs), carry)
        return self.chosen(policy, rngs), after.memory.cpu().numpy()

    def forward_passes(self) -> Mapping[str, ForwardPass]:
        """Policy, value and memory; a row is an observation and the memory before it, side by side."""
        params, obs_size = self.state.net.params, self.num_seen

        def network(part: str, rows: Tensor) -> Tensor:
            extras = Memory(begins=torch.zeros_like(rows[:, 0]), memory=rows[:, obs_size:])
            (output,) = self.one_step(params, rows[:, :obs_size], extras, part)
            return output

        size = obs_size + self.config.memory_size
        sequences = self.config.num_steps // self.config.sequence_length * self.envs.num_envs
        (first, *_), images = super().forward_passes().values(), bool(self.image_shape)
        batches = first.batches
        batches += sequences // self.config.num_minibatches, sequences  # in a step of all of them
        parts = (*self.parts, "memory")
        return {part: ForwardPass(partial(network, part), size, batches, images) for part in parts}


def _blocks_exchanged(x: Tensor, rows: int) -> Tensor:
    """Rows (K * rows, C, ...) as (K * C, rows, ...): steps become sequences, and these steps again."""
    exchanged: Tensor = x.unflatten(0, (-1, rows)).transpose(1, 2).flatten(0, 1)
    return exchanged
