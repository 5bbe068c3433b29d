"""A run with a baseline begins only if it changes one thing, and a refused one leaves nothing behind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import RecordedRun, run_train, small

from rltemplate.analysis.baseline import check_baseline
from rltemplate.analysis.diff import diff_runs
from rltemplate.analysis.runs import load_run
from rltemplate.run import paths
from rltemplate.types import ConfigError

WORDS = small("ppo", "total_env_steps=192", "eval_every=0", "video_every=0", "logger=none")
CODE = "rltemplate/learning/optim.py"


@pytest.fixture
def place(recorded_run: RecordedRun, tmp_path: Path) -> tuple[Path, Path]:
    """A copy of a project and of the folder of a run that was made with it, to be changed."""
    run_dir = tmp_path / "runs" / "ppo-CartPole" / load_run(recorded_run.run_dir).id
    shutil.copytree(recorded_run.run_dir, run_dir)
    return Path(shutil.copytree(recorded_run.project, tmp_path / "project")), run_dir


def edit(file: Path, **facts: Any) -> None:
    record = json.loads(file.read_text())
    file.write_text(json.dumps(record | facts))


def job(run_dir: Path, **values: Any) -> dict[str, Any]:
    """The configuration of the baseline with other values of root keys, and of the algorithm with `algo_`."""
    config: dict[str, Any] = yaml.safe_load((run_dir / paths.CONFIG).read_text())
    config |= {"baseline": run_dir.name, "runs_dir": str(run_dir.parents[1])}
    for key, value in values.items():
        group, _, name = key.partition("_")
        if group == "algo":
            config["algo"][name] = value
        else:
            config[key] = value
    return config


def test_one_change_is_said_in_a_line(place: tuple[Path, Path]) -> None:
    project, run_dir = place
    against = f"against {run_dir.name}: "
    for values, expected in (
        ({}, "same experiment"),
        ({"seed": 7}, "same experiment, another seed"),
        ({"algo_gamma": 0.9, "seed": 7}, "algo.gamma 0.98 -> 0.9"),
        ({"note": "why", "trace": "step"}, "same experiment"),
    ):
        assert check_baseline(project, [job(run_dir, **values)], [WORDS]) == [f"{against}{expected}"]
    (project / CODE).write_text((project / CODE).read_text() + "# another thought\n")
    assert check_baseline(project, [job(run_dir)], [WORDS]) == [f"{against}code (1 file)"]


def test_more_than_one_change_is_refused_with_a_way_on(place: tuple[Path, Path]) -> None:
    project, run_dir = place
    two = job(run_dir, algo_gamma=0.9, num_threads=2)
    with pytest.raises(ConfigError) as refused:
        check_baseline(project, [two], [WORDS])
    assert str(refused.value).splitlines() == [
        f"baseline={run_dir.name}: 2 things differ: algo.gamma 0.98 -> 0.9; num_threads 1 -> 2",
        "change one thing at a time, or start all the same with baseline_check=warn",
    ]
    (warning,) = check_baseline(project, [two | {"baseline_check": "warn"}], [WORDS])
    assert warning.startswith(
        f"warning: against {run_dir.name}: 2 things differ: algo.gamma 0.98 -> 0.9; num"
    )
    assert check_baseline(project, [two | {"baseline": None}], [WORDS]) == []


@pytest.mark.parametrize(
    ("section", "facts", "named"),
    [
        ("versions", {"torch": "1.0"}, "versions (torch 1.0 -> "),
        ("machine", {"cpu": "abacus"}, "hardware (cpu abac"),
    ],
)
def test_this_machine_and_its_packages_are_compared(
    place: tuple[Path, Path], section: str, facts: dict[str, Any], named: str
) -> None:
    project, run_dir = place
    record = json.loads((run_dir / paths.RECORD).read_text())
    edit(run_dir / paths.RECORD, **{section: record[section] | facts})
    (line,) = check_baseline(project, [job(run_dir)], [WORDS])
    assert named in line
    with pytest.raises(ConfigError, match=r"2 things differ: algo\.gamma"):
        check_baseline(project, [job(run_dir, algo_gamma=0.9)], [WORDS])


def test_a_sweep_over_one_key_is_fine_and_over_two_is_not(place: tuple[Path, Path]) -> None:
    project, run_dir = place
    jobs = [(gamma, seed) for gamma in (0.9, 0.95) for seed in (1, 2)]
    configs = [job(run_dir, algo_gamma=gamma, seed=seed) for gamma, seed in jobs]
    words = [[*WORDS, f"algo.gamma={gamma}", f"seed={seed}"] for gamma, seed in jobs]
    assert check_baseline(project, configs, words) == [
        f"against {run_dir.name}: algo.gamma 0.98 -> 0.9, algo.gamma 0.98 -> 0.95",
    ]
    # With the baseline's own values among them, only the last job changes two things.
    grid = [(gamma, steps) for gamma in (0.98, 0.9) for steps in (192, 96)]
    configs = [job(run_dir, algo_gamma=gamma, total_env_steps=steps) for gamma, steps in grid]
    words = [[*WORDS[1:], f"algo.gamma={gamma}", f"total_env_steps={steps}"] for gamma, steps in grid]
    for count in (3, 4):  # of a long sweep only some jobs are given, in which each value occurs
        with pytest.raises(ConfigError, match=r"2 things differ: total_env_steps .*; algo\.gamma "):
            check_baseline(project, configs[:count], words[:count])


def test_baselines_that_are_not_whole_are_noted(place: tuple[Path, Path]) -> None:
    project, run_dir = place
    against = f"against {run_dir.name}: algo.gamma 0.98 -> 0.9"
    config = job(run_dir, algo_gamma=0.9)
    edit(run_dir / paths.RECORD, status="failed", git={"tree": "f" * 40, "commit": "e" * 40})
    unknown, failed, line = check_baseline(project, [config], [WORDS])
    assert failed == f"note: baseline: {run_dir.name} ended failed"
    assert "this repository does not have both snapshots" in unknown
    assert line == against
    (run_dir / paths.CONFIG).write_text("algo: {name: ppo}\n")
    with pytest.raises(ConfigError, match=rf"^baseline={run_dir.name}: .*config.yaml has no env.id$"):
        check_baseline(project, [config], [WORDS])


def test_all_jobs_have_one_baseline_which_is_found_as_runs_are(place: tuple[Path, Path]) -> None:
    project, run_dir = place
    for name in (run_dir.name[-6:], str(run_dir), f"refs/runs/{run_dir.name}"):
        (line,) = check_baseline(project, [job(run_dir) | {"baseline": name}], [WORDS])
        assert line.startswith(f"against {run_dir.name}: ")
    with pytest.raises(ConfigError, match=r"^baseline=nope: no such run under .*the newest is "):
        check_baseline(project, [job(run_dir) | {"baseline": "nope"}], [WORDS])
    with pytest.raises(ConfigError, match=f"baseline={run_dir.name}, nope: all jobs of a sweep have one"):
        check_baseline(project, [job(run_dir), job(run_dir) | {"baseline": "nope"}], [WORDS, WORDS])


# --- As a user calls it ----------------------------------------------------------------------------------


def contents(folder: Path) -> set[tuple[str, int]]:
    return {
        (str(path), path.lstat().st_size if path.is_file() else -1)
        for path in folder.rglob("*")
        if "__pycache__" not in path.parts
    }


def test_two_changes_start_nothing(place: tuple[Path, Path], tmp_path: Path) -> None:
    project, run_dir = place
    (project / CODE).write_text((project / CODE).read_text() + "# another thought\n")
    before = contents(tmp_path)
    for more in (["algo.gamma=0.9"], ["algo.gamma=0.9,0.95", "seed=1,2"]):
        done = run_train(project, tmp_path, *WORDS, *more, f"baseline={run_dir.name}")
        assert (done.returncode, done.stdout) == (2, "")
        first, second = done.stderr.splitlines()
        assert first.startswith(f"error: baseline={run_dir.name}: 2 things differ")
        assert first.endswith("algo.gamma 0.98 -> 0.9; code (1 file)")
        assert second == "change one thing at a time, or start all the same with baseline_check=warn"
    assert contents(tmp_path) == before


TWO = ["num_threads=2", "baseline_check=warn"]


@pytest.mark.long
@pytest.mark.parametrize(("words", "factors"), [([], ["algo.gamma"]), (TWO, ["algo.gamma", "num_threads"])])
def test_one_change_starts_and_two_do_so_with_a_warning(
    place: tuple[Path, Path], tmp_path: Path, words: list[str], factors: list[str]
) -> None:
    project, baseline = place
    run_dir = tmp_path / "run"
    given = [*WORDS, "algo.gamma=0.9", f"baseline={baseline.name[-6:]}", f"run_dir={run_dir}", *words]
    done = run_train(project, tmp_path, *given)
    assert done.returncode == 0, done.stderr
    assert (
        f"against {baseline.name}: {'2 things differ: ' if words else ''}algo.gamma 0.98 -> 0.9"
        in done.stderr
    )
    assert ("warning: against" in done.stderr) is bool(words)
    # The same as make diff shows after the run.
    found = diff_runs(load_run(baseline), load_run(run_dir), project)
    assert [factor.name for factor in found.factors] == factors
