"""Invalid values of an environment end the run in one line; odd but legal ones pass."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from rltemplate.envs.envs import Envs
from rltemplate.envs.make import EnvSpec
from rltemplate.types import RunError

SIZE = 11
BOX = spaces.Box(-1.0, 1.0, (SIZE,), np.float32)
FOUR = spaces.Discrete(4, start=2)
Act = Callable[[tuple[Any, ...]], Any]


def obs(value: Any) -> Act:
    return lambda result: (value, *result[1:])


def spoilt(value: float, kind: type[np.floating[Any]] = np.float32) -> Act:
    array = np.zeros(SIZE, kind)
    array[2] = value
    return obs(array)


def reward(value: Any) -> Act:
    return lambda result: (result[0], value, *result[2:])


def flags(terminated: Any = False, truncated: Any = False) -> Act:
    return lambda result: (*result[:2], terminated, truncated, result[4])


SHAPE = "an array of float32 with the shape (11,)"
CHOICE = "expected a whole number from 2 to 5"
FINITE = "expected a finite number that float32 holds"
GREAT = "more than the 3.4e+38 that float32 holds"
PARTS = "expected 5 parts (observation, reward, terminated, truncated, info)"
FAULTS: dict[str, tuple[Act, str]] = {
    "nan": (spoilt(np.nan), "the observation has nan in place 3 of 11"),
    "inf": (spoilt(-np.inf), "the observation has -inf in place 3 of 11"),
    "nan of float64": (spoilt(np.nan, np.float64), "the observation has nan in place 3 of 11"),
    "great": (spoilt(1e39, np.float64), f"the observation has 1e+39 in place 3 of 11, {GREAT}"),
    "great, in sum zero": (
        obs(np.array([1e300, -1e300] + [0] * 9)),
        f"the observation has 1e+300 in place 1 of 11, {GREAT}",
    ),
    "short": (obs(np.zeros(3, np.float32)), "the observation has the shape (3,), expected (11,)"),
    "none": (obs(None), f"the observation is None, expected {SHAPE}"),
    "dict": (obs({"x": 1}), f"the observation is a dict, expected {SHAPE}"),
    "ragged": (obs([[1.0], 2.0]), f"the observation is a list, expected {SHAPE}"),
    "complex": (
        obs(np.zeros(SIZE, np.complex64)),
        f"the observation is an array of complex64 with the shape (11,), expected {SHAPE}",
    ),
    "half a choice": (obs(2.5), f"the observation is 2.5 (float), {CHOICE}"),
    "choice too great": (obs(6), f"the observation is 6 (int), {CHOICE}"),
    "choice too small": (obs(np.int64(1)), f"the observation is 1 (int64), {CHOICE}"),
    "reward nan": (reward(float("nan")), f"the reward is nan, {FINITE}"),
    "reward great": (reward(-1e39), f"the reward is -1e+39, {FINITE}"),
    "reward beyond all": (reward(10**400), f"the reward is inf, {FINITE}"),
    "reward none": (reward(None), "the reward is None, expected a real number"),
    "reward pair": (
        reward(np.zeros(2)),
        "the reward is an array of float64 with the shape (2,), expected a real number",
    ),
    "reward complex": (reward(1 + 0j), "the reward is (1+0j) (complex), expected a real number"),
    "reward string": (reward("1.0"), "the reward is '1.0', expected a real number"),
    "terminated none": (flags(None), "terminated is None, expected true or false"),
    "truncated two": (flags(False, 2), "truncated is 2 (int), expected true or false"),
    "four parts": (lambda result: result[:4], f"step() gave 4 parts, {PARTS}"),
    "no parts": (lambda result: None, f"step() gave None, {PARTS}"),
}
ZEROS: list[float] = [0.0] * SIZE
LEGAL: dict[str, tuple[Act, list[float]]] = {
    "float64": (lambda result: (result[0].astype(np.float64), *result[1:]), ZEROS),
    "list": (lambda result: (result[0].tolist(), *result[1:]), ZEROS),
    "integers": (lambda result: (result[0].astype(np.int64), *result[1:]), ZEROS),
    "out of bounds": (obs(np.full(SIZE, 1.5, np.float32)), [1.5] * SIZE),
    "giant": (obs(np.full(SIZE, -3e38)), [float(np.float32(-3e38))] * SIZE),
    "reward int": (reward(1), ZEROS),
    "reward bool": (reward(np.True_), ZEROS),
    "reward array": (reward(np.ones((1, 1), np.float32)), ZEROS),
    "reward fraction": (reward(Fraction(1)), ZEROS),
    "flags of ints": (flags(0, np.int8(0)), ZEROS),
    "flags of numpy": (flags(np.False_, np.array(False)), ZEROS),
    "other info": (lambda result: (*result[:4], {"lock": threading.Lock()}), ZEROS),
    "list of parts": (list, ZEROS),
    "choice of int8": (obs(np.int8(3)), [0.0, 1.0, 0.0, 0.0]),
    "choice in an array": (obs(np.array(3)), [0.0, 1.0, 0.0, 0.0]),
}


class Odd(gym.Env[Any, Any]):
    """Does `act` at step `at` of its life if its seed is 1; 0 is the first reset, -1 the one that follows."""

    action_space = spaces.Discrete(2)

    def __init__(self, act: str, at: int = 1, once: str = "", render_mode: str | None = None) -> None:
        self.observation_space = FOUR if "choice" in act else BOX
        self.act, self.at, self.once = {**FAULTS, **LEGAL}[act][0], at, once
        self.seed, self.steps, self.t, self.resets = 0, 0, 0, 0

    def result(self, now: int) -> Any:
        value = 2 if self.observation_space is FOUR else np.zeros(SIZE, np.float32)
        acts = now == self.at and self.seed == 1 and (not self.once or Path(self.once).exists())
        result: tuple[Any, ...] = (value, 1.0, False, self.t == 10, {})
        return self.act(result) if acts else result

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.seed = self.seed if seed is None else seed
        self.t, self.resets = 0, self.resets + 1
        result = self.result(1 - self.resets)
        return (result[0], {}) if isinstance(result, tuple) and len(result) == 5 else result

    def step(self, action: Any) -> Any:
        self.t, self.steps = self.t + 1, self.steps + 1
        return self.result(self.steps)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    gym.register("Odd-v0", entry_point="test_validity:Odd")
    yield
    gym.registry.pop("Odd-v0")


def build(limit: int | None = None, num: int = 2, **kwargs: Any) -> Envs:
    return Envs(EnvSpec("Odd-v0", limit, kwargs), num, [1] if num == 1 else list(range(num)))


def play(envs: Envs, count: int) -> Any:
    return [envs.step(np.zeros((envs.num_envs, 1), np.int64)) for _ in range(count)][-1]


@pytest.mark.parametrize("act", FAULTS)
def test_an_invalid_step_is_named_with_its_place(act: str) -> None:
    envs = build(act=act, at=27)
    envs.reset()
    play(envs, 26)
    with pytest.raises(RunError) as trouble:
        play(envs, 1)
    assert str(trouble.value) == f"Odd-v0, environment 2 of 2, step 7 of its episode: {FAULTS[act][1]}"


@pytest.mark.parametrize(
    ("act", "words"),
    [
        ("nan", "the observation has nan in place 3 of 11"),
        ("four parts", "reset() gave 4 parts, expected 2 parts (observation, info)"),
        ("no parts", "reset() gave None, expected 2 parts (observation, info)"),
    ],
)
@pytest.mark.parametrize("at", [0, -2])
def test_an_invalid_reset_is_named(act: str, words: str, at: int) -> None:
    envs = build(act=act, at=at, num=1)
    if at:
        envs.reset()
        play(envs, 19)
    with pytest.raises(RunError) as trouble:
        play(envs, 1) if at else envs.reset()
    assert str(trouble.value) == f"Odd-v0, reset: {words}"


@pytest.mark.parametrize("act", ["four parts", "no parts"])
def test_a_time_limit_does_not_hide_how_many_parts_came(act: str) -> None:
    """Gymnasium's wrapper takes the step apart, and fails, before anything else sees it."""
    envs = build(limit=20, act=act)
    envs.reset()
    words = r"2 of 2, step 1 of its episode: step\(\) did not give 5 parts \(observation, .*, but .*unpack"
    with pytest.raises(RunError, match=words) as it:
        play(envs, 1)
    assert "\n" not in str(it.value)


@pytest.mark.parametrize("act", LEGAL)
def test_odd_but_legal_values_pass_as_what_they_mean(act: str) -> None:
    envs = build(act=act, at=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        envs.reset()
        step = play(envs, 3)
        assert step.obs[1].tolist() == LEGAL[act][1]
        assert step.reward.tolist() == [1.0, 1.0]
        assert not (step.terminated | step.truncated).any()
        assert play(envs, 7).episodes == [(10.0, 10)] * 2


def test_a_replayed_environment_passes_the_same_checks(tmp_path: Path) -> None:
    kwargs: dict[str, Any] = {"act": "nan", "at": 13, "once": str(tmp_path / "now")}
    envs = build(**kwargs)
    envs.reset()
    play(envs, 15)
    state = envs.state_dict()
    build(**kwargs).load_state_dict(state)
    (tmp_path / "now").touch()
    with pytest.raises(RunError, match=r"2 of 2, step 3 of its episode, replayed: the observation has nan"):
        build(**kwargs).load_state_dict(state)
