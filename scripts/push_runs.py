#!/usr/bin/env python3
"""Push runs to another repository: `python scripts/push_runs.py [remote=NAME] [run=RUN | runs=PATTERN]`.

What the remote lacks of `refs/runs/*` is pushed, always forward and never by force. All that would newly get
there is looked through for secrets first; `allow=PATH` (or a pattern, or several with commas) lets one
through that is none. `dry=1` only says what would be pushed.

Exit status: 0 all that was chosen is there, 1 something was left alone, 2 refused, and nothing was pushed.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

# What git has pushed by then stays, and each ref is there or not.
signal.signal(signal.SIGINT, lambda *_: os._exit(130))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rltemplate.run import remotes  # noqa: E402
from rltemplate.run.git import GitError  # noqa: E402
from rltemplate.run.paths import REF_PREFIX  # noqa: E402
from rltemplate.types import ConfigError  # noqa: E402
from rltemplate.words import Kinds, one_of, parse_words, readable  # noqa: E402

PROJECT = Path(__file__).resolve().parents[1]
KINDS: Kinds = {
    "remote": str,
    "run": str,
    "runs": str,
    "allow": lambda text: [part.strip() for part in text.split(",")],
    "dry": one_of("1", "true", "0", "false"),
}
SHOWN = 20  # of a longer list so many are named


def main(argv: list[str]) -> int:
    """Look, refuse or push, and say what became of each."""
    try:
        given = parse_words(argv, KINDS)
        if "run" in given and "runs" in given:
            raise ConfigError(f"run={given['run']}: give run= or runs=, not both")
        remote = remotes.choose_remote(PROJECT, given.get("remote"))
        key = "run" if "run" in given else "runs"
        push = remotes.plan_push(PROJECT, remote, key, given.get(key), given.get("allow", ()))
    except (ConfigError, GitError) as error:
        print(f"error: {readable(str(error), argv)}", file=sys.stderr)
        return 2
    for finding in push.allowed:
        print(f"let through by allow=: {finding}")
    if push.findings:
        print(refusal(push), file=sys.stderr)
        return 2
    dry = given.get("dry") in ("1", "true")
    print(headline(push, dry))
    for move in push.to_go[:SHOWN]:
        print(f"  {move.state:9} {move.id}")
    if len(push.to_go) > SHOWN:
        print(f"  and {len(push.to_go) - SHOWN} more")
    left = left_alone(push)
    try:
        refused = [] if dry or not push.to_go else remotes.push_runs(PROJECT, push)
    except GitError as error:
        print("\n".join(left), end="\n" * bool(left))
        print(f"error: {error}", file=sys.stderr)
        return 2
    for line in [*left, *(f"refused by {remote}: {line}" for line in refused)]:
        print(line)
    if push.to_go and not dry:
        print(f"pushed to {remote}: {len(push.to_go) - len(refused)} of {len(push.to_go)}")
    return 1 if left or refused else 0


def headline(push: remotes.Push, dry: bool) -> str:
    """What is about to happen, in a line."""
    there = sum(move.state == remotes.EQUAL for move in push.moves)
    known = f"; {there} there already" if there else ""
    if not push.to_go:
        return f"{push.remote}: nothing to push{known}"
    runs = "1 run" if len(push.to_go) == 1 else f"{len(push.to_go)} runs"
    own = "1 commit" if push.own_commits == 1 else f"{push.own_commits} commits"
    would = "would go" if dry else "go"
    if push.own_commits == 1 and not dry:
        would = "goes"
    along = f", and {own} of your own history {would} along" if push.own_commits else ""
    return f"{push.remote}: {runs} to push{along}; {push.files} files looked through, no secret found{known}"


def left_alone(push: remotes.Push) -> list[str]:
    """A line for each ref that is not pushed because the remote has something else."""
    lines = []
    for move in push.moves:
        name, there = f"{REF_PREFIX}{move.id}", f"{move.there}"[:12]
        if move.state == remotes.BEHIND:
            lines.append(f"left alone: {name} is further at {push.remote}; make fetch-runs run={move.id}")
        elif move.state == remotes.ELSEWHERE:
            lines.append(
                f"left alone: {name} leads elsewhere at {push.remote}, to {there}, and here to "
                f"{f'{move.here}'[:12]}"
            )
    return lines


def refusal(push: remotes.Push) -> str:
    """What looks like a secret, and where; never the secret."""
    count = len(push.findings)
    what = "1 thing looks" if count == 1 else f"{count} things look"
    allow = ",".join(dict.fromkeys(finding.path for finding in push.findings[:3]))
    lines = [f"error: nothing was pushed to {push.remote}: {what} like a secret"]
    lines += [f"  {finding}" for finding in push.findings[:SHOWN]]
    lines += [f"  and {count - SHOWN} more"] * (count > SHOWN)
    return "\n".join([*lines, f"take it out of the history, or, if it is none, add allow={allow!r}"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
