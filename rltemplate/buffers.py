"""Where transitions wait to be learned from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


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
        self.size = 0
        self._next = 0
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
        num = len(reward)
        first = min(num, self.capacity - self._next)
        for store, value in zip(self._store, (obs, action, reward, next_obs, terminated), strict=True):
            rows = torch.from_numpy(np.ascontiguousarray(value, np.float32))
            store[self._next : self._next + first].copy_(rows[:first])
            if first < num:
                store[: num - first].copy_(rows[first:])
        self._next = (self._next + num) % self.capacity
        self.size = min(self.size + num, self.capacity)

    def draw(self, batch_size: int, generator: torch.Generator) -> Tensor:
        """The places (B,) of `batch_size` transitions, uniformly with replacement."""
        return torch.randint(self.size, (batch_size,), generator=generator, device=self.device)

    def take(self, index: Tensor) -> Batch:
        """The transitions in the places `index` (B,)."""
        return Batch(*(store.index_select(0, index) for store in self._store))

    def state_dict(self) -> dict[str, Any]:
        """The transitions held and the place where the next one goes."""
        held = {name: store[: self.size] for name, store in self._store._asdict().items()}
        return {"next": self._next, "size": self.size, "store": held}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the transitions of `state`, made by a buffer of the same capacity."""
        self._next, self.size = int(state["next"]), int(state["size"])
        for name, store in self._store._asdict().items():
            store[: self.size].copy_(state["store"][name])
