#!/usr/bin/env python3
"""Fetch runs of another repository: `python scripts/fetch_runs.py [remote=NAME] [run=RUN | runs=PATTERN]`.

Only `refs/runs/*`, and always forward: a ref that leads elsewhere here is named and left alone. Whoever has a
run's ref can make the run again with `make reproduce run=RUN`.

Exit status: 0 all that was chosen is here, 1 something was left alone, 2 refused.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

# What git has fetched by then stays, and each ref is moved or not.
signal.signal(signal.SIGINT, lambda *_: os._exit(130))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rltemplate.run import remotes  # noqa: E402
from rltemplate.run.git import GitError  # noqa: E402
from rltemplate.run.paths import REF_PREFIX  # noqa: E402
from rltemplate.types import ConfigError  # noqa: E402
from rltemplate.words import Kinds, parse_words, readable  # noqa: E402

PROJECT = Path(__file__).resolve().parents[1]
KINDS: Kinds = {"remote": str, "run": str, "runs": str}


def main(argv: list[str]) -> int:
    """Fetch, and say what is new."""
    try:
        given = parse_words(argv, KINDS)
        if "run" in given and "runs" in given:
            raise ConfigError(f"run={given['run']}: give run= or runs=, not both")
        remote = remotes.choose_remote(PROJECT, given.get("remote"))
        key = "run" if "run" in given else "runs"
        moves = remotes.fetch_runs(PROJECT, remote, key, given.get(key))
    except (ConfigError, GitError) as error:
        print(f"error: {readable(str(error), argv)}", file=sys.stderr)
        return 2
    brought = [move for move in moves if move.state in (remotes.NEW, remotes.MOVED)]
    equal = sum(move.state == remotes.EQUAL for move in moves)
    print(
        f"{remote}: {len(brought) or 'no'} {'run' if len(brought) == 1 else 'runs'} fetched, {equal} as here"
    )
    for move in brought:
        print(f"  {move.state:9} {move.id}")
    left = 0
    for move in moves:
        name, there, here = f"{REF_PREFIX}{move.id}", f"{move.there}"[:12], f"{move.here}"[:12]
        if move.state == remotes.BEHIND:
            print(f"left alone: {name} is further here; make push-runs run={move.id}")
        elif move.state == remotes.ELSEWHERE:
            print(f"left alone: {name} leads elsewhere at {remote}, to {there}, and here to {here}")
        left += move.state in (remotes.BEHIND, remotes.ELSEWHERE)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
