"""From the metrics of iterations to rows on disk and in the sinks, once per log interval.

`metrics.jsonl` is the truth and is written first; every other sink may fail without hurting the run.
Between two rows nothing is read from the device: tensors are kept, then read in one transfer.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rltemplate.run.lines import LineFile, replace_text, to_stderr
from rltemplate.run.read import parse_row
from rltemplate.run.sinks.sink import Row, Sink
from rltemplate.types import Episode

if TYPE_CHECKING:
    from torch import Tensor

    from rltemplate.types import IterationResult

T = TypeVar("T")

# Iterations after which kept tensors are read although no row is due, to bound memory.
_READ_AT = 1024


def strict_json(row: Row) -> str:
    """`row` as one line of JSON that every parser accepts: numbers that are not finite become null."""
    clean = {name: value if math.isfinite(value) else None for name, value in row.items()}
    return json.dumps(clean, allow_nan=False)


def cut_metrics(path: Path, env_steps: int) -> tuple[list[dict[str, Any]], int]:
    """Drop the rows of `path` beyond `env_steps`, when a run resumes from a checkpoint taken there.

    Returns the rows that are left, and the number of lines that were no rows and are dropped too. The file
    is replaced in one step, so that a crash leaves the old or the new one.
    """
    rows: list[dict[str, Any]] = []
    if not path.exists():
        return rows, 0
    lines = path.read_bytes().split(b"\n")
    damaged = 0
    for line in lines[:-1]:  # what has no end was torn, and beyond any checkpoint
        row = parse_row(line)
        reached = None if row is None else row.get("env_steps")
        if row is None or reached is None:
            damaged += 1
        elif reached <= env_steps:
            rows.append(row)
    replace_text(path, [json.dumps(row) + "\n" for row in rows])
    return rows, damaged


class Logger:
    """Collects the metrics of iterations and turns them into rows.

    Sinks get each row in the order given, and close in reverse: name the console first, so that the
    others' last words are seen. Rows carry `env_steps`, `wall_time_s` (seconds since the run began, without
    the time between its parts) and the metrics.
    """

    def __init__(
        self, sinks: Sequence[Sink], lines: LineFile, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._sinks = list(sinks)
        self._lines = lines
        self._lines.warn = self.message
        self._clock = clock
        self._begun = clock()
        self._last_log = (0, clock())
        self._kept: list[Mapping[str, Tensor]] = []  # metrics of iterations, not yet read
        self._values: dict[str, array[float]] = {}  # read since the last row
        self._episodes: list[Episode] = []
        self._closed = False

    def observe(self, result: IterationResult) -> None:
        """Keep the metrics of an iteration. Reads no value, so that the device is not waited for."""
        self._kept.append(result.metrics)
        self._episodes.extend(result.episodes)
        if len(self._kept) >= _READ_AT:
            self._read()

    def log(self, env_steps: int, extra: Mapping[str, float] | None = None) -> dict[str, float]:
        """Write one row about everything since the last one, and return its metrics.

        A metric is the mean over the iterations that reported it, and the largest value of a `_max_error`;
        `episode/*` are means over the episodes that ended, and are absent if none did. `extra`, such as
        results of an evaluation, joins the same row.
        """
        self._read()
        metrics = {name: _summary(name, values) for name, values in self._values.items()}
        self._values = {}
        if self._episodes:
            ended = len(self._episodes)
            metrics["episode/return"] = math.fsum(e.episode_return for e in self._episodes) / ended
            metrics["episode/length"] = sum(e.length for e in self._episodes) / ended
            self._episodes = []
        now = self._clock()
        last_steps, last_time = self._last_log
        if env_steps > last_steps and now > last_time:
            metrics["time/steps_per_second"] = (env_steps - last_steps) / (now - last_time)
        self._last_log = (env_steps, now)
        metrics.update({name: float(value) for name, value in (extra or {}).items()})
        row = {"env_steps": env_steps, "wall_time_s": round(now - self._begun, 6), **metrics}
        self._lines.write(strict_json(row))
        self._to_sinks(lambda sink: sink.write(row))
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """The values that the next row will be made of, and the clock: tensors and numbers."""
        import torch

        self._read()
        now = self._clock()
        last_steps, last_time = self._last_log
        return {
            "pending": {name: torch.tensor(v, dtype=torch.float64) for name, v in self._values.items()},
            "episodes": torch.tensor(self._episodes, dtype=torch.float64).reshape(-1, 2),
            "wall_time_s": now - self._begun,
            "last_log": [last_steps, now - last_time],
        }

    def load_state_dict(self, state: Mapping[str, Any], logged: Row | None = None) -> None:
        """Resume there; `logged` is the row that was written between then and the end of the process."""
        now = self._clock()
        self._begun = now - state["wall_time_s"]
        last_steps, since_s = state["last_log"]
        self._last_log = (last_steps, now - since_s)
        if logged is not None:
            self._begun = now - logged["wall_time_s"]
            self._last_log = (int(logged["env_steps"]), now)
            return
        self._values = {name: array("d", values.tolist()) for name, values in state["pending"].items()}
        self._episodes = [Episode(total, int(length)) for total, length in state["episodes"].tolist()]

    def sync(self) -> None:
        """Flush all rows to the disk."""
        self._lines.sync()

    def video(self, path: Path, env_steps: int) -> None:
        """Hand a finished video to the sinks."""
        self._to_sinks(lambda sink: sink.video(path, env_steps))

    def message(self, text: str) -> None:
        """A line for the user, above the line of progress on a terminal, else on standard error."""
        seen = [self._try(sink, lambda sink: sink.note(text)) for sink in list(self._sinks)]
        if not any(seen):
            to_stderr(text)

    def close(self, status: str, final_metrics: Mapping[str, float] | None = None) -> None:
        """End the run with `status`. Every sink closes, whatever becomes of the others."""
        if self._closed:
            return
        self._closed = True
        self._lines.close()
        for sink in reversed(list(self._sinks)):
            self._try(sink, lambda sink: sink.close(status, final_metrics or {}))
        self._sinks = []

    def _read(self) -> None:
        """Read all kept metrics, with one transfer for each device and type."""
        import torch

        kept, self._kept = self._kept, []
        groups: dict[tuple[torch.device, torch.dtype], list[tuple[str, Tensor]]] = {}
        for metrics in kept:
            for name, given in metrics.items():
                plain = not isinstance(given, torch.Tensor)
                value = torch.tensor(given, dtype=torch.float64) if plain else given
                if value.ndim:
                    shape = tuple(value.shape)
                    raise ValueError(f"metric {name!r} must be a single number, got shape {shape}")
                self._values.setdefault(name, array("d"))
                groups.setdefault((value.device, value.dtype), []).append((name, value.detach()))
        for group in groups.values():
            numbers = torch.stack([value for _, value in group]).double().tolist()
            for (name, _), number in zip(group, numbers, strict=True):
                self._values[name].append(number)

    def _to_sinks(self, call: Callable[[Sink], None]) -> None:
        for sink in list(self._sinks):
            self._try(sink, call)

    def _try(self, sink: Sink, call: Callable[[Sink], T]) -> T | None:
        """Call a sink; one that fails is reported, closed and not used again."""
        try:
            return call(sink)
        except Exception as error:
            if sink in self._sinks:
                self._sinks.remove(sink)
                self.message(f"{type(sink).__name__} is switched off: {type(error).__name__}: {error}")
                with contextlib.suppress(Exception):
                    sink.close("failed", {})
            return None


def _summary(name: str, values: Sequence[float]) -> float:
    """The mean; of a largest error the largest value, which a mean would hide."""
    if not all(map(math.isfinite, values)):  # `fsum` raises for inf and -inf together, `max` ignores NaN
        return sum(values)
    return max(values) if name.endswith("_max_error") else math.fsum(values) / len(values)
