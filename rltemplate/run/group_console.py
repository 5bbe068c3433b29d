"""One progress display for several runs that are trained together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rltemplate.run.sinks import Row, Sink


class GroupConsole:
    """Shows the mean over runs that differ in their seed, as one run would be shown.

    Each run gets a sink of its own from `of`. A row is shown once all runs that are still going have given
    theirs for the same number of environment steps; of those that have ended the rest goes on without.
    """

    def __init__(self, console: Sink, seeds: Sequence[int]) -> None:
        """`console` shows what a single run would show."""
        self._console = console
        self._seeds = list(seeds)
        self._rows: dict[int, Row] = {}  # by place, those that wait for the others
        self._statuses: dict[int, str] = {}
        self._ends: dict[int, Row] = {}

    def of(self, place: int) -> Sink:
        """The sink of the run at `place`."""
        return _Share(self, place)

    def write(self, place: int, row: Row) -> None:
        """A row of one run."""
        # A run that goes on may have been the only one that came to its last row.
        steps = int(row["env_steps"])
        self._rows = {p: other for p, other in self._rows.items() if other["env_steps"] == steps}
        self._rows[place] = row
        self._show()

    def end(self, place: int, status: str, final_metrics: Row) -> None:
        """One run has ended; with the last of them the display does."""
        self._statuses[place] = status
        self._ends[place] = final_metrics
        self._rows.pop(place, None)
        if len(self._statuses) < len(self._seeds):
            self._show()
            return
        finished = [p for p, each in self._statuses.items() if each == "finished"]
        self._console.close(self._status(), mean_row([self._ends[p] for p in finished or self._ends]))

    def video(self, place: int, path: Path, env_steps: int) -> None:
        """A video of one run."""
        self._console.note(f"seed {self._seeds[place]}: video after {env_steps} steps: {path}")

    def note(self, text: str) -> bool:
        """A line, which names its run itself."""
        return self._console.note(text)

    def _show(self) -> None:
        going = [place for place in range(len(self._seeds)) if place not in self._statuses]
        if going and all(place in self._rows for place in going):
            self._console.write(mean_row([self._rows[place] for place in going]))
            self._rows = {}

    def _status(self) -> str:
        """How all of them ended, in a word if they ended alike."""
        found = list(dict.fromkeys(status for _, status in sorted(self._statuses.items())))
        if len(found) == 1:
            return found[0]
        told = []
        for status in found:
            seeds = [
                str(self._seeds[place]) for place, each in sorted(self._statuses.items()) if each == status
            ]
            told.append(f"{status}: seed{'s' if len(seeds) > 1 else ''} {', '.join(seeds)}")
        return f"{'; '.join(told)};"


class _Share:
    """What one run sees of the display."""

    def __init__(self, group: GroupConsole, place: int) -> None:
        self._group, self._place = group, place

    def write(self, row: Row) -> None:
        self._group.write(self._place, row)

    def video(self, path: Path, env_steps: int) -> None:
        self._group.video(self._place, path, env_steps)

    def note(self, text: str) -> bool:
        return self._group.note(text)

    def close(self, status: str, final_metrics: Row) -> None:
        self._group.end(self._place, status, final_metrics)


def mean_row(rows: Sequence[Row]) -> dict[str, float]:
    """The mean of each metric over the rows that have it; speeds add up, and of clocks the last counts."""
    mean: dict[str, float] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row[name] for row in rows if name in row]
        if name == "time/steps_per_second":
            mean[name] = sum(values)
        elif name in ("env_steps", "wall_time_s"):
            mean[name] = max(values)
        else:
            mean[name] = sum(values) / len(values)
    return mean
