"""A job of a sweep, in a process of Hydra's launcher: its run is found again or started, and waited for."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import xxhash

from rltemplate.config.loading import from_dict
from rltemplate.config.schema import Config
from rltemplate.launch.launcher import asked, stop_file
from rltemplate.launch.process import (
    INHERITED_VARIABLE,
    SESSION_VARIABLE,
    SWEEP_VARIABLE,
    worker_command,
    worker_environment,
)
from rltemplate.launch.resume import resume_job
from rltemplate.run import paths
from rltemplate.run.job import Job, new_job, run_folder
from rltemplate.run.record import FINISHED, RunRecord, SweepMembership
from rltemplate.run.sweep_record import SweepJob, SweepRecord
from rltemplate.types import BOOKKEEPING_KEYS, ConfigError

_INTERRUPTED = (128 + signal.SIGINT, 128 + signal.SIGTERM)


def run_job(
    compose: Callable[[], Config], env_name: str, overrides: list[str], number: int, console: bool
) -> float | None:
    """Run a job to its end and return its last evaluation. Trouble is recorded and never raised.

    Without a console of its own the run writes to `job_<number>.log` in the folder of the sweep.
    """
    folder = Path(os.environ[SWEEP_VARIABLE])
    stop = stop_file(folder, int(os.environ[SESSION_VARIABLE]))
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
        close(entry, folder, 0)
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
            close(entry, folder, 128 + signal.SIGTERM)
            if not isinstance(raised, Exception):
                raise
            print(f"{title}: {raised}", file=sys.stderr)
            return None
    close(entry, folder, exit_status)
    if log is not None:
        print(f"#{number} {entry.status}", flush=True)
    return entry.final_return


def _prepare(entry: SweepJob, folder: Path, config: Config, env_name: str) -> Job | None:
    """The job of the run that `entry` stands for, new or resumed; None if the run has finished."""
    record = SweepRecord.read(folder)
    # A sweeper that draws may ask for other values under a number when the sweep is resumed.
    number = None if record.num_jobs is None else entry.job
    key = xxhash.xxh3_64_hexdigest(f"{record.id} {meaning(entry.overrides)} {number}".encode())
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


def meaning(overrides: Sequence[str]) -> tuple[str, ...]:
    """Overrides without place, purpose and launcher of the run."""
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
            for number in asked(stop)[passed:]:
                process.send_signal(number)
                passed += 1
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
    finally:
        if process.returncode is None:
            process.terminate()
            process.wait()
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def close(job: SweepJob, folder: Path, exit_status: int | None) -> None:
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
