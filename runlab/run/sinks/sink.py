"""The interface of sinks, which show or store log rows besides `metrics.jsonl`, and the facts they get.

A sink may fail at any time: the logger then reports it once, switches it off, and the run goes on.
Rows are plain dicts: `env_steps` (int), `wall_time_s` (seconds since the run began) and the metrics.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runlab.run.git.snapshot import GitRecord
from runlab.run.paths import VIDEOS, by_steps
from runlab.run.read import read_metrics

Row = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The run that a sink shows."""

    run_id: str
    run_dir: Path
    config: Mapping[str, Any]
    git: GitRecord
    sweep: str | None  # its id
    notify: Callable[[str], None]
    overrides: Sequence[str] = ()  # the arguments of its command
    resumed_at: int | None = None  # environment steps at which the run resumes; None: a new run


class Sink(ABC):
    """Shows or stores log rows. Every method may raise; none may block for long."""

    @abstractmethod
    def write(self, row: Row) -> None:
        """One log point."""

    @abstractmethod
    def video(self, path: Path, env_steps: int) -> None:
        """A video of the policy after `env_steps` environment steps lies at `path`."""

    @abstractmethod
    def close(self, status: str, final_metrics: Row) -> None:
        """The run ended with `status` (`finished`, `failed`, `interrupted`). Called once, as the last."""

    def note(self, text: str) -> bool:
        """A line of plain text for the user. True if the user sees it here."""
        return False

    def activity(self, text: str) -> None:
        """Show the work beside training, such as `evaluating`; empty while the run trains."""
        return


class RecordingSink(Sink):
    """A sink with its own store, which the first row or video opens.

    In a resumed run it first gets all earlier rows and videos again, from the run folder. So the store has
    each of them once, even if an earlier process lost some.
    """

    def __init__(self, facts: RunFacts) -> None:
        self.facts = facts
        self._opened = False

    @abstractmethod
    def open(self) -> None: ...

    @abstractmethod
    def add_row(self, row: Row) -> None: ...

    @abstractmethod
    def add_video(self, path: Path, env_steps: int) -> None: ...

    def write(self, row: Row) -> None:
        self._open_before(int(row["env_steps"]))
        self.add_row(row)

    def video(self, path: Path, env_steps: int) -> None:
        self._open_before(env_steps)
        self.add_video(path, env_steps)

    def _open_before(self, env_steps: int) -> None:
        if self._opened:
            return
        self._opened = True
        self.open()
        videos = by_steps(self.facts.run_dir / VIDEOS, ".mp4")
        earlier = {int(row["env_steps"]): row for row in read_metrics(self.facts.run_dir)}
        for at in sorted(at for at in {*earlier, *videos} if at < env_steps):
            if at in earlier:
                self.add_row(earlier[at])
            if at in videos:
                self.add_video(videos[at], at)
