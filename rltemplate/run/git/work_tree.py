"""The work tree as a git tree: what is on disk now, not what is staged.

A copy of the user's index takes up the changes, so that git's remembered file times keep it fast and the
user's own index stays as it is.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rltemplate.config.secrets import secret_content, secret_name
from rltemplate.run.git import exclusions
from rltemplate.run.git.command import (
    BROKEN_HEAD,
    Git,
    GitError,
    shown,
)
from rltemplate.run.git.exclusions import SkippedFile
from rltemplate.run.lines import to_stderr

MANY_FILES = 5_000  # so many take seconds
FILES_PER_S = 100  # that git takes up at the very least
_GONE = b"000000"
_BASE_KEPT = "; the version of the base commit is kept"


@dataclass(slots=True)
class WorkTree:
    """The work tree relative to `base_commit` (None in a repository without commits).

    `base_time` is the base commit's date in seconds since 1970. `changed` names what `tree` changes of the
    base commit, `skipped` what it lacks. The tree is None until everything was taken up.
    """

    base_commit: str | None = None
    base_time: int = 0
    branch: str | None = None
    dirty: bool | None = None
    changed: list[str] = field(default_factory=list)
    skipped: list[SkippedFile] = field(default_factory=list)
    dirty_submodules: list[str] = field(default_factory=list)
    tree: str | None = None


def read_work_tree(git: Git, found: WorkTree) -> None:
    """Store the work tree in git's objects and fill `found`, as far as it gets. Raises GitError."""
    _copy_index(git)
    if git.prefix and git("check-ignore", "-z", "--stdin", stdin=git.prefix + b"\0", fine=1):
        # A download unpacked somewhere inside an unrelated repository, such as one over a home folder.
        tracked = git("ls-files", "-z", "--", f":(literal){os.fsdecode(git.prefix)}")
        if not tracked:
            message = f"the repository {git.top} ignores this folder: `git init` gives it one of its own"
            raise GitError(message, final=True)
    status = _Status(git, found)
    found.dirty = bool(status.undo or status.add or found.skipped or found.dirty_submodules)
    if status.undo:
        git("update-index", "-z", "--index-info", stdin=b"".join(status.undo))
    if len(status.add) > MANY_FILES:
        to_stderr(
            f"recording {len(status.add):,} new or changed files of {git.top} in git, which takes a while; "
            "a line in .gitignore leaves data out"
        )
    _add(git, status.add, found.skipped)
    tree = git.line("write-tree")
    if found.base_commit is None:
        names = git("ls-tree", "-r", "-z", "--name-only", tree)
    else:
        base = git("cat-file", "commit", found.base_commit)
        base_tree = base[len(b"tree ") : base.index(b"\n")].decode()
        committed = re.search(rb"^committer .* (\d+) [+-]\d+$", base, re.MULTILINE)
        found.base_time = int(committed.group(1)) if committed else 0
        names = git("diff-tree", "-r", "-z", "--name-only", "--no-renames", base_tree, tree)
    found.changed = [shown(path) for path in names.split(b"\0")[:-1]]
    found.dirty = bool(found.changed or found.skipped or found.dirty_submodules)
    found.tree = tree


def _copy_index(git: Git) -> None:
    """A private index that starts as the user's."""
    copy = git.scratch / "index"
    try:
        with (git.git_dir / "index").open("rb") as index:
            times = os.fstat(index.fileno())  # of the file that is read, even if git replaces it meanwhile
            copy.write_bytes(index.read())
        # Git distrusts entries as young as the index itself, so the copy must not look younger.
        os.utime(copy, ns=(times.st_atime_ns, times.st_mtime_ns))
    except FileNotFoundError:
        if git("rev-parse", "--quiet", "--verify", "HEAD^{commit}", fine=1):
            git("read-tree", "HEAD")
        return
    # Files that the user told git not to look at may have changed all the same, and the run sees them.
    flagged = [entry for entry in git("ls-files", "-v", "-z").split(b"\0") if entry[:1] not in (b"", b"H")]
    unwatched = [entry[2:] for entry in flagged if entry[:1].islower()]
    unwanted = [entry[2:] for entry in flagged if entry[:1] in b"Ss" and _exists(_on_disk(git, entry[2:]))]
    for option, paths in (("--no-assume-unchanged", unwatched), ("--no-skip-worktree", unwanted)):
        if paths:
            git("update-index", option, "-z", "--stdin", stdin=b"".join(path + b"\0" for path in paths))


class _Status:
    """How the work tree differs from the base commit, sorted by what is to be done about it.

    `undo` are lines for `update-index --index-info` that remove paths or put the base version back, `add`
    the paths to be taken up from disk.
    """

    def __init__(self, git: Git, found: WorkTree) -> None:
        self.undo: list[bytes] = []
        self.add: list[bytes] = []
        self._git = git
        self._found = found
        self._new: list[tuple[int, bytes]] = []
        options = ("--branch", "--untracked-files=all", "--ignore-submodules=none", "--no-renames")
        for entry in git("status", "--porcelain=v2", "-z", "--no-ahead-behind", *options).split(b"\0"):
            kind, _, rest = entry.partition(b" ")
            if kind == b"#":
                self._head(rest.decode(errors="replace"))
            elif kind == b"1":
                state, sub, base_mode, _, mode, base_blob, _, path = rest.split(b" ", 7)
                self._tracked(path, state, sub, mode, (base_mode, base_blob))
            elif kind == b"u":  # a conflict; its second side is the base commit's
                state, sub, _, base_mode, _, mode, _, base_blob, _, path = rest.split(b" ", 9)
                self._tracked(path, b"UU", sub, mode, (base_mode, base_blob))
            elif kind == b"?":
                self._untracked(rest)
        self._limit()

    def _head(self, line: str) -> None:
        key, _, value = line.partition(" ")
        if key == "branch.oid" and value != "(initial)":
            self._found.base_commit = value
        elif key == "branch.head" and value == "(unknown)":
            raise GitError(f"{self._git.top}: {BROKEN_HEAD}", final=True)
        elif key == "branch.head" and value != "(detached)":
            self._found.branch = value

    def _tracked(self, path: bytes, state: bytes, sub: bytes, mode: bytes, base: tuple[bytes, bytes]) -> None:
        """A path in the index or the base commit: `mode` on disk, `base` its mode and blob in the commit."""
        removal = _index_line(path, b"0", b"0" * len(base[1]))
        if mode == _GONE:
            self.undo.append(removal)
        elif sub.startswith(b"S"):
            if sub[2:4] != b"..":
                self._found.dirty_submodules.append(shown(path))
            if state[1:] != b".":
                self.add.append(path)
        elif base[0] == _GONE:
            self.undo.append(removal)
            self._untracked(path)
        else:
            size, reason = _examine(_on_disk(self._git, path))
            if reason is not None:
                self._skip(path, reason + _BASE_KEPT, size)
                self.undo.append(_index_line(path, *base))
            elif state[1:] != b".":
                self.add.append(path)

    def _untracked(self, path: bytes) -> None:
        """A path that the base commit does not have."""
        if path.endswith(b"/"):
            self._skip(path, "a git repository of its own", None)
            return
        size, reason = _examine(_on_disk(self._git, path))
        reason = secret_name(os.fsdecode(path)) or reason
        if reason is None:
            self._new.append((size or 0, path))
        else:
            self._skip(path, reason, size)

    def _limit(self) -> None:
        """Take up the new files, the largest left out where they are too much together."""
        total = sum(size for size, _ in self._new)
        for size, path in sorted(self._new, reverse=True):
            if total > exclusions.MAX_NEW_BYTES:
                total -= size
                limit = exclusions.MAX_NEW_BYTES // 1_000_000
                self._skip(path, f"new files together exceed {limit} MB", size)
            else:
                self.add.append(path)

    def _skip(self, path: bytes, reason: str, size: int | None) -> None:
        self._found.skipped.append({"path": shown(path), "reason": reason, "bytes": size})


def _examine(path: Path) -> tuple[int | None, str | None]:
    """Size in bytes, and why the file's kind, size or content keeps it out; (None, None) if it is gone."""
    try:
        facts = path.lstat()
        if stat.S_ISLNK(facts.st_mode):
            return facts.st_size, None
        if not stat.S_ISREG(facts.st_mode):
            return None, "neither a file nor a link"
        if facts.st_size > exclusions.MAX_FILE_BYTES:
            return facts.st_size, f"larger than {exclusions.MAX_FILE_BYTES // 1_000_000} MB"
        return facts.st_size, secret_content(path.read_bytes(), path.name)
    except (FileNotFoundError, NotADirectoryError):
        return None, None
    except OSError as error:
        return None, f"cannot be read ({error.strerror})"


def _add(git: Git, paths: Sequence[bytes], skipped: list[SkippedFile]) -> None:
    """Take `paths` up from disk; what git cannot take (a failing filter, say) is named in `skipped`."""
    if not paths:
        return
    options = ("--add", "--remove", "--replace", "-z", "--stdin")
    try:
        stdin = b"".join(path + b"\0" for path in paths)
        git("update-index", *options, stdin=stdin, timeout_s=60.0 + len(paths) / FILES_PER_S)
    except GitError as error:
        if error.final:
            raise
        if len(paths) == 1:
            skipped.append({"path": shown(paths[0]), "reason": f"not taken by git: {error}", "bytes": None})
            return
        half = len(paths) // 2
        _add(git, paths[:half], skipped)
        _add(git, paths[half:], skipped)


def _index_line(path: bytes, mode: bytes, blob: bytes) -> bytes:
    return mode + b" " + blob + b"\t" + path + b"\0"


def _on_disk(git: Git, path: bytes) -> Path:
    return git.top / os.fsdecode(path)


def _exists(path: Path) -> bool:
    return path.exists() or path.is_symlink()
