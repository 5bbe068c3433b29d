"""Resume of a run in its folder: the checkpoint, the changes since, and the rows and files beyond it.

A resumed run must equal the run that was never interrupted. The configuration may not change, but for a
larger `total_env_steps`; code and libraries may with `accept=changes`. Another machine, processor or path is
noted in the record.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash
import yaml

from rltemplate.config.algorithms import ALGORITHMS
from rltemplate.config.command_args import few
from rltemplate.config.loading import (
    about_added,
    complete,
    from_dict,
    load_config,
    load_recorded,
    to_dict,
    to_yaml,
)
from rltemplate.config.schema import Config
from rltemplate.determinism.machine import machine_facts, package_versions
from rltemplate.run import paths
from rltemplate.run.checkpoint import Checkpoint, load_experience, newest_checkpoint, prune_checkpoints
from rltemplate.run.git.changes import files_between
from rltemplate.run.git.snapshot import GitRecord
from rltemplate.run.influence import file_matters, package_matters
from rltemplate.run.job import Job
from rltemplate.run.lines import replace_text
from rltemplate.run.lock import RunLock
from rltemplate.run.logger import cut_metrics
from rltemplate.run.read import leaves, read_config, rows_so_far
from rltemplate.run.record import RUNNING, ResumedPart, RunRecord, this_process
from rltemplate.types import (
    BOOKKEEPING_KEYS,
    EXECUTION_KEYS,
    OBSERVER_KEYS,
    Algorithm,
    ConfigError,
    affects_results,
)

ACCEPT = "changes"


@dataclass(slots=True, kw_only=True)
class Continuation:
    """The state of an ended run, and the differences between then and now."""

    record: RunRecord
    checkpoint: Checkpoint | None  # None: start over, for no checkpoint was ever finished
    changed: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    rows: list[dict[str, float]] = field(default_factory=list)  # of metrics.jsonl, after `cut_back`

    @property
    def run_state(self) -> dict[str, Any] | None:
        """The state of the observers; None if the run starts over."""
        return None if self.checkpoint is None else self.checkpoint.state["run"]

    @property
    def env_steps(self) -> int:
        """Environment steps at which the run resumes."""
        return 0 if self.checkpoint is None else int(self.checkpoint.state["env_steps"])

    def part(self) -> ResumedPart:
        """Facts for the record about the part of the run that begins here."""
        ended = self.record.status
        return ResumedPart(
            **this_process(),
            env_steps=self.env_steps,
            checkpoint=None if self.checkpoint is None else self.checkpoint.path.name,
            # A killed process has no time to record it.
            interruption="killed" if ended == RUNNING else ended,
            error=self.record.error,
            interrupted_at=self.record.ended_at,
            changed=self.changed,
            notes=list(self.notes),
        )


def recorded_config(run_dir: Path) -> Config:
    """The configuration of a run in a folder that may be damaged or older than this code.

    Raises ConfigError in a line, also for a record that cannot be read.
    """
    RunRecord.read(run_dir)
    where = f"{run_dir.name}: {paths.CONFIG}"
    if "algo.name" not in dict(leaves(read_config(run_dir))):
        raise ConfigError(f"{where} has no algo.name")
    try:
        return load_config(run_dir / paths.CONFIG)
    except ConfigError as error:
        raise ConfigError(f"{where} does not fit this version of the code: {error}") from error


def take(lock: RunLock, run_dir: Path) -> None:
    """Lock the folder of a run for this process, or raise ConfigError with one line."""
    try:
        lock.acquire()
    except OSError as error:
        raise ConfigError(f"{run_dir} cannot be written: {error.strerror}") from error


def find_continuation(job: Job, snapshot: GitRecord) -> Continuation:
    """The newest whole checkpoint of a job's run, and all that has changed since the run began.

    Raises ConfigError if the run must not resume. Changes nothing.
    """
    run_dir, config, notes = Path(job.run_dir), from_dict(job.config), list[str]()
    record = RunRecord.read(run_dir)
    checkpoint = newest_checkpoint(run_dir, lambda text: notes.append(f"{text}; an older one is taken"))
    if checkpoint is None:
        _check_beginning(run_dir, record, config.checkpoint_every)
        notes.append("no checkpoint was finished, so the run starts again from its beginning")
    elif "run" not in checkpoint.state:
        raise ConfigError(f"{checkpoint.path}: holds what was learned, but not the run around it")
    else:
        check_same_run(checkpoint.config, config, checkpoint.path.name)
    code, libraries = changed_code(record.git, snapshot), changed_libraries(record.versions)
    recorded, added = load_recorded(run_dir / paths.CONFIG)
    if added:
        notes.append(about_added(run_dir.name, added))
    if not job.accept:
        keys = [key for key in added if affects_results(key) and key not in BOOKKEEPING_KEYS]
        changes = {"code": code, "libraries": libraries, "configuration": keys}
        refuse_changes(f"{run_dir.name}: the run", changes, record.git.ref)
    changed: dict[str, Any] = {"code": code, "libraries": libraries, "new_keys": added}
    changed |= _changed_machine(record.machine)
    then, now = dict(leaves(to_dict(recorded))), dict(leaves(to_dict(config)))
    changed |= {key: [then[key], now[key]] for key in EXECUTION_KEYS if then[key] != now[key]}
    before = recorded.total_env_steps if checkpoint is None else checkpoint.config["total_env_steps"]
    if before != config.total_env_steps:
        changed["total_env_steps"] = [before, config.total_env_steps]
        notes += [
            f"{setting}: from here on it follows from total_env_steps={config.total_env_steps}, as in no "
            "uninterrupted run"
            for setting in config.algo.tied_to_total()
        ]
    changed = {key: value for key, value in changed.items() if value}
    return Continuation(record=record, checkpoint=checkpoint, changed=changed, notes=notes)


def _check_beginning(run_dir: Path, record: RunRecord, every: int) -> None:
    """Raise ConfigError unless a run that has no checkpoint may start again in its folder."""
    rows = rows_so_far(run_dir)
    reached = int(rows[-1]["env_steps"]) if rows else 0
    if reached > 0 and (record.status == "finished" or every == 0 or reached >= 2 * every):
        why = "it was told to keep none" if every == 0 else "they are gone"
        raise ConfigError(
            f"{run_dir.name}: has no checkpoint after {reached:,} environment steps, {why}; starting again "
            "would overwrite what it has shown; begin a new run instead"
        )
    # Of the text as it lies there: the code that wrote it may have had other keys.
    recorded = yaml.safe_load((run_dir / paths.CONFIG).read_text(encoding="utf-8"))
    written = [record.config_digest, *(part.config_digest for part in record.resumed)]
    if any(written) and config_digest(recorded) not in written:
        raise ConfigError(f"{run_dir.name}: {paths.CONFIG} was changed since the run began; bring it back")


def config_digest(values: Mapping[str, Any]) -> str:
    """Digest of the values of a nested configuration that affect results, without `total_env_steps`."""
    values = {key: value for key, value in _deciding(values) if key != "total_env_steps"}
    return xxhash.xxh3_64_hexdigest(json.dumps(values, sort_keys=True).encode())


def check_same_run(before: Mapping[str, Any], config: Config, name: str, free: Sequence[str] = ()) -> None:
    """Raise ConfigError unless a checkpoint made with the values `before` fits `config`.

    `free` names root keys that may differ besides bookkeeping and execution keys.
    """
    now = to_dict(config)
    algorithms = [values.get("algo", {}).get("name") for values in (before, now)]
    if algorithms[0] != algorithms[1]:
        known = "" if algorithms[0] in ALGORITHMS else ", which this version does not have"
        raise ConfigError(f"algo={algorithms[1]}: {name} was made by {algorithms[0]}{known}")
    left, right = dict(leaves(before)), dict(leaves(now))
    if right.keys() - left.keys():
        left = dict(leaves(to_dict(complete(before)[0])))
    for key in {**left, **right}:
        if (
            key.partition(".")[0] in (*BOOKKEEPING_KEYS, *free)
            or key in EXECUTION_KEYS
            or left.get(key) == right.get(key)
        ):
            continue
        if key == "total_env_steps" and right[key] > left[key]:
            continue
        raise ConfigError(
            f"{key}={right.get(key)}: {name} was made with {left.get(key)}; a run goes on with the "
            "configuration that it had"
        )


def _deciding(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((key, value) for key, value in leaves(values) if key not in (*BOOKKEEPING_KEYS, *EXECUTION_KEYS))


def changed_code(before: GitRecord, snapshot: GitRecord) -> list[str]:
    """Files that may change what a run computes and are not what they were."""
    if None in (before.tree, snapshot.tree) or before.tree == snapshot.tree:
        return []  # unknown without git
    now = {"tree": snapshot.tree}
    changed = files_between(paths.PROJECT, asdict(before), now)
    if changed is None:
        return ["what it was is not in this repository"]
    return [path for path in changed if file_matters(path)]


def refuse_changes(name: str, changes: Mapping[str, Sequence[str]], ref: str | None) -> None:
    """Raise ConfigError for the first of `changes` since a run or sweep began; `ref` has its code."""
    for what, found in changes.items():
        if found:
            how = f" (git worktree add --detach FOLDER {ref})" if what == "code" and ref else ""
            raise ConfigError(
                f"{name} began with other {what}: {few(found)}\n"
                f"bring back what it had{how}, or go on all the same with accept={ACCEPT}"
            )


def changed_libraries(before: Mapping[str, str]) -> list[str]:
    """Packages that may compute and are not of the version recorded in `before`, with both versions."""
    now = package_versions()
    return [
        f"{name} {version} -> {now.get(name)}"
        for name, version in before.items()
        if package_matters(name) and version != now.get(name)
    ]


def _changed_machine(before: Mapping[str, Any]) -> dict[str, Any]:
    now = machine_facts(with_gpus=False)
    named = ("cpu", "python", "libc") if before else ()
    return {key: [before.get(key), now[key]] for key in named if before.get(key) != now[key]}


def restore(algorithm: Algorithm, config: Config, checkpoint: Checkpoint) -> int:
    """Continue from a checkpoint, bit for bit; the number of iterations that had ended there.

    Observers may be configured otherwise than in the run that made it.
    """
    state = checkpoint.state
    check_same_run(checkpoint.config, config, checkpoint.path.name, OBSERVER_KEYS)
    algorithm.load_state_dict(state)
    if algorithm.replay is not None:
        added = int(state["added"])
        first = max(0, added - algorithm.replay.capacity)
        algorithm.replay.restore(added, load_experience(checkpoint, first, added))
    from rltemplate.envs.global_rng import restore_global_rng  # imports torch, which `make resume` need not

    restore_global_rng(state["foreign"])
    return int(state["run"]["iterations"])


def cut_back(run_dir: Path, config: Config, continuation: Continuation) -> None:
    """Remove rows, checkpoints and leftovers beyond the checkpoint, which are made again.

    A run that dies in the middle of this loses nothing: all that is removed follows from the checkpoint.
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
    prune_checkpoints(run_dir, newest=limit)
    for leftover in (*run_dir.glob(".*.tmp"), *(run_dir / paths.VIDEOS).glob(".*.part")):
        leftover.unlink()  # of writers that were killed
