"""Replay buffer for off-policy algorithms: the last transitions, field by field, on the learner's device.

Transition number k lies in row k % capacity. With N environments stepped together, number k + N is the next
one of the same environment.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from rltemplate.types import Experience


class Batch(NamedTuple):
    """Transitions; `terminated` is 1.0 where no reward can follow. Truncation leaves it 0.0."""

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
        self.capacity = capacity
        self.device = device
        self.added = 0  # transitions that ever came in
        shapes = Batch((obs_size,), (action_size,), (), (obs_size,), ())  # type: ignore[arg-type]
        # torch.empty reserves address space only: pages are taken as transitions arrive.
        self._rows = Batch(*(torch.empty(capacity, *shape, device=device) for shape in shapes))

    @property
    def size(self) -> int:
        """Transitions held."""
        return min(self.added, self.capacity)

    @property
    def nbytes(self) -> int:
        """Bytes of a full buffer."""
        return sum(rows.nbytes for rows in self._rows)

    def add(self, step: Batch) -> None:
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
        return Batch(*(rows.index_select(0, index) for rows in self._rows))

    # Exact resume: a checkpoint keeps the contents in parts, each with the transitions since the one before.

    def since(self, first: int) -> Experience:
        """A copy of the transitions from number `first` on, as far as they are still held."""
        first = min(max(first, self.added - self.size), self.added)
        start, num = first % self.capacity, self.added - first
        room = min(num, self.capacity - start)
        fields = {
            name: torch.cat([rows[start : start + room], rows[: num - room]])
            for name, rows in self._rows._asdict().items()
        }
        return Experience(first, self.added, self.capacity, fields)

    def restore(self, added: int, parts: Iterable[Mapping[str, Tensor]]) -> None:
        """Fill a new buffer with the newest of `added` transitions: `parts`, oldest first."""
        held = min(added, self.capacity)
        self.added = added - held
        for part in parts:
            self._append((part[name] for name in Batch._fields), len(part["reward"]))
        if self.added != added:
            raise ValueError(f"{self.added - added + held} transitions for a buffer that held {held}")
