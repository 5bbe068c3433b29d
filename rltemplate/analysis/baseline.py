"""A run that is about to begin, against the run that it is to be compared with: one change at a time.

`baseline=RUN` names a recorded run. What differs from it is counted as by `make diff` (analysis/diff.py),
before anything is created, and more than one thing is refused, or with `baseline_check=warn` told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rltemplate.analysis.diff import Difference, compare_records, describe
from rltemplate.analysis.runs import Run, load_run, text_of
from rltemplate.determinism.machine import machine_facts, package_versions
from rltemplate.run.git import changes
from rltemplate.run.read import find_run
from rltemplate.types import ConfigError

_NAMED = 6  # things in a message
_LINES = 12  # about the jobs of a sweep


def difference(project: Path, a: Run, b: Run) -> Difference:
    """What differs between two recorded runs, with the code as the repository around `project` knows it."""
    old, new = (run.record.get("git") or {} for run in (a, b))
    return compare_records(a, b, changes.files_between(project, old, new))


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
    """What the jobs of a command change of their baseline, in lines for the user; none without a baseline.

    `configs` are the resolved configurations of the jobs, `overrides` what the command line gave to each,
    `project` lies in the repository whose work tree is their code. Without `every_job` they are some of more,
    in which each value occurs. Changes nothing. Raises ConfigError if there is no such run, and, unless
    `baseline_check` is `warn`, if a job differs from it in more than one thing.
    """
    named = list(dict.fromkeys(config.get("baseline") for config in configs))
    if not any(named):
        return []
    if len(named) > 1:
        listed = ",".join(map(text_of, named))
        raise ConfigError(f"baseline={listed}: all jobs of a sweep have one baseline; start one for each")
    baseline = find_baseline(f"{named[0]}", Path(str(configs[0]["runs_dir"])))
    # Only torch knows the GPUs, and it takes seconds to ask.
    machine = machine_facts(with_gpus=False) | {"gpus": None}
    now = {"id": "now", "git": {"tree": "work tree"}, "versions": package_versions(), "machine": machine}
    changed = changes.files_since(project, baseline.record.get("git") or {})
    found = []
    for config, words in zip(configs, overrides, strict=True):
        job = Run.planned(now | {"overrides": list(words)}, config)
        found.append(compare_records(baseline, job, changed))
    problem = _problem(found, overrides, every_job)
    lines = [f"note: baseline: {note}" for note in dict.fromkeys(note for one in found for note in one.notes)]
    if not every_job:
        lines.append(f"note: baseline: compared with {_jobs(len(found))}, and there are others")
    if problem is None:
        return [*lines, *_told(baseline, found)]
    if any(config.get("baseline_check") != "warn" for config in configs):
        raise ConfigError(
            f"baseline={named[0]}: {problem}\nchange one thing at a time, or start all the same with "
            "baseline_check=warn"
        )
    warning = f"{problem}; what a difference of the returns comes from cannot be told"
    return [*lines, f"warning: against {baseline.id}: {warning}"]


def _problem(found: Sequence[Difference], overrides: Sequence[Sequence[str]], every_job: bool) -> str | None:
    """Which job changes more than one thing, None if there is none."""
    worst = max(found, key=lambda one: len(one.factors))
    if len(worst.factors) > 1:
        shared = set(overrides[0]).intersection(*overrides)
        own = " ".join(word for word in overrides[found.index(worst)] if word not in shared)
        where = f" (in the job {own})" if own else ""
        return f"{len(worst.factors)} things differ{where}: {describe(worst.factors, _NAMED)}"
    if not every_job:
        swept = {factor.name: factor for one in found for factor in one.factors}
        if len(swept) > 1:  # each value is in one of these jobs, and another has two of them
            return f"{len(swept)} things differ in some of the jobs: {', '.join(list(swept)[:_NAMED])}"
    return None


def _jobs(count: int) -> str:
    return f"{count} job{'' if count == 1 else 's'}"


def _told(baseline: Run, found: Sequence[Difference]) -> list[str]:
    """A line for each thing that jobs change, and how many do."""
    counts = Counter(_change(one) for one in found)
    lines = [
        f"against {baseline.id}: {change}{f' ({_jobs(count)})' if len(found) > 1 else ''}"
        for change, count in counts.items()
    ]
    more = len(lines) - _LINES
    return lines if more <= 0 else [*lines[:_LINES], f"against {baseline.id}: and {more} more changes"]


def _change(one: Difference) -> str:
    if one.factors:
        return describe(one.factors)
    if one.changed_files is None:
        return "nothing else differs"
    return "same experiment" if one.seeds is None else "same experiment, another seed"
