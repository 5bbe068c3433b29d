"""`make report`: one page of HTML about many runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path

from rltemplate.analysis.figures import write_figures
from rltemplate.analysis.report import commits, material
from rltemplate.analysis.report.page import make_report
from rltemplate.config.command_args import make_folder, one_of, word
from rltemplate.run.git import changes
from rltemplate.run.git.command import Git, GitError, attempt
from rltemplate.run.lines import replace_text
from rltemplate.run.paths import PROJECT
from rltemplate.run.read import find_run_dirs
from rltemplate.types import ConfigError

NAME = "report.html"


@dataclass(frozen=True, kw_only=True)
class Args:
    """One page of HTML about all runs, for sending around: [runs='runs/*/*'] [out=FILE] [figures=FOLDER].

    The page holds all that it shows, so that it can be read without a network. `figures=FOLDER` also writes
    each chart as PNG and SVG. `videos=all` puts in every film and `videos=none` no film; by default each
    experiment has the last one of the seed with the median return. Sweeps, proofs and the journal are looked
    for two folders above the runs, where `report.html` goes without `out=`.
    """

    runs: str = word(default="runs/*/*")
    out: str | None = word(default=None)
    figures: str | None = word(default=None)
    videos: str = word(one_of(*material.VIDEO_CHOICES), "last")


def main(args: Args) -> int:
    """Write the page, and say where it is."""
    run_dirs = find_run_dirs(args.runs)
    runs_dir = run_dirs[0].parent.parent
    out = runs_dir / NAME if args.out is None else _file(args.out)
    figures = None if args.figures is None else _folder(args.figures)
    report = make_report(
        run_dirs,
        runs_dir,
        pattern=args.runs,
        written=f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}",
        changed_files=lambda a, b: changes.files_between(PROJECT, a, b),
        commit_url=commit_links(PROJECT),
        videos=args.videos,
    )
    if figures is not None:
        make_folder("figures", figures)
    try:
        replace_text(out, [report.html])
    except OSError as error:
        raise ConfigError(f"out={args.out or out}: cannot be written, {error.strerror}") from None
    for problem in report.problems:
        line = "".join(letter if letter.isprintable() else " " for letter in problem)
        print(f"note: {line}", file=sys.stderr)
    print(f"written: {out} ({len(report.html.encode()) / 1e6:.1f} MB)")
    if figures is not None:
        written = write_figures(report.charts, figures)
        print(f"written: {len(written) // 2} figures in {figures}, each as PNG and SVG")
    return 0


def _file(text: str) -> Path:
    """The file that `out=` names, refused before all the work if it cannot be written."""
    out = _expanded(text)
    try:
        if out.is_dir():
            raise ConfigError(f"out={text}: is a folder; expected a file, such as {out / NAME}")
        if not out.parent.is_dir():
            raise ConfigError(f"out={text}: cannot be written, there is no folder {out.parent}")
    except OSError as error:  # longer than any name
        raise ConfigError(f"out={text}: cannot be written, {error.strerror}") from None
    return out


def _folder(text: str) -> Path:
    """The folder that `figures=` names, refused before all the work if it is none; made later."""
    folder = _expanded(text)
    try:
        if folder.is_dir() or not folder.exists():
            return folder
    except OSError as error:
        raise ConfigError(f"figures={text}: cannot be made, {error.strerror}") from None
    raise ConfigError(f"figures={text}: is a file; expected a folder")


def _expanded(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError:  # ~somebody, whom this machine does not know
        return Path(text)


def commit_links(project: Path) -> Callable[[str], str | None]:
    """What gives the address of a commit on the web: of those that a remote repository is known to have."""

    def remote(git: Git) -> str:
        names = git.line("remote").splitlines()
        return git.line("remote", "get-url", "origin" if "origin" in names else names[0]) if names else ""

    try:
        web = commits.web_address(attempt(project, remote))
    except GitError:
        web = None

    @cache
    def address(commit: str) -> str | None:
        found = None if web is None else commits.commit_address(web, commit)
        if found is None:
            return None
        contains = ("for-each-ref", "--count=1", f"--contains={commit}", "refs/remotes")
        try:
            return found if attempt(project, lambda git: git.line(*contains)) else None
        except GitError:
            return None  # a commit that this repository does not have

    return address
