"""Differences between two recorded runs, with a count of the things that were changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rltemplate.analysis.differences import (
    CODE,
    CONFIGURATION,
    SECTIONS,
    SEED,
    Difference,
    changed_files,
    differences,
    listed,
)
from rltemplate.analysis.factors import Factor, count_files, describe, find_factors
from rltemplate.analysis.runs import MISSING, PLANNED, Run
from rltemplate.config.command_args import few
from rltemplate.run.paths import PROJECT


@dataclass(frozen=True, slots=True)
class RunDiff:
    """Differences between the runs `a` and `b`, of which `factors` can change results.

    `metrics` are names and the last values of both runs, None where a run has none. `changed_files` is None
    where the code cannot be compared. `notes` are facts that the factors do not show.
    """

    a: str
    b: str
    factors: list[Factor]
    differences: list[Difference]
    metrics: list[tuple[str, Any, Any]]
    changed_files: list[str] | None
    notes: list[str]

    @property
    def seeds(self) -> tuple[Any, Any] | None:
        """Both seeds, if they differ."""
        return next(((one.a, one.b) for one in self.differences if one.key == SEED), None)


def diff_runs(a: Run, b: Run, project: Path = PROJECT) -> RunDiff:
    """Differences between two recorded runs; `project` lies in the repository that has their code."""
    return compare_records(a, b, changed_files(a, b, project))


def compare_records(a: Run, b: Run, files: list[str] | None) -> RunDiff:
    """Differences between two loaded runs, of which `files` differ in their code (None: unknown)."""
    found = differences(a, b, files)
    factors = find_factors(a, b, found)
    return RunDiff(a.id, b.id, factors, found, list(_metrics(a, b)), files, list(_notes(a, b, found, files)))


# --- Metrics and notes -----------------------------------------------------------------------------------


def _metrics(a: Run, b: Run) -> Iterator[tuple[str, Any, Any]]:
    known = {**(a.record.final_metrics or a.last_row), **(b.record.final_metrics or b.last_row)}
    first = [name for name in ("eval/return", "episode/return") if name in known]
    names = [name for name in dict.fromkeys([*first, *known]) if name not in ("env_steps", "wall_time_s")]
    for name in ("steps", *names, "duration"):
        x, y = (run.value(name) for run in (a, b))
        yield name, None if x is MISSING else x, None if y is MISSING else y


def _notes(a: Run, b: Run, found: Sequence[Difference], files: list[str] | None) -> Iterator[str]:
    if a.dir == b.dir and a.id == b.id:
        yield "a and b are the same run"
    for run in (a, b):
        if run.record.status not in ("finished", PLANNED):
            running = run.record.status == "running"
            yield f"{run.id} {'is still running' if running else f'ended {run.record.status}'}"
        for part in run.record.resumed:
            if part.changed:
                yield f"{run.id} was resumed with other {', '.join(part.changed)} than before"
    if files is None:
        yield f"the code cannot be compared: {_why_unknown(a, b)}"
    elif files and not any(one.section == CODE and one.affects_results for one in found):
        yield f"only files differ that cannot change a run: {few(files)}"
    for run in (a, b):
        git = run.record.git
        skipped = [str(each["path"]) for each in git.skipped]
        for names, why in (
            (skipped, "left out of the snapshot"),
            (git.dirty_submodules, "changed submodules"),
        ):
            if names:
                yield f"not compared, {why} of {run.id}: {few(names)}"
    for what, lacking in (
        ("versions", [run.id for run in (a, b) if not run.record.versions]),
        ("hardware", [run.id for run in (a, b) if not run.record.machine]),
    ):
        if lacking:
            yield f"{what} cannot be compared: there are none in the record of {' and of '.join(lacking)}"
    if any(run.record.status == PLANNED and run.config.get("device", "cpu") != "cpu" for run in (a, b)):
        yield "GPUs cannot be compared before a run has begun"


def _why_unknown(a: Run, b: Run) -> str:
    for run in (a, b):
        git = run.record.git
        if not git.tree and not git.commit:
            return f"{run.id} has no snapshot{f' ({git.problem})' if git.problem else ''}"
    return "this repository does not have both snapshots (`git fetch REMOTE 'refs/runs/*:refs/runs/*'`)"


# --- As text ---------------------------------------------------------------------------------------------


def verdict(found: RunDiff) -> str:
    """The changes in a line; a warning if there is more than one, or the code is unknown."""
    factors, known = found.factors, describe(found.factors)
    unclear = "; what a difference of the returns comes from cannot be told"
    unknown = found.changed_files is None
    if len(factors) > 1:
        more = ", and the code cannot be compared" if unknown else ""
        return f"warning: {len(factors)} things differ{more}: {known}{unclear}"
    if unknown:
        what = f"1 thing differs, {known}" if factors else "nothing else differs"
        return f"warning: {what}, but the code cannot be compared{unclear}"
    if factors:
        return f"1 thing differs: {known}"
    if found.seeds is not None:
        return f"same experiment: only the seed differs, {found.seeds[0]} -> {found.seeds[1]}"
    return "same experiment, same seed"


def report(found: RunDiff, code: str | None = None) -> str:
    """The differences for a terminal, the verdict last; `code` is shown in place of the names of files."""
    lines = [f"a  {found.a}", f"b  {found.b}", "", *_section(found, CONFIGURATION), ""]
    files = found.changed_files
    if files is None:
        lines.append("code: cannot be compared")
    elif not files:
        lines.append("code: equal")
    else:
        counted = next((len(factor.detail) for factor in found.factors if factor.kind == "code"), 0)
        some = "" if counted == len(files) else f", {counted or 'none'} of which can change a run"
        lines += [f"code: {count_files(files)}{some}", file_names(found) if code is None else code]
    for section in SECTIONS[2:]:
        lines += ["", *_section(found, section)]
    lines += ["", "metrics at the end", *_metric_lines(found.metrics)]
    if found.notes:
        lines += ["", *(f"note: {note}" for note in found.notes)]
    return "\n".join([*lines, "", verdict(found)])


def file_names(found: RunDiff) -> str:
    """The files that differ, a line for each."""
    files = (one for one in found.differences if one.section == CODE)
    return "\n".join(f"  {one.key}{'' if one.affects_results else '  (no factor)'}" for one in files)


def _section(found: RunDiff, section: str) -> list[str]:
    lines = list(listed(found.differences, section))
    return [section, *lines] if lines else [f"{section}: equal"]


def _metric_lines(metrics: Sequence[tuple[str, Any, Any]]) -> Iterator[str]:
    rows = [("", "a", "b"), *((name, _number(a), _number(b)) for name, a, b in metrics)]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    for name, a, b in rows:
        yield f"  {name:{widths[0]}}  {a:>{widths[1]}}  {b:>{widths[2]}}"


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def to_dict(found: RunDiff) -> dict[str, Any]:
    """For programs: all of it, with the number of factors and the verdict."""
    return asdict(found) | {"things": len(found.factors), "verdict": verdict(found)}
