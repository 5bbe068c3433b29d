"""What the ref of a run holds, and its code laid out beside the user's work.

Branch, index and files of the user stay as they are: the code goes to a folder of its own, as a linked
worktree with a detached head and without hooks, which is gone afterwards with what git remembers of it. Other
worktrees are never pruned: one of them may lie on a disk that is not there at the moment.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from rltemplate.run import paths
from rltemplate.run.git.command import (
    Git,
    GitError,
    attempt,
    shown,
)
from rltemplate.run.git.snapshot import (
    CONFIG_PATH,
    METRICS_PATH,
    OUTCOME_PATH,
    TRACE_PATH,
)

OUTCOME = "outcome.json"

# By its path in a run's commit, the name of a file in a folder.
_NAMES = {
    CONFIG_PATH: paths.CONFIG,
    OUTCOME_PATH: OUTCOME,
    TRACE_PATH: paths.TRACE,
    METRICS_PATH: paths.METRICS,
}
_CHECKOUT_S = 1800.0  # a large tree on a slow disk
_SUBMODULE = b"160000"


@dataclass(slots=True)
class Tree:
    """A commit of which all objects are here.

    `files` are those of its reserved files that were written to a folder, by their name there. `prefix` is
    the project's place in the repository: empty, or a folder with a slash behind it.
    """

    commit: str
    prefix: str
    files: dict[str, Path] = field(default_factory=dict)
    submodules: list[str] = field(default_factory=list)


def fetch_command(run: str = "*") -> str:
    """Git's command that brings the ref of a run, or of all runs, from the remote it was pushed to."""
    ref = paths.REF_PREFIX + run
    return f"git fetch origin '{ref}:{ref}'"


def find_commit(project: Path, name: str) -> str | None:
    """The full name of a commit that a ref or a shorter name stands for; None if it is not here.

    Raises GitError, as where there is no repository.
    """

    def find(git: Git) -> str | None:
        return git("rev-parse", "--quiet", "--verify", f"{name}^{{commit}}", fine=1).decode().strip() or None

    return attempt(project, find)


def read_tree(project: Path, commit: str, folder: Path | None = None) -> Tree:
    """What a run's commit holds. Raises GitError if something of it is missing.

    What it holds beside the code is written into `folder`, if one is given.
    """

    def read(git: Git) -> Tree:
        tree = Tree(git.line("rev-parse", f"{commit}^{{commit}}"), os.fsdecode(git.prefix))
        for line in git("ls-tree", "-r", "-z", tree.commit).split(b"\0")[:-1]:
            facts, _, path = line.partition(b"\t")
            mode, _, blob = facts.split()
            name = _NAMES.get(shown(path))
            if mode == _SUBMODULE:
                tree.submodules.append(shown(path))
            elif name is not None and folder is not None:
                tree.files[name] = folder / name
                tree.files[name].write_bytes(git("cat-file", "blob", blob.decode()))
        return tree

    return attempt(project, read)


def read_file(project: Path, commit: str, path: str) -> bytes | None:
    """A file of a commit, by its path in the project; None if the commit has none."""

    def read(git: Git) -> bytes | None:
        name = f"{commit}:{os.fsdecode(git.prefix)}{path}"
        if not git("rev-parse", "--quiet", "--verify", name, fine=1):
            return None
        return git("cat-file", "blob", name)

    return attempt(project, read)


@contextmanager
def worktree(project: Path, commit: str, folder: Path) -> Iterator[Path]:
    """The tree of a commit in `folder`, which must not exist, while the block runs. Raises GitError."""

    def add(git: Git) -> None:
        # A worktree of a sparse checkout would be as sparse.
        words = ("worktree", "add", "--quiet", "--detach", "--force", str(folder), commit)
        try:
            git("-c", "core.sparseCheckout=false", *words, env=git.public, timeout_s=_CHECKOUT_S)
        except GitError as error:  # what is half there would be in the way of another attempt
            raise GitError(str(error), final=True) from None

    try:
        attempt(project, add)
        yield folder
    finally:
        _remove(project, folder)


def _remove(project: Path, folder: Path) -> None:
    """Remove a worktree with what the repository remembers of it, also one that is only half there."""
    remembered = None
    with suppress(OSError):
        text = (folder / ".git").read_text(encoding="utf-8", errors="surrogateescape")
        remembered = Path(text.removeprefix("gitdir:").strip())
    with suppress(GitError):
        words = ("worktree", "remove", "--force", "--force", str(folder))
        attempt(project, lambda git: git(*words, env=git.public, timeout_s=_CHECKOUT_S))
    shutil.rmtree(folder, ignore_errors=True)
    if remembered is not None and remembered.parent.name == "worktrees":
        shutil.rmtree(remembered, ignore_errors=True)
        with suppress(OSError):
            remembered.parent.rmdir()  # git does so with the last one
