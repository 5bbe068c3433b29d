"""Resume of a run in its folder: its checkpoint, changes since its start, removal of later rows and files.

A resumed run must equal a run that was never interrupted. The configuration must not change, except for a
larger `total_env_steps`. Code and libraries, and the C++ compiler of a compiled run, may change with
`accept=changes`. Another machine, processor or path is noted in the record.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NotRequired, TypedDict

from msgspec import Meta

from runlab.config.affects_results import (
    BOOKKEEPING_KEYS,
    COMPUTING_PACKAGES,
    EXECUTION_KEYS,
    code_rule,
    package_affects_results,
)
from runlab.config.loading import about_added, complete, to_dict
from runlab.config.schema import Config
from runlab.config.texts import few
from runlab.determinism.levels import OF_A_MACHINE, influences
from runlab.errors import ConfigError
from runlab.interfaces import Algorithm, replay_of
from runlab.machine import COMPILER, machine_facts, package_versions
from runlab.run import paths
from runlab.run.checkpoint import Checkpoint, load_experience, newest_checkpoint, prune_checkpoints
from runlab.run.files import cut_file, lock
from runlab.run.git.changes import files_between
from runlab.run.git.snapshot import GitRecord
from runlab.run.job import Job
from runlab.run.limits import check_networks, check_state
from runlab.run.manifest import list_checkpoints
from runlab.run.read import leaves, raw_config
from runlab.run.record import FINISHED, RUNNING, ResumedPart, RunRecord, this_process
from runlab.run.used_code import UsedCode, digests_now, files_of
from runlab.run.validation import typed

ACCEPT = "changes"


@dataclass(slots=True, kw_only=True)
class Progress:
    """The progress of a run that its observers keep, in the entry `run` of a checkpoint."""

    iterations: int
    before: int  # environment steps before the last iteration
    looked: bool  # evaluation and row of the last iteration are written, if due
    training_s: float  # time spent in iterations since the last log row
    logged_steps: int


class _RunState(TypedDict):
    """The rest of that entry."""

    logger: dict[str, Any]
    chain: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
    sizes: dict[str, int]  # of the files of lines


class _State(TypedDict):
    """The part of a checkpoint that is not the algorithm's own."""

    env_steps: int
    added: NotRequired[int]
    foreign: dict[str, Any]
    run: _RunState


class Continuation(NamedTuple):
    """An ended run, the facts about the part that begins now, and the checkpoint that it begins from."""

    record: RunRecord
    part: ResumedPart
    checkpoint: Checkpoint | None  # None: no checkpoint was finished, the run starts over


def find_continuation(job: Job, snapshot: GitRecord) -> Continuation:
    """The newest whole checkpoint of a job's run, and the changes since the run began.

    Raises ConfigError if the run must not resume. Changes nothing.
    """
    run_dir, config, notes = Path(job.run_dir), job.config, list[str]()
    record, (recorded, added) = RunRecord.read(run_dir), complete(raw_config(run_dir, notes.append))
    checkpoint = newest_checkpoint(run_dir, notes.append)
    if checkpoint is not None:
        name = str(checkpoint.path)
        run = typed(checkpoint.state.get("run"), dict[str, Any], name)
        if "sizes" not in run:
            raise ConfigError(
                f"{run_dir.name}: its checkpoints are of an earlier version; resume with that code"
            )
        typed(run, Progress, name)
        typed(checkpoint.state, _State, name)
        check_networks(config.algo, checkpoint.state, name)
    elif record.status == FINISHED or _nothing_kept(run_dir, config.checkpoint_every):
        raise ConfigError(
            f"{run_dir.name}: has no checkpoint, and starting again would overwrite what it has shown; "
            "begin a new run instead"
        )
    else:
        notes.append("no checkpoint was finished, so the run starts again from its beginning")
    if added:
        notes.append(about_added(run_dir.name, added))
    changed: dict[str, Any] = check_changes(
        "the run", record.git, record.versions, snapshot, job.accept, [record.used]
    )
    notes += _other_variables(record.environment, config.compile)
    now = machine_facts()
    for key in ("cpu", "python", "libc"):
        if record.machine.get(key) not in (None, now[key]):
            changed[key] = [record.machine[key], now[key]]
    before = to_dict(recorded) if checkpoint is None else checkpoint.config
    changed |= check_same_run(before, config, paths.CONFIG if checkpoint is None else checkpoint.path.name)
    if "total_env_steps" in changed:
        notes += [
            f"{setting}: from here on it follows from total_env_steps={config.total_env_steps}, as in no "
            "uninterrupted run"
            for setting in config.algo.tied_to_total()
        ]
    part = ResumedPart(
        **this_process(),
        command_line=job.command,
        env_steps=0 if checkpoint is None else checkpoint.state["env_steps"],
        checkpoint=None if checkpoint is None else checkpoint.path.name,
        # A killed process could not record its end.
        interruption="killed" if record.status == RUNNING else record.status,
        error=record.error,
        changed=changed,
        notes=notes,
    )
    return Continuation(record, part, checkpoint)


def only_begins_anew(run_dir: Path) -> bool:
    """True if a run that ended early cannot resume in its folder: it has rows, and never saved anything.

    Raises ConfigError if its record is damaged, or if the run is still in progress.
    """
    if RunRecord.read(run_dir).status == FINISHED or list_checkpoints(run_dir):
        return False
    if not _nothing_kept(run_dir, raw_config(run_dir).get("checkpoint_every")):
        return False
    lock(run_dir)()
    return True


def _nothing_kept(run_dir: Path, checkpoint_every: int | None) -> bool:
    return checkpoint_every == 0 and (run_dir / paths.METRICS).exists()


def _other_variables(recorded: Mapping[str, str], compiles: bool) -> list[str]:
    """A line about environment variables that may change bits and differ from the record."""
    then, now = (influences(each, compiles) for each in (recorded, os.environ))
    other = [
        f"{name}={now.get(name, '(not set)')}, was {then.get(name, '(not set)')}"
        for name in sorted({**then, **now})
        if name not in OF_A_MACHINE and then.get(name) != now.get(name)
    ]
    return [f"other variables than the run began with may change its bits: {few(other)}"] if other else []


def check_same_run(before: Mapping[str, Any], config: Config, name: str) -> dict[str, list[Any]]:
    """Allowed changes between the recorded values `before` and `config`: old and new value by key.

    Raises ConfigError for any other change.
    """
    then, now = dict(leaves(to_dict(complete(before)[0]))), dict(leaves(to_dict(config)))
    compared = [key for key in {**then, **now} if key.partition(".")[0] not in BOOKKEEPING_KEYS]
    pairs: dict[str, list[Any]] = {key: [then.get(key), now.get(key)] for key in compared}
    changed = {key: [old, new] for key, (old, new) in pairs.items() if old != new}
    for key, (old, new) in changed.items():
        if key not in EXECUTION_KEYS and not (key == "total_env_steps" and new > old):
            raise ConfigError(
                f"{key}={new}: {name} was made with {old}; a run resumes with the configuration that it had"
            )
    return changed


def check_changes(
    name: str,
    git: GitRecord,
    versions: Mapping[str, str],
    snapshot: GitRecord,
    accept: bool,
    used: Sequence[UsedCode | None] = (),
    now: UsedCode | None = None,
) -> dict[str, list[str]]:
    """Changes of code and libraries since the run or sweep `name` was recorded, if they may change results.

    `used` is the code that runs of it have used, and `now` that of a resumed process, which is known once it
    has its environments. Raises ConfigError for any change unless `accept` is set. Without git, only code
    outside of it is compared.
    """
    files = _changed_files(git, snapshot, used if now is None else [*used, now])
    present = package_versions(compiles=COMPILER in versions)
    libraries = [
        f"{package} {version} -> {present.get(package)}"
        for package, version in versions.items()
        if package_affects_results(package)
        and version != present.get(package, None if package in COMPUTING_PACKAGES else version)
    ]
    changes = {"code": [*files, *_changed_outside(used, now)], "libraries": libraries}
    changed = {what: names for what, names in changes.items() if names}
    for what, names in changed.items():
        if not accept:
            in_git = names[:1] == files[:1] and git.ref
            how = f" (git worktree add --detach FOLDER {git.ref})" if in_git else ""
            raise ConfigError(
                f"{name} began with other {what}: {few(names)}\n"
                f"bring back what it had{how}, or resume all the same with accept={ACCEPT}"
            )
    return changed


def _changed_files(git: GitRecord, snapshot: GitRecord, used: Sequence[UsedCode | None]) -> list[str]:
    if git.tree is None or snapshot.tree is None:
        return []
    files = files_between(paths.PROJECT, git, snapshot)
    if files is None:
        return ["the recorded code is not in this repository"]
    return [*filter(code_rule(*map(files_of, used)), files)]


def check_used(record: RunRecord, git: GitRecord, accept: bool, used: UsedCode) -> dict[str, list[str]]:
    """Changes that show once the environments of a resumed run are made; as `check_changes`.

    `used` is the code that its process uses by then.
    """
    if record.used is None:
        return {}
    return check_changes("the run", record.git, record.versions, git, accept, [record.used], used)


def _changed_outside(used: Sequence[UsedCode | None], now: UsedCode | None) -> list[str]:
    """Names of code outside of the repository that is not as in any of the runs.

    Before the environments are made, code that is not found does not count: they may change the import path.
    Afterwards, what the process has not used yet is looked up: the run may have used it late.
    """
    digests = dict[str, set[str]]()
    for name, digest in (part for each in used if each is not None for part in each.outside.items()):
        digests.setdefault(name, set()).add(digest)
    seen = now.outside if now else {}
    unseen = UsedCode(outside=dict.fromkeys(digests.keys() - seen.keys(), ""))
    present = digests_now(paths.PROJECT, unseen).outside | seen
    names = sorted({*digests, *present} if now else present)
    return [name for name in names if present.get(name) not in digests.get(name, ())]


def restore(algorithm: Algorithm, checkpoint: Checkpoint) -> int:
    """Continue from a checkpoint, bit for bit; the number of iterations before it."""
    state = checkpoint.state
    check_state(algorithm, state, f"{checkpoint.path}")
    algorithm.load_state_dict(state)
    if (replay := replay_of(algorithm)) is not None:
        added = int(state["added"])
        first = max(0, added - replay.capacity)
        replay.restore(added, load_experience(checkpoint, first, added))
    from runlab.envs.global_rng import restore_global_rng  # imports torch, which `make resume` need not

    restore_global_rng(state["foreign"])
    return int(state["run"]["iterations"])


def cut_back(run_dir: Path, continuation: Continuation) -> list[str]:
    """Remove rows, checkpoints and leftovers after the checkpoint; notes about missing lines before it.

    A crash in the middle loses nothing: the run makes everything after the checkpoint again.
    """
    checkpoint = continuation.checkpoint
    sizes = {} if checkpoint is None else checkpoint.state["run"]["sizes"]
    notes = [
        note for name in (paths.METRICS, paths.TRACE) if (note := _cut(run_dir / name, sizes.get(name, 0)))
    ]
    prune_checkpoints(run_dir, newest=continuation.part.env_steps)
    for leftover in (*run_dir.glob(".*.tmp"), *(run_dir / paths.VIDEOS).glob(".*.part")):
        leftover.unlink()  # of a process that was killed while writing
    return notes


def _cut(file: Path, size: int) -> str:
    """Cut a file back to its size at the checkpoint; a note if lines before it are missing.

    The process may have been killed while lines waited for a full disk. A trace with missing lines is
    renamed, and a new one begins at the checkpoint.
    """
    lacks = f"{file.name} lacks lines up to the checkpoint"
    if not file.exists():
        return lacks if size else ""
    if file.stat().st_size >= size:
        cut_file(file, size)
        return ""
    if file.name == paths.TRACE:
        file.replace(file.with_name(paths.OLD_TRACE))
        return f"{lacks}: a new one begins there, and {paths.OLD_TRACE} keeps the old one"
    cut_file(file, file.read_bytes().rfind(b"\n") + 1)
    return lacks
