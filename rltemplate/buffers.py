"""Where transitions wait to be learned from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
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
    """The last `capacity` transitions, on the device where they are learned from."""

    def __init__(self, capacity: int, obs_size: int, action_size: int, device: torch.device) -> None:
        self.capacity = capacity
        self.device = device
        self.added = 0  # transitions that ever came in

        # torch.empty reserves address space only: pages are taken as transitions arrive.
        self._store = Batch(
            obs=torch.empty(capacity, obs_size, device=device),
            action=torch.empty(capacity, action_size, device=device),
            reward=torch.empty(capacity, device=device),
            next_obs=torch.empty(capacity, obs_size, device=device),
            terminated=torch.empty(capacity, device=device),
        )

    def add(
        self,
        obs: np.ndarray,
        action: np.ndarray,
        reward: np.ndarray,
        next_obs: np.ndarray,
        terminated: np.ndarray,
    ) -> None:
        """Append N transitions, overwriting the oldest ones once the buffer is full."""
        values = (obs, action, reward, next_obs, terminated)
        self._append(len(reward), [torch.from_numpy(np.ascontiguousarray(v, np.float32)) for v in values])

    def _append(self, num: int, values: Sequence[Tensor]) -> None:
        start = self.added % self.capacity
        first = min(num, self.capacity - start)
        for store, rows in zip(self._store, values, strict=True):
            store[start : start + first].copy_(rows[:first])
            if first < num:
                store[: num - first].copy_(rows[first:])
        self.added += num

    @property
    def size(self) -> int:
        """Transitions held."""
        return min(self.added, self.capacity)

    def draw(self, batch_size: int, generator: torch.Generator) -> Tensor:
        """The places (B,) of `batch_size` transitions, uniformly with replacement."""
        return torch.randint(self.size, (batch_size,), generator=generator, device=self.device)

    def take(self, index: Tensor) -> Batch:
        """The transitions in the places `index` (B,)."""
        return Batch(*(store.index_select(0, index) for store in self._store))

    def since(self, first: int) -> Experience:
        """A copy of the transitions from number `first` on, as far as they are still held."""
        first = max(first, self.added - self.size)
        places = torch.arange(first, self.added, device=self.device) % self.capacity
        rows = {name: store.index_select(0, places) for name, store in self._store._asdict().items()}
        return Experience(first, self.added, self.capacity, rows)

    def restore(self, added: int, parts: Iterable[Mapping[str, Tensor]]) -> None:
        """Hold the last of the `added` transitions that had come in: `parts`, oldest first."""
        held = min(added, self.capacity)
        self.added = added - held
        for rows in parts:
            self._append(len(rows["reward"]), [rows[name] for name in Batch._fields])
        if self.added != added:
            raise ValueError(f"{self.added - added + held} transitions for a buffer that held {held}")
