"""The content of a run's ref, and its code laid out beside the user's work.

The code goes to a linked worktree with a detached head and without hooks, which is removed afterwards.
Branch, index, files and other worktrees of the user stay as they are.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from rltemplate.run import paths
from rltemplate.run.git.command import Git, GitError, as_text, attempt
from rltemplate.run.git.snapshot import CONFIG_PATH, METRICS_PATH, OUTCOME_PATH, TRACE_PATH

OUTCOME = "outcome.json"

# File names in a folder, by path in a run's commit.
_NAMES = {
    CONFIG_PATH: paths.CONFIG,
    OUTCOME_PATH: OUTCOME,
    TRACE_PATH: paths.TRACE,
    METRICS_PATH: paths.METRICS,
}
_CHECKOUT_S = 1800.0  # a large tree on a slow disk


@dataclass(slots=True)
class Tree:
    """A commit of which all objects are here.

    `files` are those of its reserved files that were written to a folder, by their name there. `prefix` is
    the project's folder in the repository: empty, or with a slash behind it.
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
    words = ("rev-parse", "--quiet", "--verify", f"{name}^{{commit}}")
    return attempt(project, lambda git: git.line(*words, fine=1)) or None


def read_tree(project: Path, commit: str, folder: Path | None = None) -> Tree:
    """The content of a run's commit; its reserved files are written into `folder`, if one is given.

    Raises GitError if an object is missing.
    """

    def read(git: Git) -> Tree:
        tree = Tree(git.line("rev-parse", f"{commit}^{{commit}}"), os.fsdecode(git.prefix))
        for line in git.names("ls-tree", "-r", "-z", tree.commit):
            facts, _, path = line.partition(b"\t")
            mode, _, blob = facts.split()
            name = _NAMES.get(as_text(path))
            if mode == b"160000":
                tree.submodules.append(as_text(path))
            elif name is not None and folder is not None:
                tree.files[name] = folder / name
                tree.files[name].write_bytes(git("cat-file", "blob", blob.decode()))
        return tree

    return attempt(project, read)


def read_file(project: Path, commit: str, path: str) -> bytes | None:
    """A file of a commit, by its path in the project; None if the commit has none."""

    def read(git: Git) -> bytes | None:
        name = f"{commit}:{os.fsdecode(git.prefix)}{path}"
        found = git("rev-parse", "--quiet", "--verify", name, fine=1)
        return git("cat-file", "blob", name) if found else None

    return attempt(project, read)


@contextmanager
def worktree(project: Path, commit: str, folder: Path) -> Iterator[Path]:
    """The tree of a commit in `folder`, which must not exist, while the block runs. Raises GitError."""

    def add(git: Git) -> None:
        # A worktree of a sparse checkout would be as sparse.
        words = ("worktree", "add", "--quiet", "--detach", "--force", str(folder), commit)
        try:
            git("-c", "core.sparseCheckout=false", *words, timeout_s=_CHECKOUT_S)
        except GitError as error:  # a half made worktree would be in the way of another attempt
            raise GitError(str(error), final=True) from None

    try:
        attempt(project, add)
        yield folder
    finally:
        words = ("worktree", "remove", "--force", "--force", str(folder))
        with suppress(GitError):
            attempt(project, lambda git: git(*words, timeout_s=_CHECKOUT_S))
        shutil.rmtree(folder, ignore_errors=True)
