"""The progress of a sweep on its console, and its end: jobs, and returns over seeds.

A terminal shows a table that is redrawn in place; other consoles get a line when a job starts or ends, and
one a minute. At the end the best job comes first. Everything is read from the files of jobs and runs, so that
this cannot slow or stop them.
"""

from __future__ import annotations

import contextlib
import functools
import math
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path

from runlab.analysis.experiments import find_experiments
from runlab.analysis.runs import last_row, load_runs
from runlab.config.affects_results import BOOKKEEPING_KEYS
from runlab.config.command_args import program
from runlab.config.project import as_typed
from runlab.config.terminal import escaped, raw, takes_drawing
from runlab.config.texts import few, from_here
from runlab.errors import ConfigError
from runlab.run import paths
from runlab.run.files import say
from runlab.run.names import unescaped
from runlab.run.read import raw_config
from runlab.run.record import FINISHED, INTERRUPTED, RUNNING, SweepJob, SweepRecord
from runlab.run.sinks.console import show_number, show_time

_ENOUGH = 0.05  # part of a sweep before the time left is shown: first steps may wait for a compiler
_UPDATE_S, _LINE_S, _ASK_S = 0.5, 60.0, 5.0
_AT_REST = {FINISHED, "refused"}  # jobs that another start would leave as they are
_WAITING = ("pending", "requeued")  # jobs that Slurm has not started, or has taken away
_COLORS = {RUNNING: "cyan", FINISHED: "green", "failed": "red", "refused": "red", INTERRUPTED: "yellow"}


class SweepTable:
    """Says how far the jobs are."""

    def __init__(self, folder: Path, record: SweepRecord) -> None:
        self._folder, self._record = folder, record
        self._in_place = takes_drawing(sys.stdout)
        self._changed: dict[Path, int] = {}  # when the file of a job was last changed
        self._jobs: dict[int, SweepJob] = {}
        self._slurm: dict[int, str] = {}  # Slurm's id of a job
        self._drawn: list[int] = []  # widths of the lines of the table
        self._asked_at = float("-inf")
        self._began = self._updated_at = self._summed_at = time.monotonic()
        # Jobs of earlier starts, with the part that was done. A job may start again with a new run.
        self._before = {job.job: (job.run_dir, self._part(job)) for job in self._changed_jobs()}
        self._jobs = {number: job for number, job in self._jobs.items() if job.status == FINISHED}
        beside = f"{record.jobs_beside} at once, " * (record.jobs_beside > 1)
        say(f"{beside}output in {folder}/job_<number>.log")

    def update(self) -> None:
        """Show what has changed, if it is time to."""
        now = time.monotonic()
        if now - self._updated_at < _UPDATE_S:
            return
        self._updated_at = now
        changed = [*self._changed_jobs(), *self._waiting_jobs(now)]
        if self._in_place:
            self._redraw(self._summary(), *self._rows())
            return
        for job in changed:
            slurm_job = f", Slurm's job {self._slurm[job.job]}" if job.job in self._slurm else ""
            say(f"{_title(job, self._record)}: {job.status}{slurm_job}")
        if now - self._summed_at >= _LINE_S:
            self._summed_at = now
            say(self._summary())

    def close(self) -> None:
        """Take the table from the terminal, or print the last changes."""
        self._updated_at -= _UPDATE_S
        self._redraw() if self._in_place else self.update()

    def _changed_jobs(self) -> list[SweepJob]:
        """Jobs whose files have changed since the last call."""
        jobs = []
        for path in self._folder.glob("job_*.json"):
            with contextlib.suppress(OSError, ConfigError):  # the disk is full, or away
                changed = path.stat().st_mtime_ns
                if self._changed.get(path) != changed:
                    job = SweepJob.read(path)
                    self._jobs[job.job], self._changed[path] = job, changed
                    jobs.append(job)
        return sorted(jobs, key=lambda job: job.job)

    def _waiting_jobs(self, now: float) -> list[SweepJob]:
        """Jobs that have begun to wait in Slurm's queue."""
        folders = {path.name: path for path in self._folder.glob("*submitit/*")}
        if not folders or now - self._asked_at < _ASK_S:
            return []
        self._asked_at, queue = now, ""
        with contextlib.suppress(OSError, subprocess.SubprocessError):  # squeue is away, or takes too long
            command = ["squeue", "--me", "--array", "--noheader", "--sort=i", "--format=%i %T"]
            asked = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S, check=False)
            queue = asked.stdout
        jobs = []
        for slurm_id, state in (line.split() for line in queue.splitlines()):
            if slurm_id not in folders:
                continue
            number = int(slurm_id.partition("_")[2] or 0)
            self._slurm[number] = slurm_id
            job = self._jobs.get(number, SweepJob(job=number, overrides=[], status=""))
            if state == "PENDING" and job.status in ("", INTERRUPTED):
                job = self._jobs[number] = replace(job, status=_WAITING[job.status == INTERRUPTED])
                jobs.append(job)
        return jobs

    def _part(self, job: SweepJob) -> float:
        """The part of its steps that the run of a job has made, from 0 to 1."""
        if job.status == FINISHED:
            return 1.0
        with contextlib.suppress(ConfigError):  # no configuration yet, or the disk is away
            if (run_dir := job.run(self._folder)) is not None:
                return float(min(1.0, last_row(run_dir).get("env_steps", 0) / _total_steps(run_dir)))
        return 0.0

    def _summary(self) -> str:
        jobs, total, left = self._jobs, self._record.num_jobs, None
        counts = Counter([*(job.status for job in jobs.values()), *["waiting"] * (total - len(jobs))])
        statuses = ", ".join(f"{number} {status}" for status, number in counts.items())
        before = {
            number: part
            for number, (run_dir, part) in self._before.items()
            if number not in jobs or jobs[number].run_dir == run_dir
        }
        now = {n: self._part(job) if job.status in (RUNNING, *_WAITING) else 1.0 for n, job in jobs.items()}
        done = sum((before | now).values())
        done_now = done - sum(before.values())  # since this start
        if done_now > _ENOUGH * total:
            left = (total - done) * (time.monotonic() - self._began) / done_now
        return f"{total} jobs: {statuses}, left {show_time(left)}"

    def _rows(self) -> list[list[str]]:
        """The cells of each job, running ones first: a terminal may have few lines."""
        order = {RUNNING: 0, **dict.fromkeys(_WAITING, 1)}
        jobs = sorted(self._jobs.values(), key=lambda job: (order.get(job.status, 2), job.job))
        waiting = [f"#{number}" for number in range(self._record.num_jobs) if number not in self._jobs]
        return [*map(self._row, jobs), *([[few(waiting), "waiting"]] if waiting else [])]

    def _row(self, job: SweepJob) -> list[str]:
        part, run_dir, value = self._part(job), job.run(self._folder), job.final_return
        row = {} if run_dir is None else last_row(run_dir)
        if value is None:
            value = row.get("eval/return", row.get("episode/return"))
        cells = [f"{100 * part:.0f}%", f"return {'-' if value is None else show_number(value)}"]
        if part and job.status == RUNNING and (speed := row.get("time/steps_per_second")):
            left = show_time((1 / part - 1) * row["env_steps"] / speed)
            cells += [f"{speed:,.0f} steps/s", f"left {left}"]
        if job.job in self._slurm:
            cells.append(f"Slurm's job {self._slurm[job.job]}")
        return [_title(job, self._record), job.status, *cells]

    def _redraw(self, title: str = "", *rows: Sequence[str]) -> None:
        from rich.text import Text

        columns, lines = shutil.get_terminal_size()
        # If the terminal became narrower, a line drawn before takes several rows.
        above = sum(-(-width // columns) for width in self._drawn)
        shown = [title[: columns - 1], *_table(rows, columns - 1)][: lines - 1] if title else []
        self._drawn = [Text.from_ansi(line).cell_len for line in shown]
        drawn = f"\x1b[{above}F\x1b[J" * (above > 0) + "".join(f"{line}\n" for line in shown)
        say(drawn, end="", stream=raw(sys.stdout))


def _table(rows: Sequence[Sequence[str]], width: int = 1000) -> list[str]:
    """The lines of a coloured table of this width at most. The second cell of each row is a status."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2, 0, 0))
    for cells in rows:
        shown = [Text(escaped(cell).replace("\n", " "), no_wrap=True, overflow="ellipsis") for cell in cells]
        shown[1].stylize(_COLORS.get(cells[1], "dim"))
        grid.add_row(*shown)
    text = StringIO()  # a console on standard output fails with a closed terminal
    Console(file=text, force_terminal=True, width=width).print(grid)
    return [line.rstrip() for line in text.getvalue().splitlines()]


@functools.cache
def _total_steps(run_dir: Path) -> int:
    """The number of steps that a run will make. Raises ConfigError if it has no configuration yet."""
    return int(raw_config(run_dir)["total_env_steps"])


def _title(job: SweepJob, record: SweepRecord) -> str:
    """The number of a job, and the overrides that not all jobs have."""
    every = {*map(str.lower, record.words)}  # Hydra writes false as False
    own = (unescaped(text) for text in job.overrides if text.partition("=")[0] not in BOOKKEEPING_KEYS)
    return f"#{job.job} {' '.join(text for text in own if text.lower() not in every)}".rstrip()


def show_end(record: SweepRecord, folder: Path) -> None:
    """Print all jobs, the best first, the reasons of failures, statistics, and the next command."""
    say(f"sweep {record.id}: {record.status}")
    runs, _ = load_runs(path for job in record.jobs if (path := job.run(folder)) is not None)
    by_id = {run.id: run for run in runs}
    rows = list[tuple[float, list[str]]]()
    for job in record.jobs:
        value, of, run = job.final_return, "", by_id.get(job.run_id or "")
        if value is None and job.status == FINISHED and run is not None:  # a sweep without evaluations
            value, of = run.value("return"), " of training episodes"
        speed = None if run is None else run.last_row.get("time/steps_per_second")
        cells = [_title(job, record), job.status, "" if value is None else f"return {value:.2f}{of}"]
        cells += [job.run_id or "no run", "" if speed is None else f"{speed:,.0f} steps/s"]
        rows.append((-math.inf if value is None else value, cells))
    best_first = [cells for _, cells in sorted(rows, key=lambda row: -row[0])]
    if takes_drawing(sys.stdout):
        say("\n".join(_table(best_first)), stream=raw(sys.stdout))
    else:
        for title, *cells in best_first:
            say(f"{title}: {', '.join(filter(None, cells))}")
    for job in record.jobs:
        if job.status in ("failed", "refused"):
            log = folder / f"job_{job.job}.log"
            where = log if log.exists() else job.run(folder) or "above"
            say(f"{_title(job, record)}: {job.problem or f'exit status {job.exit_status}, see {where}'}")
    counted = [each for each in find_experiments(runs) if each.counted]
    if any(len(each.counted) > 1 for each in counted):
        for each in counted:
            say(each.result)
    say(f"{folder / paths.SWEEP_INDEX}")
    if record.status != "finished":
        words = record.commands[0][len(program("train")) :]
        names = [word.removeprefix("sweep=") for word in words if word.startswith("sweep=")]
        rest = [word for word in words if not word.startswith("sweep=")]
        again = as_typed("train", [*rest, f"sweep={','.join([*names, 'resume'])}"])
        # A job that was refused would be refused again.
        refused = len(record.jobs) == record.num_jobs and {job.status for job in record.jobs} <= _AT_REST
        say(f"next{', once that is mended' * refused}: {again}")
    elif counted:
        pattern = from_here(folder.parent.parent) / "*" / f"{record.id.partition('-sweep-')[0]}-*"
        word = f"runs={shlex.quote(str(pattern))}"
        say(f"next: {as_typed('stats')} {word}\n      {as_typed('report')} {word}")
