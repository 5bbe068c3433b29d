"""The progress of a sweep: a table on a terminal, lines elsewhere."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyte
import pytest
from conftest import NAME, write_run

from runlab.config import project
from runlab.launch import sweep_table
from runlab.launch.sweep_table import SweepTable, show_end
from runlab.run import paths
from runlab.run.git.snapshot import GitRecord
from runlab.run.record import SweepJob, SweepRecord

FACTS: dict[str, Any] = {
    "start_time": "",
    "versions": {},
    "snapshot": GitRecord(),
    "commands": [["train.py"]],
}


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> SweepTable:
    """The table of a resumed sweep of four jobs: one had finished, one had failed."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: request.param)
    monkeypatch.setattr(sweep_table, "_UPDATE_S", 0.0)
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    monkeypatch.setenv("TERM", "xterm")
    for number, status in enumerate(("finished", "failed")):
        SweepJob(job=number, overrides=[f"seed={number}"], status=status, final_return=0.0).write(tmp_path)
    return SweepTable(tmp_path, SweepRecord(id="s", words=["algo=ppo", "seed=0,1,2,3"], num_jobs=4, **FACTS))


def begin(folder: Path, number: int, status: str = "running") -> None:
    """A job with the first half of its run."""
    run_dir = folder / "ppo-Thing" / f"run-{number}"
    if not run_dir.exists():
        write_run(folder, number, [10.0, 20.0])
        rows = [{"env_steps": 100, "episode/return": 10.0, "time/steps_per_second": 1000.0}]
        (run_dir / paths.METRICS).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    overrides = ["algo=ppo", f"seed={number}", f"runs_dir={folder}"]
    SweepJob(job=number, overrides=overrides, status=status, run_dir=f"ppo-Thing/run-{number}").write(folder)


def screen_of(text: str, columns: int, lines: int, screen: pyte.Screen | None = None) -> pyte.Screen:
    """A terminal of this size that was given a text."""
    screen = screen or pyte.Screen(columns, lines)
    screen.set_mode(pyte.modes.LNM)
    pyte.Stream(screen).feed(text)
    return screen


def rows_of(screen: pyte.Screen) -> list[str]:
    return [row.rstrip() for row in screen.display if row.strip()]


@pytest.mark.parametrize("table", [True], indirect=True)
def test_a_terminal_has_a_table_that_is_redrawn_in_place(
    table: SweepTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(tmp_path, 2)
    begin(tmp_path, 3)
    capsys.readouterr()
    shown = [f"#{n} seed={n}  running   50%   return 10  1,000 steps/s  left 0:00:00" for n in (2, 3)]
    shown += ["#0 seed=0  finished  100%  return 0", "#1         waiting"]
    head = "4 jobs: 1 finished, 2 running, 1 waiting, left 0:00:00"

    def draw(columns: int, lines: int) -> str:
        monkeypatch.setattr(shutil, "get_terminal_size", lambda: os.terminal_size((columns, lines)))
        table.update()
        return capsys.readouterr().out

    text = draw(100, 24)
    screen = screen_of(text, 100, 24)
    assert rows_of(screen) == [head, *shown]
    colors = {row.split()[1]: screen.buffer[number][11].fg for number, row in enumerate(shown[1:3], start=2)}
    assert colors == {"seed=3": "cyan", "seed=0": "green"}
    text = draw(40, 24)  # the three longest lines now take two rows each
    assert text.startswith(f"\x1b[{3 * 2 + 2}F\x1b[J")
    narrow = rows_of(screen_of(text, 40, 24))
    assert [row[:2] for row in narrow] == ["4 ", "#2", "#3", "#0", "#1"]
    text = draw(100, 4)
    assert text.startswith("\x1b[5F\x1b[J")
    assert rows_of(screen_of(text, 100, 4)) == [head, *shown[:2]]
    begin(tmp_path, 2, "interrupted")
    assert "interrupted  50%" in screen_of(draw(100, 24), 100, 24).display[3]
    begin(tmp_path, 2)
    for number in (2, 3):  # the first steps may have waited for a compiler
        (tmp_path / "ppo-Thing" / f"run-{number}" / paths.METRICS).write_text('{"env_steps": 9}\n')
    assert "1 waiting, left -:--:--\n" in draw(100, 24)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[32m" not in draw(100, 24)
    table.close()
    assert capsys.readouterr().out == "\x1b[5F\x1b[J"


@pytest.mark.parametrize("table", [True], indirect=True)
def test_a_closed_terminal_ends_no_sweep(
    table: SweepTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(tmp_path, 0)
    with (tmp_path / "out").open("w") as out:
        gone = Mock(wraps=out, write=Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO))))
        monkeypatch.setattr(sys, "stdout", gone)
        table.update()
        table.close()
    assert gone.write.called


@pytest.mark.parametrize("table", [True], indirect=True)
def test_wide_characters_leave_the_table_in_place(
    table: SweepTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    SweepJob(job=2, overrides=[f"env.id={'世' * 30}"], status="running").write(tmp_path)
    monkeypatch.setattr(shutil, "get_terminal_size", lambda: os.terminal_size((40, 10)))
    screen = pyte.Screen(40, 10)
    capsys.readouterr()
    for _ in range(2):
        table.update()
        screen_of(capsys.readouterr().out, 40, 10, screen)
    assert [row[:4].strip() for row in rows_of(screen)] == ["4 jo", "#2 e", "#0 s", "#1,"]


@pytest.mark.parametrize("table", [True], indirect=True)
def test_a_table_obeys_no_text(table: SweepTable, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither the terminal's codes nor rich's markup."""
    SweepJob(job=2, overrides=["env.id=\x1b[2J[red]a[/]"], status="running").write(tmp_path)
    capsys.readouterr()
    table.update()
    out = capsys.readouterr().out
    assert "\\x1b[2J[red]a[/]" in out
    assert "\x1b[2J" not in out


def test_the_time_left_of_a_resumed_sweep_counts_the_steps_made_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    SweepJob(job=0, overrides=["seed=0"], status="finished").write(tmp_path)
    for number in (1, 2):
        begin(tmp_path, number, "interrupted")  # both after half of their steps
    record = SweepRecord(id="s", words=["algo=ppo", "seed=0,1,2"], num_jobs=3, **FACTS)
    table = SweepTable(tmp_path, record)
    clock[0] = 60.0
    begin(tmp_path, 1)
    (tmp_path / "ppo-Thing" / "run-1" / paths.METRICS).write_text('{"env_steps": 150}\n')
    table.update()  # a quarter of a job in a minute, and three quarters are left
    assert "3 jobs: 1 finished, 1 running, 1 waiting, left 0:03:00\n" in capsys.readouterr().out
    # A run that was started anew, and is to make other steps, is at its beginning.
    write_run(tmp_path, 3, [10.0] * 10)
    overrides = ["algo=ppo", "seed=2", f"runs_dir={tmp_path}"]
    SweepJob(job=2, overrides=overrides, status="running", run_dir="ppo-Thing/run-3").write(tmp_path)
    (tmp_path / "ppo-Thing" / "run-3" / paths.METRICS).write_text('{"env_steps": 250}\n')
    clock[0] = 120.0
    table.update()  # two quarters of a job in two minutes, and a whole one is left
    assert "3 jobs: 1 finished, 2 running, left 0:04:00\n" in capsys.readouterr().out


@pytest.mark.parametrize("table", [False], indirect=True)
def test_another_console_has_a_line_for_each_change(
    table: SweepTable, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "\x1b" not in capsys.readouterr().out
    for status in ("running", "running", "failed"):
        begin(tmp_path, 3, status)
        table.update()
        table.update()
    table.close()
    assert set(capsys.readouterr().out.splitlines()) == {"#3 seed=3: running", "#3 seed=3: failed"}


@pytest.mark.parametrize(
    ("count", "returns", "line"),
    [
        (2, [0.0, 1.0], "ppo on Thing: return 0, 1 (of 2 seeds)"),  # an interval would be -5.75 to 6.75
        (4, [0.0, 1.0, 2.0, 0.25], "ppo on Thing: return 0, 1, 2, 0.25 (of 4 seeds)"),
        (5, [3.0] * 5, "ppo on Thing: return 3 (3 to 3) of 5 seeds, IQM with its 95 % interval"),
    ],
)
def test_the_end_shows_returns_and_an_interval_of_enough_seeds_only(
    count: int, returns: list[float], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without evaluations, as here in the second half, returns are those of training episodes."""
    for metric, of in {"eval/return": "", "episode/return": " of training episodes"}.items():
        folder = tmp_path / metric.partition("/")[0]
        for number, value in enumerate(returns):
            write_run(folder, number, [], final_metrics={metric: value})
            job = SweepJob(
                job=number,
                overrides=[f"seed={number}"],
                status="finished",
                run_id=f"run-{number}",
                run_dir=f"ppo-Thing/run-{number}",
                final_return=value if metric == "eval/return" else None,
            )
            job.write(folder)
        SweepRecord(id="s", words=["seed=0,1"], num_jobs=count, **FACTS).write(folder)
        show_end(SweepRecord.read(folder), folder)
        out = capsys.readouterr().out.splitlines()
        assert f"#1 seed=1: finished, return {returns[1]:.2f}{of}, run-1" in out
        assert line.replace("of ", f"{of} of ".lstrip()) in out


@pytest.mark.parametrize("table", [False], indirect=True)
def test_jobs_that_wait_in_the_queue_of_slurm_are_shown(
    table: SweepTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    squeue = tmp_path / "bin" / "squeue"
    squeue.parent.mkdir()
    squeue.write_text("#!/bin/sh\nprintf '9_3 PENDING\\n7_2 PENDING\\n7_3 PENDING\\n7_1 RUNNING\\n'\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{squeue.parent}:{os.environ['PATH']}")
    for number in (1, 2, 3):  # 9_3 is of another sweep
        (tmp_path / "submitit" / f"7_{number}").mkdir(parents=True)
    begin(tmp_path, 1)
    begin(tmp_path, 3, "interrupted")
    capsys.readouterr()
    table.update()
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == ["#2: pending, Slurm's job 7_2", "#3 seed=3: requeued, Slurm's job 7_3"]
    begin(tmp_path, 2)
    table.update()
    assert "#2 seed=2: running, Slurm's job 7_2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("statuses", "begins"),
    [
        (["finished", "refused"], "next, once that is mended: "),
        (["finished", "interrupted"], "next: "),
        (["refused"], "next: "),  # one was not started
    ],
)
def test_the_end_of_a_sweep_recommends_what_works(
    statuses: list[str],
    begins: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    jobs = [SweepJob(job=number, overrides=[], status=status) for number, status in enumerate(statuses)]
    record = SweepRecord(id="s", words=[], num_jobs=2, status="failed", jobs=jobs, **FACTS)
    for installed, words, command in (
        (False, ["env=Hopper", "seed=1,2"], "make train env=Hopper seed=1,2 sweep=resume"),
        (False, ["sweep=five", "seed=range(1,3)"], "make train 'seed=range(1,3)' sweep=five,resume"),
        (
            False,
            ["--config-dir=a b", "seed=1,2"],
            "make train seed=1,2 sweep=resume 'ARGS='\"'\"'--config-dir=a b'\"'\"''",
        ),
        (True, ["--config-dir=a", "seed=1,2"], f"{NAME} train seed=1,2 sweep=resume --config-dir=a"),
    ):
        monkeypatch.setattr(project, "INSTALLED", installed)
        record.commands = [["python", "-m", "runlab", "train", *words], ["another"]]
        show_end(record, tmp_path)
        assert capsys.readouterr().out.splitlines()[-1] == begins + command


@pytest.mark.parametrize("terminal", [True, False])
def test_the_end_of_a_sweep_has_the_best_job_first(
    terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    monkeypatch.setenv("TERM", "xterm")
    for number, value in enumerate((3.0, 9.0, None, -1.0)):
        begin(tmp_path, number, "failed" if value is None else "finished")
        job = SweepJob.read(tmp_path / f"job_{number}.json")
        job.final_return, job.run_id = value, f"run-{number}"
        job.write(tmp_path)
    SweepRecord(id="s", words=["seed=0,1"], num_jobs=4, status="finished", **FACTS).write(tmp_path)
    show_end(SweepRecord.read(tmp_path), tmp_path)
    out = capsys.readouterr().out
    assert ("\x1b[32m" in out) == terminal
    table = rows_of(screen_of(out, 120, 24))[1:6]
    assert [row[:2] for row in table] == ["#1", "#0", "#3", "#2", "#2"]
    assert all("1,000 steps/s" in row for row in table[:4])
    assert "return 9.00" in table[0]
    assert "exit status" in table[4]


def test_a_job_is_named_as_its_arguments_were_typed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = [SweepJob(job=0, overrides=["env=own\\:A-v0", "env.kwargs.a=b\\:c"], status="finished")]
    record = SweepRecord(id="s", words=["env=own:A-v0"], num_jobs=1, status="finished", jobs=jobs, **FACTS)
    sweep_table.show_end(record, tmp_path)
    assert "#0 env.kwargs.a=b:c: finished, no run" in capsys.readouterr().out
