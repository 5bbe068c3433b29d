"""Processes that step the environments of several runs, each of which finds them as if it were alone."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rltemplate.envs import Envs, EnvSpec
from rltemplate.foreign_rng import ForeignTurns, foreign_state, restore_foreign_state, seed_foreign_code
from rltemplate.types import RunError
from rltemplate.workers import Hosts

NUM = 4


class Drawing(gym.Env[np.ndarray, Any]):
    """Is rewarded by draws from the global generators, after its step `begins_at`; raises where told to."""

    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(
        self, begins_at: int = 0, seconds: float = 0.0, closes: bool = True, render_mode: str | None = None
    ) -> None:
        self.begins_at, self.seconds, self.closes, self.taken = begins_at, seconds, closes, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        if action:
            raise ValueError("told to")
        time.sleep(self.seconds)
        self.taken += 1
        reward = 0.0
        if self.taken > self.begins_at:
            reward = float(np.random.random() + random.random() + float(torch.rand(())))  # noqa: NPY002
        return np.zeros(2, np.float32), reward, False, False, {}

    def close(self) -> None:
        if self.taken and not self.closes:
            raise OSError("no way to close")


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    gym.register("Drawing-v0", entry_point="test_workers:Drawing")
    before = foreign_state()
    yield
    restore_foreign_state(before)
    gym.registry.pop("Drawing-v0")


Build = Callable[..., list[Envs]]


@pytest.fixture
def build() -> Iterator[Build]:
    """Make the environments of several runs, which share their processes unless told otherwise."""
    made: list[Envs] = []

    def make(env_id: str, runs: Sequence[int], workers: int, limit: int | None = None, **kwargs: Any) -> Any:
        hosts = Hosts(len(runs))
        mine = []
        for run in runs:
            seed_foreign_code(run)
            seeds = range(100 * run, 100 * run + NUM)
            mine.append(Envs(EnvSpec(env_id, limit, kwargs), NUM, list(seeds), workers, hosts=hosts))
        made.extend(mine)
        return mine

    yield make
    for each in made:
        each.close()
    assert multiprocessing.active_children() == []


def still(envs: Envs) -> np.ndarray:
    return np.zeros(
        (envs.num_envs, envs.codec.action_size), np.float32 if envs.codec.continuous else np.int64
    )


def trails(runs: Sequence[Envs], steps: int) -> list[list[Any]]:
    """All that the environments of each run give, to the last bit: the runs take turns in every step."""
    seen: list[list[Any]] = [[envs.reset().tobytes()] for envs in runs]
    for _ in range(steps):
        for envs in runs:
            envs.begin_step(still(envs))
        for envs, mine in zip(runs, seen, strict=True):
            step = envs.end_step()
            mine.append([*(array.tobytes() for array in step[:5]), step.episodes])
    return seen


@pytest.mark.parametrize("workers", [1, 3, NUM])
@pytest.mark.parametrize(("env_id", "limit"), [("Hopper-v5", 17), ("LunarLander-v3", 30)])
def test_runs_that_share_processes_get_what_each_gets_alone(
    build: Build, env_id: str, limit: int, workers: int
) -> None:
    alone = [trails(build(env_id, [run], 0, limit), 50)[0] for run in (1, 2)]
    assert alone[0] != alone[1]
    both = build(env_id, [1, 2], workers, limit)
    assert len(multiprocessing.active_children()) == workers
    assert trails(both, 50) == alone


@pytest.mark.parametrize("mixed", [False, True])
def test_global_generators_are_each_runs_own(
    build: Build, mixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = [trails(build("Drawing-v0", [run], NUM), 900)[0] for run in (1, 2)]
    first_rewards = np.frombuffer(alone[0][1][1], np.float64)
    assert len(set(first_rewards.tolist())) == NUM  # in each process others
    if mixed:  # only the first of them sets them

        def turn_to(turns: ForeignTurns, place: int) -> None:
            if turns._holder is None:
                original(turns, place)

        original = ForeignTurns.turn_to
        monkeypatch.setattr(ForeignTurns, "turn_to", turn_to)
        monkeypatch.setattr(ForeignTurns, "end_period", lambda self: None)
    assert (trails(build("Drawing-v0", [1, 2], NUM), 900) == alone) is not mixed


def test_who_draws_when_nobody_expects_it_ends_all_runs(build: Build) -> None:
    both = build("Drawing-v0", [1, 2], 1, begins_at=450)
    with pytest.raises(RunError, match=r"for the first time after 2 times 200 steps,\n.* with seed=1,2"):
        trails(both, 700)
    for envs in both:
        with pytest.raises(RunError, match="after 2 times 200 steps"):
            envs.step(still(envs)) if not envs._stepping else envs.end_step()


def test_who_draws_when_nobody_expects_it_is_noticed_after_others_have_left(build: Build) -> None:
    first, second = build("Drawing-v0", [1, 2], 1, begins_at=450)
    trails([first, second], 125)
    first.close()
    with pytest.raises(RunError, match=r"for the first time after \d times 200 steps"):
        trails([second], 700)


def test_one_that_leaves_in_the_middle_of_a_step_is_missed_by_nobody(build: Build) -> None:
    first, second = build("Drawing-v0", [1, 2], 1, seconds=0.1)
    for envs in (first, second):
        envs.reset()
    first.begin_step(still(first))
    first.close()
    for _ in range(2):
        assert second.step(still(second)).reward.all()


def test_one_that_cannot_be_closed_is_missed_by_nobody(
    build: Build, capfd: pytest.CaptureFixture[str]
) -> None:
    first, second = build("Drawing-v0", [1, 2], NUM, closes=False)
    for envs in (first, second):
        envs.reset()
        envs.step(still(envs))
    first.close()
    assert second.step(still(second)).reward.all()
    second.close()
    assert capfd.readouterr().err.count("OSError: no way to close") == 2 * NUM


def test_one_that_fails_or_leaves_is_missed_by_nobody(build: Build) -> None:
    (expected,) = trails(build("Drawing-v0", [3], NUM), 8)
    first, second, third = build("Drawing-v0", [1, 2, 3], NUM)
    for envs in (first, second):
        envs.reset()
    third_seen: list[Any] = [third.reset().tobytes()]
    with pytest.raises(ValueError, match="told to"):
        first.step(still(first) + 1)
    second.close()
    for _ in range(8):
        step = third.step(still(third))
        third_seen.append([*(array.tobytes() for array in step[:5]), step.episodes])
    assert third_seen == expected
    first.close()
    assert len(multiprocessing.active_children()) == NUM + NUM  # and those of the one that was alone
    third.close()
    assert len(multiprocessing.active_children()) == NUM


def test_the_death_of_a_process_is_told_to_all_of_its_runs(build: Build) -> None:
    both = build("Drawing-v0", [1, 2], 1)
    for envs in both:
        envs.reset()
    (worker,) = multiprocessing.active_children()
    worker.kill()
    for envs in both:
        with pytest.raises(RunError, match=r"environments 1 to 2 of 4: .* \(killed by signal 9\)"):
            envs.step(still(envs))
