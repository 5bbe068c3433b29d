"""The code of a run, kept as a git commit under `refs/runs/`.

The user's branch, index and files are never touched, and nothing is pushed.

A run's commit holds the work tree and, in the folder `RESERVED`, the resolved configuration. After the run, a
commit on top of it holds there how it ended: the outcome, the trace and the metrics. The ref alone is enough
to make the run again. The first commit is a function of base commit, tree and configuration.
A run that resumes with other code or another configuration adds a commit on top of its ref.

The tree has the files on disk, not those that are staged, with git's own conversions (line endings, filters
such as LFS); ignored files stay out. A private index takes up the changes: a copy of the user's, set back to
the base commit, so that git's remembered file times keep it fast.

A snapshot may be pushed one day, so likely secrets (config/secrets.py) never enter it. Left out, and named in
the record, are a new file whose name speaks of a secret; a new or changed file that holds a token or is
larger than `MAX_FILE_BYTES`; of new files that take more than `MAX_NEW_BYTES` together, the largest; a file
that git cannot take in, such as one of git-lfs where that is not installed. Of a changed file the version of
the base commit is kept, as of a submodule. The record has sizes and digests of these, so that other content
is other code: of a file over `MAX_FILE_BYTES` a digest of three parts, of a file with a secret one of its
lines without secrets, and none of a file named like a secret.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, NotRequired, TypedDict, TypeVar

import xxhash
from msgspec import Meta

from rltemplate.config.secrets import LIKELY, masked, secret_content, secret_in_name, secret_name
from rltemplate.run.git.command import Git, GitError, as_text, repository
from rltemplate.run.git.origin import mark_made_here
from rltemplate.run.paths import CONFIG, LOCK, METRICS, REF_PREFIX, TRACE

# The folder in a run's commit that is not code. It was named after the package before, which a fork renames.
RESERVED = ".runlab/run/"
_FORMER_RESERVED = re.compile(r"\.[a-z0-9_]+")
OUTCOME = "outcome.json"
ENDED = (OUTCOME, TRACE, METRICS)
MAX_ENDED_BYTES = 32_000_000  # a longer trace stays in the run's folder; hexadecimal digits pack to a half
MAX_FILE_BYTES = 10_000_000
MAX_NEW_BYTES = 100_000_000
_PART_BYTES = 1_000_000
T = TypeVar("T")


class SkippedFile(TypedDict):
    """A file, or a submodule (with a slash at its end), that a snapshot lacks or holds as in its base."""

    path: Annotated[str, Meta(pattern=r"[^./]")]
    reason: NotRequired[str]
    bytes: NotRequired[int | None]
    digest: NotRequired[str | None]  # None: only its size is known


@dataclass(slots=True)
class GitRecord:
    """The part of `record.json` about a run's code. `ref` and `commit` are None where `problem` says why.

    `tree` is the work tree alone, without the configuration that `commit` adds: equal code, equal tree.
    `dirty` says whether it differs from `base_commit` in anything that git does not ignore (None: unknown).
    `problem` is one line with a cure.
    """

    ref: str | None = None
    commit: str | None = None
    tree: str | None = None
    base_commit: str | None = None
    branch: str | None = None
    dirty: bool | None = None
    skipped: list[SkippedFile] = field(default_factory=list)
    problem: str | None = None

    def reasons(self) -> list[str]:
        """The skipped files, and why each is."""
        return [f"{each['path']} ({each.get('reason', 'unknown')})" for each in self.skipped]

    def left_out(self) -> dict[str, tuple[int | None, str | None]]:
        """Bytes and digest of each skipped file, by path; no digest: only its size is known."""
        files = (each for each in self.skipped if not str(each["path"]).endswith("/"))
        return {str(each["path"]): (each.get("bytes"), each.get("digest")) for each in files}


def take_snapshot(project: Path, keep_ref: str | None = None) -> GitRecord:
    """Store the work tree of the repository around `project`; trouble with git ends up in `problem`.

    With `keep_ref`, the id of a sweep, `refs/runs/<keep_ref>` holds the tree, so that it outlives any
    `git gc` until the last job of the sweep has started.
    """
    snapshot = GitRecord()
    try:
        with repository(project) as git:
            _despite_filters(git, lambda: _read_work_tree(git, snapshot))
            if keep_ref is not None:
                snapshot.commit = _commit(git, f"{snapshot.tree}", snapshot.base_commit)
                git("update-ref", REF_PREFIX + keep_ref, snapshot.commit, "")
                snapshot.ref = REF_PREFIX + keep_ref
    except (GitError, OSError) as error:
        snapshot.tree, snapshot.problem = None, str(error)
    return snapshot


def commit_run(
    project: Path, snapshot: GitRecord, run_id: str, config_yaml: str, before: GitRecord | None = None
) -> GitRecord:
    """Commit the snapshot with a run's configuration and let `refs/runs/<run_id>` point there.

    `before` is the last record of a run that resumes, perhaps in another clone. While code and configuration
    stay the same, so does its commit. Trouble with git ends up in the record's `problem`.
    """
    ref, record = REF_PREFIX + run_id, replace(snapshot, ref=None, commit=None)
    if snapshot.tree is None:
        return record
    try:
        with repository(project) as git:
            git("read-tree", snapshot.tree)
            # A work tree that was itself taken from a run's commit still has how that run ended.
            git("update-index", "--force-remove", "--", *(RESERVED + name for name in ENDED))
            _enter(git, CONFIG, "--stdin", stdin=config_yaml.encode())
            tree, commit = git.line("write-tree"), None if before is None else before.commit
            tip = "" if before is None else git.find(ref)
            same = commit is not None and git.find(f"{commit}^{{tree}}") == tree
            if not same:
                commit = _commit(git, tree, tip or snapshot.base_commit)
            mark_made_here(git, f"{commit}")
            if not (same and tip):
                git("update-ref", ref, f"{commit}", tip)
            record.ref, record.commit = ref, commit
    except (GitError, OSError) as error:
        record.problem = str(error)
    return record


def withdraw_run(project: Path, record: GitRecord) -> None:
    """Remove the ref of a run that could not begin; trouble with git leaves it where it is."""
    if record.ref is not None:
        with suppress(GitError, OSError), repository(project) as git:
            git("update-ref", "-d", record.ref, f"{record.commit}")


def commit_outcome(
    project: Path, record: GitRecord, outcome_json: str, files: Mapping[str, Path]
) -> str | None:
    """Put how the run ended, with its code, on top of its ref's history; one line if that did not work.

    `files` are stored byte for byte, by their names in the commit.
    """
    ref, code = record.ref, record.commit
    if ref is None or code is None:
        return None
    try:
        with repository(project) as git:
            tip = git.find(ref)
            if not tip:
                return f"{ref} was deleted while the run went on"
            git("read-tree", code)
            _enter(git, OUTCOME, "--stdin", stdin=outcome_json.encode())
            for name, file in files.items():
                _enter(git, name, "--no-filters", "--", str(file.absolute()))
            git("update-ref", ref, _commit(git, git.line("write-tree"), tip, "Outcome of a run"), tip)
    except (GitError, OSError) as error:
        return str(error)
    return None


def ended_files(run_dir: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """Files of a run that go on top of its commit, and why those that are too large do not, by name."""
    files, left_out = {}, {}
    for file in (run_dir / name for name in (TRACE, METRICS) if (run_dir / name).exists()):
        if (size := file.stat().st_size) > MAX_ENDED_BYTES:
            left_out[file.name] = f"{size:,} bytes, and the limit is {MAX_ENDED_BYTES:,}"
        else:
            files[file.name] = file
    return files, left_out


def fetch_command(run: str = "*") -> str:
    """Git's command that brings the ref of a run, or of all runs, from the remote it was pushed to."""
    ref = REF_PREFIX + run
    return f"git fetch origin '{ref}:{ref}'"


def read_run_files(project: Path, commit: str, folder: Path) -> dict[str, Path]:
    """Configuration, outcome, trace and metrics in a run's commit, written into `folder`, by name there."""
    found = {}
    with repository(project) as git:
        tops = map(as_text, git.names("ls-tree", "-d", "-z", "--name-only", f"{commit}^{{tree}}"))
        folders = [RESERVED, *(f"{top}/run/" for top in tops if _FORMER_RESERVED.fullmatch(top))]
        reserved = next((each for each in folders if git.find(f"{commit}:{each}{CONFIG}")), RESERVED)
        for name in (CONFIG, *ENDED):
            if blob := git.find(f"{commit}:{reserved}{name}"):
                found[name] = folder / name
                found[name].write_bytes(git("cat-file", "blob", blob))
    return found


def submodules(project: Path, commit: str) -> list[str]:
    """The paths of submodules in a commit, which a worktree of it has as empty folders."""
    with repository(project) as git:
        entries = git.names("ls-tree", "-r", "-z", f"{commit}^{{tree}}")
    return [as_text(entry.partition(b"\t")[2]) for entry in entries if entry.startswith(b"160000 ")]


@contextmanager
def worktree(project: Path, commit: str, folder: Path) -> Iterator[Path]:
    """The tree of a commit in `folder`, which must not exist, while the block runs. Raises GitError.

    Yields the project's folder in it, which is not `folder` where the repository is larger than the project.
    """
    with repository(project) as git:
        try:
            # No hooks run. A worktree of a sparse checkout would be as sparse.
            words = ("worktree", "add", "--quiet", "--detach", "--force", str(folder), commit)
            _despite_filters(git, lambda: git("-c", "core.sparseCheckout=false", *words))
            yield folder / git.prefix
        finally:
            with suppress(GitError):
                git("worktree", "remove", "--force", "--force", str(folder))
            shutil.rmtree(folder, ignore_errors=True)


def _enter(git: Git, name: str, *source: str, stdin: bytes = b"") -> None:
    blob = git.line("hash-object", "-w", *source, stdin=stdin)
    git("update-index", "--add", "--replace", "--cacheinfo", f"100644,{blob},{RESERVED}{name}")


def _commit(git: Git, tree: str, parent: str | None, message: str = "Code of a run") -> str:
    """A commit with nothing in it that varies: it has the time of its parent."""
    time = git.line("show", "--no-patch", "--format=%ct", parent) if parent else "0"
    git.env["GIT_AUTHOR_DATE"] = git.env["GIT_COMMITTER_DATE"] = f"@{time} +0000"
    parents = ["-p", parent] if parent else []
    return git.line("commit-tree", tree, *parents, "-m", message)


def remote_url(project: Path) -> str | None:
    """The address of the remote `origin` without user and password; None if there is none."""
    with suppress(GitError), repository(project) as git:
        return re.sub(r"(?<=://)[^/]*@", "", git.line("config", "remote.origin.url", fine=1)) or None
    return None


def _read_work_tree(git: Git, found: GitRecord) -> None:
    """Store the work tree in git's objects and fill `found`, as far as it gets. Raises GitError."""
    found.skipped = []
    found.base_commit = git.find("HEAD^{commit}") or None
    found.branch = masked(git.line("symbolic-ref", "--quiet", "--short", "HEAD", fine=1)) or None
    base = found.base_commit or git.line("hash-object", "-t", "tree", "--stdin")  # the empty tree
    new, old, gone = _copy_index(git, base), list[bytes](), list[bytes]()
    options = ("--untracked-files=all", "--ignore-submodules=none", "--no-renames")
    for entry in git.names("status", "--porcelain=v2", "-z", *options):
        if entry.startswith(b"? "):
            new.append(entry[2:])
            continue
        _, _, submodule, _, before, mode, _, _, path = entry.split(b" ", 8)
        if submodule[2:4] not in (b"..", b""):
            inside = _submodule_digest(git.file(path))
            reason = "changes inside of a submodule"
            found.skipped.append({"path": as_text(path), "reason": reason, "bytes": 0, "digest": inside})
        if mode == b"000000":
            gone.append(path)
        elif mode == b"160000" != before:  # a repository in the place of a file
            old.append(path + b"/")
        elif mode != b"160000" or submodule[1:2] == b"C":
            old.append(path)
    # Before others are added: a folder may have become a link.
    git("update-index", "--force-remove", "-z", "--stdin", stdin=b"\0".join(gone))
    _add(git, _select(git, old, found.skipped, new=False), found.skipped, new=False)
    _add(git, _select(git, new, found.skipped, new=True), found.skipped, new=True)
    _name_ignored(git, new, found.skipped)
    tree = git.line("write-tree")
    if git.prefix and not git.find(f"{tree}:{git.prefix}"):
        # A download unpacked somewhere inside an unrelated repository, such as one over a home folder.
        raise GitError(f"the repository {git.top} ignores this folder: `git init` gives it one of its own")
    found.dirty = bool(tree != git.find(f"{base}^{{tree}}") or found.skipped)
    found.tree = tree


def _despite_filters(git: Git, call: Callable[[], T]) -> T:
    """The result of a call of git, if need be without filters that fail."""
    try:
        return call()
    except GitError:
        if not git.leave_failing_filters():
            raise
        return call()


def _add(git: Git, paths: Sequence[bytes], skipped: list[SkippedFile], new: bool) -> None:
    """Put files into the index. Those that git cannot take in are named in `skipped`, and cost no other."""
    words = ("--add", "--remove", "--replace", "-z", "--stdin")
    try:
        git("update-index", *words, stdin=b"\0".join(paths))
    except GitError as error:
        if git.leave_failing_filters():
            _add(git, _select(git, paths, skipped, new), skipped, new)
        elif len(paths) == 1:
            skipped.append(_skipped(git, paths[0], f"git cannot take it in: {error}", new))
        else:
            for half in (paths[: len(paths) // 2], paths[len(paths) // 2 :]):
                _add(git, half, skipped, new)


def _name_ignored(git: Git, new: Iterable[bytes], skipped: list[SkippedFile]) -> None:
    """Name new files that git has left out without a word, such as `git~1`, a name of its own on Windows."""
    known, named = {*git.names("ls-files", "-z")}, {str(each["path"]) for each in skipped}
    lost = (path for path in new if path not in known and masked(as_text(path)) not in named)
    reason = "git takes no file of this name"
    skipped += [_skipped(git, path, reason, new=True) for path in lost if git.file(path).exists()]


def _skipped(git: Git, path: bytes, reason: str, new: bool) -> SkippedFile:
    """The entry of the record about a file that is left out."""
    file, size = git.file(path), 0
    with suppress(OSError):
        size = file.lstat().st_size
    digest = _digest(file, os.fsdecode(path), reason)
    reason += "" if new else "; the version of the base commit is kept"
    return {"path": masked(as_text(path)), "reason": reason, "bytes": size, "digest": digest}


def _copy_index(git: Git, base: str) -> list[bytes]:
    """Make the private index one of the base commit; returns files that only the user's index has."""
    with suppress(FileNotFoundError):
        # With its time, because git distrusts entries as young as the index itself.
        shutil.copy2(git.users_index, git.index)
    # The run also sees changes of files that the user told git not to look at. Files that a sparse checkout
    # leaves out (S) are not missing.
    flagged = [entry for entry in git.names("ls-files", "-v", "-z") if entry[:1] not in (b"H", b"M")]
    if seen := [path[2:] for path in flagged if path[:1] == b"h" or os.path.lexists(git.file(path[2:]))]:
        for option in ("--no-assume-unchanged", "--no-skip-worktree"):
            git("update-index", option, "-z", "--stdin", stdin=b"\0".join(seen))
    staged = git.names("diff-index", "--cached", "--diff-filter=A", "--no-renames", "-z", "--name-only", base)
    git("read-tree", "--reset", base)
    return staged


def _select(git: Git, paths: Iterable[bytes], skipped: list[SkippedFile], new: bool) -> list[bytes]:
    """Paths that may be recorded; the others are named in `skipped`."""
    taken, total, sizes = [], 0, dict.fromkeys(paths, 0)
    filtered = git.left_by_filters([*sizes])
    for path in sizes:
        with suppress(OSError):
            sizes[path] = git.file(path).lstat().st_size
    for path, size in sorted(sizes.items(), key=lambda item: (item[1], item[0])):
        reason = _why_left_out(git, path, size, new, room=MAX_NEW_BYTES - total)
        if reason is None and path in filtered:
            reason = f"the filter {filtered[path]} of git, which it needs, fails here"
        if reason is None:
            total += size
            taken.append(path)
        else:
            skipped.append(_skipped(git, path, reason, new))
    return taken


def _digest(file: Path, path: str, reason: str) -> str | None:
    """Stands for the content of a file without its secrets, left out for `reason`; None: all may be one."""
    if secret_name(path):
        return None
    if file.is_symlink():
        return xxhash.xxh3_128_hexdigest(masked(str(file.readlink())).encode(errors="replace"))
    with suppress(OSError), file.open("rb") as opened:
        size = file.stat().st_size
        if size > MAX_FILE_BYTES:
            digest = xxhash.xxh3_128()
            for start in (0, size // 2, max(0, size - _PART_BYTES)):
                opened.seek(start)
                digest.update(opened.read(_PART_BYTES))
            return digest.hexdigest()
        content = opened.read()
        if reason.startswith(LIKELY):
            if size > _PART_BYTES:  # looking for secrets line by line would take seconds
                return None
            lines = (line for line in content.splitlines() if not secret_content(line, file.name))
            content = b"\n".join(lines)
        return xxhash.xxh3_128_hexdigest(content)
    return None


def _submodule_digest(folder: Path) -> str | None:
    """Stands for the work tree of a submodule."""
    inside = take_snapshot(folder)
    known = f"{inside.tree} {inside.left_out()}"
    return None if inside.tree is None else xxhash.xxh3_128_hexdigest(known.encode())


def _why_left_out(git: Git, path: bytes, size: int, new: bool, room: int) -> str | None:
    file = git.file(path)
    if path.endswith(b"/"):
        return "a git repository of its own"
    if new and (reason := secret_name(os.fsdecode(path)) or secret_in_name(os.fsdecode(path))):
        return reason
    if file.is_symlink():
        return secret_in_name(str(file.readlink()), "target")
    # A submodule. Or the lock of a run: closing the file would end a lock that this process has on it.
    if not file.is_file() or file.name == LOCK:
        return None
    if size > MAX_FILE_BYTES:
        return f"larger than {MAX_FILE_BYTES // 1_000_000} MB"
    if new and size > room:
        return f"new files together exceed {MAX_NEW_BYTES // 1_000_000} MB"
    try:
        return secret_content(file.read_bytes(), file.name)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
