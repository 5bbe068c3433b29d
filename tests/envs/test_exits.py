"""Code of an environment can neither end the process of a run unnoticed, nor double it by a fork."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from conftest import env_config
from gymnasium import spaces

from runlab.envs.exits import exits_are_errors
from runlab.envs.make import check_env, make_env
from runlab.envs.recorder import ActionRecorder
from runlab.errors import ConfigError, RunError


def raises() -> None:
    raise ValueError("of the child")


# The end of a forked child, and its exit status.
CHILDREN: dict[str, tuple[Callable[[], object], int]] = {
    "goes on": (lambda: None, 1),
    "raises": (raises, 1),
    "sys.exit": (lambda: sys.exit(5), 5),
    "sys.exit without a status": (sys.exit, 0),
    "sys.exit with a text": (lambda: sys.exit("why"), 1),
    "os._exit": (lambda: os._exit(6), 6),
}


class Forks(gym.Env[Any, Any]):
    """Forks a child at each call of the method `at`, and keeps its exit status."""

    observation_space = action_space = spaces.Box(-1.0, 1.0, (2,), np.float64)
    statuses: list[int] = []

    def __init__(self, at: str, child: str) -> None:
        self.at, self.child = at, child
        self.fork("make")

    def fork(self, method: str) -> None:
        if method != self.at:
            return
        if (child := os.fork()) == 0:
            signal.alarm(20)  # nothing of it outlives the test, even where it is not stopped
            CHILDREN[self.child][0]()
        else:
            self.statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.fork("reset")
        return np.zeros(2), {}

    def step(self, action: Any) -> Any:
        self.fork("step")
        return np.zeros(2), 0.0, False, False, {}


gym.register("Forks-v0", entry_point="test_exits:Forks")


@pytest.mark.parametrize("child", CHILDREN)
@pytest.mark.parametrize("at", ["make", "reset", "step"])
def test_a_forked_child_ends_where_it_leaves_the_environment(
    at: str, child: str, capfd: pytest.CaptureFixture[str]
) -> None:
    Forks.statuses.clear()
    process = os.getpid()
    try:
        with exits_are_errors():
            env = ActionRecorder(make_env(env_config("Forks-v0", kwargs={"at": at, "child": child})), "Forks")
            env.reset(1)
            env.step(np.zeros(2))
            env.step(np.zeros(2))
    finally:
        if os.getpid() != process:  # without the guard, it would go on as a second pytest
            os._exit(99)
    assert Forks.statuses == [CHILDREN[child][1]] * (2 if at == "step" else 1)
    output = capfd.readouterr()
    assert output.out == ""
    assert ("of the child" in output.err) is (child == "raises")
    assert (f"forked from {process} is ended" in output.err) is (child == "goes on")


def ends() -> None:
    os._exit(0)


def test_an_environment_that_calls_os_exit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os._exit
    message = rf"^{__file__}, line \d+, ended the process, status 0$"
    with pytest.raises(RunError, match=message), exits_are_errors(), exits_are_errors():
        ends()
    assert os._exit is real
    # Before a run begins, it is refused.
    monkeypatch.setattr(Forks, "__init__", lambda *_, **__: ends())
    with pytest.raises(ConfigError, match=r"env.id=Forks-v0: cannot be made, .*ended the process, status 0"):
        check_env(env_config("Forks-v0"))


@pytest.mark.parametrize(("status", "seen"), [(0, 1), (256, 1), (3, 3)])
def test_a_thread_cannot_end_the_process_as_a_success(
    status: int, seen: int, capfd: pytest.CaptureFixture[str]
) -> None:
    if (child := os.fork()) == 0:
        with exits_are_errors():
            threading.Thread(target=os._exit, args=(status,)).start()
            time.sleep(20)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == seen
    assert f"ended the process in a thread, status {status}" in capfd.readouterr().err
