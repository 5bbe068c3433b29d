"""A job of a sweep, in a process of Hydra's launcher: starts or resumes its run, and waits for it.

The id of a run is made from the sweep, the number of the job and the digest of its configuration. So a
resumed sweep finds its runs, and so does a job that a scheduler starts a second time: a finished run is not
repeated, a run that ended early is resumed, and a missing one is started.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import hydra
import xxhash
from hydra import initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.plugins.sweeper import Sweeper
from omegaconf import DictConfig

from runlab.config.affects_results import key_affects_results
from runlab.config.cli.composition import compose_job
from runlab.config.cli.files import check_files
from runlab.config.cli.overrides import SEARCHPATH
from runlab.config.loading import CONF, to_dict
from runlab.config.schema import AUTO, register_schemas
from runlab.errors import ConfigError, in_a_line
from runlab.launch import process
from runlab.launch.subprocesses import PARENT_VARIABLE
from runlab.run import paths
from runlab.run.continuation import only_begins_anew
from runlab.run.files import make_durable_folder, to_stderr
from runlab.run.job import Job, new_job, resume_job, run_folder
from runlab.run.read import leaves
from runlab.run.record import FINISHED, RunRecord, SweepJob, SweepMembership, SweepRecord
from runlab.run.trust import check_folder

_INTERRUPTED = (128 + signal.SIGINT, 128 + signal.SIGTERM)


def make_folder(folder: Path) -> None:
    """Make the folder of a sweep or search. Raises ConfigError, also for links in it."""
    check_folder(folder)  # logs go there, and it may have come from somebody else
    with in_a_line(f"runs_dir={folder} cannot be made"):
        make_durable_folder(folder)


def run_hydra(argv: Sequence[str]) -> None:
    """Let Hydra run a sweep, whose jobs call `hydra_job`."""
    sys.argv = ["train", *argv]
    # All jobs have been checked. Hydra's own check takes a tenth of a second for each.
    Sweeper.validate_batch_is_legal = lambda *_: None  # type: ignore[method-assign]
    hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(hydra_job)()


def hydra_job(_: DictConfig) -> None:
    """Run one job of a sweep, in a process of Hydra's launcher."""
    settings = HydraConfig.get()
    run_job(settings.overrides.hydra, [*settings.overrides.task], int(settings.job.num))


def ray_job(variables: Mapping[str, str], hydra: Sequence[str], overrides: list[str], number: int) -> None:
    """Run one job of a sweep in a worker of Ray, which says what devices it may use."""
    devices = {name: text for name, text in os.environ.items() if name.endswith("_VISIBLE_DEVICES")}
    command = json.loads(variables[process.COMMAND_VARIABLE]) | devices
    os.environ |= {**variables, process.COMMAND_VARIABLE: json.dumps(command)}
    register_schemas()
    check_files()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        run_job(hydra, overrides, number)


def run_job(hydra: Sequence[str], overrides: list[str], number: int) -> None:
    """Run a job to its end. Errors are recorded and never raised.

    `hydra` are the overrides of Hydra's own settings. The run writes to `job_<number>.log` in the folder of
    the sweep.
    """
    stop = Path(os.environ[process.STOP_VARIABLE])
    if stop.exists():
        return
    folder, entry = stop.parent, SweepJob(job=number, overrides=overrides)
    exit_status = 128 + signal.SIGTERM  # if the scheduler ends the process of the job
    try:
        job = _find_run(entry, folder, [text for text in hydra if text.startswith(SEARCHPATH)])
        if job is not None:
            entry.status = "running"
            write(entry, folder)
        exit_status = 0 if job is None else _run(job, folder / f"job_{number}.log", stop)
    except ConfigError as error:
        exit_status, entry.problem = 2, str(error)
    except Exception as error:
        exit_status, entry.problem = 1, str(error)
        traceback.print_exc()
    finally:
        close_job(entry, folder, exit_status)
    if exit_status in _INTERRUPTED and os.environ.get("SUBMITIT_EXECUTOR") == "slurm" and not stop.exists():
        sys.exit(exit_status)  # without a result: submitit waits until Slurm has called the job again


def _find_run(entry: SweepJob, folder: Path, more: Sequence[str]) -> Job | None:
    """The new or resumed run of the job `entry`; None if it has finished. Fills in the run of `entry`."""
    record = SweepRecord.read(folder)
    config, auto = compose_job([*more, *entry.overrides], record.jobs_beside)
    values = {key: value for key, value in leaves(to_dict(config)) if key_affects_results(key)}
    # On another machine `auto` may become another value, and the job has to stay the same.
    values |= {key: AUTO for key in auto if key_affects_results(key)}
    prefix = f"{record.id.partition('-sweep-')[0]}-seed{config.seed}-{digest([record.id, entry.job, values])}"
    run_dir = run_folder(config, f"{prefix}{secrets.token_hex(2)}", entry.overrides)
    earlier = (path.parent for path in run_dir.parent.glob(f"{prefix}*/{paths.RECORD}"))
    begun = next((each for each in earlier if not only_begins_anew(each)), None)
    run_dir = begun or run_dir
    entry.run_id, entry.run_dir = run_dir.name, os.path.relpath(run_dir, folder)
    command, sweep = record.commands[-1], SweepMembership(id=record.id, dir=str(folder), job=entry.job)
    if begun is not None:
        return resume_job(run_dir, command, typed=config, accept=record.accept, sweep=sweep)
    job = new_job(config, command, entry.overrides, auto_compile="compile" in auto, sweep=sweep)
    return replace(job, run_id=run_dir.name, run_dir=str(run_dir))


def _run(job: Job, log: Path, stop: Path) -> int:
    """Run a job to its end, and pass on signals; its exit status, as a shell gives it.

    An exception here ends the run, too.
    """
    environment: Mapping[str, str] = json.loads(os.environ[process.COMMAND_VARIABLE])
    if "SLURM_JOB_ID" in os.environ and "SLURM_JOB_ID" not in environment:
        environment = os.environ  # the scheduler says which devices a job may use
    environment = process.worker_environment(job, environment)
    if "RAY_JOB_ID" in os.environ:  # Ray repeats a job whose process was killed: no run of it may be left
        environment[PARENT_VARIABLE] = f"{os.getpid()} {signal.SIGKILL.value}"
    with log.open("ab") as out:
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


def close_job(job: SweepJob, folder: Path, exit_status: int) -> None:
    """Write how a job ended. It is `finished` only if the record of its run says so."""
    record, job.exit_status = run_record(job, folder), exit_status
    if record is not None and record.status == FINISHED:
        job.status, job.final_return = FINISHED, record.final_metrics.get("eval/return")
    elif exit_status in _INTERRUPTED:
        job.status = "interrupted"
    else:
        job.status = "refused" if exit_status == 2 else "failed"
    write(job, folder)


def run_record(job: SweepJob, folder: Path) -> RunRecord | None:
    """The record of a job's run; None if there is none that can be read."""
    run_dir = job.run(folder)
    with contextlib.suppress(ConfigError):
        return None if run_dir is None else RunRecord.read(run_dir)
    return None


def write(part: SweepRecord | SweepJob, folder: Path) -> None:
    """Write a part of the record. A full disk costs a message only: each run has its own record."""
    try:
        part.write(folder)
    except OSError as error:
        to_stderr(f"{folder} cannot be written: {error.strerror}")


def digest(values: Any) -> str:
    """A digest of plain values, in eight digits."""
    return xxhash.xxh3_64_hexdigest(json.dumps(values, sort_keys=True).encode())[:8]
