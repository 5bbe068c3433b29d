"""Environments give the same whoever steps them; exceptions, dying processes and signals are dealt with."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import alive, env_config, play, until
from gymnasium import spaces

from runlab.envs.envs import Envs
from runlab.errors import ConfigError, RunError

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]
NUM = 5
# With limits such that episodes end in different ways and at different times.
KINDS = {"Hopper-v5": 17, "LunarLander-v3": 40, "CartPole-v1": 12, "Pendulum-v1": 30}


def raises(error: Exception) -> None:
    raise error


def notify() -> None:
    os.kill(os.getppid(), signal.SIGUSR1)
    for number in SIGNALS:
        os.kill(os.getpid(), number)


def ends_child() -> None:
    child = subprocess.Popen(["sleep", "60"])
    child.terminate()
    child.wait(5)


ACTS: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "nan": lambda: None,
    "raises": lambda: raises(ValueError("two lines\nof text")),
    "exits": lambda: os._exit(3),
    "sys.exit": lambda: sys.exit(3),
    "exits by itself": lambda: os.execvp("sh", ["sh", "-c", "exit 3"]),
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "sleeps": lambda: time.sleep(1000),
    "notifies": notify,
    "ends a child": ends_child,
    "computes": lambda: torch.ones(1 << 20).exp(),  # so many that torch takes all of its threads
    "flushes": lambda: torch.set_flush_denormal(True),
}


class Breaks(gym.Env[Any, Any]):
    """Does `act` at step `at` of its life if its seed is in `who`; `making` in the constructor of workers.

    Step 0 is the first reset. It is rewarded by how far its action lies from the one before, of which it
    holds no copy, and by draws from the global generators with `draws`.
    """

    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float64)
    action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)

    def __init__(
        self,
        act: str = "nothing",
        at: int = 1,
        who: tuple[int, ...] = (8,),
        making: str = "nothing",
        draws: bool = False,
        render_mode: str | None = None,
    ) -> None:
        self.act, self.at, self.who, self.draws = act, at, who, draws
        self.number, self.steps, self.t, self.resets = -1, 0, 0, 0
        if multiprocessing.parent_process() is not None:
            ACTS[making]()

    def result(self, now: int) -> np.ndarray:
        if (now == self.at or self.act == "flushes") and self.number in self.who:
            ACTS[self.act]()
            return np.full(2, np.nan if self.act == "nan" else 0.0)
        return np.full(2, 0.1 * self.t)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.number = self.number if seed is None else seed
        self.t, self.resets, self.before = 0, self.resets + 1, np.ones(2)
        return self.result(1 - self.resets), {}

    def step(self, action: Any) -> Any:
        self.t, self.steps = self.t + 1, self.steps + 1
        denormals = float(sys.float_info.min * 0.5 > 0.0)
        reward = denormals + float(np.abs(action - self.before).sum())
        self.before = action
        if self.draws:
            reward += float(np.random.random() + random.random() + float(torch.rand(())))  # noqa: NPY002
        return self.result(self.steps), reward, False, self.t == 10, {}


gym.register("Breaks-v0", entry_point="test_workers:Breaks")
Build = Callable[..., Envs]


@pytest.fixture
def build() -> Iterator[Build]:
    """Make environments and close them in the end, when none of their processes may be left."""
    made: list[Envs] = []

    def make(env_id: str, num: int, workers: int, limit: int | None = None, **kwargs: Any) -> Envs:
        config = env_config(env_id, num, workers, limit, kwargs=kwargs)
        made.append(Envs(config, range(7, 7 + num)))
        return made[-1]

    yield make
    started = time.monotonic()
    for each in made:
        each.close()
    assert multiprocessing.active_children() == []
    assert time.monotonic() - started < 4


def trail(envs: Envs, steps: int = 90) -> list[Any]:
    """The first observations, and the results of steps."""
    return [envs.reset().tobytes(), *play(envs, 0, steps)]


@pytest.mark.parametrize("env_id", KINDS)
def test_the_same_bits_from_any_number_of_processes(env_id: str, build: Build) -> None:
    expected = trail(build(env_id, NUM, 0, KINDS[env_id]))
    assert sum(len(episodes) for *_, episodes in expected[1:]) > NUM  # so that resets were among it
    for workers in (1, 2, NUM):
        assert trail(build(env_id, NUM, workers, KINDS[env_id])) == expected, workers


def test_an_environment_may_keep_its_action_and_draw_from_global_generators(build: Build) -> None:
    results = [trail(build("Breaks-v0", 3, workers), 9) for workers in (0, 1, 3)]
    assert results[0] == results[1] == results[2]
    assert (np.frombuffer(results[0][-1][0]) > 1).all()  # as with one array for all they would not be
    drawn = [trail(build("Breaks-v0", 3, 3, draws=True), 4) for _ in range(2)]
    assert drawn[0] == drawn[1]
    rewards = np.concatenate([np.frombuffer(step[0]) for step in drawn[0][1:]])
    assert len(set(rewards)) == len(rewards)


@pytest.mark.parametrize("moment", ["making", "act"])
@pytest.mark.parametrize("workers", [0, 1])
def test_an_environment_flushes_no_number_of_another(build: Build, workers: int, moment: str) -> None:
    """When it is made, and whenever it is reset or stepped."""
    expected = trail(build("Breaks-v0", 4, workers), 4)
    envs = build("Breaks-v0", 4, workers, **{moment: "flushes"})
    assert [step[0] for step in trail(envs, 4)[1:]] == [step[0] for step in expected[1:]]


def test_an_environment_may_compute_with_torch_where_the_run_has_several_threads(build: Build) -> None:
    """A fork inherits none of them, and an operation that shared its work among them would never end."""
    torch.set_num_threads(2)
    ACTS["computes"]()
    envs = build("Breaks-v0", 2, 1, act="computes", who=(7, 8))
    assert len(trail(envs, 3)) == 4


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_trouble_arrives_with_its_place_and_an_exception_with_its_traceback(
    workers: int, build: Build, capfd: pytest.CaptureFixture[str]
) -> None:
    envs = build("Breaks-v0", 3, workers, act="raises", at=27, who=(8, 9))
    envs.reset()
    play(envs, 0, 26)
    with pytest.raises(RuntimeError if workers else ValueError, match="two lines\nof text") as trouble:
        play(envs, 0, 1)
    text = "".join(traceback.format_exception(trouble.value))
    assert "ValueError: two lines\nof text" in text
    assert "Breaks-v0, environment 2 of 3, step 7 of its episode" in text
    assert "in raises\n    raise error" in text
    envs = build("Breaks-v0", 3, workers, act="nan", at=7)
    envs.reset()
    with pytest.raises(RunError, match=r"^Breaks-v0, environment 2 of 3, step 7 of its episode: the obs"):
        play(envs, 0, 7)
    assert capfd.readouterr().err == ""


def test_a_worker_that_cannot_make_its_environment_says_why(build: Build) -> None:
    with pytest.raises(ConfigError, match=r"env.kwargs=.*: ValueError: two lines"):
        build("Breaks-v0", 2, 2, making="raises")
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("at", [0, 4])
@pytest.mark.parametrize("act", ["exits", "sys.exit"])
def test_an_environment_that_ends_its_worker_is_named_with_its_line(
    act: str, at: int, build: Build, capfd: pytest.CaptureFixture[str]
) -> None:
    envs = build("Breaks-v0", 3, 3, act=act, at=at)
    if at:
        envs.reset()
    line = ACTS[act].__code__.co_firstlineno
    with pytest.raises(RunError, match=rf"test_workers\.py, line {line}, ended the process, status 3$"):
        play(envs, 0, 10) if at else envs.reset()
    envs.close()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("act", "at", "how"),
    [("killed", 4, "killed by signal 9"), ("exits by itself", 0, "exit status 3")],
)
def test_a_worker_that_dies_ends_the_wait(
    act: str, at: int, how: str, build: Build, capfd: pytest.CaptureFixture[str]
) -> None:
    envs = build("Breaks-v0", 3, 3, act=act, at=at)
    if at:
        envs.reset()
    with pytest.raises(RunError, match=rf"^Breaks-v0: worker process 2 of 3 died \({how}\)$"):
        play(envs, 0, 10) if at else envs.reset()
    with pytest.raises(RunError, match="worker process 2 of 3 died"):  # also where it was dead before
        envs.state_dict()
    envs.close()
    assert capfd.readouterr().err == ""


def test_workers_take_no_notice_of_signals_to_the_run(build: Build) -> None:
    arrived: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: arrived.append(number))
    try:
        # Each worker also sends itself all of them before it has said a word.
        envs = build("Breaks-v0", 2, 2, making="notifies")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert signal.SIGUSR1 in arrived  # so they were sent
    envs.reset()
    for process in multiprocessing.active_children():
        assert process.pid is not None
        for number in reversed(SIGNALS):
            os.kill(process.pid, number)
    assert len(play(envs, 0, 30)) == 30


def test_an_environment_in_a_worker_can_end_a_program_that_it_has_started(build: Build) -> None:
    """A program inherits the signals that its parent ignores."""
    envs = build("Breaks-v0", 2, 2, act="ends a child")
    envs.reset()
    assert len(play(envs, 0, 3)) == 3


PROGRAM = """
import multiprocessing
import numpy as np
import test_workers as t
from runlab.envs.envs import Envs

kwargs = {{"act": {act!r}, "who": (7, 8, 9)}}
envs = Envs(t.env_config("Breaks-v0", 3, 3, kwargs=kwargs), [7, 8, 9])
envs.reset()
print(*[process.pid for process in multiprocessing.active_children()], flush=True)
envs.step(np.zeros((3, 2), np.float32))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("act", ["sleeps", "nothing"])
def test_no_worker_outlives_a_run_that_is_killed_or_ends_without_closing(act: str) -> None:
    folder = Path(__file__).resolve().parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(folder.parent)])}
    command, pipe = [sys.executable, "-W", "ignore", "-c", PROGRAM.format(act=act)], subprocess.PIPE
    process = subprocess.Popen(command, env=environment, text=True, stdout=pipe, stderr=pipe)
    assert process.stdout is not None
    pids = process.stdout.readline().split()
    assert len(pids) == 3
    if act == "sleeps":  # in its step, until the program is killed
        assert all(map(alive, pids))
        process.kill()
    assert process.communicate(timeout=10) == ("", "")
    assert process.returncode == (-signal.SIGKILL if act == "sleeps" else 0)
    until(lambda: not any(map(alive, pids)), 2)
