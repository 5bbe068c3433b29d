"""From what an algorithm says to rows on disk and in the sinks, once per log interval.

`metrics.jsonl` is the truth and is written first; every other sink may fail without hurting the run.
Between two log points nothing is read from the device: tensors are only kept, then read in one transfer.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rltemplate.run.lines import LineFile, replace_text, to_stderr
from rltemplate.run.sinks.sink import Row, Sink
from rltemplate.types import Episode

if TYPE_CHECKING:
    from torch import Tensor

    from rltemplate.types import IterationResult

T = TypeVar("T")

# So many kept tensors of one metric are folded into a sum on the device, to bound memory when the
# algorithm's iterations are short and the log interval is long.
_FOLD_AT = 1024


def strict_json(row: Row) -> str:
    """`row` as one line of JSON that every parser accepts: numbers that are not finite become null."""
    clean = {name: value if math.isfinite(value) else None for name, value in row.items()}
    return json.dumps(clean, allow_nan=False)


def cut_metrics(path: Path, env_steps: int) -> tuple[list[dict[str, float]], int]:
    """Drop the rows of `path` beyond `env_steps`, when a run goes on from a checkpoint taken there.

    Returns the rows that are left, and the number of lines that were no rows and are dropped too. The file
    is replaced in one step, so that a crash leaves the old or the new one.
    """
    rows: list[dict[str, float]] = []
    if not path.exists():
        return rows, 0
    lines = path.read_bytes().split(b"\n")
    damaged = 0
    for line in lines[:-1]:  # what has no end was torn, and beyond any checkpoint
        try:
            row = json.loads(line)
            if row["env_steps"] <= env_steps:
                rows.append(row)
        except (ValueError, KeyError, TypeError):
            damaged += 1
    replace_text(path, [json.dumps(row) + "\n" for row in rows])
    return rows, damaged


class Logger:
    """Collects what iterations report and turns it into rows.

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
        self._pending: dict[str, _Mean] = {}
        self._episodes: list[Episode] = []
        self._closed = False

    def observe(self, result: IterationResult) -> None:
        """Keep what an iteration reported. Reads no value, so the device is not waited for."""
        for name, value in result.metrics.items():
            mean = self._pending.get(name)
            if mean is None:
                mean = self._pending[name] = _Mean(name)
            mean.add(value)
        self._episodes.extend(result.episodes)

    def log(self, env_steps: int, extra: Mapping[str, float] | None = None) -> dict[str, float]:
        """Write one row about everything since the last one, and return its metrics.

        A metric is the mean over the iterations that reported it; `episode/*` are means over the
        episodes that ended, and are absent if none did. `extra` (results of an evaluation, say) joins
        the same row.
        """
        metrics = self._read_pending()
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
        """What the next row will be made of, and where the clock is: tensors and numbers."""
        import torch

        now = self._clock()
        last_steps, last_time = self._last_log
        return {
            "pending": {name: mean.state_dict() for name, mean in self._pending.items()},
            "episodes": torch.tensor(self._episodes, dtype=torch.float64).reshape(-1, 2),
            "wall_time_s": now - self._begun,
            "last_log": [last_steps, now - last_time],
        }

    def load_state_dict(self, state: Mapping[str, Any], logged: Row | None = None) -> None:
        """Go on from there; `logged` is the row that was written between then and the end of the process."""
        now = self._clock()
        self._begun = now - state["wall_time_s"]
        last_steps, since_s = state["last_log"]
        self._last_log = (last_steps, now - since_s)
        if logged is not None:
            self._begun = now - logged["wall_time_s"]
            self._last_log = (int(logged["env_steps"]), now)
            return
        for name, mean in state["pending"].items():
            self._pending[name] = _Mean(name)
            self._pending[name].load_state_dict(mean)
        self._episodes = [Episode(total, int(length)) for total, length in state["episodes"].tolist()]

    def sync(self) -> None:
        """Have all rows on the disk."""
        self._lines.sync()

    def video(self, path: Path, env_steps: int) -> None:
        """Hand a finished video to the sinks."""
        self._to_sinks(lambda sink: sink.video(path, env_steps))

    def message(self, text: str) -> None:
        """A line for the user, above the progress bar where there is one, else on standard error."""
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

    def _read_pending(self) -> dict[str, float]:
        """The mean of every kept metric, with one transfer per device that holds any."""
        import torch

        pending, self._pending = self._pending, {}
        # Values of one type are stacked as they are: a kernel per group, not one per metric.
        groups: dict[torch.device, dict[torch.dtype, list[tuple[str, Tensor]]]] = {}
        for name, mean in pending.items():
            for value in mean.parts():
                groups.setdefault(value.device, {}).setdefault(value.dtype, []).append((name, value))
        sums: dict[str, list[float]] = {name: [] for name in pending}
        for by_type in groups.values():
            stacked = [torch.stack([value for _, value in group]).double() for group in by_type.values()]
            names = [name for group in by_type.values() for name, _ in group]
            for name, number in zip(names, torch.cat(stacked).tolist(), strict=True):
                sums[name].append(number)
        return {name: mean.of(sums[name]) for name, mean in pending.items()}

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


class _Mean:
    """What is needed for the mean of one metric: values, and the sum of earlier ones, on their device.

    Of a largest error the largest value is kept: a mean would hide the one that counts.
    """

    def __init__(self, name: str) -> None:
        self.count = 0
        self._name = name
        self._largest = name.endswith("_max_error")
        self._kept: list[Any] = []
        self._folded: Tensor | None = None
        self._restored = False

    def add(self, value: Tensor) -> None:
        if self._restored and hasattr(value, "device"):  # to where the others will be
            self._kept = [kept.to(value.device) for kept in self._kept]
            self._folded = None if self._folded is None else self._folded.to(value.device)
        self._restored = False
        self._kept.append(value)
        self.count += 1
        if len(self._kept) >= _FOLD_AT:
            import torch

            parts = [part.double() for part in self.parts()]
            stacked = torch.stack(parts)
            self._folded, self._kept = stacked.max() if self._largest else stacked.sum(), []

    def of(self, parts: list[float]) -> float:
        """The metric from the numbers in `parts()`."""
        if self._largest:
            return math.nan if any(map(math.isnan, parts)) else max(parts)
        return _sum(parts) / self.count

    def state_dict(self) -> dict[str, Any]:
        """The count, and the values that are added up so far."""
        import torch

        kept = [part.double() for part in self.parts()]
        folded = None if self._folded is None else kept.pop()
        values = torch.stack(kept).cpu() if kept else torch.empty(0, dtype=torch.float64)
        return {"count": self.count, "kept": values, "folded": None if folded is None else folded.cpu()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the values."""
        self.count = int(state["count"])
        self._kept = list(state["kept"].unbind())
        self._folded = state["folded"]
        self._restored = True

    def parts(self) -> list[Tensor]:
        """Tensors that add up to the sum of all values, or among which is the largest."""
        import torch

        values: list[Tensor] = [
            value.detach() if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)
            for value in self._kept
        ]
        for value in values:
            if value.ndim:
                shape = tuple(value.shape)
                raise ValueError(f"metric {self._name!r} must be a single number, got shape {shape}")
        return values if self._folded is None else [*values, self._folded]


def _sum(numbers: list[float]) -> float:
    """Exact for finite numbers; `fsum` alone raises for inf and -inf together."""
    return math.fsum(numbers) if all(map(math.isfinite, numbers)) else sum(numbers)
