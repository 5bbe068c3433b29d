"""Environments that are stepped several at once: the same bits as one by one, or one by one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import gymnasium as gym
import mujoco
import numpy as np
import pytest
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from gymnasium.envs.mujoco.hopper_v5 import HopperEnv
from gymnasium.wrappers import TransformReward

from rltemplate import at_once, cart_pole, locomotion
from rltemplate.at_once import AtOnce, Convoy, Task, in_this_process
from rltemplate.env_state import Recorder
from rltemplate.envs import Envs, EnvSpec, make_env
from rltemplate.types import RunError
from rltemplate.vector import Kind, Serial
from rltemplate.workers import Hosts

ROBOTS = ["Ant-v5", "HalfCheetah-v5", "Hopper-v5", "Humanoid-v5", "Swimmer-v5", "Walker2d-v5"]
IDS = [*ROBOTS, "CartPole-v1"]
# Whatever an argument of theirs may change in what is computed.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((env_id, {}) for env_id in IDS),
    *((env_id, {"exclude_current_positions_from_observation": False}) for env_id in ROBOTS),
    *((env_id, {"forward_reward_weight": 2, "ctrl_cost_weight": 0.3, "frame_skip": 3}) for env_id in ROBOTS),
    ("CartPole-v1", {"sutton_barto_reward": True}),
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
    space, rng = kind.action_space, np.random.default_rng(seed)
    if isinstance(space, gym.spaces.Discrete):
        return rng.integers(space.n, size=(num_steps, kind.num_envs))
    assert isinstance(space, gym.spaces.Box)
    shape = (num_steps, kind.num_envs, *space.shape)
    return rng.uniform(space.low, space.high, shape).astype(np.float32)


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
    kind = kind_of(env_id, 6, **kwargs)
    steps = actions(kind, 60)
    together, single = opened(kind), opened(kind, Serial)
    assert isinstance(together, AtOnce)
    assert trail(together, steps) == trail(single, steps)
    kept, expected = together.states(), single.states()
    for one, other in zip(kept, expected, strict=True):
        mine, theirs = one.pop("actions").numpy(), other.pop("actions").numpy()
        assert (mine.dtype, mine.shape, mine.tobytes()) == (theirs.dtype, theirs.shape, theirs.tobytes())
        assert one == other


@pytest.mark.parametrize("env_id", ROBOTS)
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
@pytest.mark.parametrize(
    ("env_id", "num"),
    [*((env_id, num) for env_id in ROBOTS for num in (1, 2, 5, 8)), ("CartPole-v1", 6), ("CartPole-v1", 37)],
)
def test_bits_stay_those_of_one_by_one(env_id: str, num: int) -> None:
    kind = kind_of(env_id, num, limit=None)
    steps = actions(kind, 3000)
    together = opened(kind)
    assert isinstance(together, AtOnce)
    assert trail(together, steps) == trail(opened(kind, Serial), steps)


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


@pytest.mark.parametrize("env_id", ROBOTS)
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
@pytest.mark.parametrize("env_id", ["Ant-v5", "CartPole-v1", "Hopper-v5", "Humanoid-v5"])
def test_one_goes_on_where_the_other_stood(env_id: str, before: Make, after: Make) -> None:
    kind = kind_of(env_id, 6)
    steps, more = np.split(actions(kind, 90), [65])
    envs = opened(kind, before)
    returns, lengths = np.zeros(6), np.zeros(6, np.int64)
    envs.reset(range(7, 13))
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


class OwnPole(CartPoleEnv):
    """One of another gravity."""

    def step(self, action: Any) -> Any:
        self.gravity = 1.6
        return super().step(action)  # type: ignore[no-untyped-call]


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
    "a pole in a wrapper": lambda: twice(plain("CartPole-v1")),
    "a pole whose every step is checked": lambda: gym.make("CartPole-v1"),
    "a pole of one's own": OwnPole,
    "a method of one's own on a pole": lambda: patched(CartPoleEnv()),
    "pictures of a pole": lambda: CartPoleEnv(render_mode="rgb_array"),
}


@pytest.mark.filterwarnings("ignore:.*out of date:DeprecationWarning")
@pytest.mark.parametrize("other", OTHERS)
def test_whatever_differs_is_stepped_one_by_one(other: str) -> None:
    make = OTHERS[other]
    first = make()
    kind = Kind(make, "Other-v0", 6, first.observation_space, first.action_space)
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


@pytest.mark.parametrize("file", ["hopper_v5", "mujoco_env", "common", "cartpole"])
def test_another_version_of_a_file_is_stepped_one_by_one(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = kind_of("CartPole-v1" if file == "cartpole" else "Hopper-v5", 6)
    monkeypatch.setitem(at_once._FILES, file, "0123")
    at_once._is_known.cache_clear()
    assert type(opened(kind)) is Serial
    monkeypatch.undo()
    at_once._is_known.cache_clear()
    assert type(opened(kind)) is AtOnce


def task_of(envs: Serial, still: np.ndarray) -> Task:
    """What looks at environments after a step, of which one is made."""
    assert isinstance(envs, AtOnce)
    envs.reset([1, 2, 3])
    envs.begin(still)
    envs.end()
    (part,) = envs._convoy._parts
    return part._task


def test_what_is_no_number_names_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    envs = opened(kind_of("Hopper-v5", 3))
    still = np.zeros((3, 3), np.float32)
    task = task_of(envs, still)
    outcome = task.outcome

    def broken(given: np.ndarray, where: int) -> Any:
        parts = outcome(given)
        parts[where][1] = np.nan
        return parts

    for where, what in enumerate(["the observation has nan in place 1 of 11", "the reward is nan"]):
        monkeypatch.setattr(task, "outcome", partial(broken, where=where))
        envs.begin(still)
        with pytest.raises(
            RunError, match=rf"Hopper-v5, environment 2 of 3, step {2 + where} of its episode: {what}"
        ):
            envs.end()


def test_numbers_that_are_only_large_are_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    envs = opened(kind_of("Hopper-v5", 3))
    task = task_of(envs, np.zeros((3, 3), np.float32))
    large = np.full((3, 11), 1e25), np.full(3, -1e30), np.zeros(3, np.bool_)
    monkeypatch.setattr(task, "outcome", lambda given: large)
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


class Failing(RuntimeError):
    """What a simulation raises here."""


def several(kind: Kind, num_runs: int, num_threads: int) -> list[Serial]:
    convoy = Convoy(num_runs, num_threads)
    return [opened(kind, partial(in_this_process, convoy=convoy)) for _ in range(num_runs)]


def in_step(runs: Sequence[Serial], every: Sequence[np.ndarray], leaves_after: int) -> list[list[bytes]]:
    """What each gives; the second one leaves after some steps."""
    trails = [[run.reset(range(10 * row, 10 * row + 3)).tobytes()] for row, run in enumerate(runs)]
    for number, each in enumerate(zip(*every, strict=True)):
        going = [row for row in range(len(runs)) if row != 1 or number < leaves_after]
        for row in going:
            runs[row].begin(each[row])
        for row in reversed(going):  # whoever comes first ends the step of all
            outcome = runs[row].end()
            trails[row] += [array.tobytes() for array in outcome]
            over = outcome.terminated | outcome.truncated
            if over.any():
                trails[row].append(runs[row].reset_some(over)[over].tobytes())
    return trails


@pytest.mark.parametrize(
    ("env_id", "num_threads"),
    [*((env_id, num) for env_id in ROBOTS for num in (1, 2, 5)), ("CartPole-v1", 1)],
)
def test_runs_that_step_together_have_the_bits_of_each_alone(env_id: str, num_threads: int) -> None:
    kind = kind_of(env_id, 3)
    every = [actions(kind, 70, seed) for seed in range(3)]
    runs = several(kind, 3, num_threads)
    together = in_step(runs, every, 30)
    assert together == in_step([opened(kind, Serial) for _ in range(3)], every, 30)
    assert all(type(run) is AtOnce for run in runs)
    assert len({tuple(trail) for trail in together}) == 3  # a run with the numbers of another would show


@pytest.fixture
def steps_of_hoppers(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[bool, int]]]:
    """How many were simulated in each step that is made at once, and whether by the main thread, by part."""
    steps: list[list[tuple[bool, int]]] = [[]]
    simulate, outcome = locomotion.Hopper.simulate, locomotion.Hopper.outcome

    def watched(self: Any, given: np.ndarray, numbers: range) -> Any:
        steps[-1].append((threading.current_thread() is threading.main_thread(), len(numbers)))
        return simulate(self, given, numbers)

    def ended(self: Any, given: np.ndarray) -> Any:
        steps[-1].sort(reverse=True)
        steps.append([])
        return outcome(self, given)

    monkeypatch.setattr(locomotion.Hopper, "simulate", watched)
    monkeypatch.setattr(locomotion.Hopper, "outcome", ended)
    return steps


def test_a_convoy_makes_one_step_of_those_of_its_runs(steps_of_hoppers: list[Any]) -> None:
    kind = kind_of("Hopper-v5", 3)
    every = [actions(kind, 4, seed) for seed in range(3)]
    in_step(several(kind, 3, 8), every, 2)
    both, few = [(True, 5), (False, 4)], [(True, 6)]  # a thread for two would take longer than it saves
    assert steps_of_hoppers == [both, both, few, few, []]


@pytest.mark.parametrize(
    ("num_runs", "workers", "expected"),
    [
        (2, 0, [(True, 4), (False, 4)]),
        (4, 1, [(True, 4), (False, 4)]),  # of each run two, while the worker steps the others
        (4, 2, [(True, 4)]),
        (1, 0, [(True, 4)]),
    ],
)
def test_runs_of_one_process_take_the_cores_that_workers_leave(
    num_runs: int, workers: int, expected: Any, steps_of_hoppers: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rltemplate.workers.available_cores", lambda: 2 + min(workers, 1))
    hosts = Hosts(num_runs)
    spec = EnvSpec("Hopper-v5", LIMIT, {})
    runs = [Envs(spec, 4, range(4 * run, 4 * run + 4), workers, hosts=hosts) for run in range(num_runs)]
    try:
        for envs in runs:
            envs.reset()
        for envs in runs:
            envs.begin_step(np.zeros((4, 3), np.float32))
        for envs in runs:
            envs.end_step()
    finally:
        for envs in runs:
            envs.close()
    assert steps_of_hoppers == [expected, []]


def test_runs_of_different_parameters_share_a_convoy() -> None:
    kinds = [kind_of("Hopper-v5", 3, forward_reward_weight=weight) for weight in (1.0, 2.0, 1.0)]
    convoy = Convoy(3, 2)
    runs = [opened(kind, partial(in_this_process, convoy=convoy)) for kind in kinds]
    every = [actions(kinds[0], 50, seed) for seed in range(3)]
    expected = in_step([opened(kind, Serial) for kind in kinds], every, 20)
    assert in_step(runs, every, 20) == expected


@pytest.mark.parametrize("ill", [0, 1])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_what_fails_in_a_run_ends_that_one_only(
    num_threads: int, ill: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = kind_of("Hopper-v5", 3)
    every = actions(kind, 40)
    alone = trail(opened(kind, Serial), every)
    runs = several(kind, 3, num_threads)
    bad: Any = runs[ill]._members[1].unwrapped
    simulate = mujoco.mj_step

    def fail(model: Any, data: Any, nstep: int) -> None:
        if data is bad.data and len(runs[ill]._members[1]._actions) == 6:
            raise Failing
        simulate(model, data, nstep)

    monkeypatch.setattr(mujoco, "mj_step", fail)
    trails = [[run.reset(range(100, 103)).tobytes()] for run in runs]
    going, told = [0, 1, 2], []
    for each in every:
        for row in going:
            runs[row].begin(each)
        for row in list(going):
            try:
                outcome = runs[row].end()
            except Failing as error:
                told += error.__notes__
                going.remove(row)
                continue
            trails[row] += [array.tobytes() for array in outcome]
            over = outcome.terminated | outcome.truncated
            if over.any():
                trails[row].append(runs[row].reset_some(over)[over].tobytes())
    assert going == [row for row in range(3) if row != ill]
    assert told == ["Hopper-v5, environment 2 of 3, step 7 of its episode 1"]
    assert [trails[row] == alone for row in range(3)] == [row != ill for row in range(3)]


@pytest.mark.parametrize("name", ["__init__", "look", "outcome"])
def test_a_defect_of_the_convoy_is_raised_by_every_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or others would go on with what the step before gave."""
    kind = kind_of("Hopper-v5", 2)
    runs = several(kind, 2, 1)
    monkeypatch.setattr(locomotion.Hopper, name, lambda *given: 1 / 0)
    for run in runs:
        run.reset([1, 2])
    for run in runs:
        run.begin(actions(kind, 1)[0])
    for run in runs:
        with pytest.raises(ZeroDivisionError):
            run.end()


# --- CartPole --------------------------------------------------------------------------------------------


def test_few_poles_are_stepped_one_by_one() -> None:
    """A pole takes Python less time than NumPy takes for a few of them."""
    few, many = kind_of("CartPole-v1", 3), kind_of("CartPole-v1", 6)
    assert type(opened(few)) is Serial
    assert type(opened(many)) is AtOnce
    assert [type(run) for run in several(few, 2, 1)] == [AtOnce, AtOnce]


def test_a_sine_that_depends_on_its_company_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    kind, sine = kind_of("CartPole-v1", 6), np.sin
    monkeypatch.setattr(np, "sin", lambda x: sine(x) if np.ndim(x) == 0 else sine(x) * (1 + 1e-15))
    cart_pole._functions_keep_bits.cache_clear()
    assert type(opened(kind)) is Serial
    monkeypatch.undo()
    cart_pole._functions_keep_bits.cache_clear()
    assert type(opened(kind)) is AtOnce


OTHER_LAWS = [
    *[("gravity", 1.6), ("masspole", 0.3), ("total_mass", 2.0), ("length", 0.9), ("polemass_length", 0.2)],
    *[("force_mag", 3.0), ("tau", 0.03), ("theta_threshold_radians", 0.1), ("x_threshold", 0.04)],
    ("kinematics_integrator", "semi-implicit"),  # which is not written down here
]


@pytest.mark.parametrize(("name", "value"), OTHER_LAWS)
def test_poles_of_other_laws_are_those_of_gymnasium(name: str, value: Any) -> None:
    """What no argument changes may still be changed, in all of them alike or in one."""
    kind = kind_of("CartPole-v1", 6)
    steps = actions(kind, 60)
    trails, kinds = [], []
    for make in (Serial, in_this_process):
        for changed in (range(6), range(1)):
            members = kind.members(range(6))
            for row in changed:
                setattr(members[row].unwrapped, name, value)
            envs = make(kind, members)
            trails.append(trail(envs, steps))
            kinds.append(type(envs))
    assert kinds == [Serial, Serial, AtOnce if isinstance(value, float) else Serial, Serial]
    assert trails[:2] == trails[2:]
    assert trails[0] != trail(opened(kind), steps) != trails[1]


def test_what_is_no_action_is_refused_as_one_by_one() -> None:
    kind = kind_of("CartPole-v1", 6)
    for given in (np.array([0, 1, 1, 2, -1, 0]), np.ones(6, np.float32), np.full(6, np.nan)):
        told = []
        for make in (Serial, in_this_process):
            envs = opened(kind, make)
            envs.reset(range(6))
            envs.begin(given)
            with pytest.raises(AssertionError) as caught:
                envs.end()
            told.append((str(caught.value), caught.value.__notes__))
        assert told[0] == told[1]
        number = 4 if given.dtype == np.int64 else 1
        assert f"environment {number} of 6, step 1 of its episode 1" in told[0][1][0]


def test_a_number_of_actions_that_does_not_fit_ends_that_run_only() -> None:
    kind = kind_of("CartPole-v1", 3)
    runs = several(kind, 2, 1)
    for run, num in zip(runs, (2, 3), strict=True):
        run.reset(range(3))
        run.begin(np.ones(num, np.int64))
    with pytest.raises(ValueError, match="2 actions for 3 environments"):
        runs[0].end()
    assert runs[1].end().reward.tolist() == [1.0, 1.0, 1.0]


def test_the_state_of_a_pole_is_where_it_was() -> None:
    kind = kind_of("CartPole-v1", 6)
    states = []
    for make in (Serial, in_this_process):
        envs = opened(kind, make)
        envs.reset(range(6))
        over = np.zeros(6, np.bool_)
        while not over.any():  # pushed to one side, until one falls
            envs.begin(np.ones(6, np.int64))
            over = envs.end().terminated.copy()
        poles: list[Any] = [member.unwrapped for member in envs._members]
        states.append([(pole.state.tobytes(), pole.steps_beyond_terminated) for pole in poles])
    assert states[0] == states[1]
    assert {steps_beyond for _, steps_beyond in states[0]} == {None, 0}
