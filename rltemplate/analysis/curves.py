"""Learning curves of recorded runs: the numbers as a CSV file and a table, and a picture of them."""

from __future__ import annotations

import csv
import difflib
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rltemplate.analysis.run_files import nearest_key, read_config, read_metrics, value_of
from rltemplate.analysis.runs import COLUMNS, MISSING, Run, experiment_of
from rltemplate.run import paths
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


def read_runs(run_dirs: Iterable[Path], by: str | None = None) -> list[Point]:
    """All evaluations of finished runs; runs that did not finish are left out. Raises ConfigError.

    `by` is any name of `Run.value`, such as `determinism.level` or `commit`, whose values are shown apart.
    """
    points: list[Point] = []
    first: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {}
    seen: dict[tuple[str, str, int], str] = {}
    for run_dir in run_dirs:
        record = read_record(run_dir)
        if record.get("status") != "finished":
            continue
        _, config = read_config(run_dir)
        where = f"{run_dir.name}: {paths.CONFIG}"
        algo, recipe = str(value_of(config, "algo.name", where)), config.get("recipe")
        env = str(recipe).removeprefix(f"{algo}-") if recipe else str(value_of(config, "env.id", where))
        seed = value_of(config, "seed", where)
        if by is not None:
            env += f" {by.rpartition('.')[2]}={value_by(Run(run_dir, record), by)}"
        where = f"{run_dir.name}: {paths.RECORD}"
        run, cpu = str(value_of(record, "id", where)), str(value_of(record, "machine.cpu", where))
        commit = str(value_of(record, "git.base_commit", where))[:12]
        commit += "+changes" if value_of(record, "git.dirty", where) else ""
        check_comparable(config, algo, env, run, first, seen)
        points += [
            Point(algo, env, seed, row["env_steps"], row["eval/return"], run, commit, cpu)
            for row in read_metrics(run_dir)
            if row.get("eval/return") is not None and row.get("env_steps") is not None
        ]
    if not points:
        raise ConfigError("no finished run with an evaluation among these folders")
    return points


def value_by(run: Run, key: str) -> Any:
    """What the run has under the name `by=key`. Raises ConfigError unless it is a single value."""
    value = run.value(key)
    if value is MISSING:
        near = nearest_key(key, run.config) or next(iter(difflib.get_close_matches(key, COLUMNS, n=1)), None)
        hint = f"; did you mean {near}?" if near else ""
        raise ConfigError(f"by={key}: no such key in the configuration or the record of these runs{hint}")
    if isinstance(value, dict):
        names = ", ".join(f"{key}.{name}" for name in value)
        raise ConfigError(f"by={key}: expected a key with a single value, as one of {names}")
    return value


def check_comparable(
    config: dict[str, Any],
    algo: str,
    env: str,
    run: str,
    first: dict[tuple[str, str], tuple[str, dict[str, Any]]],
    seen: dict[tuple[str, str, int], str],
) -> None:
    """Refuse to average what is not one experiment: another configuration, or a seed that stands twice."""
    compared = experiment_of(config)
    other, expected = first.setdefault((algo, env), (run, compared))
    for key in expected:
        if compared.get(key) != expected[key]:
            raise ConfigError(
                f"{run} and {other} differ in {key}, so no mean of them is drawn; name fewer in runs="
            )
    twin = seen.setdefault((algo, env, config["seed"]), run)
    if twin != run:
        raise ConfigError(
            f"{run} and {twin} are both {algo} on {env} with seed {config['seed']}; name one in runs=, or "
            "tell them apart, as with by=commit"
        )


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
