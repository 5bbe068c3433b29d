"""The replay buffer holds the newest transitions, and a restored one goes on in the same place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from rltemplate.learning.replay_buffer import ReplayBuffer, Transition
from runlab.run.checkpoint import Checkpoints, load_checkpoint, load_experience

CPU = torch.device("cpu")
OBS, ACTION = 3, 2
# Capacity and number of environments: one fits into the other, or does not, or only just.
SIZES = [(64, 1), (12, 4), (11, 4), (7, 7)]


def steps(num: int, seed: int = 0) -> Iterator[Transition]:
    """Steps of N environments without end, field by field."""
    rng = np.random.default_rng(seed)
    while True:
        obs, next_obs = rng.standard_normal((2, num, OBS), np.float32)
        ends = rng.random((2, num)) < 0.1
        fields = obs, rng.standard_normal((num, ACTION)), rng.random(num), next_obs, *ends
        yield Transition(*map(torch.from_numpy, fields))


def transitions(step: Transition) -> list[Transition]:
    """The transitions of a step, one for each environment, as a buffer holds them."""
    return [Transition(*row) for row in zip(*(field.float() for field in step), strict=True)]


def holds_the_newest(buffer: ReplayBuffer, history: list[Transition]) -> bool:
    """True if number k of the history is in row k % capacity, as far as no later one is there."""
    rows = {number % buffer.capacity: number for number in range(len(history))}
    expected = [history[rows[row]] for row in range(len(rows))]
    found = buffer.take(torch.arange(len(rows)))
    columns = [torch.stack(column) for column in zip(*expected, strict=True)]
    return buffer.size == len(rows) and all(map(torch.equal, found, columns))


@pytest.mark.parametrize(("capacity", "num"), SIZES)
@pytest.mark.parametrize("restored", [False, True])
def test_it_holds_the_newest_transitions(capacity: int, num: int, restored: bool, tmp_path: Path) -> None:
    """Also where it was saved and restored in between."""
    buffer, history = ReplayBuffer(capacity, OBS, ACTION, CPU, num), list[Transition]()
    writer = Checkpoints(tmp_path, {}, keep=2)
    for k, step in zip(range(40), steps(num), strict=False):
        buffer.add(step)
        history += transitions(step)
        if restored and k in (0, 1, 4, 11, 12, 17, 30):
            checkpoint = writer.save(buffer.added, {"env_steps": buffer.added}, buffer)
            buffer = ReplayBuffer(capacity, OBS, ACTION, CPU, num)
            first = max(0, len(history) - capacity)
            buffer.restore(len(history), load_experience(load_checkpoint(checkpoint), first, len(history)))
        assert holds_the_newest(buffer, history)
    buffer.add(next(steps(num)))
    assert not holds_the_newest(buffer, history)


@pytest.mark.parametrize(("capacity", "num"), SIZES)
@pytest.mark.parametrize("count", [3, 40])
def test_n_step_returns_are_those_of_a_walk_through_the_episodes(capacity: int, num: int, count: int) -> None:
    buffer, gamma, history = ReplayBuffer(capacity, OBS, ACTION, CPU, num), 0.9, list[Transition]()
    for _, step in zip(range(count), steps(num), strict=False):
        buffer.add(step)
        history += transitions(step)
    first = max(0, len(history) - capacity)  # the oldest transition that is held
    numbers = range(first, len(history))
    batch, discount = buffer.take_n_step(torch.tensor(numbers) % capacity, 3, gamma)
    for row, number in enumerate(numbers):
        expected, power, last = 0.0, 1.0, history[number]
        for later in range(number, min(len(history), number + 3 * num), num):
            last = history[later]
            expected, power = expected + power * float(last.reward), power * gamma
            if last.terminated or last.truncated:
                break
        assert batch.reward[row].item() == pytest.approx(expected)
        assert discount[row].item() == pytest.approx(power)
        assert torch.equal(batch.obs[row], history[number].obs)
        assert torch.equal(batch.next_obs[row], last.next_obs)
        assert batch.terminated[row] == last.terminated


def test_nothing_is_drawn_or_restored_that_is_not_there() -> None:
    buffer, walking, generator = ReplayBuffer(100, OBS, ACTION, CPU, 3), steps(3), torch.Generator()
    for count, held in ((2, 6), (50, 100)):
        for _ in range(count):
            buffer.add(next(walking))
        assert set(buffer.draw(3000, generator).tolist()) == set(range(held))
    with pytest.raises(ValueError, match="a capacity of 3 for steps of 4 environments"):
        ReplayBuffer(3, OBS, ACTION, CPU, 4)
    with pytest.raises(ValueError, match="0 transitions for a buffer that held 20"):
        ReplayBuffer(20, OBS, ACTION, CPU, 4).restore(36, [])
