"""The findings of `zoom`, and their text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rltemplate.rerun.operations import (
    ARGUMENTS,
    BETWEEN,
    COMPUTED,
    DRAWN,
    OTHER_CODE,
    OTHER_OPERATIONS,
    OUTSIDE,
    UNSEEN,
    Finding,
)
from rltemplate.rerun.replay import RESULTS
from rltemplate.rerun.ulp import EQUAL, ArrayDifference

SHOWN_VALUES = 6
_SHOWN_FILES = 6
_WIDTH = 110


@dataclass(frozen=True, slots=True)
class Rerun:
    """One of the runs, run again. `problem` says why nothing is known of it; None if it repeated itself.

    `commit` has the code with which it was run; None stands for the present code. With a problem, `remark`
    says how its code may have caused it.
    """

    run: str
    problem: str | None = None
    commit: str | None = None
    remark: str | None = None

    @property
    def why(self) -> str:
        """Problem and remark."""
        return "; ".join(text for text in (self.problem, self.remark) if text)


@dataclass(frozen=True, slots=True)
class Item:
    """One item of the event. `values` are its first ones where only one of the runs could be run again."""

    name: str
    dtype: str
    shape: list[int]
    difference: ArrayDifference | None
    values: list[str] = field(default_factory=list)

    @property
    def differs(self) -> bool:
        """True if both runs have it with other bits."""
        return self.difference is not None and self.difference.kind != EQUAL


@dataclass(frozen=True, slots=True)
class Zoom:
    """The outcome of `zoom_in`, ready for JSON.

    The runs went on after `from_env_steps` environment steps, where both have a checkpoint; None stands for
    the beginning. They part in `event` number `index` of `iteration`; `event` is None where there is no event
    that both have. `items` are all of the event, in causal order, and `first` is the first that differs.
    `notes` are sentences about limits. `kept` is the folder with tensors and operations, if they are kept.
    `code` names the files that may change results and differ between the code of the runs, None if that is
    unknown; `code_shown_by` is the command that shows their lines.
    """

    a: Rerun
    b: Rerun
    from_env_steps: int | None
    iteration: int
    event: str | None = None
    index: int = 0
    items: list[Item] = field(default_factory=list)
    first: str | None = None
    finding: Finding | None = None
    notes: list[str] = field(default_factory=list)
    kept: str | None = None
    code: list[str] | None = None
    code_shown_by: str = ""


@dataclass(frozen=True, slots=True)
class Place:
    """An event of the iteration, and the one before it where that is in the iteration too."""

    event: str
    index: int
    since: tuple[str, int] | None = None

    def __str__(self) -> str:
        if self.event == RESULTS:
            return "its end"
        counted = self.index or self.event in ("policy_step", "step", "update")
        return f"{self.event} {self.index:,}" if counted else self.event

    @property
    def logged_from(self) -> str:
        """The event in which operations begin to be logged."""
        return str(self if self.since is None else Place(*self.since))


def instead(shown_by: str) -> str:
    """Advice where a run cannot be run again with its own code."""
    return f"instead: {shown_by} shows what was changed, and runs with trace=step are told apart to the step"


def headline(zoom: Zoom) -> str:
    """The finding in one line."""
    place = f"iteration {zoom.iteration:,}"
    if zoom.event is not None:
        place += f", {Place(zoom.event, zoom.index)}"
    first = next((item for item in zoom.items if item.name == zoom.first), None)
    if first is None:
        return place
    return f"{place}: {first.name}" + ("" if first.difference is None else f", {_words(first.difference)}")


def report(zoom: Zoom) -> str:
    """The text for a terminal."""
    start = "the beginning"
    if zoom.from_env_steps is not None:
        start = f"the checkpoint after {zoom.from_env_steps:,} environment steps"
    lines = [f"zoom: {headline(zoom)}", ""]
    failed = [(name, side) for name, side in (("a", zoom.a), ("b", zoom.b)) if side.problem is not None]
    if not failed:
        lines.append(f"  both runs were run again from {start}, and repeated their own records")
    for name, side in failed:
        lines += _wrapped(f"{name} cannot be run again here: {side.why}", "  ")
        lines.append(
            f"  so these are the values of {'b' if name == 'a' else 'a'} alone, run again from {start}"
        )
    lines += _code_lines(zoom)
    equal = [item.name for item in zoom.items if item.difference is not None and not item.differs]
    if equal:
        lines += _wrapped(", ".join(equal), "  equal  ")
    for item in zoom.items:
        if item.name not in equal:
            lines += _item(item, closely=item.name == zoom.first)
    if zoom.finding is not None:
        lines += ["", *_finding_lines(zoom.finding, zoom.first or "")]
    for note in zoom.notes:
        lines += ["", *_wrapped(note, "  ")]
    if zoom.kept is not None:
        lines += ["", f"  tensors and operations are in {zoom.kept}"]
    return "\n".join(lines)


def _code_lines(zoom: Zoom) -> Iterator[str]:
    """The code with which the runs were run again, and how it differs."""
    own = [f"{n} with commit {x.commit[:12]}" for n, x in (("a", zoom.a), ("b", zoom.b)) if x.commit]
    if own:
        yield f"  {' and '.join(own)}, as recorded and not as the code is now"
    if zoom.code:
        more = len(zoom.code) - _SHOWN_FILES
        files = ", ".join(zoom.code[:_SHOWN_FILES]) + (f" and {more} more" if more > 0 else "")
        yield from _wrapped(f"their code differs in {files}; to see the lines:", "  ")
        yield f"    {zoom.code_shown_by}"  # whole, to be copied
    if zoom.a.remark or zoom.b.remark:
        yield from _wrapped(instead(zoom.code_shown_by), "  ")


def _item(item: Item, closely: bool) -> Iterator[str]:
    start = f"  {item.name}  {item.dtype} {item.shape}: "
    difference = item.difference
    if difference is None:
        more = ", ..." if len(item.values) == SHOWN_VALUES else ""
        yield from _wrapped(f"{', '.join(item.values)}{more}", start)
        return
    yield from _wrapped(_words(difference), start)
    first = difference.first
    if closely and first is not None:
        yield f"    first at {first.coordinates}" if first.coordinates else "    its value"
        width = max(len(first.a), len(first.b))
        yield f"      a  {first.a:{width}}  {first.hex_a}  {first.bits_a}"
        yield f"      b  {first.b:{width}}  {first.hex_b}  {first.bits_b}"


def _words(difference: ArrayDifference) -> str:
    """A difference in one line."""
    if difference.shape_a != difference.shape_b:
        return f"another shape: a {difference.shape_a}, b {difference.shape_b}"
    if difference.dtype_a != difference.dtype_b:
        return f"another type: a {difference.dtype_a}, b {difference.dtype_b}"
    count = difference.differing or difference.only_bits
    plural = "" if difference.size == 1 else "s"
    share = 100 * count / max(1, difference.size)
    words = [f"{count:,} of {difference.size:,} element{plural} ({share:.3g} %)", difference.kind]
    if difference.max_ulp is not None:
        median = f", median {difference.median_ulp:,.6g}" if difference.differing > 1 else ""
        words.append(f"{difference.max_ulp:,} ULP{median}")
    if difference.max_scaled is not None:
        words.append(f"scaled {difference.max_scaled:,.3g}")
    if difference.max_over_rms is not None:
        words.append(f"{difference.max_over_rms:.1e} of the RMS")
    if difference.max_difference is not None and difference.dtype_a != "bool":
        words.append(f"by up to {difference.max_difference:,}")
    if difference.nan_a or difference.nan_b:
        words.append(f"NaN in a alone {difference.nan_a:,} times, in b alone {difference.nan_b:,} times")
    return ", ".join(words)


def _finding_lines(finding: Finding, item: str) -> Iterator[str]:
    yield from _wrapped(_cause(finding, item), "  ")
    operation = finding.operation
    if operation is None:
        return
    if finding.kind == OUTSIDE:
        yield from _wrapped(f"the first operation that saw the difference: {operation.name}", "  ")
    arguments = (operation.arguments_a, operation.arguments_b)
    yield from _of_each("with", [[] if text is None else [text] for text in arguments])
    for title, *sources in (
        ("in", operation.source, operation.source_b),
        ("the gradient of", operation.forward_source, operation.forward_source_b),
    ):
        yield from _of_each(title, [_of_interest(lines) for lines in sources])


def _cause(finding: Finding, item: str) -> str:
    name = "" if finding.operation is None else finding.operation.name
    since, count = finding.logged_from, finding.agreeing
    equal = f"{count:,} operations before it, from {since} on, have equal results"
    before = f"the {equal}"
    if count == 1:
        before = f"the one operation before it, from {since} on, has equal results"
    elif count == 0:
        before = f"it is the first from {since} on"
    if finding.kind == OTHER_CODE:
        return f"made by other code: {_of_both(finding)}; {equal}"
    if finding.kind == OUTSIDE:
        more = f"; the {count:,} operations before it have equal results" if count else ""
        return (
            f"made by no operation of torch that was logged: {item} came from elsewhere, such as the "
            f"environment or numpy, or from before {since}{more}"
        )
    return {
        COMPUTED: f"made by {name}: equal inputs, other results; {before}",
        ARGUMENTS: f"made by {name}: called with other arguments; {before}",
        DRAWN: f"drawn by {name}: its random stream was in another state; {before}",
        OTHER_OPERATIONS: (
            f"the runs carried out other operations: one went on with {name}, the other with "
            f"{finding.other_name}; {before}"
        ),
        UNSEEN: "made before operations can be logged, while networks and streams were built",
        BETWEEN: (
            "changed between two iterations: what the one before left behind is equal, and nothing of this "
            "one had been computed"
        ),
    }[finding.kind]


def _of_both(finding: Finding) -> str:
    """The operation of each run."""
    operation = finding.operation
    assert operation is not None
    if operation.arguments_b is None:
        return f"a went on with {operation.name}, and b with nothing like it"
    if operation.arguments_a is None:
        return f"b went on with {operation.name}, and a with nothing like it"
    return f"a went on with {operation.name}, b with {finding.other_name}"


def _of_each(title: str, both: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines about a and b: once where they are the same, or one of them has none."""
    apart = both[0] != both[1] and all(both)
    for name, lines in zip("ab", both, strict=True):
        if name == "b" and not apart and both[0]:
            return
        for i, line in enumerate(lines):
            start = "called from" if i else f"{'' if name == 'b' and apart else title:{len(title)}}"
            yield from _wrapped(line, f"    {start}{f'  {name}' if apart and i == 0 else ''}  ")


def _of_interest(source: Sequence[str]) -> list[str]:
    """The innermost line, and the one from which its file was called."""
    file = source[0].partition(":")[0] if source else ""
    return [*source[:1], *[line for line in source if line.partition(":")[0] != file][:1]]


def _wrapped(text: str, start: str) -> list[str]:
    indent = " " * min(len(start), 24)
    return textwrap.wrap(text, _WIDTH, initial_indent=start, subsequent_indent=indent, break_on_hyphens=False)
