"""The console: one line per log point, which a terminal redraws in place."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import sys
from collections import deque
from pathlib import Path
from typing import TextIO

from rltemplate.run.sinks.sink import Row, RunFacts, Sink

# Metrics shown of a row, in this order; everything else is in metrics.jsonl.
_SHOWN = {
    "episode/length": "length",
    "policy/entropy": "entropy",
    "loss/policy": "loss/policy",
    "loss/value": "loss/value",
    "loss/critic": "loss/critic",
}
_CLEAR = "\r\x1b[K"


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
        self._line = ""  # the one that is redrawn
        title = f"{algo['name']} on {env['id']}, seed {facts.config['seed']}"
        self.note(f"{title}\n{self._shown(facts.run_dir)}")
        if facts.resumed_at is not None:
            self.note(f"goes on after {facts.resumed_at} of {total} steps")

    def write(self, row: Row) -> None:
        """Write a line, or redraw it with the latest value of each metric."""
        self._latest.update(row)
        left = self._seconds_left(row)
        if not self._in_place:
            self.note("  ".join(self._parts(row, left)))
            return
        parts = self._parts(self._latest, left)
        width = os.get_terminal_size(self._stream.fileno()).columns or 80
        while len("  ".join(parts)) >= width:
            parts.pop()
        self._line = "  ".join(parts)
        self._put(_CLEAR + self._line)

    def video(self, path: Path, env_steps: int) -> None:
        self.note(f"video after {env_steps} steps: {self._shown(path)}")

    def note(self, text: str) -> bool:
        """A line above the one that is redrawn."""
        self._put(f"{_CLEAR}{text}\n{self._line}" if self._in_place else f"{text}\n")
        return True

    def close(self, status: str, final_metrics: Row) -> None:
        metrics = {**self._latest, **final_metrics}
        if self._line:
            self._put(f"{_CLEAR}{self._line}\n")
            self._line = ""
        steps = int(metrics.get("env_steps", 0))
        self.note(f"{status} after {steps} steps in {show_time(metrics.get('wall_time_s'))}")
        command = "evaluate" if status == "finished" else "resume"
        self.note(f"next: make {command} run={shlex.quote(str(self._shown(self._facts.run_dir)))}")

    def _put(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # a full disk behind the stream, or a closed one
            self._stream.write(text)
            self._stream.flush()

    def _shown(self, path: Path) -> Path:
        """The path as typed in the current folder; whole in a file, which may be read elsewhere."""
        with contextlib.suppress(OSError):  # the current folder was deleted
            if self._in_place and path.is_relative_to(Path.cwd()):
                return path.relative_to(Path.cwd())
        return path

    def _seconds_left(self, row: Row) -> float | None:
        """From the speed over the last rows, so that it follows a slow evaluation, but not at once."""
        now = (row["env_steps"], row["wall_time_s"])
        self._recent.append(now)
        steps, seconds = now[0] - self._recent[0][0], now[1] - self._recent[0][1]
        speed = steps / seconds if steps > 0 and seconds > 0 else row.get("time/steps_per_second", 0.0)
        return max(0.0, self._total - now[0]) / speed if speed > 0 else None

    def _parts(self, row: Row, left: float | None) -> list[str]:
        """Parts of a line, the most important first, of a width that hardly changes."""
        steps = int(row["env_steps"])
        done = min(100.0, 100 * steps / self._total)  # the last iteration may end behind it
        now = show_number(row["episode/return"]) if "episode/return" in row else "-"
        parts = [f"step {steps:>{len(str(self._total))}}/{self._total} {done:4.0f}%", f"return {now:>8}"]
        parts.append(f"left {show_time(left)}")
        if "time/steps_per_second" in row:
            parts.append(f"{row['time/steps_per_second']:>7,.0f} steps/s")
        if "eval/return" in row:
            parts.append(f"eval {show_number(row['eval/return']):>8}")
        parts += [f"{label} {show_number(row[name]):>8}" for name, label in _SHOWN.items() if name in row]
        return parts
