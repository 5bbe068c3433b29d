"""Where transitions wait to be learned from.

Every observation is stored once: what a transition leads to, the next one of the same environment starts
from. With N environments stepped together transition number k is followed by number k + N. Rows of
observations:

    capacity rows   what transitions start from: number k lies in the place k % capacity
    N rows          what the newest N lead to: no transition starts from it yet
    further rows    what episodes ended with: no transition ever starts from it; free again when the one that
                    led to it is overwritten

Each transition has a link, the row of what it leads to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rltemplate.types import Experience

# Rows for what episodes ended with: one for so many transitions. Twice as many each time they do not suffice.
_TRANSITIONS_PER_END = 16


class Batch(NamedTuple):
    """Transitions; `terminated` is 1.0 where no reward can follow. Truncation leaves it 0.0."""

    obs: Tensor  # (B, O)
    action: Tensor  # (B, A)
    reward: Tensor  # (B,)
    next_obs: Tensor  # (B, O) before any reset
    terminated: Tensor  # (B,)


class ReplayBuffer:
    """The last `capacity` transitions of N environments, on the device where they are learned from.

    On a GPU nothing but `since` waits for it.
    """

    def __init__(
        self, capacity: int, obs_size: int, action_size: int, device: torch.device, num_envs: int = 1
    ) -> None:
        if capacity < num_envs:
            raise ValueError(f"a capacity of {capacity} for steps of {num_envs} environments")
        self.capacity = capacity
        self.num_envs = num_envs
        self.device = device
        self.added = 0  # transitions that ever came in
        self._ends: deque[tuple[int, int]] = deque()  # numbers that ended an episode, and their links
        self._free: list[int] = []  # rows of such ends that were overwritten
        self._unused = capacity + num_envs  # rows from here on were never written to
        # torch.empty reserves address space only: pages are taken as transitions arrive.
        num_rows = self._unused + max(num_envs, capacity // _TRANSITIONS_PER_END)
        self._obs = torch.empty(num_rows, obs_size, device=device)
        self._action = torch.empty(capacity, action_size, device=device)
        self._reward = torch.empty(capacity, device=device)
        self._terminated = torch.empty(capacity, device=device)
        self._link = torch.empty(capacity, dtype=torch.int32, device=device)
        self._link[0] = 0  # programs are made on this place before anything is there
        self._newest = np.arange(capacity, capacity + num_envs, dtype=np.int32)  # rows

    @property
    def size(self) -> int:
        """Transitions held."""
        return min(self.added, self.capacity)

    @property
    def nbytes(self) -> int:
        """Bytes that a full buffer takes, with as many ends of episodes as there were so far.

        Rows that were never written to take no memory on the CPU.
        """
        rows = self._unused if self.device.type == "cpu" else len(self._obs)
        others = (self._action, self._reward, self._terminated, self._link)
        return self._obs[:rows].nbytes + sum(tensor.nbytes for tensor in others)

    @property
    def _by_place(self) -> dict[str, Tensor]:
        """What is kept for good of transitions, in their places."""
        return {
            "obs": self._obs,
            "action": self._action,
            "reward": self._reward,
            "terminated": self._terminated,
        }

    # Writing

    def add(
        self,
        obs: np.ndarray,
        action: np.ndarray,
        reward: np.ndarray,
        next_obs: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
    ) -> None:
        """Append one step of all N environments, overwriting the oldest transitions once the buffer is full.

        `obs` (N, O) was acted on, and `next_obs` (N, O) came of it, before any reset. It is stored once:
        where an episode goes on, the next addition must bring it as its `obs`.
        """
        first, num, capacity = self.added, self.num_envs, self.capacity
        if len(reward) != num:
            raise ValueError(f"{len(reward)} transitions of {num} environments")
        start = first % capacity
        self._forget(first + num - capacity)
        if first:
            places = np.arange(start, start + num, dtype=np.int32)
            self._lead_to(places if start + num <= capacity else places % capacity)
        links = self._newest
        ended = (terminated | truncated).nonzero()[0]
        if len(ended):
            links = links.copy()
            links[ended] = self._keep(ended + first, next_obs[ended])
        self._put(self._obs, start, obs)
        self._put(self._action, start, action)
        self._put(self._reward, start, reward)
        self._put(self._terminated, start, terminated)
        self._put(self._link, start, links)
        _write(self._obs, capacity, next_obs)
        self.added = first + num

    def _put(self, rows: Tensor, start: int, values: np.ndarray) -> None:
        """Write to the places from `start` on, and to the first ones where they end."""
        room = self.capacity - start
        _write(rows, start, values[:room])
        if len(values) > room:
            _write(rows, 0, values[room:])

    def _lead_to(self, rows: np.ndarray) -> None:
        """Let the newest N lead to `rows` (N,), except where their episode ended."""
        for number, row in reversed(self._ends):
            if number < self.added - self.num_envs:
                break
            rows[number - self.added] = row  # counted from the end
        self._put(self._link, (self.added - self.num_envs) % self.capacity, rows)

    def _keep(self, numbers: np.ndarray, final_obs: np.ndarray) -> list[int]:
        """Store what the transitions `numbers` ended with (E, O); the rows where it is."""
        rows = []
        for number in numbers.tolist():
            if self._free:
                row = self._free.pop()
            else:
                row, self._unused = self._unused, self._unused + 1
            self._ends.append((number, row))
            rows.append(row)
        if self._unused > len(self._obs):
            self._move()
        there = [torch.tensor(rows), torch.from_numpy(final_obs).to(self._obs.dtype)]
        self._obs.index_copy_(0, *(each.to(self.device, non_blocking=True) for each in there))
        return rows

    def _forget(self, number: int) -> None:
        """Give up what transitions before `number` ended with."""
        while self._ends and self._ends[0][0] < number:
            self._free.append(self._ends.popleft()[1])

    def _move(self) -> None:
        """Move all observations to where there is room for twice as many ends of episodes."""
        old, others = self._obs, self.capacity + self.num_envs
        ends = len(old) - others
        while others + ends < self._unused:
            ends *= 2
        new = torch.empty(others + min(ends, self.capacity), old.shape[1], device=self.device)
        # What is not held is not touched, and takes no memory.
        new[: self.size] = old[: self.size]
        new[self.capacity : len(old)] = old[self.capacity :]
        self._obs = new

    # Reading

    def draw(self, batch_size: int, generator: torch.Generator) -> Tensor:
        """The places (B,) of `batch_size` transitions, uniformly with replacement."""
        return torch.randint(self.size, (batch_size,), generator=generator, device=self.device)

    def take(self, index: Tensor) -> Batch:
        """The transitions in the places `index` (B,)."""
        links = self._link.index_select(0, index)
        return Batch(
            self._obs.index_select(0, index),
            self._action.index_select(0, index),
            self._reward.index_select(0, index),
            self._obs.index_select(0, links),
            self._terminated.index_select(0, index),
        )

    # Exact resume

    def since(self, first: int) -> Experience:
        """A copy of the transitions from number `first` on, as far as they are still held.

        What episodes ended with lies apart, beside the numbers of the transitions that led there. What the
        newest N lead to is not in it: it is acted on next.
        """
        first = min(max(first, self.added - self.size), self.added)
        start, num = first % self.capacity, self.added - first
        room = min(num, self.capacity - start)
        rows = {
            name: torch.cat([rows[start : start + room], rows[: num - room]])
            for name, rows in self._by_place.items()
        }
        ends = [(number, row) for number, row in self._ends if number >= first]
        places = torch.tensor([row for _, row in ends], dtype=torch.int64, device=self.device)
        apart = {
            "final_of": torch.tensor([number for number, _ in ends], dtype=torch.int64),
            "final_obs": self._obs.index_select(0, places),
        }
        return Experience(first, self.added, self.capacity, rows, apart)

    def restore(self, added: int, parts: Iterable[Mapping[str, Tensor]], obs: np.ndarray) -> None:
        """Hold, in a new buffer, the last of the `added` transitions that had come in: `parts`, oldest first.

        `obs` (N, O) is acted on next. A part may also have `next_obs`, as checkpoints of version 1 do.
        """
        if self.added:
            raise ValueError("only a new buffer can be restored")
        held = min(added, self.capacity)
        self.added = added - held
        for part in parts:
            self._append(part if "final_of" in part else self._with_ends_apart(part))
        if self.added != added:
            raise ValueError(f"{self.added - added + held} transitions for a buffer that held {held}")
        if added:
            self._lead_to(self._newest.copy())
            _write(self._obs, self.capacity, obs)

    def _append(self, part: Mapping[str, Tensor]) -> None:
        """The next transitions in number, as if what comes after them were there already."""
        first, num = self.added, len(part["reward"])
        links = np.arange(first + self.num_envs, first + self.num_envs + num) % self.capacity
        final_of = part["final_of"].numpy()
        mine = (final_of >= first) & (final_of < first + num)  # of a part that was cut, more may be there
        if mine.any():
            links[final_of[mine] - first] = self._keep(final_of[mine], part["final_obs"].numpy()[mine])
        start = first % self.capacity
        for name, rows in self._by_place.items():
            self._put(rows, start, part[name].numpy())
        self._put(self._link, start, links)
        self.added += num

    def _with_ends_apart(self, part: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Rows with `next_obs` as those that have it apart where no transition of theirs starts from it."""
        bits, next_bits = part["obs"].view(torch.int32), part["next_obs"].view(torch.int32)
        apart = torch.ones(len(bits), dtype=torch.bool)
        apart[: -self.num_envs] = (bits[self.num_envs :] != next_bits[: -self.num_envs]).any(1)
        return {**part, "final_of": apart.nonzero()[:, 0] + self.added, "final_obs": part["next_obs"][apart]}


def _write(rows: Tensor, start: int, values: np.ndarray) -> None:
    """Write the rows from `start` on."""
    # Nothing waits for a GPU: what the system may page out is taken over before the call returns.
    rows[start : start + len(values)].copy_(torch.from_numpy(np.ascontiguousarray(values)), non_blocking=True)
