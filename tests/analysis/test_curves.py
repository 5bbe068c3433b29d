"""Curves say what the run folders say, and only of runs that finished."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT, program

from rltemplate.analysis import curves
from rltemplate.run import paths
from rltemplate.types import ConfigError


def write_run(
    root: Path, seed: int, returns: list[float], status: str = "finished", gamma: float = 0.99, tag: str = ""
) -> Path:
    run_dir = root / "ppo-Thing" / f"run-{seed}{tag}"
    run_dir.mkdir(parents=True)
    facts = {
        "schema": 1,
        "id": run_dir.name,
        "status": status,
        "git": {"base_commit": "0123456789abcdef", "dirty": False},
        "machine": {"cpu": "a processor"},
    }
    (run_dir / paths.RECORD).write_text(json.dumps(facts))
    config = (
        f"algo: {{name: ppo, gamma: {gamma}}}\nenv: {{id: Thing-v0}}\nseed: {seed}\nexperiment: ppo-Thing\n"
    )
    (run_dir / paths.CONFIG).write_text(config)
    rows = [{"env_steps": 5, "loss/policy": 1.0}]
    rows += [{"env_steps": 100 * (i + 1), "eval/return": value} for i, value in enumerate(returns)]
    (run_dir / paths.METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run_dir


def test_the_table_is_the_mean_of_the_last_evaluations(tmp_path: Path) -> None:
    runs = [write_run(tmp_path, seed, [0.0, float(seed)]) for seed in (10, 20, 60)]
    runs.append(write_run(tmp_path, 1000, [9e9], status="failed"))
    points, _ = curves.read_runs(runs)
    assert len(points) == 6
    last = curves.table(points).splitlines()[-1]
    assert last == "| ppo | Thing | 200 | 30.0 | 3 | 10, 20, 60 |"


def test_points_survive_the_file(tmp_path: Path) -> None:
    points, _ = curves.read_runs([write_run(tmp_path, 3, [1.5, 2.25])])
    curves.write_csv(points, tmp_path / "curves.csv")
    assert curves.read_csv(tmp_path / "curves.csv") == points
    assert points[0].commit == "0123456789ab"


def test_runs_that_are_not_one_experiment_are_not_averaged(tmp_path: Path) -> None:
    run = write_run(tmp_path, 1, [1.0])
    said = r"run-1 and run-2 differ in algo\.gamma \(0\.99 and 0\.5\), .*\n.*by=algo\.gamma"
    with pytest.raises(ConfigError, match=said):
        curves.read_runs([run, write_run(tmp_path, 2, [2.0], gamma=0.5)])


def test_the_newest_run_of_a_seed_counts(tmp_path: Path) -> None:
    runs = [write_run(tmp_path, 1, [1.0], tag=tag) for tag in ("-b", "-a", "-c")]
    points, replaced = curves.read_runs([*runs, write_run(tmp_path, 1, [], tag="-d")])
    assert [point.run for point in points] == ["run-1-c"]
    assert replaced == [
        "run-1-a: ppo on Thing with seed 1 was run again as run-1-b",
        "run-1-b: ppo on Thing with seed 1 was run again as run-1-c",
    ]


def test_runs_are_shown_apart_by_a_key(tmp_path: Path) -> None:
    runs = [write_run(tmp_path, 1, [1.0]), write_run(tmp_path, 1, [2.0], gamma=0.5, tag="-again")]
    shown = curves.table(curves.read_runs(runs, by="algo.gamma")[0]).splitlines()[2:]
    assert shown == [
        "| ppo | Thing gamma=0.5 | 100 | 2.0 | 1 | 2 |",
        "| ppo | Thing gamma=0.99 | 100 | 1.0 | 1 | 1 |",
    ]
    with pytest.raises(ConfigError, match=r"by=algo\.gama: no such key"):
        curves.read_runs(runs, by="algo.gama")


def test_nothing_to_show_is_said_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no finished run"):
        curves.read_runs([write_run(tmp_path, 1, [1.0], status="running")])


def test_the_command_writes_table_numbers_and_picture(tmp_path: Path) -> None:
    for seed in (1, 2):
        write_run(tmp_path / "runs", seed, [1.0, 2.0 * seed])
    command = [*program(ROOT, "curves"), "out=figures"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "| 3.0 | 2 |" in done.stdout
    assert (tmp_path / "figures" / "curves.png").read_bytes().startswith(b"\x89PNG")
    both = "runs=runs/ppo-Thing/run-1,run-2"  # a folder, and an id
    listed = subprocess.run([*command, both], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "| 3.0 | 2 |" in listed.stdout
    refused = subprocess.run(
        [*command, "runs=no/*"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert refused.returncode == 2
    assert "no run folders there" in refused.stderr
