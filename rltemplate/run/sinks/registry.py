"""Where log rows go besides `metrics.jsonl`: the console and TensorBoard (W&B is in `wandb_sink`).

A sink may fail at any time: the logger then reports it once, switches it off, and the run goes on.
Rows are plain dicts: `env_steps` (int), `wall_time_s` (seconds since the run began) and the metrics.

A run that goes on from a checkpoint hands some rows over a second time. What a sink shows is then the same
as of a run that was never interrupted: nothing twice, and nothing missing that `metrics.jsonl` has.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import math
import os
import re
import shlex
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from rltemplate.run.paths import METRICS, TENSORBOARD, VIDEOS, video_path

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.progress import Progress
    from rich.table import Table

Row = Mapping[str, float]
# What is to be said of a mean return (float) after so many environment steps (int), if anything.
Standing = Callable[[int, float], str | None]

# What a plain line shows of a row, in this order; everything else is in metrics.jsonl.
_SHOWN = {
    "episode/return": "return",
    "episode/length": "length",
    "policy/entropy": "entropy",
    "loss/policy": "loss/policy",
    "loss/value": "loss/value",
    "loss/critic": "loss/critic",
}
# These are shown as `-` while there is no value, so that the columns of a plain log stay in place.
_ALWAYS_SHOWN = ("episode/return", "episode/length")
_BELOW_BAR = {"eval/return": "eval", **{name: label for name, label in _SHOWN.items() if label != "return"}}
_X_AXES = ("env_steps", "wall_time_s")


def rows_so_far(run_dir: Path) -> list[dict[str, float]]:
    """The rows of a run's `metrics.jsonl`, up to a line that a power failure tore; none if there is no file.

    A number that JSON has no word for was written as null, and is read as not a number.
    """
    rows: list[dict[str, float]] = []
    try:
        lines = (run_dir / METRICS).read_bytes().splitlines()
    except OSError:
        return rows
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            break
        rows.append({name: math.nan if value is None else value for name, value in row.items()})
    return rows


def videos_so_far(run_dir: Path) -> dict[int, Path]:
    """The videos in a run folder, by the number of environment steps after which they were taken."""
    found = (re.fullmatch(r"step_(\d+)\.mp4", path.name) for path in (run_dir / VIDEOS).glob("*.mp4"))
    steps = sorted(int(match[1]) for match in found if match)
    return {at: video_path(run_dir, at) for at in steps}


class Sink(Protocol):
    """Something that shows or stores log rows. Every method may raise; none may block for long."""

    def write(self, row: Row) -> None:
        """One log point."""
        ...

    def video(self, path: Path, env_steps: int) -> None:
        """A video of the policy after `env_steps` environment steps lies at `path`."""
        ...

    def note(self, text: str) -> bool:
        """A line of plain text for the user. Whether the user sees it here."""
        ...

    def close(self, status: str, final_metrics: Row) -> None:
        """The run ended with `status` (`finished`, `failed`, `interrupted`). Called once, as the last."""
        ...


def show_number(value: float) -> str:
    """Four significant digits, without an exponent where that stays short: `143.2`, `0.0613`, `2.5e-07`."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    if abs(value) >= 1000 and abs(value) < 1e6:
        return f"{value:.1f}"
    return f"{value:.4g}"


def show_time(seconds: float | None) -> str:
    """`h:mm:ss`, with days in front of long times, and `-:--:--` for an unknown one."""
    if seconds is None or not math.isfinite(seconds):
        return "-:--:--"
    hours, rest = divmod(max(0, round(seconds)), 3600)
    days, hours = divmod(hours, 24)
    clock = f"{hours}:{rest // 60:02d}:{rest % 60:02d}"
    return f"{days}d {clock}" if days else clock


class ConsoleSink:
    """A progress bar and the latest numbers on a terminal, one plain line per log point anywhere else.

    `title` names the run in a few characters; a narrow terminal shows what follows its last comma. `run_dir`
    is shown at the start and at the end. The bar needs a terminal that can move its cursor; with `TERM=dumb`,
    in a pipe or in a file the plain lines are used. A run that goes on begins at `resumed_at` steps, and the
    time that is left is told from the speed of this part of it. `standing` gives a line about the last
    evaluation of a run that finished, from the steps and the mean return.
    """

    def __init__(
        self,
        total_env_steps: int,
        title: str = "",
        stream: TextIO | None = None,
        resumed_at: int | None = None,
        standing: Standing | None = None,
        run_dir: Path | None = None,
    ) -> None:
        self._total = max(1, total_env_steps)
        self._title = title
        self._run_dir = run_dir
        self._standing = standing
        self._stream = sys.stderr if stream is None else stream
        self._recent: deque[tuple[float, float]] = deque(maxlen=10)  # (env_steps, wall_time_s)
        self._latest: dict[str, float] = {}
        self._console: Console | None = None
        self._progress: Progress | None = None
        self._live: Live | None = None
        self._drawn_at = -math.inf
        if self._stream.isatty() and os.environ.get("TERM") != "dumb":
            self._start_bar(resumed_at or 0)
        else:
            self._say_start()
        if resumed_at is not None:
            self.note(f"goes on after {resumed_at} of {total_env_steps} steps")

    def write(self, row: Row) -> None:
        self._latest.update(row)
        left = self._seconds_left(row)
        if self._live is None or self._progress is None:
            self._print(self._plain_line(row, left))
            return
        # Drawing takes milliseconds: with short log intervals not every row is drawn.
        now = time.monotonic()
        if draw := now - self._drawn_at >= 0.1:
            self._drawn_at = now
        recent_return = self._latest.get("episode/return")
        speed = row.get("time/steps_per_second")
        self._progress.update(
            self._progress.task_ids[0],
            completed=min(int(row["env_steps"]), self._total),
            shown_return="-" if recent_return is None else show_number(recent_return),
            shown_speed="-" if speed is None else f"{speed:,.0f}",
            shown_left=show_time(left),
        )
        if draw:
            self._live.refresh()

    def video(self, path: Path, env_steps: int) -> None:
        self.note(f"video after {env_steps} steps: {self._shown(path)}")

    def note(self, text: str) -> bool:
        if self._console is None:
            self._print(text)
        else:
            # soft_wrap leaves paths in one piece, so that they can be clicked and copied.
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        return True

    def close(self, status: str, final_metrics: Row) -> None:
        metrics = {**self._latest, **final_metrics}
        self._stop_bar()
        steps = int(metrics.get("env_steps", 0))
        took = show_time(metrics["wall_time_s"]) if "wall_time_s" in metrics else "-:--:--"
        ending = f"{status} after {steps} steps in {took}"
        shown = {name: value for name, value in metrics.items() if name not in _X_AXES}
        if status == "finished" and self._standing is not None and "eval/return" in metrics:
            standing = self._standing(steps, metrics["eval/return"])
            ending += f"\n{standing}" if standing else ""
        self.note(ending)
        if self._console is not None and shown:
            self._console.print(_summary_table(shown, self._console))
        if self._run_dir is not None:
            near = _seen_from_here(self._run_dir)
            # Where commands look for it, the id is enough.
            run = near.name if near.parts[:1] == ("runs",) and len(near.parts) == 3 else str(near)
            command = "evaluate" if status == "finished" else "resume"
            self.note(f"{self._shown(self._run_dir)}\nnext: make {command} run={shlex.quote(run)}")

    def _say_start(self) -> None:
        line = f"{self._title}: {self._shown(self._run_dir)}" if self._run_dir else self._title
        if self._console is not None and len(line) > self._console.width:
            line = line.replace(": ", "\n", 1)
        if line:
            self.note(line)

    def _shown(self, path: Path) -> Path:
        """The path; as a whole in a file, which may be read elsewhere."""
        return path if self._console is None else _seen_from_here(path)

    def _start_bar(self, done: int) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        self._console = Console(file=self._stream)
        self._say_start()
        # The numbers take 53 columns with the shortest bar.
        fits = len(self._title) + 53 <= self._console.width
        title = self._title if fits else self._title.rpartition(", ")[2]

        def fixed(template: str) -> TextColumn:
            return TextColumn(template, table_column=Column(no_wrap=True, justify="right"))

        self._progress = Progress(
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
            BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=4)),
            fixed("[progress.percentage]{task.percentage:>3.0f}%"),
            fixed("return [bold]{task.fields[shown_return]:>7}"),
            # On a narrow terminal the seed goes first.
            *([fixed("{task.fields[shown_speed]:>6}[dim] steps/s")] if self._console.width >= 72 else []),
            fixed("[dim]left[/] {task.fields[shown_left]}"),
            expand=True,
        )
        self._progress.add_task(
            title,
            total=self._total,
            completed=min(done, self._total),
            shown_return="-",
            shown_speed="-",
            shown_left=show_time(None),
        )
        # Drawn when a row arrives: no thread beside training.
        self._live = Live(console=self._console, auto_refresh=False, get_renderable=self._panel)
        self._live.start()
        # The bar hides the cursor; a run that dies without closing must not leave the terminal so.
        atexit.register(self._stop_bar)

    def _panel(self) -> RenderableType:
        """The bar, and below it what a plain line shows besides."""
        from rich.columns import Columns
        from rich.console import Group
        from rich.text import Text

        assert self._progress is not None
        known = {name: label for name, label in _BELOW_BAR.items() if name in self._latest}
        cells = [f"{label} {show_number(self._latest[name]):>9}" for name, label in known.items()]
        # Without a line that has room the terminal's ^C would break the bar, which is then drawn twice.
        below = Columns([Text(cell, "dim") for cell in cells], padding=(0, 2)) if cells else Text()
        return Group(self._progress, below)

    def _stop_bar(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
            atexit.unregister(self._stop_bar)

    def _print(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # a full disk behind the stream, or a closed one
            self._stream.write(text + "\n")
            self._stream.flush()

    def _seconds_left(self, row: Row) -> float | None:
        """From the speed over the last rows, so that it follows a slow evaluation, but not at once."""
        now = (row["env_steps"], row["wall_time_s"])
        self._recent.append(now)
        oldest = self._recent[0]
        steps, seconds = now[0] - oldest[0], now[1] - oldest[1]
        speed = steps / seconds if steps > 0 and seconds > 0 else row.get("time/steps_per_second", 0.0)
        return max(0.0, self._total - now[0]) / speed if speed > 0 else None

    def _plain_line(self, row: Row, left: float | None) -> str:
        steps = int(row["env_steps"])
        width = len(str(self._total))
        done = min(100.0, 100 * steps / self._total)  # the last iteration may end behind it
        parts = [f"step {steps:>{width}}/{self._total} {done:4.0f}%"]
        for name, label in _SHOWN.items():
            if name in row:
                parts.append(f"{label} {show_number(row[name]):>8}")
            elif name in _ALWAYS_SHOWN:
                parts.append(f"{label} {'-':>8}")
        if "time/steps_per_second" in row:
            parts.append(f"{row['time/steps_per_second']:>7,.0f} steps/s")
        parts.append(f"left {show_time(left)}")
        if "eval/return" in row:  # at the end, because most rows are without it
            parts.append(f"eval {show_number(row['eval/return'])}")
        return "  ".join(parts)


def _seen_from_here(path: Path) -> Path:
    """The path as it is typed in the current folder: short where it lies below."""
    with contextlib.suppress(OSError):  # the current folder was deleted
        if path.is_relative_to(Path.cwd()):
            return path.relative_to(Path.cwd())
    return path


def _summary_table(metrics: Row, console: Console) -> Table:
    """The last value of every metric, side by side in as many pairs of columns as the terminal holds."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    cells = [(name, show_number(value)) for name, value in sorted(metrics.items())]

    def table_of(pairs: int) -> Table:
        rows = math.ceil(len(cells) / pairs)
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for _ in range(pairs):
            table.add_column("metric", style="dim", no_wrap=True)
            table.add_column("last", justify="right", no_wrap=True)
        for i in range(rows):
            table.add_row(*(text for cell in cells[i::rows] for text in cell))
        return table

    for pairs in (3, 2):
        wide = table_of(pairs)
        # Measured in endless space: within the terminal's width every table "fits", by cutting its cells.
        if console.measure(wide, options=console.options.update(width=10_000)).maximum <= console.width:
            return wide
    return table_of(1)


class TensorBoardSink:
    """Scalars under the same names in TensorBoard's event format, the configuration as text.

    Records are written here, and not through `torch.utils.tensorboard`, because that takes a second to
    import, writes from a thread with a blocking queue, and hides a full disk until the end. The file is
    opened by the first row.

    `purge_step`: the run goes on from a checkpoint, and what earlier files of the folder hold beyond that
    step is forgotten. `run_dir`: where the rows and videos of the run so far are found. What the files that
    are there lack of them (they were deleted, also in mid-run, or a power failure took their end) is written
    once more, and `notify` is told.
    """

    def __init__(
        self,
        log_dir: Path,
        config: Mapping[str, Any] | None = None,
        purge_step: int | None = None,
        *,
        run_dir: Path | None = None,
        notify: Callable[[str], None] | None = None,
    ) -> None:
        self._log_dir = log_dir
        self._config = config
        self._purge_step = purge_step
        self._run_dir = run_dir
        self._notify = notify
        self._path: Path | None = None
        self._fd: int | None = None
        self._behind = False  # the disk did not take what came last
        self._was_behind = False

    def write(self, row: Row) -> None:
        at = int(row["env_steps"])
        with self._made_up_for():
            self._be_open(rows_before=at, videos_before=at, wall_time_s=row.get("wall_time_s"))
            self._add_row(row, time.time())

    def video(self, path: Path, env_steps: int) -> None:
        with self._made_up_for():
            self._be_open(rows_before=env_steps + 1, videos_before=env_steps)
            self._add_text("video", str(path), env_steps, time.time())

    def note(self, text: str) -> bool:
        """Notes are for the person at the console."""
        return False

    def close(self, status: str, final_metrics: Row) -> None:
        if self._was_behind:  # by now metrics.jsonl has what waited for the disk too
            with self._made_up_for():
                self._behind = True
                self._be_open(rows_before=sys.maxsize, videos_before=sys.maxsize)
        self._close_file()

    def _close_file(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    @contextlib.contextmanager
    def _made_up_for(self) -> Iterator[None]:
        """A disk that takes nothing costs no row: the first one that it takes brings the missing ones."""
        path = self._path
        try:
            yield
        except OSError as error:
            if self._run_dir is None:
                raise
            self._close_file()
            if self._path is not None and self._path != path:  # only begun, and will be begun again
                with contextlib.suppress(OSError):
                    self._path.unlink()
                self._path = path
            if not self._behind and self._notify is not None:
                self._notify(f"{self._log_dir} cannot be written ({error.strerror}); its rows come later")
            self._behind = self._was_behind = True

    def _be_open(self, rows_before: int, videos_before: int, wall_time_s: float | None = None) -> None:
        """See to it that there is a file, and that the files of the folder hold what came before."""
        lost = self._behind or (self._fd is not None and not self._is_at_path())
        if self._fd is not None and not lost:
            return
        rows: dict[int, dict[str, float]] = {}
        videos: dict[int, Path] = {}
        if self._run_dir is not None:
            if not lost:  # a new run has neither, and of one that goes on the rest is made once more
                limit = 0 if self._purge_step is None else self._purge_step + 1
                rows_before, videos_before = min(rows_before, limit), min(videos_before, limit)
            so_far = {int(row["env_steps"]): row for row in rows_so_far(self._run_dir)}
            rows = {at: row for at, row in so_far.items() if at < rows_before}
            videos = {at: path for at, path in videos_so_far(self._run_dir).items() if at < videos_before}
        self._log_dir.mkdir(parents=True, exist_ok=True)
        earlier = sorted(self._log_dir.glob(f"{_EVENT_FILE}*"))
        held = _Held.of(earlier)
        missing = min((rows.keys() - held.rows) | (videos.keys() - held.videos), default=None)
        if self._behind and missing is None and rows_before == sys.maxsize:
            self._behind = False
            return
        first, begin = missing, self._begin(rows, missing)
        if missing is None and rows and max(held.rows) > max(rows):
            # The default reader heeds no START: only a value at an earlier step makes it forget later ones.
            first = begin = max(rows)
        self._create(earlier)
        now = time.time()
        self._add(now, file_version="brain.Event:2")
        if earlier and begin is not None:
            # Twice, because one of TensorBoard's readers takes the first one for the beginning of the run.
            self._add_start(begin, now)
            self._add_start(begin, now)
        if self._config is not None and (not held.config or (begin is not None and begin <= 0)):
            text = json.dumps(self._config, indent=2, default=str)
            self._add_text("config", "\n".join("    " + line for line in text.splitlines()), 0, now)
        if first is not None:
            self._fill(rows, videos, first, now, wall_time_s)
        was_behind, self._behind = self._behind, False
        if was_behind and self._notify is not None:
            self._notify(f"{self._log_dir} can be written again, no row is lost")
        elif lost and self._notify is not None:
            self._notify(f"{self._log_dir}: the event file was deleted and is written anew, with all rows")
        elif missing is not None and self._notify is not None:
            self._notify(f"{self._log_dir}: rows from step {missing} on were missing and are written again")

    def _begin(self, rows: Mapping[int, Any], missing: int | None) -> int | None:
        """The first step of which nothing in earlier files counts any more, if there is one."""
        if missing is not None:
            return missing
        last = max([*rows, *([] if self._purge_step is None else [self._purge_step])], default=None)
        return None if last is None else last + 1

    def _fill(
        self,
        rows: Mapping[int, Row],
        videos: Mapping[int, Path],
        first: int,
        now: float,
        wall_time_s: float | None,
    ) -> None:
        """Rows and videos from step `first` on, dated as if they had been written in their time."""
        last_s = max((row["wall_time_s"] for row in rows.values()), default=0.0)
        begun = now - (last_s if wall_time_s is None else wall_time_s)
        then = begun
        for at in sorted({*rows, *videos}):
            if at in rows:
                then = begun + rows[at]["wall_time_s"]
            if at >= first and at in rows:
                self._add_row(rows[at], then)
            if at >= first and at in videos:
                self._add_text("video", str(videos[at]), at, then)

    def _is_at_path(self) -> bool:
        assert self._fd is not None
        assert self._path is not None
        try:
            return os.path.samestat(os.fstat(self._fd), self._path.stat())
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _create(self, earlier: Sequence[Path]) -> None:
        self._close_file()
        # TensorBoard reads files in the order of their names, whatever the clock has done meanwhile.
        stamps = [int(match[1]) for path in earlier if (match := re.match(_EVENT_FILE + r"(\d+)", path.name))]
        stamp = max([time.time_ns(), *(known + 1 for known in stamps)])
        self._path = self._log_dir / f"{_EVENT_FILE}{stamp}.{socket.gethostname()}.{os.getpid()}"
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def _add_start(self, step: int, wall_time: float) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog

        # TensorBoard drops the events whose step is at or above that of a START record.
        self._add(wall_time, step=step, session_log=SessionLog(status=SessionLog.START))

    def _add_row(self, row: Row, wall_time: float) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=k, simple_value=v) for k, v in row.items() if k != "env_steps"]
        self._add(wall_time, step=int(row["env_steps"]), summary=Summary(value=values))

    def _add_text(self, tag: str, text: str, step: int, wall_time: float) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING

        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()], tensor_shape=shape)
        value = Summary.Value(tag=f"{tag}/text_summary", metadata=metadata, tensor=tensor)
        self._add(wall_time, step=step, summary=Summary(value=[value]))

    def _add(self, wall_time: float, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        assert self._fd is not None
        record = io.BytesIO()
        RecordWriter(record).write(Event(wall_time=wall_time, **fields).SerializeToString())
        # In one call, so that no kill leaves a part of a record; a full disk still can.
        view = record.getbuffer()
        while view:
            view = view[os.write(self._fd, view) :]


_EVENT_FILE = "events.out.tfevents."


@dataclass
class _Held:
    """What TensorBoard finds in event files."""

    rows: set[int] = field(default_factory=set)
    videos: set[int] = field(default_factory=set)
    config: bool = False

    @classmethod
    def of(cls, files: Sequence[Path]) -> _Held:
        from tensorboard.compat.proto.event_pb2 import SessionLog

        held = cls()
        for event in (event for file in files for event in _events(file)):
            if event.HasField("session_log") and event.session_log.status == SessionLog.START:
                held.rows = {at for at in held.rows if at < event.step}
                held.videos = {at for at in held.videos if at < event.step}
                held.config = held.config and event.step > 0
            for value in event.summary.value:
                if value.tag == "config/text_summary":
                    held.config = True
                else:
                    (held.videos if value.tag == "video/text_summary" else held.rows).add(event.step)
        return held


def _events(file: Path) -> Iterator[Any]:
    """The events of a file up to the first that is not whole, where TensorBoard stops too.

    A record is the length of the data (8 bytes), a checksum of it (4), the data and its checksum (4). Only
    the length is checked: that finds a torn end, in a fraction of the time.
    """
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped, unused-ignore]
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import masked_crc32c

    data, at = file.read_bytes(), 0
    while at + 12 <= len(data):
        length, check = struct.unpack_from("<QI", data, at)
        end = at + 12 + length + 4
        if end > len(data) or check != masked_crc32c(data[at : at + 8]):
            return
        try:
            yield Event.FromString(data[at + 12 : end - 4])
        except DecodeError:  # a power failure leaves zeros where data had not reached the disk
            return
        at = end


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What a sink may want to know of the run that it shows."""

    run_id: str
    run_dir: Path
    title: str
    total_env_steps: int
    config: Mapping[str, Any]
    git: Mapping[str, Any]
    group: str | None  # what the runs of a sweep share
    tags: Sequence[str]
    notify: Callable[[str], None]
    resumed_at: int | None = None  # the steps after which the run goes on; None: a new run
    standing: Standing | None = None  # says where the last evaluation stands


def _wandb(settings: Any, facts: RunFacts) -> Sink:
    from rltemplate.run.sinks.wandb import WandbSink

    return WandbSink(
        facts.run_dir,
        facts.run_id,
        project=settings.project,
        entity=settings.entity,
        name=facts.run_id,
        group=settings.group or facts.group,
        tags=[*facts.tags, *settings.tags],
        mode=settings.mode.name,
        config=facts.config,
        git=facts.git,
        notify=facts.notify,
        resumed_at=facts.resumed_at,
    )


def _tensorboard(_: Any, facts: RunFacts) -> Sink:
    return TensorBoardSink(
        facts.run_dir / TENSORBOARD,
        facts.config,
        facts.resumed_at,
        run_dir=facts.run_dir,
        notify=facts.notify,
    )


def _console(_: Any, facts: RunFacts) -> Sink:
    return ConsoleSink(
        facts.total_env_steps, facts.title, None, facts.resumed_at, facts.standing, facts.run_dir
    )


# By key of the logger configuration, in the order in which they get each row. A new sink is a class above,
# a line here, its key in `LoggerConfig` and its value in conf/logger/local.yaml.
SINKS: dict[str, Callable[[Any, RunFacts], Sink]] = {
    "console": _console,
    "tensorboard": _tensorboard,
    "wandb": _wandb,
}


def make_sinks(logger_config: Any, facts: RunFacts) -> list[Sink]:
    """The sinks that are switched on: `key: true`, or a group of settings with `enabled: true`."""
    settings = {name: getattr(logger_config, name) for name in SINKS}
    return [SINKS[name](value, facts) for name, value in settings.items() if getattr(value, "enabled", value)]
