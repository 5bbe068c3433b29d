"""The console: lines in a file, and a panel in place on a terminal."""

from __future__ import annotations

import contextlib
import math
import shlex
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from runlab.config.project import ALGORITHMS, as_typed
from runlab.config.terminal import escaped, raw, takes_drawing
from runlab.config.texts import from_here
from runlab.run.names import differences
from runlab.run.sinks.sink import Row, RunFacts, Sink

if TYPE_CHECKING:
    from rich.constrain import Constrain

# Metrics in the panel, before those of the algorithm's entry (config/algorithms.py). Everything else is in
# metrics.jsonl.
_IN_PANEL = {
    "episode/return": "return",
    "eval/return": "evaluation",
    "episode/length": "episode length",
    "optim/learning_rate": "learning rate",
}
_PANEL_WIDTH = 140


def show_number(value: float) -> str:
    """Four significant digits, without an exponent where that stays short: `143.2`, `0.0613`, `2.5e-07`."""
    if math.isfinite(value) and value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.1f}" if 1000 <= abs(value) < 1e6 else f"{value:.4g}"


def show_time(seconds: float | None) -> str:
    """`h:mm:ss`, or `-:--:--` for an unknown time."""
    if seconds is None or not math.isfinite(seconds):
        return "-:--:--"
    hours, rest = divmod(max(0, round(seconds)), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}"


class ConsoleSink(Sink):
    """Title, run folder, progress and latest metrics; at the end the next command."""

    def __init__(self, facts: RunFacts, stream: TextIO | None = None) -> None:
        self._facts = facts
        algo, env, total = (facts.config[key] for key in ("algo", "env", "total_env_steps"))
        self._total = max(1, total)
        entry = ALGORITHMS.get(str(algo["name"]))
        self._of_algorithm = {} if entry is None else entry.console
        self._stream = raw(sys.stderr if stream is None else stream)
        self._in_place = takes_drawing(self._stream)
        self._recent: deque[tuple[float, float]] = deque(maxlen=10)  # (env_steps, wall_time_s)
        self._latest: dict[str, float] = {}
        self._left: float | None = None  # seconds
        self._activity = ""
        self._live: Any = None  # what stands in place
        self._writing = False
        self._waiting: deque[Callable[[], object]] = deque()  # to be written next
        self._run_dir = self._shown(facts.run_dir)
        self._title = f"{algo['name']} on {env['id']}, seed {facts.config['seed']}"
        changes = differences(facts.config, facts.overrides)
        self.note(f"{self._title}{': ' * bool(changes)}{', '.join(changes)}\n{self._run_dir}")
        if facts.resumed_at is not None:
            self.note(f"goes on after {facts.resumed_at} of {total} steps")

    def write(self, row: Row) -> None:
        """Write a line, or redraw the panel with the latest value of each metric."""
        self._latest.update(row)
        self._left = self._seconds_left(row)
        if self._in_place:
            self._write_alone(self._draw)
        else:
            self.note("  ".join(self._parts(row)))

    def video(self, path: Path, env_steps: int) -> None:
        self.note(f"video after {env_steps} steps: {self._shown(path)}")

    def note(self, text: str) -> bool:
        """Write a line, above the panel if there is one."""
        self._write_alone(lambda: self._put(escaped(text)))
        return True

    def _put(self, text: str) -> None:
        if self._live is not None:
            from rich.text import Text

            # As a Text, because markup=False would also hold for the panel, which is drawn again.
            self._live.console.print(Text(text), soft_wrap=True)
            return
        with contextlib.suppress(OSError, ValueError):  # a full disk behind the stream, or a closed one
            self._stream.write(f"{text}\n")
            self._stream.flush()

    def _write_alone(self, write: Callable[[], object]) -> None:
        """Write, or do so once the present line is written: a signal may come in the middle of it."""
        self._waiting.append(write)
        if self._writing:
            return
        self._writing = True
        try:
            while self._waiting:
                self._waiting.popleft()()
        finally:
            self._writing = False

    def activity(self, text: str) -> None:
        changed, self._activity = text != self._activity, text
        if self._in_place and (changed or self._live is None):
            self._write_alone(self._draw)  # takes as long as a short iteration

    def close(self, status: str, final_metrics: Row) -> None:
        metrics = {**self._latest, **final_metrics}
        self._activity = ""
        if self._live is not None:
            self._write_alone(self._end_panel)
        steps = int(metrics.get("env_steps", self._facts.resumed_at or 0))
        self.note(f"{status} after {steps} steps in {show_time(metrics.get('wall_time_s'))}")
        run = f"run={shlex.quote(str(self._run_dir))}"
        saves = self._facts.config["checkpoint_every"]
        if status == "finished" and saves:
            self.note(f"next: {as_typed('evaluate')} {run}\n      {as_typed('film')} {run}")
        # Not before the first step, where it would fail again, and not without checkpoints.
        elif saves and (steps or status != "failed"):
            self.note(f"next: {as_typed('resume')} {run}")

    def _end_panel(self) -> None:
        self._live.update(self._panel())
        self._live.stop()
        self._live = None

    def _draw(self) -> None:
        from rich.console import Group

        if self._live is None:
            # Imported here, because only a run on a terminal needs it.
            from rich.console import Console
            from rich.live import Live

            console = Console(file=self._stream, force_terminal=True, highlight=False, emoji=False)
            self._live = Live(
                console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
            )
            self._live.start()
            console.show_cursor(True)  # a run that is killed could not bring it back
        # The cursor stands in a line of its own: ^C, which the terminal writes there, would break the border.
        self._live.update(Group(self._panel(), ""), refresh=True)

    def _panel(self) -> Constrain:
        """The panel: progress, metrics, and the work beside training."""
        from rich.columns import Columns
        from rich.console import Group
        from rich.constrain import Constrain
        from rich.markup import escape
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        row = self._latest
        steps, config = int(row.get("env_steps", self._facts.resumed_at or 0)), self._facts.config
        progress = Table.grid(padding=(0, 2), expand=True)
        progress.add_column(ratio=1)
        speed = row.get("time/steps_per_second")
        progress.add_row(
            ProgressBar(total=self._total, completed=min(steps, self._total), complete_style="cyan"),
            f"{steps:,} of {self._total:,} steps",
            "-" if speed is None else f"{speed:,.0f} steps/s",
            f"left {show_time(self._left)}",
        )
        labels = {**_IN_PANEL, **self._of_algorithm}
        shown = [f"[dim]{label}[/] {show_number(row[name])}" for name, label in labels.items() if name in row]
        about = [f"[yellow]{self._activity}[/]"] if self._activity else []
        panel = Panel(
            Group(progress, Columns(shown, equal=True, padding=(0, 3)), *about),
            title=escape(escaped(f"{self._title}, {config['determinism']['level']}")),
            subtitle=f"[dim]{escape(escaped(str(self._run_dir)))}[/]",
            title_align="left",
            subtitle_align="right",
        )
        return Constrain(panel, _PANEL_WIDTH)

    def _shown(self, path: Path) -> Path:
        """The path from the current folder; in a file the absolute one, since it may be read elsewhere."""
        return from_here(path) if self._in_place else path

    def _seconds_left(self, row: Row) -> float | None:
        """The time left at the speed of the last rows, which include evaluations.

        None at the first row, because compiling may have taken most of its time.
        """
        now = (row["env_steps"], row["wall_time_s"])
        self._recent.append(now)
        steps, seconds = now[0] - self._recent[0][0], now[1] - self._recent[0][1]
        return max(0.0, self._total - now[0]) * seconds / steps if steps > 0 else None

    def _parts(self, row: Row) -> list[str]:
        """Parts of a line, the most important first, with nearly constant widths."""
        steps = int(row["env_steps"])
        done = min(100.0, 100 * steps / self._total)  # the last iteration may go beyond the total
        now = show_number(row["episode/return"]) if "episode/return" in row else "-"
        parts = [f"step {steps:>{len(str(self._total))}}/{self._total} {done:4.0f}%", f"return {now:>8}"]
        parts.append(f"left {show_time(self._left)}")
        if "time/steps_per_second" in row:
            parts.append(f"{row['time/steps_per_second']:>7,.0f} steps/s")
        if "eval/return" in row:
            parts.append(f"eval {show_number(row['eval/return']):>8}")
        for name, label in {"episode/length": "length", **self._of_algorithm}.items():
            if name in row:
                parts.append(f"{label} {show_number(row[name]):>8}")
        return parts
