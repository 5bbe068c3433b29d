"""First ratios of PPO runs as a table: `python results/ratios.py 'runs/*/*' > results/ratios.md`."""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rltemplate.rerun.prove import METRIC
from rltemplate.run import paths
from rltemplate.run.read import find_run_dirs, read_config, read_metrics, value_of
from rltemplate.run.record import read_record
from rltemplate.types import ConfigError

_HEAD = (
    *("environment", "level", "rows acting", "rows learning", "threads"),
    *("runs", "iterations", "largest error"),
)


_COUNTS = ("env.num_envs", "algo.num_steps", "algo.num_minibatches")
_SETTING = ("env.id", "determinism.level", "num_threads")


def table(folders: Iterable[Path]) -> str:
    """A Markdown table, one row per setting: the largest |ratio - 1| before any iteration's first update.

    Raises ConfigError for a folder that is no finished run of PPO.
    """
    seen: dict[tuple[str, ...], list[tuple[int, float]]] = defaultdict(list)
    for folder in folders:
        record, (_, config) = read_record(folder), read_config(folder)
        where = f"{folder.name}: {paths.CONFIG}"
        if value_of(config, "algo.name", where) != "ppo" or not record.get("trace"):
            raise ConfigError(f"{folder}: expected a traced run of PPO that has ended")
        errors = [
            math.inf if row[METRIC] is None else row[METRIC] for row in read_metrics(folder) if METRIC in row
        ]
        if not errors:
            raise ConfigError(f"{folder.name}: {paths.METRICS} has no {METRIC}, so no iteration was logged")
        acting, steps, parts = (_count(config, key, where) for key in _COUNTS)
        learning = steps * acting // parts
        env, level, threads = (str(value_of(config, key, where)) for key in _SETTING)
        iterations = _count(record, "trace.iterations", f"{folder.name}: {paths.RECORD}")
        key = (env, level, f"{acting:4d}", f"{learning:6d}", threads)
        seen[key].append((iterations, max(errors)))
    lines = [f"| {' | '.join(_HEAD)} |", f"| {' | '.join('---' for _ in _HEAD)} |"]
    for setting, runs in sorted(seen.items()):
        worst, iterations = max(error for _, error in runs), sum(count for count, _ in runs)
        cells = (*setting, f"{len(runs)}", f"{iterations:,}", f"{worst:.1e}" if worst else "0")
        lines.append(f"| {' | '.join(cell.strip() for cell in cells)} |")
    return "\n".join(lines) + "\n"


def _count(values: Mapping[str, Any], key: str, where: str) -> int:
    value = value_of(values, key, where)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"{where}: expected a whole number as {key}, not {value}")
    return value


if __name__ == "__main__":
    print(table(find_run_dirs(sys.argv[1])), end="")
