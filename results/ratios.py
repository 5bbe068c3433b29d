"""First ratios of PPO runs as a table: `python results/ratios.py 'runs/*/*' > results/ratios.md`."""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from runlab.analysis.runs import load_run
from runlab.errors import ConfigError
from runlab.run.read import find_run_dirs

_HEAD = (
    *("environment", "level", "rows acting", "rows learning", "threads"),
    *("runs", "iterations", "largest error"),
)
RATIO = "policy/first_ratio_max_error"
_COUNTS = ("env.num_envs", "algo.num_steps", "algo.num_minibatches")


def table(folders: Iterable[Path]) -> str:
    """A Markdown table, one row per setting: the largest |ratio - 1| before any iteration's first update.

    Raises ConfigError for a folder that is no finished run of PPO.
    """
    seen: dict[tuple[str, ...], list[tuple[int, float]]] = defaultdict(list)
    for run in map(load_run, folders):
        errors = [math.inf if math.isnan(row[RATIO]) else row[RATIO] for row in run.rows if RATIO in row]
        if run.record.trace is None or not errors:
            raise ConfigError(f"{run.dir}: expected a traced run of PPO that has ended")
        acting, steps, parts = (run.value(key) for key in _COUNTS)
        rows = f"{acting:4d}", f"{steps * acting // parts:6d}"
        key = (*(str(run.value(name)) for name in ("env.id", "level")), *rows, str(run.value("num_threads")))
        seen[key].append((run.record.trace.iterations, max(errors)))
    lines = [f"| {' | '.join(_HEAD)} |", f"| {' | '.join('---' for _ in _HEAD)} |"]
    for setting, runs in sorted(seen.items()):
        worst, iterations = max(error for _, error in runs), sum(count for count, _ in runs)
        cells = (*setting, f"{len(runs)}", f"{iterations:,}", f"{worst:.1e}" if worst else "0")
        lines.append(f"| {' | '.join(cell.strip() for cell in cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(find_run_dirs(sys.argv[1])), end="")
