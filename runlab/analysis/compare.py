"""Comparison of two recorded runs: where their traces diverge, what to look at, and what else differs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from runlab.analysis import traces
from runlab.analysis.differences import (
    CODE,
    CONFIGURATION,
    MACHINE,
    SECTIONS,
    SETTINGS,
    VERSIONS,
    Difference,
    RunDiff,
    causes_of_computation,
    diff_runs,
    listed,
)
from runlab.analysis.runs import Run, load_run, single_line
from runlab.analysis.traces import Divergence, RecordedTrace, first_difference, open_trace
from runlab.config.project import as_typed
from runlab.config.texts import few, from_here
from runlab.errors import ConfigError
from runlab.run.computed import OtherComputation
from runlab.run.paths import METRICS, TRACE
from runlab.run.read import Row
from runlab.run.trace import RESET

IDENTICAL, DIVERGED, SHORTER = "identical", "diverged", "shorter"
_LISTED = 12  # differences of a section; two kinds of machines may have a hundred


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two runs, with the complete iterations and environment steps of its trace."""

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

    `verdict`: IDENTICAL; DIVERGED, at `divergence`; or SHORTER, if the traces are equal up to the end of the
    shorter one. `look_at` are lines of advice, in the order in which to follow them. `differences`,
    `computation`, `not_recorded` and `notes` are those of `make diff`. `not_compared` are metrics that only
    one run logs.
    """

    verdict: str
    a: Side
    b: Side
    detail: str
    divergence: Divergence | None
    look_at: list[str]
    differences: list[Difference]
    computation: OtherComputation | None
    not_recorded: list[str]
    notes: list[str]
    not_compared: list[str]


def compare_runs(a: Path, b: Path) -> Comparison:
    """Compare the runs in two folders. Raises ConfigError, in one line, if they cannot be compared."""
    runs = load_run(a), load_run(b)
    comparison = compare_traces(*runs, *map(recorded_trace, runs))
    if comparison.verdict != DIVERGED:
        comparison.notes.extend(_rows_note(*runs))
    return comparison


def recorded_trace(run: Run) -> RecordedTrace:
    """The whole iterations of a run's trace; ConfigError if it cannot be compared with another one."""
    missing = f"it was made with trace={run.config.get('trace')}"
    if why := run.record.left_out.get(TRACE):
        missing = f"it is too long for the run's ref ({why}); give the run's folder"
    trace = open_trace(run.dir, missing)
    if trace.first_end(range(len(trace.lines)))[0] != 1:
        raise ConfigError(f"{trace.run}: its trace has no first iteration, so it cannot be compared")
    return trace


def compare_traces(a: Run, b: Run, trace_a: RecordedTrace, trace_b: RecordedTrace) -> Comparison:
    """Compare two runs whose traces are read already."""
    for key, what in (("algo", "algo"), ("trace", "detail")):  # equal in equal runs
        one, other = getattr(trace_a, what), getattr(trace_b, what)
        if one != other:
            raise ConfigError(
                f"{trace_a.run} was made with {key}={one}, {trace_b.run} with {key}={other}: "
                f"only runs with the same {key} can be compared"
            )
    sides = (a, trace_a.items - trace_b.items), (b, trace_b.items - trace_a.items)
    alone = [sorted(items & {*run.record.final_metrics, *run.last_row}) for run, items in sides]
    not_compared = [*alone[0], *alone[1]]
    at, diff = first_difference(trace_a, trace_b, left_out=not_compared), diff_runs(a, b)
    same_length = trace_a.reach == trace_b.reach
    pairs = zip("ab", alone, strict=True)
    notes = [
        f"not compared, for only {side} logs it: {few(names, _LISTED)}" for side, names in pairs if names
    ]
    verdict = DIVERGED if at is not None else IDENTICAL if same_length else SHORTER
    advice = [] if at is None else [*_look_at(at, trace_a.detail, diff, diff_command(a.dir, b.dir))]
    side_a, side_b = (
        Side(trace.run, str(run.dir), run.record.status, *trace.reach)
        for run, trace in ((a, trace_a), (b, trace_b))
    )
    return Comparison(
        verdict=verdict,
        a=side_a,
        b=side_b,
        detail=trace_a.detail,
        divergence=at,
        look_at=advice,
        differences=diff.differences,
        computation=diff.computation,
        not_recorded=diff.not_recorded,
        notes=notes + diff.notes,
        not_compared=not_compared,
    )


def differing_metrics(a: Row, b: Row) -> list[str]:
    """The metrics of two rows that differ, or are in one of them only; times are not compared."""
    names = [name for name in {**a, **b} if not name.startswith(("time/", "wall_time"))]
    return [name for name in names if str(a.get(name)) != str(b.get(name))]  # NaN is not equal to NaN


def _rows_note(a: Run, b: Run) -> Iterator[str]:
    """A note if rows of metrics differ where traces do not: evaluations and means are not in a trace.

    Rows of other intervals have other means, and the same evaluations.
    """
    try:
        rows_a, rows_b = a.rows, {row["env_steps"]: row for row in b.rows}
    except ConfigError as error:
        yield f"rows of metrics were not compared: {error}"
        return
    same_intervals = all(row["env_steps"] == steps for row, steps in zip(rows_a, rows_b, strict=False))
    for row in rows_a:
        other = rows_b.get(row["env_steps"], {})
        both = [name for name in differing_metrics(row, other) if name in row and name in other]
        if names := [name for name in both if same_intervals or name.startswith("eval/")]:
            first, values = names[0], f"a {row[names[0]]:.6g}, b {other[names[0]]:.6g}"
            yield (
                f"the traces are equal, but rows of {METRICS} differ, first after {row['env_steps']:,.0f} "
                f"environment steps: {first} ({values}){''.join(f', {name}' for name in names[1:_LISTED])}"
            )
            return


def diff_command(a: Path, b: Path) -> str:
    """The command that shows the changes of the code between the runs in two folders."""
    return f"{as_typed('diff')} a={from_here(a)} b={from_here(b)} code=full"


def _look_at(at: Divergence, detail: str, diff: RunDiff, show_code: str) -> Iterator[str]:
    differences = diff.differences
    if any(one.key == "seed" for one in differences):
        yield "The seeds differ, so the first weights and all random numbers do."
        return
    if diff.computation is not None:
        yield f"The runs compute {diff.computation}. {' '.join(_cures(diff.computation, differences))}"
    if any(one.section == CODE and one.affects_results for one in differences):
        yield f"The code differs: {show_code} shows what was changed."
    if at.event == traces.ITERATION and detail != traces.STEP_DETAIL and at.further:
        yield "Inside an iteration the first of the list need not be the first in time; trace=step tells it."
    yield "docs/comparing.md lists causes by item."


def _cures(computation: OtherComputation, differences: Sequence[Difference]) -> Iterator[str]:
    """Sentences about how two runs can compute alike."""
    causes = causes_of_computation(differences)
    if keys := causes[CONFIGURATION]:
        yield f"The configuration says so: {few(keys)}."
        return
    machines = causes[MACHINE]
    # What a library has chosen follows from a variable or the processor.
    variables = [key for key in causes[SETTINGS] if key.isupper()]
    settings = variables or ([] if machines else causes[SETTINGS])
    if settings:
        yield f"Give both the same {few(settings)}."
    if keys := causes[VERSIONS]:
        yield f"Install the same {few(keys)}."
    if any(key.startswith("gpu") for key in machines):
        yield "The GPUs or their drivers differ, and no level makes those agree."
    elif machines and computation.part == "convolution":
        yield "The processors differ, and no level makes convolutions agree; other networks do not use them."
    elif machines:
        yield "The processors differ: on CPUs that pass its check, determinism=profile gives the same bits."
    if not (settings or keys or machines or causes[CODE]):
        yield "Nothing in the records explains it: look for other files of the libraries, or microcode."


def headline(comparison: Comparison) -> str:
    """The verdict in one line."""
    a, b, at = comparison.a, comparison.b, comparison.divergence
    if at is not None:
        return f"diverged {_place(at, comparison.detail)}: {_item(at)}"
    if comparison.verdict == SHORTER:
        return f"shorter: equal as far as both go; a ends after {a}, b after {b}"
    return f"identical: {a}"


def _place(at: Divergence, detail: str) -> str:
    if at.event == RESET:
        return f"before the first iteration, {at.event}"
    span = f"{at.env_steps_before + 1:,} to {at.env_steps_after:,}"
    iteration = f"in iteration {at.iteration:,} (environment steps {span})"
    if at.event == traces.ITERATION:
        return iteration if detail != traces.STEP_DETAIL else f"{iteration}, at its end"
    if at.event == "start":
        return f"{iteration}, at its start"
    return f"{iteration}, {at.event} {at.index:,}"


def _item(at: Divergence) -> str:
    texts = {
        traces.OTHER_EVENT: f"a goes on with {at.a}, b with {at.b}",
        traces.OTHER_ITEMS: f"other items; only in a: {at.a}; only in b: {at.b}"
        if at.only_a or at.only_b
        else f"the items are in another order: a goes on with {at.a}, b with {at.b}",
        traces.OTHER_ENV_STEPS: f"it ends after {at.a} environment steps in a, {at.b} in b",
    }
    return texts.get(at.item, at.item)


def report(comparison: Comparison) -> str:
    """The comparison for a terminal, the verdict first."""
    at, differences = comparison.divergence, comparison.differences
    lines = [headline(comparison), ""]
    for name, side in (("a", comparison.a), ("b", comparison.b)):
        lines.append(f"  {name}  {side.run_dir}  ({side.status}, {side})")
    if at is not None:
        common = ", in the items that both have" * bool(at.only_a or at.only_b)
        lines += ["", f"line {at.line:,} of {TRACE}, equal before it{common}"]
        first = at.item if at.item in traces.NOT_FINGERPRINTS else f"{at.item}  a {at.a}  b {at.b}"
        named = [("equal", at.equal_before), ("first", [first]), ("also", at.further)]
        named += [("only a", at.only_a), ("only b", at.only_b)]
        lines += [f"  {title:7}{few(names, _LISTED)}" for title, names in named if names]
        lines += ["", "look at", *(f"  {i}. {text}" for i, text in enumerate(comparison.look_at, start=1))]
    computes = [] if comparison.computation is None else [f"    computes {comparison.computation}"]
    if differences or computes:
        lines += ["", f"what else differs ({len(differences) + len(computes)})"]
    else:
        equal = [section for section in SECTIONS if section not in comparison.not_recorded]
        lines += ["", f"nothing else differs: {', '.join(equal)} are equal"]
    for section in SECTIONS:
        shown = [f"  {line}" for line in listed(differences, section, _LISTED)]
        if section == MACHINE:
            shown = computes + shown
        lines += [f"  {section}", *shown] if shown else []
    if comparison.not_recorded:
        lines.append(f"not recorded by both, so not compared: {', '.join(comparison.not_recorded)}")
    return "\n".join([*lines, *(f"note: {single_line(note)}" for note in comparison.notes)])
