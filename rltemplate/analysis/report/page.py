"""The page: everything of a report put into one text of HTML.

Nothing in it asks a server for anything. Text from run folders is escaped where it is shown, and the page's
policy (Content-Security-Policy) lets only two scripts run, known by their hashes, and nothing be loaded.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rltemplate.analysis import diff
from rltemplate.analysis.report import figures
from rltemplate.analysis.report.experiments import (
    ChangedFiles,
    Experiment,
    code_name,
    find_experiments,
    load_metrics,
)
from rltemplate.analysis.report.figures import Chart
from rltemplate.analysis.report.repeats import find_repeats
from rltemplate.analysis.runs import load_runs
from rltemplate.analysis.targets import show
from rltemplate.types import ConfigError

_HERE = Path(__file__).parent
_OPEN_UP_TO = 6  # experiments whose metrics are unfolded


class Report(NamedTuple):
    """A page as HTML, what is drawn in it, and a line about everything that could not be read."""

    html: str
    charts: list[Chart]
    experiments: list[Experiment]
    problems: list[str]


def make_report(
    run_dirs: Sequence[Path],
    *,
    pattern: str,
    written: str,
    changed_files: ChangedFiles,
) -> Report:
    """The report about these run folders; `pattern` and `written`, a time, are for its heading.

    Raises ConfigError if no run can be read.
    """
    runs, problems = load_runs(run_dirs)
    if not runs:
        raise ConfigError(f"runs={pattern}: none of {len(run_dirs)} run folders can be read; {problems[0]}")
    experiments = find_experiments(runs, changed_files)
    problems += load_metrics(experiments)
    together = [*figures.overview(experiments), *figures.by_environment(experiments)]
    apart = {each.number: list(figures.of_experiment(each)) for each in experiments}
    numbers = {run.dir: each.number for each in experiments for run in each.runs}
    html = _rendered(
        pattern=pattern,
        written=written,
        problems=problems,
        together=together,
        experiments=experiments,
        charts=apart,
        changes={each.number: _change(each, experiments, changed_files) for each in experiments},
        runs=[
            (run, numbers[run.dir]) for run in sorted(runs, key=lambda run: str(run.value("started")))[::-1]
        ],
        repeats=find_repeats(experiments),
        opened=len(experiments) <= _OPEN_UP_TO,
    )
    return Report(
        html, [*together, *(chart for each in apart.values() for chart in each)], experiments, problems
    )


def _change(experiment: Experiment, experiments: Sequence[Experiment], changed_files: ChangedFiles) -> str:
    """The change against the experiment before in the same environment with the same algorithm."""
    same = [
        each
        for each in experiments[: experiment.number]
        if (each.group.algo, each.group.env) == (experiment.group.algo, experiment.group.env)
    ]
    if len(same) < 2:
        return ""
    a, b = same[-2].runs[0], experiment.runs[0]
    found = diff.verdict(diff.compare_records(a, b, changed_files(a, b)))
    return f"Against experiment {same[-2].number}: {found}; make diff a={a.id} b={b.id} says it in full."


def _rendered(**context: Any) -> str:
    import jinja2
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs
    from plotly.utils import PlotlyJSONEncoder

    def as_json(chart: Chart) -> Markup:
        figure = chart.figure.to_plotly_json()
        del figure["layout"]["width"]  # as wide as the page
        text = json.dumps(figure, cls=PlotlyJSONEncoder, separators=(",", ":"))
        return Markup(text.replace("<", "\\u003c"))  # nothing in it ends the script

    scripts = [get_plotlyjs(), (_HERE / "page.js").read_text(encoding="utf-8")]
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts]
    allowed = " ".join(f"'sha256-{each}'" for each in hashes)
    context["policy"] = (
        f"default-src 'none'; script-src {allowed}; "
        "style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    context["library"], context["script"] = map(Markup, scripts)
    context["css"] = Markup((_HERE / "page.css").read_text(encoding="utf-8"))
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"show": show, "json": as_json}
    environment.globals["code_name"] = code_name
    html = environment.get_template("page.html").render(context)
    # Files may hold what is no character; a page of UTF-8 cannot.
    return html.encode("utf-8", "replace").decode("utf-8")
