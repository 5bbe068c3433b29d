"""TensorBoard event files."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

from runlab.run.names import env_name, result_overrides
from runlab.run.paths import TENSORBOARD
from runlab.run.read import leaves, read_metrics
from runlab.run.sinks.sink import RecordingSink, Row

# The names of this sink's event files end with this; other files in the folder belong to the user.
_SUFFIX = ".run"
_GIF_PIXELS, _GIF_S = 240, 10.0  # width, and the part of a video that is shown


class TensorBoardSink(RecordingSink):
    """Scalars under their names in `metrics.jsonl`, videos, configuration and differences from the recipe.

    Each row is written at once: a killed run loses none, and the logger sees a full disk. So torch's
    `SummaryWriter` is not used, whose thread writes later and prints a traceback when the disk is full.
    """

    _records: Any = None

    def open(self) -> None:
        """Begin an event file. In a resumed run it replaces the sink's earlier ones, which may lack rows."""
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard.summary import hparams, text

        folder = self.facts.run_dir / TENSORBOARD
        folder.mkdir(exist_ok=True)
        for earlier in folder.glob(f"events.out.tfevents.*{_SUFFIX}"):
            earlier.unlink()
        name = f"events.out.tfevents.{time.time_ns()}.{platform.node()}.{os.getpid()}{_SUFFIX}"
        self._records = RecordWriter((folder / name).open("wb"))
        self._add(file_version="brain.Event:2")
        # A running TensorBoard then drops the earlier rows, which it gets again.
        self._add(session_log=SessionLog(status=SessionLog.START))
        rows = read_metrics(self.facts.run_dir)
        # Rows from before a resume keep their times.
        self._begun = time.time() - (rows[-1]["wall_time_s"] if rows else 0.0)
        config = json.dumps(self.facts.config, indent=2, default=str)
        self._add(summary=text("config", "\n".join("    " + line for line in config.splitlines())))
        # Only the second summary, which begins a session: the first would hide keys of other runs in HPARAMS.
        self._add(summary=hparams(self._hparams(), {})[1])

    def _add(self, wall_time: float | None = None, **event: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        event["wall_time"] = time.time() if wall_time is None else wall_time
        self._records.write(Event(**event).SerializeToString())
        self._records.flush()

    def _hparams(self) -> dict[str, Any]:
        """Seed, learning rates, and the values that differ from the recipe."""
        config, overrides = self.facts.config, self.facts.overrides
        recorded, changed = dict(leaves(config)), result_overrides(overrides)
        rates = [key for key in recorded if key.endswith("learning_rate")]
        values = {key: recorded.get(key, changed.get(key)) for key in ("seed", *rates, *changed)}
        values |= {"algo": config["algo"]["name"], "env": env_name(config, overrides)}
        return {k: v if type(v) in (int, float, str) else str(v) for k, v in values.items()}

    def add_row(self, row: Row) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=key, simple_value=row[key]) for key in row if key != "env_steps"]
        when = self._begun + row["wall_time_s"]
        self._add(when, step=int(row["env_steps"]), summary=Summary(value=values))

    def add_video(self, path: Path, env_steps: int) -> None:
        """The video as a GIF, which TensorBoard shows among images."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        from runlab.run.video.film import animate

        with tempfile.TemporaryDirectory() as folder:
            animate(path, gif := Path(folder) / "video.gif", _GIF_PIXELS, _GIF_S)
            image = Summary.Image(encoded_image_string=gif.read_bytes())
        summary = Summary(value=[Summary.Value(tag="video", image=image)])
        self._add(path.stat().st_mtime, step=env_steps, summary=summary)

    def close(self, status: str, final_metrics: Row) -> None:
        if self._records is not None:
            from torch.utils.tensorboard.summary import hparams

            with contextlib.closing(self._records):
                self._add(summary=hparams({}, {})[2])  # the end of the session
