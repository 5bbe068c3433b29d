"""`make reproduce`: a recorded run made again from its own code."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rltemplate.config.command_args import flag, folder, one_of, word
from rltemplate.rerun import reproduce

_LINE_EVERY_S = 10.0


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
    """Make it again, with a line of progress now and then, and print what came out."""
    last = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= _LINE_EVERY_S:
            last = time.monotonic()
            print(f"iteration {done:,} of {total:,}, equal so far", file=sys.stderr, flush=True)

    install, keep = args.env == "install", args.keep
    found = reproduce.reproduce(
        args.run, runs_dir=args.runs_dir, install=install, keep=keep, progress=progress
    )
    print(json.dumps(asdict(found)) if args.json else reproduce.report(found))
    return 0 if found.verdict == reproduce.IDENTICAL else 1
