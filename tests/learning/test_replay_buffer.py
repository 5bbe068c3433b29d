"""The replay buffer answers as one that keeps every field of every transition, in half of its memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from conftest import ROOT
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rltemplate.learning.replay_buffer import Batch, ReplayBuffer
from rltemplate.run.checkpoint import Checkpoints, list_checkpoints, load_checkpoint, load_experience

CPU = torch.device("cpu")
OBS, ACTION = 3, 2
# Capacity and number of environments: one fits into the other, or does not, or only just.
SIZES = [(64, 1), (12, 4), (10, 3), (11, 4), (9, 8), (7, 7), (5, 3), (1, 1)]


class Step(NamedTuple):
    """What one step of N environments adds."""

    obs: np.ndarray
    action: np.ndarray
    reward: np.ndarray
    next_obs: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray


def walk(num: int, seed: int = 0, ends: float = 0.2) -> Iterator[tuple[Step, np.ndarray]]:
    """Steps of N environments without end, each with what is acted on next; `ends` of them end an episode."""
    rng = np.random.default_rng(seed)

    def rows(size: int) -> np.ndarray:
        return rng.standard_normal((num, size), np.float32)

    obs = rows(OBS)
    while True:
        terminated, truncated = rng.random((2, num)) < ends / 2
        step = Step(obs, rows(ACTION), rng.standard_normal(num), rows(OBS), terminated, truncated)
        obs = np.where((terminated | truncated)[:, None], rows(OBS), step.next_obs)
        yield step, obs


class Plain:
    """Every field of every transition in its place."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.rows: dict[int, list[Any]] = {}  # by place
        self.added = 0

    def add(self, step: Step) -> None:
        for values in zip(*step[:5], strict=True):
            self.rows[self.added % self.capacity] = list(values)
            self.added += 1

    def take(self, index: Tensor) -> Batch:
        columns = zip(*(self.rows[place] for place in index.tolist()), strict=True)
        return Batch(*(torch.from_numpy(np.array(column, np.float32)) for column in columns))


def equal(a: Batch, b: Batch) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def agree(buffer: ReplayBuffer, plain: Plain) -> bool:
    """Whether both hold the same in every place."""
    index = torch.arange(len(plain.rows))
    return buffer.size == len(plain.rows) and equal(buffer.take(index), plain.take(index))


def first_disagreement(buffer: ReplayBuffer, steps: int = 60, ends: float = 0.2) -> int | None:
    """The step after which `buffer` holds something else than the plain one, if any."""
    plain = Plain(buffer.capacity)
    for k, (step, _) in zip(range(steps), walk(buffer.num_envs, ends=ends), strict=False):
        buffer.add(*step)
        plain.add(step)
        if not agree(buffer, plain):
            return k
    return None


@pytest.mark.parametrize(("capacity", "num"), SIZES)
def test_it_holds_what_a_plain_buffer_holds(capacity: int, num: int) -> None:
    for ends in (0.0, 0.05, 0.9):
        assert first_disagreement(ReplayBuffer(capacity, OBS, ACTION, CPU, num), ends=ends) is None


class OneTooFar(ReplayBuffer):
    """Takes for a successor what comes after it."""

    def _lead_to(self, rows: np.ndarray) -> None:
        super()._lead_to((rows + 1) % self.capacity)


class NoFinal(ReplayBuffer):
    """Takes for the end of an episode what the next one starts with."""

    def _keep(self, numbers: np.ndarray, final_obs: np.ndarray) -> list[int]:
        super()._keep(numbers, final_obs)
        self._ends.clear()
        return (self.capacity + numbers % self.num_envs).tolist()  # type: ignore[no-any-return]


class Early(ReplayBuffer):
    """Gives up the end of an episode before the transition that led there is overwritten."""

    def _forget(self, number: int) -> None:
        super()._forget(number + self.num_envs)


class Unwritten(ReplayBuffer):
    """Does not store what the newest lead to."""

    def add(self, *step: Any) -> None:
        before = self._obs[self.capacity : self.capacity + self.num_envs].clone()
        super().add(*step)
        self._obs[self.capacity : self.capacity + self.num_envs] = before


@pytest.mark.parametrize("broken", [OneTooFar, NoFinal, Early, Unwritten])
def test_a_wrong_successor_is_noticed(broken: type[ReplayBuffer]) -> None:
    assert first_disagreement(broken(12, OBS, ACTION, CPU, 3)) is not None


def test_more_ends_than_there_is_room_for_move_the_observations_and_nothing_else() -> None:
    few, many = (ReplayBuffer(64, OBS, ACTION, CPU, 2) for _ in range(2))
    assert first_disagreement(few, ends=0.02) is None
    assert first_disagreement(many, ends=1.0) is None
    assert (len(few._obs), len(many._obs)) == (64 + 2 + 4, 64 + 2 + 64)
    assert many.nbytes - few.nbytes > 40 * 4 * OBS


def test_what_cannot_be_added_is_refused() -> None:
    with pytest.raises(ValueError, match="a capacity of 3 for steps of 4 environments"):
        ReplayBuffer(3, OBS, ACTION, CPU, 4)
    buffer = ReplayBuffer(9, OBS, ACTION, CPU, 4)
    with pytest.raises(ValueError, match="3 transitions of 4 environments"):
        buffer.add(*next(walk(3))[0])
    with pytest.raises(IndexError):
        buffer.take(torch.tensor([9]))


# Drawing


def filled(capacity: int, num: int, steps: int, seed: int = 0) -> tuple[ReplayBuffer, Plain, Any]:
    """A buffer, its reference and the walk that goes on."""
    buffer, plain, walking = ReplayBuffer(capacity, OBS, ACTION, CPU, num), Plain(capacity), walk(num, seed)
    for _ in range(steps):
        step, _ = next(walking)
        buffer.add(*step)
        plain.add(step)
    return buffer, plain, walking


def test_nothing_is_drawn_that_is_not_there() -> None:
    buffer, _, walking = filled(100, 3, 2)
    generator = torch.Generator().manual_seed(0)
    assert set(buffer.draw(500, generator).tolist()) == set(range(6))
    for _ in range(50):
        buffer.add(*next(walking)[0])
    assert set(buffer.draw(3000, generator).tolist()) == set(range(100))


# On a device


class Waiting(Exception):
    """Something reads a value of a tensor."""


class NoWaiting(TorchDispatchMode):
    """Refuses what would make the host wait for a GPU: a value read, or a shape that depends on values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in ("_local_scalar_dense", "nonzero", "index", "masked_select", "equal", "unique_dim"):
            raise Waiting(func)
        return func(*args, **(kwargs or {}))


def test_nothing_waits_for_a_device() -> None:
    buffer, _, walking = filled(10, 3, 5)
    generator = torch.Generator()
    with NoWaiting():  # type: ignore[no-untyped-call]
        for _ in range(20):
            buffer.add(*next(walking)[0])
            buffer.take(buffer.draw(8, generator))
        with pytest.raises(Waiting):
            buffer.take(torch.arange(10)[torch.arange(10) < torch.tensor(7)])


# Exact resume


def from_disk(folder: Path, added: int, capacity: int) -> Iterator[Any]:
    checkpoint = load_checkpoint(list_checkpoints(folder)[-1])
    return load_experience(checkpoint, max(0, added - capacity), added)


@pytest.mark.parametrize(("capacity", "num"), SIZES)
def test_a_restored_buffer_goes_on_in_the_same_place(capacity: int, num: int, tmp_path: Path) -> None:
    buffer, plain = ReplayBuffer(capacity, OBS, ACTION, CPU, num), Plain(capacity)
    writer = Checkpoints(tmp_path, {}, keep=2)
    for k, (step, obs) in enumerate(walk(num, seed=3)):
        buffer.add(*step)
        plain.add(step)
        if k in (0, 1, 4, 11, 12, 17, 30):
            writer.save(buffer.added, {"env_steps": buffer.added}, buffer.since)
            # What goes on is itself made from a checkpoint.
            buffer = ReplayBuffer(capacity, OBS, ACTION, CPU, num)
            buffer.restore(plain.added, from_disk(tmp_path, plain.added, capacity), obs)
        assert agree(buffer, plain)
        if k == 45:
            break


def test_what_is_acted_on_next_is_part_of_what_is_restored() -> None:
    """The inverse: with other observations the newest transitions lead elsewhere, and only they."""
    buffer, plain, walking = filled(20, 4, 9, seed=1)
    held = buffer.since(0)
    other = ReplayBuffer(20, OBS, ACTION, CPU, 4)
    other.restore(held.last, [{**held.rows, **held.apart}], np.zeros((4, OBS), np.float32))
    index = torch.arange(20)
    differs = (other.take(index).next_obs != plain.take(index).next_obs).any(1)
    newest = torch.tensor([(36 - 4 + i) % 20 for i in range(4)])
    assert set(index[differs].tolist()) <= set(newest.tolist())
    assert differs.any()
    with pytest.raises(ValueError, match="only a new buffer"):
        other.restore(held.last, [], np.zeros((4, OBS), np.float32))
    with pytest.raises(ValueError, match="0 transitions for a buffer that held 20"):
        ReplayBuffer(20, OBS, ACTION, CPU, 4).restore(36, [], np.zeros((4, OBS), np.float32))
    assert next(walking)


@pytest.mark.parametrize(("capacity", "num"), SIZES)
def test_what_was_written_with_both_observations_can_still_be_read(capacity: int, num: int) -> None:
    plain, walking = Plain(capacity), walk(num, seed=2)
    parts: list[dict[str, Tensor]] = []
    for _ in range(20):
        step, obs = next(walking)
        plain.add(step)
        fields = zip(Batch._fields, step[:5], strict=True)
        parts.append({name: torch.from_numpy(np.asarray(x, np.float32)) for name, x in fields})
    held = min(plain.added, capacity)
    rows = {name: torch.cat([part[name] for part in parts])[-held:] for name in parts[0]}
    cut = held // 3
    halves = [{name: x[part] for name, x in rows.items()} for part in (slice(cut), slice(cut, None))]
    buffer = ReplayBuffer(capacity, OBS, ACTION, CPU, num)
    buffer.restore(plain.added, halves, obs)
    for _ in range(30):
        assert agree(buffer, plain)
        step, obs = next(walking)
        buffer.add(*step)
        plain.add(step)


def test_what_is_written_has_each_observation_once() -> None:
    buffer, _, _ = filled(1000, 4, 400)
    held = buffer.since(0)
    assert len(held.rows["obs"]) == 1000
    assert 100 < len(held.apart["final_obs"]) < 300  # a fifth of all ended an episode
    assert len(held.apart["final_of"]) == len(held.apart["final_obs"])
    stored = {row.numpy().tobytes() for row in torch.cat([held.rows["obs"], held.apart["final_obs"]])}
    assert len(stored) == 1000 + len(held.apart["final_obs"])
    newest = buffer.since(1590)
    assert (newest.first, newest.last) == (1590, 1600)
    assert torch.equal(newest.rows["obs"], held.rows["obs"][-10:])
    assert all(int(number) >= 1590 for number in newest.apart["final_of"])


# Memory

HUMANOID, HUMANOID_ACTION = 348, 17
# Per transition: both observations in float64, the rest of it, `dones` and `timeouts` in float32.
STABLE_BASELINES3 = 2 * 8 * HUMANOID + 4 * (HUMANOID_ACTION + 3)
BOTH_IN_FLOAT32 = 2 * 4 * HUMANOID + 4 * (HUMANOID_ACTION + 2)


def humanoid(capacity: int, length: int) -> ReplayBuffer:
    """Twice filled with transitions of Humanoid, with so many to an episode."""
    buffer = ReplayBuffer(capacity, HUMANOID, HUMANOID_ACTION, CPU, 10)
    obs, action = np.ones((10, HUMANOID), np.float32), np.ones((10, HUMANOID_ACTION), np.float32)
    reward, no = np.ones(10), np.zeros(10, np.bool_)
    for k in range(2 * capacity // 10):
        buffer.add(obs, action, reward, obs, (np.arange(10) + k) % length == 0, no)
    return buffer


def test_it_takes_half_of_the_memory_of_others() -> None:
    full = ReplayBuffer(1_000_000, HUMANOID, HUMANOID_ACTION, CPU)  # of which no page is taken
    assert full.nbytes < 0.27 * 1_000_000 * STABLE_BASELINES3
    assert full.nbytes < 0.52 * 1_000_000 * BOTH_IN_FLOAT32
    # Episodes of a policy that has learned nothing are the shortest.
    assert humanoid(20_000, length=22).nbytes < 0.55 * 20_000 * BOTH_IN_FLOAT32
    # The inverse: they would not be held in less if every step ended one.
    assert humanoid(2_000, length=1).nbytes > 0.95 * 2_000 * BOTH_IN_FLOAT32


def grown() -> tuple[int, int]:
    """By how much a process grows that fills a buffer, and what the buffer says."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    humanoid(200, 22)
    before = resident()
    buffer = humanoid(40_000, 22)
    return resident() - before, buffer.nbytes


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not say")
def test_no_more_memory_is_taken_than_it_says() -> None:
    """In a process of its own: what others have given back would be taken first."""
    command = [sys.executable, "-c", "import test_replay_buffer; print(*test_replay_buffer.grown())"]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=True
    )
    taken, said = map(int, done.stdout.split())
    assert taken == pytest.approx(said, rel=0.05)
