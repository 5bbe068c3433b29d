"""What this project aims at in speed, and what was reached: a table over all parts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rltemplate.bench import tables
from rltemplate.bench.plan import COMPILED, SB3, SBX, WORKER
from rltemplate.bench.tables import Cell, cells, find, level_costs, observer_costs, paragraph, ratio, rows
from rltemplate.bench.works import WORKS

Parts = Mapping[str, Sequence[Cell]]
_VERDICTS = {True: "yes", False: "no", None: "cannot be told"}


class Reached(NamedTuple):
    """One line of the table."""

    what: str
    aimed: str
    reached: str
    met: bool | None  # None: repetitions do not agree


def document(measured: Mapping[str, Any]) -> str:
    """The whole file, the goals ahead of what they are computed from."""
    return tables.document(measured, table(measured))


def table(measured: Mapping[str, Any]) -> list[str]:
    """What of the goals was measured; no lines if nothing was."""
    parts = {name: cells(part) for name, part in measured["parts"].items()}
    found = [line for goal in GOALS for line in goal(parts)]
    if not found:
        return []
    body = [(each.what, each.aimed, each.reached, _VERDICTS[each.met]) for each in found]
    return [
        "## goals",
        "",
        *rows(["goal", "aimed at", "reached", "met"], body),
        "",
        *paragraph(
            "From the tables below; training on the most cores, all else on one. Of levels, the lowest and "
            "the highest ratio of a repetition stand behind the median, and nothing can be told where the "
            "goal lies between them."
        ),
        "",
    ]


def _rate(cell: Cell) -> float:
    return statistics.median(cell.rates().values())


def _fastest(parts: Parts, work: str, forms: Sequence[str]) -> Cell | None:
    """The fastest of some forms in a work, on the most cores."""
    every = [cell for cell in parts.get("peers", ()) if cell.work == work and cell.contender in forms]
    most = [cell for cell in every if cell.cores == max(each.cores for each in every)]
    return max(most, key=_rate, default=None)


def _training(
    work: str, per_second: int, against: Mapping[str, float]
) -> Callable[[Parts], Iterator[Reached]]:
    def lines(parts: Parts) -> Iterator[Reached]:
        cell = _fastest(parts, work, (COMPILED, WORKER))
        if cell is None:
            return
        title = WORKS[work].title
        form = cell.contender.removeprefix("rltemplate, ")
        rate = _rate(cell)
        yield Reached(
            title, f"{per_second:,} steps/s", f"{rate:,.0f} steps/s ({form})", round(rate) >= per_second
        )
        for peer, times in against.items():
            value = ratio(cell, find(parts["peers"], work, peer, cell.cores))
            if value is not None:
                yield Reached(
                    title, f"{times:g} times {peer}", f"{value:.2f} times", round(value, 2) >= times
                )

    return lines


def _startup(parts: Parts) -> Iterator[Reached]:
    seconds = {
        WORKS[cell.work].title: cell.middle(lambda result: result["wall_s"])
        for cell in parts.get("startup", ())
        if cell.contender == "first environment step"
    }
    if seconds:
        yield Reached(
            "from `make train` to the first environment step",
            "3 s",
            "; ".join(f"{title} {value:.1f} s" for title, value in seconds.items()),
            round(max(seconds.values()), 1) <= 3.0,
        )


def _observers(parts: Parts) -> Iterator[Reached]:
    for cell in parts.get("observers", ()):
        costs = [observer_costs(result, "wall_s") for result in cell.results.values()]
        share = statistics.median(each["all, with trace=iteration"] for each in costs)
        yield Reached(
            f"all observers, {WORKS[cell.work].title}", "3 %", f"{share:.2%}", round(share, 4) <= 0.03
        )


def _memory(parts: Parts) -> Iterator[Reached]:
    sizes = {
        cell.contender: cell.middle(lambda result: result["buffer_bytes"] / result["transitions"])
        for cell in parts.get("memory", ())
    }
    if "rltemplate" in sizes and SB3 in sizes:
        share = sizes["rltemplate"] / sizes[SB3]
        yield Reached(
            "replay buffer of Humanoid", f"55 % of {SB3}'s", f"{share:.1%}", round(share, 3) <= 0.55
        )


def _levels(parts: Parts) -> Iterator[Reached]:
    """At most so many times the time of `fast`, in every work and form."""
    every = parts.get("levels", ())
    for level, most in (("repeat", 1.02), ("invariant", 1.05), ("profile", 1.05)):
        said: list[str] = []
        met: list[bool | None] = []
        for cell in every:
            name, _, compiled = cell.contender.partition(", ")
            costs = level_costs(every, cell)
            if name == level and costs:
                low, high = round(min(costs), 3), round(max(costs), 3)
                met.append(None if low <= most < high else high <= most)
                form = f"{WORKS[cell.work].title}{', compiled' if compiled else ''}"
                said.append(f"{form} {statistics.median(costs):.3f} ({low:.3f} to {high:.3f})")
        if said:
            verdict = False if False in met else None if None in met else True
            yield Reached(
                f"`determinism={level}`", f"{most:g} times the time of `fast`", "; ".join(said), verdict
            )


GOALS: tuple[Callable[[Parts], Iterator[Reached]], ...] = (
    _training("ppo-Hopper", 10_000, {SBX: 3.0, SB3: 4.0}),
    _training("sac-Hopper", 300, {SBX: 1.4}),
    _training("sac-Humanoid", 150, {}),
    _startup,
    _observers,
    _memory,
    _levels,
)
