"""Values `auto` become those by which a run gains on this machine."""

from __future__ import annotations

import os
import shutil
import sysconfig
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from runlab import machine
from runlab.config import auto
from runlab.config.cli.preflight import preflight
from runlab.config.loading import from_dict, to_dict

SAC, PPO = ["algo=sac", "env=Hopper"], ["algo=ppo", "env=Hopper"]


@pytest.mark.parametrize(
    ("words", "cores", "expected"),
    [
        (SAC, 16, (2, True, 0, 1)),
        (PPO, 16, (1, True, 1, 1)),
        ([*PPO, "algo.hidden_sizes=[256,256]", "algo.num_minibatches=8"], 2, (2, True, 0, 1)),
        ([*PPO, "algo.encoder=nature"], 2, (2, True, 0, 1)),  # large convolutions
        ([*SAC, "algo.hidden_sizes=[128]"], 2, (1, True, 0, 1)),
        ([*SAC, "algo.hidden_sizes=[128]", "algo.network=residual"], 2, (2, True, 0, 1)),
        ([*PPO, "total_env_steps=50000"], 2, (1, False, 1, 1)),  # too short to gain by a compiler
        ([*SAC, "determinism=invariant"], 2, (1, False, 0, 1)),  # compiled updates would break it
        ([*PPO, "device=cuda"], 2, (1, True, 1, 1)),
        ([*SAC, "num_threads=3", "compile=false"], 2, (3, False, 0, 1)),
        # No worker where no core is free, and none for a single environment.
        (PPO, 1, (1, True, 0, 1)),
        ([*PPO, "num_threads=2"], 2, (2, True, 0, 1)),
        ([*PPO, "env.num_envs=1"], 2, (1, True, 0, 1)),
        # Jobs of a sweep share the cores; a given number of threads has its cores.
        ([*SAC, "seed=1,2,3", "hydra/launcher=joblib"], 2, (1, True, 0, 2)),
        ([*SAC, "seed=range(0,40)", "hydra/launcher=joblib", "num_threads=4"], 16, (4, True, 0, 4)),
        ([*SAC, "seed=1,2,3", "hydra/launcher=joblib", "env.num_workers=1"], 2, (2, True, 1, 1)),
        ([*SAC, "seed=1,2,3", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"], 16, (2, True, 0, 2)),
        ([*PPO, "seed=1,2,3"], 2, (1, True, 0, 2)),
        ([*PPO, "seed=1,2"], 16, (1, True, 1, 2)),
        # Ray starts a job on each core, unless a job takes more.
        ([*SAC, "seed=1,2,3", "hydra/launcher=ray"], 2, (1, True, 0, 2)),
        ([*PPO, "seed=1,2,3", "hydra/launcher=ray", "num_threads=1"], 2, (1, True, 0, 2)),
        ([*SAC, "seed=1,2,3", "hydra/launcher=ray", "hydra.launcher.num_cpus=2"], 4, (2, True, 0, 2)),
        ([*SAC, "seed=1,2", "hydra/launcher=ray", "hydra.launcher.num_cpus=0.5"], 1, (1, True, 0, 1)),
    ],
)
def test_auto_is_what_the_run_gains_by(
    words: list[str], cores: int, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores))
    monkeypatch.setattr(auto, "cpp_compiler", lambda: "g++")
    monkeypatch.setattr("runlab.config.cli.preflight.require", lambda *_: None)  # Ray is not called
    plan = preflight([*words, "local=null"])
    values = [attrgetter(key)(plan.configs[0]) for key in auto.AUTO_KEYS]
    assert (*values, plan.jobs) == expected
    asked = [f"{key}={str(value).lower()}" for key, value in zip(auto.AUTO_KEYS, values, strict=True)]
    asked = asked[: 3 if "algo=ppo" in words else 2]  # only PPO on MuJoCo has env.num_workers=auto
    shown = [text for text in asked if not any(text.partition("=")[0] in word for word in words)]
    assert plan.auto == ([f"auto: {' '.join(shown)}"] if shown else [])
    assert from_dict(to_dict(plan.configs[0])) == plan.configs[0]  # a record holds values


def test_values_from_the_environment_are_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPUS", "2")
    (config,) = preflight(["num_threads=${oc.env:CPUS}", "env.num_workers='1'", "local=null"]).configs
    assert (config.num_threads, config.env.num_workers) == (2, 1)


def test_a_compiler_is_of_use_only_with_the_headers_of_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: name)
    (tmp_path / "Python.h").touch()
    for folder, found in (tmp_path, True), (tmp_path / "none", False):
        monkeypatch.setattr(sysconfig, "get_path", lambda _, folder=folder: str(folder))
        assert (machine.cpp_compiler() is not None) == found


def test_without_a_compiler_a_line_says_what_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "cpp_compiler", lambda: None)
    plan = preflight([*PPO, "local=null"])
    assert not plan.configs[0].compile
    (line,) = plan.auto
    assert "apt install g++" in line
    assert "g++" not in preflight([*PPO, "total_env_steps=50000", "local=null"]).auto[0]


@pytest.mark.parametrize(
    ("own", "parent", "cores"),
    [
        ("max 100000", "max 100000", 8),
        ("250000 100000", "max 100000", 2),
        ("max 100000", "300000 100000", 3),
        ("50000 100000", "300000 100000", 1),
    ],
)
def test_the_limits_of_a_container_are_those_of_all_its_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, parent: str, cores: int
) -> None:
    monkeypatch.setattr(machine, "_CGROUPS", tmp_path / "group")
    monkeypatch.setattr(machine, "_group_limits", machine._group_limits.__wrapped__)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    (tmp_path / "group").mkdir()
    for folder, quota, memory in ((tmp_path / "group", own, "max"), (tmp_path, parent, "5000")):
        (folder / "cpu.max").write_text(f"{quota}\n")
        (folder / "memory.max").write_text(f"{memory}\n")
    assert (machine.usable_cores(), machine.usable_memory()) == (cores, 5000)
