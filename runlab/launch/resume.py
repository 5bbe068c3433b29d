"""`make resume`: a run that ended early goes on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from runlab.config.command_args import argument, one_of, program, runs_folder, switch, whole
from runlab.launch.command import become
from runlab.run.continuation import ACCEPT
from runlab.run.files import say
from runlab.run.job import resume_job
from runlab.run.read import find_run


@dataclass(frozen=True, kw_only=True)
class Args:
    """Resume a run that ended early, from its newest whole checkpoint: run=RUN [total_env_steps=N].

    The run goes on in its folder and becomes the run that it would have been. `total_env_steps` may grow.
    `accept=changes` resumes although code or libraries have changed since it began. `env.num_workers=N` steps
    its environments in that many processes beside its own: the numbers are the same.
    Exit status: as of training; 0 also for a run that has finished already.
    """

    run: str = argument()
    total_env_steps: int | None = argument(whole(1), None)
    accept: str | None = argument(one_of(ACCEPT), None)
    num_workers: int | None = argument(whole(0), None, key="env.num_workers")
    trust: bool = argument(switch, False)
    runs_dir: Path = argument(runs_folder, Path("runs"))


def main(args: Args) -> int:
    """Check, then become the process of the run."""
    run_dir = find_run(args.run, args.runs_dir)
    changes = args.total_env_steps, args.num_workers
    job = resume_job(run_dir, program(), *changes, trust=args.trust, accept=args.accept is not None)
    if job is not None:
        become(job)
    say(f"{run_dir.name} has finished already; a larger total_env_steps= goes on with it")
    return 0
