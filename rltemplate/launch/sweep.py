"""A sweep: one process looks after it, another one is Hydra's launcher, and each job starts a run of its own.

A job is known by its overrides: they and the id of the sweep make the id of its run. So a job finds its run
again without an index, in a sweep that is resumed as well as in a job that a scheduler calls a second time:
a run that has finished is not repeated, one that ended early goes on, and one that is missing is started.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import xxhash

from rltemplate.config.cli.preflight import Plan
from rltemplate.config.loading import from_dict, load_config
from rltemplate.config.schema import Config
from rltemplate.determinism.machine import package_versions
from rltemplate.launch.process import (
    INHERITED_VARIABLE,
    SESSION_VARIABLE,
    SWEEP_VARIABLE,
    worker_command,
    worker_environment,
)
from rltemplate.launch.resume import resume_job
from rltemplate.run import paths
from rltemplate.run.continuation import (
    ACCEPT,
    changed_code,
    changed_libraries,
    deciding,
    few,
    how_back,
)
from rltemplate.run.git.snapshot import GitRecord, Snapshot, take_snapshot
from rltemplate.run.job import PROJECT, Job, new_job, run_folder
from rltemplate.run.record import FINISHED, RunRecord, SweepMembership
from rltemplate.run.sweep_record import SweepJob, SweepRecord
from rltemplate.types import BOOKKEEPING_KEYS, STOP_SIGNALS, ConfigError

NEWEST = "resume"
_INTERRUPTED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
# What launchers change in the environment of their workers, and a single run would not have.
_CHANGED_BY_LAUNCHERS = (
    *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS"),
    *("VECLIB_MAXIMUM_THREADS", "NUMBA_NUM_THREADS", "NUMEXPR_NUM_THREADS", "ENABLE_IPC"),
    *("KMP_INIT_AT_FORK", "CUDA_VISIBLE_DEVICES", "PYTHONPATH"),
)


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
    received = _catch_signals()
    launcher = _fork_launcher(folder, session)
    if launcher == 0:
        start_jobs()
        return 0
    launched = _wait(launcher, received, _stop_file(folder, session))
    return _finish(folder, launched, received)


# --- The beginning ---------------------------------------------------------------------------------------


def _lock(folder: Path) -> None:
    """Be the only one who looks after the sweep until the end of this process, or raise ConfigError.

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
        snapshot=json.loads(take_snapshot(PROJECT, keep_ref=sweep_id).to_json()),
    )


def _resume(record: SweepRecord, folder: Path, plan: Plan, command: Sequence[str]) -> None:
    """Check that the sweep may go on, and make its record that of a new start; see `run_sweep`."""
    _check_configs(folder, record, plan)
    snapshot = take_snapshot(PROJECT)
    record.changed = _check_changes(record, snapshot, plan.accept)
    if snapshot.tree != record.snapshot["tree"]:
        snapshot = take_snapshot(PROJECT, keep_ref=f"{record.id}-{secrets.token_hex(3)}")
        record.snapshot = json.loads(snapshot.to_json())
    # Jobs of the last start that still wait in a queue of a scheduler are not to run beside the new ones.
    _ask(_stop_file(folder, len(record.commands) - 1), signal.SIGTERM)
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
    now = {_meaning(words): deciding(c) for words, c in zip(plan.overrides, plan.configs, strict=True)}
    for job in record.jobs:
        run_dir, expected = job.run(folder), now.get(_meaning(job.overrides))
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


def _check_changes(record: SweepRecord, snapshot: Snapshot, accept: bool) -> dict[str, list[str]]:
    """Code and libraries that decide results and have changed; ConfigError unless that is accepted."""
    facts: dict[str, Any] = {name: record.snapshot.get(name) for name in GitRecord.__dataclass_fields__}
    before = GitRecord(**(facts | {"ref": record.snapshot["keep_ref"]}))
    changed = {"code": changed_code(before, snapshot), "libraries": changed_libraries(record.versions)}
    for what, found in changed.items():
        if found and not accept:
            raise ConfigError(
                f"{record.id}: the {what} changed since the sweep began: {few(found)}\n"
                f"bring back {how_back(what, before.ref)}, or go on all the same with accept={ACCEPT}"
            )
    return {what: found for what, found in changed.items() if found}


# --- The process that looks after the sweep --------------------------------------------------------------


def _catch_signals() -> list[int]:
    """Collect signals that ask a process to end, from before there is a launcher; ignored ones stay so."""
    received: list[int] = []
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: received.append(number))
    return received


def _fork_launcher(folder: Path, session: int) -> int:
    """Split off the process in which Hydra's launcher works; its id, and 0 inside of it.

    It leaves the process group of the terminal, and takes workers and runs with it: Ctrl-C would otherwise
    kill the workers that wait for the runs. Now only the supervisor hears it, and asks the runs to end.
    """
    inherited = {name: os.environ.get(name) for name in _CHANGED_BY_LAUNCHERS}
    sys.stdout.flush()
    sys.stderr.flush()
    # The supervisor alone has the end that is written to, which closes with it however it ends.
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(reading)
        return pid
    os.setpgid(0, 0)
    os.close(writing)

    def end_without_supervisor() -> None:
        os.read(reading, 1)
        print(f"sweep {folder.name} has lost its supervisor: its runs are ended", file=sys.stderr)
        _ask(_stop_file(folder, session), signal.SIGTERM)

    threading.Thread(target=end_without_supervisor, daemon=True).start()
    for number in STOP_SIGNALS:  # some schedulers signal every process; other programs do not inherit this
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    # Workers import this package to find the function that they are to call.
    path = [str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ |= {
        INHERITED_VARIABLE: json.dumps(inherited),
        SWEEP_VARIABLE: str(folder),
        SESSION_VARIABLE: str(session),
        "PYTHONPATH": os.pathsep.join(path),
    }
    return 0


def _wait(launcher: int, received: Sequence[int], stop: Path) -> bool:
    """Wait for the launcher and pass signals on to the jobs; true if it came to its end.

    The first signal asks the runs to end, which may take them an iteration; the second reaches them again;
    the third ends everything at once.
    """
    # Needed at the end, when the files may hold other code than what runs here.
    import rltemplate.analysis.journal  # noqa: F401

    passed = 0
    while not (ended := os.waitpid(launcher, os.WNOHANG))[0]:
        for number in received[passed:]:
            passed += 1
            if passed > 2:
                os.killpg(launcher, signal.SIGKILL)
            else:  # a run knows more signals, but only two ways to say that it was asked to end
                _ask(stop, signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
        time.sleep(0.05)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    return os.waitstatus_to_exitcode(ended[1]) == 0


def _stop_file(folder: Path, session: int) -> Path:
    """The signals that jobs pass on to their runs, one a line. With it, no further job starts."""
    return folder / f"stop-{session}"


def _ask(stop: Path, number: int) -> None:
    with stop.open("a") as file:
        file.write(f"{int(number)}\n")


def _asked(stop: Path) -> list[int]:
    return [int(line) for line in stop.read_text().split()] if stop.exists() else []


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

    write_sweep(folder, asdict(record), folder.parent.parent, PROJECT)
    _show(record, folder)
    return exit_status


def _settle(job: SweepJob, folder: Path, instead: str) -> None:
    """Correct the status of a job whose process had no time to say how it ended."""
    if job.status == "running":
        _close(job, folder, None)
        job.status = job.status if job.status == "finished" else instead


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


# --- A job -----------------------------------------------------------------------------------------------


def run_job(
    compose: Callable[[], Config], env_name: str, overrides: list[str], number: int, console: bool
) -> float | None:
    """Run a job to its end and return its last evaluation. Trouble is recorded and never raised.

    Without a console of its own the run writes to `job_<number>.log` in the folder of the sweep.
    """
    folder = Path(os.environ[SWEEP_VARIABLE])
    stop = _stop_file(folder, int(os.environ[SESSION_VARIABLE]))
    if stop.exists():
        return None
    title, entry = f"#{number} {' '.join(overrides)}", SweepJob(job=number, overrides=overrides)
    try:
        job = _prepare(entry, folder, compose(), env_name)
    except ConfigError as error:
        entry.status, entry.exit_status, entry.problem = "refused", 2, str(error)
        entry.write(folder)
        print(f"error: {error}", file=sys.stderr)
        return None
    if job is None:
        _close(entry, folder, 0)
        print(f"{title}: finished already", flush=True)
        return entry.final_return
    log = None if console else folder / f"job_{number}.log"
    shown = f"{title}\n   goes on in {job.run_dir}" if job.resume else title
    print(shown if log is None else f"{shown}\n   output in {log}", flush=True)
    entry.status = "running"
    entry.write(folder)
    try:
        process = _spawn(job, log)
    except OSError as error:
        exit_status, entry.problem = 1, f"its process could not be started: {error}"
    else:
        try:
            exit_status = _wait_for(process, stop)
        except BaseException as raised:  # a handler of the scheduler, which takes the job away
            _close(entry, folder, 128 + signal.SIGTERM)
            if not isinstance(raised, Exception):
                raise
            print(f"{title}: {raised}", file=sys.stderr)
            return None
    _close(entry, folder, exit_status)
    if log is not None:
        print(f"#{number} {entry.status}", flush=True)
    return entry.final_return


def _prepare(entry: SweepJob, folder: Path, config: Config, env_name: str) -> Job | None:
    """The job of the run that `entry` stands for, new or resumed; None if the run has finished."""
    record = SweepRecord.read(folder)
    # A sweeper that draws may ask for other values under a number when the sweep is resumed.
    number = None if record.num_jobs is None else entry.job
    key = xxhash.xxh3_64_hexdigest(f"{record.id} {_meaning(entry.overrides)} {number}".encode())
    prefix = f"{record.id.partition('-sweep-')[0]}-seed{config.seed}-{key[:8]}"
    run_id = f"{prefix}{secrets.token_hex(2)}"
    run_dir = run_folder(config, run_id, env_name)
    there = next(run_dir.parent.glob(f"{prefix}*/{paths.RECORD}"), None)
    if there is not None:
        run_id, run_dir = there.parent.name, there.parent
    entry.run_id, entry.run_dir = run_id, os.path.relpath(run_dir, folder)
    command, membership = record.commands[-1], SweepMembership(id=record.id, dir=str(folder), job=entry.job)
    if there is not None:
        job = resume_job(run_dir, command, accept=record.accept)
        return job and replace(job, sweep=membership, journal=False)
    job = new_job(config, command, env_name=env_name, overrides=entry.overrides, sweep=membership)
    return replace(job, run_id=run_id, run_dir=str(run_dir))


def _meaning(overrides: Sequence[str]) -> tuple[str, ...]:
    """Overrides but those that say where a run lies, what it is for, and who starts it."""
    named = [(word.partition("=")[0], word) for word in overrides]
    return tuple(
        sorted(word for key, word in named if key not in BOOKKEEPING_KEYS and not key.startswith("hydra"))
    )


def _spawn(job: Job, log: Path | None) -> subprocess.Popen[bytes]:
    environment = worker_environment(job, from_dict(job.config), _inherited_environment())
    sys.stdout.flush()
    sys.stderr.flush()
    if log is None:
        return subprocess.Popen(worker_command(), env=environment, stdin=subprocess.DEVNULL)
    with log.open("ab") as out:
        return subprocess.Popen(
            worker_command(), env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out
        )


def _wait_for(process: subprocess.Popen[bytes], stop: Path) -> int:
    """Wait for a run and pass on the signals that the sweep was sent; its exit status, as a shell has it.

    The run does not outlive an exception.
    """
    passed = 0
    try:
        while process.poll() is None:
            for number in _asked(stop)[passed:]:
                process.send_signal(number)
                passed += 1
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
    finally:
        if process.returncode is None:
            process.terminate()
            process.wait()
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _close(job: SweepJob, folder: Path, exit_status: int | None) -> None:
    """Write the end of a job. Its record decides: only a run that reached its end is `finished` there."""
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
        if exit_status == 0:
            recorded = "missing" if record is None else record.status
            job.problem = f"its process ended with exit status 0 and its record is {recorded}"
    job.write(folder)


def _inherited_environment() -> dict[str, str]:
    """The environment with which the command was started, as far as the launcher has changed it."""
    environment = dict(os.environ)
    inherited: dict[str, str | None] = json.loads(environment[INHERITED_VARIABLE])
    if "SLURM_JOB_ID" in environment:  # on a cluster the scheduler says which devices a job may use
        inherited.pop("CUDA_VISIBLE_DEVICES", None)
    merged = {**environment, **inherited}
    return {name: value for name, value in merged.items() if value is not None}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
