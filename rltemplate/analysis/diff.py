"""Differences between two recorded runs, with a count of the things that were changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rltemplate.analysis.differences import (
    CODE,
    SECTIONS,
    SEED,
    Difference,
    Factor,
    changed_files,
    describe,
    differences,
    find_factors,
    listed,
)
from rltemplate.analysis.run_table import NOTHING, cell
from rltemplate.analysis.runs import PLANNED, Run
from rltemplate.config.command_args import few
from rltemplate.run.paths import PROJECT


@dataclass(frozen=True, slots=True)
class RunDiff:
    """Differences between the runs `a` and `b`, of which `factors` can change results.

    `metrics` are names and the last values of both runs as text. `changed_files` is None
    where the code cannot be compared. `notes` are facts that the factors do not show.
    """

    a: str
    b: str
    factors: list[Factor]
    differences: list[Difference]
    metrics: list[tuple[str, str, str]]
    changed_files: list[str] | None
    notes: list[str]

    @property
    def seeds(self) -> str | None:
        """Both seeds, if they differ."""
        return next((one.change for one in self.differences if one.key == SEED), None)


def diff_runs(a: Run, b: Run, project: Path = PROJECT) -> RunDiff:
    """Differences between two recorded runs; `project` lies in the repository that has their code."""
    return compare_records(a, b, changed_files(a, b, project))


def compare_records(a: Run, b: Run, files: list[str] | None) -> RunDiff:
    """Differences between two loaded runs, of which `files` differ in their code (None: unknown)."""
    found = differences(a, b, files)
    factors = find_factors(a, b, found)
    return RunDiff(a.id, b.id, factors, found, list(_metrics(a, b)), files, list(_notes(a, b, found, files)))


def _metrics(a: Run, b: Run) -> Iterator[tuple[str, str, str]]:
    known = {**(a.record.final_metrics or a.last_row), **(b.record.final_metrics or b.last_row)}
    names = [name for name in ("eval/return", *known) if name not in ("env_steps", "wall_time_s")]
    for name in dict.fromkeys(("steps", *names, "duration")):
        if (values := (cell(a, name), cell(b, name))) != (NOTHING, NOTHING):
            yield name, *values


def _notes(a: Run, b: Run, found: Sequence[Difference], files: list[str] | None) -> Iterator[str]:
    if files is None:
        yield (
            "the code cannot be compared: this repository does not have both snapshots "
            "(`git fetch REMOTE 'refs/runs/*:refs/runs/*'`)"
        )
    elif files and not any(one.section == CODE and one.affects_results for one in found):
        yield f"only files differ that cannot change a run: {few(files)}"
    for run in (a, b):
        git, status = run.record.git, run.record.status
        if status not in ("finished", PLANNED):
            yield f"{run.id} {'is still running' if status == 'running' else f'ended {status}'}"
        if changed := [key for part in run.record.resumed for key in part.changed]:
            yield f"{run.id} was resumed with other {', '.join(changed)} than before"
        if git.problem:
            yield f"{run.id} has no snapshot of its code ({git.problem})"
        if left_out := [*(str(each["path"]) for each in git.skipped), *git.dirty_submodules]:
            yield f"not in the snapshot of {run.id}, so not compared: {few(left_out)}"
        if not (run.record.versions and run.record.machine):
            yield f"{run.id} has no versions or no hardware in its record, so they are not compared"
    if PLANNED in (a.record.status, b.record.status) and b.config.get("device", "cpu") != "cpu":
        yield "GPUs cannot be compared before a run has begun"


# --- As text ---------------------------------------------------------------------------------------------


def verdict(found: RunDiff) -> str:
    """The changes in a line; a warning if there is more than one, or the code is unknown."""
    count, unknown = len(found.factors), found.changed_files is None
    told = {0: "nothing differs", 1: "1 thing differs"}.get(count, f"{count} things differ")
    told += f": {describe(found.factors)}" if count else ""
    if count > 1 or unknown:
        told += ", and the code cannot be compared" if unknown else ""
        return f"warning: {told}; what a difference of the returns comes from cannot be told"
    if count:
        return told
    seed = "same seed" if found.seeds is None else f"only the seed differs, {found.seeds}"
    return f"same experiment: {seed}"


def report(found: RunDiff, code: str | None = None) -> str:
    """The differences for a terminal, the verdict last; `code` is shown in place of the names of files."""
    lines = [f"a  {found.a}", f"b  {found.b}"]
    for section in SECTIONS:
        shown = [code] if code and section == CODE else list(listed(found.differences, section))
        lines += ["", section if shown else f"{section}: equal", *shown]
    rows = [("", "a", "b"), *found.metrics]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines += ["", "metrics at the end"]
    lines += [f"  {name:{widths[0]}}  {a:>{widths[1]}}  {b:>{widths[2]}}" for name, a, b in rows]
    return "\n".join([*lines, "", *(f"note: {note}" for note in found.notes), verdict(found)])


def to_dict(found: RunDiff) -> dict[str, Any]:
    """For programs: all of it, with the number of factors and the verdict."""
    return asdict(found) | {"things": len(found.factors), "verdict": verdict(found)}
