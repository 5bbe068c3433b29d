"""`make reproduce`: a recorded run made again from its own code."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rltemplate.config.command_args import flag, folder, one_of, word
from rltemplate.rerun import reproduce

LINE_EVERY_S = 10.0  # where there is no terminal


@dataclass(frozen=True, kw_only=True)
class Args:
    """Make a recorded run again from its own code, and compare: run=RUN [env=install] [keep=FOLDER].

    RUN may also be a ref `refs/runs/...` that was fetched. `env=present` takes this environment if it has the
    versions that were recorded, `env=install` makes one from the recorded lock file. `keep=FOLDER` keeps the
    run that was made again; without it one that diverged is kept below `<runs_dir>/reproductions/`.
    Exit status: 0 identical, 1 diverged or ended earlier, 2 it cannot be made again, 130 or 143 interrupted.
    """

    run: str = word()
    env: str = word(one_of("present", "install"), "present")
    keep: Path | None = word(folder, None)
    runs_dir: Path = word(Path, Path("runs"))
    json: bool = flag()


def main(args: Args) -> int:
    """Make it again, and print what came out."""
    with _bar() as progress:
        found = reproduce.reproduce(
            args.run,
            runs_dir=args.runs_dir,
            install=args.env == "install",
            keep=None if args.keep is None else args.keep.absolute(),
            say=_say,
            progress=progress,
        )
    print(json.dumps(found.to_dict()) if args.json else reproduce.report(found))
    return 0 if found.verdict == reproduce.IDENTICAL else 1


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def _bar() -> Iterator[reproduce.Progress]:
    """A bar of iterations on a terminal, now and then a line elsewhere."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        last = time.monotonic()

        def tell(done: int, total: int) -> None:
            nonlocal last
            if time.monotonic() - last >= LINE_EVERY_S:
                last = time.monotonic()
                _say(f"iteration {done:,} of {total:,}, equal so far")

        yield tell
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("iterations"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
