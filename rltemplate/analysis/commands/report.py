"""`make report`: one page of HTML about many runs, its figures as files, and its curves as a table.

Nothing in the page asks a server for anything, and text from run folders is escaped where it is shown.
"""

from __future__ import annotations

import csv
import sys
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from rltemplate.analysis import figures
from rltemplate.analysis.experiments import Experiment, find_experiments, points
from rltemplate.analysis.runs import SHOWN, cell, load_runs
from rltemplate.config.command_args import file, folder, make_folder, word
from rltemplate.run.lines import replace_text
from rltemplate.run.read import find_run_dirs
from rltemplate.types import ConfigError

TEMPLATE = Path(__file__).parents[1] / "report.html"
_COLUMNS = [name for name in SHOWN if name not in ("algo", "env")]


@dataclass(frozen=True, kw_only=True)
class Args:
    """One page of HTML about all runs, for sending around: [runs='runs/*/*'] [out=FILE] [figures=FOLDER].

    The page holds all that it shows, so that it can be read without a network. Without `out=` it is
    `report.html` two folders above the runs. `figures=FOLDER` also writes each figure as PNG and SVG, and
    the curves as CSV.
    """

    runs: str = word(default="runs/*/*")
    out: Path | None = word(file, None)
    figures: Path | None = word(folder, None)


def main(args: Args) -> int:
    """Write the page, and say where it is."""
    run_dirs = find_run_dirs(args.runs)
    out = args.out or run_dirs[0].parent.parent / "report.html"
    report = make_report(run_dirs, args.runs)
    try:
        replace_text(out, [report.html])
    except OSError as error:
        raise ConfigError(f"out={out}: cannot be written, {error.strerror}") from None
    for problem in report.problems:
        print(f"note: {problem if problem.isprintable() else repr(problem)}", file=sys.stderr)
    print(f"written: {out} ({len(report.html.encode()) / 1e6:.1f} MB)")
    if args.figures is not None:
        make_folder("figures", args.figures)
        figures.write(report.charts, args.figures)
        write_curves(report.experiments, args.figures / "curves.csv")
        print(f"written: {len(report.charts)} figures as PNG and SVG, and curves.csv, in {args.figures}")
    return 0


class Report(NamedTuple):
    """A page as HTML, what is drawn in it, and a line about everything that could not be read."""

    html: str
    charts: list[figures.Chart]
    experiments: list[Experiment]
    problems: list[str]


def make_report(run_dirs: Sequence[Path], pattern: str) -> Report:
    """The report about these run folders, which match `pattern`. Raises ConfigError if none can be read."""
    loaded, problems = load_runs(run_dirs)
    runs = []
    for run in loaded:
        try:
            run.rows  # noqa: B018 - reads the file
            runs.append(run)
        except ConfigError as error:
            problems.append(str(error))
    if not runs:
        raise ConfigError(f"runs={pattern}: none of {len(run_dirs)} run folders can be read; {problems[0]}")
    experiments = find_experiments(runs)
    charts = figures.charts_of(experiments)
    more = [name for name in ("note", "error") if any(run.value(name) is not None for run in runs)]
    html = _template().render(
        pattern=pattern,
        written=f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}",
        problems=problems,
        runs=runs,
        experiments=experiments,
        charts=charts,
        columns=[*_COLUMNS, *more],
    )
    # Files may hold what is no character; a page of UTF-8 cannot.
    html = html.encode("utf-8", "replace").decode("utf-8")
    return Report(html, [chart for each in charts.values() for chart in each], experiments, problems)


def _template() -> Any:
    import jinja2

    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["svg"] = lambda chart: b64encode(figures.svg(chart)).decode()
    environment.globals["cell"] = cell
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8"))


def write_curves(experiments: Sequence[Experiment], path: Path) -> None:
    """Write the returns of all runs that count as CSV."""
    with path.open("w", newline="", encoding="utf-8") as table:
        writer = csv.writer(table, lineterminator="\n")
        writer.writerow(("experiment", "algo", "env", "by", "seed", "run", "commit", "env_steps", "return"))
        for each in experiments:
            for run in each.counted:
                names = (each.number, each.algo, each.env, each.by, run.config["seed"], run.id)
                code = cell(run, "commit")
                writer.writerows((*names, code, *point) for point in points(run, each.score))
