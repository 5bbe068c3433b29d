"""The code of a run, kept as a git commit under `refs/runs/`.

The user's branch, index and files are never touched, and nothing is pushed.

A run's commit holds the work tree and, at `CONFIG_PATH`, the resolved configuration. After the run, a commit
on top of it holds how it ended, at `ENDED_PATHS`: the outcome, the trace and the metrics. The ref alone is
enough to make the run again. The first commit is a function of base commit, tree and configuration.
A resumed run only adds to its ref; a ref that leads somewhere else is left alone.

New objects are unreachable until the ref exists: if `git gc --prune=now` takes one, a second attempt is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from rltemplate.run.git.command import Git, GitError, attempt
from rltemplate.run.git.work_tree import GitRecord as GitRecord
from rltemplate.run.git.work_tree import Snapshot as Snapshot
from rltemplate.run.git.work_tree import read_work_tree
from rltemplate.run.paths import METRICS, REF_PREFIX, TRACE, safe_name

CONFIG_PATH = ".rltemplate/run/config.yaml"
OUTCOME_PATH = ".rltemplate/run/outcome.json"
TRACE_PATH = ".rltemplate/run/trace.jsonl"
METRICS_PATH = ".rltemplate/run/metrics.jsonl"
ENDED_PATHS = (OUTCOME_PATH, TRACE_PATH, METRICS_PATH)
MAX_ENDED_BYTES = 32_000_000  # a longer trace stays in the run's folder; hexadecimal digits pack to a half

_MESSAGE = "Work tree and configuration of a run"
_CONTINUED_MESSAGE = "Work tree and configuration of a run that goes on"
_OUTCOME_MESSAGE = "Outcome of a run"


class DuplicateRunError(RuntimeError):
    """The ref of this run or sweep exists already; two runs would share one record."""


def take_snapshot(project: Path, keep_ref: str | None = None) -> Snapshot:
    """Store the work tree of the repository around `project`; trouble with git ends up in `problem`.

    With `keep_ref`, the id of a sweep, `refs/runs/<keep_ref>` holds the tree, so that it outlives any
    `git gc` until the last job of the sweep has started. Raises DuplicateRunError if that ref exists.
    """
    snapshot = Snapshot()
    ref = None if keep_ref is None else _ref(keep_ref)

    def take(git: Git) -> None:
        read_work_tree(git, snapshot)
        if ref is not None:
            _publish(git, snapshot.base_commit, _first_commit(git, snapshot, f"{snapshot.tree}"), ref)

    try:
        attempt(project, take)
        snapshot.keep_ref = ref
    except (GitError, OSError) as error:
        snapshot.tree, snapshot.problem = None, str(error)
    return snapshot


def commit_run(snapshot: Snapshot, run_id: str, config_yaml: str) -> GitRecord:
    """Commit the snapshot with a run's configuration and let `refs/runs/<run_id>` point there.

    Trouble with git ends up in the record's `problem`. Raises DuplicateRunError if the ref exists.
    """
    ref, record = _ref(run_id), snapshot.record()
    if snapshot.top is None or snapshot.tree is None:
        return record

    def commit(git: Git) -> str:
        commit = _first_commit(git, snapshot, _run_tree(git, snapshot, config_yaml))
        _publish(git, snapshot.base_commit, commit, ref)
        return commit

    try:
        record.commit = attempt(Path(snapshot.top), commit)
        record.ref = ref
    except (GitError, OSError) as error:
        record.problem = str(error)
    return record


def withdraw_run(snapshot: Snapshot, record: GitRecord) -> None:
    """Remove the ref of a run that could not begin; trouble with git leaves it where it is."""
    if record.ref is not None:
        words = ("update-ref", "-d", record.ref, f"{record.commit}")
        with suppress(GitError, OSError):
            attempt(Path(f"{snapshot.top}"), lambda git: git(*words))


def continue_run(snapshot: Snapshot, before: GitRecord, run_id: str, config_yaml: str) -> GitRecord:
    """The record of a resumed run, perhaps in another clone; `before` is the last one that had a commit.

    While code and configuration stay the same, so does `commit`. Otherwise a new commit goes on top of the
    ref's history. A ref that is missing is made again. Trouble with git ends up in `problem`, as does a ref
    that has something else.
    """
    ref, record = _ref(run_id), snapshot.record()
    if snapshot.top is None or snapshot.tree is None:
        return record

    def resume(git: Git) -> tuple[str, list[str]]:
        tip, notes = _tip(git, ref, before.commit), []
        tree = _run_tree(git, snapshot, config_yaml)
        head = tip if tip or before.commit is None or not _is_whole(git, before.commit) else before.commit
        if head is None:
            commit = head = _first_commit(git, snapshot, tree)
            if before.commit not in (None, commit):
                notes.append(f"{ref} was not in this repository: its history begins where the run went on")
        else:
            # The last commit that is not merely an outcome.
            options = ("--first-parent", "--max-count=1", "--invert-grep", "--fixed-strings")
            commit = git.line("rev-list", *options, f"--grep={_OUTCOME_MESSAGE}", head)
            if git.line("rev-parse", f"{commit}^{{tree}}") != tree:
                base = f"Base commit: {snapshot.base_commit or 'none'}"
                commit = head = _commit_on(git, head, snapshot, tree, _CONTINUED_MESSAGE, base)
        if head != tip:
            _publish(git, tip or snapshot.base_commit, head, ref, old=tip or "")
        return commit, notes

    try:
        record.commit, notes = attempt(Path(snapshot.top), resume)
        record.ref = ref
        record.notes += notes
    except (GitError, OSError) as error:
        record.problem = str(error)
    return record


def commit_outcome(
    snapshot: Snapshot, record: GitRecord, outcome_json: str, files: Mapping[str, Path] | None = None
) -> str | None:
    """Put how the run ended, with its code, on top of its ref's history; one line if that did not work.

    `files` are stored byte for byte, by their path in the commit, one of ENDED_PATHS.
    """
    if record.ref is None or record.commit is None or snapshot.top is None:
        return None
    ref, code = record.ref, record.commit

    def commit(git: Git) -> None:
        tip = _tip(git, ref, code)
        if tip is None:
            raise GitError(f"{ref} was deleted while the run went on", final=True)
        git("read-tree", code)
        blobs = {OUTCOME_PATH: git.line("hash-object", "-w", "--stdin", stdin=outcome_json.encode())}
        for name, file in (files or {}).items():
            blobs[name] = git.line("hash-object", "-w", "--no-filters", "--", str(file.absolute()))
        _enter(git, blobs)
        made = _commit_on(git, tip, snapshot, git.line("write-tree"), _OUTCOME_MESSAGE)
        _publish(git, tip, made, ref, old=tip)

    try:
        attempt(Path(snapshot.top), commit)
    except (GitError, OSError) as error:
        return str(error)
    return None


def ended_files(run_dir: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """Files of a run that go on top of its commit, by path there; those that do not, by name, and why."""
    files, left_out = {}, {}
    for name, path in ((TRACE, TRACE_PATH), (METRICS, METRICS_PATH)):
        try:
            size = (run_dir / name).stat().st_size
        except FileNotFoundError:  # trace=off, or the run ended before it began
            continue
        except OSError as error:
            left_out[name] = f"could not be read, {error.strerror}"
            continue
        if size > MAX_ENDED_BYTES:
            left_out[name] = f"{size:,} bytes, and the limit is {MAX_ENDED_BYTES:,}"
        else:
            files[path] = run_dir / name
    return files, left_out


def _ref(name: str) -> str:
    if safe_name(name) != name or name.endswith(".lock") or ".." in name:
        raise ValueError(f"{name!r} cannot be an id: letters, digits, '.', '_' and '-' are allowed")
    return REF_PREFIX + name


def _run_tree(git: Git, snapshot: Snapshot, config_yaml: str) -> str:
    """The snapshot's tree with the configuration of a run."""
    if not _is_whole(git, f"{snapshot.tree}", snapshot.base_commit):
        # `git gc` removed it. The same files give the same tree again.
        again = Snapshot()
        read_work_tree(git, again)
        if again.tree != snapshot.tree:
            message = "`git gc` removed the snapshot before the run was recorded, and the files changed since"
            raise GitError(message, final=True)
    git("read-tree", f"{snapshot.tree}")
    # A work tree that was itself taken from a run's commit still has how that run ended.
    git("update-index", "--force-remove", "--", *ENDED_PATHS)
    _enter(git, {CONFIG_PATH: git.line("hash-object", "-w", "--stdin", stdin=config_yaml.encode())})
    return git.line("write-tree")


def _enter(git: Git, blobs: Mapping[str, str]) -> None:
    for name, blob in blobs.items():
        git("update-index", "--add", "--replace", "--cacheinfo", f"100644,{blob},{name}")


def _first_commit(git: Git, snapshot: Snapshot, tree: str) -> str:
    """A commit of `tree` on the snapshot's base commit."""
    return _commit(git, tree, snapshot.base_commit, snapshot.base_time, _MESSAGE)


def _commit_on(git: Git, head: str, snapshot: Snapshot, tree: str, *messages: str) -> str:
    """A commit of `tree` on top of `head`, never older than it: git's searches rely on that."""
    seconds = int(git.line("show", "--no-patch", "--format=%ct", head))
    return _commit(git, tree, head, max(snapshot.base_time, seconds), *messages)


def _commit(git: Git, tree: str, parent: str | None, seconds: int, *messages: str) -> str:
    """A commit with nothing in it that varies; `seconds` since 1970 are its date."""
    date = f"@{seconds} +0000"
    env = git.env | {"GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date}
    parents = [] if parent is None else ["-p", parent]
    words = [word for message in messages for word in ("-m", message)]
    return git.line("commit-tree", tree, *parents, *words, env=env)


def _tip(git: Git, ref: str, commit: str | None) -> str | None:
    """The commit of the ref, which must come from `commit`; None if there is no such ref."""
    found = git.line("rev-parse", "--quiet", "--verify", ref, fine=1)
    if not found:
        return None
    if commit is not None:
        with suppress(GitError):  # no commit, or `commit` is not here
            if git.line("merge-base", commit, found, fine=1) == commit:
                return found
    keep = f"`git update-ref refs/kept/{ref.removeprefix(REF_PREFIX)} {found[:12]}`"
    message = (
        f"{ref} is at {found[:12]}, which does not come from {(commit or 'any commit')[:12]} of this run"
    )
    make_room = f"{keep} keeps that, `git update-ref -d {ref}` makes room"
    raise GitError(f"{message}, and was left alone: {make_room}", final=True)


def _is_whole(git: Git, added: str, base: str | None = None) -> bool:
    """True if all objects are here that a commit or tree adds to `base`."""
    known = [] if base is None else ["--not", base]
    try:
        git("rev-list", "--objects", "--quiet", added, *known)
    except GitError as error:
        if error.final:
            raise
        return False
    return True


def _publish(git: Git, base: str | None, commit: str, ref: str, old: str = "") -> None:
    """Let `ref`, new or at `old`, point at `commit`, of which no object is missing."""
    try:
        git("update-ref", ref, commit, old)
    except GitError as error:
        if "already exists" in str(error):
            raise DuplicateRunError(f"{ref} exists already") from None
        raise
    if not _is_whole(git, commit, base):
        git("update-ref", ref, old, commit) if old else git("update-ref", "-d", ref, commit)
        raise GitError(f"`git gc` removed objects of {ref}")
