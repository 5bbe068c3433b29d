"""A sink for MLflow: `pip install ./examples/mlflow_sink`, then `logger.sinks.mlflow=true`, or with settings.

`logger.sinks.mlflow.uri=http://localhost:5000` names a server; without it the folder `mlruns` is the store.
"""

import json
import os
import time
from pathlib import Path

from runlab.run.sinks.sink import RecordingSink, Row, RunFacts

_ENDS = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}


class MlflowSink(RecordingSink):
    """A run of MLflow under the run's id: configuration, metrics by environment step, videos."""

    def __init__(self, facts: RunFacts, uri: str = "mlruns", experiment: str | None = None) -> None:
        super().__init__(facts)
        self.uri = uri
        self.experiment = experiment or facts.run_dir.parent.name
        self.id: str | None = None

    def open(self) -> None:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient

        uri = self.uri if "://" in self.uri else Path(self.uri).absolute().as_uri()
        self.client = MlflowClient(uri)
        found = self.client.get_experiment_by_name(self.experiment)
        home = found.experiment_id if found else self.client.create_experiment(self.experiment)
        # A resumed run is written anew, with its earlier rows.
        for earlier in self.client.search_runs([home], f"attributes.run_name = '{self.facts.run_id}'"):
            self.client.delete_run(earlier.info.run_id)
        self.id = self.client.create_run(home, run_name=self.facts.run_id).info.run_id
        for key, value in self.facts.config.items():
            for name, each in value.items() if isinstance(value, dict) else [("", value)]:
                self.client.log_param(self.id, f"{key}.{name}".rstrip("."), json.dumps(each)[:500])

    def add_row(self, row: Row) -> None:
        from mlflow.entities import Metric

        now, at = int(time.time() * 1000), int(row["env_steps"])
        values = [Metric(name, float(row[name]), now, at) for name in row if name != "env_steps"]
        self.client.log_batch(self.id, metrics=values)

    def add_video(self, path: Path, env_steps: int) -> None:
        self.client.log_artifact(self.id, str(path), "videos")

    def close(self, status: str, final_metrics: Row) -> None:
        if self.id is not None:
            self.client.set_terminated(self.id, _ENDS[status])
