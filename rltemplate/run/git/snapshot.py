"""The code of a run, kept as a git commit under `refs/runs/`.

The user's branch, index and files are never touched, and nothing is pushed.

A run's commit holds the work tree and, at `CONFIG_PATH`, the resolved configuration. After the run, a commit
on top of it holds how it ended, at `ENDED_PATHS`: the outcome, the trace and the metrics. The ref alone is
enough to make the run again. The first commit is a function of base commit, tree and configuration.
A run that resumes with other code or another configuration adds a commit on top of its ref.

New objects are unreachable until the ref exists: if `git gc --prune=now` takes one, a second attempt is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from rltemplate.run.git.command import Git, GitError, attempt
from rltemplate.run.git.work_tree import GitRecord as GitRecord
from rltemplate.run.git.work_tree import read_work_tree
from rltemplate.run.paths import METRICS, REF_PREFIX, TRACE

RESERVED = ".rltemplate/run/"  # the folder in a run's commit that is not code
CONFIG_PATH = RESERVED + "config.yaml"
OUTCOME_PATH = RESERVED + "outcome.json"
TRACE_PATH = RESERVED + "trace.jsonl"
METRICS_PATH = RESERVED + "metrics.jsonl"
ENDED_PATHS = (OUTCOME_PATH, TRACE_PATH, METRICS_PATH)
MAX_ENDED_BYTES = 32_000_000  # a longer trace stays in the run's folder; hexadecimal digits pack to a half

_MESSAGE = "Work tree and configuration of a run"
_OUTCOME_MESSAGE = "Outcome of a run"


def take_snapshot(project: Path, keep_ref: str | None = None) -> GitRecord:
    """Store the work tree of the repository around `project`; trouble with git ends up in `problem`.

    With `keep_ref`, the id of a sweep, `refs/runs/<keep_ref>` holds the tree, so that it outlives any
    `git gc` until the last job of the sweep has started.
    """
    snapshot = GitRecord()

    def take(git: Git) -> None:
        read_work_tree(git, snapshot)
        if keep_ref is not None:
            ref = REF_PREFIX + keep_ref
            snapshot.commit = _publish(git, _commit(git, f"{snapshot.tree}", snapshot.base_commit), ref)
            snapshot.ref = ref

    snapshot.problem = _problem(project, take)
    if snapshot.problem is not None:
        snapshot.tree = None
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

    def commit(git: Git) -> None:
        tree, tip = _run_tree(git, snapshot, config_yaml), ""
        if before is not None:
            tip = git.find(ref)
            if before.commit and git.find(f"{before.commit}^{{tree}}") == tree:
                record.commit = before.commit if tip else _publish(git, before.commit, ref)
                return
        record.commit = _publish(git, _commit(git, tree, tip or snapshot.base_commit), ref, tip)

    record.problem = _problem(project, commit)
    record.ref = None if record.commit is None else ref
    return record


def withdraw_run(project: Path, record: GitRecord) -> None:
    """Remove the ref of a run that could not begin; trouble with git leaves it where it is."""
    if record.ref is not None:
        words = ("update-ref", "-d", record.ref, f"{record.commit}")
        _problem(project, lambda git: git(*words))


def commit_outcome(
    project: Path, record: GitRecord, outcome_json: str, files: Mapping[str, Path] | None = None
) -> str | None:
    """Put how the run ended, with its code, on top of its ref's history; one line if that did not work.

    `files` are stored byte for byte, by their path in the commit, one of ENDED_PATHS.
    """
    ref, code = record.ref, record.commit
    if ref is None or code is None:
        return None

    def commit(git: Git) -> None:
        tip = git.find(ref)
        if not tip:
            raise GitError(f"{ref} was deleted while the run went on", final=True)
        git("read-tree", code)
        _enter(git, OUTCOME_PATH, git.line("hash-object", "-w", "--stdin", stdin=outcome_json.encode()))
        for name, file in (files or {}).items():
            _enter(git, name, git.line("hash-object", "-w", "--no-filters", "--", str(file.absolute())))
        _publish(git, _commit(git, git.line("write-tree"), tip, _OUTCOME_MESSAGE), ref, tip)

    return _problem(project, commit)


def ended_files(run_dir: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """Files of a run that go on top of its commit, by path there; those that are too large, by name."""
    files, left_out = {}, {}
    for name, path in ((TRACE, TRACE_PATH), (METRICS, METRICS_PATH)):
        with suppress(FileNotFoundError):  # trace=off, or the run ended before it began
            size = (run_dir / name).stat().st_size
            if size > MAX_ENDED_BYTES:
                left_out[name] = f"{size:,} bytes, and the limit is {MAX_ENDED_BYTES:,}"
            else:
                files[path] = run_dir / name
    return files, left_out


def _problem(project: Path, work: Callable[[Git], object]) -> str | None:
    """Do some work with git; returns what went wrong."""
    try:
        attempt(project, work)
    except (GitError, OSError) as error:
        return str(error)
    return None


def _run_tree(git: Git, snapshot: GitRecord, config_yaml: str) -> str:
    """The snapshot's tree with the configuration of a run."""
    try:
        git("read-tree", f"{snapshot.tree}")
    except GitError:  # `git gc` removed it; the same files give the same tree again
        again = GitRecord()
        read_work_tree(git, again)
        if again.tree != snapshot.tree:
            message = "`git gc` removed the snapshot before the run was recorded, and the files changed since"
            raise GitError(message, final=True) from None
    # A work tree that was itself taken from a run's commit still has how that run ended.
    git("update-index", "--force-remove", "--", *ENDED_PATHS)
    _enter(git, CONFIG_PATH, git.line("hash-object", "-w", "--stdin", stdin=config_yaml.encode()))
    return git.line("write-tree")


def _enter(git: Git, name: str, blob: str) -> None:
    git("update-index", "--add", "--replace", "--cacheinfo", f"100644,{blob},{name}")


def _commit(git: Git, tree: str, parent: str | None, message: str = _MESSAGE) -> str:
    """A commit with nothing in it that varies: it has the time of its parent."""
    time = git.line("show", "--no-patch", "--format=%ct", parent) if parent else "0"
    git.env["GIT_AUTHOR_DATE"] = git.env["GIT_COMMITTER_DATE"] = f"@{time} +0000"
    parents = ["-p", parent] if parent else []
    return git.line("commit-tree", tree, *parents, "-m", message)


def _publish(git: Git, commit: str, ref: str, old: str = "") -> str:
    """Let `ref`, new or at `old`, point at `commit`, of which no object may be missing."""
    git("update-ref", ref, commit, old)
    try:
        git("rev-list", "--objects", "--quiet", f"{commit}^!")
    except GitError:
        git("update-ref", ref, old, commit) if old else git("update-ref", "-d", ref, commit)
        raise GitError(f"`git gc` removed objects of {ref}") from None
    return commit
