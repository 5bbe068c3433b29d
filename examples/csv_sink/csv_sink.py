"""A sink for tables: `pip install ./examples/csv_sink`, then `logger.sinks.csv=true`."""

import csv
from pathlib import Path

from runlab.run.sinks.sink import RecordingSink, Row, RunFacts


class CsvSink(RecordingSink):
    """A file in the run folder with a line for each value, as the metrics of a run are not known before."""

    def __init__(self, facts: RunFacts, file: str = "metrics.csv") -> None:
        super().__init__(facts)
        self.path = facts.run_dir / file

    def open(self) -> None:
        self.file = self.path.open("w", newline="")
        self.table = csv.writer(self.file)
        self.table.writerow(["env_steps", "metric", "value"])

    def add_row(self, row: Row) -> None:
        self.table.writerows([row["env_steps"], name, row[name]] for name in row if name != "env_steps")
        self.file.flush()

    def add_video(self, path: Path, env_steps: int) -> None:
        """A table has no videos."""

    def close(self, status: str, final_metrics: Row) -> None:
        """Every row is on the disk already."""
