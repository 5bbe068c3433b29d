"""The work tree as a git tree: the files on disk, not those that are staged.

Git's own conversions apply as in `git add` (line endings with `core.autocrlf`, filters such as LFS), and
ignored files stay out. A private index takes up the changes: a copy of the user's, set back to the base
commit, so that git's remembered file times keep it fast.

A snapshot may be pushed one day, so likely secrets (config/secrets.py) never enter it. Left out are:

* a new file (not in the base commit) whose name speaks of a secret;
* a new or changed file that holds a token, or is larger than `MAX_FILE_BYTES`. Of a changed file the version
  of the base commit is kept;
* of new files that take more than `MAX_NEW_BYTES` together, the largest.

Everything left out is named in the record. A file that is committed and unchanged stays.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypedDict

from rltemplate.config.secrets import secret_content, secret_name
from rltemplate.run.git.command import Git, GitError, as_text

MAX_FILE_BYTES = 10_000_000
MAX_NEW_BYTES = 100_000_000
MAX_NAMED = 200  # paths listed by name in a record; the counts beside them are always exact
_ADD_LIMIT_S = 600.0  # git takes a hundredth of a second for a new file


class SkippedFile(TypedDict):
    """A file that the snapshot lacks (or holds in its base version), and why."""

    path: str
    reason: str
    bytes: int


@dataclass(slots=True)
class GitRecord:
    """The part of `record.json` about a run's code. `ref` and `commit` are None where `problem` says why.

    `tree` is the work tree alone, without the configuration that `commit` adds: equal code, equal tree.
    `dirty` says whether it differs from `base_commit` in anything that git does not ignore (None: unknown).
    `changed` names paths in which the tree differs from the base commit, `skipped` files that it lacks.
    `problem` is one line with a cure.
    """

    ref: str | None = None
    commit: str | None = None
    tree: str | None = None
    base_commit: str | None = None
    branch: str | None = None
    dirty: bool | None = None
    changed: list[str] = field(default_factory=list)
    changed_count: int = 0
    skipped: list[SkippedFile] = field(default_factory=list)
    skipped_count: int = 0
    dirty_submodules: list[str] = field(default_factory=list)
    problem: str | None = None

    def to_json(self) -> str:
        """One line of JSON, to hand the code of a sweep to its jobs."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> GitRecord:
        """The record that `to_json` wrote."""
        return cls(**json.loads(text))


def read_work_tree(git: Git, found: GitRecord) -> None:
    """Store the work tree in git's objects and fill `found`, as far as it gets. Raises GitError."""
    found.base_commit = git.find("HEAD^{commit}") or None
    found.branch = git.line("symbolic-ref", "--quiet", "--short", "HEAD", fine=1) or None
    ignored = git.prefix and git("check-ignore", "-z", "--stdin", stdin=os.fsencode(git.prefix), fine=1)
    if ignored and not git.find(f"HEAD:{git.prefix}"):
        # A download unpacked somewhere inside an unrelated repository, such as one over a home folder.
        message = f"the repository {git.top} ignores this folder: `git init` gives it one of its own"
        raise GitError(message, final=True)
    base = found.base_commit or git.line("hash-object", "-t", "tree", "--stdin")  # the empty tree
    new = _copy_index(git, base)
    edited: list[bytes] = []
    gone: list[bytes] = []
    found.dirty_submodules, found.skipped = [], []
    options = ("--untracked-files=all", "--ignore-submodules=none", "--no-renames")
    for entry in git.names("status", "--porcelain=v2", "-z", *options):
        if entry.startswith(b"? "):
            new.append(entry[2:])
            continue
        _, _, submodule, _, _, mode, _, _, path = entry.split(b" ", 8)
        if submodule[2:4] not in (b"..", b""):
            found.dirty_submodules.append(as_text(path))
        if mode == b"000000":
            gone.append(path)
        elif submodule[:1] == b"N" or submodule[1:2] == b"C":
            edited.append(path)
    add = _select(git, edited, found.skipped, new=False) + _select(git, new, found.skipped, new=True)
    if gone:
        git("update-index", "--force-remove", "-z", "--stdin", stdin=b"\0".join(gone))
    if add:
        words = ("--add", "--remove", "--replace", "-z", "--stdin")
        git("update-index", *words, stdin=b"\0".join(add), limit_s=_ADD_LIMIT_S)
    tree = git.line("write-tree")
    names = git.names("diff-tree", "-r", "-z", "--name-only", "--no-renames", base, tree)
    found.dirty = bool(names or found.skipped or found.dirty_submodules)
    found.changed, found.changed_count = [as_text(name) for name in names[:MAX_NAMED]], len(names)
    found.skipped, found.skipped_count = found.skipped[:MAX_NAMED], len(found.skipped)
    found.tree = tree


def _copy_index(git: Git, base: str) -> list[bytes]:
    """Make the private index one of the base commit; returns files that only the user's index has."""
    with suppress(FileNotFoundError):
        # With its time, because git distrusts entries as young as the index itself.
        shutil.copy2(git.users_index, git.index)
    # The run also sees changes of files that the user told git not to look at. Files that a sparse checkout
    # leaves out (S) are not missing.
    flagged = [entry for entry in git.names("ls-files", "-v", "-z") if entry[:1] not in (b"H", b"M")]
    if seen := [path[2:] for path in flagged if path[:1] == b"h" or os.path.lexists(_on_disk(git, path[2:]))]:
        for option in ("--no-assume-unchanged", "--no-skip-worktree"):
            git("update-index", option, "-z", "--stdin", stdin=b"\0".join(seen))
    staged = git.names("diff-index", "--cached", "--diff-filter=A", "--no-renames", "-z", "--name-only", base)
    git("read-tree", "--reset", base)
    return staged


def _select(git: Git, paths: Iterable[bytes], skipped: list[SkippedFile], new: bool) -> list[bytes]:
    """Paths that may be recorded; the others are named in `skipped`."""
    taken, total = [], 0
    sizes = {}
    for path in paths:
        with suppress(OSError):  # it is gone again
            sizes[path] = _on_disk(git, path).lstat().st_size
    for path, size in sorted(sizes.items(), key=lambda item: (item[1], item[0])):
        reason = _why_left_out(git, path, size, new)
        if reason is None and new and total + size > MAX_NEW_BYTES:
            reason = f"new files together exceed {MAX_NEW_BYTES // 1_000_000} MB"
        if reason is None:
            total += size
            taken.append(path)
        else:
            reason += "" if new else "; the version of the base commit is kept"
            skipped.append({"path": as_text(path), "reason": reason, "bytes": size})
    return taken


def _why_left_out(git: Git, path: bytes, size: int, new: bool) -> str | None:
    file = _on_disk(git, path)
    if path.endswith(b"/"):
        return "a git repository of its own"
    if new and (reason := secret_name(os.fsdecode(path))):
        return reason
    if file.is_symlink() or not file.is_file():  # a submodule, or deleted meanwhile
        return None
    if size > MAX_FILE_BYTES:
        return f"larger than {MAX_FILE_BYTES // 1_000_000} MB"
    try:
        return secret_content(file.read_bytes(), file.name)
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _on_disk(git: Git, path: bytes) -> Path:
    return git.top / os.fsdecode(path)
