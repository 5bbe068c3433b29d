"""The content of a run's ref, and its code laid out beside the user's work.

The code goes to a linked worktree with a detached head and without hooks, which is removed afterwards.
Branch, index, files and other worktrees of the user stay as they are.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rltemplate.run import paths
from rltemplate.run.git.command import GitError, repository
from rltemplate.run.git.snapshot import CONFIG_PATH, ENDED_PATHS, OUTCOME_PATH, RESERVED

OUTCOME = OUTCOME_PATH.removeprefix(RESERVED)
_CHECKOUT_LIMIT_S = 1800.0  # a large tree on a slow disk


def fetch_command(run: str = "*") -> str:
    """Git's command that brings the ref of a run, or of all runs, from the remote it was pushed to."""
    ref = paths.REF_PREFIX + run
    return f"git fetch origin '{ref}:{ref}'"


def find_commit(project: Path, name: str) -> str | None:
    """The full name of a commit that a ref or a shorter name stands for; None if it is not here.

    Raises GitError, as where there is no repository.
    """
    with repository(project) as git:
        return git.find(f"{name}^{{commit}}") or None


def read_run_files(project: Path, commit: str, folder: Path) -> dict[str, Path]:
    """Configuration, outcome, trace and metrics in a run's commit, written into `folder`, by name there.

    Raises GitError if an object is missing.
    """
    found = {}
    with repository(project) as git:
        for path in (CONFIG_PATH, *ENDED_PATHS):
            if git.find(f"{commit}:{path}"):
                name = path.removeprefix(RESERVED)
                found[name] = folder / name
                found[name].write_bytes(git("cat-file", "blob", f"{commit}:{path}"))
    return found


@contextmanager
def worktree(project: Path, commit: str, folder: Path) -> Iterator[Path]:
    """The tree of a commit in `folder`, which must not exist, while the block runs. Raises GitError.

    Yields the project's folder in it, which is not `folder` where the repository is larger than the project.
    """
    with repository(project) as git:
        try:
            # A worktree of a sparse checkout would be as sparse.
            words = ("worktree", "add", "--quiet", "--detach", "--force", str(folder), commit)
            git("-c", "core.sparseCheckout=false", *words, limit_s=_CHECKOUT_LIMIT_S)
            yield folder / git.prefix
        finally:
            with suppress(GitError):
                git("worktree", "remove", "--force", "--force", str(folder), limit_s=_CHECKOUT_LIMIT_S)
            shutil.rmtree(folder, ignore_errors=True)
