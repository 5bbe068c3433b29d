"""The replay buffer keeps the newest transitions, row for row."""

from __future__ import annotations

import numpy as np
import torch

from rltemplate.buffers import Batch, ReplayBuffer


def filled(capacity: int, additions: int, num: int) -> ReplayBuffer:
    """Each transition carries its number in every field."""
    buffer = ReplayBuffer(capacity, 2, 1, torch.device("cpu"))
    for i in range(additions):
        k = np.arange(i * num, (i + 1) * num, dtype=np.float64)
        pair = np.stack([k, k], 1)
        buffer.add(pair, k[:, None], k, pair + 0.5, k % 2 == 0)
    return buffer


def sample(buffer: ReplayBuffer, num: int) -> Batch:
    return buffer.take(buffer.draw(num, torch.Generator().manual_seed(0)))


def test_the_oldest_are_overwritten_even_where_an_addition_wraps_around() -> None:
    buffer = filled(capacity=10, additions=7, num=3)  # 21 transitions, the wrap falls inside an addition
    batch = sample(buffer, 2000)
    assert buffer.size == 10
    assert sorted(set(batch.reward.tolist())) == list(range(11, 21))


def test_fields_of_a_transition_stay_together() -> None:
    batch = sample(filled(10, 7, 3), 500)
    assert torch.equal(batch.obs[:, 0], batch.reward)
    assert torch.equal(batch.action[:, 0], batch.reward)
    assert torch.equal(batch.next_obs[:, 1], batch.reward + 0.5)
    assert torch.equal(batch.terminated, (batch.reward % 2 == 0).float())


def test_nothing_is_drawn_that_was_never_stored() -> None:
    batch = sample(filled(100, 2, 3), 500)
    assert set(batch.reward.tolist()) == set(range(6))


def test_a_restored_buffer_goes_on_in_the_same_place() -> None:
    buffer, other = filled(10, 5, 3), ReplayBuffer(10, 2, 1, torch.device("cpu"))
    held = buffer.since(0)
    assert (held.first, held.last) == (5, 15)
    other.restore(held.last, [held.rows])
    for each in (buffer, other):
        row = np.full((4, 1), 77.0)
        each.add(np.full((4, 2), 77.0), row, row[:, 0], np.full((4, 2), 77.0), row[:, 0] > 0)
    draws = [sample(each, 50) for each in (buffer, other)]
    assert all(torch.equal(a, b) for a, b in zip(*draws, strict=True))
