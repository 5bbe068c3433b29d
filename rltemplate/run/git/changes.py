"""Differences between the code of two recorded runs, or between a run's code and the work tree.

Nothing is left in the repository, not even an object. The code of a run that was copied from another clone
may be unknown here: then the answer is None, unless the trees have the same name or the run was made from a
commit without changes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from rltemplate.run.git.command import Git, GitError, as_text, attempt
from rltemplate.run.git.snapshot import CONFIG_PATH
from rltemplate.run.git.work_tree import Snapshot, read_work_tree

# The folder in the commit of a run that is not code.
_RESERVED = CONFIG_PATH.rpartition("/")[0] + "/"
_EXACT = ("-r", "--ignore-submodules=none")

T = TypeVar("T")


def files_between(project: Path, a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str] | None:
    """Names of the files that differ between the code of two runs, relative to the top of the repository.

    `a` and `b` are `git` of their records, `project` lies in the repository that is asked. None: unknown.
    """
    if set(_objects(a)) & set(_objects(b)):
        return []
    return _asked(project, lambda git: _names(git, a, b))


def files_since(project: Path, before: Mapping[str, Any]) -> list[str] | None:
    """Names of the files in which the work tree around `project` is no longer a run's code; None: unknown."""

    def compare(git: Git) -> list[str] | None:
        found = Snapshot()
        read_work_tree(git, found)
        return _names(git, before, {"tree": found.tree})

    return _asked(project, compare) if list(_objects(before)) else None


def text_between(
    project: Path, a: Mapping[str, Any], b: Mapping[str, Any], color: bool = False
) -> str | None:
    """`git diff` from the code of one run to that of another; None: unknown."""
    if set(_objects(a)) & set(_objects(b)):
        return ""

    def compare(git: Git) -> str | None:
        pair = _pair(git, a, b)
        words = ("-p", "-M", "--no-ext-diff", "--no-textconv", f"--color={'always' if color else 'never'}")
        if pair is None:
            return None
        text = git("diff-tree", *_EXACT, *words, *pair, "--", f":(top,exclude){_RESERVED}")
        return text.decode(errors="replace")

    return _asked(project, compare)


def _asked(project: Path, question: Callable[[Git], T | None]) -> T | None:
    try:
        return attempt(project, question, aside=True)
    except (GitError, OSError):
        return None


def _names(git: Git, a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str] | None:
    pair = _pair(git, a, b)
    if pair is None:
        return None
    names = map(as_text, git.names("diff-tree", *_EXACT, "-z", "--name-only", "--no-renames", *pair))
    return [name for name in names if not name.startswith(_RESERVED)]


def _pair(git: Git, a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[str, str] | None:
    """Trees of both, if the repository has them."""
    old, new = (next(filter(None, (_tree(git, name) for name in _objects(side))), None) for side in (a, b))
    return None if old is None or new is None else (old, new)


def _tree(git: Git, name: str) -> str | None:
    """The tree of a commit or tree; None unless it is here with all that is in it."""
    tree = git.line("rev-parse", "--quiet", "--verify", f"{name}^{{tree}}", fine=1)
    try:
        if tree:
            git("ls-tree", "-r", "-t", "--name-only", tree)
    except GitError as error:  # `git gc` took objects that no ref holds
        if error.final:
            raise
        return None
    return tree or None


def commits(side: Mapping[str, Any]) -> Iterator[str]:
    """Names of commits that hold the code of a run; `side` is `git` of its record.

    Where nothing was changed and nothing left out, the base commit is the code, and every clone has that.
    """
    names = [side.get("commit")]
    if side.get("dirty") is False and not side.get("skipped_count") and not side.get("dirty_submodules"):
        names.append(side.get("base_commit"))
    yield from filter(_is_name, names)


def _objects(side: Mapping[str, Any]) -> Iterator[str]:
    """Names of trees and commits that hold the code of a run. Only a commit, and no ref, holds `tree`."""
    yield from filter(_is_name, [side.get("tree")])
    yield from commits(side)


def _is_name(name: Any) -> TypeGuard[str]:
    """A record may come from anywhere, and git would take a word with a dash for an option."""
    return isinstance(name, str) and bool(re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", name))
