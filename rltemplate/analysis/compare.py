"""Comparison of two recorded runs: where their traces diverge, what to look at, and what else differs."""

from __future__ import annotations

import shlex
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rltemplate.analysis import traces
from rltemplate.analysis.advice import look_at
from rltemplate.analysis.differences import SECTIONS, Difference, changed_files, differences, listed
from rltemplate.analysis.runs import Run, load_run
from rltemplate.analysis.traces import Divergence, Trace, check_comparable, first_difference, open_trace
from rltemplate.run.paths import TRACE

IDENTICAL: Literal["identical"] = "identical"
DIVERGED: Literal["diverged"] = "diverged"
SHORTER: Literal["shorter"] = "shorter"


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two runs; `iterations` are complete, and took `env_steps`, as its trace says."""

    run: str
    run_dir: str
    status: str
    iterations: int
    env_steps: int


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
    trace_a, trace_b = (open_trace(run.dir, _why_no_trace(run)) for run in runs)
    check_comparable(trace_a, trace_b)
    divergence = first_difference(trace_a, trace_b)
    found = differences(*runs, changed_files(*runs))
    verdict: Literal["identical", "diverged", "shorter"] = IDENTICAL
    advice: list[str] = []
    if divergence is not None or trace_a.lines != trace_b.lines:
        verdict = SHORTER if divergence is None else DIVERGED
        advice = list(look_at(divergence, trace_a, found, diff_command(str(a), str(b))))
    sides = _side(runs[0], trace_a), _side(runs[1], trace_b)
    return Comparison(verdict, *sides, trace_a.detail, divergence, advice, found)


def _side(run: Run, trace: Trace) -> Side:
    return Side(run.dir.name, str(run.dir), run.record.status, *trace.reach)


def _why_no_trace(run: Run) -> str:
    detail = run.config.get("trace")
    if detail == "off":
        return "the run was made with trace=off, make it again with trace=iteration or trace=step"
    if detail is None:
        return "make the run again with trace=iteration or trace=step"
    return f"it was made with trace={detail}, so the file was removed or the run ended before it began"


def diff_command(a: str, b: str) -> str:
    """The command that shows the changes of the code between the runs in two folders."""
    return f"make diff a={_name(Path(a))} b={_name(Path(b))} code=full"


def _name(folder: Path) -> str:
    """The id of a run below `runs/`, else its folder."""
    usual = folder.parent.parent == Path("runs").absolute()
    return shlex.quote(folder.name if usual else str(folder))


# --- The report ------------------------------------------------------------------------------------------

_WIDTH = 110
_NO_BREAK = "\u00a0"
_LISTED = 12  # differences of a section; the machine of another kind easily brings a hundred
_EVENTS = {
    "reset": "first reset",
    "start": "at its start",
    "end": "at its end",
}
_COUNTED = ("policy_step", "step", "update")  # events of which an iteration has many


def headline(comparison: Comparison) -> str:
    """The verdict in one line."""
    a, b, at = comparison.a, comparison.b, comparison.divergence
    if at is not None:
        return f"diverged {_place(at, comparison.detail)}: {_item(at)}"
    if comparison.verdict == SHORTER:
        return f"shorter: equal as far as both go; a ends after {_reach(a)}, b after {_reach(b)}"
    return f"identical: {_reach(a)}"


def _reach(side: Side) -> str:
    plural = "" if side.iterations == 1 else "s"
    return f"{side.iterations:,} iteration{plural} ({side.env_steps:,} environment steps)"


def _place(at: Divergence, detail: str) -> str:
    if at.event in traces.BEFORE_TRAINING:
        return f"before the first iteration, {_EVENTS[at.event]}"
    begin = at.env_steps_before + 1
    span = f"from {begin:,}" if at.env_steps_after is None else f"{begin:,} to {at.env_steps_after:,}"
    iteration = f"in iteration {at.iteration:,} (environment steps {span})"
    if at.event == traces.ITERATION:
        return iteration if detail != traces.STEP_DETAIL else f"{iteration}, at its end"
    index = f" {at.index:,}" if at.index or (at.event in _COUNTED and at.index == 0) else ""
    return f"{iteration}, {_EVENTS.get(at.event, at.event + index)}"


def _item(at: Divergence) -> str:
    texts = {
        traces.OTHER_EVENT: f"a goes on with {at.a}, b with {at.b}",
        traces.OTHER_ITEMS: f"other items; only in a: {at.a}; only in b: {at.b}",
        traces.OTHER_ENV_STEPS: f"it ends after {at.a} environment steps in a, {at.b} in b",
        traces.OTHER_CHAIN: "chain digest",
    }
    return texts.get(at.item, at.item)


def report(comparison: Comparison) -> str:
    """The comparison for a terminal, the verdict first."""
    lines = [headline(comparison), ""]
    for name, side in (("a", comparison.a), ("b", comparison.b)):
        lines.append(f"  {name}  {side.run_dir}  ({side.status}, {_reach(side)})")
    at = comparison.divergence
    if at is not None:
        lines += ["", f"line {at.line:,} of {TRACE}, equal before it"]
        first = at.item if at.item in traces.NOT_FINGERPRINTS else f"{at.item}  a {at.a}  b {at.b}"
        for title, names in (("equal", at.equal_before), ("first", [first]), ("also", at.further)):
            lines += _wrapped(", ".join(names), f"  {title:7}") if names else []
    if comparison.look_at:
        lines += ["", "look at"]
        command = diff_command(comparison.a.run_dir, comparison.b.run_dir)
        for i, text in enumerate(comparison.look_at, start=1):
            lines += _wrapped(text, f"  {i}. ", command)
    found = comparison.differences
    if not found:
        return "\n".join([*lines, "", f"nothing else differs: {', '.join(SECTIONS)} are equal"])
    lines += ["", f"what else differs ({len(found)})"]
    for section in dict.fromkeys(one.section for one in found):
        lines += [f"  {section}", *(f"  {line}" for line in listed(found, section, _LISTED))]
    return "\n".join(lines)


def _wrapped(text: str, start: str, unbroken: str = "") -> list[str]:
    """Lines of `text`; its part `unbroken`, a command to be copied, stays on one of them."""
    text = text.replace(unbroken, unbroken.replace(" ", _NO_BREAK)) if unbroken else text
    lines = textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=start,
        subsequent_indent=" " * min(len(start), 40),
        break_on_hyphens=False,
        break_long_words=not unbroken,
    )
    return [line.replace(_NO_BREAK, " ") for line in lines]
