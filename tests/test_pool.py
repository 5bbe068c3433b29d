"""EnvPool's environments mean what Gymnasium's do, repeat themselves, and go on exactly from a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
import yaml
from conftest import SHRUNK, Command, Configure
from gymnasium import spaces
from test_env_state import LIMITS, MOMENTS, play, reach
from test_resume import digests, interrupted

from rltemplate import pool, train
from rltemplate.algos import ALGORITHMS
from rltemplate.envs import Envs, EnvSpec, check_env, make_env
from rltemplate.pool import pool_seeds
from rltemplate.rng import env_seeds
from rltemplate.run import paths
from rltemplate.run.checkpoint import load_checkpoint
from rltemplate.train import build_algorithm
from rltemplate.types import ConfigError, RunError

envpool = pytest.importorskip("envpool")

HERE = Path(__file__).resolve().parent
CONF = HERE.parent / "conf" / "env"
SHIPPED = [
    (each["id"], each.get("kwargs", {}))
    for file in sorted(CONF.glob("[A-Z]*.yaml"))
    for each in [yaml.safe_load(file.read_text())]
]
# One of each kind: what is drawn in resets alone, what is drawn in steps, and a world that outlives episodes.
KINDS = ["CartPole-v1", "Hopper-v5", "HalfCheetah-v5", "LunarLander-v3", "BipedalWalker-v3"]


def envs_of(
    env_id: str,
    num: int = 3,
    seed: int = 1,
    limit: int | None = None,
    threads: int = 1,
    backend: str = "envpool",
    **kwargs: Any,
) -> Envs:
    """Environments of EnvPool's, or others."""
    seeds = env_seeds(seed, "env", num)
    return Envs(EnvSpec(env_id, limit, kwargs), num, seeds, threads - 1, backend)


# --- The same meaning ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("env_id", "kwargs"), SHIPPED, ids=lambda value: str(value))
def test_every_environment_of_conf_is_there_with_the_same_spaces(env_id: str, kwargs: dict[str, Any]) -> None:
    codec = check_env(EnvSpec(env_id, None, kwargs), "envpool")
    envs = envs_of(env_id, num=2, **kwargs)
    assert envs.reset().shape == (2, codec.obs_size)
    step = envs.step(np.zeros((2, codec.action_size), np.float32 if codec.continuous else np.int64))
    assert step.obs.dtype == np.float32
    assert step.reward.dtype == np.float64
    assert step.terminated.dtype == step.truncated.dtype == np.bool_


def state_of(env_id: str, obs: np.ndarray, env: Any) -> tuple[np.ndarray, np.ndarray]:
    """Positions and velocities of a MuJoCo environment, from an observation that has them all."""
    num_q, num_v = env.model.nq, env.model.nv
    if env_id == "InvertedDoublePendulum-v5":
        return np.append(obs[0], np.arctan2(obs[1:3], obs[3:5])), obs[5:8]
    if env_id == "Reacher-v5":
        return np.append(np.arctan2(obs[2:4], obs[:2]), obs[4:6]), np.append(obs[6:8], [0, 0])
    if env_id == "Pusher-v5":  # the object slides from where its body is
        at = env.model.body("object").pos
        return np.concatenate([obs[:7], [obs[18] - at[1], obs[17] - at[0], 0, 0]]), np.append(
            obs[7:14], np.zeros(4)
        )
    return obs[:num_q], obs[num_q : num_q + num_v]


ALL = {"exclude_current_positions_from_observation": False}
PHYSICS: list[tuple[str, dict[str, Any]]] = [
    ("HalfCheetah-v5", ALL),
    ("Hopper-v5", ALL),
    ("Walker2d-v5", ALL),
    ("Swimmer-v5", ALL),
    ("Ant-v5", ALL),
    ("Humanoid-v5", ALL),
    ("InvertedPendulum-v5", {}),
    ("InvertedDoublePendulum-v5", {}),
    ("Reacher-v5", {}),
    ("Pusher-v5", {}),
    # and with other arguments
    ("HalfCheetah-v5", ALL | {"forward_reward_weight": 2, "ctrl_cost_weight": 0.5, "frame_skip": 3}),
    ("Hopper-v5", ALL | {"healthy_reward": 3.0, "ctrl_cost_weight": 0.5, "terminate_when_unhealthy": False}),
    ("Ant-v5", ALL | {"contact_cost_weight": 0.1, "healthy_reward": 2, "forward_reward_weight": 3.0}),
    ("Humanoid-v5", ALL | {"contact_cost_weight": 1e-4, "ctrl_cost_weight": 0.5, "reset_noise_scale": 0.05}),
    ("InvertedDoublePendulum-v5", {"healthy_reward": 3.0, "reset_noise_scale": 0.2, "frame_skip": 2}),
]


def after_a_step(env_id: str, kwargs: dict[str, Any], others: dict[str, Any]) -> list[float]:
    """How far observations and rewards are apart from Gymnasium's, after one step from the same states."""
    envs = envs_of(env_id, num=4, **kwargs)
    vector = envs._vector
    env: Any = make_env(EnvSpec(env_id, None, others))
    env.reset(seed=0)
    first = vector.reset(envs._seeds).copy()
    actions = np.random.default_rng(0).uniform(-1, 1, (4, envs.codec.action_size)).astype(np.float32)
    native = envs.codec.decode_action(actions)
    vector.begin(native)
    obs, reward, terminated, _ = vector.end()
    apart = []
    for row in range(4):
        env.reset(seed=0)
        env.unwrapped.set_state(*state_of(env_id, first[row], env.unwrapped))
        theirs = env.step(native[row])
        apart += [float(np.abs(obs[row] - theirs[0]).max()), abs(float(reward[row]) - float(theirs[1]))]
        assert terminated[row] == theirs[2]
    return apart


@pytest.mark.parametrize(("env_id", "kwargs"), PHYSICS, ids=lambda value: str(value))
def test_physics_and_reward_are_those_of_gymnasium(env_id: str, kwargs: dict[str, Any]) -> None:
    """From the same state: contact forces differ by 1e-5 between versions of MuJoCo, all else by rounding."""
    assert max(after_a_step(env_id, kwargs, kwargs)) < (2e-4 if env_id in ("Ant-v5", "Humanoid-v5") else 2e-6)


def test_the_comparison_sees_another_reward_and_another_step() -> None:
    weight = {"ctrl_cost_weight": 0.0011}
    assert max(after_a_step("Hopper-v5", ALL, ALL | weight)) > 2e-5
    assert max(after_a_step("Hopper-v5", ALL, ALL | {"frame_skip": 5})) > 0.01


def theirs_from(env_id: str, obs: np.ndarray, action: Any) -> tuple[np.ndarray, float, bool]:
    """What Gymnasium's classic environment gives for an action where `obs` was observed."""
    env: Any = make_env(EnvSpec(env_id, None, {}))
    env.reset(seed=0)
    if env_id == "Pendulum-v1":
        env.unwrapped.state = np.array([np.arctan2(obs[1], obs[0]), obs[2]], np.float64)
    elif env_id == "Acrobot-v1":
        angles = [np.arctan2(obs[1], obs[0]), np.arctan2(obs[3], obs[2])]
        env.unwrapped.state = np.array([*angles, obs[4], obs[5]], np.float64)
    else:
        env.unwrapped.state = obs.astype(np.float64)
    obs, reward, terminated, *_ = env.step(action)
    return obs, float(reward), bool(terminated)


@pytest.mark.parametrize(
    "env_id", ["CartPole-v1", "Pendulum-v1", "Acrobot-v1", "MountainCar-v0", "MountainCarContinuous-v0"]
)
def test_classic_environments_step_as_gymnasium_does(env_id: str) -> None:
    envs = envs_of(env_id, num=1)
    obs, rng = envs.reset(), np.random.default_rng(0)
    ended = 0
    for _ in range(60):
        if envs.codec.continuous:
            action = rng.uniform(-1, 1, (1, 1)).astype(np.float32)
        else:
            action = np.array([[rng.integers(envs.codec.nvec[0])]])
        expected = theirs_from(env_id, obs[0], envs.codec.decode_action(action)[0])
        step = envs.step(action)
        np.testing.assert_allclose(step.next_obs[0], expected[0], atol=2e-5)
        assert step.reward[0] == pytest.approx(expected[1], abs=2e-5)
        assert step.terminated[0] == expected[2]
        ended += int(step.terminated[0])
        obs = step.obs
    assert ended > 0 or env_id != "CartPole-v1"


@pytest.mark.parametrize("env_id", [*KINDS, "Humanoid-v5", "Pusher-v5", "Reacher-v5", "Pendulum-v1"])
def test_episodes_begin_where_those_of_gymnasium_do(env_id: str) -> None:
    """Means and spreads of what is observed first, and of how long an idle episode takes."""
    num = 24 if env_id == "BipedalWalker-v3" else 100  # whose resets take Gymnasium 10 ms
    first, lengths = {}, {}
    for backend in ("envpool", "gymnasium"):
        envs = envs_of(env_id, num=num, backend=backend, limit=80)
        first[backend] = envs.reset().astype(np.float64)
        idle = np.zeros((num, envs.codec.action_size), np.float32 if envs.codec.continuous else np.int64)
        over = np.zeros(num, np.int64)
        for t in range(1, 81 if env_id in ("CartPole-v1", "LunarLander-v3") else 1):
            step = envs.step(idle)
            over[(over == 0) & (step.terminated | step.truncated)] = t
        lengths[backend] = over
        envs.close()
    a, b = first["envpool"], first["gymnasium"]
    error = np.sqrt((a.var(axis=0) + b.var(axis=0)) / num)
    assert (np.abs(a.mean(axis=0) - b.mean(axis=0)) <= 4.5 * error + 1e-6).all()
    spread = np.maximum(a.std(axis=0), b.std(axis=0))
    assert (np.abs(a.std(axis=0) - b.std(axis=0)) <= 0.6 * spread + 1e-5).all()
    ours, theirs = lengths["envpool"], lengths["gymnasium"]
    wide = 4.5 * np.sqrt((ours.var() + theirs.var()) / num) + 1e-9
    assert abs(ours.mean() - theirs.mean()) <= wide


# --- Ends of episodes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "HalfCheetah-v5", "LunarLander-v3"])
def test_a_time_limit_truncates_and_nothing_is_reset_in_secret(env_id: str) -> None:
    envs = envs_of(env_id, num=2, limit=5)
    free = envs_of(env_id, num=2, limit=500)  # the same episode, which goes on
    np.testing.assert_array_equal(envs.reset(), free.reset())
    starts = []
    for t in range(1, 21):
        action = np.zeros((2, envs.codec.action_size), np.float32 if envs.codec.continuous else np.int64)
        step = envs.step(action)
        if t <= 5:
            expected = free.step(action)
            np.testing.assert_array_equal(step.next_obs, expected.next_obs)
            np.testing.assert_array_equal(step.reward, expected.reward)
        assert not step.terminated.any()
        assert step.truncated.all() == (t % 5 == 0)
        assert [e.length for e in step.episodes] == ([5, 5] if t % 5 == 0 else [])
        if t % 5 == 0:
            assert not np.array_equal(step.obs, step.next_obs)
            starts.append(step.obs)
        else:
            np.testing.assert_array_equal(step.obs, step.next_obs)
    assert len({start.tobytes() for start in starts}) == 4  # every episode begins elsewhere


def test_returns_and_lengths_are_those_of_the_episode() -> None:
    envs = envs_of("Hopper-v5", num=3)
    envs.reset()
    total, length, seen = np.zeros(3), np.zeros(3, int), 0
    rng = np.random.default_rng(0)
    while seen < 12:
        step = envs.step(rng.uniform(-1, 1, (3, 3)).astype(np.float32))
        total += step.reward
        length += 1
        done = step.terminated | step.truncated
        assert [tuple(e) for e in step.episodes] == list(zip(total[done], length[done], strict=True))
        total[done], length[done] = 0.0, 0
        seen += int(done.sum())


def falls(limit: int | None = None) -> tuple[int, bool, bool]:
    """Steps, terminated and truncated of a first episode of CartPole that is pushed to one side."""
    envs = envs_of("CartPole-v1", num=1, limit=limit)
    envs.reset()
    for t in range(1, 100):
        step = envs.step(np.ones((1, 1), np.int64))
        if step.episodes:
            return t, bool(step.terminated[0]), bool(step.truncated[0])
    raise AssertionError("it did not fall")


@pytest.mark.filterwarnings("ignore:.*precision lowered")
def test_task_and_clock_may_end_an_episode_in_the_same_step() -> None:
    """Gymnasium's TimeLimit gives both then, and no reward can follow. EnvPool alone hides the task's end."""
    length, *flags = falls()
    assert flags == [True, False]
    assert falls(limit=length) == (length, True, True)
    assert falls(limit=length + 1) == (length, True, False)
    assert falls(limit=length - 1) == (length - 1, False, True)
    seed = pool_seeds(env_seeds(1, "env", 1))
    alone = envpool.make_gymnasium("CartPole-v1", num_envs=1, seed=seed, max_episode_steps=length)
    alone.reset()
    for _ in range(length):
        *_, terminated, truncated, _ = alone.step(np.ones(1, np.int32))
    assert (terminated[0], truncated[0]) == (False, True)


# --- Seeds and threads -----------------------------------------------------------------------------------


@pytest.mark.parametrize("env_id", KINDS)
def test_threads_and_looks_at_the_state_change_no_bit(env_id: str) -> None:
    trails = []
    for threads, seed, look in ((1, 1, False), (2, 1, False), (2, 1, True), (1, 2, False)):
        envs = envs_of(env_id, num=5, limit=LIMITS[env_id], threads=threads, seed=seed)
        envs.reset()
        trail = []
        for t in range(0, 150, 50):
            trail += play(envs, t, 50)
            if look:
                envs.state_dict()
        trails.append(trail)
        envs.close()
    assert any(episodes for *_, episodes in trails[0])
    assert trails[0] == trails[1] == trails[2]
    assert trails[0] != trails[3]


def test_an_environment_depends_on_its_seed_and_not_on_its_place() -> None:
    spec, seeds = EnvSpec("Hopper-v5", None, {}), env_seeds(1, "env", 3)
    one = Envs(spec, 3, seeds, backend="envpool").reset()
    other = Envs(spec, 3, [seeds[2], seeds[0], seeds[1]], backend="envpool").reset()
    np.testing.assert_array_equal(one, other[[1, 2, 0]])
    assert len({row.tobytes() for row in one}) == 3


def test_a_second_reset_begins_again() -> None:
    envs = envs_of("LunarLander-v3")
    first = envs.reset()
    trail = play(envs, 0, 100)
    np.testing.assert_array_equal(envs.reset(), first)
    assert play(envs, 0, 100) == trail


def test_no_two_environments_of_a_run_or_of_runs_beside_it_share_a_stream() -> None:
    taken: set[int] = set()
    for seed in range(100):
        seeds = pool_seeds(env_seeds(seed, "env", 64))
        assert all(-(2**31) <= each < 2**31 for each in seeds)
        taken |= set(seeds)
    assert len(taken) == 100 * 64


def test_seeds_that_differ_in_their_first_bits_only_are_kept_apart() -> None:
    assert pool_seeds([5, 5 + 2**32, 6, 2**63 - 1, 2**32 - 1]) == [5, 6, 7, -1, 0]


def test_a_step_may_be_begun_and_ended_later() -> None:
    whole, parted = envs_of("Hopper-v5"), envs_of("Hopper-v5")
    whole.reset()
    parted.reset()
    for t in range(30):
        action = np.random.default_rng(t).uniform(-1, 1, (3, 3)).astype(np.float32)
        parted.begin_step(action)
        expected = whole.step(action)
        for a, b in zip(parted.end_step(), expected, strict=True):
            np.testing.assert_array_equal(a, b)
    parted.begin_step(action)
    with pytest.raises(AssertionError, match="not ended"):
        parted.state_dict()


# --- Going on --------------------------------------------------------------------------------------------


def cases(env_ids: list[str]) -> list[tuple[str, str]]:
    return [(env_id, moment) for env_id in env_ids for moment in MOMENTS]


def go_on(folder: Path, names: list[tuple[str, str]]) -> None:
    """What the other process does: load, step on, and write what came."""
    for env_id, moment in names:
        saved = torch.load(folder / f"{env_id} {moment}.pt", weights_only=True)
        envs = envs_of(env_id, limit=LIMITS[env_id], seed=2, threads=2)  # whose own seed leads elsewhere
        envs.load_state_dict(saved["envs"])
        torch.save(play(envs, saved["t"], 150), folder / f"{env_id} {moment} trail.pt")
        again = envs.state_dict()  # of one that went on itself
        envs.close()
        third = envs_of(env_id, limit=LIMITS[env_id], seed=3)
        third.load_state_dict(again)
        torch.save(play(third, saved["t"] + 150, 50), folder / f"{env_id} {moment} further.pt")


def check_going_on(names: list[tuple[str, str]], folder: Path) -> None:
    expected = {}
    for env_id, moment in names:
        envs = envs_of(env_id, limit=LIMITS[env_id])
        t = reach(envs, moment)
        torch.save({"t": t, "envs": envs.state_dict()}, folder / f"{env_id} {moment}.pt")
        expected[env_id, moment] = play(envs, t, 150), play(envs, t + 150, 50)
        envs.close()
    program = f"import test_pool, pathlib, sys; test_pool.go_on(pathlib.Path(sys.argv[1]), {names!r})"
    path = os.pathsep.join([str(HERE), str(HERE.parent)])
    command = [sys.executable, "-W", "ignore", "-c", program, str(folder)]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, check=True)
    for (env_id, moment), trails in expected.items():
        for name, trail in zip(("trail", "further"), trails, strict=True):
            assert torch.load(folder / f"{env_id} {moment} {name}.pt") == trail, (env_id, moment, name)
        assert any(episodes for *_, episodes in trails[0])


def test_a_run_goes_on_bit_for_bit_in_another_process(tmp_path: Path) -> None:
    check_going_on([*cases(KINDS[:2]), *((env_id, "just ended") for env_id in KINDS[2:])], tmp_path)


@pytest.mark.slow
def test_every_environment_goes_on_from_every_moment(tmp_path: Path) -> None:
    check_going_on(cases(list(LIMITS)), tmp_path)


def running(env_id: str = "Hopper-v5", steps: int = 120) -> Envs:
    envs = envs_of(env_id, num=2)
    envs.reset()
    play(envs, 0, steps)
    return envs


def restored(state: dict[str, Any], env_id: str = "Hopper-v5") -> Envs:
    envs = envs_of(env_id, num=2, seed=2)
    envs.load_state_dict(state)
    return envs


def test_what_draws_in_steps_would_not_go_on_from_its_last_reset_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Why all steps of LunarLander are replayed; it is noticed if they are not."""
    restored(running("LunarLander-v3", 250).state_dict(), "LunarLander-v3")
    monkeypatch.setattr(pool, "_FORGETFUL", (*pool._FORGETFUL, "envpool.box2d.box2d_envpool"))
    state = running("LunarLander-v3", 250).state_dict()
    assert all(each["skipped"] and len(each["lengths"]) == 1 for each in state["states"])
    with pytest.raises(ConfigError, match="does not repeat itself"):
        restored(state, "LunarLander-v3")


def another_seed(state: dict[str, Any]) -> None:
    state["states"][1]["seed"] += 1


def a_reset_missing(state: dict[str, Any]) -> None:
    state["states"][0]["skipped"] -= 1


def another_action(state: dict[str, Any]) -> None:
    state["states"][0]["actions"][-1] += 0.5


def last_action_missing(state: dict[str, Any]) -> None:
    state["states"][1]["actions"] = state["states"][1]["actions"][:-1]


def last_action_and_its_count_missing(state: dict[str, Any]) -> None:
    last_action_missing(state)
    state["states"][1]["lengths"][-1] -= 1
    state["lengths"][1] -= 1


def another_outcome(state: dict[str, Any]) -> None:
    state["states"][1]["outcome"] = state["states"][0]["outcome"]


def no_returns(state: dict[str, Any]) -> None:
    state["returns"].zero_()


def no_lengths(state: dict[str, Any]) -> None:
    state["lengths"].zero_()


HARMS = [
    *(another_seed, a_reset_missing, another_action, last_action_missing),
    *(last_action_and_its_count_missing, another_outcome, no_returns, no_lengths),
]


@pytest.mark.parametrize("harm", HARMS)
def test_a_state_without_one_of_its_pieces_is_refused(harm: Any) -> None:
    state = running().state_dict()
    harm(state)
    with pytest.raises(ConfigError, match=r"Hopper-v5 does not repeat itself"):
        restored(state)


def test_an_episode_that_is_over_too_early_is_refused() -> None:
    """Stepping on would be a hidden reset."""
    state = running("LunarLander-v3", 250).state_dict()
    first, second, *_ = lengths = state["states"][0]["lengths"]
    lengths[:2] = [first + second]
    with pytest.raises(ConfigError, match="does not repeat itself"):
        restored(state, "LunarLander-v3")


def test_environments_that_never_began_can_be_restored() -> None:
    again = restored(envs_of("Hopper-v5", num=2).state_dict())
    np.testing.assert_array_equal(again.reset(), envs_of("Hopper-v5", num=2, seed=2).reset())


def test_a_state_is_a_copy() -> None:
    envs = running()
    state = envs.state_dict()
    before = [each["actions"].clone() for each in state["states"]]
    play(envs, 120, 30)
    assert all(torch.equal(a, each["actions"]) for a, each in zip(before, state["states"], strict=True))


def test_only_the_running_episode_is_kept_where_that_is_enough() -> None:
    for env_id, whole in (("Hopper-v5", False), ("LunarLander-v3", True)):
        kept = [len(each["actions"]) for each in running(env_id, 1500).state_dict()["states"]]
        assert (kept == [1500, 1500]) is whole
        assert whole or max(kept) < 200


# --- What is no number, and what cannot be had -----------------------------------------------------------


class Broken:
    """A pool that gives something else in one place of what it gives."""

    def __init__(self, inner: Any, key: str, row: int, value: float) -> None:
        self._inner, self._place, self._row, self._value = inner, inner._state_keys.index(key), row, value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _recv(self) -> list[np.ndarray]:
        parts: list[np.ndarray] = self._inner._recv()
        parts[self._place][self._row, ...] = self._value
        return parts


@pytest.mark.parametrize(
    ("env_id", "key", "value", "words"),
    [
        ("Hopper-v5", "obs", np.nan, "the observation has nan in place 1 of 11"),
        ("Hopper-v5", "obs", -np.inf, "the observation has -inf in place 1 of 11"),
        ("Hopper-v5", "obs", 1e39, r"the observation has 1e\+39 in place 1 of 11, more than"),
        ("CartPole-v1", "obs", np.nan, "the observation has nan in place 1 of 4"),
        ("CartPole-v1", "reward", np.nan, "the reward is nan, expected a finite number"),
        ("Humanoid-v5", "reward", np.inf, "the reward is inf, expected a finite number"),
        (
            "FrozenLake-v1",
            "obs",
            16,
            r"the observation is 16 \(int32\), expected a whole number from 0 to 15",
        ),
    ],
)
def test_what_is_no_number_is_named_with_its_environment_and_step(
    env_id: str, key: str, value: float, words: str
) -> None:
    envs = envs_of(env_id)
    envs.reset()
    play(envs, 0, 2)
    envs._vector._pool = Broken(envs._vector._pool, key, 1, value)  # type: ignore[attr-defined]
    with pytest.raises(RunError, match=f"^{env_id}, environment 2 of 3, step 3 of its episode: {words}"):
        play(envs, 2, 1)


@pytest.mark.parametrize(("env_id", "value"), [("Hopper-v5", 1e38), ("CartPole-v1", -3e38)])
def test_what_is_great_but_a_number_passes(env_id: str, value: float) -> None:
    envs = envs_of(env_id)
    envs.reset()
    envs._vector._pool = Broken(envs._vector._pool, "obs", 1, value)  # type: ignore[attr-defined]
    step = envs.step(np.zeros((envs.num_envs, envs.codec.action_size), np.float32))
    assert (step.next_obs[1] == np.float32(value)).all()
    assert not (step.next_obs[0] == np.float32(value)).any()


class Alike(gym.Env[np.ndarray, Any]):
    """Bears a name of EnvPool's, but observes something else."""

    observation_space = spaces.Box(-1, 1, (3,), np.float32)
    action_space = spaces.Discrete(3)


@pytest.mark.parametrize(
    ("env_id", "kwargs", "words"),
    [
        ("Scripted-v0", {}, ["env.id=Scripted-v0", "EnvPool has no such environment", "use env.backend="]),
        ("CartPole-v2", {}, ["env.id=CartPole-v2", "CartPole-v1"]),
        ("MountainCarContinuous-v1", {}, ["no such environment; did you mean MountainCarContinuous-v0?"]),
        (
            "Catch-v0",
            {},
            ["observations are Box(10, 5) in EnvPool and Box(3,) in Gymnasium, which evaluates"],
        ),
        ("CartPole-v1", {"sutton_barto_reward": True}, ["env.kwargs.sutton_barto_reward", "takes none"]),
        ("LunarLander-v3", {"gravity": -5.0}, ["env.kwargs.gravity", "allowed: continuous"]),
        ("Hopper-v5", {"healthy_z_range": [0.5, 2]}, ["env.kwargs.healthy_z_range", "healthy_reward?"]),
        ("Hopper-v5", {"xml_file": "hopper.xml"}, ["env.kwargs.xml_file", "does not take it"]),
        ("Hopper-v5", {"healthy_reward": "much"}, ["env.kwargs.healthy_reward=much: expected a number"]),
        ("Hopper-v5", {"frame_skip": 2.0}, ["env.kwargs.frame_skip=2.0: expected a whole number"]),
        (
            "Hopper-v5",
            {"terminate_when_unhealthy": 0},
            ["terminate_when_unhealthy=0: expected true or false"],
        ),
    ],
)
def test_what_envpool_does_not_have_is_refused_in_a_line(
    env_id: str, kwargs: dict[str, Any], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = dict(gym.registry)
    monkeypatch.setattr(gym.envs.registration, "registry", registry)
    monkeypatch.setattr(gym, "registry", registry)
    gym.register("Catch-v0", entry_point=lambda **_: Alike())
    gym.register("MountainCarContinuous-v1", entry_point=lambda **_: Alike())
    with pytest.raises(ConfigError) as refused:
        envs_of(env_id, **kwargs)
    message = str(refused.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_a_variant_may_have_an_id_of_its_own_in_envpool() -> None:
    envs = envs_of("LunarLander-v3", continuous=True)
    envs.reset()
    assert envs.codec.continuous
    assert play(envs, 0, 5)
    assert not envs_of("LunarLander-v3", continuous=False).codec.continuous


def test_without_envpool_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(ConfigError) as refused:
        envs_of("CartPole-v1")
    assert "pip install -e '.[envpool]'" in str(refused.value)
    assert "env.backend=gymnasium" in str(refused.value)
    assert "\n" not in str(refused.value)


# --- Whole runs ------------------------------------------------------------------------------------------


def test_a_level_whose_digests_do_not_cover_it_refuses_it(configure: Configure) -> None:
    with pytest.raises(ConfigError, match=r"env\.backend=envpool: no digest of"):
        configure("env.backend=envpool", "determinism=profile")
    configure("env.backend=envpool", "determinism=invariant")


def test_what_envpool_does_not_have_is_refused_before_anything_starts(
    train_command: Command, tmp_path: Path
) -> None:
    done = train_command("env=CartPole", "env.backend=envpool", "+env.kwargs.sutton_barto_reward=true")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: env.kwargs.sutton_barto_reward: EnvPool's CartPole-v1")
    assert list(tmp_path.iterdir()) == []


SAC_IS_SLOW = [algo if algo != "sac" else pytest.param(algo, marks=pytest.mark.slow) for algo in ALGORITHMS]


@pytest.mark.parametrize("algo", SAC_IS_SLOW)
def test_going_on_from_a_checkpoint_changes_no_bit(configure: Configure, tmp_path: Path, algo: str) -> None:
    words = ["env=Pendulum", "env.backend=envpool", "env.max_episode_steps=13", "env.num_envs=3"]
    config = configure(f"algo={algo}", *SHRUNK[algo], *words)
    following, checkpoint = interrupted(config, tmp_path)
    again, _ = build_algorithm(config)
    assert train.go_on(again, config, load_checkpoint(checkpoint)) == 3
    assert digests(again, tmp_path / "again", 3) == following
    again.close()
    other = configure(f"algo={algo}", *SHRUNK[algo], *words, "env.backend=gymnasium")
    elsewhere, _ = build_algorithm(other)
    with pytest.raises(ConfigError, match=r"env\.backend"):
        train.go_on(elsewhere, other, load_checkpoint(checkpoint))


@pytest.mark.slow
@pytest.mark.parametrize(("algo", "env"), [("ppo", "LunarLander"), ("sac", "Hopper")])
def test_a_run_repeats_itself_whoever_looks_at_it(
    train_command: Command, tmp_path: Path, algo: str, env: str
) -> None:
    """Evaluation and videos come from Gymnasium's environment of the same id."""
    words = [f"algo={algo}", f"env={env}", *SHRUNK[algo], "env.max_episode_steps=30"]
    alone = ["eval_every=0", "video_every=0", "checkpoint_every=0"]
    with_all = ["eval_every=96", "eval_episodes=2", "video_every=192", "checkpoint_every=64"]
    looked = {
        "alone": [*alone, "env.backend=envpool"],
        "observed": [*with_all, "env.backend=envpool"],
        "gymnasium": [*alone, "env.backend=gymnasium"],
    }
    for name, each in looked.items():
        last = ["total_env_steps=192", "logger=none", f"run_dir={tmp_path / name}"]
        done = train_command(*words, *each, *last)
        assert done.returncode == 0, done.stderr
    traces = {name: (tmp_path / name / paths.TRACE).read_text() for name in looked}
    assert traces["alone"] == traces["observed"]
    assert traces["alone"] != traces["gymnasium"]
    rows = [json.loads(line) for line in (tmp_path / "observed" / paths.METRICS).read_text().splitlines()]
    assert any("eval/return" in row for row in rows)
    assert list((tmp_path / "observed" / paths.VIDEOS).glob("*.mp4"))
