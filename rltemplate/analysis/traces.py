"""The first line in which two traces differ, and the first item in it.

A trace lists fingerprints in causal order, so its first difference is where the runs diverged. It may have
hundreds of megabytes: it is read line by line, and only the lines that locate the difference are parsed.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, NoReturn

from rltemplate.run.paths import TRACE
from rltemplate.run.state import END, START
from rltemplate.types import ConfigError

FORMAT, VERSION = "rltemplate-trace", 1
DIGITS = 16  # hexadecimal digits of one fingerprint
STEP_DETAIL = "step"
ITERATION = "iteration"  # the event that ends one
BEFORE_TRAINING = ("reset",)  # events that belong to no iteration

# Beginnings of the names of the algorithm's state at both ends of an iteration (run/state.py).
AT_START, AT_END = f"{START}/", f"{END}/"

# Differences other than the fingerprint of an item; each takes the place of an item's name.
OTHER_EVENT = "event"  # one run continues with another event than the other
OTHER_ITEMS = "items"  # an event has other items
OTHER_ENV_STEPS = "env_steps"  # an iteration took another number of environment steps
OTHER_CHAIN = "chain"  # the digest of everything before, though everything before is equal
NOT_FINGERPRINTS = (OTHER_EVENT, OTHER_ITEMS, OTHER_ENV_STEPS, OTHER_CHAIN)

_ITERATION_LINE, _ITEMS_LINE = b'["iteration",', b'["items",'


class Reach(NamedTuple):
    """Length of a trace: complete iterations, and environment steps in them."""

    iterations: int
    env_steps: int


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
    """A complete trace file; made by `open_trace`."""

    run: str
    path: Path
    detail: str
    digest: str
    algo: str
    lines: int
    reach: Reach


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
        return (
            f"the end of iteration {self.index}" if self.event == ITERATION else f"{self.event} {self.index}"
        )


def open_trace(run_dir: Path, when_missing: str) -> Trace:
    """Check the first and the last line of the trace in `run_dir`, and find its reach.

    Raises ConfigError in one line if it is missing (the message ends with `when_missing`) or incomplete.
    """
    run, path = run_dir.name, run_dir / TRACE
    ended = line = b""
    number = 1
    try:
        with path.open("rb") as file:
            header = _header(file.readline())
            for number, line in enumerate(file, start=2):  # noqa: B007
                if line.startswith(_ITERATION_LINE) and line.endswith(b"\n"):
                    ended = line
    except FileNotFoundError:
        raise ConfigError(f"{run}: has no {TRACE}; {when_missing}") from None
    except OSError as error:
        raise ConfigError(f"{run}: {TRACE} cannot be read, {error.strerror}") from None
    if header.get("format") != FORMAT or header.get("version") != VERSION:
        raise ConfigError(f"{run}: {TRACE} is no trace of this version")
    reach = _reach(ended)
    if line and not (line.endswith(b"\n") and _parse(line)):
        raise ConfigError(
            f"{run}: {TRACE} breaks off after {reach.iterations} iterations; was the run cut off?"
        )
    detail, digest, algo = (str(header.get(key)) for key in ("detail", "digest", "algo"))
    return Trace(run, path, detail, digest, algo, number, reach)


def _header(line: bytes) -> Mapping[str, object]:
    try:
        header = json.loads(line)
    except ValueError:
        return {}
    return header if isinstance(header, dict) else {}


def _reach(line: bytes) -> Reach:
    """Reach of a trace whose last complete iteration ends with this line; an empty line means none."""
    ended = _parse(line)
    if ended is None or ended.index is None or ended.env_steps is None:
        return Reach(0, 0)
    return Reach(ended.index + 1, ended.env_steps)


def check_comparable(a: Trace, b: Trace) -> None:
    """Raise ConfigError, in one line, unless equal runs would have written equal traces."""
    for what in ("algo", "detail", "digest"):
        one, other = getattr(a, what), getattr(b, what)
        if one != other:
            raise ConfigError(f"other {what}: the trace of {a.run} has {what} {one}, that of {b.run} {other}")


def first_difference(a: Trace, b: Trace) -> Divergence | None:
    """The first difference; None if the traces are equal up to the end of the shorter one.

    Raises ConfigError if a line at the difference is damaged.
    """
    names: dict[str, tuple[str, ...]] = {}
    ended = b""
    with a.path.open("rb") as lines_a, b.path.open("rb") as lines_b:
        next(lines_a)
        next(lines_b)
        for number, (line_a, line_b) in enumerate(zip(lines_a, lines_b, strict=False), start=2):
            if line_a != line_b:
                break
            if line_a.startswith(_ITERATION_LINE):
                ended = line_a
            elif line_a.startswith(_ITEMS_LINE):
                items = _parsed(a, number, line_a)
                names[items.event] = items.names
        else:
            return None
        rest = itertools.chain([line_a], lines_a), itertools.chain([line_b], lines_b)
        env_steps_after = next((end for lines in rest if (end := _next_env_steps(lines)) is not None), None)
    one, other = _parsed(a, number, line_a), _parsed(b, number, line_b)
    before = _reach(ended)
    found = Divergence(
        line=number,
        iteration=before.iterations,
        env_steps_before=before.env_steps,
        env_steps_after=env_steps_after,
        event=one.event,
        index=one.index,
        item=OTHER_EVENT,
        further=[],
        equal_before=[],
        a=str(one),
        b=str(other),
    )
    if one.event != other.event:
        return found
    if one.names or other.names:
        known = [line.names or names.get(line.event, ()) for line in (one, other)]
        only_a, only_b = (
            ", ".join(name for name in mine if name not in theirs) or "nothing that the other lacks"
            for mine, theirs in (known, known[::-1])
        )
        return replace(found, item=OTHER_ITEMS, a=only_a, b=only_b)
    if one.index != other.index:
        return found
    values_a, values_b = _values(a, number, one, names), _values(b, number, other, names)
    differing = [name for name in values_a if values_a[name] != values_b[name]]
    if not differing:  # the same values in another spelling
        _damaged(a, number)
    item = differing[0]
    return replace(
        found,
        item=item,
        further=_fingerprints(differing[1:]),
        equal_before=_fingerprints(itertools.takewhile(lambda name: name != item, values_a)),
        a=values_a[item],
        b=values_b[item],
    )


def _next_env_steps(lines: Iterable[bytes]) -> int | None:
    ended = next((line for line in lines if line.startswith(_ITERATION_LINE)), b"")
    return _reach(ended).env_steps or None


def _fingerprints(names: Iterable[str]) -> list[str]:
    return [name for name in names if name not in NOT_FINGERPRINTS]


def _values(trace: Trace, number: int, line: _Line, names: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """Values of a line by item, in causal order."""
    items, digits = names.get(line.event, ()), line.digits
    if len(digits) != DIGITS * len(items):
        _damaged(trace, number)
    values = {name: digits[i * DIGITS : (i + 1) * DIGITS] for i, name in enumerate(items)}
    if line.env_steps is None:
        return values
    start = {name: values.pop(name) for name in items if name.startswith(AT_START)}
    return start | {OTHER_ENV_STEPS: f"{line.env_steps:,}"} | values | {OTHER_CHAIN: line.chain}


def _parsed(trace: Trace, number: int, line: bytes) -> _Line:
    return _parse(line) or _damaged(trace, number)


def _damaged(trace: Trace, number: int) -> NoReturn:
    raise ConfigError(f"{trace.run}: line {number} of {TRACE} is damaged")


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
