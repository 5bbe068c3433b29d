#!/usr/bin/env python3
"""Make a recorded run again, from its own code: `python scripts/reproduce.py run=RUN [env=install] [--json]`.

RUN is an id, a unique part of one, a folder, or a ref `refs/runs/...`, also one that was fetched.
`env=present` (the default) takes this environment if it has the versions that were recorded, `env=install`
makes one from the recorded lock file. `keep=FOLDER` keeps the run that was made again; without it one that
diverged is kept below `<runs_dir>/reproductions/`.

Exit status: 0 identical, 1 diverged or ended earlier, 2 it cannot be made again, 130 or 143 interrupted.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Until there is something to end and to remove there is nothing to do for Ctrl-C but to go.
signal.signal(signal.SIGINT, lambda *_: os._exit(130))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rltemplate.config.command_args import (  # noqa: E402
    Kinds,
    folder,
    one_of,
    parse_words,
    readable,
)
from rltemplate.launch.subprocesses import Interrupted  # noqa: E402
from rltemplate.rerun import reproduce  # noqa: E402
from rltemplate.types import ConfigError  # noqa: E402

KINDS: Kinds = {"run": str, "env": one_of("present", "install"), "keep": folder, "runs_dir": str}
LINE_EVERY_S = 10.0  # where there is no terminal


def say(text: str) -> None:
    """A line beside the result."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def bar() -> Iterator[reproduce.Progress]:
    """A bar of iterations on a terminal, now and then a line elsewhere."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        last = time.monotonic()

        def tell(done: int, total: int) -> None:
            nonlocal last
            if time.monotonic() - last >= LINE_EVERY_S:
                last = time.monotonic()
                say(f"iteration {done:,} of {total:,}, equal so far")

        yield tell
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("iterations"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def main(argv: list[str]) -> int:
    """Do it, and print what came out."""
    try:
        given = parse_words(argv, KINDS, required=["run"], flags=["--json"])
        with bar() as progress:
            found = reproduce.reproduce(
                given["run"],
                runs_dir=Path(given.get("runs_dir", "runs")),
                install=given.get("env") == "install",
                keep=given["keep"].absolute() if "keep" in given else None,
                say=say,
                progress=progress,
            )
    except ConfigError as error:
        print(f"error: {readable(str(error), argv)}", file=sys.stderr)
        return 2
    except Interrupted as stopped:
        say("interrupted, so nothing is known; everything was removed")
        return 128 + stopped.number
    print(json.dumps(found.to_dict()) if "--json" in given else reproduce.report(found))
    return 0 if found.verdict == reproduce.IDENTICAL else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
