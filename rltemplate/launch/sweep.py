"""A sweep: a supervisor, Hydra's launcher in a process of its own, and a fresh process for each run.

The id of a run follows from the sweep, the number of the job and the digest of its configuration, the id of
a sweep from its words. So a sweep that is resumed finds its runs again, as does a job that a scheduler calls
a second time: a finished run is not repeated, one that ended early is resumed, a missing one is started.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import xxhash

from rltemplate.config.cli.preflight import Composed, Plan
from rltemplate.config.loading import from_dict, to_dict
from rltemplate.config.schema import AUTO
from rltemplate.determinism.machine import package_versions
from rltemplate.launch import process
from rltemplate.launch.resume import resume_job
from rltemplate.run import paths
from rltemplate.run.continuation import check_changes
from rltemplate.run.git.snapshot import take_snapshot, withdraw_run
from rltemplate.run.job import PROJECT, Job, new_job, run_folder
from rltemplate.run.lines import RunLock, to_stderr
from rltemplate.run.read import leaves
from rltemplate.run.record import FINISHED, RunRecord, SweepJob, SweepMembership, SweepRecord, utc_now
from rltemplate.types import BOOKKEEPING_KEYS, STOP_SIGNALS, ConfigError, affects_results

_INTERRUPTED = (128 + signal.SIGINT, 128 + signal.SIGTERM)


# --- The supervisor ---------------------------------------------------------------------------------------


def run_sweep(plan: Plan, command: Sequence[str], start_jobs: Callable[[], None]) -> int:
    """Run the sweep of a checked command to its end; the exit status of the command.

    Raises ConfigError, before anything has started, if the sweep cannot be resumed.
    """
    root = Path(plan.configs[0].runs_dir).expanduser().absolute() / paths.SWEEPS
    folder = find_sweep(root, plan.words) if plan.resume else root / new_id(plan.words)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"runs_dir={root.parent}: cannot be made, {error.strerror}") from error
    RunLock(folder).acquire()
    if plan.resume:
        record = SweepRecord.read(folder)
        if record.status == "finished":
            _say("every job has finished already; nothing is started")
            _show(record, folder)
            return 0
        _resume(record, folder, plan)
    else:
        record = SweepRecord(
            id=folder.name,
            words=plan.words,
            num_jobs=plan.num_jobs,
            jobs_beside=plan.jobs,
            commands=[],
            start_time=utc_now(),
            versions=package_versions(),
            snapshot=take_snapshot(PROJECT, keep_ref=folder.name),  # the last job may start in days
        )
    record.commands.append(list(command))
    try:
        record.write(folder)
    except OSError as error:
        if not plan.resume:
            withdraw_run(PROJECT, record.snapshot)
            shutil.rmtree(folder, ignore_errors=True)
        raise ConfigError(f"{folder} cannot be written: {error.strerror}; nothing was started") from error
    # Jobs are numbered in the order of the words that the sweep was first started with.
    place = {word: i for i, word in enumerate(record.words)}
    sys.argv[1:] = sorted(plan.argv, key=lambda word: place.get(word, len(place)))
    received: list[int] = []
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: received.append(number))
    stop = _stop_file(folder, record)
    launcher = _fork_launcher(stop)
    if launcher == 0:
        start_jobs()
        return 0
    return _finish(folder, _wait_for(launcher, received, stop), received)


def new_id(words: Sequence[str]) -> str:
    """An id for a sweep with these words, in any order."""
    return paths.new_id(f"sweep-{_digest(sorted(words))}")


def _digest(values: Any) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(values, sort_keys=True).encode())[:8]


def find_sweep(root: Path, words: Sequence[str]) -> Path:
    """The folder of the newest sweep that was started with `words`, in any order. Raises ConfigError."""
    known = sorted(path.parent for path in root.glob(f"*-sweep-*/{paths.SWEEP_INDEX}"))
    same = [folder for folder in known if f"-sweep-{_digest(sorted(words))}-" in folder.name]
    if not same:
        last = f"; the words of the last one are in {known[-1] / paths.SWEEP_INDEX}" if known else ""
        raise ConfigError(f"sweep=resume: no such sweep in {root} was started with these words{last}")
    return same[-1]


def _resume(record: SweepRecord, folder: Path, plan: Plan) -> None:
    """Check that a sweep may be resumed, and make its record that of a new start."""
    snapshot, name = take_snapshot(PROJECT), f"sweep {record.id}"
    record.changed = check_changes(name, record.snapshot, record.versions, snapshot, plan.accept)
    if snapshot.tree != record.snapshot.tree:
        record.snapshot = take_snapshot(PROJECT, keep_ref=f"{record.id}-{secrets.token_hex(3)}")
    # Jobs of the last start that still wait in a queue of a scheduler are not to run beside the new ones.
    _send(_stop_file(folder, record), signal.SIGTERM)
    record.status, record.end_time, record.versions = "running", None, package_versions()
    record.num_jobs, record.jobs_beside, record.accept = plan.num_jobs, plan.jobs, plan.accept
    _say(f"sweep {record.id} goes on")


def _stop_file(folder: Path, record: SweepRecord) -> Path:
    """The signals that jobs of the last start pass on, one a line. With it, none of them starts a run."""
    return folder / f"stop-{len(record.commands)}"


def _send(stop: Path, number: int) -> None:
    """Ask the jobs to pass on a signal. A run knows more of them, but only two ways to say what it was."""
    with stop.open("a") as file:
        file.write(f"{signal.SIGINT if number == signal.SIGINT else signal.SIGTERM:d}\n")


def _fork_launcher(stop: Path) -> int:
    """Split off the process in which Hydra's launcher works; its id, and 0 inside of it.

    It leaves the process group of the terminal with its workers and runs: Ctrl-C would otherwise kill the
    workers that wait for the runs. Only the supervisor hears it, and asks the runs to end.
    """
    supervisor, environment = os.getpid(), json.dumps(dict(os.environ))
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    os.setpgid(0, 0)

    def end_without_supervisor() -> None:
        while os.getppid() == supervisor:
            time.sleep(0.1)
        to_stderr("the sweep has lost its supervisor: its runs are ended")
        _send(stop, signal.SIGTERM)

    threading.Thread(target=end_without_supervisor, daemon=True).start()
    told = (str(stop), environment, str(stop.parent))
    os.environ |= dict(zip(process.LAUNCHER_VARIABLES, told, strict=True))
    # Workers import this package to find the function that they are to call.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(PROJECT), os.environ.get("PYTHONPATH", "")])
    return 0


def _wait_for(launcher: int, received: Sequence[int], stop: Path) -> bool:
    """Wait for the launcher and pass signals on to the jobs; True if it came to its end.

    The first signal asks the runs to end, which may take them an iteration; the second one reaches them
    again; the third one kills everything.
    """
    # Needed at the end, when the files may hold other code than what runs here.
    import rltemplate.analysis.journal  # noqa: F401

    passed = 0
    while not (ended := os.waitpid(launcher, os.WNOHANG))[0]:
        for number in received[passed:]:
            passed += 1
            try:
                if passed > 2:
                    os.killpg(launcher, signal.SIGKILL)
                else:
                    _send(stop, number)
            except OSError:  # of a full disk: all processes are ended without the file
                os.killpg(launcher, signal.SIGTERM)
        time.sleep(0.05)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # Runs that nobody waits for any more, since the launcher or a worker of it was killed.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(launcher, signal.SIGTERM)
    return os.waitstatus_to_exitcode(ended[1]) == 0


def _finish(folder: Path, launched: bool, received: Sequence[int]) -> int:
    """Close the record, print the table of jobs and return the exit status of the command."""
    record = SweepRecord.read(folder)
    for job in record.jobs:
        if job.status == "running":
            job.problem = "the process that waited for its run is gone, and the run is ended"
            _close(job, folder, 128 + signal.SIGTERM if received else 1)
    statuses = {job.status for job in record.jobs}
    record.status, record.end_time, exit_status = "failed", utc_now(), 1
    if received:
        record.status = "interrupted"
        exit_status = 128 + (signal.SIGINT if received[0] == signal.SIGINT else signal.SIGTERM)
    elif statuses == {"finished"} and launched and len(record.jobs) >= (record.num_jobs or 1):
        record.status, exit_status = "finished", 0
    elif statuses == {"refused"}:
        exit_status = 2
    _write(record, folder)
    from rltemplate.analysis.journal import write_sweep

    write_sweep(folder, record, folder.parent.parent, PROJECT)
    _show(record, folder)
    return exit_status


def _show(record: SweepRecord, folder: Path) -> None:
    """Print a line for each job, the reasons of those that failed, and where the record is."""
    _say(f"sweep {record.id}: {record.status}")
    for job in record.jobs:
        value = "" if job.final_return is None else f", return {job.final_return:.2f}"
        _say(f"#{job.job} {' '.join(job.overrides)}: {job.status}{value}, {job.run_id or 'no run'}")
        if job.status in ("failed", "refused"):
            log = folder / f"job_{job.job}.log"
            where = log if log.exists() else job.run(folder) or "above"
            _say(f"   {job.problem or f'exit status {job.exit_status}, see {where}'}")
    _say(f"{folder / paths.SWEEP_INDEX}")
    if record.status != "finished":
        _say("next: the same command with sweep=resume")


def _say(text: str) -> None:
    """Print a line. The sweep goes on when its reader has read enough, as in `| head`."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _write(part: SweepRecord | SweepJob, folder: Path) -> None:
    """Write a part of the record. A full disk is told, and ends nothing: each run has a record of its own."""
    try:
        part.write(folder)
    except OSError as error:
        to_stderr(f"{folder} cannot be written: {error.strerror}")


# --- A job, in a process of Hydra's launcher --------------------------------------------------------------


def run_job(
    compose: Callable[[int], Composed], overrides: list[str], number: int, console: bool
) -> float | None:
    """Run a job to its end and return its last evaluation. Trouble is recorded and never raised.

    `compose` takes the number of jobs that run beside each other.

    Without a console of its own the run writes to `job_<number>.log` in the folder of the sweep.
    """
    stop = Path(os.environ[process.STOP_VARIABLE])
    if stop.exists():
        return None
    folder, entry = stop.parent, SweepJob(job=number, overrides=overrides)
    title, log = f"#{number} {' '.join(overrides)}", None if console else folder / f"job_{number}.log"
    exit_status = 128 + signal.SIGTERM  # of a job whose process is taken away by its scheduler
    try:
        job = _find_run(entry, folder, compose)
        if job is not None:
            resumed = f", resumed in {job.run_dir}" if job.resume else ""
            _say(f"{title}{resumed}{f', output in {log}' if log else ''}")
            entry.status = "running"
            _write(entry, folder)
        exit_status = 0 if job is None else _run(job, log, stop)
    except ConfigError as error:
        exit_status, entry.problem = 2, str(error)
    except Exception as error:
        exit_status, entry.problem = 1, str(error)
        traceback.print_exc()
    finally:
        _close(entry, folder, exit_status)
    _say(f"#{number}: {entry.status}")
    return entry.final_return


def _find_run(entry: SweepJob, folder: Path, compose: Callable[[int], Composed]) -> Job | None:
    """The job of the run that `entry` stands for, new or resumed; None if the run has finished."""
    record = SweepRecord.read(folder)
    config, choices, auto = compose(record.jobs_beside)
    env_name = choices["env"]
    # A sweeper that draws may ask for other values under a number when the sweep is resumed.
    number = None if record.num_jobs is None else entry.job
    values = {key: value for key, value in leaves(to_dict(config)) if affects_results(key)}
    # Where the sweep goes on elsewhere, `auto` may be another value, and the job is still the same.
    values |= dict.fromkeys(auto, AUTO)
    for key in BOOKKEEPING_KEYS:
        del values[key]
    prefix = f"{record.id.partition('-sweep-')[0]}-seed{config.seed}-{_digest([record.id, number, values])}"
    run_dir = run_folder(config, f"{prefix}{secrets.token_hex(2)}", env_name)
    there = next(run_dir.parent.glob(f"{prefix}*/{paths.RECORD}"), None)
    run_dir = run_dir if there is None else there.parent
    entry.run_id, entry.run_dir = run_dir.name, os.path.relpath(run_dir, folder)
    command, sweep = record.commands[-1], SweepMembership(id=record.id, dir=str(folder), job=entry.job)
    if there is not None:
        job = resume_job(run_dir, command, accept=record.accept)
        return job and replace(job, sweep=sweep, journal=False)
    job = new_job(config, command, env_name=env_name, overrides=entry.overrides, sweep=sweep)
    return replace(job, run_id=run_dir.name, run_dir=str(run_dir))


def _run(job: Job, log: Path | None, stop: Path) -> int:
    """Run a job to its end, and pass on signals; its exit status, as a shell gives it.

    The run does not outlive an exception.
    """
    environment: Mapping[str, str] = json.loads(os.environ[process.COMMAND_VARIABLE])
    if "SLURM_JOB_ID" in os.environ and "SLURM_JOB_ID" not in environment:
        environment = os.environ  # the scheduler says which devices a job may use
    environment = process.worker_environment(job, from_dict(job.config), environment)
    with contextlib.nullcontext() if log is None else log.open("ab") as out:
        run = subprocess.Popen(
            process.worker_command(), env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out
        )
    passed = 0
    try:
        while run.poll() is None:
            for number in stop.read_text().split()[passed:] if stop.exists() else []:
                run.send_signal(int(number))
                passed += 1
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.wait(0.1)
    finally:
        if run.returncode is None:
            run.terminate()
            run.wait()
    return run.returncode if run.returncode >= 0 else 128 - run.returncode


def _close(job: SweepJob, folder: Path, exit_status: int) -> None:
    """Write the end of a job. Only a run whose record says so is `finished`."""
    run_dir, record = job.run(folder), None
    with contextlib.suppress(ConfigError):
        record = None if run_dir is None else RunRecord.read(run_dir)
    job.exit_status = exit_status
    if record is not None and record.status == FINISHED:
        job.status, job.final_return = FINISHED, record.final_metrics.get("eval/return")
    elif exit_status in _INTERRUPTED:
        job.status = "interrupted"
    else:
        job.status = "refused" if exit_status == 2 else "failed"
    _write(job, folder)
