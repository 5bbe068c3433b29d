"""The check of `baseline=RUN`: a new run may differ from its baseline in one thing.

Factors are counted as by `make diff` (analysis/factors.py), before anything is created. More than one is
refused, or with `baseline_check=warn` reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rltemplate.analysis.diff import RunDiff, compare_records
from rltemplate.analysis.factors import describe
from rltemplate.analysis.runs import PLANNED, Run, load_run, text_of
from rltemplate.determinism.machine import machine_facts, package_versions
from rltemplate.run.git import changes
from rltemplate.run.git.snapshot import GitRecord
from rltemplate.run.read import find_run
from rltemplate.run.record import RunRecord
from rltemplate.types import ConfigError

_NAMED = 6  # things in a message
_LINES = 12  # about the jobs of a sweep


def find_baseline(text: str, runs_dir: Path) -> Run:
    """The run that `baseline=text` names. Raises ConfigError in a line if there is none or it is damaged."""
    try:
        return load_run(find_run(text, runs_dir, "baseline"))
    except ConfigError as error:
        prefix = f"baseline={text}: "
        raise ConfigError(prefix + str(error).removeprefix(prefix)) from None


def check_baseline(
    project: Path,
    configs: Sequence[Mapping[str, Any]],
    overrides: Sequence[Sequence[str]],
    every_job: bool = True,
) -> list[str]:
    """Lines about the changes of a command's jobs against their baseline; none without a baseline.

    `configs` are the resolved configurations of the jobs, `overrides` the words of the command line for each,
    `project` lies in the repository whose work tree is their code. Without `every_job` they are a part of the
    jobs, in which each value occurs. Raises ConfigError if there is no such run, and, unless `baseline_check`
    is `warn`, if a job differs from it in more than one thing.
    """
    named = list(dict.fromkeys(config.get("baseline") for config in configs))
    if not any(named):
        return []
    if len(named) > 1:
        listed = ",".join(map(text_of, named))
        raise ConfigError(f"baseline={listed}: all jobs of a sweep have one baseline; start one for each")
    baseline = find_baseline(str(named[0]), Path(str(configs[0]["runs_dir"])))
    # Only torch knows the GPUs, and it takes seconds to ask.
    machine = {k: v for k, v in machine_facts(with_gpus=False).items() if k != "gpus"}
    versions, changed = package_versions(), changes.files_since(project, asdict(baseline.record.git))
    found = []
    for config, words in zip(configs, overrides, strict=True):
        planned = RunRecord(
            id="now",
            status=PLANNED,
            overrides=list(words),
            git=GitRecord(tree="work tree"),
            versions=versions,
            machine=machine,
        )
        found.append(compare_records(baseline, Run.planned(planned, config), changed))
    problem = _problem(found, overrides, every_job)
    lines = [f"note: baseline: {note}" for note in dict.fromkeys(note for one in found for note in one.notes)]
    if not every_job:
        lines.append(f"note: baseline: compared with {_jobs(len(found))}, and there are others")
    if problem is None:
        counts = Counter(_change(one) for one in found)
        told = [f"{change}{f' ({_jobs(n)})' if len(found) > 1 else ''}" for change, n in counts.items()]
        more = [f"and {len(told) - _LINES} more changes"] if len(told) > _LINES else []
        return lines + [f"against {baseline.id}: {text}" for text in (*told[:_LINES], *more)]
    if any(config.get("baseline_check") != "warn" for config in configs):
        raise ConfigError(
            f"baseline={named[0]}: {problem}\nchange one thing at a time, or start all the same with "
            "baseline_check=warn"
        )
    warning = f"{problem}; what a difference of the returns comes from cannot be told"
    return [*lines, f"warning: against {baseline.id}: {warning}"]


def _problem(found: Sequence[RunDiff], overrides: Sequence[Sequence[str]], every_job: bool) -> str | None:
    """The job that changes more than one thing; None if there is none."""
    worst = max(found, key=lambda one: len(one.factors))
    if len(worst.factors) > 1:
        shared = set(overrides[0]).intersection(*overrides)
        own = " ".join(word for word in overrides[found.index(worst)] if word not in shared)
        where = f" (in the job {own})" if own else ""
        return f"{len(worst.factors)} things differ{where}: {describe(worst.factors, _NAMED)}"
    swept = list(dict.fromkeys(factor.name for one in found for factor in one.factors))
    if not every_job and len(swept) > 1:  # each value is in one of these jobs, and another has two of them
        return f"{len(swept)} things differ in some of the jobs: {', '.join(swept[:_NAMED])}"
    return None


def _jobs(count: int) -> str:
    return f"{count} job{'' if count == 1 else 's'}"


def _change(one: RunDiff) -> str:
    if one.factors:
        return describe(one.factors)
    if one.changed_files is None:
        return "nothing else differs"
    return "same experiment" if one.seeds is None else "same experiment, another seed"
