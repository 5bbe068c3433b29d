"""The code of a run, kept as a git commit under `refs/runs/`.

The user's branch, index and files are never touched, and nothing is pushed: `git push origin
refs/runs/ID` is up to the user. Git's own conversions apply as in `git add` (line endings with
`core.autocrlf`, filters such as LFS), ignored files stay out, and what `exclusions.py` leaves out is named.

`RESERVED_PATHS` are no code: a run's commit holds the resolved configuration at `CONFIG_PATH`, whatever the
work tree has, and when the run has ended a second commit on top of it holds how it ended at `ENDED_PATHS`:
the outcome, the trace and the metrics. So whoever has the ref can make the run again and compare, without
its folder. The first commit is a function of base commit, tree and configuration, so equal runs share it.

A run that goes on keeps its ref and only ever adds to it: another commit if code or configuration are no
longer what they were, then how it ended this time. A ref that leads somewhere else is left alone.

Against `git gc`, also with `--prune=now`: new objects are unreachable until the ref exists. While gc runs
they are therefore held in a pack that git is told to keep, and every commit is checked for completeness
before and after its ref is made. A lost object makes another attempt, with everything built aside and moved
in as such a pack.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rltemplate.run.git.command import Git, GitError, attempt
from rltemplate.run.git.exclusions import SkippedFile
from rltemplate.run.git.work_tree import WorkTree, read_work_tree
from rltemplate.run.paths import METRICS, RECORD, REF_PREFIX, TRACE, safe_name
from rltemplate.types import ConfigError

CONFIG_PATH = ".rltemplate/run/config.yaml"
OUTCOME_PATH = ".rltemplate/run/outcome.json"
TRACE_PATH = ".rltemplate/run/trace.jsonl"
METRICS_PATH = ".rltemplate/run/metrics.jsonl"
ENDED_PATHS = (OUTCOME_PATH, TRACE_PATH, METRICS_PATH)  # what the end of a run adds to its commit
RESERVED_PATHS = (CONFIG_PATH, *ENDED_PATHS)
MAX_ENDED_BYTES = 32_000_000  # a longer trace stays in the run's folder; hexadecimal digits pack to a half
MAX_NAMED = 200  # paths listed by name in a record; the counts beside them are always exact

_GC_LOCK_LIFE_S = 12 * 3600.0  # after which git itself takes the lock of a `git gc` for a leftover
_MESSAGE = "Work tree and configuration of a run"
_CONTINUED_MESSAGE = "Work tree and configuration of a run that goes on"
_OUTCOME_MESSAGE = "Outcome of a run"


class DuplicateRunError(RuntimeError):
    """The ref of this run or sweep exists already; two runs would share one record."""


@dataclass(slots=True)
class Snapshot:
    """The work tree at one moment.

    `dirty` says whether it differs from `base_commit` in anything that git does not ignore (None: unknown).
    `changed` names what the tree changes of the base commit, `skipped` what it lacks. `problem` is one line
    saying why there is no `tree` and what to do about it; `notes` are limits of a snapshot that was taken.
    """

    top: str | None = None
    tree: str | None = None
    base_commit: str | None = None
    base_time: int = 0
    branch: str | None = None
    dirty: bool | None = None
    changed: list[str] = field(default_factory=list)
    changed_count: int = 0
    skipped: list[SkippedFile] = field(default_factory=list)
    skipped_count: int = 0
    dirty_submodules: list[str] = field(default_factory=list)
    keep_ref: str | None = None
    notes: list[str] = field(default_factory=list)
    problem: str | None = None

    def to_json(self) -> str:
        """One line of JSON, to hand the snapshot to the jobs of a sweep."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Snapshot:
        """The snapshot that `to_json` wrote."""
        return cls(**json.loads(text))


@dataclass(slots=True)
class GitRecord:
    """What `record.json` says of a run's code. `ref` and `commit` are None where `problem` says why.

    `tree` is the work tree alone, without the configuration that `commit` adds: equal code, equal tree.
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

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> GitRecord:
        """The record that `asdict` made, as `record.json` holds it. Raises ConfigError if it is another's."""
        expected = cls.__dataclass_fields__.keys()
        if values.keys() != expected:
            odd = ", ".join(sorted(values.keys() ^ expected))
            raise ConfigError(f"{RECORD}: git is not as this version writes it; look at: {odd}")
        return cls(**values)


def take_snapshot(project: Path, keep_ref: str | None = None) -> Snapshot:
    """Store the work tree of the repository around `project`; trouble with git ends up in `problem`.

    With `keep_ref`, the id of a sweep, `refs/runs/<keep_ref>` holds the tree, so that it outlives any
    `git gc` until the last job of the sweep has started. Raises DuplicateRunError if that ref exists.
    """
    snapshot = Snapshot()
    ref = None if keep_ref is None else _ref(keep_ref)

    def take(git: Git) -> None:
        snapshot.top = str(git.top)
        found = WorkTree()
        try:
            read_work_tree(git, found)
        finally:  # base commit and branch are worth knowing even if nothing could be stored
            _fill(snapshot, found, shallow=(git.common_dir / "shallow").exists())
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
    ref = _ref(run_id)
    record = _record(snapshot)
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

    def withdraw(git: Git) -> None:
        git("update-ref", "-d", f"{record.ref}", f"{record.commit}", env=git.public)

    if record.ref is not None:
        with suppress(GitError, OSError):
            attempt(Path(f"{snapshot.top}"), withdraw)


def continue_run(snapshot: Snapshot, before: GitRecord, run_id: str, config_yaml: str) -> GitRecord:
    """The record of a run that goes on, perhaps in another clone; `before` is the last one that had a commit.

    While code and configuration are what they were, `commit` stays and nothing is written. Otherwise a commit
    with what they are now is put on top of the ref's history. A ref that is missing here is made again, at
    the very commit of `before` where that can be had. One that lags behind that commit is moved up to it;
    one that has anything else is left alone, and `problem` says so, as it does if another process goes on
    with the run at the same moment and for trouble with git. Everything beside ref and commit describes
    `snapshot`.
    """
    ref = _ref(run_id)
    record = _record(snapshot)
    if snapshot.top is None or snapshot.tree is None:
        return record
    tips: list[str | None] = []
    twice = f"{ref} was moved by another process: does this run go on twice at the same time?"

    def go_on(git: Git) -> tuple[str, list[str]]:
        tip = _tip(git, ref)
        tips.append(tip)
        if tip != tips[0]:  # another attempt would hide that two processes go on with one run
            raise GitError(twice, final=True)
        held = snapshot.base_commit if tip is None else tip
        tree = _run_tree(git, snapshot, config_yaml)
        head = _head(git, ref, tip, before.commit, held)
        notes: list[str] = []
        if head is None:
            commit = head = _first_commit_again(git, snapshot, tree, before)
            if before.commit not in (None, commit):
                notes.append(f"{ref} was not in this repository: its history begins where the run went on")
        else:
            commit = _last_code(git, head)
            if git.line("rev-parse", f"{commit}^{{tree}}") != tree:
                messages = [_CONTINUED_MESSAGE, f"Base commit: {snapshot.base_commit or 'none'}"]
                commit = head = _commit_on(git, head, snapshot, tree, *messages)
        if head != tip:
            _publish(git, held, head, ref, old=tip or "")
        return commit, notes

    try:
        record.commit, notes = attempt(Path(snapshot.top), go_on)
        record.ref = ref
        record.notes += notes
    except DuplicateRunError:
        record.problem = twice
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
        tip = _tip(git, ref)
        head = None if tip is None else _head(git, ref, tip, code, tip)
        if tip is None or head is None:
            raise GitError(f"{ref} was deleted while the run went on", final=True)
        git("read-tree", code)
        blobs = {OUTCOME_PATH: git.line("hash-object", "-w", "--stdin", stdin=outcome_json.encode())}
        for name, file in (files or {}).items():
            blobs[name] = git.line("hash-object", "-w", "--no-filters", "--", str(file.absolute()))
        for name, blob in blobs.items():
            git("update-index", "--add", "--replace", "--cacheinfo", f"100644,{blob},{name}")
        made = _commit_on(git, head, snapshot, git.line("write-tree"), _OUTCOME_MESSAGE)
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


def _fill(snapshot: Snapshot, found: WorkTree, shallow: bool) -> None:
    snapshot.tree, snapshot.base_commit, snapshot.base_time = found.tree, found.base_commit, found.base_time
    snapshot.branch, snapshot.dirty = found.branch, found.dirty
    snapshot.changed, snapshot.changed_count = found.changed[:MAX_NAMED], len(found.changed)
    snapshot.skipped, snapshot.skipped_count = found.skipped[:MAX_NAMED], len(found.skipped)
    snapshot.dirty_submodules = found.dirty_submodules
    snapshot.notes = []
    if found.base_commit is None and found.tree is not None:
        snapshot.notes.append("the repository has no commits yet, so there is no base commit to compare with")
    if shallow:
        snapshot.notes.append("shallow clone: `git fetch --unshallow` before this run's ref can be pushed")
    if found.dirty_submodules:
        snapshot.notes.append("changes inside submodules are not recorded: commit them there")


def _read_tree(git: Git, snapshot: Snapshot) -> None:
    """The snapshot's tree as the private index, taken again if `git gc` did not let it live.

    That restores the very snapshot as long as the work tree is what it was; a sweep's is held by its ref.
    """
    try:
        _check_complete(git, snapshot.base_commit, f"{snapshot.tree}", git.private)
    except GitError:
        again = WorkTree()
        read_work_tree(git, again)
        if again.tree != snapshot.tree:
            message = "`git gc` removed the snapshot before the run was recorded, and the files changed since"
            raise GitError(message, final=True) from None
    git("read-tree", f"{snapshot.tree}")


def _record(snapshot: Snapshot) -> GitRecord:
    """What the snapshot alone says, without ref and commit."""
    known = asdict(snapshot)
    return GitRecord(None, None, **{k: known[k] for k in GitRecord.__dataclass_fields__ if k in known})


def _run_tree(git: Git, snapshot: Snapshot, config_yaml: str) -> str:
    """The snapshot's tree with the configuration of a run."""
    _read_tree(git, snapshot)
    # A work tree that was itself taken from a run's commit still has how that run ended.
    git("update-index", "--force-remove", "--", *ENDED_PATHS)
    blob = git.line("hash-object", "-w", "--stdin", stdin=config_yaml.encode())
    git("update-index", "--add", "--replace", "--cacheinfo", f"100644,{blob},{CONFIG_PATH}")
    return git.line("write-tree")


def _first_commit(git: Git, snapshot: Snapshot, tree: str) -> str:
    """A commit of `tree` on the snapshot's base commit."""
    return _commit(git, tree, snapshot.base_commit, snapshot.base_time, _MESSAGE)


def _first_commit_again(git: Git, snapshot: Snapshot, tree: str, before: GitRecord) -> str:
    """The first commit of a run of which nothing is left here: the one that it had, if it comes out.

    The base commit need no longer be checked out for that. Who commits what the run began with, and goes on,
    has another base commit and the same tree.
    """
    base = before.base_commit
    if base is None or _is_whole(git, snapshot.base_commit, base):
        same = _commit(git, tree, base, 0 if base is None else _seconds(git, base), _MESSAGE)
        if same == before.commit:
            return same
    return _first_commit(git, snapshot, tree)


def _commit_on(git: Git, head: str, snapshot: Snapshot, tree: str, *messages: str) -> str:
    """A commit of `tree` that goes on from `head`, never older than it: git's searches rely on that."""
    return _commit(git, tree, head, max(snapshot.base_time, _seconds(git, head)), *messages)


def _commit(git: Git, tree: str, parent: str | None, seconds: int, *messages: str) -> str:
    """A commit with nothing in it that varies; `seconds` since 1970 are its date."""
    date = f"@{seconds} +0000"
    env = git.private | {"GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date}
    parents = [] if parent is None else ["-p", parent]
    words = [word for message in messages for word in ("-m", message)]
    return git.line("commit-tree", tree, *parents, *words, env=env)


def _seconds(git: Git, commit: str) -> int:
    return int(git.line("rev-list", "--timestamp", "--max-count=1", commit).split()[0])


def _tip(git: Git, ref: str) -> str | None:
    """Where the ref points, None if there is no such ref. Raises GitError if that is no commit."""
    for line in git.line("for-each-ref", "--format=%(refname) %(objecttype) %(objectname)", ref).splitlines():
        name, kind, found = line.split()
        if name == ref and kind == "commit":
            return found
        if name == ref:
            raise _foreign(ref, found, f"a {kind} and no commit")
    return None


def _head(git: Git, ref: str, tip: str | None, commit: str | None, held: str | None) -> str | None:
    """The commit from which a run goes on that had got to `commit`, or further, when its ref is at `tip`.

    That is the tip if it comes from `commit`, and `commit` if it is here and the ref is behind or missing.
    None if neither ref nor commit are here; GitError if the ref has something else. What `held` leads to is
    known to be complete.
    """
    if commit is None or not _is_whole(git, held, commit):
        if tip is None:
            return None
    elif tip is None:
        return commit
    else:
        common = git("merge-base", commit, tip, fine=1).decode().strip()
        if common in (commit, tip):
            return tip if common == commit else commit
    if commit is None:
        raise _foreign(ref, f"{tip}", "but the run's record names no commit")
    raise _foreign(ref, f"{tip}", f"which does not come from {commit[:12]}, the commit of this run")


def _foreign(ref: str, found: str, what: str) -> GitError:
    keep = f"`git update-ref refs/kept/{ref.removeprefix(REF_PREFIX)} {found[:12]}`"
    message = f"{ref} is at {found[:12]}, {what}, and was left alone"
    return GitError(f"{message}: {keep} keeps that, `git update-ref -d {ref}` makes room", final=True)


def _last_code(git: Git, head: str) -> str:
    """The last commit up to `head` that is not merely an outcome."""
    options = ("--first-parent", "--max-count=1", "--invert-grep", "--fixed-strings")
    return git.line("rev-list", *options, f"--grep={_OUTCOME_MESSAGE}", head)


def _is_whole(git: Git, held: str | None, commit: str) -> bool:
    """Whether `commit` is here with all that it adds to `held`."""
    try:
        _check_complete(git, held, commit, git.private)
    except GitError as error:
        if error.final:
            raise
        return False
    return True


def _publish(git: Git, base: str | None, commit: str, ref: str, old: str = "") -> None:
    """Let `ref`, new or pointing at `old`, point at `commit`, of which no object was or will be removed."""
    # Not even for a moment may the ref lead nowhere: another git command would stumble over it. A gc that ran
    # during this check, and may have spoilt its result, is still busy with other things right after it.
    _check_complete(git, base, commit, git.private)
    with _kept_pack(git, base, commit, when=git.aside or _gc_is_running(git)) as kept:
        try:
            git("update-ref", ref, commit, old, env=git.public)
        except GitError as error:
            if "already exists" in str(error):
                raise DuplicateRunError(f"{ref} exists already") from None
            raise
        try:
            # A `git gc` that began before the ref was there may be about to delete what it found unused.
            with _kept_pack(git, base, commit, when=not kept and _gc_is_running(git)):
                _check_complete(git, base, commit, git.public)
        except GitError:
            undo = ("update-ref", ref, old, commit) if old else ("update-ref", "-d", ref, commit)
            git(*undo, env=git.public)
            raise


def _check_complete(git: Git, base: str | None, added: str, env: dict[str, str]) -> None:
    """Raise GitError if an object is missing of what `added`, a commit or a tree, has beyond `base`."""
    known = [] if base is None else ["--not", base]
    git("rev-list", "--objects", "--quiet", added, *known, env=env)


@contextmanager
def _kept_pack(git: Git, base: str | None, commit: str, when: bool) -> Iterator[bool]:
    """Hold all that `commit` adds to `base` in a pack that `git gc` leaves alone. Gives `when` back.

    The pack has a name of its own, kept from its birth on: a mark put on a pack that is there already, such
    as that of an equal run, may come just too late for a gc that decided to replace it. And it is not put
    together in the repository, where gc removes what is unfinished.
    """
    if not when:
        yield False
        return
    wanted = commit + ("" if base is None else f"\n^{base}")
    made = git.scratch / "pack"
    name = git.line("pack-objects", "--revs", "-q", "--window=0", str(made), stdin=wanted.encode() + b"\n")
    packs = git.common_dir / "objects" / "pack"
    packs.mkdir(exist_ok=True)
    kept = packs / f"pack-{secrets.token_hex(len(commit) // 2)}.keep"
    kept.write_text("a run is being recorded\n")
    try:
        for suffix in (".pack", ".idx"):  # in this order: git looks for the index first
            aside = kept.with_suffix(f"{suffix}.new")
            aside.write_bytes((git.scratch / f"pack-{name}{suffix}").read_bytes())
            aside.chmod(0o444)
            aside.replace(kept.with_suffix(suffix))
        yield True
    finally:
        kept.unlink(missing_ok=True)


def _gc_is_running(git: Git) -> bool:
    try:
        age_s = time.time() - (git.common_dir / "gc.pid").stat().st_mtime
    except OSError:
        return False
    return age_s < _GC_LOCK_LIFE_S
