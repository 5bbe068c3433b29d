"""Where two traces part: the first line that differs, and the first item in it.

A trace lists fingerprints in causal order, so its first difference is where the runs parted. The files may
have hundreds of megabytes: they are compared as bytes, and only the few lines that say where the difference
lies are parsed.
"""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from rltemplate.run.paths import TRACE
from rltemplate.run.state import END, START
from rltemplate.types import ConfigError

FORMAT = "rltemplate-trace"
VERSION = 1
DIGITS = 16  # hexadecimal digits of one fingerprint
STEP_DETAIL = "step"
ITERATION = "iteration"  # the event that ends one
BEFORE_TRAINING = ("init", "reset")  # events that belong to no iteration

# How the names of what an algorithm holds at both ends of an iteration begin (run/state.py).
AT_START, AT_END = f"{START}/", f"{END}/"

# What can differ besides the fingerprint of an item; each takes the place of an item's name.
OTHER_EVENT = "event"  # one run goes on with another event than the other
OTHER_ITEMS = "items"  # an event has other items
OTHER_ENV_STEPS = "env_steps"  # an iteration took another number of environment steps
OTHER_CHAIN = "chain"  # the digest of everything before, though everything before is equal
NOT_FINGERPRINTS = (OTHER_EVENT, OTHER_ITEMS, OTHER_ENV_STEPS, OTHER_CHAIN)

_CHUNK = 1 << 16  # bytes compared at once; a piece of each file stays in a core's cache
_ITERATION_LINE = b'["iteration",'
_ITEMS_LINE = b'["items",'
_HEX = re.compile("[0-9a-f]*")
_PLACES = {"xxh3_64": "the CPU", "keyed_sum_64": "CUDA"}  # which kind of digest is taken where


class Reach(NamedTuple):
    """How far a trace goes: iterations that ended, and environment steps in them."""

    iterations: int
    env_steps: int


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference between two traces.

    `line` counts from 1, `iteration` from 0; `env_steps_after` it is None where no trace goes so far. `index`
    is which "step" or "update" of the iteration it was, from 0; None for a line that names items.
    `item` is the first that differs, by name or one of NOT_FINGERPRINTS; `further` items of the line differ
    as well, and those `equal_before` it do not. `a` and `b` say what the runs have there: two fingerprints,
    or words.
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
class _Names:
    """A line that names the items of an event."""

    event: str
    names: list[str]

    def __str__(self) -> str:
        return f"a list of the items of {self.event}"


@dataclass(frozen=True, slots=True)
class _Event:
    """A line with fingerprints; `env_steps` and `chain` only where it ends an iteration."""

    event: str
    index: int
    digits: str
    env_steps: int | None = None
    chain: str = ""

    @property
    def place(self) -> tuple[str, int]:
        """Which event of its iteration."""
        return self.event, self.index

    def __str__(self) -> str:
        if self.event == ITERATION:
            return f"the end of iteration {self.index}"
        return f"{self.event} {self.index}"


class Trace:
    """A trace of which the first and the last line are sound; made by `open_trace`."""

    def __init__(self, name: str, data: mmap.mmap | bytes) -> None:
        """Check both ends of `data`, the file; messages call the run `name`. Raises ConfigError."""
        self.name = name
        self._data = data
        header = self._header()
        self.detail = str(header.get("detail"))
        self.digest = str(header.get("digest"))
        self.algo = str(header.get("algo"))
        self.start = data.find(b"\n") + 1
        self.reach = self._check_end()

    def __len__(self) -> int:
        return len(self._data)

    def part(self, begin: int, end: int) -> bytes:
        """The bytes from `begin` to before `end`, or to the end of the file."""
        return self._data[begin:end]

    def line_start(self, position: int) -> int:
        """Where the line that has the byte at `position` begins."""
        return self._data.rfind(b"\n", 0, position) + 1

    def line(self, start: int) -> bytes:
        """The line that begins at `start`, with its line break if it has one."""
        end = self._data.find(b"\n", start)
        return self._data[start : len(self) if end < 0 else end + 1]

    def last_line(self, prefix: bytes, before: int) -> int | None:
        """Where the last line with this beginning starts that starts before `before`."""
        wanted = b"\n" + prefix
        end = before - 1  # the line break in front of it lies before this
        while end > 0:
            begin = max(0, end - _CHUNK)
            found = self._data[begin : end + len(wanted) - 1].rfind(wanted)
            if found >= 0:
                return begin + found + 1
            end = begin
        return None

    @property
    def shows_state(self) -> bool:
        """True if every iteration of the trace ends with the state of the algorithm."""
        found = self._data.find(b"\n" + _ITEMS_LINE + b'"iteration",', self.start - 1)
        return found < 0 or b'"end/' in self.line(found + 1)

    def events(self) -> Iterator[int]:
        """Byte offsets of the lines that hold events."""
        position = self.start
        while position < len(self):
            if self._data[position : position + len(_ITEMS_LINE)] != _ITEMS_LINE:
                yield position
            position = self._data.find(b"\n", position) + 1 or len(self)

    def reach_before(self, start: int) -> Reach:
        """How far the trace goes in the lines before the one at `start`."""
        found = self.last_line(_ITERATION_LINE, start)
        if found is None:
            return Reach(0, 0)
        ended = self.parsed(found)
        assert isinstance(ended, _Event)
        assert ended.env_steps is not None
        return Reach(ended.index + 1, ended.env_steps)

    def env_steps_at_end_of_iteration(self, start: int) -> int | None:
        """Environment steps at the first end of an iteration from the line at `start` on."""
        position = start - 1
        wanted = b"\n" + _ITERATION_LINE
        while position < len(self):
            found = self._data[position : position + _CHUNK + len(wanted) - 1].find(wanted)
            if found >= 0:
                ended = self.parsed(position + found + 1)
                assert isinstance(ended, _Event)
                return ended.env_steps
            position += _CHUNK
        return None

    def names(self, event: str, start: int) -> list[str]:
        """The items that `event` has in the line at `start`, or from there on."""
        prefix = _ITEMS_LINE + json.dumps(event).encode() + b","
        found = self.last_line(prefix, start + 1)
        if found is None:
            self.damaged(start, f"nothing before it names the items of {event}")
        named = self.parsed(found)
        assert isinstance(named, _Names)
        return named.names

    def parsed(self, start: int) -> _Names | _Event:
        """What the line at `start` says. Raises ConfigError if it is none of a trace."""
        parsed = _parse(self.line(start))
        if parsed is None:
            self.damaged(start, "it is no line of a trace")
        return parsed

    def digests(self, event: _Event, names: Sequence[str], start: int) -> list[str]:
        """The fingerprints in the line at `start`, one per name."""
        if len(event.digits) != DIGITS * len(names):
            self.damaged(start, f"{len(names)} items need {DIGITS * len(names)} digits")
        return [event.digits[i : i + DIGITS] for i in range(0, len(event.digits), DIGITS)]

    def line_number(self, start: int) -> int:
        """The number of the line at `start`, from 1 on."""
        parts = range(0, start, _CHUNK)
        return 1 + sum(self._data[begin : min(begin + _CHUNK, start)].count(b"\n") for begin in parts)

    def damaged(self, start: int, why: str) -> NoReturn:
        """Raise ConfigError about the line at `start`."""
        raise ConfigError(f"{self.name}: line {self.line_number(start)} of {TRACE} is damaged: {why}")

    def _header(self) -> dict[str, Any]:
        line = self.line(0)
        if not line.endswith(b"\n") and line.startswith(b'{"format"'):
            raise ConfigError(f"{self.name}: {TRACE} breaks off in its first line; the run was cut off")
        try:
            header = json.loads(line)
        except ValueError:
            header = None
        if not isinstance(header, dict) or header.get("format") != FORMAT:
            raise ConfigError(f"{self.name}: {TRACE} is no trace; its first line is not the header of one")
        if header.get("version") != VERSION:
            raise ConfigError(
                f"{self.name}: {TRACE} has format version {header.get('version')!r}, "
                f"but this code reads version {VERSION}"
            )
        return header

    def _check_end(self) -> Reach:
        start = self.line_start(len(self) - 1)
        line = self.line(start)
        if start == 0 or (line.endswith(b"\n") and _parse(line) is not None):
            return self.reach_before(len(self))
        iterations = self.reach_before(start).iterations
        after = f"after iteration {iterations - 1}" if iterations else "before the end of iteration 0"
        raise ConfigError(
            f"{self.name}: {TRACE} breaks off in the middle of a line {after}; "
            "the run was cut off, or is still writing"
        )


@contextmanager
def open_trace(run_dir: Path, when_missing: str) -> Iterator[Trace]:
    """The trace of the run in `run_dir`.

    Raises ConfigError in one line if there is none (which ends with `when_missing`), or none to rely on.
    """
    try:
        file = (run_dir / TRACE).open("rb")
    except FileNotFoundError:
        raise ConfigError(f"{run_dir.name}: has no {TRACE}; {when_missing}") from None
    except OSError as error:
        raise ConfigError(f"{run_dir.name}: {TRACE} cannot be read, {error.strerror}") from None
    with file:
        try:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise ConfigError(f"{run_dir.name}: {TRACE} is empty; the run was cut off") from None
        with data:
            yield Trace(run_dir.name, data)


def check_comparable(a: Trace, b: Trace) -> None:
    """Raise ConfigError, in one line, unless equal runs would have written equal traces."""
    if a.algo != b.algo:
        raise ConfigError(f"other algorithms: {a.name} ran {a.algo}, {b.name} {b.algo}")
    if a.detail != b.detail:
        raise ConfigError(
            f"other details: {a.name} was traced with trace={a.detail}, {b.name} with trace={b.detail}; "
            "make one of them again with the detail of the other"
        )
    if a.digest != b.digest:
        places = [_PLACES.get(digest, "another device") for digest in (a.digest, b.digest)]
        raise ConfigError(
            f"other digests: {a.name} has {a.digest} ({places[0]}), {b.name} {b.digest} ({places[1]}); "
            "traces of the CPU and of CUDA cannot be compared"
        )


def first_difference(a: Trace, b: Trace) -> Divergence | None:
    """The first difference; None if the traces are equal as far as both go. Raises ConfigError.

    Older traces lack what the algorithm held at both ends of an iteration. Beside such a trace only the items
    count that both have.
    """
    position = _first_differing_byte(a, b)
    if position is None:
        return None
    at_a = a.line_start(a.start + position)
    at_b = at_a - a.start + b.start
    if _shows_state(a, at_a) == _shows_state(b, at_b):
        return _difference(a, at_a, b, at_b)
    lines = zip(a.events(), b.events(), strict=False)
    found = (_difference(a, at_a, b, at_b, common=True) for at_a, at_b in lines)
    return next(filter(None, found), None)


def _shows_state(trace: Trace, start: int) -> bool:
    """True if the event at a line holds entries of the algorithm's state, or is one that never does."""
    event = trace.parsed(start).event
    if event not in (START, ITERATION):
        return True
    return any(name.startswith((AT_START, AT_END)) for name in trace.names(event, start))


def _difference(a: Trace, at_a: int, b: Trace, at_b: int, common: bool = False) -> Divergence | None:
    """The difference of two lines, None if there is none; with `common` in the items that both have."""
    in_a, in_b = a.parsed(at_a), b.parsed(at_b)
    further: list[str] = []
    equal: list[str] = []
    if isinstance(in_a, _Event) and isinstance(in_b, _Event) and in_a.place == in_b.place:
        values_a, values_b = _values(a, in_a, at_a), _values(b, in_b, at_b)
        if common:
            values_a = {name: values_a[name] for name in values_a if name in values_b and name != OTHER_CHAIN}
        differing = [name for name in values_a if values_a[name] != values_b[name]]
        if not differing:
            if common:
                return None
            a.damaged(at_a, f"it has the values of {b.name} in another spelling")
        item, names = differing[0], list(values_a)
        further = [name for name in differing[1:] if name not in NOT_FINGERPRINTS]
        equal = [name for name in names[: names.index(item)] if name not in NOT_FINGERPRINTS]
        says_a, says_b = values_a[item], values_b[item]
    elif in_a.event == in_b.event and (isinstance(in_a, _Names) or isinstance(in_b, _Names)):
        item = OTHER_ITEMS
        names_a, names_b = a.names(in_a.event, at_a), b.names(in_b.event, at_b)
        says_a, says_b = _only_in(names_a, names_b), _only_in(names_b, names_a)
    else:
        item, says_a, says_b = OTHER_EVENT, str(in_a), str(in_b)
    before = a.reach_before(at_a)
    after = a.env_steps_at_end_of_iteration(at_a)
    return Divergence(
        line=a.line_number(at_a),
        iteration=before.iterations,
        env_steps_before=before.env_steps,
        env_steps_after=b.env_steps_at_end_of_iteration(at_b) if after is None else after,
        event=in_a.event,
        index=in_a.index if isinstance(in_a, _Event) else None,
        item=item,
        further=further,
        equal_before=equal,
        a=says_a,
        b=says_b,
    )


def _values(trace: Trace, event: _Event, start: int) -> dict[str, str]:
    """All that the line at `start` says, by item."""
    names = trace.names(event.event, start)
    values = dict(zip(names, trace.digests(event, names, start), strict=True))
    if event.env_steps is None:
        return values
    before = {name: values.pop(name) for name in names if name.startswith(AT_START)}
    return before | {OTHER_ENV_STEPS: f"{event.env_steps:,}"} | values | {OTHER_CHAIN: event.chain}


def _only_in(names: Sequence[str], others: Sequence[str]) -> str:
    return ", ".join(name for name in names if name not in others) or "nothing that the other lacks"


def _parse(line: bytes) -> _Names | _Event | None:
    try:
        values = json.loads(line)
    except ValueError:
        return None
    match values:
        case ["items", str(event), [*names]] if all(isinstance(name, str) for name in names):
            return _Names(event, names)
        case ["iteration", int(index), int(env_steps), str(digits), str(chain)] if _HEX.fullmatch(digits):
            return _Event(ITERATION, index, digits, env_steps, chain)
        case [str(event), int(index), str(digits)] if _HEX.fullmatch(digits) and event != ITERATION:
            return _Event(event, index, digits)
    return None


def _first_differing_byte(a: Trace, b: Trace) -> int | None:
    """Its distance from the end of the header; None if there is none as far as both go."""
    length = min(len(a) - a.start, len(b) - b.start)
    for begin in range(0, length, _CHUNK):
        end = min(begin + _CHUNK, length)
        part_a, part_b = a.part(a.start + begin, a.start + end), b.part(b.start + begin, b.start + end)
        if part_a == part_b:
            continue
        low, high = 0, len(part_a)  # part_a[:low] is equal, part_a[low:high] is not
        while high - low > 1:
            middle = (low + high) // 2
            if part_a[low:middle] == part_b[low:middle]:
                low = middle
            else:
                high = middle
        return begin + low
    return None
