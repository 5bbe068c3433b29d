"""From what an algorithm says to rows on disk and in the sinks, once per log interval.

`metrics.jsonl` is the truth and is written first; every other sink may fail without hurting the run.
Between two log points nothing is read from the device: tensors are only kept, then read in one transfer.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rltemplate.run.sinks import Row, Sink

if TYPE_CHECKING:
    from torch import Tensor

    from rltemplate.types import Episode, IterationResult

T = TypeVar("T")

# So many kept tensors of one metric are folded into a sum on the device, to bound memory when the
# algorithm's iterations are short and the log interval is long.
_FOLD_AT = 1024


def strict_json(row: Row) -> str:
    """`row` as one line of JSON that every parser accepts: numbers that are not finite become null."""
    clean = {name: value if math.isfinite(value) else None for name, value in row.items()}
    return json.dumps(clean, allow_nan=False)


class JsonlWriter:
    """Appends rows to a file, each a whole line that survives the death of the process.

    Never raises for what the machine does. While the file cannot be written (disk full, folder gone,
    permission taken) rows wait in memory, at most `max_waiting` of them, and are written with the first
    row that succeeds again. A file that was deleted is created anew with all that it held. `warn` gets
    one line when trouble begins and one when it is over.
    """

    def __init__(self, path: Path, max_waiting: int = 100_000) -> None:
        self.path = path
        self.warn: Callable[[str], None] = _to_stderr
        self._waiting: deque[bytes] = deque(maxlen=max_waiting)
        self._dropped = 0
        self._failing = False
        self._fd: int | None = None

    def write(self, row: Row) -> None:
        """Append `row`; on return it is with the operating system, or waits in memory."""
        if len(self._waiting) == self._waiting.maxlen:
            self._dropped += 1
        self._waiting.append(strict_json(row).encode() + b"\n")
        self._write_waiting()

    def close(self) -> None:
        """Try once more to write what waits; says how many rows were lost if that fails."""
        if self._waiting:
            self._write_waiting()
        if lost := len(self._waiting) + self._dropped:
            self.warn(f"{self.path}: {lost} rows could not be written and are lost")
        self._close_fd()

    def _write_waiting(self) -> None:
        try:
            fd = self._open()
            while self._waiting:
                _append_whole(fd, self._waiting[0])
                self._waiting.popleft()
        except OSError as error:
            if not self._failing:
                self._failing = True
                self.warn(f"{self.path} cannot be written ({error.strerror or error}); rows wait in memory")
            return
        if self._failing:
            self._failing = False
            lost = f", {self._dropped} rows are lost" if self._dropped else ", no row is lost"
            self.warn(f"{self.path} can be written again{lost}")
            self._dropped = 0

    def _open(self) -> int:
        """The descriptor of the file that now lies at `path`, which may have been deleted or replaced."""
        held = b""
        if self._fd is not None:
            if self._is_at_path(self._fd):
                return self._fd
            if not self.path.exists():
                # The name is gone, but the descriptor still holds every row.
                held = os.pread(self._fd, os.fstat(self._fd).st_size, 0)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            if held:
                _append_whole(fd, held)
            else:
                _drop_torn_line(fd)
        except OSError:
            if held:
                with contextlib.suppress(OSError):
                    self.path.unlink()  # else the next try would take this remnant for the file
            os.close(fd)
            raise
        self._close_fd()
        self._fd = fd
        if held:
            self.warn(f"{self.path} was deleted and is written anew, with all its rows")
        return fd

    def _is_at_path(self, fd: int) -> bool:
        try:
            return os.path.samestat(os.fstat(fd), self.path.stat())
        except FileNotFoundError:
            return False

    def _close_fd(self) -> None:
        if self._fd is not None:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = None


def _append_whole(fd: int, data: bytes) -> None:
    """All of `data` or nothing: what a full disk cuts off in the middle is taken back."""
    size = os.fstat(fd).st_size
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(fd, size)
        raise


def _drop_torn_line(fd: int) -> None:
    """Cut off a last line without its end, as a power failure leaves it, so that new rows start a line."""
    size = os.fstat(fd).st_size
    if size and os.pread(fd, 1, size - 1) != b"\n":
        os.ftruncate(fd, os.pread(fd, size, 0).rfind(b"\n") + 1)


def cut_metrics(path: Path, env_steps: int) -> float:
    """Drop the rows of `path` beyond `env_steps`, when a run goes on from a checkpoint taken there.

    Returns the wall time in seconds of the last row kept, 0.0 if there is none, from which the new
    logger goes on. The file is replaced in one step, so that a crash leaves the old or the new one.
    """
    if not path.exists():
        return 0.0
    kept: list[str] = []
    wall_time_s = 0.0
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            break  # torn by a power failure: nothing behind it can be trusted
        if row["env_steps"] > env_steps:
            break
        kept.append(line + "\n")
        wall_time_s = float(row["wall_time_s"])
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text("".join(kept), encoding="utf-8")
    temporary.replace(path)
    return wall_time_s


class Logger:
    """Collects what iterations report and turns it into rows.

    Sinks get each row in the order given, and close in reverse: name the console first, so that the
    others' last words are seen. `env_steps` and `wall_time_offset_s` say where a continued run stands.
    Rows carry `env_steps`, `wall_time_s` (seconds since the run began, without the time between its
    parts) and the metrics.
    """

    def __init__(
        self,
        sinks: Sequence[Sink],
        jsonl: JsonlWriter,
        clock: Callable[[], float] = time.perf_counter,
        *,
        env_steps: int = 0,
        wall_time_offset_s: float = 0.0,
    ) -> None:
        self._sinks = list(sinks)
        self._jsonl = jsonl
        self._jsonl.warn = self.message
        self._clock = clock
        self._begun = clock() - wall_time_offset_s
        self._last_log = (env_steps, clock())
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
        self._jsonl.write(row)
        self._to_sinks(lambda sink: sink.write(row))
        return metrics

    def video(self, path: Path, env_steps: int) -> None:
        """Hand a finished video to the sinks."""
        self._to_sinks(lambda sink: sink.video(path, env_steps))

    def message(self, text: str) -> None:
        """A line for the user, above the progress bar where there is one, else on standard error."""
        seen = [self._try(sink, lambda sink: sink.note(text)) for sink in list(self._sinks)]
        if not any(seen):
            _to_stderr(text)

    def close(self, status: str, final_metrics: Mapping[str, float] | None = None) -> None:
        """End the run with `status`. Every sink closes, whatever becomes of the others."""
        if self._closed:
            return
        self._closed = True
        self._jsonl.close()
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

    def add(self, value: Tensor) -> None:
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


def _to_stderr(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)
