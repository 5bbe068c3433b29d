"""The report: one page of HTML about many runs, its figures as files, and its numbers as tables.

Nothing in the page asks a server for anything, and text from run folders is escaped where it is shown.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rltemplate.analysis.experiments import (
    ChangedFiles,
    Experiment,
    find_experiments,
    points,
    with_metrics,
)
from rltemplate.analysis.report.figures import Chart, as_plotly, charts_of
from rltemplate.analysis.run_table import SHOWN, cell
from rltemplate.analysis.runs import MISSING, load_runs
from rltemplate.types import ConfigError

_COLUMNS = [name for name in SHOWN if name not in ("algo", "env")]


class Report(NamedTuple):
    """A page as HTML, what is drawn in it, and a line about everything that could not be read."""

    html: str
    charts: list[Chart]
    experiments: list[Experiment]
    problems: list[str]


def make_report(
    run_dirs: Sequence[Path], *, pattern: str, written: str, changed_files: ChangedFiles
) -> Report:
    """The report about these run folders; `pattern` and `written`, a time, are for its heading.

    Raises ConfigError if no run can be read.
    """
    loaded, damaged = load_runs(run_dirs)
    runs, problems = with_metrics(loaded)
    problems = damaged + problems
    if not runs:
        raise ConfigError(f"runs={pattern}: none of {len(run_dirs)} run folders can be read; {problems[0]}")
    experiments = find_experiments(runs, changed_files)
    charts = charts_of(experiments)
    more = [name for name in ("note", "error") if any(run.value(name) not in (MISSING, None) for run in runs)]
    html = _rendered(
        pattern=pattern,
        written=written,
        problems=problems,
        runs=runs,
        experiments=experiments,
        charts=charts,
        columns=[*_COLUMNS, *more],
    )
    return Report(html, [chart for each in charts.values() for chart in each], experiments, problems)


def repeats(experiment: Experiment) -> Iterator[str]:
    """Lines about finished runs of one seed, which should have equal traces."""
    digests: dict[int, dict[str, str]] = {}  # by seed, by run
    for run in experiment.runs:
        if run.record.status == "finished" and run.record.trace and run.record.git.tree:
            digests.setdefault(run.config["seed"], {})[run.id] = run.record.trace.digest
    for seed, found in digests.items():
        counts = Counter(found.values())
        if len(counts) == 1 < len(found):
            yield f"Identical to the last bit: {len(found)} runs of seed {seed}."
        elif len(counts) > 1:
            a, b = (next(name for name, each in found.items() if each == digest) for digest in [*counts][:2])
            yield f"Runs of seed {seed} have {len(counts)} different traces: make compare a={a} b={b}"


def _rendered(**context: Any) -> str:
    import jinja2
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    def as_json(chart: Chart) -> Markup:
        return Markup(as_plotly(chart).to_json().replace("<", "\\u003c"))  # nothing in it ends the script

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["json"] = as_json
    environment.globals |= {"library": Markup(get_plotlyjs()), "cell": cell, "repeats": repeats}
    html = environment.get_template("page.html").render(context)
    # Files may hold what is no character; a page of UTF-8 cannot.
    return html.encode("utf-8", "replace").decode("utf-8")


def write_curves(experiments: Sequence[Experiment], path: Path) -> None:
    """Write the returns of all runs that count as CSV."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("experiment", "algo", "env", "by", "seed", "run", "commit", "env_steps", "return"))
        for each in experiments:
            for run in each.counted:
                names = (each.number, each.algo, each.env, each.by, run.config["seed"], run.id)
                code = cell(run, "commit")
                writer.writerows((*names, code, *point) for point in points(run, each.score))
