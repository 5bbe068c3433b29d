"""The first line in which two traces differ, and the first item in it.

A trace lists fingerprints in causal order, so its first difference is where the runs diverged. It may have
hundreds of megabytes: it is read line by line, and only the lines that locate the difference are parsed.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rltemplate.run.paths import TRACE
from rltemplate.run.state import START
from rltemplate.run.trace import FORMAT, VERSION
from rltemplate.types import ConfigError

DIGITS = 16  # hexadecimal digits of one fingerprint
STEP_DETAIL = "step"
ITERATION = "iteration"  # the event that ends one

# Differences other than the fingerprint of an item; each takes the place of an item's name.
OTHER_EVENT = "event"  # one run continues with another event than the other
OTHER_ITEMS = "items"  # an event has other items
OTHER_ENV_STEPS = "env_steps"  # an iteration took another number of environment steps
OTHER_CHAIN = "chain"  # the digest of everything before, though everything before is equal
NOT_FINGERPRINTS = (OTHER_EVENT, OTHER_ITEMS, OTHER_ENV_STEPS, OTHER_CHAIN)

_ITERATION_LINE, _ITEMS_LINE = b'["iteration",', b'["items",'


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference between two traces.

    `line` counts from 1, `iteration` from 0. `env_steps_after` is None if neither trace completes the
    iteration. `index` is the number of the event in the iteration, from 0; None for a line that names items.
    `item` is the first to differ, by name or one of NOT_FINGERPRINTS. `further` items of the line differ too,
    the items in `equal_before` do not. `a` and `b` are the fingerprints, or descriptions.
    """

    line: int
    iteration: int
    env_steps_before: int
    env_steps_after: int | None
    event: str
    index: int | None
    item: str
    further: list[str]
    equal_before: list[str]
    a: str
    b: str


@dataclass(frozen=True, slots=True)
class Trace:
    """A complete trace file, of which `reach` is the number of complete iterations and environment steps."""

    run: str
    path: Path
    detail: str
    digest: str
    algo: str
    lines: int
    reach: tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Line:
    """A parsed line: names of items or their fingerprints, with `env_steps` at the end of an iteration."""

    event: str
    index: int | None = None
    digits: str = ""
    names: tuple[str, ...] = ()
    env_steps: int | None = None
    chain: str = ""

    def __str__(self) -> str:
        if self.index is None:
            return f"a list of the items of {self.event}"
        return f"{'the end of ' * (self.event == ITERATION)}{self.event} {self.index}"


def open_trace(run_dir: Path, when_missing: str) -> Trace:
    """Check the first and the last line of the trace in `run_dir`, and find its reach.

    Raises ConfigError in one line if it is missing (the message ends with `when_missing`) or incomplete.
    """
    run, path = run_dir.name, run_dir / TRACE
    ended = line = b""
    number = 1
    try:
        with path.open("rb") as file:
            first = file.readline()
            for number, line in enumerate(file, start=2):  # noqa: B007
                if line.startswith(_ITERATION_LINE) and line.endswith(b"\n"):
                    ended = line
    except FileNotFoundError:
        raise ConfigError(f"{run}: has no {TRACE}; {when_missing}") from None
    except OSError as error:
        raise ConfigError(f"{run}: {TRACE} cannot be read, {error.strerror}") from None
    try:
        head = json.loads(first)
        known = (head["format"], head["version"]) == (FORMAT, VERSION)
        detail, digest, algo = (str(head[key]) for key in ("detail", "digest", "algo"))
    except (ValueError, TypeError, KeyError):
        known = False
    if not known:
        raise ConfigError(f"{run}: {TRACE} is no trace of this version")
    reach = _reach(ended)
    if line and not (line.endswith(b"\n") and _parse(line)):
        raise ConfigError(f"{run}: {TRACE} breaks off after {reach[0]} iterations; was the run cut off?")
    return Trace(run, path, detail, digest, algo, number, reach)


def _reach(line: bytes) -> tuple[int, int]:
    """Reach of a trace whose last complete iteration ends with this line; an empty line means none."""
    ended = _parse(line)
    if ended is None or ended.index is None or ended.env_steps is None:
        return 0, 0
    return ended.index + 1, ended.env_steps


def first_difference(a: Trace, b: Trace) -> Divergence | None:
    """The first difference; None if the traces are equal up to the end of the shorter one.

    Raises ConfigError if a line at the difference is damaged.
    """
    names: dict[str, tuple[str, ...]] = {}
    ended = b""
    with a.path.open("rb") as lines_a, b.path.open("rb") as lines_b:
        next(lines_a)
        next(lines_b)
        for number, (line_a, line_b) in enumerate(zip(lines_a, lines_b, strict=False), start=2):  # noqa: B007
            if line_a != line_b:
                break
            if line_a.startswith(_ITERATION_LINE):
                ended = line_a
            elif line_a.startswith(_ITEMS_LINE) and (items := _parse(line_a)):
                names[items.event] = items.names
        else:
            return None
        following = itertools.chain([line_a, line_b], lines_a, lines_b)
        _, after = _reach(next((line for line in following if line.startswith(_ITERATION_LINE)), b""))
    one, other = _parse(line_a), _parse(line_b)
    differences = one and other and _differing(one, other, names)
    if not one or not other or not differences:
        raise ConfigError(f"line {number} of {TRACE} is damaged in {a.run} or in {b.run}")
    iteration, before = _reach(ended)
    (item, *further), equal, value_a, value_b = differences
    return Divergence(
        line=number,
        iteration=iteration,
        env_steps_before=before,
        env_steps_after=after or None,
        event=one.event,
        index=one.index,
        item=item,
        further=[name for name in further if name not in NOT_FINGERPRINTS],
        equal_before=equal,
        a=value_a,
        b=value_b,
    )


def _differing(
    one: _Line, other: _Line, names: Mapping[str, tuple[str, ...]]
) -> tuple[list[str], list[str], str, str] | None:
    """Items that differ, items that are equal before the first of them, and its values; None: damaged."""
    listed = bool(one.names or other.names)
    if one.event != other.event or (one.index != other.index and not listed):
        return [OTHER_EVENT], [], str(one), str(other)
    if listed:
        items_a, items_b = (line.names or names.get(line.event, ()) for line in (one, other))
        only_a, only_b = (
            ", ".join(name for name in mine if name not in theirs) or "nothing that the other lacks"
            for mine, theirs in ((items_a, items_b), (items_b, items_a))
        )
        return [OTHER_ITEMS], [], only_a, only_b
    values_a, values_b = (_values(line, names.get(line.event, ())) for line in (one, other))
    differing = [name for name in values_a if values_b and values_a[name] != values_b[name]]
    if not differing:  # the same values in another spelling, or too few digits
        return None
    first = differing[0]
    equal = itertools.takewhile(lambda name: name != first, values_a)
    return differing, [name for name in equal if name != OTHER_ENV_STEPS], values_a[first], values_b[first]


def _values(line: _Line, items: tuple[str, ...]) -> dict[str, str]:
    """Values of a line by item, in causal order; none if they are not as many as the items."""
    if len(line.digits) != DIGITS * len(items):
        return {}
    values = {name: line.digits[i * DIGITS : (i + 1) * DIGITS] for i, name in enumerate(items)}
    if line.env_steps is None:
        return values
    start = {name: values.pop(name) for name in items if name.startswith(f"{START}/")}
    return start | {OTHER_ENV_STEPS: f"{line.env_steps:,}"} | values | {OTHER_CHAIN: line.chain}


def _parse(line: bytes) -> _Line | None:
    try:
        values = json.loads(line)
    except ValueError:
        return None
    match values:
        case ["items", str(event), [*names]]:
            return _Line(event, names=tuple(map(str, names)))
        case ["iteration", int(index), int(env_steps), str(digits), str(chain)]:
            return _Line(ITERATION, index, digits, env_steps=env_steps, chain=chain)
        case [str(event), int(index), str(digits)] if event != ITERATION:
            return _Line(event, index, digits)
    return None
