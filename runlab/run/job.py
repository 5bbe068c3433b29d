"""The job of a run's process, and the folder of the run."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runlab.config.loading import check, complete, from_dict, to_dict
from runlab.config.schema import Config
from runlab.errors import ConfigError
from runlab.run import paths
from runlab.run.names import env_name
from runlab.run.read import raw_config
from runlab.run.record import RunRecord, SweepMembership
from runlab.run.trust import check_config, check_folder, names_same_code

JOB_VARIABLE = "RUNLAB_JOB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The instructions for the process of a run.

    `snapshot` is a `GitRecord` as JSON. In a sweep the process of the run reads it from the sweep's index: it
    may name hundreds of files, and Linux allows 128 KiB for one environment variable.

    With `resume` the run of the folder is resumed; with `accept` also if code or libraries have changed.
    With `auto_compile` the run may go on without the compiler that was chosen for it.
    """

    config: Config
    run_id: str
    run_dir: str
    command: list[str]
    overrides: list[str]
    sweep: SweepMembership | None = None
    snapshot: str | None = None
    resume: bool = False
    accept: bool = False
    auto_compile: bool = False

    def to_json(self) -> str:
        return json.dumps(to_dict(self))

    @classmethod
    def from_environment(cls) -> Job:
        """The job of this process, removed from the environment so that child processes do not get it."""
        text = os.environ.pop(JOB_VARIABLE, None)
        if text is None:
            raise ConfigError("no job given: start runs with scripts/train.py, which prepares their process")
        values = json.loads(text)
        values["config"] = from_dict(values["config"])
        if values["sweep"] is not None:
            values["sweep"] = sweep = SweepMembership(**values["sweep"])
            if values["snapshot"] is None:
                index = json.loads((Path(sweep.dir) / paths.SWEEP_INDEX).read_text(encoding="utf-8"))
                values["snapshot"] = json.dumps(index["snapshot"])
        return cls(**values)


def run_folder(config: Config, run_id: str, overrides: Sequence[str]) -> Path:
    """Absolute folder of a run: `run_dir` as it is, else `<runs_dir>/<algo>-<env>/<run_id>`."""
    if config.run_dir is not None:
        return Path(config.run_dir).expanduser().absolute()
    group = paths.safe_name(f"{config.algo.name}-{env_name(to_dict(config), overrides)}")
    return Path(config.runs_dir).expanduser().absolute() / group / run_id


def new_job(config: Config, command: Sequence[str], overrides: Sequence[str], **further: Any) -> Job:
    """The job of a new run; `further` are other fields of `Job`."""
    run_id = paths.new_id(f"seed{config.seed}")
    return Job(
        config=config,
        run_id=run_id,
        run_dir=str(run_folder(config, run_id, overrides)),
        command=list(command),
        overrides=list(overrides),
        **further,
    )


def resume_job(
    run_dir: Path,
    command: Sequence[str],
    total_env_steps: int | None = None,
    num_workers: int | None = None,
    trust: bool = False,
    typed: Config | None = None,
    **further: Any,
) -> Job | None:
    """The job that resumes the run of a folder; None if it has finished and gets no more steps.

    `typed` is the configuration that the user asked for, such as of a job of a sweep. `further` are other
    fields of `Job`. Raises ConfigError for a damaged record, a wrong total or number of workers, links that
    lead out of the folder, and without `trust` for code from elsewhere (run/trust.py).
    """
    check_folder(run_dir, trust)
    record, config = RunRecord.read(run_dir), complete(raw_config(run_dir))[0]
    if not trust and (typed is None or not names_same_code(to_dict(typed), to_dict(config))):
        check_config(to_dict(config), run_dir, resumed=True)
    recorded, total = config.total_env_steps, total_env_steps or config.total_env_steps
    if total < recorded:
        raise ConfigError(f"total_env_steps={total}: can only grow, and the run has {recorded}")
    workers = config.env.num_workers if num_workers is None else num_workers
    config = replace(config, total_env_steps=total, env=replace(config.env, num_workers=workers))
    check(config)
    if record.status == "finished" and total == recorded:
        return None
    return Job(
        config=config,
        run_id=record.id,
        run_dir=str(run_dir.absolute()),
        command=list(command),
        overrides=record.overrides,
        resume=True,
        **further,
    )
