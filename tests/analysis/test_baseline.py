"""A run with a baseline begins only if it changes one thing, and a refused one leaves nothing behind."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import RecordedRun, run_train, small, write_run

from runlab.analysis import baseline
from runlab.errors import ConfigError
from runlab.launch.checks import planned
from runlab.run import paths
from runlab.run.git import changes
from runlab.run.read import raw_config
from runlab.run.record import RunRecord
from runlab.run.used_code import UsedCode, digests_now

Check = Callable[..., list[str]]


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Check a job for each of several changes to the baseline's configuration, whose code has changed so."""
    machine, versions = {"cpu": "abacus"}, {"torch": "2.0"}
    run_dir = write_run(tmp_path / "runs", config={"device": "cpu"}, machine=machine, versions=versions)
    monkeypatch.setattr(baseline, "machine_facts", lambda: machine | {"gpus": []})
    monkeypatch.setattr(baseline, "package_versions", lambda _: versions)

    def call(*jobs: dict[str, Any], files: list[str] | None = None) -> list[str]:
        monkeypatch.setattr(changes, "files_between", lambda *_: [] if files is None else files)
        configs = []
        for change in jobs:
            config = raw_config(run_dir)
            config |= {"baseline": "run-1", "runs_dir": str(tmp_path / "runs")}
            config["algo"]["gamma"] = change.get("algo.gamma", config["algo"]["gamma"])
            configs.append(config | {k: v for k, v in change.items() if "." not in k})
        words = [[f"{key}={value}" for key, value in change.items()] for change in jobs]
        return baseline.check_baseline(tmp_path, configs, words)

    return call


AGAINST, TWO = "against run-1: ", "2 things differ: algo.gamma 0.99 -> 0.9; total_env_steps 200 -> 100"


def test_one_change_is_said_in_a_line_and_two_are_refused(check: Check) -> None:
    assert check({"algo.gamma": 0.9, "seed": 7}) == [f"{AGAINST}algo.gamma 0.99 -> 0.9"]
    assert check({"device": "auto"}) == [f"{AGAINST}same experiment"]
    assert check({"note": "why", "trace": "step"}) == [f"{AGAINST}same experiment"]
    assert check({}, files=["runlab/rng.py"]) == [f"{AGAINST}code (runlab/rng.py)"]
    both: dict[str, Any] = {"algo.gamma": 0.9, "total_env_steps": 100}
    with pytest.raises(ConfigError, match=f"^baseline=run-1: {TWO}"):
        check(both)
    (warning,) = check(both | {"baseline_check": "warn"})
    assert warning.startswith(f"warning: {AGAINST}{TWO}; the cause of a difference")
    with pytest.raises(ConfigError, match="all jobs of a sweep have one"):
        check({}, {"baseline": "nope"})


def test_this_machine_and_its_packages_are_compared(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baseline, "machine_facts", lambda: {"cpu": "slide rule"})
    assert check({}) == [f"{AGAINST}hardware (cpu abacus -> slide rule)"]
    monkeypatch.setattr(baseline, "package_versions", lambda _: {"torch": "3.0"})
    with pytest.raises(ConfigError, match="2 things differ: versions"):
        check({})


def test_the_compiler_counts_for_compiled_runs(
    check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "runs" / "ppo-Thing" / "run-1"
    (run_dir / paths.CONFIG).write_text(json.dumps(raw_config(run_dir) | {"compile": True}))
    record = RunRecord.read(run_dir)
    replace(record, versions=record.versions | {"c++ compiler": "g++ 12"}).write(run_dir)
    for now, text in (("12", "same experiment"), ("14", "versions (c++ compiler g++ 12 -> g++ 14)")):
        versions = {"torch": "2.0", "c++ compiler": f"g++ {now}"}
        monkeypatch.setattr(baseline, "package_versions", lambda _, versions=versions: versions)
        assert check({}) == [f"{AGAINST}{text}"]


def test_a_sweep_over_one_key_is_fine_and_over_two_is_not(check: Check) -> None:
    jobs = [{"algo.gamma": gamma, "seed": seed} for gamma in (0.9, 0.95) for seed in (1, 2)]
    assert check(*jobs) == [f"{AGAINST}algo.gamma 0.99 -> 0.9, algo.gamma 0.99 -> 0.95"]
    # With the baseline's own values among them, only the last job changes two things.
    grid = [{"algo.gamma": gamma, "total_env_steps": n} for gamma in (0.99, 0.9) for n in (200, 100)]
    with pytest.raises(ConfigError, match=r"2 things differ: total_env_steps .*; algo\.gamma "):
        check(*grid)


def test_last_is_the_run_that_was_the_last_when_the_command_was_given(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    write_run(runs, 1, env="CartPole")
    plan = planned(["baseline=last", f"runs_dir={runs}", "seed=1,2"])
    write_run(runs, 2, env="CartPole")
    assert [config.baseline for config in plan.configs] == ["run-1"]
    for words in (plan.argv, *plan.overrides):
        assert [word for word in words if word.startswith("baseline=")] == ["baseline=run-1"]


def test_two_changes_start_nothing(recorded_run: RecordedRun, tmp_path: Path) -> None:
    """With real records: only what was changed on purpose differs."""
    run_dir = Path(shutil.copytree(recorded_run.run_dir, tmp_path / "runs" / "ppo-CartPole" / "before"))
    project = Path(shutil.copytree(recorded_run.project, tmp_path / "project"))
    with (project / "runlab/rng.py").open("a") as file:
        file.write("# another thought\n")
    words = small("ppo", "total_env_steps=192", "eval_every=0", "video_every=0", "logger=none")
    done = run_train(project, tmp_path, *words, "algo.gamma=0.9,0.95", "seed=1,2", "baseline=before")
    assert (done.returncode, done.stdout) == (2, "")
    first, second = done.stderr.splitlines()
    assert first.startswith("error: baseline=before: 2 things differ: algo.gamma 0.98 -> 0.9")
    assert first.endswith("; code (runlab/rng.py)")
    assert second == "change one thing at a time, or start all the same with baseline_check=warn"
    assert json.loads((run_dir / paths.RECORD).read_text())["status"] == "finished"
    assert [path.name for path in (tmp_path / "runs").rglob("record.json")] == ["record.json"]


def test_only_code_that_the_baseline_used_is_a_change(
    check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "runs" / "ppo-Thing" / "run-1" / paths.RECORD
    (tmp_path / "away").mkdir()
    (tmp_path / "away" / "helper_of_a_baseline.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path / "away")
    used = UsedCode(files=["runlab/rng.py"], outside={"helper_of_a_baseline": "?"})
    used = digests_now(tmp_path, used)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"used": dataclasses.asdict(used)}))
    unused = ["notes.txt", "my_env.py", "runlab/run/logger.py"]
    assert check({}, files=unused)[-1] == f"{AGAINST}same experiment"
    used_too = [*unused, "runlab/rng.py"]
    assert check({}, files=used_too) == [f"{AGAINST}code (runlab/rng.py)"]
    (tmp_path / "away" / "helper_of_a_baseline.py").write_text("x = 2\n")
    with pytest.raises(ConfigError, match=r"2 things differ: algo.*helper_of_a_baseline \(outside of the"):
        check({"algo.gamma": 0.9})
