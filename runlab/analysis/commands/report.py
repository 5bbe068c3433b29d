"""`make report`: one page of HTML about many runs, its figures as files, and its curves as a table.

The page loads nothing from a network, and text from run folders is escaped. Its curves are drawn by uPlot
(MIT licence), which lies in the folder uplot/ as it was published.
"""

from __future__ import annotations

import csv
import os
import sys
import time
from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from runlab.analysis import aggregate, figures
from runlab.analysis.experiments import Experiment, find_experiments, points
from runlab.analysis.page_server import PageServer
from runlab.analysis.runs import NOTHING, SHOWN, Run, cell, load_runs, single_line
from runlab.config.command_args import argument, file, folder, make_folder, switch
from runlab.config.terminal import escaped
from runlab.config.texts import readable
from runlab.errors import ConfigError, in_a_line
from runlab.run import paths
from runlab.run.files import replace_text, say
from runlab.run.git.selection import note_written
from runlab.run.read import find_run_dirs

_PARTS = Path(__file__).parents[1]  # of the page
_WATCH_EVERY_S = 2.0
_POSTER_PIXELS = 240
_MOST_PIXELS = 4096**2  # of a video: a file of half a megabyte can hold a picture that takes gigabytes
_FIRST = ("seed", "return", "steps", "status")  # columns that a narrow window shows
# Characters that LaTeX would obey.
_TEX = str.maketrans({sign: f"\\{sign}" for sign in "&%$#_{}"})
_TEX |= {ord(sign): f"{{{sign}}}" for sign in "[*"}  # arguments of the command before them
_TEX |= str.maketrans({"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"})
_FORMULA = ("=", "+", "-", "@")
_COLUMNS = [*_FIRST, *(name for name in SHOWN if name not in ("algo", "env", *_FIRST))]


@dataclass(frozen=True, kw_only=True)
class Args:
    """One page of HTML about all runs: [runs='runs/*/*'] [out=FILE] [figures=FOLDER] [watch=true].

    The page holds all that it shows, so that it can be read without a network. Without `out=` it is
    `report.html` two folders above the runs. `figures=FOLDER` also writes each figure as PNG, SVG and PDF,
    the results as a table for LaTeX, and the curves as CSV. `watch=true` serves the page on this machine
    until Ctrl-C, at an address that only you know, and writes it again when runs have changed; a browser
    that shows it follows.
    """

    runs: str = argument(default="runs/*/*")
    out: Path | None = argument(file, None)
    figures: Path | None = argument(folder, None)
    watch: bool = argument(switch, False)


def main(args: Args) -> int:
    """Write the page, and print its place."""
    out = args.out or find_run_dirs(args.runs)[0].parent.parent / "report.html"
    if not args.watch:
        _write(args, out)
        return 0
    with PageServer() as server, suppress(KeyboardInterrupt):
        seen = _state(args)
        server.show(_write(args, out))
        say(f"open {server.url} and see it change, until Ctrl-C")
        while True:
            time.sleep(_WATCH_EVERY_S)
            if (now := _state(args)) == seen:
                continue
            seen = now
            try:
                server.show(_write(args, out))
            except (ConfigError, OSError) as error:  # runs are moved or written now: the last page stays
                print(f"note: {readable(str(error))}", file=sys.stderr, flush=True)
    return 0


def _state(args: Args) -> dict[Path, int]:
    """The times at which the sources of a report were written; empty while there are no runs."""
    try:
        dirs = find_run_dirs(args.runs)
    except ConfigError:
        return {}
    sources = [each / name for each in dirs for name in (paths.RECORD, paths.METRICS, paths.VIDEOS)]
    sources += [each / paths.SEARCH for each in _searches(dirs)]
    times = dict[Path, int]()
    for source in sources:
        with suppress(OSError):
            times[source] = source.stat().st_mtime_ns
    return times


def _searches(run_dirs: Sequence[Path]) -> list[Path]:
    """The folders of searches beside the runs."""
    homes = sorted({each.parent.parent for each in run_dirs})
    return [file.parent for home in homes for file in sorted(home.glob(f"{paths.SWEEPS}/*/{paths.SEARCH}"))]


def _write(args: Args, out: Path) -> str:
    """Write the page and the figures; the page."""
    report = make_report(find_run_dirs(args.runs), args.runs, out.parent)
    with in_a_line(f"out={out} cannot be written"):
        replace_text(out, [report.html])
    for problem in report.problems:
        print(f"note: {single_line(problem)}", file=sys.stderr)
    say(f"written: {out} ({len(report.html.encode()) / 1e6:.1f} MB)")
    written = [out]
    if args.figures is not None:
        make_folder("figures", args.figures)
        with in_a_line(f"figures={args.figures} cannot be written"):
            written += figures.write(report.charts, args.figures)
            written += [write_curves(report.experiments, args.figures / "curves.csv")]
            written += [write_table(report.experiments, args.figures / "table.tex")]
        count = len(report.charts)
        say(f"written: {count} figures as PNG, SVG and PDF, table.tex and curves.csv, in {args.figures}")
    note_written(paths.PROJECT, written)
    return report.html


class ReportPage(NamedTuple):
    """A page as HTML, what is not folded away in it, and a line about each unreadable run or search."""

    html: str
    charts: list[figures.Chart]
    experiments: list[Experiment]
    problems: list[str]


def make_report(run_dirs: Sequence[Path], pattern: str, folder: Path = Path()) -> ReportPage:
    """The report about these run folders, which match `pattern`; links are relative to `folder`.

    Raises ConfigError if no run can be read.
    """
    import jinja2

    runs, problems = load_runs(run_dirs, with_rows=True)
    if not runs:
        raise ConfigError(f"runs={pattern}: none of {len(run_dirs)} run folders can be read; {problems[0]}")
    found = find_experiments(runs)
    experiments = [each for each in found if not all(map(_is_aside, each.runs))] or found
    aside = [each for each in found if each not in experiments]
    for number, each in enumerate([*experiments, *aside], start=1):
        each.number = number
    charts = figures.charts_of(experiments)
    searches = []
    for search in _searches(run_dirs):
        try:
            searches.append(figures.search_chart(search))
        except ConfigError as error:
            problems.append(str(error))
    more = [name for name in ("note", "error") if any(run.value(name) is not None for run in runs)]
    library, license, script, style = (
        (_PARTS / name).read_text(encoding="utf-8")
        for name in ("uplot/uPlot.iife.min.js", "uplot/LICENSE", "report.js", "uplot/uPlot.min.css")
    )
    script = f"/* uPlot\n\n{license}*/\n{library}\n{script}"
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=_shown)
    html = environment.from_string((_PARTS / "report.html").read_text(encoding="utf-8")).render(
        cell=cell,
        data=figures.page_data,
        digest=b64encode(sha256(script.encode()).digest()).decode(),
        script=script,
        library_style=style,
        pattern=pattern,
        written=f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}",
        problems=problems,
        runs=runs,
        experiments=experiments,
        aside=aside,
        charts=figures.charts_of(aside) | charts,
        searches=searches,
        films={each.number: films for each in found if (films := [*_films(each, folder)])},
        scores=[*aggregate.scores(experiments)],
        improvements=[*aggregate.improvements(experiments)],
        columns=[*_COLUMNS, *more],
    )
    drawn = [chart for each in charts.values() for chart in each]
    return ReportPage(html, drawn + searches, experiments, problems)


def _is_aside(run: Run) -> bool:
    """True for a run with `debug=`, and for a trial of a search."""
    debug = any(word.startswith("debug=") for word in run.record.overrides)
    return debug or run.record.command_line[3:4] == ["search"]  # python -m PACKAGE search


def _films(experiment: Experiment, folder: Path) -> Iterator[tuple[str, str, str]]:
    """Caption, link and picture, as base64, of the newest video of each run, the newest runs first."""
    try:
        import av
    except ImportError:
        return
    for run in sorted(experiment.runs, key=lambda run: run.record.started_at or "", reverse=True):
        for steps, path in reversed(paths.by_steps(run.dir / paths.VIDEOS, ".mp4").items()):
            # The video may be cut, damaged or a stranger's, and av's own code raises what it meets:
            # AttributeError for an unknown codec, UnicodeDecodeError for a title.
            with suppress(Exception):
                # Without a format, a list of file names would be taken for a video, and the files opened.
                with av.open(str(path), format="mp4") as container:
                    video = container.streams.video[0]
                    video.codec_context.options = {"max_pixels": f"{_MOST_PIXELS}"}
                    container.seek((container.duration or 0) // 2)
                    frame: Any = next(container.decode(video))
                picture = frame.to_image()
                picture.thumbnail((_POSTER_PIXELS, _POSTER_PIXELS))
                picture.save(file := BytesIO(), "jpeg", quality=70)
                link = quote(Path(os.path.relpath(path, folder)).as_posix())
                caption = f"seed {run.config['seed']}, after {steps:,} steps"
                yield caption, link, b64encode(file.getvalue()).decode()
                break


def _shown(value: Any) -> Any:
    """A value as the page shows it: reversed directions and other controls are written as escapes."""
    return escaped(value) if type(value) is str else value


def write_curves(experiments: Sequence[Experiment], path: Path) -> Path:
    """Write the returns of all runs that count as CSV; `path`."""
    table = StringIO(newline="")
    writer = csv.writer(table, lineterminator="\n")
    names = ("experiment", "algo", "env", "by", "seed", "run", "commit", "metric")
    writer.writerow((*names, "env_steps", "return"))
    for each in experiments:
        for run in each.counted:
            facts = (each.number, each.algo, each.env, each.by, run.config["seed"], run.id)
            row = [_no_formula(fact) for fact in (*facts, cell(run, "commit"), each.score)]
            writer.writerows((*row, *point) for point in points(run, each.score))
    replace_text(path, [table.getvalue()])
    return path


def _no_formula(name: Any) -> Any:
    """A name from a run folder as a cell: a spreadsheet would compute one that begins with such a sign."""
    formula = isinstance(name, str) and name.startswith(_FORMULA) and name != NOTHING
    return f"'{name}" if formula else name


def write_table(experiments: Sequence[Experiment], path: Path) -> Path:
    """Write the results as a table for LaTeX; `path`."""
    lines = [
        r"% Needs \usepackage{booktabs}. From 5 seeds on, a return is the IQM with its 95 % interval.",
        r"\begin{tabular}{lllrrl}",
        r"\toprule",
        r"Environment & Algorithm & Experiment & Seeds & Steps & Return \\",
        r"\midrule",
    ]
    for each in (each for each in experiments if each.counted):
        of = "" if each.score == "eval/return" else " (training episodes)"
        numbers = f"{len(each.counted)} & {each.steps:,} & {each.summary.replace('-', '$-$')}{of}"
        names = (escaped(name).translate(_TEX) for name in (each.env, each.algo, each.by or "default"))
        lines.append(rf"{' & '.join(names)} & {numbers} \\")
    replace_text(path, ["\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])])
    return path
