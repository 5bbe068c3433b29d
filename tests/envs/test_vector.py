"""Environments give the same whoever steps them, also in two halves, and waiting keeps no core busy."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rltemplate.envs import vector
from rltemplate.envs import workers as processes
from rltemplate.envs.envs import Envs, EnvSpec, make_env
from rltemplate.types import RunError

linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
NUM = 5
# With limits such that episodes end in different ways and at different times.
KINDS = {"Hopper-v5": 17, "LunarLander-v3": 40, "CartPole-v1": 12, "Pendulum-v1": 30}


class Slow(gym.Env[np.ndarray, Any]):
    """Steps so many seconds, and is rewarded by draws from the global generators if told so."""

    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, seconds: float = 0.0, draws: bool = False, render_mode: str | None = None) -> None:
        self.seconds, self.draws = seconds, draws

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        if action:
            raise ValueError("told to")
        time.sleep(self.seconds)
        reward = 1.0
        if self.draws:
            reward = float(np.random.random() + random.random() + float(torch.rand(())))  # noqa: NPY002
        return np.zeros(2, np.float32), reward, False, False, {}


class KeepsItsAction(gym.Env[np.ndarray, Any]):
    """Is rewarded by how far an action lies from the one before, of which it holds no copy."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)

    def __init__(self, render_mode: str | None = None) -> None:
        self.before = np.zeros(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.before = np.zeros(2)
        return np.zeros(2), {}

    def step(self, action: Any) -> Any:
        reward = float(np.abs(action - self.before).sum())
        self.before = action
        return action.astype(np.float64), reward, False, False, {}


class Flushes(gym.Env[np.ndarray, Any]):
    """Has denormal numbers flushed to zero at the end of each step, and is rewarded by one that is kept."""

    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None) -> None:
        pass

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        kept = float(sys.float_info.min * 0.5 > 0.0)
        torch.set_flush_denormal(True)
        return np.zeros(2, np.float32), kept, False, False, {}


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    gym.register("Flushes-v0", entry_point="test_vector:Flushes")
    gym.register("Slow-v0", entry_point="test_vector:Slow")
    gym.register("KeepsItsAction-v0", entry_point="test_vector:KeepsItsAction")
    yield
    gym.registry.pop("Flushes-v0")
    gym.registry.pop("Slow-v0")
    gym.registry.pop("KeepsItsAction-v0")


Build = Callable[..., Envs]


@pytest.fixture
def build() -> Iterator[Build]:
    """Make environments and close them in the end, when none of their processes may be left."""
    made: list[Envs] = []

    def make(env_id: str, num: int, workers: int, limit: int | None = None, **kwargs: Any) -> Envs:
        made.append(Envs(EnvSpec(env_id, limit, kwargs), num, list(range(7, 7 + num)), workers))
        return made[-1]

    yield make
    for each in made:
        each.close()
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("workers", [0, 1])
def test_an_environment_flushes_no_number_of_another(build: Build, workers: int) -> None:
    envs = build("Flushes-v0", 4, workers)
    envs.reset()
    for _ in range(2):
        assert envs.step(np.zeros((4, 1), np.int64)).reward.tolist() == [1.0] * 4
    state = envs.state_dict()
    again = build("Flushes-v0", 4, 0)
    again.load_state_dict(state)  # replays the steps, which have to come out the same


def actions(envs: Envs, steps: int) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    shape = (steps, envs.num_envs, envs.codec.action_size)
    if envs.codec.continuous:
        return list(rng.uniform(-1.2, 1.2, shape).astype(np.float32))
    return list(rng.integers(0, envs.codec.nvec, shape))


def trail(envs: Envs, steps: int = 90) -> list[Any]:
    """All that environments give, to the last bit."""
    seen: list[Any] = [envs.reset().tobytes()]
    for action in actions(envs, steps):
        step = envs.step(action)
        seen.append([*(array.tobytes() for array in step[:5]), step.episodes])
    return seen


def of_gymnasium(envs: Envs, env_id: str, steps: int = 90) -> list[Any]:
    """The same from Gymnasium's own vector environment, for `envs` that have not been stepped."""
    spec = EnvSpec(env_id, KINDS[env_id], {})
    theirs = SyncVectorEnv([partial(make_env, spec)] * NUM, autoreset_mode=AutoresetMode.DISABLED)
    codec, seeds = envs.codec, list(range(7, 7 + NUM))
    raw, _ = theirs.reset(seed=seeds)  # type: ignore[arg-type]
    seen: list[Any] = [codec.encode_obs(raw).tobytes()]
    returns, lengths = [0.0] * NUM, [0] * NUM
    for action in actions(envs, steps):
        raw, reward, terminated, truncated, _ = theirs.step(codec.decode_action(action))
        next_obs = codec.encode_obs(raw)
        obs, done, episodes = next_obs, terminated | truncated, []
        for i in range(NUM):
            returns[i], lengths[i] = returns[i] + reward[i], lengths[i] + 1
            if done[i]:
                episodes.append((returns[i], lengths[i]))
                returns[i], lengths[i] = 0.0, 0
        if episodes:
            raw, _ = theirs.reset(options={"reset_mask": done})
            obs = np.where(done[:, None], codec.encode_obs(raw), next_obs)
        arrays = (obs, reward, terminated, truncated, next_obs)
        seen.append([*(array.tobytes() for array in arrays), episodes])
    theirs.close()
    return seen


# --- The same whoever steps --------------------------------------------------------------------------------


@pytest.mark.parametrize("env_id", KINDS)
def test_the_same_bits_from_any_number_of_processes(env_id: str, build: Build) -> None:
    expected = of_gymnasium(build(env_id, NUM, 0, KINDS[env_id]), env_id)
    assert sum(len(episodes) for *_, episodes in expected[1:]) > NUM  # so that resets were among it
    for workers in (0, 1, 2, 3, NUM):
        assert trail(build(env_id, NUM, workers, KINDS[env_id])) == expected, workers


def test_groups_follow_the_order_and_are_as_even_as_possible(build: Build) -> None:
    def groups(num: int, workers: int) -> list[str]:
        envs = build("CartPole-v1", num, workers)
        names = sorted(process.name for process in multiprocessing.active_children())
        envs.close()
        return [name.removeprefix("CartPole-v1, ") for name in names]

    assert groups(8, 1) == ["environments 1 to 4 of 8"]
    assert groups(8, 2) == ["environments 1 to 3 of 8", "environments 4 to 6 of 8"]
    assert groups(5, 3) == ["environment 3 of 5", "environment 4 of 5", "environments 1 to 2 of 5"]
    assert groups(2, 2) == ["environment 1 of 2", "environment 2 of 2"]
    assert groups(1, 1) == ["CartPole-v1"]


def test_where_nothing_is_forked_the_same_is_sent(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trail(build("CartPole-v1", 3, 0, 12), 30)
    monkeypatch.setattr(sys, "platform", "darwin")
    envs = build("CartPole-v1", 3, 1, 12)
    (worker,) = multiprocessing.active_children()
    assert type(worker).__name__ == "SpawnProcess"
    assert trail(envs, 30) == expected


def test_a_group_that_lies_elsewhere_is_noticed(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trail(build("CartPole-v1", NUM, 2, 12))
    part = vector.Arrays.part

    def backwards(self: vector.Arrays, numbers: range) -> vector.Arrays:
        return vector.Arrays(*(array[::-1] for array in part(self, numbers)))

    monkeypatch.setattr(vector.Arrays, "part", backwards)
    assert trail(build("CartPole-v1", NUM, 2, 12)) != expected


def test_a_step_stays_what_it_was_when_the_next_one_comes(build: Build) -> None:
    for workers in (0, 1):
        envs = build("Hopper-v5", 3, workers, 17)
        envs.reset()
        steps = [envs.step(action) for action in actions(envs, 40)]
        kept = [[array.tobytes() for array in step[:5]] for step in steps]
        again = trail(build("Hopper-v5", 3, workers, 17), 40)[1:]
        assert kept == [step[:5] for step in again]


def test_an_environment_may_keep_its_action(build: Build) -> None:
    results = [trail(build("KeepsItsAction-v0", 3, workers), 10) for workers in (0, 1, 3)]
    assert results[0] == results[1] == results[2]
    assert np.frombuffer(results[0][-1][1]).all()  # no reward is zero, as it would be with one array for all


def test_a_vector_of_an_environment_that_is_not_always_the_same_is_refused(build: Build) -> None:
    def other() -> gym.Env[Any, Any]:
        return KeepsItsAction()

    space = Slow.observation_space
    kind = vector.Kind(other, "Odd-v0", 2, space, KeepsItsAction.action_space)
    for make in (lambda: kind.members(range(2)), lambda: processes.Workers(kind, 2, [1, 2])):
        with pytest.raises(RunError, match=r"^Odd-v0, environment 1 of 2: its spaces are not those of the f"):
            make()
    assert multiprocessing.active_children() == []


@linux
def test_what_is_shared_has_no_name_that_could_be_left_behind(build: Build) -> None:
    build("Slow-v0", 2, 1)
    (worker,) = multiprocessing.active_children()
    for process in ("self", worker.pid):
        maps = Path(f"/proc/{process}/maps").read_text().splitlines()
        files = [line for line in maps if f"/pym-{os.getpid()}" in line]
        assert files
        assert all(line.endswith(" (deleted)") for line in files)


# --- What goes wrong ---------------------------------------------------------------------------------------


def still(envs: Envs) -> np.ndarray:
    return np.zeros((envs.num_envs, 1), np.int64)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_what_an_environment_raises_names_its_step(workers: int, build: Build) -> None:
    envs = build("Slow-v0", 2, workers)
    envs.reset()
    with pytest.raises(ValueError, match="told to") as trouble:
        envs.step(np.array([[0], [1]]))
    assert trouble.value.__notes__ == ["Slow-v0, environment 2 of 2, step 1 of its episode 1"]


def test_the_death_of_a_worker_is_told_by_every_step(build: Build) -> None:
    envs = build("Slow-v0", 4, 1)
    envs.reset()
    (worker,) = multiprocessing.active_children()
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()
    words = r"^Slow-v0, environments 1 to 2 of 4: their worker process died \(killed by signal 9\)$"
    for _ in range(2):
        with pytest.raises(RunError, match=words):
            envs.step(still(envs))


def test_in_each_worker_global_generators_start_from_a_seed_of_their_own(build: Build) -> None:
    def rewards() -> list[float]:
        envs = build("Slow-v0", 3, 3, draws=True)
        envs.reset()
        return [float(reward) for _ in range(4) for reward in envs.step(still(envs)).reward]

    first = rewards()
    assert len(set(first)) == len(first)
    assert rewards() == first


# --- Waiting -----------------------------------------------------------------------------------------------


def cpu_s(pid: int) -> float:
    """What a process has used, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def grows(measure: Callable[[], float], seconds: float) -> float:
    before = measure()
    time.sleep(seconds)
    return measure() - before


@pytest.fixture
def idle(build: Build, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Start a worker on a machine that seems to have cores for all, let it step, and give its process."""

    def start() -> int:
        monkeypatch.setattr(processes, "available_cores", lambda: 64)
        envs = build("Slow-v0", 1, 1)
        envs.reset()
        for _ in range(200):
            envs.step(still(envs))
        (worker,) = multiprocessing.active_children()
        assert worker.pid is not None
        return worker.pid

    return start


@linux
def test_a_worker_that_is_not_asked_for_anything_sleeps(idle: Callable[[], int]) -> None:
    pid = idle()
    assert grows(lambda: cpu_s(pid), 0.5) < 0.1


@linux
def test_a_worker_that_stays_awake_is_noticed(
    idle: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_AWAKE_S", 60.0)
    monkeypatch.setattr(processes, "_GONE_S", 60.0)
    pid = idle()
    used = itertools.accumulate(grows(lambda: cpu_s(pid), 0.5) for _ in range(10))
    assert any(each > 0.1 for each in used)


@pytest.mark.parametrize("awake_s", [None, 60.0])
def test_who_waits_for_a_long_step_sleeps(
    awake_s: float | None, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "available_cores", lambda: 64)
    if awake_s is not None:
        monkeypatch.setattr(processes, "_AWAKE_S", awake_s)
        monkeypatch.setattr(processes, "_GONE_S", awake_s)
    envs = build("Slow-v0", 1, 1, seconds=0.4)
    envs.reset()
    used = -time.process_time()
    envs.step(still(envs))
    used += time.process_time()
    assert (used < 0.05) is (awake_s is None)


class Looks:
    """Counts how often somebody stays awake, in place of `os.sched_yield`."""

    def __init__(self, gone_s: float = 0.0) -> None:
        self.count, self.gone_s = 0, gone_s

    def __call__(self) -> None:
        self.count += 1
        time.sleep(self.gone_s)


@pytest.mark.parametrize("cores", [1, 2, 3])
def test_nobody_stays_awake_with_fewer_cores_than_processes(
    cores: int, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = Looks()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    monkeypatch.setattr(os, "sched_yield", looks)
    monkeypatch.setattr(processes, "_GONE_S", 60.0)
    envs = build("Slow-v0", 2, 2, seconds=1e-4)
    envs.reset()
    for _ in range(20):
        envs.step(still(envs))
    assert (looks.count > 0) is (cores >= 3)


def test_a_core_that_others_want_is_left_to_them(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "available_cores", lambda: 64)
    monkeypatch.setattr(processes, "_LEAVE_S", 60.0)
    counts = []
    for gone_s in (0.0, 2e-4):  # as if others had been at work meanwhile
        looks = Looks(gone_s)
        monkeypatch.setattr(os, "sched_yield", looks)
        monkeypatch.setattr(processes, "_GONE_S", 60.0 if gone_s == 0.0 else 1e-4)
        envs = build("Slow-v0", 1, 1, seconds=3e-4)
        envs.reset()
        for _ in range(50):
            envs.step(still(envs))
        counts.append(looks.count)
    assert counts[0] > 20
    assert counts[1] <= 1
