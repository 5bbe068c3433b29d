"""The console: lines in a file, one line in place on a terminal, and a panel in place on a wide one."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import sys
from collections import deque
from pathlib import Path
from typing import TextIO

from rltemplate.run.paths import from_here
from rltemplate.run.sinks.sink import Row, RunFacts, Sink

# Metrics shown of a row, in this order; everything else is in metrics.jsonl.
_SHOWN = {
    "episode/length": "length",
    "policy/entropy": "entropy",
    "loss/policy": "loss/policy",
    "loss/value": "loss/value",
    "loss/critic": "loss/critic",
}
_IN_PANEL = {
    "episode/return": "return",
    "eval/return": "evaluation",
    "episode/length": "episode length",
    "policy/entropy": "entropy",
    "loss/policy": "policy loss",
    "loss/value": "value loss",
    "loss/critic": "critic loss",
    "optim/learning_rate": "learning rate",
    "policy/approx_kl": "approx. KL",
    "alpha/value": "alpha",
}
_PANEL_COLUMNS = 4
_CLEAR = "\r\x1b[K"
_PANEL_FROM = 100, 16  # columns and rows of a terminal


def show_number(value: float) -> str:
    """Four significant digits, without an exponent where that stays short: `143.2`, `0.0613`, `2.5e-07`."""
    if math.isfinite(value) and value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.1f}" if 1000 <= abs(value) < 1e6 else f"{value:.4g}"


def show_time(seconds: float | None) -> str:
    """`h:mm:ss`, and `-:--:--` for an unknown time."""
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
        self._stream = sys.stderr if stream is None else stream
        self._in_place = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._recent: deque[tuple[float, float]] = deque(maxlen=10)  # (env_steps, wall_time_s)
        self._latest: dict[str, float] = {}
        self._left: float | None = None  # seconds
        self._activity = ""
        self._height = 0  # lines of the panel that stands in place
        self._wide = True
        self._run_dir = self._shown(facts.run_dir)
        self._title = f"{algo['name']} on {env['id']}, seed {facts.config['seed']}"
        self.note(f"{self._title}\n{self._run_dir}")
        if facts.resumed_at is not None:
            self.note(f"goes on after {facts.resumed_at} of {total} steps")

    def write(self, row: Row) -> None:
        """Write a line, or redraw what stands in place with the latest value of each metric."""
        self._latest.update(row)
        self._left = self._seconds_left(row)
        if self._in_place:
            self._redraw()
        else:
            self.note("  ".join(self._parts(row)))

    def video(self, path: Path, env_steps: int) -> None:
        self.note(f"video after {env_steps} steps: {self._shown(path)}")

    def note(self, text: str) -> bool:
        """A line above what stands in place."""
        if self._in_place:
            self._redraw(f"{text}\n")
        else:
            self._put(f"{text}\n")
        return True

    def activity(self, text: str) -> None:
        self._activity = text
        if self._in_place and self._wide:
            self._redraw()

    def close(self, status: str, final_metrics: Row) -> None:
        metrics = {**self._latest, **final_metrics}
        self._activity = ""
        if self._in_place:
            self._redraw()
            self._put("" if self._height or not self._latest else "\n")
            self._in_place = False
        steps = int(metrics.get("env_steps", 0))
        self.note(f"{status} after {steps} steps in {show_time(metrics.get('wall_time_s'))}")
        run = f"run={shlex.quote(str(self._run_dir))}"
        if status == "finished":
            self.note(f"next: make evaluate {run}\n      make film {run}")
        elif steps or status != "failed":  # before its first step, it would only fail again
            self.note(f"next: make resume {run}")

    def _redraw(self, above: str = "") -> None:
        """Write `above`, and below it the line or the panel in the place of the earlier one."""
        erase = f"\x1b[{self._height}A\r\x1b[J" if self._height else _CLEAR
        columns, rows = os.get_terminal_size(self._stream.fileno())
        columns = columns or 80
        self._wide = columns >= _PANEL_FROM[0] and rows >= _PANEL_FROM[1]
        drawn = ""
        if self._wide and (self._latest or self._activity):
            drawn = self._panel(columns)
        elif self._latest:
            parts = self._parts(self._latest)
            while len("  ".join(parts)) >= columns:
                parts.pop()
            drawn = "  ".join(parts)
        self._height = drawn.count("\n")
        self._put(erase + above + drawn)

    def _panel(self, columns: int) -> str:
        """A panel with all that matters, and the activity besides training."""
        # These take a moment to import, which only a run on a wide terminal spends.
        from rich.console import Console, Group
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        row, width = self._latest, min(columns - 1, 140)
        steps, config = int(row.get("env_steps", 0)), self._facts.config
        progress = Table.grid(padding=(0, 2), expand=True)
        progress.add_column(ratio=1)
        speed = row.get("time/steps_per_second")
        progress.add_row(
            ProgressBar(total=self._total, completed=min(steps, self._total), complete_style="cyan"),
            f"{steps:,} of {self._total:,} steps",
            "-" if speed is None else f"{speed:,.0f} steps/s",
            f"left {show_time(self._left)}",
        )
        metrics = Table.grid(padding=(0, 1), expand=True)
        shown = [(label, row[name]) for name, label in _IN_PANEL.items() if name in row]
        for start in range(0, len(shown), _PANEL_COLUMNS):
            cells = [
                f"[dim]{label}[/] {show_number(value)}" for label, value in shown[start:][:_PANEL_COLUMNS]
            ]
            metrics.add_row(*cells)
        for column in metrics.columns:
            column.ratio = 1
        standing = self._facts.standing and self._facts.standing(steps, row.get("eval/return", math.nan))
        about = [f"[dim]evaluation:[/] {standing}"] * bool(standing) + [
            f"[yellow]{self._activity}[/]"
        ] * bool(self._activity)
        console = Console(width=width, force_terminal=True, highlight=False)
        with console.capture() as captured:
            console.print(
                Panel(
                    Group(progress, metrics, *about),
                    title=f"{self._title}, {config['determinism']['level']}",
                    subtitle=f"[dim]{self._run_dir}[/]",
                    title_align="left",
                    subtitle_align="right",
                )
            )
        return captured.get()

    def _put(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # a full disk behind the stream, or a closed one
            self._stream.write(text)
            self._stream.flush()

    def _shown(self, path: Path) -> Path:
        """The path as typed in the current folder; whole in a file, which may be read elsewhere."""
        return from_here(path) if self._in_place else path

    def _seconds_left(self, row: Row) -> float | None:
        """From the speed over the last rows, so that it follows a slow evaluation, but not at once.

        None from a first row alone: compiling may have taken most of its time.
        """
        now = (row["env_steps"], row["wall_time_s"])
        self._recent.append(now)
        steps, seconds = now[0] - self._recent[0][0], now[1] - self._recent[0][1]
        return max(0.0, self._total - now[0]) * seconds / steps if steps > 0 else None

    def _parts(self, row: Row) -> list[str]:
        """Parts of a line, the most important first, of a width that hardly changes."""
        steps = int(row["env_steps"])
        done = min(100.0, 100 * steps / self._total)  # the last iteration may end behind it
        now = show_number(row["episode/return"]) if "episode/return" in row else "-"
        parts = [f"step {steps:>{len(str(self._total))}}/{self._total} {done:4.0f}%", f"return {now:>8}"]
        parts.append(f"left {show_time(self._left)}")
        if "time/steps_per_second" in row:
            parts.append(f"{row['time/steps_per_second']:>7,.0f} steps/s")
        if "eval/return" in row:
            parts.append(f"eval {show_number(row['eval/return']):>8}")
        parts += [f"{label} {show_number(row[name]):>8}" for name, label in _SHOWN.items() if name in row]
        return parts
