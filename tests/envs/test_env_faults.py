"""Environments that misbehave: what they give, what they raise, how their processes die, and signals."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from rltemplate.envs import workers as processes
from rltemplate.envs.envs import Envs, EnvSpec
from rltemplate.types import ConfigError, RunError

HERE = Path(__file__).resolve().parent
SIZE = 11
BOX = spaces.Box(-1.0, 1.0, (SIZE,), np.float32)
FOUR = spaces.Discrete(4, start=2)
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]


class TwoWords(Exception):
    """Makes its message of two arguments, which no pickle of it survives."""

    def __init__(self, first: str, second: int) -> None:
        super().__init__(f"{first} and {second}")
        self.second = second


class Repeating(Exception):
    """Comes out of a pickle, but not as it went in."""

    def __init__(self, word: str) -> None:
        super().__init__(f"<{word}>")


class Holding(Exception):
    """Holds what cannot be pickled."""

    def __init__(self, word: str) -> None:
        super().__init__(word)
        self.lock = threading.Lock()


def raising(error: Callable[[], Exception]) -> Callable[[tuple[Any, ...]], Any]:
    def act(_: tuple[Any, ...]) -> Any:
        raise error()

    return act


def unpicklable_kind() -> Exception:
    class Local(Exception):
        pass

    return Local("of a function")


def obs(value: Any) -> Callable[[tuple[Any, ...]], Any]:
    return lambda result: (value, *result[1:])


def spoilt(value: float, kind: type[np.floating[Any]] = np.float32) -> Callable[[tuple[Any, ...]], Any]:
    array = np.zeros(SIZE, kind)
    array[2] = value
    return obs(array)


def reward(value: Any) -> Callable[[tuple[Any, ...]], Any]:
    return lambda result: (result[0], value, *result[2:])


def flags(terminated: Any = False, truncated: Any = False) -> Callable[[tuple[Any, ...]], Any]:
    return lambda result: (*result[:2], terminated, truncated, result[4])


def exits(_: tuple[Any, ...]) -> Any:
    os._exit(3)


def killed(_: tuple[Any, ...]) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def leaves_a_child(_: tuple[Any, ...]) -> Any:
    """Die, but not what was forked before: it holds all the worker's pipes open."""
    if os.fork():
        os._exit(3)
    time.sleep(5)
    os._exit(0)


def sleeps(_: tuple[Any, ...]) -> Any:
    time.sleep(1000)


# What an environment does to the result of its step instead of returning it.
ACTS: dict[str, Callable[[tuple[Any, ...]], Any]] = {
    "nan": spoilt(np.nan),
    "inf": spoilt(-np.inf),
    "nan of float64": spoilt(np.nan, np.float64),
    "both infinities": lambda result: (np.array([np.inf, -np.inf] + [0] * 9, np.float32), *result[1:]),
    "beyond float32": spoilt(1e39, np.float64),
    "beyond, in sum zero": lambda result: (np.array([1e300, -1e300] + [0] * 9), *result[1:]),
    "short": obs(np.zeros(3, np.float32)),
    "deep": obs(np.zeros((1, SIZE), np.float32)),
    "none": obs(None),
    "dict": obs({"x": 1}),
    "string": obs("no"),
    "objects": obs(np.full(SIZE, None)),
    "ragged": obs([[1.0], 2.0]),
    "complex": obs(np.zeros(SIZE, np.complex64)),
    "half": obs(2.5),
    "six": obs(6),
    "one": obs(np.int64(1)),
    "one in a row": obs(np.array([3])),
    "reward nan": reward(float("nan")),
    "reward inf": reward(np.float64("inf")),
    "reward beyond float32": reward(-1e39),
    "reward beyond all": reward(10**400),
    "reward none": reward(None),
    "reward pair": reward(np.zeros(2)),
    "reward complex": reward(1 + 0j),
    "reward string": reward("1.0"),
    "terminated none": flags(None),
    "terminated float": flags(0.0),
    "truncated two": flags(False, 2),
    "four parts": lambda result: result[:4],
    "six parts": lambda result: (*result, None),
    "no parts": lambda result: None,
    "raises": raising(lambda: ValueError("two lines\nof text")),
    "raises two words": raising(lambda: TwoWords("this", 2)),
    "raises repeating": raising(lambda: Repeating("word")),
    "raises holding": raising(lambda: Holding("a lock")),
    "raises like a pipe": raising(lambda: ConnectionResetError("the simulator is gone")),
    "raises end of file": raising(lambda: EOFError("the simulator says no more")),
    "raises unpicklable": raising(unpicklable_kind),
    "exits": exits,
    "killed": killed,
    "leaves a child": leaves_a_child,
    "sleeps": sleeps,
    "well": lambda result: result,
    "float64": lambda result: (result[0].astype(np.float64), *result[1:]),
    "list": lambda result: (result[0].tolist(), *result[1:]),
    "integers": lambda result: (result[0].astype(np.int64), *result[1:]),
    "out of bounds": obs(np.full(SIZE, 1.5, np.float32)),
    "giant": obs(np.full(SIZE, 3e38, np.float32)),
    "giant float64": obs(np.full(SIZE, -3e38)),
    "reward int": reward(1),
    "reward bool": reward(np.True_),
    "reward float32": reward(np.float32(1)),
    "reward array": reward(np.ones((1, 1))),
    "reward fraction": reward(Fraction(1)),
    "flags of ints": flags(0, np.int8(0)),
    "flags of numpy": flags(np.False_, np.array(False)),
    "no info": lambda result: (*result[:4], None),
    "other info": lambda result: (*result[:4], {"a": np.zeros(3), "lock": threading.Lock()}),
    "list of parts": list,
    "three": obs(3),
    "three of int8": obs(np.int8(3)),
    "three in an array": obs(np.array(3)),
}


class Breaks(gym.Env[Any, Any]):
    """Counts its steps and does `act` at step `at` of its life if its seed is one of `who`.

    A step number of 0 is the first reset, and negative ones are the resets that follow. Where `once` names a
    file, it acts only while there is one.
    """

    action_space = spaces.Discrete(2)

    def __init__(
        self,
        act: str = "well",
        at: int = 1,
        who: tuple[int, ...] = (1,),
        length: int = 10,
        choices: bool = False,
        once: str = "",
        making: str = "",
        render_mode: str | None = None,
    ) -> None:
        self.observation_space = FOUR if choices else BOX
        self.act, self.at, self.who, self.length, self.once = act, at, who, length, once
        self.number = -1
        self.steps = self.t = self.resets = 0
        if making and multiprocessing.parent_process() is not None:
            MAKING[making]()

    def result(self, now: int) -> tuple[Any, ...]:
        value: Any = (
            2 + self.t % 4 if self.observation_space is FOUR else np.full(SIZE, self.t % 2, np.float32)
        )
        return value, 1.0, False, self.t == self.length, {}

    def spoil(self, now: int, result: tuple[Any, ...]) -> Any:
        acts = now == self.at and self.number in self.who and (not self.once or Path(self.once).exists())
        return ACTS[self.act](result) if acts else result

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.number = self.number if seed is None else seed
        self.t, now = 0, -self.resets
        self.resets += 1
        result = self.spoil(now, self.result(now))
        return (result[0], {}) if isinstance(result, tuple) and len(result) == 5 else result

    def step(self, action: Any) -> Any:
        self.t += 1
        self.steps += 1
        return self.spoil(self.steps, self.result(self.steps))


def notify_parent() -> None:
    os.kill(os.getppid(), signal.SIGUSR1)
    for number in SIGNALS:
        os.kill(os.getpid(), number)


def fails() -> None:
    raise OSError("no room for a simulator")


# What the constructor does in a worker, and not where its spaces are looked at.
MAKING: dict[str, Callable[[], None]] = {
    "exits": lambda: os._exit(4),
    "fails": fails,
    "notifies": notify_parent,
    "sleeps": lambda: time.sleep(1000),
}


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    gym.register("Breaks-v0", entry_point="test_env_faults:Breaks")
    yield
    gym.registry.pop("Breaks-v0")


@pytest.fixture
def build() -> Iterator[Callable[..., Envs]]:
    """Make environments and close them in the end, when none of their processes may be left."""
    made: list[Envs] = []

    def make(num: int = 2, workers: int = 0, limit: int | None = None, **kwargs: Any) -> Envs:
        made.append(Envs(EnvSpec("Breaks-v0", limit, kwargs), num, list(range(num)), workers))
        return made[-1]

    yield make
    started = time.monotonic()
    for each in made:
        each.close()
    assert multiprocessing.active_children() == []
    assert time.monotonic() - started < 4


def steps(envs: Envs, count: int) -> list[Any]:
    return [envs.step(np.zeros((envs.num_envs, 1), np.int64)) for _ in range(count)]


Build = Callable[..., Envs]
modes = pytest.mark.parametrize("workers", [0, 1, 2])

# --- What an environment gives ----------------------------------------------------------------------------

SHAPE = "an array of float32 with the shape (11,)"
CHOICE = "expected a whole number from 2 to 5"
FAULTS = {
    "nan": "the observation has nan in place 3 of 11",
    "inf": "the observation has -inf in place 3 of 11",
    "nan of float64": "the observation has nan in place 3 of 11",
    "both infinities": "the observation has inf in place 1 of 11",
    "beyond float32": "the observation has 1e+39 in place 3 of 11, more than the 3.4e+38 that float32 holds",
    "beyond, in sum zero": (
        "the observation has 1e+300 in place 1 of 11, more than the 3.4e+38 that float32 holds"
    ),
    "short": "the observation has the shape (3,), expected (11,)",
    "deep": "the observation has the shape (1, 11), expected (11,)",
    "none": f"the observation is None, expected {SHAPE}",
    "dict": f"the observation is a dict, expected {SHAPE}",
    "string": f"the observation is 'no', expected {SHAPE}",
    "objects": f"the observation is an array of object with the shape (11,), expected {SHAPE}",
    "ragged": f"the observation is a list, expected {SHAPE}",
    "complex": f"the observation is an array of complex64 with the shape (11,), expected {SHAPE}",
    "half": f"the observation is 2.5 (float), {CHOICE}",
    "six": f"the observation is 6 (int), {CHOICE}",
    "one": f"the observation is 1 (int64), {CHOICE}",
    "one in a row": f"the observation is 3 (ndarray), {CHOICE}",
    "reward nan": "the reward is nan, expected a finite number that float32 holds",
    "reward inf": "the reward is inf, expected a finite number that float32 holds",
    "reward beyond float32": "the reward is -1e+39, expected a finite number that float32 holds",
    "reward beyond all": "the reward is inf, expected a finite number that float32 holds",
    "reward none": "the reward is None, expected a real number",
    "reward pair": "the reward is an array of float64 with the shape (2,), expected a real number",
    "reward complex": "the reward is (1+0j) (complex), expected a real number",
    "reward string": "the reward is '1.0', expected a real number",
    "terminated none": "terminated is None, expected true or false",
    "terminated float": "terminated is 0.0 (float), expected true or false",
    "truncated two": "truncated is 2 (int), expected true or false",
    "four parts": "step() gave 4 parts, expected 5 parts (observation, reward, terminated, truncated, info)",
    "six parts": "step() gave 6 parts, expected 5 parts (observation, reward, terminated, truncated, info)",
    "no parts": "step() gave None, expected 5 parts (observation, reward, terminated, truncated, info)",
}
OF_CHOICES = ("half", "six", "one", "one in a row", "three", "three of int8", "three in an array")


@modes
@pytest.mark.parametrize("act", FAULTS)
def test_what_is_no_step_is_named_with_its_place(
    act: str, workers: int, build: Build, capfd: pytest.CaptureFixture[str]
) -> None:
    envs = build(workers=workers, act=act, at=27, choices=act in OF_CHOICES)
    envs.reset()
    steps(envs, 26)
    with pytest.raises(RunError) as trouble:
        steps(envs, 1)
    assert str(trouble.value) == f"Breaks-v0, environment 2 of 2, step 7 of its episode: {FAULTS[act]}"
    envs.close()
    assert capfd.readouterr().err == ""


@modes
@pytest.mark.parametrize(
    ("act", "words"),
    [
        ("nan", "the observation has nan in place 3 of 11"),
        ("short", "the observation has the shape (3,), expected (11,)"),
        ("four parts", "reset() gave 4 parts, expected 2 parts (observation, info)"),
        ("no parts", "reset() gave None, expected 2 parts (observation, info)"),
    ],
)
@pytest.mark.parametrize("at", [0, -2])
def test_what_is_no_reset_is_named(act: str, words: str, at: int, workers: int, build: Build) -> None:
    envs = build(workers=workers, act=act, at=at)
    if at:
        envs.reset()
        steps(envs, 19)
    with pytest.raises(RunError) as trouble:
        steps(envs, 1) if at else envs.reset()
    assert str(trouble.value) == f"Breaks-v0, environment 2 of 2, reset: {words}"


def test_one_environment_alone_needs_no_number(build: Build) -> None:
    envs = build(num=1, act="nan", who=(0,))
    envs.reset()
    with pytest.raises(RunError, match=r"^Breaks-v0, step 1 of its episode: the observation has nan"):
        steps(envs, 1)


@modes
@pytest.mark.parametrize("act", ["four parts", "six parts", "no parts"])
def test_a_time_limit_does_not_hide_how_many_parts_came(act: str, workers: int, build: Build) -> None:
    # Gymnasium's wrapper takes the step apart, and fails, before anything else sees it.
    envs = build(workers=workers, limit=20, act=act)
    envs.reset()
    with pytest.raises(
        RunError, match=r"step\(\) did not give 5 parts \(observation, .*, but .*unpack"
    ) as it:
        steps(envs, 1)
    assert str(it.value).startswith("Breaks-v0, environment 2 of 2, step 1 of its episode: ")
    assert "\n" not in str(it.value)


LEGAL = {
    "well": (None, 1.0),
    "float64": (None, 1.0),
    "list": (None, 1.0),
    "integers": (None, 1.0),
    "out of bounds": ([1.5] * SIZE, 1.0),
    "giant": ([float(np.float32(3e38))] * SIZE, 1.0),
    "giant float64": ([float(np.float32(-3e38))] * SIZE, 1.0),
    "reward int": (None, 1.0),
    "reward bool": (None, 1.0),
    "reward float32": (None, 1.0),
    "reward array": (None, 1.0),
    "reward fraction": (None, 1.0),
    "flags of ints": (None, 1.0),
    "flags of numpy": (None, 1.0),
    "no info": (None, 1.0),
    "other info": (None, 1.0),
    "list of parts": (None, 1.0),
    "three": ([0.0, 1.0, 0.0, 0.0], 1.0),
    "three of int8": ([0.0, 1.0, 0.0, 0.0], 1.0),
    "three in an array": ([0.0, 1.0, 0.0, 0.0], 1.0),
}


@modes
@pytest.mark.parametrize("act", LEGAL)
def test_what_is_odd_but_legal_passes_as_what_it_means(act: str, workers: int, build: Build) -> None:
    expected, of_reward = LEGAL[act]
    envs = build(workers=workers, act=act, at=3, choices=act in OF_CHOICES)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        envs.reset()
        step = steps(envs, 3)[-1]
        assert step.obs[1].tolist() == (expected or step.obs[0].tolist())
        assert step.reward.tolist() == [1.0, of_reward]
        assert not step.terminated.any()
        assert not step.truncated.any()
        assert steps(envs, 7)[-1].episodes == [(10.0, 10)] * 2


def test_every_act_is_tried() -> None:
    tried = {*FAULTS, *LEGAL, *RAISED, "exits", "killed", "leaves a child", "sleeps"}
    assert tried == set(ACTS)


def test_a_replayed_environment_passes_the_same_checks(build: Build, tmp_path: Path) -> None:
    kwargs: dict[str, Any] = {"act": "nan", "at": 13, "once": str(tmp_path / "now")}
    envs = build(**kwargs)
    envs.reset()
    steps(envs, 15)
    state = envs.state_dict()
    build(**kwargs).load_state_dict(state)
    (tmp_path / "now").touch()
    for workers in (0, 1, 2):
        with pytest.raises(
            RunError, match=r"2 of 2, step 3 of its episode, replayed: the observation has nan"
        ):
            build(workers=workers, **kwargs).load_state_dict(state)


# --- What an environment raises -----------------------------------------------------------------------------

RAISED: dict[str, tuple[type[Exception], str]] = {
    "raises": (ValueError, "two lines\nof text"),
    "raises two words": (TwoWords, "this and 2"),
    "raises repeating": (Repeating, "<word>"),
    "raises holding": (Holding, "a lock"),
    "raises like a pipe": (ConnectionResetError, "the simulator is gone"),
    "raises end of file": (EOFError, "the simulator says no more"),
    "raises unpicklable": (Exception, "of a function"),
}


@modes
@pytest.mark.parametrize("act", RAISED)
def test_an_exception_of_its_own_arrives_with_traceback_and_place(
    act: str, workers: int, build: Build, capfd: pytest.CaptureFixture[str]
) -> None:
    kind, message = RAISED[act]
    envs = build(num=3, workers=workers, act=act, at=27)
    envs.reset()
    steps(envs, 26)
    with pytest.raises(kind) as trouble:
        steps(envs, 1)
    if act == "raises unpicklable" and workers:
        assert type(trouble.value) is RuntimeError
        assert "Local: of a function" in str(trouble.value)
    else:
        assert str(trouble.value) == message
        assert not isinstance(trouble.value, RunError)
    assert trouble.value.__notes__ == ["Breaks-v0, environment 2 of 3, step 7 of its episode 3"]
    shown = "".join(traceback.format_exception(trouble.value))
    assert "test_env_faults.py" in shown
    assert "in act\n    raise error()" in shown
    if act == "raises two words":
        assert vars(trouble.value)["second"] == 2
    envs.close()
    assert capfd.readouterr().err == ""


@modes
def test_the_first_of_several_is_named(workers: int, build: Build) -> None:
    envs = build(num=4, workers=workers, act="nan", who=(3, 1, 2), at=5)
    envs.reset()
    with pytest.raises(RunError, match=r"environment 2 of 4, step 5"):
        steps(envs, 5)


def test_a_raising_reset_is_placed(build: Build) -> None:
    envs = build(act="raises", at=-1)
    envs.reset()
    with pytest.raises(ValueError, match="two lines") as trouble:
        steps(envs, 10)
    assert trouble.value.__notes__ == ["Breaks-v0, environment 2 of 2, reset to its episode 2"]


@modes
def test_episodes_are_counted_on_after_a_restart(workers: int, build: Build) -> None:
    first = build(act="raises", at=47)
    first.reset()
    steps(first, 33)
    again = build(workers=workers, act="raises", at=47 - 20)  # it replays this episode and the last
    again.load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match="two lines") as trouble:
        steps(again, 14)
    assert trouble.value.__notes__ == ["Breaks-v0, environment 2 of 2, step 7 of its episode 5"]


def test_a_worker_that_cannot_make_its_environment_says_why(build: Build) -> None:
    with pytest.raises(OSError, match="no room for a simulator") as trouble:
        build(workers=2, making="fails")
    assert trouble.value.__notes__ == ["Breaks-v0, environment 1 of 2, when it was made"]
    assert "in fails" in "".join(traceback.format_exception(trouble.value))
    assert multiprocessing.active_children() == []


# --- Processes that die -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("act", "how"),
    [
        ("killed", "killed by signal 9"),
        ("exits", "exit status 3"),
        ("leaves a child", "exit status 3"),
    ],
)
@pytest.mark.parametrize("at", [0, 4, -1])
def test_a_worker_that_dies_ends_the_wait(
    act: str, how: str, at: int, build: Build, capfd: pytest.CaptureFixture[str]
) -> None:
    envs = build(num=3, workers=3, act=act, at=at)
    started = time.monotonic()
    words = rf"^Breaks-v0, environment 2 of 3: its worker process died \({how}\)$"
    if at:
        envs.reset()
    calls: list[Callable[[], Any]] = [envs.reset, envs.state_dict, lambda: steps(envs, 10)]
    for call in calls if at == 0 else calls[::-1]:
        with pytest.raises(RunError, match=words):
            call()
    envs.close()
    assert multiprocessing.active_children() == []
    assert time.monotonic() - started < 4
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("call", ["reset", "step", "state_dict", "load_state_dict"])
def test_a_worker_that_was_killed_in_between_is_noticed(call: str, build: Build) -> None:
    envs = build(num=3, workers=3)
    envs.reset()
    state = envs.state_dict()
    worker = next(each for each in multiprocessing.active_children() if "environment 3 of 3" in each.name)
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    calls: dict[str, Callable[[], Any]] = {
        "reset": envs.reset,
        "step": lambda: steps(envs, 1),
        "state_dict": envs.state_dict,
        "load_state_dict": lambda: envs.load_state_dict(state),
    }
    with pytest.raises(RunError, match=r"environment 3 of 3: its worker process died \(killed by signal 9\)"):
        calls[call]()


def test_a_worker_that_dies_while_it_replays(build: Build, tmp_path: Path) -> None:
    kwargs: dict[str, Any] = {"act": "exits", "at": 13, "once": str(tmp_path / "now")}
    envs = build(workers=2, **kwargs)
    envs.reset()
    steps(envs, 15)
    state = envs.state_dict()
    (tmp_path / "now").touch()
    with pytest.raises(RunError, match=r"environment 2 of 2: its worker process died \(exit status 3\)"):
        build(workers=2, **kwargs).load_state_dict(state)


def test_a_worker_that_dies_while_it_is_made(build: Build) -> None:
    with pytest.raises(RunError, match=r"environment \d of 3: its worker process died \(exit status 4\)"):
        build(num=3, workers=3, making="exits")
    assert multiprocessing.active_children() == []


def test_a_death_is_told_although_another_never_answers(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_GRACE_S", 0.2)
    envs = build(num=2, workers=2, act="sleeps", at=3, who=(0,))
    envs.reset()
    steps(envs, 2)
    worker = next(each for each in multiprocessing.active_children() if "environment 2 of 2" in each.name)
    threading.Timer(0.3, worker.kill).start()
    started = time.monotonic()
    with pytest.raises(RunError, match=r"environment 2 of 2: .* \(killed by signal 9\)"):
        steps(envs, 1)
    envs.close()
    assert time.monotonic() - started < 3
    assert multiprocessing.active_children() == []


# --- Signals, and the end of the process that trains --------------------------------------------------------


def test_workers_take_no_notice_of_what_the_run_is_asked(build: Build) -> None:
    envs = build(workers=2)
    envs.reset()
    workers = multiprocessing.active_children()
    bystander = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    bystander.start()
    for process in (*workers, bystander):
        assert process.pid is not None
        for number in SIGNALS[1:]:
            os.kill(process.pid, number)
    assert len(steps(envs, 30)) == 30
    bystander.join(5)
    assert bystander.exitcode in [-number for number in SIGNALS[1:]]  # so the signals do arrive


def test_no_request_is_lost_or_held_back_while_workers_start(build: Build) -> None:
    arrived: list[int] = []
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    before = signal.signal(signal.SIGUSR1, lambda number, _: arrived.append(number))
    try:
        # Each worker also sends itself all of them before it has said a word.
        envs = build(workers=2, making="notifies")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert signal.SIGUSR1 in arrived
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask
    envs.reset()
    assert len(steps(envs, 3)) == 3


PROGRAM = """
import multiprocessing, os, signal, sys, threading, time
import gymnasium as gym, numpy as np
import test_env_faults as t
from rltemplate.envs.envs import Envs, EnvSpec

gym.register("Breaks-v0", entry_point=t.Breaks)

def start(**kwargs):
    return Envs(EnvSpec("Breaks-v0", None, kwargs), 3, [0, 1, 2], num_workers=3)

def say_workers():
    print(*[process.pid for process in multiprocessing.active_children()], flush=True)
"""


Program = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def program() -> Iterator[Program]:
    """Start a process in a group of its own that makes environments; of the group nothing is left behind."""
    started: list[subprocess.Popen[str]] = []

    def start(text: str) -> subprocess.Popen[str]:
        places = os.pathsep.join([str(HERE), str(HERE.parent)])
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", PROGRAM + text],
            env={**os.environ, "PYTHONPATH": places, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def alive(pids: list[int]) -> list[int]:
    def runs(pid: int) -> bool:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return False
        return state != "Z"  # whoever inherits it may take its time to bury it

    return [pid for pid in pids if runs(pid)]


def pids_of(process: subprocess.Popen[str]) -> list[int]:
    assert process.stdout is not None
    return [int(word) for word in process.stdout.readline().split()]


def gone_within(pids: list[int], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while alive(pids) and time.monotonic() < end:
        time.sleep(0.01)
    return not alive(pids)


linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

ORPHANS = {
    "idle": "envs = start(); envs.reset(); say_workers(); time.sleep(60)",
    "in a step": (
        "envs = start(act='sleeps', who=(0, 1, 2)); envs.reset(); say_workers();"
        "envs.step(np.zeros((3, 1), np.int64))"
    ),
    # There the end of a thread must not be taken for the end of the run.
    "made by a thread": (
        "made = []\n"
        "thread = threading.Thread(target=lambda: made.append(start())); thread.start(); thread.join()\n"
        "time.sleep(0.2); made[0].reset(); say_workers(); time.sleep(60)"
    ),
    "another one's copy of the pipe": (
        "first = start(); second = start(act='sleeps', who=(0, 1, 2)); first.close(); say_workers();"
        "second.reset(); second.step(np.zeros((3, 1), np.int64))"
    ),
    "being made": (
        "threading.Timer(1.0, say_workers).start()\n"
        "start(making='sleeps')"
    ),
}  # fmt: skip


@linux
@pytest.mark.parametrize("moment", ORPHANS)
def test_no_worker_outlives_a_killed_run(moment: str, program: Program) -> None:
    process = program(ORPHANS[moment])
    pids = pids_of(process)
    assert len(alive(pids)) == 3
    process.kill()
    assert gone_within(pids, 2)
    assert process.communicate(timeout=5) == ("", "")


@linux
def test_a_request_to_the_whole_group_leaves_workers_to_the_run(program: Program) -> None:
    process = program(
        "got = []; envs = start()\n"
        "for number in t.SIGNALS: signal.signal(number, lambda number, frame: got.append(number))\n"
        "envs.reset(); say_workers()\n"
        "while len(set(got)) < 5: envs.step(np.zeros((3, 1), np.int64))\n"
        "say_workers(); envs.step(np.zeros((3, 1), np.int64)); envs.close()\n"
        "print(*sorted(set(got)))"
    )
    pids = pids_of(process)
    assert len(alive(pids)) == 3
    for number in SIGNALS:
        os.killpg(process.pid, number)
    out, err = process.communicate(timeout=20)
    again, got = out.splitlines()
    assert sorted(map(int, again.split())) == sorted(pids)
    assert got.split() == [str(int(number)) for number in sorted(SIGNALS)]
    assert (process.returncode, err) == (0, "")
    assert alive(pids) == []


@linux
@pytest.mark.parametrize(
    "end",
    [
        "",  # nobody closes them
        "sys.exit(0)",
        "del envs; assert multiprocessing.active_children() == []",
    ],
)
def test_workers_that_nobody_closes_do_not_keep_the_process(end: str, program: Program) -> None:
    process = program(f"envs = start(); envs.reset(); say_workers()\n{end}")
    pids = pids_of(process)
    assert process.communicate(timeout=10) == ("", "")
    assert process.returncode == 0
    assert gone_within(pids, 2)


def test_what_the_user_can_mend_stays_a_refusal(build: Build) -> None:
    with pytest.raises(ConfigError, match=r"env.kwargs=.*wheels"):
        build(workers=2, wheels=4)


def test_environments_end_at_once_although_later_ones_hold_their_pipes(build: Build) -> None:
    first, second = build(workers=2), build(workers=2)
    started = time.monotonic()
    first.close()
    assert time.monotonic() - started < 2
    assert len(multiprocessing.active_children()) == 2
    second.reset()
    assert len(steps(second, 3)) == 3
