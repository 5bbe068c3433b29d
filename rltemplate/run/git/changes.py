"""What differs between the code of two recorded runs, or between a run's and the work tree as it is now.

Looks only: nothing is left in the repository, not even an object. A run's code is what `git` in its record
names. A run that was copied from another clone may have a commit that this repository has never seen; then
nobody can tell, unless the trees have the same name or the run was made from a commit as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from rltemplate.run.git.command import (
    Git,
    GitError,
    attempt,
    shown,
)
from rltemplate.run.git.scratch import scratch_folder
from rltemplate.run.git.snapshot import CONFIG_PATH
from rltemplate.run.git.work_tree import WorkTree, read_work_tree

# What the commit of a run holds beside its code.
_RESERVED = CONFIG_PATH.rpartition("/")[0] + "/"
_ATTEMPTS = 3  # at a work tree that changes while it is read


def files_between(project: Path, a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str] | None:
    """Names of the files that differ between the code of two runs, relative to the top of the repository.

    `a` and `b` are `git` of their records, `project` lies in the repository that is asked. None if nobody
    can tell: a run has no snapshot, or the repository does not have both.
    """
    if set(_objects(a)) & set(_objects(b)):
        return []
    try:
        return attempt(project, lambda git: _first_that_is_here(git, a, b))
    except (GitError, OSError):
        return None


def files_since(project: Path, before: Mapping[str, Any]) -> list[str] | None:
    """Names of the files in which the work tree around `project` is no longer a run's code; None: unknown."""
    if not list(_objects(before)):
        return None
    for _ in range(_ATTEMPTS):
        try:
            # Aside, for a look at the work tree makes objects of what nobody has recorded yet.
            with scratch_folder() as scratch:
                git, found = Git(project, scratch, aside=True), WorkTree()
                read_work_tree(git, found)
                return _first_that_is_here(git, before, {"tree": found.tree})
        except GitError as error:
            if error.final:
                return None
        except OSError:
            return None
    return None


def text_between(
    project: Path, a: Mapping[str, Any], b: Mapping[str, Any], color: bool = False
) -> str | None:
    """`git diff` from the code of one run to that of another; None if nobody can tell."""
    if set(_objects(a)) & set(_objects(b)):
        return ""
    options = ("-r", "-p", "-M", "--no-ext-diff", "--no-textconv", "--ignore-submodules=none")

    def compare(git: Git) -> str | None:
        for old, new in _pairs(git, a, b):
            words = (*options, f"--color={'always' if color else 'never'}", old, new)
            return git("diff-tree", *words, "--", f":(top,exclude){_RESERVED}").decode(errors="replace")
        return None

    try:
        return attempt(project, compare)
    except (GitError, OSError):
        return None


def _first_that_is_here(git: Git, a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str] | None:
    options = ("-r", "-z", "--name-only", "--no-renames", "--ignore-submodules=none")
    for old, new in _pairs(git, a, b):
        names = [shown(name) for name in git("diff-tree", *options, old, new).split(b"\0")[:-1]]
        return [name for name in names if not name.startswith(_RESERVED)]
    return None


def _pairs(git: Git, a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Trees of both, if the repository has them."""
    old, new = (next(filter(None, (_tree(git, name) for name in _objects(side))), None) for side in (a, b))
    if old is not None and new is not None:
        yield old, new


def _tree(git: Git, name: str) -> str | None:
    """The tree of a commit or tree; None unless it is here with all that is in it."""
    tree = git("rev-parse", "--quiet", "--verify", f"{name}^{{tree}}", fine=1).decode().strip()
    try:
        if tree:
            git("ls-tree", "-r", "-t", "--name-only", tree)
    except GitError as error:  # `git gc` took what no ref holds, and not all of it is needed elsewhere
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
    """Names of trees and commits that hold the code of a run, the barest first.

    No ref holds `tree`, only a commit that adds the configuration to it.
    """
    yield from filter(_is_name, [side.get("tree")])
    yield from commits(side)


def _is_name(name: Any) -> TypeGuard[str]:
    """A record may come from anywhere, and git would take a word with a dash for an option."""
    return isinstance(name, str) and bool(re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", name))
