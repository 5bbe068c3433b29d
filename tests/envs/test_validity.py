"""Invalid values of an environment end the run with one line; odd but legal ones pass as what they mean."""

from __future__ import annotations

import warnings
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from runlab.envs.codec import flattened
from runlab.envs.recorder import ActionRecorder
from runlab.errors import RunError

SIZE = 11
BOX = spaces.Box(-1.0, 1.0, (SIZE,), np.float32)
FOUR = spaces.Discrete(4, start=2)
BYTES, HALF = spaces.Box(-128, 127, (1,), np.int8), spaces.Box(-1.0, 1.0, (1,), np.float16)
ZEROS = np.zeros(SIZE, np.float32)


def given(
    obs: Any = ZEROS, reward: Any = 1.0, terminated: Any = False, truncated: Any = False
) -> tuple[Any, ...]:
    """The result of a step."""
    return obs, reward, terminated, truncated, {}


def third(value: float) -> np.ndarray:
    return np.array([0.0, 0.0, value] + [0.0] * (SIZE - 3))


SHAPE = "expected an array of float32 with the shape (11,)"
CHOICE = "expected a whole number from 2 to 5"
FINITE = "expected a finite number that float32 holds"
FAULTS: dict[str, tuple[Any, str]] = {
    "nan": (given(third(np.nan).astype(np.float32)), f"the observation has nan in place 3 of 11, {FINITE}"),
    "great, in sum zero": (given(third(1e300) - third(1e300)[::-1]), "the observation has 1e+300 in place 3"),
    "list": (given([1.0, 2.0]), f"the observation is [1.0, 2.0] (list), {SHAPE}"),
    "choice too great": (given(6), f"the observation is 6 (int), {CHOICE}"),
    "bytes too great": (
        given(np.array([300])),
        "the observation has [300], expected numbers that int8 holds",
    ),
    "half": (given(np.array([1e5])), "the observation has inf in place 1 of 1"),
    "no reward": (given(reward=None), f"the reward is None (NoneType), {FINITE}"),
    "reward great": (given(reward=-(10**40)), f"(int), {FINITE}"),
    "truncated two": (given(truncated=2), "truncated is 2 (int), expected true or false"),
}
LEGAL: dict[str, tuple[Any, Any]] = {
    "float64": (given(np.zeros(SIZE)), ZEROS),
    "reward array": (given(reward=np.ones((1, 1), np.float32)), ZEROS),
    "flags of numpy": (given(terminated=np.int8(0), truncated=np.array(False)), ZEROS),
    "choice in an array": (given(np.array(3)), 3),
    "choice of another type": (given(np.uint8(3)), 3),
}


class Odd(gym.Env[Any, Any]):
    """Gives the result `act` at step `at`; 0 is the reset."""

    action_space = spaces.Discrete(2)

    def __init__(self, act: str, at: int) -> None:
        spaces = {"choice": FOUR, "bytes": BYTES, "half": HALF}
        self.observation_space = next((each for name, each in spaces.items() if name in act), BOX)
        self.usual = (
            2
            if "choice" in act
            else np.zeros(self.observation_space.shape or (), self.observation_space.dtype)
        )
        self.act, self.at, self.t = {**FAULTS, **LEGAL}[act][0], at, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self.step(None)[0], {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return self.act if self.t - 1 == self.at else given(self.usual)


@pytest.mark.parametrize(
    ("act", "at", "words"),
    [
        *((act, 7, words) for act, (_, words) in FAULTS.items()),
        ("nan", 0, FAULTS["nan"][1]),
    ],
)
def test_an_invalid_value_is_named_with_its_place(act: str, at: int, words: str) -> None:
    env = ActionRecorder(Odd(act, at), "Odd-v0")
    calls: list[Any] = [env.reset, *[lambda: env.step(0)] * at]
    for call in calls[:-1]:
        call()
    with pytest.raises(RunError) as trouble:
        calls[-1]()
    assert str(trouble.value).startswith(f"Odd-v0, {f'step {at} of its episode' if at else 'reset'}: ")
    assert words in str(trouble.value)
    assert "\n" not in str(trouble.value)


@pytest.mark.parametrize("act", LEGAL)
def test_odd_but_legal_values_pass_as_what_they_mean(act: str) -> None:
    env = ActionRecorder(Odd(act, 3), "Odd-v0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env.reset()
        for _ in range(3):
            obs, *rest = env.step(0)
    assert np.array_equal(obs, LEGAL[act][1])
    assert rest == [1.0, False, False]
    assert [type(value) for value in rest] == [float, bool, bool]


class InParts(gym.Env[Any, Any]):
    """Returns `obs` at its first reset."""

    parts = spaces.Dict({"a": spaces.Box(0, 255, (2,), np.uint8), "f": HALF})
    observation_space = spaces.Dict({"m": spaces.MultiDiscrete([3, 2]), "t": spaces.Tuple([parts, FOUR])})
    action_space = spaces.Discrete(2)

    def __init__(self, obs: Any) -> None:
        self.obs = obs

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self.obs, {}


def in_parts(m: Any = (0, 1), a: Any = (0, 255), f: Any = (0.5,), choice: Any = 3) -> dict[str, Any]:
    return {"m": np.array(m), "t": ({"a": np.array(a), "f": np.array(f)}, choice), "unannounced": 1}


def test_parts_of_an_observation_are_checked_before_they_become_a_vector() -> None:
    env = ActionRecorder(flattened("Odd-v0", InParts(in_parts())), "Odd-v0")
    assert env.reset().tolist() == [1, 0, 0, 0, 1, 0, 255, 0.5, 0, 1, 0, 0]
    for m in (np.array([2, 1], np.int8), [2, 1]):  # not of the type of the space
        env = ActionRecorder(flattened("Odd-v0", InParts(in_parts() | {"m": m})), "Odd-v0")
        assert env.reset().tolist()[:5] == [0, 0, 1, 0, 1]
    for obs, words in (
        (
            in_parts(m=(0.5, 1)),
            "part m: the observation is array([0.5, 1. ]), expected an element of MultiDi",
        ),
        (in_parts(m=(3, 1)), "part m: the observation is array([3, 1]), expected an element of MultiDiscr"),
        (in_parts(a=(300, -1)), "part t: part 0: part a: the observation has [300, -1], expected numbers "),
        (in_parts(f=(1e5,)), "part t: part 0: part f: the observation has inf in place 1 of 1"),
        (in_parts(choice=6), f"part t: part 1: the observation is 6 (int), {CHOICE}"),
        ({"m": np.array((0, 1))}, "expected a part t"),
        (None, "the observation is None (NoneType), expected a part m"),
    ):
        with pytest.raises(RunError) as trouble:
            ActionRecorder(flattened("Odd-v0", InParts(obs)), "Odd-v0").reset()
        assert str(trouble.value).startswith("Odd-v0, reset: ")
        assert words in str(trouble.value)
        assert "\n" not in str(trouble.value)
