"""Invalid values of an environment end the run with one line; odd but legal ones pass as what they mean."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
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


SHAPE = "expected an array of float32 with the shape (11,)"
CHOICE = "expected a whole number from 2 to 5"
FINITE = "expected a finite number that float32 holds"
PARTS = "expected 5 parts (observation, reward, terminated, truncated, info)"
FAULTS: dict[str, tuple[Act, str]] = {
    "nan": (spoilt(np.nan), f"the observation has nan in place 3 of 11, {FINITE}"),
    "great": (spoilt(1e39, np.float64), f"the observation has 1e+39 in place 3 of 11, {FINITE}"),
    "great, in sum zero": (obs(np.array([1e300, -1e300] + [0] * 9)), "the observation has 1e+300 in place 1"),
    "ragged": (obs([[1.0], 2.0]), f"the observation is [[1.0], 2.0] (list), {SHAPE}"),
    "choice too great": (obs(6), f"the observation is 6 (int), {CHOICE}"),
    "reward nan": (reward(float("nan")), f"the reward is nan (float), {FINITE}"),
    "reward great": (reward(-(10**400)), f"(int), {FINITE}"),
    "truncated two": (flags(False, 2), "truncated is 2 (int), expected true or false"),
    "four parts": (lambda result: result[:4], PARTS),
    "no parts": (lambda result: None, f"step() gave None (NoneType), {PARTS}"),
}
ZEROS: list[float] = [0.0] * SIZE
LEGAL: dict[str, tuple[Act, list[float]]] = {
    "float64": (lambda result: (result[0].astype(np.float64), *result[1:]), ZEROS),
    "out of bounds": (obs(np.full(SIZE, 1.5, np.float32)), [1.5] * SIZE),
    "giant": (obs(np.full(SIZE, -3e38)), [float(np.float32(-3e38))] * SIZE),
    "reward array": (reward(np.ones((1, 1), np.float32)), ZEROS),
    "flags of numpy": (flags(np.int8(0), np.array(False)), ZEROS),
    "choice in an array": (obs(np.array(3)), [0.0, 1.0, 0.0, 0.0]),
}


class Odd(gym.Env[Any, Any]):
    """Does `act` at step `at` of its life if its seed is 1; 0 is the first reset, -1 the one that follows."""

    action_space = spaces.Discrete(2)

    def __init__(self, act: str, at: int = 1, render_mode: str | None = None) -> None:
        self.observation_space = FOUR if "choice" in act else BOX
        self.act, self.at = {**FAULTS, **LEGAL}[act][0], at
        self.seed, self.steps, self.t, self.resets = 0, 0, 0, 0

    def result(self, now: int) -> Any:
        value = 2 if self.observation_space is FOUR else np.zeros(SIZE, np.float32)
        result: tuple[Any, ...] = (value, 1.0, False, self.t == 10, {})
        return self.act(result) if now == self.at and self.seed == 1 else result

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


def build(**kwargs: Any) -> Envs:
    return Envs(EnvSpec("Odd-v0", None, kwargs), 2, [0, 1])


def play(envs: Envs, count: int) -> Any:
    return [envs.step(np.zeros((envs.num_envs, 1), np.int64)) for _ in range(count)][-1]


@pytest.mark.parametrize("act", FAULTS)
def test_an_invalid_step_is_named_with_its_place(act: str) -> None:
    envs = build(act=act, at=27)
    envs.reset()
    play(envs, 26)
    with pytest.raises(RunError) as trouble:
        play(envs, 1)
    assert str(trouble.value).startswith("Odd-v0, environment 2 of 2, step 7 of its episode: ")
    assert FAULTS[act][1] in str(trouble.value)
    assert "\n" not in str(trouble.value)


@pytest.mark.parametrize(
    ("act", "at", "words"),
    [
        ("nan", -2, "the observation has nan in place 3 of 11"),
        ("no parts", 0, "reset() gave None (NoneType), expected 2 parts (observation, info)"),
    ],
)
def test_an_invalid_reset_is_named(act: str, at: int, words: str) -> None:
    envs = build(act=act, at=at)
    if at:
        envs.reset()
        play(envs, 19)
    with pytest.raises(RunError) as trouble:
        play(envs, 1) if at else envs.reset()
    assert str(trouble.value).startswith(f"Odd-v0, environment 2 of 2, reset: {words}")


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
