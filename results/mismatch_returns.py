"""Returns with and without replay as a table, from the runs of results/conf/sweep/mismatch.yaml.

`.venv/bin/python results/mismatch_returns.py 'runs/ppo_moe-CartPole/*' > results/mismatch/returns.md`
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from statistics import fmean

from runlab.analysis.runs import Run, load_run
from runlab.run.read import find_run_dirs

HEAD = (
    *("bits of acting weights", "replay", "return of each seed", "mean", "flips", "drift"),
    *("KL", "largest abs(ratio - 1)", "clip fraction"),
)


def numbers(runs: list[Run], name: str) -> list[float]:
    """A metric in all rows of some runs."""
    return [float(row[name]) for run in runs for row in run.rows if not math.isnan(row.get(name, math.nan))]


def table(runs: list[Run]) -> str:
    """A Markdown table, one row per setting: means over all iterations, and the largest ratio of all."""
    groups = defaultdict[tuple[str, str], list[Run]](list)
    for run in sorted(runs, key=lambda run: int(str(run.value("seed")))):
        bits = run.value("algo.rollout_bits")
        key = "all" if bits is None else str(bits), str(run.value("algo.replay_routing"))
        groups[key].append(run)
    lines = [f"| {' | '.join(HEAD)} |", f"| {' | '.join('---' for _ in HEAD)} |"]
    for (bits, replay), of_group in sorted(groups.items(), reverse=True):
        returns = [numbers([run], "eval/return")[-1] for run in of_group]
        cells = (
            bits,
            replay,
            ", ".join(f"{each:.0f}" for each in returns),
            f"{fmean(returns):.0f}",
            f"{100 * fmean(numbers(of_group, 'moe/flip_fraction')):.1f} %",
            f"{100 * fmean(numbers(of_group, 'moe/drift_fraction')):.0f} %",
            f"{fmean(numbers(of_group, 'policy/rollout_kl')):.1e}",
            f"{max(numbers(of_group, 'policy/first_ratio_max_error')):.2g}",
            f"{fmean(numbers(of_group, 'policy/clip_fraction')):.3f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    commits = sorted({str(run.record.git.base_commit)[:8] for run in runs})
    note = (
        f"{len(runs)} runs of `results/conf/sweep/mismatch.yaml` with the code of commit "
        f"{', '.join(commits)}:\nPPO with 8 experts on CartPole, 50,000 steps, 20 episodes in the "
        "evaluation at the end. Flips, drift,\nKL and clip fraction are means over the rows of all seeds, "
        "the ratio is the largest of them."
    )
    return "\n".join(["# Returns with and without replay", "", note, "", *lines]) + "\n"


if __name__ == "__main__":
    print(table([load_run(folder) for folder in find_run_dirs(sys.argv[1])]), end="")
