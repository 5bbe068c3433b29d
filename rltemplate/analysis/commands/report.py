"""`make report`: one page of HTML about many runs, and its figures and tables as files."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rltemplate.analysis.differences import changed_files
from rltemplate.analysis.report import figures
from rltemplate.analysis.report.page import make_report, write_curves
from rltemplate.config.command_args import file, folder, make_folder, word
from rltemplate.run.lines import replace_text
from rltemplate.run.read import find_run_dirs
from rltemplate.types import ConfigError


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
    report = make_report(
        run_dirs,
        pattern=args.runs,
        written=f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}",
        changed_files=changed_files,
    )
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
