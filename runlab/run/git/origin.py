"""The commits that runs of this clone have made.

A ref may have been fetched, and a run folder says what its sender wrote. So a clone keeps the names of its
own commits in git's folder, which neither `git clone` nor `git fetch` copies. The name of a commit is the
digest of its content: whoever repeats such a name can mean no other code and no other configuration.
"""

from __future__ import annotations

from contextlib import suppress

from runlab.run.git.command import Git

_MADE_HERE = "runs-recorded-here"


def mark_made_here(git: Git, commit: str) -> None:
    """Remember that a run of this clone has made a commit. Raises OSError."""
    if not made_here(git, commit):
        with (git.common / _MADE_HERE).open("ab") as file:
            file.write(f"{commit}\n".encode())  # one write: lines of runs beside each other do not mix


def made_here(git: Git, commit: str | None) -> bool:
    """True if a run of this clone has made the commit."""
    with suppress(FileNotFoundError):
        return f"{commit}".encode() in (git.common / _MADE_HERE).read_bytes().split()
    return False
