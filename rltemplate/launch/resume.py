"""The job that resumes a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rltemplate.config.loading import (
    to_dict,
)
from rltemplate.config.validation import check
from rltemplate.run.continuation import recorded_config, take
from rltemplate.run.job import Job
from rltemplate.run.lock import RunLock
from rltemplate.run.record import RunRecord, check_alone
from rltemplate.types import ConfigError


def resume_job(
    run_dir: Path,
    command: Sequence[str],
    total_env_steps: int | None = None,
    accept: bool = False,
    num_workers: int | None = None,
) -> Job | None:
    """The job that goes on with the run of a folder; None if it has finished and no more is wanted.

    Raises ConfigError in a line for whatever can be known before anything starts. Changes nothing.
    """
    record, config = RunRecord.read(run_dir), recorded_config(run_dir)
    check_alone(asdict(record))
    recorded = config.total_env_steps
    if total_env_steps is not None:
        if total_env_steps < config.total_env_steps:
            raise ConfigError(
                f"total_env_steps={total_env_steps}: can only grow, and the run has {config.total_env_steps}"
            )
        config = replace(config, total_env_steps=total_env_steps)
    if num_workers is not None:
        config = replace(config, env=replace(config.env, num_workers=num_workers))
    check(config)
    job = Job(
        config=to_dict(config),
        run_id=record.id,
        run_dir=str(run_dir.absolute()),
        command=list(command),
        overrides=record.overrides,
        resume=True,
        accept=accept,
        journal=True,
    )
    if record.status == "finished" and total_env_steps in (None, recorded):
        return None
    lock = RunLock(run_dir)
    take(lock, run_dir)
    lock.release()
    return job
