"""A sweep: a supervisor, a process with Hydra's launcher, and a fresh process for each run.

The id of a sweep is made from its words, so that a resume finds it. Jobs are in launch/sweep_job.py, the
console is in launch/sweep_table.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from runlab.config.cli.preflight import Plan
from runlab.errors import ConfigError, RunError
from runlab.launch import process
from runlab.launch.subprocesses import last_words
from runlab.launch.sweep_job import close_job, digest, make_folder, run_hydra, run_record, write
from runlab.launch.sweep_table import SweepTable, show_end
from runlab.machine import package_versions
from runlab.run import paths
from runlab.run.continuation import check_changes
from runlab.run.files import lock, say, to_stderr
from runlab.run.git.snapshot import take_snapshot, withdraw_run
from runlab.run.paths import PROJECT
from runlab.run.record import FINISHED, SweepRecord, utc_now
from runlab.signals import reported, stop_signals


def run_sweep(plan: Plan, command: Sequence[str]) -> int:
    """Run the sweep of a checked command to its end; the exit status of the command.

    Raises ConfigError if the sweep cannot be resumed, and RunError if it cannot be recorded.
    """
    root = Path(plan.configs[0].runs_dir).expanduser().absolute() / paths.SWEEPS
    label = f"sweep-{digest(sorted(plan.words))}"  # the same for these arguments in any order
    folder = find_sweep(root, label) if plan.resume else root / paths.new_id(label)
    make_folder(folder)
    lock(folder)
    if plan.resume:
        record = SweepRecord.read(folder)
        if record.status == "finished":
            say("every job has finished already; nothing is started")
            show_end(record, folder)
            return 0
    else:
        record = SweepRecord(
            id=folder.name,
            words=plan.words,
            num_jobs=plan.num_jobs,
            jobs_beside=plan.jobs,
            commands=[],
            start_time=utc_now(),
            versions=package_versions(),
            snapshot=take_snapshot(PROJECT, keep_ref=folder.name),  # the last job may start days later
        )
    before = record.snapshot if plan.resume else None
    try:
        if plan.resume:
            _resume(record, folder, plan)
        record.commands.append(list(command))
        record.write(folder)
    except OSError as error:
        if record.snapshot is not before:
            withdraw_run(PROJECT, record.snapshot)
        if not plan.resume:
            shutil.rmtree(folder, ignore_errors=True)
        raise RunError(f"{folder} cannot be written: {error.strerror}; nothing was started") from error
    for note in record.snapshot.notes():  # which its runs write into their logs
        to_stderr(note)
    # The order of the arguments at the first start numbers the jobs.
    position = {word: i for i, word in enumerate(record.words)}
    argv = sorted(plan.argv, key=lambda word: position.get(word, len(position)))
    received: list[int] = []
    with stop_signals(lambda number, _: received.append(reported(number))):
        stop = _stop_file(folder, record)
        log = folder / "launcher.log"
        supervisor = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            launcher = os.fork()
        except OSError as error:
            say(f"the launcher cannot be started: {error.strerror}; `ulimit -u` shows a limit of processes")
            return _finish(folder, False, received)
        if launcher == 0:
            with log.open("wb") as file:  # output of launchers and schedulers would break the table
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            _become_launcher(stop, supervisor)
            run_hydra(argv)
            return 0
        launched = _wait_for(launcher, received, stop, SweepTable(folder, record))
        if not (launched or received):
            say(f"the launcher has failed: {last_words(log, 1)}, see {log}")
        return _finish(folder, launched, received)


def find_sweep(root: Path, label: str) -> Path:
    """The folder of the newest sweep whose id has `label`, a digest of its words. Raises ConfigError."""
    sweeps = sorted(path.parent for path in root.glob(f"*-sweep-*/{paths.SWEEP_INDEX}"))
    same = [folder for folder in sweeps if f"-{label}-" in folder.name]
    if not same:
        last = f"; the last one is {sweeps[-1] / paths.SWEEP_INDEX}" if sweeps else ""
        raise ConfigError(f"sweep=resume: no such sweep in {root} was started with these overrides{last}")
    return same[-1]


def _resume(record: SweepRecord, folder: Path, plan: Plan) -> None:
    """Check that a sweep may be resumed, and prepare its record for a new start."""
    snapshot, name = take_snapshot(PROJECT), f"sweep {record.id}"
    runs = [run_record(job, folder) for job in record.jobs if job.run_dir is not None]
    used = [None if run is None else run.used for run in runs]
    record.changed = check_changes(name, record.snapshot, record.versions, snapshot, plan.accept, used)
    if snapshot.tree != record.snapshot.tree:
        record.snapshot = take_snapshot(PROJECT, keep_ref=f"{record.id}-{secrets.token_hex(3)}")
    # Jobs of the last start may still wait in a queue of a scheduler. They must not run beside new jobs.
    _send(_stop_file(folder, record), signal.SIGTERM)
    record.status, record.end_time, record.versions = "running", None, package_versions()
    record.num_jobs, record.jobs_beside, record.accept = plan.num_jobs, plan.jobs, plan.accept
    finished = sum(job.status == FINISHED for job in record.jobs)
    say(f"sweep {record.id} goes on: {finished} of {plan.num_jobs} jobs had finished")


def _stop_file(folder: Path, record: SweepRecord) -> Path:
    """The file with signals for jobs of the last start, one per line. If it exists, they start no run."""
    return folder / f"stop-{len(record.commands)}"


def _send(stop: Path, number: int) -> None:
    """Ask the jobs to pass on a signal."""
    with stop.open("a") as file:
        file.write(f"{number:d}\n")


def _become_launcher(stop: Path, supervisor: int) -> None:
    """Prepare the new process of Hydra's launcher.

    It leaves the process group of the terminal, with its workers and runs: otherwise Ctrl-C would kill
    workers that wait for runs. Only the supervisor receives Ctrl-C, and asks the runs to end.
    """
    environment = json.dumps(dict(os.environ))
    os.setpgid(0, 0)

    def end_without_supervisor() -> None:
        while os.getppid() == supervisor:
            time.sleep(0.1)
        with contextlib.suppress(ConfigError):
            lock(stop.parent)  # until the runs have ended, the sweep cannot go on
        to_stderr("the sweep has lost its supervisor: its runs are ended")
        _send(stop, signal.SIGTERM)

    threading.Thread(target=end_without_supervisor, daemon=True).start()
    values = (str(stop), environment, str(stop.parent))
    os.environ |= dict(zip(process.LAUNCHER_VARIABLES, values, strict=True))
    # Workers import this package to find the function of a job.
    os.environ["PYTHONPATH"] = process.import_path(os.environ)


def _wait_for(launcher: int, received: Sequence[int], stop: Path, table: SweepTable) -> bool:
    """Wait for the launcher and pass signals on to the jobs; True if it has succeeded.

    The first signal asks the runs to end, which may take them an iteration; the second one reaches them
    again; the third one kills everything.
    """
    passed = 0
    while not (ended := os.waitpid(launcher, os.WNOHANG))[0]:
        for number in received[passed:]:
            passed += 1
            try:
                if passed > 2:
                    os.killpg(launcher, signal.SIGKILL)
                else:
                    _send(stop, number)
            except OSError:  # a full disk: all processes are ended without the file
                os.killpg(launcher, signal.SIGTERM)
        table.update()
        time.sleep(0.05)
    table.close()
    if ended[1]:
        with contextlib.suppress(OSError):  # a full disk
            _send(stop, signal.SIGTERM)  # to jobs on other machines
    # Runs whose launcher or worker was killed: no process waits for them.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(launcher, signal.SIGTERM)
    return os.waitstatus_to_exitcode(ended[1]) == 0


def _finish(folder: Path, launched: bool, received: Sequence[int]) -> int:
    """Close the record, print the table of jobs and return the exit status of the command."""
    record = SweepRecord.read(folder)
    for job in record.jobs:
        if job.status == "running":
            job.problem = "the process that waited for its run is gone, and the run is ended"
            close_job(job, folder, 128 + signal.SIGTERM if received else 1)
    statuses = {job.status for job in record.jobs}
    record.status, record.end_time, exit_status = "failed", utc_now(), 1
    if received:
        record.status, exit_status = "interrupted", 128 + received[0]
    elif statuses == {"finished"} and launched and len(record.jobs) >= record.num_jobs:
        record.status, exit_status = "finished", 0
    elif statuses == {"refused"}:
        exit_status = 2
    write(record, folder)
    show_end(record, folder)
    return exit_status
