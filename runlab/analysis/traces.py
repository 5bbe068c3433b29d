"""The first line in which two traces differ, and the first item in it.

A trace lists fingerprints in causal order, so its first difference is where the runs diverged.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Container, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec

from runlab.config.texts import few
from runlab.errors import ConfigError
from runlab.run.paths import TRACE
from runlab.run.trace import DIGEST, NAMES, START, VERSION
from runlab.run.validation import Line, Missing, read_bytes

STEP_DETAIL = "step"
_MAX_TRACE_BYTES = 16_000_000_000
ITERATION = "iteration"  # the event at the end of an iteration

# Differences other than the fingerprint of an item; they are shown in the place of an item.
OTHER_EVENT = "event"  # one run continues with another event than the other
OTHER_ITEMS = "items"  # an event has other items, and those that both runs have are equal
OTHER_ENV_STEPS = "env_steps"  # an iteration took another number of environment steps
OTHER_CHAIN = "chain"  # the chain differs although everything before it is equal
NOT_FINGERPRINTS = (OTHER_EVENT, OTHER_ITEMS, OTHER_ENV_STEPS, OTHER_CHAIN)

ITERATION_LINE, ITEMS_LINE = b'["iteration",', b'["items",'  # the starts of lines
_ITERATION = msgspec.json.Decoder(tuple[Line, int, int, Line, Line])
_EVENT = msgspec.json.Decoder(tuple[Line, int, Line])


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference between two traces.

    `line` counts from 1, `iteration` from 0, and `index`, the number of the event in the iteration, from 0.
    `item` is the first to differ of those that both runs have, by name, or one of NOT_FINGERPRINTS. `further`
    items of the line differ too, the items in `equal_before` do not. `a` and `b` are the fingerprints, or
    descriptions. `only_a` and `only_b` are items of the line and of earlier ones that the other run lacks.
    """

    line: int
    iteration: int
    env_steps_before: int
    env_steps_after: int
    event: str
    index: int
    item: str
    further: list[str]
    equal_before: list[str]
    a: str
    b: str
    only_a: list[str]
    only_b: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    """The first line of a trace."""

    # runlab-trace; before, it began with the name of the package, which a fork has renamed.
    format: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9_]+-trace\Z")]
    version: int
    digest: str
    detail: Line
    algo: Line


@dataclass(frozen=True, slots=True)
class RecordedTrace:
    """A trace: the facts of its first line, and the lines after that."""

    run: str
    detail: str
    algo: str
    lines: list[bytes]

    @property
    def reach(self) -> tuple[int, int]:
        """The number of complete iterations, and the environment steps that they took."""
        return self.first_end(reversed(range(len(self.lines))))

    def first_end(self, numbers: Iterable[int]) -> tuple[int, int]:
        """`reach` at the first of these lines that ends an iteration; zeros if none does."""
        for number in numbers:
            if _ends(self.lines[number]):
                with self._line(number) as (_, iteration, env_steps, *_):
                    return iteration + 1, env_steps
        return 0, 0

    @property
    def items(self) -> set[str]:
        """The names of all items."""
        names_seen = set[str]()
        for number, line in enumerate(self.lines):
            if line.startswith(ITEMS_LINE):
                with self._line(number) as (_, _, names):
                    names_seen.update(names)
        return names_seen

    def events(self, start: int = 0, hidden: Container[str] = ()) -> Iterator[tuple[int, Event]]:
        """The events from line `start` on with the numbers of their lines, without `hidden` items."""
        names: dict[str, list[str]] = {}
        for number, line in enumerate(self.lines):
            if number < start and not line.startswith(ITEMS_LINE):
                continue
            with self._line(number) as parsed:
                if line.startswith(ITEMS_LINE):
                    _, event, names[event] = parsed
                    continue
                ends = _ends(line)
                event, index, *steps, digits = parsed[: 4 if ends else 3]
                if len(digits) != 16 * len(names[event]):
                    raise ValueError("another number of items")
                values = dict(zip(names[event], re.findall(".{16}", digits), strict=True))
                if ends:
                    begun = {item: values.pop(item) for item in names[event] if item.startswith(f"{START}/")}
                    values = begun | {OTHER_ENV_STEPS: f"{steps[0]:,}"} | values | {OTHER_CHAIN: parsed[4]}
            yield number, Event(event, index, {k: v for k, v in values.items() if k not in hidden})

    @contextlib.contextmanager
    def _line(self, number: int) -> Iterator[Any]:
        """A parsed line; if parsing or using it fails, ConfigError says that the line is damaged."""
        try:
            line = self.lines[number]
            decoder = NAMES if line.startswith(ITEMS_LINE) else _ITERATION if _ends(line) else _EVENT
            yield decoder.decode(line)
        except (msgspec.MsgspecError, ValueError, KeyError):
            raise ConfigError(f"{self.run}: {TRACE}: line {number + 2} is damaged") from None

    def whole(self, most: int | None = None) -> RecordedTrace:
        """The trace up to the end of its last whole iteration, or of its iteration `most`, counted from 1."""
        ends = [at for at, line in enumerate(self.lines, start=1) if _ends(line)]
        return replace(self, lines=self.lines[: max(ends[:most], default=0)])


@dataclass(frozen=True, slots=True)
class Event:
    """The event of a line, with its values by item in causal order."""

    name: str
    index: int
    values: dict[str, str]

    def __str__(self) -> str:
        return f"{'the end of ' * (self.name == ITERATION)}{self.name} {self.index}"


def open_trace(run_dir: Path, when_missing: str = "") -> RecordedTrace:
    """The whole iterations of the trace in `run_dir`; the last line of a killed run may be cut.

    Raises ConfigError, which ends with `when_missing` if there is no iteration.
    """
    run = run_dir.name
    try:
        content = read_bytes(run_dir / TRACE, f"{run}: {TRACE}", _MAX_TRACE_BYTES)
        first, *lines = content.splitlines(keepends=True) or [b""]
        head = msgspec.json.decode(first, type=_Head)
    except Missing:
        raise ConfigError(f"{run}: has no {TRACE}; {when_missing}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        head = None
    if head is None or (head.version, head.digest) != (VERSION, DIGEST):
        raise ConfigError(f"{run}: {TRACE} is no trace of this version")
    trace = RecordedTrace(run, head.detail, head.algo, lines).whole()
    if not trace.lines:
        raise ConfigError(f"{run}: has no iteration in {TRACE}; {when_missing}")
    return trace


def _ends(line: bytes) -> bool:
    """True for the whole line that ends an iteration."""
    return line.startswith(ITERATION_LINE) and line.endswith(b"]\n")


def first_difference(
    a: RecordedTrace, b: RecordedTrace, *, left_out: Collection[str] = ()
) -> Divergence | None:
    """The first difference; None if the traces are equal up to the end of the shorter one.

    An event with other items is the first difference only if all items that both traces have are equal to
    their ends. Items `left_out` are not compared. If there are any, chains are not compared either: they
    depend on them.
    """
    pairs = enumerate(zip(a.lines, b.lines, strict=False))
    number = next((number for number, (one, other) in pairs if one != other), None)
    if number is None:
        return None
    hidden = {*left_out, OTHER_CHAIN} if left_out else set[str]()
    first: Divergence | None = None  # with other items, while those that both have are equal
    only_a, only_b = dict[str, None](), dict[str, None]()
    for (at, one), (_, other) in zip(a.events(number, hidden), b.events(number, hidden), strict=False):
        differing = _differing(one, other)
        if differing[:1] != [OTHER_EVENT]:
            only_a |= dict.fromkeys(name for name in one.values if name not in other.values)
            only_b |= dict.fromkeys(name for name in other.values if name not in one.values)
        if first is not None:
            differing = [name for name in differing if name not in (OTHER_ITEMS, OTHER_CHAIN)]
        if not differing:
            continue
        item, *further = differing
        value_a, value_b = _values(item, one, other)
        names = [name for name in one.values if name in other.values and name != OTHER_ENV_STEPS]
        iteration, before = a.first_end(reversed(range(at)))
        divergence = Divergence(
            line=at + 2,
            iteration=iteration,
            env_steps_before=before,
            env_steps_after=a.first_end(range(at, len(a.lines)))[1],
            event=one.name,
            index=one.index,
            item=item,
            further=[name for name in further if name not in NOT_FINGERPRINTS],
            equal_before=names[: names.index(item)] if item in names else [],
            a=value_a,
            b=value_b,
            only_a=[*only_a],
            only_b=[*only_b],
        )
        if item != OTHER_ITEMS:
            return divergence
        first = divergence
    return first


def _differing(one: Event, other: Event) -> list[str]:
    """Differences of two events in causal order: items that both have, or of NOT_FINGERPRINTS."""
    if (one.name, one.index) != (other.name, other.index):
        return [OTHER_EVENT]
    both = [name for name in one.values if name in other.values]
    differing = [name for name in both if one.values[name] != other.values[name]]
    # The chain depends on everything before it.
    chain = [differing.pop()] if differing[-1:] == [OTHER_CHAIN] else []
    other_items = [OTHER_ITEMS] if [*one.values] != [*other.values] else []
    return differing + other_items + chain


def _values(item: str, one: Event, other: Event) -> tuple[str, str]:
    """The fingerprints of an item in two events, or descriptions of their difference."""
    if item == OTHER_EVENT:
        return str(one), str(other)
    if item != OTHER_ITEMS:
        return one.values[item], other.values[item]
    if {*one.values} == {*other.values}:
        return next((a, b) for a, b in zip(one.values, other.values, strict=True) if a != b)
    pairs = (one.values, other.values), (other.values, one.values)
    only = ([name for name in mine if name not in theirs] for mine, theirs in pairs)
    a, b = (few(names) or "nothing that the other lacks" for names in only)
    return a, b
