"""The example package for libraries that step many copies, beside the project's own pool."""

from __future__ import annotations

import importlib
import math
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from conftest import ROOT, copy_project, git, program, record, rows, run, run_train, small
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from runlab.config.cli.preflight import preflight
from runlab.envs.envs import Envs, Step
from runlab.errors import ConfigError, RunError
from runlab.rng import env_seeds

FOLDER = ROOT / "examples" / "vector_env"
NUM_ENVS, STEPS = 3, 300


REGISTERED: dict[str, Any] = {}  # once the package is imported, which other tests do not see


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(FOLDER)
    before = dict(gym.registry)
    module = importlib.import_module("vector_env")
    REGISTERED.update(gym.registry)
    gym.registry.update(REGISTERED)
    monkeypatch.setattr(module, "BACKENDS", dict(module.BACKENDS))
    yield module
    gym.registry.clear()
    gym.registry.update(before)


def envs_of(word: str, pool: Any, *words: str, seed: int = 1) -> Envs:
    given = ["env.num_workers=0"] * (not any("num_workers" in each for each in words))
    (config,) = preflight([f"env={word}", f"env.num_envs={NUM_ENVS}", "recipe=null", *given, *words]).configs
    return Envs(config.env, env_seeds(seed, "env", NUM_ENVS), pool)


def rollout(envs: Envs, steps: int = STEPS) -> tuple[np.ndarray, list[Step]]:
    rng, obs = np.random.default_rng(0), envs.reset()
    try:
        nvec = envs.codec.nvec
        shape = (steps, envs.num_envs, envs.codec.action_size)
        actions = rng.integers(0, nvec, shape) if nvec else rng.uniform(-1, 1, shape).astype(np.float32)
        return obs, [envs.step(action) for action in actions]
    finally:
        envs.close()


def bits(envs: Envs, steps: int = STEPS) -> list[bytes]:
    first, made = rollout(envs, steps)
    arrays = [array for step in made for array in step[:5]]
    return [array.tobytes() for array in (first, *arrays)]


def same_step(name: str, seeds: list[int], **kwargs: Any) -> tuple[Any, Any]:
    makers = [partial(gym.make, name, **kwargs)] * len(seeds)
    return SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP), seeds


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1"])
def test_copies_of_gymnasium_give_the_bits_of_the_pool(name: str, package: Any) -> None:
    _, steps = rollout(envs_of(name, package.vector_pool))
    assert sum(len(step.episodes) for step in steps) > 2
    expected = bits(envs_of(name, package.vector_pool))
    assert bits(envs_of(f"vector_env:Vector/{name}", package.vector_pool)) == expected
    assert bits(envs_of(f"vector_env:Vector/{name}", package.vector_pool, seed=2)) != expected
    package.BACKENDS["Vector"] = same_step
    assert bits(envs_of(f"vector_env:Vector/{name}", package.vector_pool)) == expected


@pytest.mark.parametrize(
    ("word", "message"),
    {
        "env.kwargs.vectorization_mode=vector_entry_point": "begins episodes in the step after their end",
        "env.wrappers.TimeAwareObservation=null": "env.wrappers: not for Vector/CartPole-v1",
        "env.infos=[a]": "env.infos: ",
        "env.logged_infos=[a]": "env.logged_infos: ",
        "env.num_workers=1": "env.num_workers=1: Vector/CartPole-v1 has none; use env.num_workers=0",
        "env.max_episode_steps=9": "env.max_episode_steps: ",
    }.items(),
)
def test_what_is_not_kept_is_refused(word: str, message: str, package: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        envs_of("vector_env:Vector/CartPole-v1", package.vector_pool, *[word])


def changed(made: Any, change: Callable[[np.ndarray], np.ndarray]) -> tuple[Any, Any]:
    """The environments with other observations in their steps."""
    env, seeds = made
    step = env.step

    def changed_step(actions: Any) -> Any:
        obs, *rest = step(actions)
        return change(obs), *rest

    env.step = changed_step
    return env, seeds


def test_what_does_not_repeat_itself_or_is_no_number_is_noticed(package: Any) -> None:
    make, rng = package.BACKENDS["Vector"], np.random.default_rng()
    package.BACKENDS["Vector"] = lambda *args, **more: changed(
        make(*args, **more), lambda obs: obs + rng.random()
    )
    with pytest.raises(ConfigError, match="two trials with the same seeds"):
        envs_of("vector_env:Vector/CartPole-v1", package.vector_pool)
    package.BACKENDS["Vector"] = lambda *args, **more: changed(
        make(*args, **more), lambda obs: obs * math.nan
    )
    with pytest.raises(RunError, match="CartPole-v1: NaN or infinity"):
        envs_of("vector_env:Vector/CartPole-v1", package.vector_pool)
    package.BACKENDS["Vector"] = lambda _, *args: make("Acrobot-v1", *args)
    with pytest.raises(ConfigError, match=r"observes Box\(.* \(6,\), float32\), and evaluations \(4,\)"):
        envs_of("vector_env:Vector/CartPole-v1", package.vector_pool)


class OddLibrary(SyncVectorEnv):
    """Flags in numbers, and perhaps the names of final observations from before Gymnasium 1.1."""

    name = "final_obs"

    def step(self, actions: Any) -> Any:
        obs, reward, terminated, truncated, info = super().step(actions)
        info = {name.replace("final_obs", self.name): value for name, value in info.items()}
        return obs, reward, terminated.astype(np.float32), truncated.astype(np.uint8), info


def test_flags_may_be_numbers_and_final_observations_may_not_be_missing(
    package: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the value of a truncated episode would be that of the next one's first observation."""
    expected = bits(envs_of("CartPole-v1", package.vector_pool))
    monkeypatch.setitem(globals(), "SyncVectorEnv", OddLibrary)
    package.BACKENDS["Vector"] = same_step
    assert bits(envs_of("vector_env:Vector/CartPole-v1", package.vector_pool)) == expected
    monkeypatch.setattr(OddLibrary, "name", "final_observation")
    with pytest.raises(RunError, match="Vector/CartPole-v1: an episode ended, and info has no final_obs"):
        envs_of("vector_env:Vector/CartPole-v1", package.vector_pool)


def follows(obs: np.ndarray, action: np.ndarray) -> np.ndarray:
    """The next observation of CartPole, by Gymnasium's environment."""
    env: Any = gym.make("CartPole-v1").unwrapped
    env.reset()
    env.state = tuple(map(float, obs))
    return np.asarray(env.step(int(action[0]))[0])


@pytest.mark.long
def test_envpool_repeats_itself_and_no_step_is_lost(package: Any) -> None:
    pytest.importorskip("envpool")
    for name in ("CartPole-v1", "Hopper-v5"):
        first, again, other = (
            bits(envs_of(f"vector_env:EnvPool/{name}", package.vector_pool, seed=seed)) for seed in (1, 1, 2)
        )
        assert first == again != other
    obs, steps = rollout(envs_of("vector_env:EnvPool/CartPole-v1", package.vector_pool))
    actions = np.random.default_rng(0).integers(0, 2, (STEPS, NUM_ENVS, 1))
    assert sum(len(step.episodes) for step in steps) > 20
    for step, action in zip(steps, actions, strict=True):
        for row in range(NUM_ENVS):
            np.testing.assert_allclose(step.next_obs[row], follows(obs[row], action[row]), atol=1e-5)
        done = step.terminated | step.truncated
        assert (step.obs[~done] == step.next_obs[~done]).all()
        assert (abs(step.obs[done]) <= 0.05).all()
        obs = step.obs


@pytest.mark.long
def test_games_of_atari_repeat_themselves_and_begin_anew(package: Any) -> None:
    pytest.importorskip("ale_py")
    pytest.importorskip("cv2")
    word = "vector_env:AleVector/Breakout-v5"
    first, again, other = (bits(envs_of(word, package.vector_pool, seed=seed), 50) for seed in (1, 1, 2))
    assert first == again != other
    envs = envs_of(word, package.vector_pool)
    assert envs.codec.image_shape == (4, 84, 84)  # type: ignore[attr-defined]
    obs, steps = rollout(envs, 400)
    ended = [step for step in steps if step.episodes]
    assert ended
    for step in ended:
        row = int(np.flatnonzero(step.terminated)[0])
        assert (step.obs[row] != step.next_obs[row]).any()
        assert np.mean(step.obs[row] != obs[row]) < 0.01  # a game begins with all bricks


@pytest.mark.long
def test_a_run_says_what_is_lost_and_is_not_resumed(tmp_path: Path) -> None:
    project = tmp_path / "project"
    copy_project(project)
    page = (ROOT / "docs/environments.md").read_text()
    (diff,) = re.findall(r"^```diff\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (project / "change.diff").write_text(diff)
    git(project, "apply", "change.diff")
    shutil.copy(FOLDER / "vector_env.py", project)
    words = small("ppo", "total_env_steps=256", "checkpoint_every=64", env="vector_env:Vector/CartPole-v1")
    assert words[1].startswith("env=")
    done = run_train(project, tmp_path, *words, "run_dir=run", status=0)
    notes = record(tmp_path / "run")["notes"]
    assert len(notes) == 4
    assert all(note in done.stderr for note in notes)
    run(tmp_path, *program(project, "evaluate"), "run=run", "episodes=2", status=0)
    done = run(tmp_path, *program(project, "resume"), "run=run", "total_env_steps=512", status=2)
    assert "Vector: checkpoints have no state of these environments" in done.stderr
    assert len(done.stderr.splitlines()) <= 2
    words[1] = "env=CartPole"
    done = run_train(project, tmp_path, *words, "recipe=null", "run_dir=plain", status=0)
    assert notes[0] not in done.stderr
    assert record(tmp_path / "plain")["notes"] == []
    assert rows(tmp_path / "plain") == rows(tmp_path / "run")
