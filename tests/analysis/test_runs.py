"""The table of runs: selection, order, and damaged folders."""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import write_run

from runlab.__main__ import main
from runlab.analysis.runs import SHOWN, load_run
from runlab.run import paths
from runlab.run.files import lock


def write(root: Path, number: int, score: float | None = 1.0, note: str | None = None, **more: Any) -> Path:
    """A run as it lies on the disk; `number` is its seed and the minute of its start."""
    algo = {"hidden_sizes": [64, 64], **more.pop("keys", {})}
    config = {"note": note, "trace": "off", "total_env_steps": 1_000_000, "algo": algo}
    facts = {
        "final_metrics": {} if score is None else {"eval/return": score, "policy/entropy": 0.5},
        "git": {"base_commit": "0123456789abcdef", "dirty": more.pop("dirty", False)},
        "started_at": f"2026-11-21T00:{number:02d}:00.000Z",
        **more,
    }
    return write_run(root, number, (3.0 * number,), config=config, **facts)


@pytest.fixture
def runs_dir(tmp_path: Path) -> Path:
    """Five runs of two algorithms in three environments, not written in the order of their start."""
    root = tmp_path / "runs"
    write(root, 5, 5000.0, "a, b", algo="sac", env="HalfCheetah", keys={"tau": 0.005})
    write(root, 1, 10.0)
    write(root, 3, None, env="Halfway", keys={"gamma": 0.9}, status="running")
    write(root, 2, -3.5, dirty=True, status="failed")
    write(root, 4, 3000.0, "why", env="Halfway")
    (root / "sweeps" / "20261121-sweep").mkdir(parents=True)
    (root / "sweeps" / "20261121-sweep" / "sweep.json").write_text("{}")
    return root


Call = Callable[..., tuple[str, str]]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Run the command; the text of both streams."""

    def command(folder: Path, *words: str, expected: int = 0) -> tuple[str, str]:
        assert main(["runs", f"runs_dir={folder}", *words]) == expected
        printed = capsys.readouterr()
        return printed.out, printed.err

    return command


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", [1, 2, 3, 4, 5]),
        ("env=Half*", [3, 4, 5]),
        ("seed=1,4,5 algo=ppo", [1, 4]),
        ("algo.gamma=0.990", [1, 2, 4, 5]),
        ("algo.tau=>0", [5]),
        ("return=<1e4 return=>=3000", [4, 5]),
        ("return=null", [3]),
        ("last=2 algo=ppo sort=-seed", [4, 3]),
        ("status=!=finished,failed", [3]),
        ("algo.hidden_sizes=[64,64]", [1, 2, 3, 4, 5]),
        # in both directions runs without the value come last
        ("sort=return", [2, 1, 4, 5, 3]),
        ("sort=-return", [5, 4, 1, 2, 3]),
    ],
)
def test_filters_keep_what_fits_all_of_them_and_runs_are_sorted(
    runs_dir: Path, call: Call, words: str, expected: list[int]
) -> None:
    shown, problems = call(runs_dir, "json=true", *words.split())
    assert ([run["seed"] for run in json.loads(shown)], problems) == (expected, "")


def test_json_is_strict_and_has_dates_as_text(tmp_path: Path, call: Call) -> None:
    config = write(tmp_path, 1, keys={"obs_clip": 10.0, "since": "never"}) / paths.CONFIG
    config.write_text(config.read_text().replace("10.0", ".inf").replace('"never"', "2026-11-01"))
    shown, _ = call(tmp_path, "json=true", "show=algo.obs_clip,algo.since")
    (run,) = json.loads(shown, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert (run["algo.obs_clip"], run["algo.since"]) == (None, "2026-11-01")


def test_a_run_whose_process_is_gone_was_killed(tmp_path: Path) -> None:
    statuses = {}
    this_host = platform.node()
    for number, (pid, host) in enumerate(
        ((os.getpid(), this_host), (2**30, this_host), (2**30, "elsewhere"))
    ):
        run_dir = write_run(tmp_path, number, status="running", pid=pid, hostname=host)
        statuses[pid, host] = load_run(run_dir).value("status")
    assert [*statuses.values()] == ["running", "killed", "running"]
    part = {"pid": os.getpid(), "hostname": this_host}
    resumed = write_run(tmp_path, 9, status="running", pid=2**30, hostname="elsewhere", resumed=[part])
    assert load_run(resumed).value("status") == "running"
    part["pid"] = 2**30
    resumed = write_run(tmp_path, 10, status="running", pid=os.getpid(), hostname=this_host, resumed=[part])
    assert load_run(resumed).value("status") == "killed"


def test_a_run_whose_process_number_has_another_process_was_killed(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, status="running", pid=os.getpid(), hostname=platform.node())
    with multiprocessing.Pool(1) as alive:
        alive.apply(lock, [run_dir])
        assert load_run(run_dir).value("status") == "running"
    assert load_run(run_dir).value("status") == "killed"


def test_the_table_is_aligned_and_whole(runs_dir: Path, tmp_path: Path, call: Call) -> None:
    long = "why " * 100 + "not"
    write(runs_dir, 6, note=long, dirty=True)
    lines = call(runs_dir, "show=note,policy/entropy")[0].splitlines()
    assert lines[0].split() == [*SHOWN, "note", "policy/entropy"]
    assert len(lines) == 7
    assert long in lines[-1]
    commit = lines[0].index("commit")
    assert [line[commit - 1 : commit + 11] for line in lines[5:]] == [" 0123456789 ", " 0123456789*"]
    assert call(runs_dir, "seed=99")[0] == f"no run fits seed=99; there are 6 under {runs_dir}\n"
    assert "no runs under" in call(tmp_path / "nowhere")[0]


def test_damaged_folders_are_named_and_the_others_shown(runs_dir: Path, call: Call) -> None:
    broken = {
        "half a record": (paths.RECORD, "{"),
        "no facts": (paths.RECORD, '{"schema": 1, "id": "no facts", "status": "failed", "git": "x"}'),
        "run-13": (paths.CONFIG, "algo: {name: ppo}\nenv: {id: X}\ndeterminism: {level: fast}\n"),
    }
    for number, (name, (file, content)) in enumerate(broken.items(), start=11):
        (write(runs_dir, number).rename(runs_dir / "ppo-Thing" / name) / file).write_text(content)
    table, errors = call(runs_dir)
    assert len(table.splitlines()) == 6
    notes = errors.splitlines()
    assert [sum(name in note for note in notes) for name in broken] == [1, 1, 1]


def test_a_folder_of_nobody_holds_no_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(Path("~nobody-of-this-name/x")) == ("no runs under ~nobody-of-this-name/x yet\n", "")
