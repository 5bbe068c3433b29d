"""A run that is to be made again, read from its folder or, without one, from its ref.

A ref `refs/runs/<id>` holds the code, and beside it configuration, outcome, metrics and trace. A killed run
may have been writing: its last whole iteration is the end that counts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rltemplate.analysis.traces import ITERATION_LINE, Trace, open_trace
from rltemplate.config.command_args import few, nearest
from rltemplate.config.loading import complete
from rltemplate.run import paths
from rltemplate.run.git import snapshot
from rltemplate.run.git.command import repository
from rltemplate.run.lines import RunLock
from rltemplate.run.read import find_run, raw_config
from rltemplate.run.record import FINISHED, RUNNING, RunRecord
from rltemplate.types import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """A recorded run. `folder` has its files, `place` is the user's name of it: the folder or the ref.

    `trace` ends with the last whole iteration. `notes` are sentences about what may prevent an identical run.
    """

    record: RunRecord
    commit: str
    place: Path
    folder: Path
    config: dict[str, Any]
    trace: Trace
    notes: list[str] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """True if the run came to its end, so that the end can be compared too."""
        return self.record.status == FINISHED

    @property
    def status(self) -> str:
        """The status on record; a run that is still "running" there was killed."""
        return "killed" if self.record.status == RUNNING else self.record.status


def read_recorded(text: str, project: Path, runs_dir: Path, scratch: Path) -> RecordedRun:
    """The run that `text` names: a folder, an id or a part of it, or a ref; a folder goes before a ref.

    The files of a ref are written below `scratch`. Raises ConfigError if no single run can make it again.
    """
    if (found := _folder(text, runs_dir)) is None:
        run_id = _find_ref(text, project)
        name, folder = paths.REF_PREFIX + run_id, scratch / run_id
        place, record = Path(name), _from_ref(name, run_id, project, folder)
    else:
        place = folder = found
        record = RunRecord.read(folder)
        if record.status == RUNNING:  # it may still be
            (lock := RunLock(folder)).acquire()
            lock.release()
        if not record.git.commit:
            why = record.git.problem
            raise ConfigError(f"{record.id}: has no snapshot of its code, so it cannot be made again: {why}")
        name = record.git.commit
    commit = snapshot.find_commit(project, name)
    if commit is None:
        fetch = snapshot.fetch_command(record.id)
        raise ConfigError(
            f"{record.id}: its code, commit {name[:12]}, is not in this repository; "
            f"`{fetch}` brings it from the remote that it was pushed to"
        )
    config = raw_config(folder / paths.CONFIG)
    if config.get("trace") in ("off", False):
        raise ConfigError(f"{record.id}: was made with trace=off, so there is nothing to compare with")
    if why := record.left_out.get(paths.TRACE):
        raise ConfigError(f"{record.id}: its trace is too long for its ref ({why}); give the run's folder")
    trace = open_trace(folder, "there is nothing to compare with").whole()
    first = next((line for line in trace.lines if line.startswith(ITERATION_LINE)), None)
    if first is None:
        raise ConfigError(f"{record.id}: ended before its first iteration; there is nothing to compare")
    if not first.startswith(ITERATION_LINE + b"0,"):
        raise ConfigError(f"{record.id}: its trace lacks its beginning, so it cannot be compared")
    if config.get("device") == "auto":  # the device that computed
        config["device"] = "cpu" if trace.digest == "xxh3_64" else "cuda"
    run = RecordedRun(record=record, commit=commit, place=place, folder=folder, config=config, trace=trace)
    run.notes.extend(_limits(run))
    return run


def _folder(text: str, runs_dir: Path) -> Path | None:
    if text.startswith(paths.REF_PREFIX):
        return None
    try:
        return find_run(text, runs_dir)
    except ConfigError:
        if os.sep in text or os.path.lexists(text):
            raise
        return None


def _find_ref(text: str, project: Path) -> str:
    """The id of the run that has a ref here and that `text` names."""
    with repository(project) as git:
        told = git.line("for-each-ref", "--format=%(refname)", paths.REF_PREFIX)
    known = [name.removeprefix(paths.REF_PREFIX) for name in told.splitlines()]
    wanted = text.removeprefix(paths.REF_PREFIX).strip("/")
    matches = [wanted] if wanted in known else [run for run in known if wanted in run]
    if len(matches) == 1:
        return matches[0]
    problem = f"no such run here, as a folder or a ref; {nearest(wanted, known)}"
    if matches:
        problem = f"in the ids of {len(matches)} refs, the last are {', '.join(matches[-3:])}; "
    raise ConfigError(f"run={text}: {problem}`{snapshot.fetch_command()}` brings runs that were pushed")


def _from_ref(ref: str, run_id: str, project: Path, folder: Path) -> RunRecord:
    folder.mkdir()
    files = snapshot.read_run_files(project, ref, folder)
    if paths.CONFIG not in files:
        raise ConfigError(f"{ref}: holds the code of a sweep, and no run; give one of its runs")
    if snapshot.OUTCOME not in files:
        raise ConfigError(f"{ref}: does not say how the run ended; give its folder if it was killed")
    text = files[snapshot.OUTCOME].read_text(encoding="utf-8", errors="replace")
    return replace(RunRecord.parse(text, f"{ref}: its outcome"), id=run_id)


def _limits(run: RecordedRun) -> Iterator[str]:
    """Notes about limits; raises ConfigError for a run that no single run can reproduce."""
    record = run.record
    for part in record.resumed:
        changed = [*part.changed.get("code", []), *part.changed.get("libraries", [])]
        if part.changed.get("total_env_steps") and any(complete(run.config)[0].algo.tied_to_total()):
            changed.append("total_env_steps")
        if changed:
            raise ConfigError(
                f"{record.id}: went on after {part.env_steps:,} steps with another {few(changed)}, "
                "so it is not what any single run gives"
            )
    if record.resumed:
        yield f"was interrupted and resumed ({len(record.resumed)}); compared with one straight run"
    if not run.finished:
        yield f"was {run.status} after {run.trace.reach[0]:,} iterations; made again up to there"
    if skipped := [f"{file['path']} ({file['reason']})" for file in record.git.skipped]:
        yield f"not in the snapshot: {few(skipped)}; what needs that fails or differs"
    if record.git.dirty_submodules:
        yield f"changes inside submodules were not recorded: {few(record.git.dirty_submodules)}"
    if record.determinism.level == "fast":
        yield "determinism=fast promises the same distribution of runs and not the same bits"
