"""A sweep: one process looks after it, another one is Hydra's launcher, and each job starts a run of its own.

A job is known by its overrides: they and the id of the sweep make the id of its run. So a job finds its run
again without an index, in a sweep that is resumed as well as in a job that a scheduler calls a second time:
a run that has finished is not repeated, one that ended early goes on, and one that is missing is started.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import signal
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from rltemplate.config.cli.preflight import Plan
from rltemplate.config.command_args import few
from rltemplate.config.loading import load_config
from rltemplate.determinism.machine import package_versions
from rltemplate.launch.launcher import ask, catch_signals, fork_launcher, stop_file, wait_for_launcher
from rltemplate.launch.sweep_job import close, meaning
from rltemplate.run import paths
from rltemplate.run.continuation import (
    ACCEPT,
    changed_code,
    changed_libraries,
    deciding,
    how_back,
)
from rltemplate.run.git.snapshot import GitRecord, take_snapshot
from rltemplate.run.job import PROJECT
from rltemplate.run.sweep_record import SweepJob, SweepRecord
from rltemplate.types import ConfigError

NEWEST = "resume"


def run_sweep(plan: Plan, command: Sequence[str], start_jobs: Callable[[], None]) -> int:
    """Run the sweep of a checked command to its end; the exit status of the command.

    Raises ConfigError, before anything has started, if the sweep cannot be resumed.
    """
    root = Path(plan.configs[0].runs_dir).expanduser().absolute() / paths.SWEEPS
    if plan.resume is None:
        folder = root / paths.new_id("sweep")
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            raise ConfigError(f"runs_dir={root.parent}: cannot be made, {error.strerror}") from error
        _lock(folder)
        record = _new_record(folder.name, plan, command)
    else:
        folder = find_sweep(root, plan.resume, plan.words)
        _lock(folder)
        record = SweepRecord.read(folder)
        if record.status == "finished":
            print("every job has finished already; nothing is started")
            _show(record, folder)
            return 0
        _resume(record, folder, plan, command)
    record.write(folder)
    place = {word: i for i, word in enumerate(record.words)}
    sys.argv[1:] = sorted(plan.argv, key=lambda word: place.get(word, len(place)))
    session = len(record.commands) - 1
    received = catch_signals()
    launcher = fork_launcher(folder, session)
    if launcher == 0:
        start_jobs()
        return 0
    launched = wait_for_launcher(launcher, received, stop_file(folder, session))
    return _finish(folder, launched, received)


def _lock(folder: Path) -> None:
    """Take the lock of the sweep until this process ends; ConfigError if another process holds it.

    The launcher inherits the lock, and may outlive a supervisor that was killed. Runs do not.
    """
    fd = os.open(folder / paths.LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"sweep {folder.name} is still running; wait, or end that first") from None


def _new_record(sweep_id: str, plan: Plan, command: Sequence[str]) -> SweepRecord:
    """Record the code as it is now: the last job may start in days."""
    return SweepRecord(
        id=sweep_id,
        words=plan.words,
        num_jobs=plan.num_jobs,
        commands=[list(command)],
        start_time=_now(),
        versions=package_versions(),
        snapshot=take_snapshot(PROJECT, keep_ref=sweep_id),
    )


def _resume(record: SweepRecord, folder: Path, plan: Plan, command: Sequence[str]) -> None:
    """Check that the sweep may go on, and make its record that of a new start; see `run_sweep`."""
    _check_configs(folder, record, plan)
    snapshot = take_snapshot(PROJECT)
    record.changed = _check_changes(record, snapshot, plan.accept)
    if snapshot.tree != record.snapshot.tree:
        record.snapshot = take_snapshot(PROJECT, keep_ref=f"{record.id}-{secrets.token_hex(3)}")
    # Jobs of the last start that still wait in a queue of a scheduler are not to run beside the new ones.
    ask(stop_file(folder, len(record.commands) - 1), signal.SIGTERM)
    for job in record.jobs:
        _settle(job, folder, "failed")
    counted = Counter(job.status for job in record.jobs)
    counted["not started"] += max(0, (plan.num_jobs or 0) - len(record.jobs))
    summary = ", ".join(f"{number} {status}" for status, number in counted.items() if number)
    print(f"sweep {record.id} goes on: {summary or 'no job yet'}", flush=True)
    for path in folder.glob("job_*.json"):
        path.unlink()
    record.status, record.end_time, record.jobs = "running", None, []
    record.versions, record.num_jobs, record.accept = package_versions(), plan.num_jobs, plan.accept
    record.commands.append(list(command))


def find_sweep(root: Path, text: str, words: Sequence[str]) -> Path:
    """The folder of the newest sweep that was started with `words`, in any order.

    `text` is `resume`, or a part of the id of the sweep that is meant. Raises ConfigError.
    """
    known: dict[str, list[str]] = {}
    for path in sorted(root.glob(f"*/{paths.SWEEP_INDEX}")):
        with contextlib.suppress(OSError, ValueError, TypeError):  # damaged, or of an earlier version
            known[path.parent.name] = SweepRecord.read(path.parent).words
    meant = [name for name in known if text == NEWEST or text in name]
    if not meant:
        newest = f", such as {max(known)}" if known else ""
        raise ConfigError(
            f"sweep={text}: no such sweep in {root}; allowed: {NEWEST}, or the id of a sweep{newest}"
        )
    same = [name for name in meant if sorted(known[name]) == sorted(words)]
    if len(same) > 1:
        print(f"note: {len(same)} sweeps have these words; {same[-1]} goes on", file=sys.stderr)
    if same:
        return root / same[-1]
    nearest = min(reversed(meant), key=lambda name: len(set(known[name]) ^ set(words)))
    theirs, ours = (
        " ".join(word for word in some if word not in others) or "nothing"
        for some, others in ((known[nearest], words), (words, known[nearest]))
    )
    raise ConfigError(
        f"sweep={text}: no sweep in {root} was started with these words\n"
        f"the nearest is {nearest}, which has {theirs} where this command has {ours}"
    )


def _check_configs(folder: Path, record: SweepRecord, plan: Plan) -> None:
    """Raise ConfigError if a job would now have another configuration than its run was started with."""
    now = {meaning(words): deciding(c) for words, c in zip(plan.overrides, plan.configs, strict=True)}
    for job in record.jobs:
        run_dir, expected = job.run(folder), now.get(meaning(job.overrides))
        if run_dir is None or expected is None or not (run_dir / paths.CONFIG).is_file():
            continue
        before = deciding(load_config(run_dir / paths.CONFIG))
        for key, value in expected.items():
            if value not in (before.get(key), "auto"):  # which has got a value since the run began
                raise ConfigError(
                    f"{key}={value}: {run_dir.name} ({' '.join(job.overrides)}) was started with "
                    f"{before.get(key)}\na sweep goes on with the configuration that it had: "
                    "bring conf/ back, or start another sweep"
                )


def _check_changes(record: SweepRecord, snapshot: GitRecord, accept: bool) -> dict[str, list[str]]:
    """Code and libraries that decide results and have changed; ConfigError unless that is accepted."""
    before = record.snapshot
    changed = {"code": changed_code(before, snapshot), "libraries": changed_libraries(record.versions)}
    for what, found in changed.items():
        if found and not accept:
            raise ConfigError(
                f"{record.id}: the {what} changed since the sweep began: {few(found)}\n"
                f"bring back {how_back(what, before.ref)}, or go on all the same with accept={ACCEPT}"
            )
    return {what: found for what, found in changed.items() if found}


def _finish(folder: Path, launched: bool, received: Sequence[int]) -> int:
    """Close the record, print the table of jobs and return the exit status of the command."""
    record = SweepRecord.read(folder)
    for job in record.jobs:
        _settle(job, folder, "interrupted" if received else "failed")
    record.status, record.end_time = "failed", _now()
    exit_status = 1
    if received:
        record.status = "interrupted"
        exit_status = 128 + (signal.SIGINT if received[0] == signal.SIGINT else signal.SIGTERM)
    elif launched and len(record.jobs) >= (record.num_jobs or 1):
        statuses = {job.status for job in record.jobs}
        if statuses == {"finished"}:
            record.status, exit_status = "finished", 0
        elif statuses == {"refused"}:
            exit_status = 2
    record.write(folder)
    from rltemplate.analysis.journal import write_sweep

    write_sweep(folder, record, folder.parent.parent, PROJECT)
    _show(record, folder)
    return exit_status


def _settle(job: SweepJob, folder: Path, instead: str) -> None:
    """Correct the status of a job whose process had no time to say how it ended."""
    if job.status == "running":
        close(job, folder, None)
        if job.status != "finished":
            job.status = instead
            job.write(folder)


def _show(record: SweepRecord, folder: Path) -> None:
    """Print a line for each job, the reasons of those that failed, and where the record is."""
    print(f"sweep {record.id}: {record.status}")
    for job in record.jobs:
        value = "" if job.final_return is None else f", return {job.final_return:.2f}"
        print(f"#{job.job} {' '.join(job.overrides)}: {job.status}{value}, {job.run_id or 'no run'}")
        if job.status in ("failed", "refused"):
            log = folder / f"job_{job.job}.log"
            where = log if log.exists() else job.run(folder) or "above"
            print(f"   {job.problem or f'exit status {job.exit_status}, see {where}'}")
    print(folder / paths.SWEEP_INDEX)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
