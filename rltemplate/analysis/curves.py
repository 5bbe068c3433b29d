"""Learning curves of recorded runs: the numbers as a CSV file and a table, and a picture of them."""

from __future__ import annotations

import csv
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rltemplate.analysis.groups import Name, newest_of_each_seed
from rltemplate.analysis.runs import Run
from rltemplate.run import paths
from rltemplate.run.read import value_of
from rltemplate.run.record import read_record
from rltemplate.types import ConfigError


class Point(NamedTuple):
    """One evaluation of one run; the fields are the columns of the CSV file."""

    algo: str
    env: str
    seed: int
    env_steps: int
    eval_return: float
    run: str
    commit: str
    cpu: str


Curves = dict[tuple[str, str], dict[int, list[Point]]]  # by algorithm and environment, then by seed


def read_runs(run_dirs: Iterable[Path], by: str | None = None) -> tuple[list[Point], list[str]]:
    """All evaluations of the newest finished run of each seed, and a line about each earlier one.

    Runs that did not finish are left out. `by` is any name of `Run.value`, such as `determinism.level` or
    `commit`, whose values are shown apart. Raises ConfigError.
    """
    found = [run for run_dir in run_dirs if (run := _finished(run_dir)) is not None and run.curve]
    groups, replaced = newest_of_each_seed(found, by)
    if not groups:
        raise ConfigError("no finished run with an evaluation among these folders")
    return [
        point for name, runs in groups.items() for run in runs.values() for point in _points(name, run)
    ], replaced


def _finished(run_dir: Path) -> Run | None:
    """The run in a folder, None if it did not finish. Raises ConfigError unless it has what a curve needs."""
    run = Run(run_dir, read_record(run_dir))
    if run.record.get("status") != "finished":
        return None
    for key in ("algo.name", "env.id", "seed"):
        value_of(run.config, key, f"{run_dir.name}: {paths.CONFIG}")
    for key in ("id", "machine.cpu", "git.base_commit", "git.dirty"):
        value_of(run.record, key, f"{run_dir.name}: {paths.RECORD}")
    if not (run_dir / paths.METRICS).exists():
        raise ConfigError(f"{run_dir.name}: has no {paths.METRICS}")
    return run


def _points(name: Name, run: Run) -> Iterator[Point]:
    git = run.record["git"]
    commit = str(git["base_commit"])[:12] + ("+changes" if git["dirty"] else "")
    cpu = str(run.record["machine"]["cpu"])
    for env_steps, value in run.curve:
        yield Point(name.algo, name.place, run.config["seed"], env_steps, value, run.id, commit, cpu)


def write_csv(points: Sequence[Point], path: Path) -> None:
    """One line per evaluation."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Point._fields)
        writer.writerows(sorted(points))


def read_csv(path: Path) -> list[Point]:
    """What `write_csv` wrote."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [
        Point(
            row["algo"],
            row["env"],
            int(row["seed"]),
            int(row["env_steps"]),
            float(row["eval_return"]),
            row["run"],
            row["commit"],
            row["cpu"],
        )
        for row in rows
    ]


def group(points: Iterable[Point]) -> Curves:
    """Points by algorithm and environment, and by seed, each curve in order of steps."""
    curves: Curves = defaultdict(lambda: defaultdict(list))
    for point in sorted(points):
        curves[point.algo, point.env][point.seed].append(point)
    return {pair: dict(seeds) for pair, seeds in curves.items()}


def table(points: Sequence[Point]) -> str:
    """A Markdown table of the last evaluation of each run: mean over seeds, and every seed's own."""
    lines = [
        "| algorithm | environment | steps | mean return | seeds | of each seed |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for (algo, env), seeds in group(points).items():
        last = [curve[-1] for curve in seeds.values()]
        returns = [point.eval_return for point in last]
        steps = max(point.env_steps for point in last)
        each = ", ".join(f"{value:,.0f}" for value in returns)
        lines.append(
            f"| {algo} | {env} | {steps:,} | {statistics.mean(returns):,.1f} | {len(returns)} | {each} |"
        )
    return "\n".join(lines) + "\n"


def draw(points: Sequence[Point], path: Path, columns: int = 3) -> None:
    """One panel per algorithm and environment: each seed thin, their mean thick, their range shaded."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    curves = group(points)
    columns = min(columns, len(curves))
    num_rows = -(-len(curves) // columns)
    size = (3.3 * columns, 2.5 * num_rows)
    figure, axes = plt.subplots(num_rows, columns, figsize=size, squeeze=False, layout="constrained")
    colors = {"ppo": "#0072b2", "sac": "#d55e00"}  # of Okabe and Ito's palette, told apart without red-green
    for axis, ((algo, env), seeds) in zip(axes.flat, curves.items(), strict=False):
        color = colors.get(algo, "#009e73")
        for curve in seeds.values():
            steps = [point.env_steps for point in curve]
            axis.plot(steps, [point.eval_return for point in curve], color=color, linewidth=0.7, alpha=0.5)
        shared = sorted(set.intersection(*({point.env_steps for point in curve} for curve in seeds.values())))
        values = [
            [point.eval_return for curve in seeds.values() for point in curve if point.env_steps == step]
            for step in shared
        ]
        axis.fill_between(shared, [min(v) for v in values], [max(v) for v in values], color=color, alpha=0.15)
        axis.plot(shared, [statistics.mean(v) for v in values], color=color, linewidth=2.0)
        axis.set_title(f"{algo.upper()} on {env}, {len(seeds)} seed{'s' * (len(seeds) > 1)}", fontsize=9)
        axis.xaxis.set_major_formatter(mpl.ticker.EngFormatter(sep=""))
        axis.tick_params(labelsize=7)
        axis.grid(alpha=0.25, linewidth=0.5)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes.flat[len(curves) :]:
        axis.set_visible(False)
    figure.supxlabel("environment steps", fontsize=9)
    figure.supylabel("return, deterministic policy", fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)
