"""A run that ended early goes on in its folder: from where, what may have changed since, and what is cut off.

A run that goes on must be the run that was never interrupted. So nothing that decides its bits may change
unless it is said: the configuration never (only `total_env_steps` may grow), code and libraries with
`accept=changes`. Another machine, processor or path is noted in the record.

Runs that were trained together go on together, for which seeds share a batch may decide last bits. A
checkpoint names the seeds that were going when it was written. The group goes on from the newest one that all
of these have, whole: where writing it was cut off, from the one before. A run that had failed by then stays
as it is, and one that failed later fails again in its place. A run that has finished is not touched unless
there is more to do.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import xxhash
import yaml

from rltemplate.algos import ALGORITHMS
from rltemplate.analysis.run_files import leaves, read_config, value_of
from rltemplate.config import Config, Level, check, from_dict, load_config, to_dict, to_yaml
from rltemplate.launch import Group, Job
from rltemplate.recorded_keys import with_present_keys
from rltemplate.run import paths
from rltemplate.run.changes import files_between
from rltemplate.run.checkpoint import (
    Checkpoint,
    Damaged,
    forget_after,
    list_checkpoints,
    load_checkpoint,
    steps_of,
)
from rltemplate.run.influence import file_matters, package_matters
from rltemplate.run.lines import replace_text
from rltemplate.run.lock import RunLock
from rltemplate.run.logger import cut_metrics
from rltemplate.run.machine import machine_facts, package_versions
from rltemplate.run.record import RUNNING, read_record
from rltemplate.run.sinks import rows_so_far
from rltemplate.run.snapshot import GitRecord, Snapshot
from rltemplate.types import ASIDE, MEANS, ConfigError

ACCEPT = "changes"


class GroupEnded(ConfigError):
    """All runs of a group have ended, and some of them failed: together they cannot go on."""


@dataclass(slots=True, kw_only=True)
class Continuation:
    """What is left of a run, and what is different now."""

    record: dict[str, Any]
    checkpoint: Checkpoint | None  # None: start over, for no checkpoint was ever finished
    changed: dict[str, Any]
    together: dict[str, Any] | None = (
        None  # what the record is to say of the group from now on, if not the same
    )
    notes: list[str] = field(default_factory=list)
    rows: list[dict[str, float]] = field(default_factory=list)  # of metrics.jsonl, after `cut_back`

    @property
    def run_state(self) -> dict[str, Any] | None:
        """Where the observers of the run stood."""
        return None if self.checkpoint is None else self.checkpoint.state["run"]

    @property
    def env_steps(self) -> int:
        """From where the run goes on."""
        return 0 if self.checkpoint is None else int(self.checkpoint.state["env_steps"])

    def facts(self) -> dict[str, Any]:
        """What the record says about this part of the run."""
        ended = self.record["status"]
        return {
            "env_steps": self.env_steps,
            "checkpoint": None if self.checkpoint is None else self.checkpoint.path.name,
            # Whoever is killed has no time to say so.
            "interruption": "killed" if ended == RUNNING else ended,
            "error": self.record.get("error"),
            "interrupted_at": self.record.get("ended_at"),
            "changed": self.changed,
            "notes": list(self.notes),
        }


def recorded_config(run_dir: Path) -> Config:
    """The configuration of a run in a folder that may be damaged or older than this code.

    Raises ConfigError in a line, also for a record that cannot be read.
    """
    read_record(run_dir)
    where = f"{run_dir.name}: {paths.CONFIG}"
    value_of(read_config(run_dir)[1], "algo.name", where)
    try:
        return load_config(run_dir / paths.CONFIG)
    except ConfigError as error:
        raise ConfigError(f"{where} does not fit this version of the code: {error}") from error


def resume_job(
    run_dir: Path,
    command: Sequence[str],
    total_env_steps: int | None = None,
    accept: bool = False,
    alone: bool = False,
    num_workers: int | None = None,
) -> Job | None:
    """The job that goes on with the run of a folder; None if it has finished and no more is wanted.

    With the run go those that were trained together with it, unless `alone` says that it leaves them.
    Raises ConfigError in a line for whatever can be known before anything starts. Changes nothing.
    """
    record, config = read_record(run_dir), recorded_config(run_dir)
    for key in ("id", "status"):
        value_of(record, key, f"{run_dir.name}: {paths.RECORD}")
    together = facts_of_group(record)
    if alone and together is None:
        raise ConfigError(f"alone=true: {run_dir.name} was not trained together with others; leave it out")
    recorded = config.total_env_steps
    if total_env_steps is not None:
        if total_env_steps < config.total_env_steps:
            raise ConfigError(
                f"total_env_steps={total_env_steps}: can only grow, and the run has {config.total_env_steps}"
            )
        config = replace(config, total_env_steps=total_env_steps)
    if num_workers is not None:
        config = replace(config, env=replace(config.env, num_workers=num_workers))
        check(config)
    job = Job(
        config=to_dict(config),
        run_id=record["id"],
        run_dir=str(run_dir.absolute()),
        command=list(command),
        overrides=list(record.get("overrides", [])),
        resume=True,
        accept=accept,
        journal=True,
    )
    ended = total_env_steps in (None, recorded)
    if together is not None and not alone and together["alone_since"] is None:
        return _group_again(job, config, together, ended)
    if record["status"] == "finished" and ended:
        return None
    _check_free([run_dir])
    return job


def facts_of_group(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a record says of the group of its run, None if the run was made alone."""
    together = record.get("together")
    if together is None:
        return None
    for key in ("id", "seeds", "run_ids", "place", "alone_since"):
        value_of(together, key, f"{record.get('id')}: together in {paths.RECORD}")
    found: dict[str, Any] = together
    return found


def went_on_alone(record: Mapping[str, Any]) -> bool:
    """Whether a run that was trained together with others has left them."""
    together = facts_of_group(record)
    return together is not None and together["alone_since"] is not None


def _group_again(job: Job, config: Config, together: Mapping[str, Any], ended: bool) -> Job | None:
    """The job of the whole group that the run of `job` belongs to.

    `ended` says that a run which has finished has nothing more to do.
    """
    own = Path(job.run_dir)
    there = _find_runs(own.parent, together["run_ids"])
    missing = [run_id for run_id in together["run_ids"] if run_id not in there]
    if missing:
        raise ConfigError(
            f"{own.name}: was trained together with {few(missing)}, not to be found in {own.parent}; "
            "bring them back, or go on with this run only, with alone=true"
        )
    run_dirs = [there[run_id] for run_id in together["run_ids"]]
    records = [read_record(run_dir) for run_dir in run_dirs]
    inside = [record for record in records if not went_on_alone(record)]
    statuses = {record.get("status") for record in inside}
    if ended and statuses == {"finished"}:
        return None
    if ended and statuses == {"finished", "failed"}:
        if read_record(own)["status"] == "finished":
            return None
        raise GroupEnded(
            f"{own.name}: failed, and the runs that were trained together with it have finished; "
            "alone=true goes on with it alone"
        )
    _check_free(run_dirs)
    seeds = list(together["seeds"])
    group = Group(
        id=together["id"],
        seeds=seeds,
        run_ids=list(together["run_ids"]),
        run_dirs=[str(run_dir) for run_dir in run_dirs],
    )
    values = to_dict(replace(config, seed=seeds[0], seeds=seeds))
    return replace(job, config=values, run_id=group.id, run_dir=str(own.parent), group=group)


def _find_runs(folder: Path, run_ids: Sequence[str]) -> dict[str, Path]:
    """The folders of these runs in `folder`, by id; a folder may have got another name."""
    found = {name: folder / name for name in run_ids if (folder / name / paths.RECORD).is_file()}
    if len(found) < len(run_ids):
        for path in sorted(folder.glob(f"*/{paths.RECORD}")):
            with contextlib.suppress(ConfigError):
                run_id = str(read_record(path.parent).get("id"))
                if run_id in run_ids:
                    found.setdefault(run_id, path.parent)
    return found


def _check_free(run_dirs: Sequence[Path]) -> None:
    """Raise ConfigError if another process has one of these folders."""
    for run_dir in run_dirs:
        lock = RunLock(run_dir)
        take(lock, run_dir)
        lock.release()


def take(lock: RunLock, run_dir: Path) -> None:
    """Have the folder of a run for this process, or raise ConfigError with one line."""
    try:
        lock.acquire()
    except OSError as error:
        raise ConfigError(f"{run_dir} cannot be written: {error.strerror}") from error


class _Left:
    """What is left of a run in its folder."""

    def __init__(self, job: Job) -> None:
        self.dir = Path(job.run_dir)
        self.config = from_dict(job.config)
        self.accept = job.accept
        self.record = read_record(self.dir)
        value_of(self.record, "git.commit", f"{self.dir.name}: {paths.RECORD}")
        self.together = facts_of_group(self.record)
        self.recorded = load_config(self.dir / paths.CONFIG)

    @property
    def left_group(self) -> bool:
        """Whether it went on without the runs that it was trained together with."""
        return went_on_alone(self.record)

    @property
    def seeds(self) -> list[int]:
        """The seeds with which it began together."""
        return [self.config.seed] if self.together is None or self.left_group else self.together["seeds"]

    @property
    def finished(self) -> bool:
        """Whether it has nothing more to do."""
        return (
            self.record["status"] == "finished"
            and self.recorded.total_env_steps == self.config.total_env_steps
        )


def find_continuations(jobs: Sequence[Job], snapshot: Snapshot) -> dict[int, Continuation]:
    """From where runs go on, by their place in `jobs`, and what is different now; at least one does.

    Raises ConfigError if they must not. Changes nothing.
    """
    left = {place: _Left(job) for place, job in enumerate(jobs)}
    if len(left) > 1:
        left = {place: run for place, run in left.items() if not run.left_group}
    notes: list[str] = []
    checkpoints, before = _newest_shared(left, notes)
    alive = {place: left[place] for place in checkpoints}
    if not checkpoints:
        alive, before = left, next(iter(left.values())).seeds
        for run in alive.values():
            _check_beginning(run.dir, run.record, run.config.checkpoint_every, shared=len(left) > 1)
        notes.append("no checkpoint was finished, so the run starts again from its beginning")
    now = [run.config.seed for run in alive.values()]
    going = {place: run for place, run in alive.items() if not run.finished}
    reached = [
        left[place].config.total_env_steps <= each.state["env_steps"] for place, each in checkpoints.items()
    ]
    if len(going) < len(alive) and not all(reached or [False]):
        ended = [run.dir.name for run in alive.values() if run.finished]
        raise ConfigError(
            f"{few(ended)}: finished, and not all of the group have a whole checkpoint from its end; "
            "alone=true goes on with one that has not"
        )
    if not going:
        raise ConfigError(f"{few([run.dir.name for run in left.values()])}: nothing is left to go on with")
    found = {}
    for place, run in going.items():
        changed, more = _changes_of(run, checkpoints.get(place), snapshot)
        if gone := [seed for seed in before if seed not in now]:
            changed["together"] = [list(before), now]
            more.append(_gone_note(run.config, gone))
        together = None
        if run.together is not None and len(jobs) == 1 and not run.left_group:
            at = 0 if not checkpoints else int(checkpoints[place].state["env_steps"])
            together = {**run.together, "alone_since": at}
        found[place] = Continuation(
            record=run.record,
            checkpoint=checkpoints.get(place),
            changed=changed,
            together=together,
            notes=[*notes, *more],
        )
    return found


def _gone_note(config: Config, gone: Sequence[int]) -> str:
    """What it means that seeds are no longer there."""
    level = config.determinism.level
    named = f"seed{'s' if len(gone) > 1 else ''} {', '.join(map(str, gone))}"
    if level in (Level.invariant, Level.profile):
        return f"goes on without {named}, which at determinism={level.name} changes no bit"
    return (
        f"goes on without {named}, which may change last bits: seeds that are trained together share batches"
    )


def _changes_of(
    run: _Left, checkpoint: Checkpoint | None, snapshot: Snapshot
) -> tuple[dict[str, Any], list[str]]:
    """What is not what it was when a run began, and notes about that. ConfigError unless it may be."""
    record, config = run.record, run.config
    if checkpoint is not None:
        check_same_run(checkpoint.config, config, checkpoint.path.name)
    code, libraries = changed_code(record, snapshot), changed_libraries(record)
    if not run.accept:
        for what, found in (("code", code), ("libraries", libraries)):
            if found:
                raise ConfigError(
                    f"{run.dir.name}: the {what} changed since the run began: {few(found)}\n"
                    f"bring back {how_back(what, record)}, or go on all the same with accept={ACCEPT}"
                )
    changed: dict[str, Any] = {"code": code, "libraries": libraries}
    changed |= _changed_machine(record)
    then, now = dict(leaves(to_dict(run.recorded))), dict(leaves(to_dict(config)))
    changed |= {key: [then[key], now[key]] for key in MEANS if then[key] != now[key]}
    before = run.recorded.total_env_steps if checkpoint is None else checkpoint.config["total_env_steps"]
    notes = []
    if before != config.total_env_steps:
        changed["total_env_steps"] = [before, config.total_env_steps]
        notes = [
            f"{setting}: from here on it follows from total_env_steps={config.total_env_steps}, as in no "
            "uninterrupted run"
            for setting in config.algo.tied_to_total()
        ]
    return {key: value for key, value in changed.items() if value}, notes


def _newest_shared(
    left: Mapping[int, _Left], notes: list[str]
) -> tuple[dict[int, Checkpoint], Sequence[int]]:
    """The newest whole checkpoint that all runs have which were going then, by place, and their seeds.

    Nothing if there is none, for it was never finished. `notes` gets a line about each newer one that is
    damaged. Raises ConfigError if none is whole.
    """
    holders: dict[int, list[int]] = {}  # by environment steps, the places that have a checkpoint from there
    for place, run in left.items():
        for path in list_checkpoints(run.dir):
            holders.setdefault(steps_of(path), []).append(place)
    problems = []
    for env_steps in sorted(holders, reverse=True):
        try:
            found, seeds = _load_shared(left, env_steps, holders[env_steps])
        except Damaged as error:
            problems.append(str(error))
            continue
        if found:
            notes += [f"{problem}; an older one is taken" for problem in problems]
            return found, seeds
    if problems:
        raise ConfigError(f"no checkpoint of {next(iter(left.values())).dir} is whole: {problems[0]}")
    return {}, []


def _load_shared(
    left: Mapping[int, _Left], env_steps: int, holders: Sequence[int]
) -> tuple[dict[int, Checkpoint], Sequence[int]]:
    """The checkpoints from one moment, by place, and the seeds that were going; none if one lacks it."""
    found: dict[int, Checkpoint] = {}
    for place in holders:
        found[place] = each = load_checkpoint(paths.checkpoint_path(left[place].dir, env_steps))
        if "progress" not in each.state or "run" not in each.state:
            raise ConfigError(f"{each.path}: holds what was learned, but not the run around it")
        seeds: Sequence[int] = each.state["run"].get("together", [left[place].config.seed])
        wanted = [place for place, run in left.items() if run.config.seed in seeds]
        if any(place not in holders for place in wanted):
            return {}, seeds
    return found, seeds


def _check_beginning(run_dir: Path, record: Mapping[str, Any], every: int, shared: bool) -> None:
    """Raise ConfigError unless a run that has no checkpoint may start again in its folder.

    `shared`: it has none that those have as well which are trained together with it.
    """
    rows = rows_so_far(run_dir)
    reached = int(rows[-1]["env_steps"]) if rows else 0
    if reached > 0 and (record["status"] == "finished" or every == 0 or reached >= 2 * every):
        why = "it was told to keep none" if every == 0 else "they are gone"
        what = "has no checkpoint"
        if shared and every and list_checkpoints(run_dir):
            what, why = "has no checkpoint that its whole group has", "alone=true goes on with it alone"
        raise ConfigError(
            f"{run_dir.name}: {what} after {reached:,} environment steps, {why}; starting again "
            "would overwrite what it has shown; begin a new run instead"
        )
    # Of the text as it lies there: the code that wrote it may have had other keys.
    recorded = yaml.safe_load((run_dir / paths.CONFIG).read_text(encoding="utf-8"))
    written = [start.get("config_digest") for start in (record, *record.get("resumed", []))]
    if any(written) and config_digest(recorded) not in written:
        raise ConfigError(f"{run_dir.name}: {paths.CONFIG} was changed since the run began; bring it back")


def config_digest(values: Mapping[str, Any]) -> str:
    """Of all values of a configuration (nested) that decide a run, but for how long it is."""
    values = {key: value for key, value in _deciding(values) if key != "total_env_steps"}
    return xxhash.xxh3_64_hexdigest(json.dumps(values, sort_keys=True).encode())


def check_same_run(before: Mapping[str, Any], config: Config, name: str, free: Sequence[str] = ()) -> None:
    """Raise ConfigError unless a checkpoint made with the values `before` fits `config`.

    `free` names root keys that may differ beside those that say where a run lies and by what means.
    """
    before, now = with_present_keys(before), to_dict(config)
    algorithms = [values.get("algo", {}).get("name") for values in (before, now)]
    if algorithms[0] != algorithms[1]:
        known = "" if algorithms[0] in ALGORITHMS else ", which this version does not have"
        raise ConfigError(f"algo={algorithms[1]}: {name} was made by {algorithms[0]}{known}")
    left, right = dict(leaves(before)), dict(leaves(now))
    for key in {**left, **right}:
        if key.partition(".")[0] in (*ASIDE, *free) or key in MEANS or left.get(key) == right.get(key):
            continue
        if key == "total_env_steps" and right[key] > left[key]:
            continue
        raise ConfigError(
            f"{key}={right.get(key)}: {name} was made with {left.get(key)}; a run goes on with the "
            "configuration that it had"
        )


def deciding(config: Config) -> dict[str, Any]:
    """What decides a run, by dotted key: all but where it lies, what it is for and by what means."""
    return dict(_deciding(to_dict(config)))


def _deciding(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((key, value) for key, value in leaves(values) if key not in (*ASIDE, *MEANS))


def changed_code(record: Mapping[str, Any], snapshot: Snapshot) -> list[str]:
    """Files that may change what a run computes and are not what they were."""
    before = GitRecord.from_dict(record["git"]) if record.get("git") else None
    if before is None or None in (before.tree, snapshot.tree) or before.tree == snapshot.tree:
        return []  # without git nobody knows
    now = {"tree": snapshot.tree}
    changed = None if snapshot.top is None else files_between(Path(snapshot.top), asdict(before), now)
    if changed is None:
        return ["what it was is not in this repository"]
    return [path for path in changed if file_matters(path)]


def how_back(what: str, record: Mapping[str, Any]) -> str:
    """What to bring back, code or libraries, so that a run can go on; of code, how."""
    ref = (record.get("git") or {}).get("ref")
    recorded = what == "code" and ref is not None
    return f"what it had (git worktree add --detach FOLDER {ref})" if recorded else "what it had"


def changed_libraries(record: Mapping[str, Any]) -> list[str]:
    """Packages that may compute and are not of the version that a record names, with both versions."""
    before, now = record.get("versions") or {}, package_versions()
    return [
        f"{name} {version} -> {now.get(name)}"
        for name, version in before.items()
        if package_matters(name) and version != now.get(name)
    ]


def _changed_machine(record: Mapping[str, Any]) -> dict[str, Any]:
    before, now = record.get("machine") or {}, machine_facts(with_gpus=False)
    named = ("cpu", "python", "libc") if before else ()
    return {key: [before.get(key), now[key]] for key in named if before.get(key) != now[key]}


def few(names: Sequence[str]) -> str:
    """The first of many names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def cut_back(run_dir: Path, config: Config, continuation: Continuation) -> None:
    """Take from the folder what lies beyond the checkpoint, so that it can be written again.

    Whatever is cut off here follows from what stays: a run that dies in the middle of this loses nothing.
    """
    replace_text(run_dir / paths.CONFIG, [to_yaml(config)])
    state = continuation.run_state
    limit = -1 if state is None else continuation.env_steps
    continuation.rows, damaged = cut_metrics(run_dir / paths.METRICS, limit)
    last = int(continuation.rows[-1]["env_steps"]) if continuation.rows else 0
    if damaged or (state is not None and last < state["logged_steps"]):
        continuation.notes.append(
            f"{paths.METRICS} lacks rows of the time before the checkpoint, which are lost; it goes on"
        )
    forget_after(run_dir, limit)
    for leftover in run_dir.glob(".*.tmp"):  # of writers that were killed
        leftover.unlink()
