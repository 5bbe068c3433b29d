"""The check of `baseline=RUN`: a new run may differ from its baseline in one thing.

Factors are counted as by `make diff` (analysis/differences.py), before anything is created. More than one is
refused, or with `baseline_check=warn` reported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rltemplate.analysis.diff import RunDiff, compare_records
from rltemplate.analysis.differences import Factor, describe
from rltemplate.analysis.runs import PLANNED, Run, load_run
from rltemplate.config.command_args import few
from rltemplate.determinism.machine import machine_facts, package_versions
from rltemplate.run.git import changes
from rltemplate.run.git.snapshot import GitRecord
from rltemplate.run.read import find_run
from rltemplate.run.record import RunRecord
from rltemplate.types import ConfigError

_NAMED = 6  # things in a message


def find_baseline(text: str, runs_dir: Path) -> Run:
    """The run that `baseline=text` names. Raises ConfigError in a line if there is none or it is damaged."""
    try:
        return load_run(find_run(text, runs_dir, "baseline"))
    except ConfigError as error:
        prefix = f"baseline={text}: "
        raise ConfigError(prefix + str(error).removeprefix(prefix)) from None


def check_baseline(
    project: Path, configs: Sequence[Mapping[str, Any]], overrides: Sequence[Sequence[str]]
) -> list[str]:
    """Lines about the changes of a command's jobs against their baseline; none without a baseline.

    `configs` are the resolved configurations of jobs in which each value of a sweep occurs, `overrides` the
    words of the command line for each, `project` lies in the repository whose work tree is their code.
    Raises ConfigError if there is no such run, and, unless `baseline_check` is `warn`, if the jobs differ
    from it in more than one thing.
    """
    named = list(dict.fromkeys(config.get("baseline") for config in configs))
    if not any(named):
        return []
    if len(named) > 1:
        raise ConfigError(
            f"baseline={few([str(name) for name in named])}: all jobs of a sweep have one baseline"
        )
    baseline = find_baseline(str(named[0]), Path(str(configs[0]["runs_dir"])))
    # Only torch knows the GPUs, and it takes seconds to ask.
    machine = {k: v for k, v in machine_facts().items() if k != "gpus"}
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
    lines = [f"note: baseline: {note}" for note in dict.fromkeys(note for one in found for note in one.notes)]
    factors: dict[str, Factor] = {}
    for factor in (factor for one in found for factor in one.factors):
        factors.setdefault(factor.name, factor)
    if len(factors) > 1:  # a sweep has a job for each combination
        problem = f"{len(factors)} things differ: {describe([*factors.values()], _NAMED)}"
        if any(config.get("baseline_check") != "warn" for config in configs):
            raise ConfigError(
                f"baseline={named[0]}: {problem}\nchange one thing at a time, or start all the same with "
                "baseline_check=warn"
            )
        unclear = "what a difference of the returns comes from cannot be told"
        return [*lines, f"warning: against {baseline.id}: {problem}; {unclear}"]
    return [*lines, f"against {baseline.id}: {few([*dict.fromkeys(map(_change, found))], _NAMED)}"]


def _change(one: RunDiff) -> str:
    if one.factors:
        return describe(one.factors)
    if one.changed_files is None:
        return "nothing else differs"
    return "same experiment" if one.seeds is None else "same experiment, another seed"
