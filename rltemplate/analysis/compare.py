"""Comparison of two recorded runs: where their traces diverge, what to look at, and what else differs."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rltemplate.analysis import traces
from rltemplate.analysis.differences import (
    CODE,
    CONFIGURATION,
    SECTIONS,
    Difference,
    changed_files,
    differences,
    listed,
)
from rltemplate.analysis.runs import load_run
from rltemplate.analysis.traces import Divergence, check_comparable, first_difference, open_trace
from rltemplate.config.command_args import few
from rltemplate.run.paths import TRACE

IDENTICAL: Literal["identical"] = "identical"
DIVERGED: Literal["diverged"] = "diverged"
SHORTER: Literal["shorter"] = "shorter"
_LISTED = 12  # differences of a section; the machine of another kind easily brings a hundred


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two runs; `iterations` are complete, and took `env_steps`, as its trace says."""

    run: str
    run_dir: str
    status: str
    iterations: int
    env_steps: int

    def __str__(self) -> str:
        plural = "" if self.iterations == 1 else "s"
        return f"{self.iterations:,} iteration{plural} ({self.env_steps:,} environment steps)"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Result of `compare_runs`.

    `verdict`: "identical"; "diverged", at `divergence`; or "shorter", if the traces are equal up to the end
    of the shorter one. `look_at` are lines of advice, in the order in which to follow them.
    """

    verdict: Literal["identical", "diverged", "shorter"]
    a: Side
    b: Side
    detail: str
    divergence: Divergence | None
    look_at: list[str]
    differences: list[Difference]


def compare_runs(a: Path, b: Path) -> Comparison:
    """Compare the runs in two folders. Raises ConfigError, in one line, if they cannot be compared."""
    runs = load_run(a), load_run(b)
    trace_a, trace_b = (
        open_trace(run.dir, f"it was made with trace={run.config.get('trace')}") for run in runs
    )
    check_comparable(trace_a, trace_b)
    divergence = first_difference(trace_a, trace_b)
    found = differences(*runs, changed_files(*runs))
    verdict: Literal["identical", "diverged", "shorter"] = IDENTICAL
    advice: list[str] = []
    if divergence is not None or trace_a.lines != trace_b.lines:
        verdict = SHORTER if divergence is None else DIVERGED
        advice = list(_look_at(divergence, trace_a.detail, found, diff_command(str(a), str(b))))
    side_a, side_b = (
        Side(run.dir.name, str(run.dir), run.record.status, *trace.reach)
        for run, trace in zip(runs, (trace_a, trace_b), strict=True)
    )
    return Comparison(verdict, side_a, side_b, trace_a.detail, divergence, advice, found)


def diff_command(a: str, b: str) -> str:
    """The command that shows the changes of the code between the runs in two folders."""
    return f"make diff a={_name(Path(a))} b={_name(Path(b))} code=full"


def _name(folder: Path) -> str:
    """The id of a run below `runs/`, else its folder."""
    usual = folder.parent.parent == Path("runs").absolute()
    return shlex.quote(folder.name if usual else str(folder))


def _look_at(
    at: Divergence | None, detail: str, found: Sequence[Difference], show_code: str
) -> Iterator[str]:
    """Lines of advice: known changes, then hints at the divergence `at`, which a shorter trace lacks."""
    counted: dict[str, list[Difference]] = {}
    for one in found:
        if one.affects_results:
            counted.setdefault(one.section, []).append(one)
    code = counted.pop(CODE, [])
    if any("(not recorded)" in (one.a, one.b) for one in code):
        yield "The code of a or b was not recorded, so it may differ."
    elif code:
        yield f"The code differs: {show_code} shows what was changed."
    if keys := counted.pop(CONFIGURATION, []):
        yield f"The configuration differs in {few([one.key for one in keys])}."
    if counted:
        yield f"{' and '.join(counted)} differ as well, as listed below.".capitalize()
    if at is None:
        return
    if at.event == traces.ITERATION and detail != traces.STEP_DETAIL and at.further:
        yield "Inside an iteration the first of the list need not be the first in time; trace=step tells it."
    yield "zoom=true names the operation that made the difference; docs/determinism.md lists causes by item."


# --- The report ------------------------------------------------------------------------------------------


def headline(comparison: Comparison) -> str:
    """The verdict in one line."""
    a, b, at = comparison.a, comparison.b, comparison.divergence
    if at is not None:
        return f"diverged {_place(at, comparison.detail)}: {_item(at)}"
    if comparison.verdict == SHORTER:
        return f"shorter: equal as far as both go; a ends after {a}, b after {b}"
    return f"identical: {a}"


def _place(at: Divergence, detail: str) -> str:
    if at.event in traces.BEFORE_TRAINING:
        return f"before the first iteration, {at.event}"
    begin = at.env_steps_before + 1
    span = f"from {begin:,}" if at.env_steps_after is None else f"{begin:,} to {at.env_steps_after:,}"
    iteration = f"in iteration {at.iteration:,} (environment steps {span})"
    if at.event == traces.ITERATION:
        return iteration if detail != traces.STEP_DETAIL else f"{iteration}, at its end"
    if at.event == "start":
        return f"{iteration}, at its start"
    return f"{iteration}, {at.event}{'' if at.index is None else f' {at.index:,}'}"


def _item(at: Divergence) -> str:
    texts = {
        traces.OTHER_EVENT: f"a goes on with {at.a}, b with {at.b}",
        traces.OTHER_ITEMS: f"other items; only in a: {at.a}; only in b: {at.b}",
        traces.OTHER_ENV_STEPS: f"it ends after {at.a} environment steps in a, {at.b} in b",
    }
    return texts.get(at.item, at.item)


def report(comparison: Comparison) -> str:
    """The comparison for a terminal, the verdict first."""
    at, found = comparison.divergence, comparison.differences
    lines = [headline(comparison), ""]
    lines += [
        f"  {name}  {side.run_dir}  ({side.status}, {side})"
        for name, side in (("a", comparison.a), ("b", comparison.b))
    ]
    if at is not None:
        lines += ["", f"line {at.line:,} of {TRACE}, equal before it"]
        first = at.item if at.item in traces.NOT_FINGERPRINTS else f"{at.item}  a {at.a}  b {at.b}"
        named = (("equal", at.equal_before), ("first", [first]), ("also", at.further))
        lines += [f"  {title:7}{few(names, _LISTED)}" for title, names in named if names]
    if comparison.look_at:
        lines += ["", "look at", *(f"  {i}. {text}" for i, text in enumerate(comparison.look_at, start=1))]
    if not found:
        return "\n".join([*lines, "", f"nothing else differs: {', '.join(SECTIONS)} are equal"])
    lines += ["", f"what else differs ({len(found)})"]
    for section in dict.fromkeys(one.section for one in found):
        lines += [f"  {section}", *(f"  {line}" for line in listed(found, section, _LISTED))]
    return "\n".join(lines)
