"""Returns of the random policy: `python results/random_returns.py [--write]`.

Each shipped environment (conf/env) is played with actions drawn uniformly from its action space; episode i is
reset with seed i, and so is the action space before it. `--write` puts the rows in place of those of the
table of targets.
"""

from __future__ import annotations

import csv
import math
import statistics
import sys
import warnings
from typing import Any

from runlab.analysis import published as targets
from runlab.config.loading import CONF, environment_file
from runlab.config.project import reference_returns

EPISODES = 100


def returns(env_id: str, kwargs: dict[str, Any], episodes: int) -> tuple[list[float], int]:
    """Undiscounted return of each episode, and the number of steps in all of them."""
    import gymnasium

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of environments that have a newer version
        env = gymnasium.make(env_id, **kwargs)
    found, steps = [], 0
    for seed in range(episodes):
        env.reset(seed=seed)
        env.action_space.seed(seed)
        total, over = 0.0, False
        while not over:
            _, reward, terminated, truncated, _ = env.step(env.action_space.sample())
            total += float(reward)
            steps += 1
            over = terminated or truncated
        found.append(total)
    env.close()
    return found, steps


def main(write: bool) -> None:
    """Print a row for each environment."""
    rows: list[list[str]] = []
    for name in sorted({row.env for row in targets.references()}):
        values = environment_file(CONF / "env" / f"{name}.yaml")
        env_id = str(values["id"])
        found, steps = returns(env_id, values.get("kwargs", {}), EPISODES)
        mean, std = statistics.mean(found), statistics.stdev(found)
        print(f"{name:24} {mean:12.3f}  std {std:10.3f}  {EPISODES} episodes, {steps:,} steps", flush=True)
        version = env_id.rpartition("-")[2]
        source = ["results/random_returns.py", f"episodes={EPISODES}, std over episodes"]
        rows.append([name, version, targets.RANDOM, "uniform", "0", _short(mean), _short(std), "", *source])
    if write:
        _write(rows)


def _short(value: float) -> str:
    """Five significant digits, which is more than a hundred episodes know."""
    digits = 4 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:.{min(max(digits, 0), 4)}f}"


def _write(rows: list[list[str]]) -> None:
    table = reference_returns()
    assert table is not None
    with table.open(newline="", encoding="utf-8") as file:
        header, *others = list(csv.reader(file))
    kept = [row for row in others if row[header.index("algo")] != targets.RANDOM]
    with table.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([header, *sorted([*kept, *rows])])


if __name__ == "__main__":
    main("--write" in sys.argv[1:])
