"""The work tree as a git tree: the files on disk, not those that are staged.

Git's own conversions apply as in `git add` (line endings with `core.autocrlf`, filters such as LFS), ignored
files stay out, and files that `exclusions.py` leaves out are named. A private index takes up the changes: a
copy of the user's, set back to the base commit, so that git's remembered file times keep it fast.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rltemplate.config.secrets import secret_content, secret_name
from rltemplate.run.git import exclusions
from rltemplate.run.git.command import Git, GitError, as_text
from rltemplate.run.git.exclusions import SkippedFile
from rltemplate.run.lines import to_stderr

MAX_NAMED = 200  # paths listed by name in a record; the counts beside them are always exact
MANY_FILES = 5_000  # git takes seconds for so many new files
_FILES_PER_S = 100  # a lower bound of git's speed
_BASE_KEPT = "; the version of the base commit is kept"


@dataclass(slots=True)
class GitRecord:
    """The part of `record.json` about a run's code. `ref` and `commit` are None where `problem` says why.

    `tree` is the work tree alone, without the configuration that `commit` adds: equal code, equal tree.
    `dirty` says whether it differs from `base_commit` in anything that git does not ignore (None: unknown).
    `changed` names paths in which the tree differs from the base commit, `skipped` files that it lacks.
    `problem` is one line with a cure; `notes` are limits of the snapshot.
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
    notes: list[str] = field(default_factory=list)
    problem: str | None = None


@dataclass(slots=True)
class Snapshot(GitRecord):
    """The work tree at one moment, without ref and commit."""

    top: str | None = None
    base_time: int = 0  # of the base commit, in seconds since 1970
    keep_ref: str | None = None

    def record(self) -> GitRecord:
        """The record of a run that has this code."""
        known = asdict(self)
        return GitRecord(**{name: known[name] for name in GitRecord.__dataclass_fields__})

    def to_json(self) -> str:
        """One line of JSON, to hand the snapshot to the jobs of a sweep."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Snapshot:
        """The snapshot that `to_json` wrote."""
        return cls(**json.loads(text))


def read_work_tree(git: Git, found: Snapshot) -> None:
    """Store the work tree in git's objects and fill `found`, as far as it gets. Raises GitError."""
    found.top = str(git.top)
    found.base_commit = git.line("rev-parse", "--quiet", "--verify", "HEAD^{commit}", fine=1) or None
    found.branch = git.line("symbolic-ref", "--quiet", "--short", "HEAD", fine=1) or None
    if found.base_commit is None and git.line("for-each-ref", f"refs/heads/{found.branch}"):
        raise GitError(f"{git.top / '.git'} is damaged: look at its HEAD, and at `git fsck`", final=True)
    ignored = git.prefix and git("check-ignore", "-z", "--stdin", stdin=git.prefix + b"\0", fine=1)
    if ignored and not git("ls-tree", "-z", "HEAD", "--", os.fsdecode(git.prefix), fine=128):
        # A download unpacked somewhere inside an unrelated repository, such as one over a home folder.
        message = f"the repository {git.top} ignores this folder: `git init` gives it one of its own"
        raise GitError(message, final=True)
    changes = _Changes(git, _copy_index(git, found.base_commit))
    found.dirty_submodules, found.skipped = changes.submodules, []
    add = [path for path in changes.edited if not _skipped(git, path, found.skipped, base=True)]
    new = [path for path in changes.new if not _skipped(git, path, found.skipped, base=False)]
    add += _limited(git, new, found.skipped)
    found.dirty = bool(add or changes.gone or found.skipped or found.dirty_submodules)
    if changes.gone:
        git("update-index", "--force-remove", "-z", "--stdin", stdin=b"\0".join(changes.gone))
    if len(add) > MANY_FILES:
        to_stderr(
            f"recording {len(add):,} new or changed files of {git.top} in git, which takes a while; "
            "a line in .gitignore leaves data out"
        )
    _add(git, add, found.skipped)
    tree = git.line("write-tree")
    if found.base_commit is None:
        names = git.names("ls-tree", "-r", "-z", "--name-only", tree)
    else:
        names = git.names("diff-tree", "-r", "-z", "--name-only", "--no-renames", found.base_commit, tree)
        found.base_time = int(git.line("show", "--no-patch", "--format=%ct", found.base_commit))
    found.dirty = bool(names or found.skipped or found.dirty_submodules)
    found.changed, found.changed_count = [as_text(name) for name in names[:MAX_NAMED]], len(names)
    found.skipped, found.skipped_count = found.skipped[:MAX_NAMED], len(found.skipped)
    found.notes = []
    if found.base_commit is None:
        found.notes.append("the repository has no commits yet, so there is no base commit to compare with")
    if (git.common_dir / "shallow").exists():
        found.notes.append("shallow clone: `git fetch --unshallow` before this run's ref can be pushed")
    if found.dirty_submodules:
        found.notes.append("changes inside submodules are not recorded: commit them there")
    found.tree = tree


def _copy_index(git: Git, base: str | None) -> list[bytes]:
    """Make the private index one of the base commit; paths that only the user's index has are returned."""
    copy = git.scratch / "index"
    staged: list[bytes] = []
    try:
        with (git.git_dir / "index").open("rb") as index:
            times = os.fstat(index.fileno())
            copy.write_bytes(index.read())
        # Git distrusts entries as young as the index itself, so the copy must not look younger.
        os.utime(copy, ns=(times.st_atime_ns, times.st_mtime_ns))
        # Files that the user told git not to look at may have changed all the same, and the run sees them.
        entries = git.names("ls-files", "-v", "-z")
        staged = [entry[2:] for entry in entries]
        flagged = [entry for entry in entries if entry[:1] not in b"HM"]
        unwatched = [entry[2:] for entry in flagged if entry[:1].islower()]
        unwanted = [
            each[2:] for each in flagged if each[:1] in b"Ss" and os.path.lexists(_on_disk(git, each[2:]))
        ]
        for option, paths in (("--no-assume-unchanged", unwatched), ("--no-skip-worktree", unwanted)):
            if paths:
                git("update-index", option, "-z", "--stdin", stdin=b"\0".join(paths))
    except FileNotFoundError:
        pass
    if base is None:
        git("read-tree", "--empty")
        return staged
    git("read-tree", "--reset", base)
    known = set(git.names("ls-files", "-z"))
    return [path for path in dict.fromkeys(staged) if path not in known]


class _Changes:
    """Paths in which the work tree differs from the private index, and submodules with changes inside."""

    def __init__(self, git: Git, staged: Sequence[bytes]) -> None:
        self.edited: list[bytes] = []
        self.gone: list[bytes] = []
        self.submodules: list[str] = []
        new = [path for path in staged if os.path.lexists(_on_disk(git, path))]
        options = ("--untracked-files=all", "--ignore-submodules=none", "--no-renames")
        for entry in git.names("status", "--porcelain=v2", "-z", *options):
            kind, _, rest = entry.partition(b" ")
            if kind == b"1":
                _, submodule, _, _, mode, _, _, path = rest.split(b" ", 7)
                if submodule[2:4] != b"..":
                    self.submodules.append(as_text(path))
                if mode == b"000000":
                    self.gone.append(path)
                elif submodule[:1] == b"N" or submodule[1:2] == b"C":
                    self.edited.append(path)
            elif kind == b"?":
                new.append(rest)
        self.new = list(dict.fromkeys(new))


def _skipped(git: Git, path: bytes, skipped: list[SkippedFile], base: bool) -> bool:
    """True, with an entry in `skipped`, for a path that must not be recorded. `base`: the commit has it."""
    size, reason = _examine(_on_disk(git, path))
    if path.endswith(b"/"):
        reason = "a git repository of its own"
    elif not base:
        reason = secret_name(os.fsdecode(path)) or reason
    if reason is not None:
        reason += _BASE_KEPT if base else ""
        skipped.append({"path": as_text(path), "reason": reason, "bytes": size})
    return reason is not None


def _limited(git: Git, paths: Sequence[bytes], skipped: list[SkippedFile]) -> list[bytes]:
    """New files, the largest left out where they are too much together."""
    sizes = {path: _size(_on_disk(git, path)) for path in paths}
    total, kept = sum(sizes.values()), []
    for path in sorted(paths, key=lambda each: (-sizes[each], each)):
        if total <= exclusions.MAX_NEW_BYTES:
            kept.append(path)
            continue
        total -= sizes[path]
        reason = f"new files together exceed {exclusions.MAX_NEW_BYTES // 1_000_000} MB"
        skipped.append({"path": as_text(path), "reason": reason, "bytes": sizes[path]})
    return kept


def _examine(path: Path) -> tuple[int | None, str | None]:
    """Size in bytes, and why the file's kind, size or content keeps it out; (None, None) if it is gone."""
    try:
        facts = path.lstat()
        if stat.S_ISLNK(facts.st_mode):
            return facts.st_size, None
        if stat.S_ISDIR(facts.st_mode):  # a submodule
            return None, None
        if not stat.S_ISREG(facts.st_mode):
            return None, "neither a file nor a link"
        if facts.st_size > exclusions.MAX_FILE_BYTES:
            return facts.st_size, f"larger than {exclusions.MAX_FILE_BYTES // 1_000_000} MB"
        return facts.st_size, secret_content(path.read_bytes(), path.name)
    except (FileNotFoundError, NotADirectoryError):
        return None, None
    except OSError as error:
        return None, f"cannot be read ({error.strerror})"


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def _add(git: Git, paths: Sequence[bytes], skipped: list[SkippedFile]) -> None:
    """Take `paths` up from disk; files that git cannot take (a failing filter) are named in `skipped`."""
    if not paths:
        return
    options = ("--add", "--remove", "--replace", "-z", "--stdin")
    try:
        git("update-index", *options, stdin=b"\0".join(paths), timeout_s=60.0 + len(paths) / _FILES_PER_S)
    except GitError as error:
        if error.final:
            raise
        if len(paths) == 1:
            reason = f"not taken by git: {error}"
            skipped.append({"path": as_text(paths[0]), "reason": reason, "bytes": None})
            return
        half = len(paths) // 2
        _add(git, paths[:half], skipped)
        _add(git, paths[half:], skipped)


def _on_disk(git: Git, path: bytes) -> Path:
    return git.top / os.fsdecode(path)
