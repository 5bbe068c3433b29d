"""The console: a progress bar on a terminal, one plain line per log point anywhere else."""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import shlex
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from rltemplate.run.sinks.sink import Row, RunFacts

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

# Metrics shown of a row, in this order; everything else is in metrics.jsonl.
_SHOWN = {
    "episode/return": "return",
    "episode/length": "length",
    "policy/entropy": "entropy",
    "loss/policy": "loss/policy",
    "loss/value": "loss/value",
    "loss/critic": "loss/critic",
}
# Shown as `-` without a value, so that the columns of a plain log stay in place.
_ALWAYS_SHOWN = ("episode/return", "episode/length")
_BELOW_BAR = {"eval/return": "eval", **{name: label for name, label in _SHOWN.items() if label != "return"}}
_X_AXES = ("env_steps", "wall_time_s")


def show_number(value: float) -> str:
    """Four significant digits, without an exponent where that stays short: `143.2`, `0.0613`, `2.5e-07`."""
    if math.isfinite(value) and value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.1f}" if 1000 <= abs(value) < 1e6 else f"{value:.4g}"


def show_time(seconds: float | None) -> str:
    """`h:mm:ss`, with days in front of long times, and `-:--:--` for an unknown one."""
    if seconds is None or not math.isfinite(seconds):
        return "-:--:--"
    hours, rest = divmod(max(0, round(seconds)), 3600)
    days, hours = divmod(hours, 24)
    clock = f"{hours}:{rest // 60:02d}:{rest % 60:02d}"
    return f"{days}d {clock}" if days else clock


class ConsoleSink:
    """Title, run folder, progress and latest metrics; at the end a summary and the next command.

    The bar needs a terminal that can move its cursor: not `TERM=dumb`, a pipe or a file.
    """

    def __init__(self, facts: RunFacts, stream: TextIO | None = None) -> None:
        self._facts = facts
        self._total = max(1, facts.total_env_steps)
        self._stream = sys.stderr if stream is None else stream
        self._recent: deque[tuple[float, float]] = deque(maxlen=10)  # (env_steps, wall_time_s)
        self._latest: dict[str, float] = {}
        self._console: Console | None = None
        self._bar: Progress | None = None
        self._drawn_at = -math.inf
        on_terminal = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        if on_terminal:
            from rich.console import Console

            self._console = Console(file=self._stream)
        start = f"{facts.title}: {self._shown(facts.run_dir)}"
        if self._console is not None and len(start) > self._console.width:
            start = start.replace(": ", "\n", 1)
        self.note(start)
        if on_terminal:
            self._start_bar()
        if facts.resumed_at is not None:
            self.note(f"goes on after {facts.resumed_at} of {facts.total_env_steps} steps")

    def write(self, row: Row) -> None:
        """Draw the bar with the row, or write a line."""
        self._latest.update(row)
        left = self._seconds_left(row)
        if self._bar is None:
            self.note(self._plain_line(row, left))
            return
        recent_return = self._latest.get("episode/return")
        speed = row.get("time/steps_per_second")
        self._bar.update(
            self._bar.task_ids[0],
            completed=min(int(row["env_steps"]), self._total),
            shown_return="-" if recent_return is None else show_number(recent_return),
            shown_speed="-" if speed is None else f"{speed:,.0f}",
            shown_left=show_time(left),
        )
        # Drawing takes milliseconds: with short log intervals not every row is drawn.
        if time.monotonic() - self._drawn_at >= 0.1:
            self._drawn_at = time.monotonic()
            self._bar.refresh()

    def video(self, path: Path, env_steps: int) -> None:
        """Say where a video is."""
        self.note(f"video after {env_steps} steps: {self._shown(path)}")

    def note(self, text: str) -> bool:
        """A line above the bar."""
        with contextlib.suppress(OSError, ValueError):  # a full disk behind the stream, or a closed one
            if self._console is None:
                print(text, file=self._stream, flush=True)
            else:
                # soft_wrap leaves paths in one piece, so that they can be clicked and copied.
                self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        return True

    def close(self, status: str, final_metrics: Row) -> None:
        """Summarise the run, and name the next command."""
        metrics = {**self._latest, **final_metrics}
        self._stop_bar()
        steps = int(metrics.get("env_steps", 0))
        self.note(f"{status} after {steps} steps in {show_time(metrics.get('wall_time_s'))}")
        if status == "finished" and self._facts.standing is not None and "eval/return" in metrics:
            standing = self._facts.standing(steps, metrics["eval/return"])
            if standing:
                self.note(standing)
        shown = {name: show_number(value) for name, value in metrics.items() if name not in _X_AXES}
        if self._console is not None and shown:
            from rich.columns import Columns

            width = max(map(len, shown)) + 1
            cells = [f"[dim]{name:<{width}}[/] {value:>9}" for name, value in sorted(shown.items())]
            self._console.print(Columns(cells, padding=(0, 3), column_first=True))
        near = _relative(self._facts.run_dir)
        # Where commands look for it, the id is enough.
        run = near.name if near.parts[:1] == ("runs",) and len(near.parts) == 3 else str(near)
        command = "evaluate" if status == "finished" else "resume"
        self.note(f"{self._shown(self._facts.run_dir)}\nnext: make {command} run={shlex.quote(run)}")

    def _shown(self, path: Path) -> Path:
        """The path as typed in the current folder; whole in a file, which may be read elsewhere."""
        return path if self._console is None else _relative(path)

    def _start_bar(self) -> None:
        from rich.columns import Columns
        from rich.console import RenderableType
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column
        from rich.text import Text

        assert self._console is not None
        latest, title, width = self._latest, self._facts.title, self._console.width

        class Bar(Progress):
            """A bar with metrics below it."""

            def get_renderables(self) -> Iterator[RenderableType]:
                yield self.make_tasks_table(self.tasks)
                known = {name: label for name, label in _BELOW_BAR.items() if name in latest}
                cells = [f"{label} {show_number(latest[name]):>9}" for name, label in known.items()]
                # An empty line leaves room for the ^C of a terminal, which would break the bar.
                yield Columns([Text(cell, "dim") for cell in cells], padding=(0, 2)) if cells else Text()

        def fixed(template: str) -> TextColumn:
            return TextColumn(template, table_column=Column(no_wrap=True, justify="right"))

        self._bar = Bar(
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
            BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=4)),
            fixed("[progress.percentage]{task.percentage:>3.0f}%"),
            fixed("return [bold]{task.fields[shown_return]:>7}"),
            *([fixed("{task.fields[shown_speed]:>6}[dim] steps/s")] if width >= 72 else []),
            fixed("[dim]left[/] {task.fields[shown_left]}"),
            console=self._console,
            auto_refresh=False,  # drawn when a row arrives: no thread beside training
            expand=True,
        )
        self._bar.add_task(
            # The numbers take 53 columns with the shortest bar; the seed must stay.
            title if len(title) + 53 <= width else title.rpartition(", ")[2],
            total=self._total,
            completed=min(self._facts.resumed_at or 0, self._total),
            shown_return="-",
            shown_speed="-",
            shown_left=show_time(None),
        )
        self._bar.start()
        # The bar hides the cursor; a run that dies without closing must not leave the terminal so.
        atexit.register(self._stop_bar)

    def _stop_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
            atexit.unregister(self._stop_bar)

    def _seconds_left(self, row: Row) -> float | None:
        """From the speed over the last rows, so that it follows a slow evaluation, but not at once."""
        now = (row["env_steps"], row["wall_time_s"])
        self._recent.append(now)
        steps, seconds = now[0] - self._recent[0][0], now[1] - self._recent[0][1]
        speed = steps / seconds if steps > 0 and seconds > 0 else row.get("time/steps_per_second", 0.0)
        return max(0.0, self._total - now[0]) / speed if speed > 0 else None

    def _plain_line(self, row: Row, left: float | None) -> str:
        steps = int(row["env_steps"])
        done = min(100.0, 100 * steps / self._total)  # the last iteration may end behind it
        parts = [f"step {steps:>{len(str(self._total))}}/{self._total} {done:4.0f}%"]
        for name, label in _SHOWN.items():
            if name in row or name in _ALWAYS_SHOWN:
                parts.append(f"{label} {show_number(row[name]) if name in row else '-':>8}")
        if "time/steps_per_second" in row:
            parts.append(f"{row['time/steps_per_second']:>7,.0f} steps/s")
        parts.append(f"left {show_time(left)}")
        if "eval/return" in row:  # at the end, because most rows are without it
            parts.append(f"eval {show_number(row['eval/return'])}")
        return "  ".join(parts)


def _relative(path: Path) -> Path:
    """The path relative to the current folder, where it lies below it."""
    with contextlib.suppress(OSError):  # the current folder was deleted
        if path.is_relative_to(Path.cwd()):
            return path.relative_to(Path.cwd())
    return path
