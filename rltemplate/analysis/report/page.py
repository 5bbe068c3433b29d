"""The page itself: everything of a report put into one text of HTML.

Nothing in it asks a server for anything, and what comes from run folders is text: it is escaped where it is
shown, and the page's own policy (Content-Security-Policy) lets only two scripts run, known by their hashes,
and lets nothing be loaded from anywhere.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from rltemplate.analysis import diff, stats
from rltemplate.analysis.figures import Chart
from rltemplate.analysis.report import charts, material
from rltemplate.analysis.report.divergences import find_repeats
from rltemplate.analysis.report.experiments import (
    ChangedFiles,
    Experiment,
    before,
    code_name,
    find_experiments,
    load_metrics,
    why_damaged,
)
from rltemplate.analysis.runs import Run, load_runs
from rltemplate.types import ConfigError

TITLE = "Report of runs"
_COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)  # where entries begin and end, for programs
_HERE = Path(__file__).parent
_OPEN_UP_TO = 6  # experiments whose charts are all unfolded
_TABLE_ROWS = 21
_DETAILS = 8  # lines about one thing that was changed


class Report(NamedTuple):
    """A page as HTML, the charts that are in it, and a line about everything that could not be read."""

    html: str
    charts: list[Chart]
    problems: list[str]


def make_report(
    run_dirs: Sequence[Path],
    runs_dir: Path,
    *,
    pattern: str,
    written: str,
    changed_files: ChangedFiles,
    commit_url: Callable[[str], str | None],
    videos: str = "last",
) -> Report:
    """The report about these run folders; sweeps, proofs and the journal are looked for in `runs_dir`.

    `pattern` and `written` (a time) are for the heading. `changed_files` compares two git trees,
    `commit_url` gives the address of a commit on the web, if it has one. `videos` is one of
    `material.VIDEO_CHOICES`. Raises ConfigError if none of the folders holds a run that can be read.
    """
    loaded, problems = load_runs(run_dirs)
    runs = []
    for run in loaded:
        damage = why_damaged(run)
        if damage is None:
            runs.append(run)
        else:
            problems.append(damage)
    if not runs:
        raise ConfigError(f"runs={pattern}: none of {len(run_dirs)} run folders can be read; {problems[0]}")
    experiments = find_experiments(runs, changed_files)
    problems += load_metrics(experiments, charts.MOST_SMALL)
    middles = {each.number: charts.middle_of(each) for each in experiments}
    together = [*charts.comparisons(experiments, middles), *charts.profiles(experiments)]
    films = material.choose_videos(experiments, videos)
    parts = [_part(each, experiments, middles[each.number], films, changed_files) for each in experiments]
    data = {"together": _packed(together)}
    data |= {f"e{part['number']}": _packed([*part["large"], *part["small"]]) for part in parts}
    levels, settings = _levels(runs)
    numbers = {run.dir: each.number for each in experiments for run in each.runs}
    script, (library, packed) = (_HERE / "page.js").read_text(encoding="utf-8"), _plotly()
    html = _rendered(
        title=TITLE,
        pattern=pattern,
        written=written,
        css=(_HERE / "page.css").read_text(encoding="utf-8"),
        script=script,
        plotly=packed,
        policy=_policy([script, library]),
        problems=problems,
        tiles=_tiles(runs, experiments),
        experiments=parts,
        comparisons=together,
        data=data,
        middle_name=charts.MIDDLE,
        number=charts.number,
        commit_url=commit_url,
        open_details=len(experiments) <= _OPEN_UP_TO,
        runs=[(run, numbers[run.dir]) for run in sorted(runs, key=_newest, reverse=True)],
        sweeps=material.read_sweeps(runs_dir, problems)[::-1],
        repeats=find_repeats(experiments),
        levels=levels,
        settings=settings,
        proofs=[_proof(each) for each in material.read_proofs(runs_dir, problems)],
        journal=_from_markdown(material.read_journal(runs_dir, problems)),
        left_out=films.left_out,
    )
    drawn = [*together, *(chart for part in parts for chart in (*part["large"], *part["small"]))]
    return Report(html, drawn, problems)


def _part(
    experiment: Experiment,
    experiments: Sequence[Experiment],
    middle: charts.Middle | None,
    films: material.Videos,
    changed_files: ChangedFiles,
) -> dict[str, Any]:
    """What the page says about one experiment."""
    finals = experiment.finals()
    interval = stats.interval([value for _, _, value in finals], statistic="iqm") if finals else None
    earlier = before(experiment, experiments)
    factors: list[str] = []
    if earlier is not None:
        factors = list(_changes(earlier.runs[0], experiment.runs[0], changed_files))
    large = [charts.learning_curve(experiment, middle), charts.spread(experiment)]
    return {
        "number": experiment.number,
        "title": experiment.title,
        "algo": experiment.algo,
        "env": experiment.env,
        "label": experiment.label,
        "score": experiment.score,
        "runs": experiment.runs,
        "seeds": len(finals),
        "unfinished": len(experiment.runs) - len(finals),
        "steps": max((steps for _, steps, _ in finals), default=None),
        "interval": interval,
        "standing": charts.standing_of(experiment),
        "cautions": list(_cautions(experiment)),
        "before": None if earlier is None else earlier.number,
        "factors": factors,
        "large": [chart for chart in large if chart is not None],
        "small": list(charts.metric_charts(experiment)),
        "table": _rows_of(middle),
        "videos": films.shown.get(experiment.number, []),
    }


def _changes(a: Run, b: Run, changed_files: ChangedFiles) -> Iterable[str]:
    """What was changed from one experiment to the next, the verdict first."""
    files = changed_files(a.record.get("git") or {}, b.record.get("git") or {})
    found = diff.compare_records(a, b, files)
    yield _capital(diff.verdict(found))
    for factor in found.factors:
        for detail in factor.detail[:_DETAILS]:
            yield f"{factor.name}: {detail}"
        if len(factor.detail) > _DETAILS:
            yield f"{factor.name}: and {len(factor.detail) - _DETAILS} more"
    yield from (note for note in found.notes)


def _cautions(experiment: Experiment) -> Iterable[str]:
    finals = experiment.finals()
    if finals:
        yield from stats.caution(len(finals))
    else:
        yield "no run of it has finished with a return, so there are no statistics"
    ends = {steps for _, steps, _ in finals}
    if len(ends) > 1:
        where = ", ".join(f"{steps:,}" for steps in sorted(ends))
        yield f"the seeds have their last {experiment.score} at {where} steps"
    if finals and experiment.score != "eval/return":
        yield "no evaluations, so these are returns of training episodes, with exploration"
    repeated = len([run for run in experiment.runs if run.record.get("status") == "finished"])
    older = repeated - len(experiment.counted)
    if older:
        what = "1 finished run has" if older == 1 else f"{older} finished runs have"
        yield f"{what} the seed of a newer one, which counts instead"
    codes = sorted({code_name(run) for run in experiment.counted})
    if len(codes) > 1:
        yield f"its runs are of {len(codes)} commits, which compute the same: {', '.join(codes[:5])}"


def _rows_of(middle: charts.Middle | None) -> list[tuple[Any, ...]]:
    """Evenly spread points of the curve, the first and the last among them."""
    if middle is None:
        return []
    rows = list(zip(*middle, strict=True))
    if len(rows) <= _TABLE_ROWS:
        return rows
    last = len(rows) - 1
    return [rows[i * last // (_TABLE_ROWS - 1)] for i in range(_TABLE_ROWS)]


def _tiles(runs: Sequence[Run], experiments: Sequence[Experiment]) -> list[tuple[str, str]]:
    statuses = [run.record.get("status") for run in runs]
    seconds = sum(run.record.get("duration_s") or 0.0 for run in runs)
    steps = sum(
        (run.last_row.get("env_steps") or 0) for run in runs if isinstance(run.last_row.get("env_steps"), int)
    )
    counts = {name: statuses.count(name) for name in ("finished", "running", "interrupted", "failed")}
    return [
        ("runs", f"{len(runs):,}"),
        *((name, f"{count:,}") for name, count in counts.items() if count),
        ("experiments", f"{len(experiments):,}"),
        ("environment steps", f"{steps / 1e6:,.1f} M" if steps >= 1e6 else f"{steps:,}"),
        ("hours of training", f"{seconds / 3600:,.1f}")
        if seconds >= 3600
        else ("minutes of training", f"{seconds / 60:,.1f}"),
    ]


def _newest(run: Run) -> tuple[str, str]:
    return run.record.get("started_at") or "", run.id


def _levels(runs: Sequence[Run]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A row about each run, the newest first, and the settings of all, each set of them once."""
    rows = []
    groups: dict[str, dict[str, Any]] = {}
    for run in sorted(runs, key=_newest, reverse=True):
        facts, trace = run.record.get("determinism") or {}, run.record.get("trace") or {}
        found = facts.get("settings")
        found = found if isinstance(found, Mapping) else {}
        level = str(run.value("level"))
        group = groups.setdefault(
            json.dumps([level, found], sort_keys=True, default=str),
            {
                "nr": len(groups) + 1,
                "level": level,
                "runs": 0,
                "facts": [(k, _shown(v)) for k, v in found.items()],
            },
        )
        group["runs"] += 1
        rows.append(
            {
                "run": run,
                "checks": _checks(facts.get("checks")),
                "settings": group["nr"],
                "digest": trace.get("digest"),
                "iterations": trace.get("iterations"),
                "cpu": (run.record.get("machine") or {}).get("cpu") or "",
            }
        )
    return rows, list(groups.values())


def _checks(checks: Any) -> str:
    if not isinstance(checks, Mapping) or not checks:
        return "none"
    said = []
    for name, found in checks.items():
        holds = found.get("holds") if isinstance(found, Mapping) else None
        said.append(f"{name} {'holds' if holds is True else 'unknown' if holds is None else 'is broken'}")
    return ", ".join(said)


def _proof(document: Mapping[str, Any]) -> dict[str, Any]:
    return {**document, "holds": document.get("problems") == []}


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 300 else f"{text[:297]}..."


def _from_markdown(text: str) -> Any:
    """As HTML for a template. HTML in the text is shown and not used; pictures are left out."""
    from markdown_it import MarkdownIt
    from markupsafe import Markup

    markdown = MarkdownIt("commonmark", {"html": False}).enable("table").disable("image")
    tokens = markdown.parse(_COMMENT.sub("", text))
    for token in tokens:
        if re.fullmatch("h[1-4]", token.tag):
            token.tag = f"h{int(token.tag[1]) + 2}"  # below the headings of the page
        if token.children:
            token.children = list(_without_dead_links(token.children))
    return Markup(markdown.renderer.render(tokens, markdown.options, {}))  # escaped by markdown-it


def _without_dead_links(tokens: Iterable[Any]) -> Iterable[Any]:
    """Links to files beside the journal lead nowhere once the page has been sent to somebody."""
    dead = False
    for token in tokens:
        if token.type == "link_open":
            dead = not str(token.attrGet("href") or "").startswith(("https://", "http://"))
        if not (dead and token.type in ("link_open", "link_close")):
            yield token


@cache
def _plotly() -> tuple[str, str]:
    """plotly.js, and as it is packed into a page."""
    from plotly.offline import get_plotlyjs

    library = str(get_plotlyjs())
    return library, _gzipped(library)


def _policy(scripts: Iterable[str]) -> str:
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in scripts
    )
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "media-src blob:; base-uri 'none'; form-action 'none'"
    )


def _rendered(**context: Any) -> str:
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for name in ("css", "script"):  # the page's own
        context[name] = Markup(context[name])
    html = environment.get_template("page.html").render(context)
    # Files may hold what is no character; a page of UTF-8 cannot.
    return html.encode("utf-8", "replace").decode("utf-8")


def _packed(drawn: Iterable[Chart]) -> str:
    return _gzipped(json.dumps([_spec(chart) for chart in drawn], separators=(",", ":"), allow_nan=False))


def _gzipped(text: str) -> str:
    return base64.b64encode(gzip.compress(text.encode("utf-8", "replace"), 6, mtime=0)).decode("ascii")


def _spec(chart: Chart) -> dict[str, Any]:
    """A chart for the script of the page, in few letters: steps as differences, values of five digits."""
    return {
        "k": chart.key,
        "t": chart.title,
        "x": chart.over,
        "y": chart.value_label,
        "l": [
            {
                "n": line.name,
                "s": line.style,
                "e": line.label,
                "m": line.main,
                "d": [step - last for last, step in zip((0, *line.steps), line.steps, strict=False)],
                "v": _digits(line.values),
                "a": _digits(line.low),
                "b": _digits(line.high),
            }
            for line in chart.lines
        ],
        "p": [[dot.name, dot.value, dot.style] for dot in chart.dots],
        "i": chart.middle,
        "r": [list(reference) for reference in chart.references],
    }


def _digits(values: Sequence[float]) -> list[float]:
    return [float(f"{value:.5g}") for value in values]
