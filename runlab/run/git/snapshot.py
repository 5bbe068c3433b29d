"""The code of a run, kept as a git commit under `refs/runs/`.

The user's branch, index and files are never touched, and nothing is pushed.

A run's commit holds the work tree and, in the folder `RESERVED`, the resolved configuration. After the run, a
commit on top of it holds there how it ended: the outcome, the trace and the metrics. The ref alone is enough
to make the run again. The first commit is a function of base commit, tree and configuration.
A run that resumes with other code or another configuration adds a commit on top of its ref.

The tree has the files on disk, not those that are staged, with git's own conversions (line endings, filters
such as LFS); ignored files stay out. A private index takes up the changes: a copy of the user's, set back to
the base commit, so that git's remembered file times keep it fast. Some files are left out (selection.py).
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import xxhash

from runlab.config.secrets import masked
from runlab.config.texts import few
from runlab.run.git.command import Git, GitError, as_text, repository
from runlab.run.git.origin import mark_made_here
from runlab.run.git.selection import SkippedFile, add_files, written_here
from runlab.run.paths import CONFIG, METRICS, REF_PREFIX, TRACE

# The folder in a run's commit that is not code. It was named after the package before, which a fork renames.
RESERVED = ".runlab/run/"
_FORMER_RESERVED = re.compile(r"\.[a-z0-9_]+")
OUTCOME = "outcome.json"
# A partial clone lacks contents, which the commits of its remote have.
_WRITE_TREE = ("write-tree", "--missing-ok")
ENDED = (OUTCOME, TRACE, METRICS)
MAX_ENDED_BYTES = 32_000_000  # a longer trace stays in the run's folder; hexadecimal digits pack to a half


@dataclass(slots=True)
class GitRecord:
    """The part of `record.json` about a run's code. `ref` and `commit` are None where `problem` says why.

    `tree` is the work tree alone, without the configuration that `commit` adds: equal code, equal tree.
    `dirty` says whether it differs from `base_commit` in anything that git does not ignore and that is no
    page or figure of `make report` (None: unknown).
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

    def notes(self) -> list[str]:
        """Lines for the user about code that is not recorded."""
        notes = [] if self.problem is None else [f"code not recorded: {self.problem}"]
        return notes + [f"not in the snapshot of the code: {few(self.reasons())}"] * bool(self.skipped)

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
            tree, tip = git.line(*_WRITE_TREE), "" if before is None else git.find(ref)
            # A received record may have any text as its commit, and what is marked is trusted later.
            commit = git.find(f"{before.commit}^{{commit}}") if before and before.commit else ""
            same = bool(commit) and git.find(f"{commit}^{{tree}}") == tree
            if not same:
                commit = _commit(git, tree, tip or snapshot.base_commit)
            mark_made_here(git, commit)
            if not (same and tip):
                git("update-ref", ref, commit, tip)
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
            git("update-ref", ref, _commit(git, git.line(*_WRITE_TREE), tip, "Outcome of a run"), tip)
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
    files = {}
    with repository(project) as git:
        tops = map(as_text, git.names("ls-tree", "-d", "-z", "--name-only", f"{commit}^{{tree}}"))
        folders = [RESERVED, *(f"{top}/run/" for top in tops if _FORMER_RESERVED.fullmatch(top))]
        reserved = next((each for each in folders if git.find(f"{commit}:{each}{CONFIG}")), RESERVED)
        for name in (CONFIG, *ENDED):
            if blob := git.find(f"{commit}:{reserved}{name}"):
                size = int(git.line("cat-file", "-s", blob))  # of a stranger's, kilobytes unpack to gigabytes
                if size > MAX_ENDED_BYTES:
                    raise GitError(
                        f"{commit}: {name} has {size:,} bytes, and at most {MAX_ENDED_BYTES:,} are read"
                    )
                files[name] = folder / name
                files[name].write_bytes(git("cat-file", "blob", blob))
    return files


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
    try:
        with repository(project) as git:
            # No hooks run. A worktree of a sparse checkout would be as sparse.
            words = ("worktree", "add", "--quiet", "--detach", "--force", str(folder), commit)
            _despite_filters(git, lambda: git("-c", "core.sparseCheckout=false", *words))
        yield folder / git.prefix
    finally:
        with suppress(GitError), repository(project) as git:
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


def _read_work_tree(git: Git, snapshot: GitRecord) -> None:
    """Store the work tree in git's objects and fill `snapshot`, as far as it gets. Raises GitError."""
    snapshot.skipped = []
    snapshot.base_commit = git.find("HEAD^{commit}") or None
    snapshot.branch = masked(git.line("symbolic-ref", "--quiet", "--short", "HEAD", fine=1)) or None
    base = snapshot.base_commit or git.line("hash-object", "-t", "tree", "--stdin")  # the empty tree
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
            snapshot.skipped.append({"path": as_text(path), "reason": reason, "bytes": 0, "digest": inside})
        if mode == b"000000":
            gone.append(path)
        elif mode == b"160000" != before:  # a repository in the place of a file
            old.append(path + b"/")
        elif mode != b"160000" or submodule[1:2] == b"C":
            old.append(path)
    results = written_here(git, [*old, *new])
    old, new = ([path for path in paths if path not in results] for paths in (old, new))
    # Before others are added: a folder may have become a link.
    git("update-index", "--force-remove", "-z", "--stdin", stdin=b"\0".join(gone))
    add_files(git, old, snapshot.skipped, new=False)
    add_files(git, new, snapshot.skipped, new=True)
    tree = git.line(*_WRITE_TREE)
    if git.prefix and not git.find(f"{tree}:{git.prefix}"):
        # A download unpacked somewhere inside an unrelated repository, such as one over a home folder.
        raise GitError(f"the repository {git.top} ignores this folder: `git init` gives it one of its own")
    snapshot.dirty = bool(tree != git.find(f"{base}^{{tree}}") or snapshot.skipped)
    snapshot.tree = tree


def _despite_filters(git: Git, call: Callable[[], object]) -> None:
    """Call git; if it fails, call it again without filters that fail."""
    try:
        call()
    except GitError:
        git.leave_failing_filters()
        call()


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


def _submodule_digest(folder: Path) -> str | None:
    """Stands for the work tree of a submodule."""
    inside = take_snapshot(folder)
    content = f"{inside.tree} {inside.left_out()}"
    return None if inside.tree is None else xxhash.xxh3_128_hexdigest(content.encode())
