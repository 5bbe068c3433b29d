"""Runners and walkers that are stepped several at once: the same bits as one by one, or one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import gymnasium as gym
import mujoco
import numpy as np
import pytest
from gymnasium.envs.mujoco.hopper_v5 import HopperEnv
from gymnasium.wrappers import TransformReward

from rltemplate import locomotion
from rltemplate.env_state import Recorder
from rltemplate.envs import EnvSpec, make_env
from rltemplate.locomotion import AtOnce, in_this_process
from rltemplate.types import RunError
from rltemplate.vector import Kind, Serial

IDS = ["Ant-v5", "HalfCheetah-v5", "Hopper-v5", "Humanoid-v5", "Swimmer-v5", "Walker2d-v5"]
# Whatever an argument of theirs may change in what is computed.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((env_id, {}) for env_id in IDS),
    *((env_id, {"exclude_current_positions_from_observation": False}) for env_id in IDS),
    *((env_id, {"forward_reward_weight": 2, "ctrl_cost_weight": 0.3, "frame_skip": 3}) for env_id in IDS),
    *((env_id, {"terminate_when_unhealthy": False}) for env_id in ("Ant-v5", "Humanoid-v5", "Walker2d-v5")),
    ("Hopper-v5", {"terminate_when_unhealthy": False, "healthy_state_range": (-3.0, 2.0)}),
    ("Hopper-v5", {"healthy_z_range": (0.9, 1.3), "healthy_angle_range": (-0.05, 0.1)}),
    ("Hopper-v5", {"healthy_state_range": (-0.1, 0.2), "healthy_reward": 0.7}),
    ("Ant-v5", {"include_cfrc_ext_in_observation": False, "main_body": "torso"}),
    ("Ant-v5", {"main_body": 4, "contact_force_range": (-0.2, 0.1), "contact_cost_weight": 3}),
    ("Humanoid-v5", {"include_cinert_in_observation": False, "include_cfrc_ext_in_observation": False}),
    ("Humanoid-v5", {"include_cvel_in_observation": False, "include_qfrc_actuator_in_observation": False}),
    ("Humanoid-v5", {"contact_cost_weight": 0.1, "contact_cost_range": (0.5, 2.0)}),
    *((env_id, {"healthy_z_range": (0.5, 0.7)}) for env_id in ("Ant-v5",)),
    *((env_id, {"healthy_z_range": (1.2, 1.38)}) for env_id in ("Humanoid-v5", "Walker2d-v5")),
]
LIMIT = 40  # steps of an episode

Make = Callable[[Kind, Sequence[Recorder]], Serial]


def kind_of(env_id: str, num: int, limit: int | None = LIMIT, **kwargs: Any) -> Kind:
    make = partial(make_env, EnvSpec(env_id, limit, kwargs))
    first = make()
    return Kind(make, env_id, num, first.observation_space, first.action_space)


def opened(kind: Kind, make: Make = in_this_process) -> Serial:
    return make(kind, kind.members(range(kind.num_envs)))


def actions(kind: Kind, num_steps: int, seed: int = 3) -> np.ndarray:
    space = kind.action_space
    assert isinstance(space, gym.spaces.Box)
    shape = (num_steps, kind.num_envs, *space.shape)
    return np.random.default_rng(seed).uniform(space.low, space.high, shape).astype(np.float32)


def going_on(envs: Serial, all_actions: np.ndarray) -> Iterator[bytes]:
    for each in all_actions:
        envs.begin(each)
        outcome = envs.end()
        yield from (array.tobytes() for array in outcome)
        over = outcome.terminated | outcome.truncated
        if over.any():
            yield envs.reset_some(over)[over].tobytes()


def trail(envs: Serial, all_actions: np.ndarray) -> list[bytes]:
    first = envs.reset(range(100, 100 + len(all_actions[0]))).tobytes()
    return [first, *going_on(envs, all_actions)]


@pytest.mark.parametrize(("env_id", "kwargs"), VARIANTS)
def test_bits_are_those_of_one_by_one(env_id: str, kwargs: dict[str, Any]) -> None:
    kind = kind_of(env_id, 3, **kwargs)
    steps = actions(kind, 100)
    together, single = opened(kind), opened(kind, Serial)
    assert isinstance(together, AtOnce)
    assert trail(together, steps) == trail(single, steps)
    kept, expected = together.states(), single.states()
    for one, other in zip(kept, expected, strict=True):
        assert one.pop("actions").numpy().tobytes() == other.pop("actions").numpy().tobytes()
        assert one == other


@pytest.mark.parametrize("env_id", IDS)
def test_one_by_itself_is_as_it_was_too(env_id: str) -> None:
    kind = kind_of(env_id, 1)
    steps = actions(kind, 60)
    assert trail(opened(kind), steps) == trail(opened(kind, Serial), steps)


@pytest.mark.parametrize("env_id", ["Ant-v5", "Humanoid-v5"])
def test_how_actions_lie_in_memory_changes_nothing(env_id: str) -> None:
    kind = kind_of(env_id, 3)
    steps = actions(kind, 30)
    turned = np.ascontiguousarray(steps.transpose(0, 2, 1)).transpose(0, 2, 1)
    assert turned[0].flags.f_contiguous
    assert trail(opened(kind), turned) == trail(opened(kind, Serial), steps)


@pytest.mark.slow
@pytest.mark.parametrize("num", [1, 2, 5, 8])
@pytest.mark.parametrize("env_id", IDS)
def test_bits_stay_those_of_one_by_one(env_id: str, num: int) -> None:
    kind = kind_of(env_id, num, limit=None)
    steps = actions(kind, 3000)
    assert trail(opened(kind), steps) == trail(opened(kind, Serial), steps)


def test_episodes_end_in_both_ways() -> None:
    """Or the comparisons above would show little."""
    kind = kind_of("Hopper-v5", 3)
    envs = opened(kind)
    envs.reset([1, 2, 3])
    ends = np.zeros((2, 3), np.int64)
    for each in actions(kind, 100):
        envs.begin(each)
        outcome = envs.end()
        ends += [outcome.terminated, outcome.truncated]
        envs.reset_some(outcome.terminated | outcome.truncated)
    assert (ends.sum(1) > 0).all()


@pytest.mark.parametrize("env_id", IDS)
def test_another_order_of_a_sum_is_noticed(env_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = kind_of(env_id, 3)
    steps = actions(kind, 40)
    expected = trail(opened(kind, Serial), steps)

    def backwards(values: np.ndarray) -> np.ndarray:
        total = np.zeros(len(values), values.dtype)
        for column in np.square(values).T[::-1]:
            total = total + column
        return total

    if env_id == "Swimmer-v5":  # whose sum has two parts, and one order
        monkeypatch.setattr(locomotion, "_summed_squares", lambda values: np.square(values * 1.0001).sum(1))
    else:
        monkeypatch.setattr(locomotion, "_summed_squares", backwards)
    assert trail(opened(kind), steps) != expected


@pytest.mark.parametrize(("before", "after"), [(in_this_process, Serial), (Serial, in_this_process)])
@pytest.mark.parametrize("env_id", ["Ant-v5", "Hopper-v5", "Humanoid-v5"])
def test_one_goes_on_where_the_other_stood(env_id: str, before: Make, after: Make) -> None:
    kind = kind_of(env_id, 3)
    steps, more = np.split(actions(kind, 90), [65])
    envs = opened(kind, before)
    returns, lengths = np.zeros(3), np.zeros(3, np.int64)
    envs.reset([7, 8, 9])
    for each in steps:
        envs.begin(each)
        outcome = envs.end()
        returns, lengths = returns + outcome.reward, lengths + 1
        over = outcome.terminated | outcome.truncated
        returns[over], lengths[over] = 0.0, 0
        envs.reset_some(over)
    states = envs.states()
    expected = list(going_on(envs, more))
    other = opened(kind, after)
    other.restore(states, returns, lengths)
    assert list(going_on(other, more)) == expected


def plain(env_id: str = "Hopper-v5", **kwargs: Any) -> gym.Env[Any, Any]:
    return gym.make(env_id, disable_env_checker=True, **kwargs)


def patched(env: Any) -> Any:
    step = env.step
    env.step = lambda action: step(0.5 * action)
    return env


class OwnHopper(HopperEnv):
    """One whose reward is its own."""

    def _get_rew(self, x_velocity: float, action: np.ndarray) -> Any:
        reward, parts = super()._get_rew(x_velocity, action)
        return 2.0 * reward, parts


class OwnHopperInAFileOfTheName(OwnHopper):
    """The same, where it is not told by the name of its file."""


OwnHopperInAFileOfTheName.__module__ = "mine.hopper_v5"


def twice(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    return TransformReward(env, lambda reward: 2.0 * float(reward))


OTHERS: dict[str, Callable[[], gym.Env[Any, Any]]] = {
    "a wrapper": lambda: twice(plain()),
    "a wrapper inside": lambda: gym.wrappers.TimeLimit(twice(HopperEnv()), 50),
    "a check of every step": lambda: gym.make("Hopper-v5"),
    "a class of one's own": OwnHopper,
    "a class of one's own in a file of the name": OwnHopperInAFileOfTheName,
    "a method of one's own": lambda: patched(HopperEnv()),
    "a method of one's own on a wrapper": lambda: patched(plain()),
    "pictures": lambda: HopperEnv(render_mode="rgb_array"),
    "an older version": lambda: plain("Hopper-v4"),
    "no runner": lambda: plain("Reacher-v5"),
    # Of these arguments the plain ones make something else than could be made here.
    "a range for each part": lambda: plain(healthy_state_range=[[-100.0] * 10, [100.0] * 10]),
    "an array for a range": lambda: plain(healthy_z_range=np.array([0.7, 9.0])),
    "a range for each force": lambda: plain("Ant-v5", contact_force_range=[[-1.0] * 6, [1.0] * 6]),
    "no flag": lambda: plain(terminate_when_unhealthy=2),
    "a body that is not there": lambda: plain("Ant-v5", main_body="torsoo"),
}


@pytest.mark.filterwarnings("ignore:.*out of date:DeprecationWarning")
@pytest.mark.parametrize("other", OTHERS)
def test_whatever_differs_is_stepped_one_by_one(other: str) -> None:
    make = OTHERS[other]
    first = make()
    kind = Kind(make, "Other-v0", 2, first.observation_space, first.action_space)
    assert type(opened(kind)) is Serial


@pytest.mark.parametrize("name", ["_get_rew", "is_healthy", "step"])
def test_a_method_that_was_put_into_the_class_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(opened(kind_of("Hopper-v5", 2))) is AtOnce
    new = property(lambda self: True) if name == "is_healthy" else lambda self, *args: None
    monkeypatch.setattr(HopperEnv, name, new)
    assert type(opened(kind_of("Hopper-v5", 2))) is Serial


def test_arguments_that_change_nothing_here_may_be_anything() -> None:
    view = {"lookat": np.array([0.0, 0.0, 1.15])}
    assert type(opened(kind_of("Hopper-v5", 2, default_camera_config=view))) is AtOnce


def test_a_plain_one_without_any_wrapper_is_stepped_at_once() -> None:
    """So that it is the difference that matters above."""
    first = HopperEnv()
    kind = Kind(HopperEnv, "Hopper-v5", 2, first.observation_space, first.action_space)
    steps = actions(kind, 60)
    together = opened(kind)
    assert isinstance(together, AtOnce)
    assert trail(together, steps) == trail(opened(kind, Serial), steps)


def test_environments_of_different_parameters_are_stepped_one_by_one() -> None:
    kind = kind_of("Hopper-v5", 2)
    members = kind.members(range(2))
    members[1].unwrapped._healthy_reward = 2.0  # type: ignore[attr-defined]
    assert type(in_this_process(kind, members)) is Serial


@pytest.mark.parametrize("file", ["hopper_v5", "mujoco_env", "common"])
def test_another_version_of_a_file_is_stepped_one_by_one(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(locomotion._FILES, file, "0123")
    locomotion._is_known.cache_clear()
    assert type(opened(kind_of("Hopper-v5", 2))) is Serial
    monkeypatch.undo()
    locomotion._is_known.cache_clear()
    assert type(opened(kind_of("Hopper-v5", 2))) is AtOnce


def test_what_is_no_number_names_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    envs = opened(kind_of("Hopper-v5", 3))
    assert isinstance(envs, AtOnce)
    envs.reset([1, 2, 3])
    outcome = envs._task.outcome

    def broken(given: np.ndarray, where: int) -> Any:
        parts = outcome(given)
        parts[where][1] = np.nan
        return parts

    still = np.zeros((3, 3), np.float32)
    envs.begin(still)
    envs.end()
    for where, what in enumerate(["the observation has nan in place 1 of 11", "the reward is nan"]):
        monkeypatch.setattr(envs._task, "outcome", partial(broken, where=where))
        envs.begin(still)
        with pytest.raises(
            RunError, match=rf"Hopper-v5, environment 2 of 3, step {2 + where} of its episode: {what}"
        ):
            envs.end()


def test_numbers_that_are_only_large_are_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    envs = opened(kind_of("Hopper-v5", 3))
    assert isinstance(envs, AtOnce)
    envs.reset([1, 2, 3])
    large = np.full((3, 11), 1e25), np.full(3, -1e30), np.zeros(3, np.bool_)
    monkeypatch.setattr(envs._task, "outcome", lambda given: large)
    envs.begin(np.zeros((3, 3), np.float32))
    assert (envs.end().reward == -1e30).all()


def failing(envs: Serial, where: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """What comes out where the environment before `where` gives NaN and this one's simulation fails."""
    broken: Any = envs._members[where].unwrapped
    before: Any = envs._members[where - 1].unwrapped
    simulate = mujoco.mj_step

    def fail(model: Any, data: Any, nstep: int) -> None:
        if data is broken.data:
            raise RuntimeError("the simulation is unstable")
        simulate(model, data, nstep)
        if data is before.data and stepped:
            data.qpos[:] = np.nan

    stepped: list[bool] = []
    monkeypatch.setattr(mujoco, "mj_step", fail)
    if isinstance(envs, AtOnce):
        monkeypatch.setattr(envs, "_simulate", fail)
    told = []
    for nan in (False, True):
        stepped += [nan] * nan
        envs.reset([1, 2, 3])
        envs.begin(np.zeros((3, 3), np.float32))
        with pytest.raises(Exception, match=r"Hopper|unstable") as caught:
            envs.end()
        told.append(f"{caught.type.__name__} {caught.value} {getattr(caught.value, '__notes__', [])}")
    return "\n".join(told)


@pytest.mark.parametrize("where", [1, 2])
def test_what_fails_first_is_raised_as_one_by_one(where: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = kind_of("Hopper-v5", 3)
    with monkeypatch.context() as patch:
        expected = failing(opened(kind, Serial), where, patch)
    assert f"environment {where + 1} of 3, step 1 of its episode 1" in expected
    assert f"RunError Hopper-v5, environment {where} of 3, step 1" in expected
    with monkeypatch.context() as patch:
        assert failing(opened(kind), where, patch) == expected
