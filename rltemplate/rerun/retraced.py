"""The trace of a run that was run again, beside the recorded one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from rltemplate.analysis import traces
from rltemplate.analysis.traces import Divergence
from rltemplate.rerun.replay import RESULTS
from rltemplate.rerun.zoom_report import Place


def not_repeated(recorded: Path, again: Path, iteration: int) -> str | None:
    """The first difference of a recorded trace and a new one up to `iteration`; None if there is none."""
    kinds = [_digest_kind(trace) for trace in (recorded, again)]
    if kinds[0] != kinds[1]:
        return f"its trace holds {kinds[0]} digests, made on another device, and here they are {kinds[1]}"
    found = dict(_digests(again, iteration))
    reached = {number for number, _ in found}
    for (number, item), value in _digests(recorded, iteration):
        # An older trace has other items of the start of an iteration.
        if number in reached and found.get((number, item)) != value and not item.startswith("stream/"):
            return f"it first differs from its own record in iteration {number:,}, {item}"
    return None


def _digest_kind(trace: Path) -> str:
    with trace.open("rb") as file:
        return str(json.loads(file.readline())["digest"])


def _digests(trace: Path, closely: int) -> Iterator[tuple[tuple[int, str], str]]:
    """Iteration, item and digest of all that every trace of a run has, up to iteration `closely`.

    Of that one also the items of steps and updates, if they are there.
    """
    rare = tuple(f'["{event}",'.encode() for event in ("items", "start", *traces.BEFORE_TRAINING))
    names: dict[str, list[str]] = {}
    waiting: list[bytes] = []
    with trace.open("rb") as lines:
        next(lines)
        for line in lines:
            waiting.append(line)
            if not line.startswith(b'["iteration",'):
                continue
            number = json.loads(line)[1]
            for each in waiting:
                if not (each is line or number == closely or each.startswith(rare)):
                    continue
                event, index, *rest = json.loads(each)
                if event == "items":
                    names[index] = rest[0]
                    continue
                digits = rest[1] if each is line else rest[0]
                place = "" if event in (traces.ITERATION, "start") else f"{event} {index:,}: "
                for i, name in enumerate(names[event]):
                    yield (number, f"{place}{name}"), digits[i * traces.DIGITS : (i + 1) * traces.DIGITS]
            waiting.clear()
            if number >= closely:
                return


def event_at(trace: Path, at: Divergence) -> Place:
    """The event at which a trace parts from another, with the event before it in the same iteration."""
    before: bytes | None = None
    index = at.index
    with trace.open("rb") as lines:
        next(lines)
        for number, line in enumerate(lines, start=2):
            if line.startswith(b'["items",'):
                continue
            if number >= at.line:
                index = json.loads(line)[1] if index is None else index  # none: the line names items
                break
            before = line
    since = None
    if before is not None and not before.startswith(b'["iteration",'):
        event, number, *_ = json.loads(before)
        since = (event, number)
    return Place(at.event, 0 if at.event == RESULTS else int(index or 0), since)
