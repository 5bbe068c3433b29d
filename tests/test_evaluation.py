"""Evaluations as the policy acts, the best checkpoint, and entries of info in rows."""

from __future__ import annotations

import json
import math
import os
import pkgutil
import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import (
    ON_LEARNING,
    Configure,
    RecordedRun,
    build,
    differences,
    env_config,
    job_in,
    killed_at,
    rows,
    small,
)
from gymnasium import spaces

from rltemplate.algos.ppo import PPO
from runlab.__main__ import main
from runlab.config.project import ALGORITHMS
from runlab.envs import make
from runlab.envs.envs import Envs
from runlab.errors import ConfigError, RunError
from runlab.interfaces import act_of
from runlab.launch import worker
from runlab.rerun.policy_file import export_policy
from runlab.run import paths
from runlab.run.checkpoint import load_checkpoint
from runlab.run.manifest import Manifest, list_checkpoints
from runlab.run.observers import RunObservers
from runlab.run.paths import steps_of
from runlab.run.read import best_steps, chosen_checkpoints

WALL = ["env.id=examples.wall:Wall-v0", "env.max_episode_steps=20", "env.logged_infos=[success]"]
# Few steps, an evaluation at every fourth iteration.
SHORT = [*WALL, "total_env_steps=512", "eval_every=128", "eval_episodes=4", "log_every=64"]
SAMPLED = [*SHORT, "eval_policy=sample", "checkpoint_every=64"]


def train(
    configure: Configure, run_dir: Path, *words: str, resume: bool = False, algo: str = "ppo", status: int = 0
) -> Path:
    """Train or resume a run in this process; its folder."""
    config = configure(*small(algo, "logger=none", "video_every=0", "determinism=fast", *words))
    assert worker.run(replace(job_in(run_dir, configure), config=config, resume=resume)) == status
    return run_dir


def test_an_environment_prints_nothing_into_the_document(
    recorded_run: RecordedRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def prints(*args: Any, **kwargs: Any) -> gym.Env[Any, Any]:
        print("made")
        return made(*args, **kwargs)

    made = make.make_env
    monkeypatch.setattr(make, "make_env", prints)
    assert main(["evaluate", f"run={recorded_run.run_dir}", "episodes=1", "json=true", "trust=true"]) == 0
    out, err = capsys.readouterr()
    assert (json.loads(out)["run"], "made" in err) == (recorded_run.run_dir.name, True)


def evaluated(run_dir: Path, name: str = "eval/return") -> list[float]:
    return [row[name] for row in rows(run_dir) if name in row]


# How a policy acts.


def test_sampled_evaluations_show_the_training_return_of_a_policy_whose_best_actions_meet_a_wall(
    configure: Configure, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*WALL, "env.num_envs=8", "algo.num_steps=64", "total_env_steps=8192", "log_every=4096"]
    words += ["eval_every=4096", "eval_episodes=200"]
    sample, mode = (train(configure, tmp_path / p, *words, f"eval_policy={p}") for p in ("sample", "mode"))
    assert (sample / paths.TRACE).read_bytes() == (mode / paths.TRACE).read_bytes()
    assert evaluated(mode) == [0.0, 0.0]
    training = evaluated(sample, "episode/return")[-1]
    assert training > 0.5
    interval = 2.6 * math.sqrt(training * (1.0 - training) / 200)  # 99 %
    assert abs(evaluated(sample)[-1] - training) < interval
    assert 0.0 < interval < 0.1
    for words, right in ([], "sample"), (["eval_policy=mode"], "mode"), (["eval_policy=sample"], "sample"):
        assert main(["evaluate", f"run={sample}", "episodes=200", "json=true", "trust=true", *words]) == 0
        value = json.loads(capsys.readouterr().out)["eval/return"]
        assert (abs(value - training) < interval) == (right == "sample")
        assert (value == 0.0) == (right == "mode")


@pytest.mark.parametrize("algo", ON_LEARNING)
def test_every_algorithm_draws_a_row_from_its_own_generator(algo: str, configure: Configure) -> None:
    algorithm, envs = build(configure(*small(algo)))
    obs = np.random.default_rng(0).normal(size=(64, envs.codec.obs_size)).astype(np.float32)
    act = act_of(algorithm, "sample")

    def drawn(rows: Sequence[int], first_seed: int = 0) -> np.ndarray:
        rngs = [torch.Generator().manual_seed(first_seed + row) for row in rows]
        return act(obs[rows], None, rngs)[0]

    everything = [*range(64)]
    assert np.array_equal(drawn(everything), drawn(everything))
    assert np.allclose(drawn(everything)[40:50], drawn([*range(40, 50)]), rtol=1e-4, atol=1e-5)
    assert not np.array_equal(drawn(everything), drawn(everything, first_seed=1))
    mode = act_of(algorithm)(obs, None)[0]
    assert not np.array_equal(drawn(everything), mode)
    rngs = [torch.Generator().manual_seed(row) for row in everything]
    assert np.array_equal(act_of(algorithm, "mode")(obs, None, rngs)[0], mode)
    algorithm.close()


def test_drawn_actions_have_the_distribution_of_the_policy(configure: Configure) -> None:
    """Means and deviations over many rows of one observation, which training draws in another way."""
    algorithm: Any = build(configure(*small("ppo", env="Pendulum")))[0]
    obs = np.ones((4000, 3), np.float32)
    rngs = [torch.Generator().manual_seed(row) for row in range(4000)]
    actions = act_of(algorithm, "sample")(obs, None, rngs)[0]
    mean, log_std = algorithm.policy(torch.from_numpy(obs))[0].tolist()
    assert abs(actions.mean() - mean) < 0.07
    assert abs(actions.std() / math.exp(log_std) - 1.0) < 0.05
    algorithm.close()


def test_an_algorithm_that_cannot_draw_is_refused_before_the_run(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type(build(configure(*small("ppo")))[0])
    act = kind.act
    monkeypatch.setattr(kind, "act", lambda self, obs: act(self, obs))
    train(configure, tmp_path / "mode", *SHORT)
    with pytest.raises(ConfigError, match=r"^eval_policy=sample: .*\(\) has no parameter rngs; use mode$"):
        train(configure, tmp_path / "sample", *SAMPLED)
    assert not (tmp_path / "sample").exists()


@pytest.mark.long
def test_films_and_policy_files_act_as_the_evaluations_of_their_run(
    configure: Configure, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With drawn actions, whose deviation a policy file keeps; test_film.py has the most probable ones."""
    words = ["total_env_steps=128", "eval_every=0", "env.max_episode_steps=40", "eval_policy=sample"]
    config = small("ppo", *words, env="Pendulum")[1:]  # without algo=, which `train` adds
    run_dir, file = train(configure, tmp_path / "run", *config), tmp_path / "policy.zip"
    export_policy(run_dir, file)
    assert main(["evaluate", f"run={run_dir}", "episodes=2", "json=true"]) == 0
    assert main(["evaluate", f"policy={file}", "episodes=2", "json=true"]) == 0
    assert main(["film", f"run={run_dir}", "episodes=2", f"out={tmp_path / 'film.mp4'}", "size=64"]) == 0
    out, err = capsys.readouterr()
    of_run, of_file = (json.loads(line)["returns"] for line in out.splitlines()[:2])
    filmed = [float(each) for each in re.findall(r"return (\S+)", err)]
    assert of_run == of_file
    assert filmed == [round(each, 1) for each in of_run]
    assert main(["evaluate", f"policy={file}", "eval_policy=sample"]) == 2
    assert "eval_policy=sample: a policy file acts as its run; give run=RUN" in capsys.readouterr().err


# The best checkpoint.

KEPT = [*SHORT[len(WALL) :], "env.max_episode_steps=20", "eval_episodes=1"]
KEPT += ["checkpoints_kept=1", "checkpoint_every=512", "keep_best=true"]


def script(monkeypatch: pytest.MonkeyPatch, returns: Sequence[float]) -> None:
    """Let evaluations after 128, 256, ... steps have these returns."""

    def scripted(self: Any) -> dict[str, float]:
        return {"eval/return": returns[self._algorithm.env_steps // 128 - 1]}

    monkeypatch.setattr(RunObservers, "_evaluate", scripted)


def kept(run_dir: Path) -> list[int]:
    return [steps_of(path) for path in list_checkpoints(run_dir)]


@pytest.mark.parametrize(
    ("returns", "expected"),
    [
        ([3.0, 5.0, 4.0, 1.0], [256, 512]),
        ([5.0, 5.0, 1.0, 5.0], [128, 512]),
        ([-3.0, -2.0, -1.0, 0.0], [512]),
    ],
)
def test_rotation_keeps_the_best_checkpoint_and_of_equal_ones_the_first(
    configure: Configure,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    returns: list[float],
    expected: list[int],
) -> None:
    script(monkeypatch, returns)
    run_dir = train(configure, tmp_path / "run", *KEPT)
    assert kept(run_dir) == expected
    assert best_steps(run_dir) == expected[0]
    export_policy(run_dir, tmp_path / "best.zip", checkpoint="best")
    for words in ([f"run={run_dir}", "checkpoint=best"], [f"policy={tmp_path / 'best.zip'}"]):
        assert main(["evaluate", *words, "json=true"]) == 0
        assert json.loads(capsys.readouterr().out)["env_steps"] == expected[0]
    assert main(["evaluate", f"run={run_dir}", "json=true"]) == 0
    assert json.loads(capsys.readouterr().out)["env_steps"] == 512


def test_without_keep_best_there_is_none(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script(monkeypatch, [5.0, 1.0, 1.0, 1.0])
    run_dir = train(configure, tmp_path / "run", *KEPT, "keep_best=false")
    assert kept(run_dir) == [512]
    for command in "evaluate", "film":
        assert main([command, f"run={run_dir}", "checkpoint=best"]) == 2
        assert "checkpoint=best: run has kept none; it needs keep_best=true" in capsys.readouterr().err
    for never in "eval_every=0", "checkpoint_every=0":
        with pytest.raises(
            ConfigError, match=r"^keep_best=true: eval_every and checkpoint_every must be at le"
        ):
            configure(*small("ppo", *KEPT, never))


@pytest.mark.parametrize(("algo", "best_at"), [("ppo", 256), ("sac", 264)])
def test_a_run_that_keeps_its_best_resumes_exactly_after_a_kill(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algo: str, best_at: int
) -> None:
    """SAC's best checkpoint also keeps the chunks of its replay buffer."""
    words = [*KEPT, "checkpoint_every=96"]
    script(monkeypatch, [3.0, 5.0, 4.0, 1.0])
    straight = train(configure, tmp_path / "straight", *words, algo=algo)
    with killed_at(pkgutil.resolve_name(ALGORITHMS[algo].implementation), 300):
        train(configure, tmp_path / "killed", *words, algo=algo)
    resumed = train(configure, tmp_path / "killed", *words, algo=algo, resume=True)
    assert differences(straight, resumed) == []
    assert kept(straight) == kept(resumed)
    for each in straight, resumed:
        (best,) = chosen_checkpoints(each, "best")
        assert load_checkpoint(best).state["env_steps"] == best_at


@pytest.mark.parametrize("at", ["state", "manifest", "removal"])
def test_a_kill_at_any_moment_leaves_a_whole_best_checkpoint(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    script(monkeypatch, [3.0, 5.0, 4.0, 1.0])
    straight = train(configure, tmp_path / "straight", *KEPT)
    with monkeypatch.context() as patch:

        def killed(*_words: Any, **_more: Any) -> Any:
            raise KeyboardInterrupt

        def at_256(function: Callable[..., Any]) -> Callable[..., Any]:
            """A kill in the place of the call, once the checkpoint after 256 steps is due, or is there."""
            there = 256 if at == "removal" else 128

            def call(*words: Any, **more: Any) -> Any:
                due = bool([*(tmp_path / "killed" / paths.CHECKPOINTS).glob(f"step_{there}.json")])
                return (killed if due else function)(*words, **more)

            return call

        module = __import__("runlab.run.checkpoint", fromlist=["_"])
        if at == "state":
            patch.setattr(module, "_save", at_256(module._save))
        elif at == "manifest":
            patch.setattr(Manifest, "sealed", at_256(Manifest.sealed))
        else:
            patch.setattr(module, "prune_checkpoints", at_256(module.prune_checkpoints))
        with pytest.raises(KeyboardInterrupt):
            train(configure, tmp_path / "killed", *KEPT)
    (best,) = chosen_checkpoints(tmp_path / "killed", "best")
    assert load_checkpoint(best).state["env_steps"] == (256 if at == "removal" else 128)
    resumed = train(configure, tmp_path / "killed", *KEPT, resume=True)
    assert differences(straight, resumed) == []
    assert kept(resumed) == [256, 512]


def test_damaged_rows_cost_no_run(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def damaging(self: Any) -> dict[str, float]:
        (self._run_dir / paths.METRICS).write_text("not a row\n")
        return {"eval/return": 1.0}

    monkeypatch.setattr(RunObservers, "_evaluate", damaging)
    run_dir = train(configure, tmp_path / "run", *KEPT, "checkpoint_every=256")
    assert kept(run_dir) == [256, 512]
    assert capfd.readouterr().err.count("no older one is removed: run: metrics.jsonl: line 1 is damaged") == 2


def test_an_evaluation_that_a_signal_cuts_short_counts_after_the_resume(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluates, run_dir = RunObservers._evaluate, tmp_path / "run"
    script(monkeypatch, [5.0, 1.0, 1.0, 1.0])
    straight = train(configure, tmp_path / "straight", *KEPT)

    def interrupted(self: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluates(self)

    with monkeypatch.context() as patch:
        patch.setattr(RunObservers, "_evaluate", interrupted)
        train(configure, run_dir, *KEPT, status=143)
    assert (kept(run_dir), best_steps(run_dir)) == ([128], None)
    train(configure, run_dir, *KEPT, resume=True)
    assert differences(straight, run_dir) == []
    assert kept(run_dir) == kept(straight) == [128, 512]


# Entries of info.


class Telling(gym.Env[Any, Any]):
    """Episodes of three steps, whose infos have one entry in each way."""

    observation_space, action_space = spaces.Box(-1.0, 1.0, (2,), np.float32), spaces.Discrete(2)

    def __init__(self, told: Any = 0.0) -> None:
        self.told, self.number = told, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps, self.number = 0, self.number + 1
        return np.zeros(2, np.float32), {"begin": 7.0, "second": 99.0}

    def step(self, action: Any) -> Any:
        self.steps += 1
        info: dict[str, Any] = {"each": self.steps * self.number, "told": self.told}
        info |= {"second": np.float32(2.5)} if self.steps == 2 else {}
        if self.steps == 3:
            info |= {"end": np.bool_(self.number % 2), "episode": {"r": np.array([1.5])}}
        return np.zeros(2, np.float32), 1.0, self.steps == 3, False, info


gym.register("Telling-v0", entry_point=f"{__name__}:Telling")
NAMES = ["end", "each", "second", "episode.r", "begin", "nothing"]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_episode_has_the_last_value_that_its_steps_gave(num_workers: int) -> None:
    envs = Envs(env_config("Telling-v0", 3, num_workers, logged_infos=NAMES), [1, 2, 3])
    envs.reset()
    steps = [envs.step(np.zeros((3, 1), np.int64)) for _ in range(6)]
    envs.close()
    found = [dict(each.infos) for step in steps for each in step.episodes]
    common = [2.5, 1.5, math.nan, math.nan]  # NaN: no step gave it
    expected = [[float(number % 2), 3.0 * number, *common] for number in (1, 1, 1, 2, 2, 2)]
    np.testing.assert_equal([[each[name] for name in NAMES] for each in found], expected)
    plain = Envs(env_config("Telling-v0", 1), [1])
    plain.reset()
    assert [
        dict(each.infos) for _ in range(3) for each in plain.step(np.zeros((1, 1), np.int64)).episodes
    ] == [{}]
    plain.close()


@pytest.mark.parametrize(
    ("told", "problem"),
    [
        ([1.0, 2.0], "info has 2 numbers as told, expected one"),
        ("yes", "info has 'yes' as told, expected num"),
    ],
)
def test_an_entry_that_is_no_number_ends_the_run_in_a_line(told: Any, problem: str) -> None:
    envs = Envs(env_config("Telling-v0", logged_infos=["told"], kwargs={"told": told}), [1])
    envs.reset()
    with pytest.raises(RunError, match=f"^Telling-v0: {problem}"):
        envs.step(np.zeros((1, 1), np.int64))
    envs.close()


def test_sampled_evaluations_and_means_of_infos_are_the_same_with_workers_and_after_a_kill(
    configure: Configure, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this environment the success of an episode is its return."""
    words = [*SAMPLED, "log_every=256"]
    straight = train(configure, tmp_path / "straight", *words)
    again = train(configure, tmp_path / "again", *words, "env.num_workers=1")
    other = train(configure, tmp_path / "other", *words, "seed=2")
    with killed_at(PPO, 224):  # the checkpoint after 192 steps has episodes of no row yet
        train(configure, tmp_path / "killed", *words)
    resumed = train(configure, tmp_path / "killed", *words, resume=True)
    assert differences(straight, again) == differences(straight, resumed) == []
    assert evaluated(straight) != evaluated(other)
    for kind in "episode", "eval":
        assert evaluated(straight, f"{kind}/success") == evaluated(straight, f"{kind}/return") != []
    assert all(len({*evaluated(straight, f"{kind}/success")}) > 1 for kind in ("episode", "eval"))
    assert main(["evaluate", f"run={straight}", "trust=true", "json=true"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["eval/success"] == document["eval/return"]
    assert main(["evaluate", f"run={straight}", "trust=true"]) == 0
    assert re.search(rf"^success +{document['eval/success']:.3g}$", capsys.readouterr().out, re.MULTILINE)


def test_an_entry_that_never_comes_is_named_once(
    configure: Configure, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    without = train(configure, tmp_path / "without", *SHORT, "env.logged_infos=[]")
    assert "logged_infos" not in capfd.readouterr().err
    run_dir = train(configure, tmp_path / "run", *SHORT, "env.logged_infos=[solved,success]")
    line = "note: env.logged_infos: no info of an episode has had solved so far"
    assert capfd.readouterr().err.count(line) == 1
    assert (run_dir / paths.TRACE).read_bytes() == (without / paths.TRACE).read_bytes()
    assert not any(name.endswith("/solved") for row in rows(run_dir) for name in row)
    for name in "return", "length":
        with pytest.raises(ConfigError, match=f"env.logged_infos: every row has episode/{name} already"):
            configure(*small("ppo", f"env.logged_infos=[{name}]"))
