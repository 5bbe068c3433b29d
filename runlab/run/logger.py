"""From the metrics of iterations to rows on disk and in the sinks. run/observers.py says when a row is due.

`metrics.jsonl` is the truth and is written first; every other sink may fail without hurting the run.
Metrics are collected as tensors, and read from the device in one transfer for each row.
"""

from __future__ import annotations

import contextlib
import math
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runlab.config.texts import first_line
from runlab.interfaces import Episode
from runlab.run.files import LineFile, strict_json, to_stderr
from runlab.run.sinks.sink import Sink

if TYPE_CHECKING:
    from torch import Tensor

    from runlab.interfaces import IterationResult

# Iterations after which collected tensors are read even if no row is due, to limit memory.
_READ_AT = 1024
# Values of a row that are no metrics of the algorithm.
_OF_ROWS = {"env_steps", "wall_time_s", "time/steps_per_second"}
_OF_ROWS |= {f"{kind}/{name}" for kind in ("episode", "eval") for name in ("return", "length")}


class Logger:
    """Collects the metrics of iterations and turns them into rows.

    Sinks get each row in the order given, and close in reverse: with the console first, it can still show
    messages of the closing sinks. Rows carry `env_steps`, `wall_time_s` (seconds since the run began,
    without the time between its parts) and the metrics.
    """

    def __init__(self, sinks: Sequence[Sink], lines: LineFile) -> None:
        self.final_metrics: dict[str, float] = {}  # the last value of every metric
        self._sinks = list(sinks)
        self.lines = lines
        self.lines.warn = self.message
        self._begun = time.perf_counter()
        self._unread: list[Mapping[str, Tensor]] = []  # metrics of iterations
        self._values: dict[str, list[float]] = {}  # read since the last row
        self._episodes: list[Episode] = []

    def observe(self, result: IterationResult) -> None:
        """Collect the metrics of an iteration. Reads no value, so as not to wait for the device."""
        for name, value in result.metrics.items():
            # Numpy's numbers have a shape as well, and no NaN would be found in them.
            if not hasattr(value, "detach") or value.shape != ():
                raise ValueError(f"metric {name!r} must be a tensor of a single number, got {value!r:.60}")
            if name in _OF_ROWS:
                raise ValueError(f"metric {name!r} would hide a value of the row; give it another name")
        self._unread.append(result.metrics)
        self._episodes.extend(result.episodes)
        if len(self._unread) >= _READ_AT:
            self._read()

    def log(self, env_steps: int, extra: Mapping[str, float]) -> None:
        """Write one row about everything since the last one.

        A metric is the mean over the iterations that reported it, and the largest value of a `_max_error`;
        `episode/*` are means over the episodes that ended, and are absent if none did. `extra`, such as
        results of an evaluation, joins the same row.
        """
        self._read()
        metrics = {name: _summary(name, values) for name, values in self._values.items()}
        metrics |= episode_means("episode", self._episodes)
        self._values, self._episodes = {}, []
        metrics.update({name: float(value) for name, value in extra.items()})
        self.final_metrics.update(metrics)
        row = {"env_steps": env_steps, "wall_time_s": self.seconds(), **metrics}
        self.lines.write(strict_json(row))
        self._to_sinks(lambda sink: sink.write(row))

    def state_dict(self) -> dict[str, Any]:
        """The values for the next row, and the clock: tensors and numbers."""
        import torch

        self._read()
        rows = [(*each[:2], *each.infos.values()) for each in self._episodes]
        return {
            "pending": {name: torch.tensor(v, dtype=torch.float64) for name, v in self._values.items()},
            "episodes": torch.tensor(rows, dtype=torch.float64),
            "infos": _names_of_infos(self._episodes),
            "final_metrics": self.final_metrics,
            "wall_time_s": time.perf_counter() - self._begun,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._values = {name: values.tolist() for name, values in state["pending"].items()}
        names = state.get("infos", [])  # earlier versions had none
        self._episodes = [
            Episode(total, int(length), dict(zip(names, infos, strict=True)))
            for total, length, *infos in state["episodes"].tolist()
        ]
        self.final_metrics = dict(state["final_metrics"])
        self._begun = time.perf_counter() - state["wall_time_s"]

    def video(self, path: Path, env_steps: int) -> None:
        self._to_sinks(lambda sink: sink.video(path, env_steps))

    def message(self, text: str) -> None:
        """A line for the user, above the line of progress on a terminal, else on standard error."""
        if not any(self._to_sinks(lambda sink: sink.note(text))):
            to_stderr(text)

    def activity(self, text: str) -> None:
        """Show the present work beside training, such as `evaluating`; empty for training."""
        self._to_sinks(lambda sink: sink.activity(text))

    def close(self, status: str, env_steps: int | None = None) -> None:
        """End the run with `status`. Every sink closes, even if another one fails.

        Sinks get `env_steps` and the time of the end, since the last row may be from earlier.
        """
        self.lines.close()
        self._sinks.reverse()
        reached = {} if env_steps is None else {"env_steps": env_steps, "wall_time_s": self.seconds()}
        self._to_sinks(lambda sink: sink.close(status, {**self.final_metrics, **reached}))
        self._sinks = []

    def seconds(self) -> float:
        return round(time.perf_counter() - self._begun, 6)

    def _read(self) -> None:
        """Read all collected metrics with one transfer."""
        import torch

        pairs = [pair for metrics in self._unread for pair in metrics.items()]
        self._unread = []
        # A metric may have stayed on the CPU while the others are on a GPU.
        device = next((value.device for _, value in pairs if value.device.type != "cpu"), torch.device("cpu"))
        values = [value.to(device, torch.float64) for _, value in pairs]
        numbers = torch.stack(values).tolist() if pairs else []
        for (name, _), number in zip(pairs, numbers, strict=True):
            self._values.setdefault(name, []).append(number)

    def _to_sinks(self, call: Callable[[Sink], object]) -> list[object]:
        """Call all sinks; their answers. A sink that fails is reported, closed and removed."""
        answers = []
        for sink in list(self._sinks):
            try:
                answers.append(call(sink))
            except Exception as error:
                if sink not in self._sinks:  # it failed at the message about another failed sink
                    continue
                self._sinks.remove(sink)
                last = traceback.extract_tb(error.__traceback__)[-1]
                at = "" if isinstance(error, OSError) else f" in {last.filename}, line {last.lineno}"
                self.message(
                    f"{type(sink).__name__} is switched off: {type(error).__name__}{at}: {first_line(error)}"
                )
                with contextlib.suppress(Exception):
                    sink.close("failed", {})
        return answers


def _summary(name: str, values: Sequence[float]) -> float:
    """The mean; for a `_max_error` the largest value, which a mean would hide."""
    if not all(map(math.isfinite, values)):  # `fsum` raises for inf and -inf together, `max` ignores NaN
        return sum(values)
    return max(values) if name.endswith("_max_error") else math.fsum(values) / len(values)


def episode_means(kind: str, episodes: Sequence[Episode]) -> dict[str, float]:
    """Means under the names that every log uses, of an info over the episodes that had it; may be empty."""
    if not episodes:
        return {}
    means = {
        f"{kind}/return": math.fsum(each.episode_return for each in episodes) / len(episodes),
        f"{kind}/length": sum(each.length for each in episodes) / len(episodes),
    }
    for name in _names_of_infos(episodes):
        if values := [value for each in episodes if not math.isnan(value := each.infos[name])]:
            means[f"{kind}/{name}"] = _summary("", values)
    return means


def _names_of_infos(episodes: Sequence[Episode]) -> list[str]:
    return [name for each in episodes[:1] for name in each.infos]  # all have the same ones
