"""Differences between the code of two recorded runs, or between a run's code and the work tree.

Nothing is left in the repository, not even an object. The code of a run that was copied from another clone
may be unknown here: then the answer is None, unless the trees have the same name or the run was made from a
commit without changes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from rltemplate.run.git.command import Git, GitError, as_text, attempt
from rltemplate.run.git.snapshot import RESERVED
from rltemplate.run.git.work_tree import GitRecord, read_work_tree

_EXACT = ("-r", "--ignore-submodules=none", "--no-ext-diff", "--no-textconv")

T = TypeVar("T")


def files_between(project: Path, a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str] | None:
    """Names of the files that differ between the code of two runs, relative to the top of the repository.

    `a` and `b` are `git` of their records, `project` lies in the repository that is asked. None: unknown.
    """
    return [] if _same(a, b) else _asked(project, lambda git: _names(git, a, b))


def files_since(project: Path, before: Mapping[str, Any]) -> list[str] | None:
    """Names of the files in which the work tree around `project` is no longer a run's code; None: unknown."""

    def compare(git: Git) -> list[str] | None:
        found = GitRecord()
        read_work_tree(git, found)
        return _names(git, before, {"tree": found.tree})

    return _asked(project, compare)


def text_between(
    project: Path, a: Mapping[str, Any], b: Mapping[str, Any], color: bool = False
) -> str | None:
    """`git diff` from the code of one run to that of another; None: unknown."""
    words = ("-p", "-M", f"--color={'always' if color else 'never'}")
    return "" if _same(a, b) else _asked(project, lambda git: _diff(git, a, b, *words))


def commits(side: Mapping[str, Any]) -> Iterator[str]:
    """Names of commits that hold the code of a run; `side` is `git` of its record.

    Where nothing was changed and nothing left out, the base commit is the code, and every clone has that.
    """
    names = [side.get("commit")]
    if side.get("dirty") is False and not side.get("skipped_count") and not side.get("dirty_submodules"):
        names.append(side.get("base_commit"))
    # A record may come from anywhere, and git would take a word with a dash for an option.
    yield from (f"{name}" for name in names if re.fullmatch(r"[0-9a-f]{40,64}", f"{name}"))


def _same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return bool(set(_objects(a)) & set(_objects(b)))


def _objects(side: Mapping[str, Any]) -> Iterator[str]:
    """Names of trees and commits that hold the code of a run. `git gc` may take `tree`, which has no ref."""
    yield from commits({"commit": side.get("tree")})
    yield from commits(side)


def _asked(project: Path, question: Callable[[Git], T | None]) -> T | None:
    try:
        return attempt(project, question, aside=True)
    except (GitError, OSError):
        return None


def _names(git: Git, a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str] | None:
    told = _diff(git, a, b, "-z", "--name-only", "--no-renames")
    return None if told is None else told.split("\0")[:-1]


def _diff(git: Git, a: Mapping[str, Any], b: Mapping[str, Any], *words: str) -> str | None:
    """The code of two runs compared, where the repository has both."""
    trees = [next(filter(None, (git.find(f"{name}^{{tree}}") for name in _objects(s))), None) for s in (a, b)]
    if None in trees:
        return None
    found = git("diff-tree", *_EXACT, *words, *map(str, trees), "--", f":(top,exclude){RESERVED}")
    return as_text(found)
