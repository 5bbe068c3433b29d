"""The progress of a sweep on its console, and its end: jobs, and returns over seeds.

A terminal shows a table that is redrawn in place; other consoles get a line when a job starts or ends, and
one a minute. Everything is read from the files of jobs and runs, so that this cannot slow or stop them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from runlab.analysis.experiments import find_experiments
from runlab.analysis.runs import Run, load_runs
from runlab.config.affects_results import BOOKKEEPING_KEYS
from runlab.config.project import as_typed
from runlab.config.terminal import escaped, raw
from runlab.errors import ConfigError
from runlab.run import paths
from runlab.run.files import say
from runlab.run.names import unescaped
from runlab.run.read import raw_config
from runlab.run.record import FINISHED, INTERRUPTED, RUNNING, RunRecord, SweepJob, SweepRecord
from runlab.run.sinks.console import show_number, show_time

_ENOUGH = 0.05  # part of a sweep before the time left is shown: first steps may wait for a compiler
_UPDATE_S, _LINE_S, _ASK_S = 0.5, 60.0, 5.0
_AT_REST = {FINISHED, "refused"}  # jobs that another start would leave as they are
_WAITING = ("pending", "requeued")  # jobs that Slurm has not started, or has taken away


class SweepTable:
    """Says how far the jobs are."""

    def __init__(self, folder: Path, record: SweepRecord) -> None:
        self._folder, self._record = folder, record
        self._in_place = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self._changed: dict[Path, int] = {}  # when the file of a job was last changed
        self._jobs: dict[int, SweepJob] = {}
        self._slurm: dict[int, str] = {}  # Slurm's id of a job
        self._drawn: list[str] = []
        self._asked_at = float("-inf")
        self._began = self._updated_at = self._summed_at = time.monotonic()
        # Jobs of earlier starts, with the part that was done. A job may start again with a new run.
        self._before = {
            job.job: (job.run_dir, 1.0 if job.status == FINISHED else self._part_of_run(job))
            for job in self._changed_jobs()
        }
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
            jobs = self._visible()
            width = max((len(_title(job, self._record)) for job in jobs), default=0)
            self._redraw([self._summary(), *(self._line(job, width) for job in jobs)])
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
        self._redraw([]) if self._in_place else self.update()

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
        """The part of a job that is done, from 0 to 1."""
        return self._part_of_run(job) if job.status in (RUNNING, *_WAITING) else 1.0

    def _part_of_run(self, job: SweepJob) -> float:
        """The part of its steps that the run of a job has made."""
        run_dir = job.run(self._folder)
        with contextlib.suppress(ConfigError):  # no configuration yet, or the disk is away
            return float(min(1.0, _last_row(run_dir).get("env_steps", 0) / _total_steps(run_dir)))
        return 0.0

    def _summary(self) -> str:
        jobs, total, left = self._jobs, self._record.num_jobs, None
        counts = Counter(job.status for job in jobs.values())
        statuses = ", ".join(f"{number} {status}" for status, number in counts.items())
        before = {
            number: part
            for number, (run_dir, part) in self._before.items()
            if number not in jobs or jobs[number].run_dir == run_dir
        }
        done = sum((before | {number: self._part(job) for number, job in jobs.items()}).values())
        done_now = done - sum(before.values())  # since this start
        if done_now > _ENOUGH * total:
            left = (total - done) * (time.monotonic() - self._began) / done_now
        return f"{total} jobs: {statuses or 'starting'}, left {show_time(left)}"

    def _line(self, job: SweepJob, width: int) -> str:
        row, part, value = _last_row(job.run(self._folder)), self._part(job), job.final_return
        if value is None:
            value = row.get("eval/return", row.get("episode/return"))
        parts = [f"{_title(job, self._record):{width}}", f"{job.status:8}", f"{100 * part:3.0f}%"]
        parts.append(f"return {'-' if value is None else show_number(value):>8}")
        if part and job.status == RUNNING and (speed := row.get("time/steps_per_second")):
            left = (1 / part - 1) * row["env_steps"] / speed
            parts += [f"{speed:>7,.0f} steps/s", f"left {show_time(left)}"]
        if job.job in self._slurm:
            parts.append(f"Slurm's job {self._slurm[job.job]}")
        return "  ".join(parts)

    def _visible(self) -> list[SweepJob]:
        """All jobs that have begun; on a terminal with too few lines only the running ones."""
        jobs = [self._jobs[number] for number in sorted(self._jobs)]
        room = max(1, shutil.get_terminal_size().lines - 2)
        return jobs if len(jobs) <= room else [job for job in jobs if job.status == RUNNING][:room]

    def _redraw(self, lines: list[str]) -> None:
        from rich.cells import cell_len, set_cell_size

        width = shutil.get_terminal_size().columns
        # If the terminal became narrower, a line drawn before takes several rows.
        rows = sum(-(-cell_len(line) // width) for line in self._drawn)
        printable = [escaped(line).replace("\n", " ") for line in lines]
        self._drawn = [set_cell_size(line, min(cell_len(line), width - 1)) for line in printable]
        drawn = f"\x1b[{rows}F\x1b[J" * (rows > 0) + "".join(f"{line}\n" for line in self._drawn)
        say(drawn, end="", stream=raw(sys.stdout))


def _last_row(run_dir: Path | None) -> dict[str, Any]:
    return {} if run_dir is None else Run(run_dir, RunRecord(id="", status=""), {}).last_row


@functools.cache
def _total_steps(run_dir: Path | None) -> int:
    """The number of steps that a run will make. Raises ConfigError if it has no configuration yet."""
    if run_dir is None:
        raise ConfigError("no run yet")
    return int(raw_config(run_dir)["total_env_steps"])


def _title(job: SweepJob, record: SweepRecord) -> str:
    """The number of a job, and the overrides that not all jobs have."""
    every = {*map(str.lower, record.words)}  # Hydra writes false as False
    own = (unescaped(text) for text in job.overrides if text.partition("=")[0] not in BOOKKEEPING_KEYS)
    return f"#{job.job} {' '.join(text for text in own if text.lower() not in every)}".rstrip()


def show_end(record: SweepRecord, folder: Path) -> None:
    """Print a line for each job, the reasons of failures, statistics, and the place of the record."""
    say(f"sweep {record.id}: {record.status}")
    runs, _ = load_runs(path for job in record.jobs if (path := job.run(folder)) is not None)
    by_id = {run.id: run for run in runs}
    for job in record.jobs:
        value, of = job.final_return, ""
        if value is None and job.status == FINISHED and job.run_id in by_id:  # a sweep without evaluations
            value, of = by_id[job.run_id].value("return"), " of training episodes"
        shown = "" if value is None else f", return {value:.2f}{of}"
        say(f"{_title(job, record)}: {job.status}{shown}, {job.run_id or 'no run'}")
        if job.status in ("failed", "refused"):
            log = folder / f"job_{job.job}.log"
            where = log if log.exists() else job.run(folder) or "above"
            say(f"   {job.problem or f'exit status {job.exit_status}, see {where}'}")
    counted = [each for each in find_experiments(runs) if each.counted]
    if any(len(each.counted) > 1 for each in counted):
        for each in counted:
            say(each.result)
    say(f"{folder / paths.SWEEP_INDEX}")
    if record.status != "finished":
        names = (word.removeprefix("sweep=") for word in record.commands[0] if word.startswith("sweep="))
        file = next(names, "")
        # A job that was refused would be refused again.
        refused = len(record.jobs) == record.num_jobs and {job.status for job in record.jobs} <= _AT_REST
        when = "next, once that is mended" if refused else "next"
        say(f"{when}: the same command with sweep={file}{',' * bool(file)}resume")
    elif counted:
        pattern = paths.from_here(folder.parent.parent) / "*" / f"{record.id.partition('-sweep-')[0]}-*"
        word = f"runs={shlex.quote(str(pattern))}"
        say(f"next: {as_typed('stats')} {word}\n      {as_typed('report')} {word}")
