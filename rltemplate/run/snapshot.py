"""The code of a run, kept as a git commit under `refs/runs/`.

The user's branch, index and files are never touched, and nothing is pushed: `git push origin
refs/runs/ID` is up to the user. Git's own conversions apply as in `git add` (line endings with
`core.autocrlf`, filters such as LFS), ignored files stay out, and what `exclusions.py` leaves out is named.

`CONFIG_PATH` and `OUTCOME_PATH` are reserved: a run's commit holds the resolved configuration in the one,
whatever the work tree has, and when the run has ended a second commit on top of it holds how it ended in the
other. The first is a function of base commit, tree and configuration, so equal runs share it.

Against `git gc`, also with `--prune=now`: new objects are unreachable until the ref exists. While gc runs
they are therefore held in a pack that git is told to keep, and every commit is checked for completeness
before and after its ref is made. A lost object makes another attempt, with everything built aside and moved
in as such a pack.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rltemplate.run.exclusions import SkippedFile
from rltemplate.run.git import Git, GitError, attempt
from rltemplate.run.paths import REF_PREFIX, safe_name
from rltemplate.run.work_tree import WorkTree, read_work_tree

CONFIG_PATH = ".rltemplate/run/config.yaml"
OUTCOME_PATH = ".rltemplate/run/outcome.json"
MAX_NAMED = 200  # paths listed by name in a record; the counts beside them are always exact

_GC_LOCK_LIFE_S = 12 * 3600.0  # after which git itself takes the lock of a `git gc` for a leftover
_MESSAGE = "Work tree and configuration of a run"
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

    ref: str | None
    commit: str | None
    tree: str | None
    base_commit: str | None
    branch: str | None
    dirty: bool | None
    changed: list[str]
    changed_count: int
    skipped: list[SkippedFile]
    skipped_count: int
    dirty_submodules: list[str]
    notes: list[str]
    problem: str | None


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
            _publish(git, snapshot.base_commit, _commit(git, snapshot, snapshot.tree), ref)

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
    known = asdict(snapshot)
    record = GitRecord(None, None, **{k: known[k] for k in GitRecord.__dataclass_fields__ if k in known})
    if snapshot.top is None or snapshot.tree is None:
        return record

    def commit(git: Git) -> str:
        _read_tree(git, snapshot)
        # A work tree that was itself taken from a run's commit still has how that run ended.
        git("update-index", "--force-remove", OUTCOME_PATH)
        blob = git.line("hash-object", "-w", "--stdin", stdin=config_yaml.encode())
        git("update-index", "--add", "--replace", "--cacheinfo", f"100644,{blob},{CONFIG_PATH}")
        commit = _commit(git, snapshot, git.line("write-tree"))
        _publish(git, snapshot.base_commit, commit, ref)
        return commit

    try:
        record.commit = attempt(Path(snapshot.top), commit)
        record.ref = ref
    except (GitError, OSError) as error:
        record.problem = str(error)
    return record


def commit_outcome(snapshot: Snapshot, record: GitRecord, outcome_json: str) -> str | None:
    """Put how the run ended on top of its commit and move its ref there; one line if that did not work."""
    if record.ref is None or record.commit is None or snapshot.top is None:
        return None
    ref, before = record.ref, record.commit

    def commit(git: Git) -> None:
        git("read-tree", before)
        blob = git.line("hash-object", "-w", "--stdin", stdin=outcome_json.encode())
        git("update-index", "--add", "--replace", "--cacheinfo", f"100644,{blob},{OUTCOME_PATH}")
        env = git.private | {
            f"GIT_{who}_DATE": f"@{snapshot.base_time} +0000" for who in ("AUTHOR", "COMMITTER")
        }
        made = git.line("commit-tree", git.line("write-tree"), "-p", before, "-m", _OUTCOME_MESSAGE, env=env)
        _publish(git, before, made, ref, old=before)

    try:
        attempt(Path(snapshot.top), commit)
    except (GitError, OSError) as error:
        return str(error)
    return None


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
    if found.base_commit is None:
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


def _commit(git: Git, snapshot: Snapshot, tree: str | None) -> str:
    """A commit of `tree` on the base commit, with nothing in it that varies."""
    date = f"@{snapshot.base_time} +0000"
    env = git.private | {"GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date}
    parents = [] if snapshot.base_commit is None else ["-p", snapshot.base_commit]
    return git.line("commit-tree", f"{tree}", *parents, "-m", _MESSAGE, env=env)


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
