"""TensorBoard event files."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from rltemplate.run.paths import TENSORBOARD
from rltemplate.run.read import rows_so_far
from rltemplate.run.sinks.sink import RecordingSink, Row

# Ends the names of event files of this sink; other files in the folder belong to the user.
_SUFFIX = ".run"


class TensorBoardSink(RecordingSink):
    """Scalars under the same names as in `metrics.jsonl`; the configuration and paths of videos as text."""

    _writer: Any = None

    def open(self) -> None:
        """Begin an event file. In a resumed run it replaces the sink's earlier ones, which may lack rows."""
        from torch.utils.tensorboard import SummaryWriter

        folder = self.facts.run_dir / TENSORBOARD
        for earlier in folder.glob(f"events.out.tfevents.*{_SUFFIX}"):
            earlier.unlink()
        # A TensorBoard that is open has the earlier rows: purge_step makes it drop them.
        self._writer = SummaryWriter(str(folder), purge_step=0, filename_suffix=_SUFFIX)
        rows = rows_so_far(self.facts.run_dir)
        # Rows from before a resume are dated as they were written.
        self._begun = time.time() - (rows[-1]["wall_time_s"] if rows else 0.0)
        config = json.dumps(self.facts.config, indent=2, default=str)
        self._writer.add_text("config", "\n".join("    " + line for line in config.splitlines()), 0)

    def add_row(self, row: Row) -> None:
        """One scalar per metric, flushed at once: no kill loses a row."""
        at, when = int(row["env_steps"]), self._begun + row["wall_time_s"]
        for name, value in row.items():
            if name != "env_steps":
                self._writer.add_scalar(name, value, at, when)
        self._writer.flush()

    def add_video(self, path: Path, env_steps: int) -> None:
        """The path of a video."""
        self._writer.add_text("video", str(path), env_steps)
        self._writer.flush()

    def close(self, status: str, final_metrics: Row) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
