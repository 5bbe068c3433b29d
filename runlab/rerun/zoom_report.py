"""The findings of `zoom`, and their text for a terminal."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from runlab.analysis.traces import ITERATION
from runlab.config.texts import few
from runlab.rerun.operations import CAUSES, Finding, LoggedOperation
from runlab.rerun.ulp import ArrayDifference

_LISTED = 12  # items of an event; a state may have thousands


@dataclass(slots=True)
class Zoom:
    """The outcome of `zoom_in`, ready for JSON.

    The runs were run again with the code of their commits, from their common checkpoint after
    `from_env_steps` environment steps; None is the beginning. They diverge in `event` number `index` of
    `iteration`; `event` is None if the runs did different things there. `items` are all items that both runs
    have in the event, in causal order, and `first` is the first that differs. `note` explains a missing
    result.
    """

    commit_a: str
    commit_b: str
    from_env_steps: int | None
    iteration: int
    event: str | None = None
    index: int = 0
    items: dict[str, ArrayDifference] = field(default_factory=dict)
    first: str | None = None
    finding: Finding | None = None
    note: str | None = None


def place_name(event: str, index: int) -> str:
    """An event of an iteration, for people."""
    if event == ITERATION:
        return "its end"
    return f"{event} {index:,}" if index or event in ("policy_step", "step", "update") else event


def report(zoom: Zoom) -> str:
    """The text for a terminal, the finding first."""
    verdict = f"iteration {zoom.iteration:,}"
    if zoom.event is not None:
        verdict += f", {place_name(zoom.event, zoom.index)}"
    if zoom.first is not None:
        verdict += f": {zoom.first}, {_words(zoom.items[zoom.first])}"
    start = "the beginning"
    if zoom.from_env_steps is not None:
        start = f"the checkpoint after {zoom.from_env_steps:,} environment steps"
    lines = [f"zoom: {verdict}", ""]
    lines.append(f"  both runs were run again from {start}, and repeated their own records")
    a, b = zoom.commit_a[:12], zoom.commit_b[:12]
    lines.append(f"  code   {a if a == b else f'a {a}, b {b}'}")
    if equal := [name for name, diff in zoom.items.items() if diff.differing == 0]:
        lines.append(f"  equal  {few(equal, _LISTED)}")
    differing = {name: diff for name, diff in zoom.items.items() if diff.differing != 0}
    for name, diff in itertools.islice(differing.items(), _LISTED):
        lines.append(f"  {name}  {diff.dtypes[0]} {diff.shapes[0]}: {_words(diff)}")
        if name == zoom.first and diff.values is not None and diff.hexes is not None:
            lines.append(f"    first at {diff.first}")
            width = max(map(len, diff.values))
            sides = zip("ab", diff.values, diff.hexes, strict=True)
            lines += [f"      {side}  {value:{width}}  {digits}" for side, value, digits in sides]
    if len(differing) > _LISTED:
        lines.append(f"  and {len(differing) - _LISTED} more items differ; json=true lists them all")
    if zoom.finding is not None:
        lines += ["", *_finding(zoom.finding, zoom.first or "")]
    if zoom.note is not None:
        lines += ["", f"  {zoom.note}"]
    return "\n".join(lines)


def _words(diff: ArrayDifference) -> str:
    """A difference in one line."""
    if diff.differing is None:
        both = zip(diff.dtypes, diff.shapes, strict=True)
        return "another shape or type: a {}, b {}".format(*(f"{dtype} {shape}" for dtype, shape in both))
    share = 100 * diff.differing / max(1, diff.size)
    text = f"{diff.differing:,} of {diff.size:,} element{'s' * (diff.size != 1)} ({share:.3g} %)"
    return text if diff.max_ulp is None else f"{text}, {diff.max_ulp:,} ULP, median {diff.median_ulp:,.6g}"


def _finding(finding: Finding, item: str) -> Iterator[str]:
    names = ["no operation" if side is None else side.operation for side in (finding.a, finding.b)]
    text = CAUSES[finding.kind].format(a=names[0], b=names[1], item=item)
    if finding.logged_from:
        text += f"; {finding.agreeing:,} operations before it, from {finding.logged_from} on, agree"
    yield f"  {text}"
    a, b = _details(finding.a), _details(finding.b)
    for title in a or b:
        sides = [each[title] for each in (a, b) if each]
        for name, texts in zip([""] if sides[0] == sides[-1] else [" a", " b"], sides, strict=False):
            yield from (f"    {title}{name}  {text}" for text in texts)


def _details(side: LoggedOperation | None) -> dict[str, list[str]]:
    if side is None:
        return {}
    return {"with": [side.arguments], "in": side.source[:2], "gradient of": side.forward_source[:1]}
