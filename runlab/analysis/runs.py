"""Recorded runs as values with names, without torch.

A name stands for the first of these that exists:

* a column of the table: `id`, `algo`, `env`, `seed`, `level`, `status`, `steps`, `return`, `started`,
  `duration`, `commit`, `dirty`, `sweep`;
* a dotted key of the configuration: `algo.gamma`, `total_env_steps`;
* a dotted key of the record: `machine.cpu`, `git.branch`, `versions.torch`;
* a metric: `policy/entropy`, the last value that the run logged.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from runlab.config.affects_results import key_affects_results
from runlab.config.texts import nearest
from runlab.errors import ConfigError
from runlab.run import names, paths
from runlab.run.files import in_use
from runlab.run.read import leaves, parse_row, raw_config, read_metrics
from runlab.run.record import RUNNING, RunRecord

NOTHING = "-"  # in a table, for a missing value
# The usual columns of a table; `dirty` is a star behind the commit.
SHOWN = ("id", "algo", "env", "seed", "level", "status", "steps", "return", "started", "commit")
PLANNED = "planned"  # the status of a run that has not begun
KILLED = "killed"  # the status of a run whose process is gone without a word
_TAIL_BYTES = 16_384  # more than the last row of `metrics.jsonl`


@dataclass(frozen=True)
class Run:
    """One run, with its configuration, nested. Its metrics are read when they are first needed."""

    dir: Path
    record: RunRecord
    config: Mapping[str, Any]

    @property
    def id(self) -> str:
        """The id, even if the folder was renamed."""
        return self.record.id

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """All rows of `metrics.jsonl`. Raises ConfigError if it is damaged."""
        return read_metrics(self.dir)

    @cached_property
    def last_row(self) -> dict[str, Any]:
        return last_row(self.dir)

    @property
    def env(self) -> str:
        """The name given to `env=`."""
        return names.env_name(self.config, self.record.overrides)

    @cached_property
    def changes(self) -> list[str]:
        """The differences from the recipe, as arguments."""
        return names.differences(self.config, self.record.overrides)

    @cached_property
    def columns(self) -> dict[str, Any]:
        record, config = self.record, self.config
        final = record.final_metrics
        return {
            "id": self.id,
            "algo": config["algo"]["name"],
            "env": self.env,
            "seed": config["seed"],
            "level": config["determinism"]["level"],
            "status": _status(self.dir, record),
            "steps": self.last_row.get("env_steps") if record.env_steps is None else record.env_steps,
            "return": final.get("eval/return", final.get("episode/return")),
            "started": record.started_at,
            "duration": record.duration_s,
            "commit": (record.git.base_commit or "")[:10] or None,
            "dirty": record.git.dirty,
            "sweep": None if record.sweep is None else record.sweep.id,
        }

    @cached_property
    def values(self) -> dict[str, Any]:
        record = asdict(self.record)
        metrics: dict[str, Any] = self.last_row | record.pop("final_metrics")
        return metrics | dict(leaves(record)) | dict(leaves(self.config)) | self.columns

    def value(self, name: str) -> Any:
        return self.values.get(name)


def cell(run: Run, name: str) -> str:
    value = run.value(name)
    if value is None:
        return NOTHING
    if name == "started":
        return single_line(str(value)[:16].replace("T", " "))
    if name == "commit":
        return single_line(f"{value}{'*' if run.record.git.dirty else ''}")
    if isinstance(value, float):
        # Enough digits to compare returns, and no powers of ten below a million.
        return f"{value:.1f}" if 1000 <= abs(value) < 1e6 else f"{value:.5g}"
    return single_line(value)


def single_line(value: Any) -> str:
    """A value as `text_of` gives it; a text with line ends or other controls in quotes, with escapes."""
    text = text_of(value)
    return text if text.isprintable() else repr(text)


def check_name(runs: Sequence[Run], name: str, word: str) -> None:
    """Raise ConfigError about `word`, with the nearest name, unless a run has a single value of that name."""
    if runs and not any(name in run.values for run in runs):
        hint = nearest(name, {key for run in runs for key in run.values})
        raise ConfigError(
            f"{word}: no run has {name} as a single value; {hint}allowed: {', '.join(runs[0].columns)}, any "
            "key of a configuration or a record, or a metric"
        )


def experiment_of(config: Mapping[str, Any]) -> dict[str, str]:
    """The part of a configuration that all runs of one experiment share, as JSON by dotted key.

    These are the keys that may change results, except the seed, and those of evaluations.
    """
    return {
        key: json_of(value)
        for key, value in leaves(config)
        if key != "seed" and (key_affects_results(key) or key.startswith("eval_"))
    }


def _status(run_dir: Path, record: RunRecord) -> str:
    """The recorded status; `killed` if a run of this machine is `running` and its process is gone.

    After a restart, another process may have its number, as in a container, but not its lock.
    """
    process = record.resumed[-1] if record.resumed else record
    if record.status != RUNNING or process.hostname != platform.node() or process.pid is None:
        return record.status
    gone = Path("/proc/self").exists() and not Path(f"/proc/{process.pid}").exists()
    return KILLED if gone or not in_use(run_dir) else record.status


def text_of(value: Any) -> str:
    """A value of a configuration or a record on one line."""
    return value if isinstance(value, str) else json_of(value)


def json_of(value: Any) -> str:
    """A value as JSON, which tells "1" and 1 apart."""
    return json.dumps(value, default=str)


def last_row(run_dir: Path) -> dict[str, Any]:
    """The last whole row of `metrics.jsonl`, read from its end; empty if there is none."""
    path = run_dir / paths.METRICS
    try:
        if not path.is_file():
            return {}
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return {}
    return next((row for row in map(parse_row, reversed(lines)) if row is not None), {})


def load_run(run_dir: Path) -> Run:
    """The run in a folder. Raises ConfigError if it is none, or if record or configuration is damaged."""
    return Run(run_dir, RunRecord.read(run_dir), raw_config(run_dir))


def load_runs(run_dirs: Iterable[Path], with_rows: bool = False) -> tuple[list[Run], list[str]]:
    """The runs in these folders, and a line for each run that cannot be read; `with_rows` reads rows too."""
    runs: list[Run] = []
    problems: list[str] = []
    for run_dir in run_dirs:
        try:
            run = load_run(run_dir)
            _ = run.rows if with_rows else None
            runs.append(run)
        except ConfigError as error:
            problems.append(str(error))
    return runs, problems
