"""The first line in which two traces differ, and the first item in it.

A trace lists fingerprints in causal order, so its first difference is where the runs diverged. It may have
hundreds of megabytes: it is read line by line, and only the lines that locate the difference are parsed.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, NamedTuple, NoReturn

from rltemplate.run.paths import TRACE
from rltemplate.run.state import END, START
from rltemplate.types import ConfigError

FORMAT = "rltemplate-trace"
VERSION = 1
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
_HEX = re.compile("[0-9a-f]*")
_DEVICES = {"xxh3_64": "the CPU", "xxh3_64_cuda": "CUDA", "keyed_sum_64": "CUDA"}  # by kind of digest


class Reach(NamedTuple):
    """Length of a trace: complete iterations, and environment steps in them."""

    iterations: int
    env_steps: int


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference between two traces.

    `line` counts from 1, `iteration` from 0. `env_steps_after` is None if neither trace completes the
    iteration. `index` is the number of the "step" or "update" in the iteration, from 0; None for a line that
    names items. `item` is the first to differ, by name or one of NOT_FINGERPRINTS. `further` items of the
    line differ too, the items in `equal_before` do not. `a` and `b` are the fingerprints, or descriptions.
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

    def damaged(self, number: int, why: str) -> NoReturn:
        """Raise ConfigError about the line with this number."""
        raise ConfigError(f"{self.run}: line {number} of {TRACE} is damaged: {why}")


@dataclass(frozen=True, slots=True)
class _Items:
    """A line that names the items of an event."""

    event: str
    names: list[str]

    def __str__(self) -> str:
        return f"a list of the items of {self.event}"


@dataclass(frozen=True, slots=True)
class _Event:
    """A line with fingerprints; `env_steps` and `chain` only at the end of an iteration."""

    event: str
    index: int
    digits: str
    env_steps: int | None = None
    chain: str = ""

    def __str__(self) -> str:
        return (
            f"the end of iteration {self.index}" if self.event == ITERATION else f"{self.event} {self.index}"
        )


def open_trace(run_dir: Path, when_missing: str) -> Trace:
    """Check the first and the last line of the trace in `run_dir`, and find its reach.

    Raises ConfigError in one line if it is missing (the message ends with `when_missing`) or incomplete.
    """
    run, path = run_dir.name, run_dir / TRACE
    try:
        with path.open("rb") as file:
            return _read(run, path, file)
    except FileNotFoundError:
        raise ConfigError(f"{run}: has no {TRACE}; {when_missing}") from None
    except OSError as error:
        raise ConfigError(f"{run}: {TRACE} cannot be read, {error.strerror}") from None


def _read(run: str, path: Path, file: BinaryIO) -> Trace:
    first = file.readline()
    if not first:
        raise ConfigError(f"{run}: {TRACE} is empty; the run was cut off")
    if not first.endswith(b"\n") and first.startswith(b'{"format"'):
        raise ConfigError(f"{run}: {TRACE} breaks off in its first line; the run was cut off")
    try:
        header = json.loads(first)
    except ValueError:
        header = None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ConfigError(f"{run}: {TRACE} is no trace; its first line is not the header of one")
    if header.get("version") != VERSION:
        raise ConfigError(
            f"{run}: {TRACE} has format version {header.get('version')!r}, "
            f"but this code reads version {VERSION}"
        )
    ended = line = b""
    number = 1
    for line in file:
        number += 1
        if line.startswith(_ITERATION_LINE):
            ended, before = line, ended
    whole = not line or (line.endswith(b"\n") and _parse(line) is not None)
    reach = _reach(ended if whole or ended is not line else before)
    if not whole:
        after = (
            f"after iteration {reach.iterations - 1}" if reach.iterations else "before the end of iteration 0"
        )
        raise ConfigError(
            f"{run}: {TRACE} breaks off in the middle of a line {after}; "
            "the run was cut off, or is still writing"
        )
    detail, digest, algo = (str(header.get(key)) for key in ("detail", "digest", "algo"))
    return Trace(run, path, detail, digest, algo, number, reach)


def _reach(line: bytes) -> Reach:
    """Reach of a trace whose last complete iteration ends with this line; an empty line means none."""
    ended = _parse(line)
    if not isinstance(ended, _Event) or ended.env_steps is None:
        return Reach(0, 0)
    return Reach(ended.index + 1, ended.env_steps)


def check_comparable(a: Trace, b: Trace) -> None:
    """Raise ConfigError, in one line, unless equal runs would have written equal traces."""
    devices = [_DEVICES.get(trace.digest, "another device") for trace in (a, b)]
    if a.algo != b.algo:
        raise ConfigError(f"other algorithms: {a.run} ran {a.algo}, {b.run} {b.algo}")
    if a.detail != b.detail:
        raise ConfigError(
            f"other details: {a.run} was traced with trace={a.detail}, {b.run} with trace={b.detail}; "
            "make one of them again with the detail of the other"
        )
    if a.digest != b.digest:
        raise ConfigError(f"other devices: {a.run} ran on {devices[0]}, {b.run} on {devices[1]}")


def first_difference(a: Trace, b: Trace) -> Divergence | None:
    """The first difference; None if the traces are equal up to the end of the shorter one.

    Raises ConfigError if a line at the difference is damaged.
    """
    names: dict[str, list[str]] = {}
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
                names[items.event] = items.names if isinstance(items, _Items) else []
        else:
            return None
        rest = itertools.chain([line_a], lines_a), itertools.chain([line_b], lines_b)
        env_steps_after = next((end for lines in rest if (end := _next_env_steps(lines)) is not None), None)
    in_a, in_b = _parsed(a, number, line_a), _parsed(b, number, line_b)
    before = _reach(ended)
    divergence = Divergence(
        line=number,
        iteration=before.iterations,
        env_steps_before=before.env_steps,
        env_steps_after=env_steps_after,
        event=in_a.event,
        index=in_a.index if isinstance(in_a, _Event) else None,
        item=OTHER_EVENT,
        further=[],
        equal_before=[],
        a=str(in_a),
        b=str(in_b),
    )
    if in_a.event != in_b.event:
        return divergence
    if isinstance(in_a, _Items) or isinstance(in_b, _Items):
        listed = [one.names if isinstance(one, _Items) else names.get(one.event, []) for one in (in_a, in_b)]
        only = [", ".join(name for name in one if name not in other) for one, other in (listed, listed[::-1])]
        only_a, only_b = (text or "nothing that the other lacks" for text in only)
        return replace(divergence, item=OTHER_ITEMS, a=only_a, b=only_b)
    if in_a.index != in_b.index:
        return divergence
    values_a, values_b = _values(a, number, in_a, names), _values(b, number, in_b, names)
    differing = [name for name in values_a if values_a[name] != values_b[name]]
    if not differing:
        a.damaged(number, f"it has the values of {b.run} in another spelling")
    item = differing[0]
    return replace(
        divergence,
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


def _values(trace: Trace, number: int, event: _Event, names: Mapping[str, list[str]]) -> dict[str, str]:
    """Values of a line by item, in causal order."""
    if event.event not in names:
        trace.damaged(number, f"nothing before it names the items of {event.event}")
    items, digits = names[event.event], event.digits
    if len(digits) != DIGITS * len(items):
        trace.damaged(number, f"{len(items)} items need {DIGITS * len(items)} digits")
    values = {name: digits[i * DIGITS : (i + 1) * DIGITS] for i, name in enumerate(items)}
    if event.env_steps is None:
        return values
    start = {name: values.pop(name) for name in items if name.startswith(AT_START)}
    return start | {OTHER_ENV_STEPS: f"{event.env_steps:,}"} | values | {OTHER_CHAIN: event.chain}


def _parsed(trace: Trace, number: int, line: bytes) -> _Items | _Event:
    parsed = _parse(line)
    if parsed is None:
        trace.damaged(number, "it is no line of a trace")
    return parsed


def _parse(line: bytes) -> _Items | _Event | None:
    try:
        values = json.loads(line)
    except ValueError:
        return None
    match values:
        case ["items", str(event), [*names]] if all(isinstance(name, str) for name in names):
            return _Items(event, names)
        case ["iteration", int(index), int(env_steps), str(digits), str(chain)] if _HEX.fullmatch(digits):
            return _Event(ITERATION, index, digits, env_steps, chain)
        case [str(event), int(index), str(digits)] if _HEX.fullmatch(digits) and event != ITERATION:
            return _Event(event, index, digits)
    return None
