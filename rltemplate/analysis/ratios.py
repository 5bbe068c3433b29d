"""How far the first ratios of PPO runs were from 1, from the runs' own metrics."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import yaml

from rltemplate.run import paths
from rltemplate.run.record import read_record
from rltemplate.types import ConfigError

# The largest |ratio - 1| before the first update of an iteration; 0 where rows depend on nothing else.
METRIC = "policy/first_ratio_max_error"
_HEAD = (
    *("environment", "level", "rows acting", "rows learning", "threads"),
    *("runs", "iterations", "largest error"),
)


def table(folders: Iterable[Path]) -> str:
    """A Markdown table, one row per setting: the largest |ratio - 1| before any iteration's first update.

    Raises ConfigError for a folder that is no finished run of PPO.
    """
    seen: dict[tuple[str, ...], list[tuple[int, float]]] = defaultdict(list)
    for folder in folders:
        record = read_record(folder)
        try:
            config = yaml.safe_load((folder / paths.CONFIG).read_text())
        except OSError as error:
            raise ConfigError(f"{folder}: {paths.CONFIG} cannot be read, {error.strerror}") from None
        if config["algo"]["name"] != "ppo" or not record.get("trace"):
            raise ConfigError(f"{folder}: expected a traced run of PPO that has ended")
        rows = map(json.loads, (folder / paths.METRICS).read_text().splitlines())
        largest = max(row[METRIC] for row in rows if METRIC in row)
        acting = config["env"]["num_envs"]
        learning = config["algo"]["num_steps"] * acting // config["algo"]["num_minibatches"]
        level, threads = config["determinism"]["level"], config["num_threads"]
        key = (config["env"]["id"], level, f"{acting:4d}", f"{learning:6d}", f"{threads}")
        seen[key].append((record["trace"]["iterations"], largest))
    lines = [f"| {' | '.join(_HEAD)} |", f"| {' | '.join('---' for _ in _HEAD)} |"]
    for setting, runs in sorted(seen.items()):
        worst, iterations = max(error for _, error in runs), sum(count for count, _ in runs)
        cells = (*setting, f"{len(runs)}", f"{iterations:,}", f"{worst:.1e}" if worst else "0")
        lines.append(f"| {' | '.join(cell.strip() for cell in cells)} |")
    return "\n".join(lines) + "\n"
