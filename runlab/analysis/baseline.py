"""The check of `baseline=RUN`: a new run may differ from its baseline in one thing.

Factors are counted as by `make diff` (analysis/differences.py), before anything is created. More than one is
refused, or with `baseline_check=warn` reported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runlab.analysis.differences import compare_records, describe
from runlab.analysis.runs import PLANNED, Run, load_run
from runlab.config.texts import few
from runlab.errors import ConfigError
from runlab.machine import machine_facts, package_versions
from runlab.run.git import changes
from runlab.run.git.snapshot import GitRecord, take_snapshot
from runlab.run.read import find_run
from runlab.run.record import RunRecord
from runlab.run.used_code import digests_now


def check_baseline(
    project: Path, configs: Sequence[Mapping[str, Any]], overrides: Sequence[Sequence[str]]
) -> list[str]:
    """Lines about the changes of a command's jobs against their baseline.

    `configs` are the resolved configurations of jobs in which each value of a sweep occurs, `overrides` the
    arguments of the command line for each, `project` lies in the repository whose work tree is their code.
    Raises ConfigError if there is no such run, and, unless `baseline_check` is `warn`, if the jobs differ
    from it in more than one thing.
    """
    name = configs[0]["baseline"]
    if any(config["baseline"] != name for config in configs):
        raise ConfigError(f"baseline={name}: all jobs of a sweep have one baseline")
    baseline = load_run(find_run(name, Path(configs[0]["runs_dir"]), "baseline"))
    # GPUs are not compared: torch would have to be imported, which takes seconds.
    machine = {k: v for k, v in machine_facts().items() if k != "gpus"}
    versions = {
        compiles: package_versions(compiles) for compiles in {bool(each.get("compile")) for each in configs}
    }
    now = take_snapshot(project)
    changed = changes.files_between(project, baseline.record.git, now)
    # It is not known what a run will use that has not begun. What its baseline used is compared.
    used = None if baseline.record.used is None else digests_now(project, baseline.record.used)
    diffs = []
    for config, words in zip(configs, overrides, strict=True):
        planned = RunRecord(
            id="now",
            status=PLANNED,
            overrides=list(words),
            git=GitRecord(tree="work tree"),
            used=used,
            versions=versions[bool(config.get("compile"))],
            machine=machine,
        )
        if config.get("device") == "auto":  # the process of the run decides, with torch
            config = {**config, "device": baseline.config.get("device")}
        diffs.append(compare_records(baseline, Run(Path(), planned, config), changed))
    lines = [f"note: baseline: {note}" for note in dict.fromkeys(note for one in diffs for note in one.notes)]
    # A sweep has a job for each combination of its values, so all factors count together.
    factors = {name: change for one in diffs for name, change in one.factors.items()}
    if len(factors) > 1:
        problem = f"{len(factors)} things differ: {describe(factors)}"
        if any(config.get("baseline_check") != "warn" for config in configs):
            raise ConfigError(
                f"baseline={name}: {problem}\nchange one thing at a time, or start all the same with "
                "baseline_check=warn"
            )
        unclear = "the cause of a difference in returns is unclear"
        return [*lines, f"warning: against {baseline.id}: {problem}; {unclear}"]
    same = "nothing else differs" if changed is None else "same experiment"
    summaries = dict.fromkeys(describe(one.factors) or same for one in diffs)
    return [*lines, f"against {baseline.id}: {few([*summaries])}"]
