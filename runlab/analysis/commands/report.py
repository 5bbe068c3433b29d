"""`make report`: one page of HTML about many runs, its figures as files, and its curves as a table.

The page loads nothing from a network, and text from run folders is escaped.
"""

from __future__ import annotations

import csv
import importlib.util
import os
import sys
import time
from base64 import b64encode
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from runlab.analysis import aggregate, figures
from runlab.analysis.experiments import Experiment, find_experiments, points
from runlab.analysis.page_server import PageServer
from runlab.analysis.runs import SHOWN, cell, load_runs, single_line
from runlab.config.command_args import argument, file, folder, make_folder, switch
from runlab.config.terminal import escaped
from runlab.config.texts import readable
from runlab.errors import ConfigError, in_a_line
from runlab.run import paths
from runlab.run.files import replace_text, say
from runlab.run.read import find_run_dirs

TEMPLATE = Path(__file__).parents[1] / "report.html"
_WATCH_EVERY_S = 2.0
_POSTER_PIXELS = 240
_COLUMNS = [name for name in SHOWN if name not in ("algo", "env")]


@dataclass(frozen=True, kw_only=True)
class Args:
    """One page of HTML about all runs: [runs='runs/*/*'] [out=FILE] [figures=FOLDER] [watch=true].

    The page holds all that it shows, so that it can be read without a network. Without `out=` it is
    `report.html` two folders above the runs. `figures=FOLDER` also writes each figure as PNG and SVG, and
    the curves as CSV. `watch=true` serves the page on this machine until Ctrl-C, at an address that only you
    know, and writes it again when runs have changed; a browser that shows it follows.
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
        say(f"{server.url} until Ctrl-C")
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
    if args.figures is not None:
        make_folder("figures", args.figures)
        figures.write(report.charts, args.figures)
        write_curves(report.experiments, args.figures / "curves.csv")
        say(f"written: {len(report.charts)} figures as PNG and SVG, and curves.csv, in {args.figures}")
    return report.html


class Film(NamedTuple):
    """The newest video of an experiment: caption, link, and a picture as base64."""

    caption: str
    link: str
    poster: str


class ReportPage(NamedTuple):
    """A page as HTML, its charts and experiments, and a line about each unreadable run or search."""

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
    experiments = find_experiments(runs)
    charts = figures.charts_of(experiments)
    searches = []
    for each in _searches(run_dirs):
        try:
            searches.append(figures.search_chart(each))
        except ConfigError as error:
            problems.append(str(error))
    more = [name for name in ("note", "error") if any(run.value(name) is not None for run in runs)]
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=_shown)
    html = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        cell=cell,
        svg=lambda chart: b64encode(figures.svg(chart)).decode(),
        pattern=pattern,
        written=f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}",
        problems=problems,
        runs=runs,
        experiments=experiments,
        charts=charts,
        searches=searches,
        films=[film for each in experiments if (film := _newest_film(each, folder)) is not None],
        scores=aggregate.scores(experiments),
        improvements=[*aggregate.improvements(experiments)],
        columns=[*_COLUMNS, *more],
    )
    drawn = [chart for each in charts.values() for chart in each]
    return ReportPage(html, drawn + searches, experiments, problems)


def _newest_film(experiment: Experiment, folder: Path) -> Film | None:
    if importlib.util.find_spec("av") is None:
        return None
    import av

    videos = [
        (run.record.started_at or "", steps, path)
        for run in experiment.runs
        for steps, path in paths.by_steps(run.dir / paths.VIDEOS, ".mp4").items()
    ]
    for _, steps, path in sorted(videos, reverse=True):
        with suppress(OSError, StopIteration, av.FFmpegError):  # the video is cut or damaged
            # Without a format, a list of file names would be taken for a video, and the files opened.
            with av.open(str(path), format="mp4") as container:
                container.seek((container.duration or 0) // 2)
                frame: Any = next(container.decode(video=0))
            picture = frame.to_image()
            picture.thumbnail((_POSTER_PIXELS, _POSTER_PIXELS))
            picture.save(file := BytesIO(), "jpeg", quality=70)
            link = quote(Path(os.path.relpath(path, folder)).as_posix())
            caption = f"{experiment.title}, after {steps:,} steps"
            return Film(caption, link, b64encode(file.getvalue()).decode())
    return None


def _shown(value: Any) -> Any:
    """A value as the page shows it: reversed directions and other controls are written as escapes."""
    return escaped(value) if type(value) is str else value


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
