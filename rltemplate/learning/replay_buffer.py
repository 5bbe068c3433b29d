"""Replay buffer for off-policy algorithms: the last transitions, field by field, on the learner's device.

Transition number k lies in row k % capacity. With N environments stepped together, number k + N is the next
one of the same environment.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class Transition(NamedTuple):
    """One step of N environments, or what a buffer holds of many steps."""

    obs: Tensor  # (N, O)
    action: Tensor  # (N, A)
    reward: Tensor  # (N,)
    next_obs: Tensor  # (N, O) before any reset
    terminated: Tensor  # (N,) 1.0 where the task ended, and no reward can follow
    truncated: Tensor  # (N,) 1.0 where the clock ended the episode


class Batch(NamedTuple):
    """Transitions to learn from; `terminated` is 1.0 where no reward can follow. Truncation leaves it 0.0."""

    obs: Tensor  # (B, O)
    action: Tensor  # (B, A)
    reward: Tensor  # (B,)
    next_obs: Tensor  # (B, O) before any reset
    terminated: Tensor  # (B,)


class ReplayBuffer:
    """The last `capacity` transitions as float32. Nothing but `since` waits for a GPU."""

    def __init__(
        self, capacity: int, obs_size: int, action_size: int, device: torch.device, num_envs: int = 1
    ) -> None:
        if capacity < num_envs:
            raise ValueError(f"a capacity of {capacity} for steps of {num_envs} environments")
        self.capacity, self.num_envs, self.device = capacity, num_envs, device
        self.added = 0  # transitions that ever came in
        shapes = (obs_size,), (action_size,), (), (obs_size,), (), ()
        # torch.empty reserves address space only: pages are taken as transitions arrive.
        self._rows = Transition(*(torch.empty(capacity, *shape, device=device) for shape in shapes))

    @property
    def size(self) -> int:
        """Transitions held."""
        return min(self.added, self.capacity)

    def add(self, step: Transition) -> None:
        """Append one step of all N environments, overwriting the oldest transitions in a full buffer."""
        self._append(step, len(step.reward))

    def _append(self, fields: Iterable[Tensor], num: int) -> None:
        start = self.added % self.capacity
        room = self.capacity - start
        for rows, values in zip(self._rows, fields, strict=True):
            rows[start : start + num].copy_(values[:room], non_blocking=True)
            if num > room:
                rows[: num - room].copy_(values[room:], non_blocking=True)
        self.added += num

    def draw(self, batch_size: int, generator: torch.Generator) -> Tensor:
        """The rows (B,) of `batch_size` transitions, uniformly with replacement."""
        return torch.randint(self.size, (batch_size,), generator=generator, device=self.device)

    def take(self, index: Tensor) -> Batch:
        """The transitions in the rows `index` (B,)."""
        return Batch(*(self._at(name, index) for name in Batch._fields))

    def take_n_step(self, index: Tensor, num_steps: int, gamma: float) -> tuple[Batch, Tensor]:
        """Transitions over up to `num_steps` steps from the rows `index` (B,), and their discounts (B,).

        `reward` is the discounted sum, `next_obs` and `terminated` are those of the last step, whose value
        is to be multiplied by the discount. A sum ends with its episode and at the newest transition.
        """
        reward, discount = self._at("reward", index), torch.full(index.shape, gamma, device=self.device)
        going_on, last = torch.ones_like(index, dtype=torch.bool), index
        newer = (self.added - 1 - index) % self.capacity  # transitions that came in later
        for step in range(1, num_steps):
            ended = self._at("terminated", last) + self._at("truncated", last) > 0
            going_on = going_on & ~ended & (newer >= step * self.num_envs)
            last = torch.where(going_on, (index + step * self.num_envs) % self.capacity, last)
            reward = reward + gamma**step * self._at("reward", last) * going_on
            discount = torch.where(going_on, gamma ** (step + 1), discount)
        ends = self._at("next_obs", last), self._at("terminated", last)
        return Batch(self._at("obs", index), self._at("action", index), reward, *ends), discount

    def _at(self, name: str, index: Tensor) -> Tensor:
        rows: Tensor = getattr(self._rows, name)
        return rows.index_select(0, index)

    # Exact resume, as `Replay` of runlab/interfaces.py: a checkpoint keeps the contents in parts.

    def since(self, first: int) -> Mapping[str, Tensor]:
        first = min(max(first, self.added - self.size), self.added)
        start, num = first % self.capacity, self.added - first
        room = min(num, self.capacity - start)
        return {
            name: torch.cat([rows[start : start + room], rows[: num - room]])
            for name, rows in self._rows._asdict().items()
        }

    def restore(self, added: int, parts: Iterable[Mapping[str, Tensor]]) -> None:
        num_held = min(added, self.capacity)
        self.added = added - num_held
        for part in parts:
            self._append((part[name] for name in Transition._fields), len(part["reward"]))
        if self.added != added:
            raise ValueError(f"{self.added - added + num_held} transitions for a buffer that held {num_held}")
