"""`make resume`: a run that ended early goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rltemplate.config.command_args import one_of, program, whole, word
from rltemplate.config.loading import check, complete, to_dict
from rltemplate.launch.process import become
from rltemplate.run import paths
from rltemplate.run.continuation import ACCEPT
from rltemplate.run.job import Job
from rltemplate.run.lines import RunLock
from rltemplate.run.read import find_run, raw_config
from rltemplate.run.record import RunRecord
from rltemplate.types import ConfigError


@dataclass(frozen=True, kw_only=True)
class Args:
    """Resume a run that ended early, from its newest whole checkpoint: run=RUN [total_env_steps=N].

    The run goes on in its folder and becomes the run that it would have been. `total_env_steps` may grow.
    `accept=changes` resumes although code or libraries have changed since it began. `env.num_workers=N` steps
    its environments in that many processes beside its own: the numbers are the same.
    Exit status: as of training; 0 also for a run that has finished already.
    """

    run: str = word()
    total_env_steps: int | None = word(whole(1), None)
    accept: str | None = word(one_of(ACCEPT), None)
    num_workers: int | None = word(whole(0), None, key="env.num_workers")
    runs_dir: Path = word(Path, Path("runs"))


def main(args: Args) -> int:
    """Check, then become the process of the run."""
    run_dir = find_run(args.run, args.runs_dir)
    job = resume_job(run_dir, program(), args.total_env_steps, args.accept is not None, args.num_workers)
    if job is not None:
        become(job)
    print(f"{run_dir.name} has finished already; a larger total_env_steps= goes on with it")
    return 0


def resume_job(
    run_dir: Path,
    command: Sequence[str],
    total_env_steps: int | None = None,
    accept: bool = False,
    num_workers: int | None = None,
) -> Job | None:
    """The job that resumes the run of a folder; None if it has finished and no more is wanted.

    Raises ConfigError for all that can be known before anything starts. Changes nothing.
    """
    record, config = RunRecord.read(run_dir), complete(raw_config(run_dir / paths.CONFIG))[0]
    recorded, total = config.total_env_steps, total_env_steps or config.total_env_steps
    if total < recorded:
        raise ConfigError(f"total_env_steps={total}: can only grow, and the run has {recorded}")
    workers = config.env.num_workers if num_workers is None else num_workers
    config = replace(config, total_env_steps=total, env=replace(config.env, num_workers=workers))
    check(config)
    if record.status == "finished" and total == recorded:
        return None
    lock = RunLock(run_dir)
    lock.acquire()
    lock.release()
    return Job(
        config=to_dict(config),
        run_id=record.id,
        run_dir=str(run_dir.absolute()),
        command=list(command),
        overrides=record.overrides,
        resume=True,
        accept=accept,
        journal=True,
    )
