"""Recorded facts of a run that is to be made again: from its folder or, without one, from its ref.

A ref `refs/runs/<id>` holds the code, and beside it configuration, outcome, metrics and trace, unless the
trace is too long. A killed run may have been writing: its last whole iteration is the end that counts.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rltemplate.analysis import traces
from rltemplate.config.command_args import few
from rltemplate.config.loading import load_config
from rltemplate.run import paths
from rltemplate.run.git import checkout
from rltemplate.run.git.command import attempt
from rltemplate.run.lock import RunLock
from rltemplate.run.read import find_run
from rltemplate.run.record import FINISHED, RUNNING, ResumedPart, RunRecord
from rltemplate.types import ConfigError

ITERATION_LINE = b'["iteration",'  # the start of the line that ends an iteration of a trace
_SHOWN = 3  # files of a longer list


@dataclass(slots=True, kw_only=True)
class RecordedRun:
    """A recorded run.

    `record` is `record.json` or, from a ref, the outcome. `trace` is None where the ref has only its digest;
    `env_steps` after which it ended is then unknown. `place` is the folder or the ref, `notes` are sentences
    about what may prevent an identical run.
    """

    id: str
    ref: str | None
    commit: str
    record: RunRecord
    config_file: Path
    trace: Path | None
    metrics: Path | None
    place: str
    iterations: int = 0
    env_steps: int | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def config(self) -> dict[str, Any]:
        """The recorded configuration."""
        return raw_config(self.config_file)

    @property
    def finished(self) -> bool:
        """True if the run came to its end, so that the end can be compared too."""
        return self.record.status == FINISHED

    @property
    def status(self) -> str:
        """The status on record; a run that is still "running" there was killed."""
        return "killed" if self.record.status == RUNNING else self.record.status

    @property
    def digest(self) -> str | None:
        """The digest of everything that was computed, as the record has it."""
        return None if self.record.trace is None else self.record.trace.digest

    @property
    def device(self) -> str:
        """The device that computed, "cpu" or "cuda"; the trace tells what `device=auto` was."""
        if self.trace is not None:
            digest = traces.open_trace(self.trace.parent, "").digest
            return "cpu" if digest == "xxh3_64" else "cuda"
        return "cuda" if self.config.get("device") == "cuda" else "cpu"


def raw_config(path: Path) -> dict[str, Any]:
    """A recorded configuration under the keys of the code that recorded it. Raises ConfigError."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no configuration")
    return values


def read_recorded(text: str, project: Path, runs_dir: Path, scratch: Path) -> RecordedRun:
    """The run that `text` names: a folder, an id or a part of it, or a ref; a folder goes before a ref.

    Files of a ref are written below `scratch`. Raises ConfigError if there is no such run, or it is damaged.
    """
    run_dir = None
    if not text.startswith(paths.REF_PREFIX):
        try:
            run_dir = find_run(text, runs_dir)
        except ConfigError:
            if os.sep in text or os.path.lexists(text):
                raise
    if run_dir is None:
        run = _from_ref(_find_ref(text, project, runs_dir), project, scratch)
    else:
        run = _from_folder(run_dir, project)
    _measure(run, scratch)
    return run


def _find_ref(text: str, project: Path, runs_dir: Path) -> str:
    """The id of the run that has a ref here and that `text` names. Raises GitError or ConfigError."""
    told = attempt(project, lambda git: git.line("for-each-ref", "--format=%(refname)", paths.REF_PREFIX))
    known = {name.removeprefix(paths.REF_PREFIX) for name in told.splitlines()}
    where = "here"
    if not text.startswith(paths.REF_PREFIX):
        where = "here, as a folder or a ref"
        known |= {path.parent.name for path in runs_dir.glob(f"*/*/{paths.RECORD}")}
    wanted = text.removeprefix(paths.REF_PREFIX).strip("/")
    matches = [wanted] if wanted in known else sorted(run for run in known if wanted and wanted in run)
    if len(matches) == 1:
        return matches[0]
    if matches:
        found = f"in the ids of {len(matches)} runs {where}, the last are {', '.join(matches[-3:])}"
    else:
        near = difflib.get_close_matches(wanted[:255], known, n=1)
        newest = f"the newest is {max(known)}" if known else "there are none"
        found = f"no such run {where}; {f'did you mean {near[0]}?' if near else newest}"
    raise ConfigError(
        f"run={text}: {found}\n`{checkout.fetch_command()}` brings the runs that were pushed there"
    )


def _from_folder(run_dir: Path, project: Path) -> RecordedRun:
    record = RunRecord.read(run_dir)
    git = record.git
    if not git.commit:
        raise ConfigError(
            f"{record.id}: has no snapshot of its code, so it cannot be made again: {git.problem}"
        )
    if record.status == RUNNING:
        _check_not_running(run_dir, record.id)
    commit = checkout.find_commit(project, git.commit)
    if commit is None:
        raise ConfigError(
            f"{record.id}: its code, {git.ref} at {git.commit[:12]}, is not in this repository; "
            f"`{checkout.fetch_command(record.id)}` brings it from the remote that it was pushed to"
        )
    trace, metrics = run_dir / paths.TRACE, run_dir / paths.METRICS
    return RecordedRun(
        id=record.id,
        ref=git.ref,
        commit=commit,
        record=record,
        config_file=run_dir / paths.CONFIG,
        trace=trace if trace.exists() else None,
        metrics=metrics if metrics.exists() else None,
        place=str(run_dir),
    )


def _check_not_running(run_dir: Path, run_id: str) -> None:
    lock = RunLock(run_dir)
    try:
        lock.acquire()
    except ConfigError as error:
        raise ConfigError(
            f"{run_id}: is still running, so there is no end to compare with: {error}"
        ) from None
    except OSError:
        pass  # a folder that cannot be written has no run writing to it
    lock.release()


def _from_ref(run_id: str, project: Path, scratch: Path) -> RecordedRun:
    ref = paths.REF_PREFIX + run_id
    commit = checkout.find_commit(project, ref)
    if commit is None:
        raise ConfigError(f"{ref} leads to no commit")
    folder = scratch / run_id
    folder.mkdir()
    files = checkout.read_run_files(project, commit, folder)
    if paths.CONFIG not in files:
        raise ConfigError(f"{ref}: holds the code of a sweep or a proof, and no run; give one of its runs")
    if checkout.OUTCOME not in files:
        raise ConfigError(
            f"{ref}: does not say how the run ended; it is still running, or was killed, and then its folder "
            "has what is left of its trace"
        )
    text = files[checkout.OUTCOME].read_text(encoding="utf-8", errors="replace")
    outcome = RunRecord.parse(text, f"{ref}: its outcome", run_id)
    run = RecordedRun(
        id=run_id,
        ref=ref,
        commit=commit,
        record=outcome,
        config_file=folder / paths.CONFIG,
        trace=files.get(paths.TRACE),
        metrics=files.get(paths.METRICS),
        place=ref,
    )
    if run.trace is None and paths.TRACE in outcome.left_out:
        run.notes.append(f"the ref holds only the digest of the trace ({outcome.left_out[paths.TRACE]})")
    return run


def _measure(run: RecordedRun, scratch: Path) -> None:
    """Set the length of the run; a trace that was never closed is cut behind its last whole iteration."""
    if run.trace is None:
        run.iterations = 0 if run.record.trace is None else run.record.trace.iterations
        return
    if run.record.status == RUNNING:
        whole = scratch / "whole" / paths.TRACE
        whole.parent.mkdir()
        copy_iterations(run.trace, whole)
        run.trace = whole
    run.iterations, run.env_steps = traces.open_trace(run.trace.parent, "").reach
    chains = iteration_chains(run.trace)
    if min(chains, default=0) > 0:
        raise ConfigError(
            f"{run.id}: its trace begins with iteration {min(chains):,}, behind a part that was lost; "
            "only a run that was traced from its start can be compared"
        )
    digest = chains.get(run.iterations - 1)
    if run.digest is not None and digest != run.digest:
        run.notes.append(
            f"the trace ends with the digest {digest}, and the record says {run.digest}: one was changed"
        )


def check_possible(run: RecordedRun) -> None:
    """Raise ConfigError for a run that no single run can reproduce; add notes about limits."""
    record, notes = run.record, run.notes
    if run.config.get("trace") in ("off", False):
        raise ConfigError(f"{run.id}: was made with trace=off, so there is nothing to compare with")
    if run.iterations == 0:
        raise ConfigError(f"{run.id}: ended before its first iteration; there is nothing to compare")
    for part in record.resumed:
        _check_same_run(run, part)
    if record.resumed:
        times = "once" if len(record.resumed) == 1 else f"{len(record.resumed)} times"
        notes.append(f"was interrupted and went on {times}; it is compared with one straight run")
    if not run.finished:
        notes.append(f"was {run.status} after {run.iterations:,} iterations, and is made again up to there")
    git = record.git
    if git.skipped:
        named = ", ".join(f"{file['path']} ({file['reason']})" for file in git.skipped[:_SHOWN])
        more = f" and {git.skipped_count - _SHOWN} more" if git.skipped_count > _SHOWN else ""
        notes.append(f"not in the snapshot: {named}{more}; what needs that fails or differs")
    if git.dirty_submodules:
        notes.append(f"changes inside submodules were not recorded: {few(git.dirty_submodules)}")
    if record.determinism.level == "fast":
        notes.append("determinism=fast promises the same distribution of runs and not the same bits")


def _check_same_run(run: RecordedRun, part: ResumedPart) -> None:
    """Raise ConfigError if the run was resumed in `part` as no uninterrupted run would have gone on."""
    changed, steps = part.changed, part.env_steps
    for name in ("code", "libraries"):
        if changed.get(name):
            raise ConfigError(
                f"{run.id}: went on with changed {name} after {steps:,} steps ({few(changed[name])}), "
                "so it is not what any single run gives"
            )
    if changed.get("total_env_steps") and any(load_config(run.config_file).algo.tied_to_total()):
        before, after = changed["total_env_steps"]
        raise ConfigError(
            f"{run.id}: went on with total_env_steps={after} instead of {before}, which decides what it "
            "learns, so it is not what any single run gives"
        )


# --- Traces and metrics ----------------------------------------------------------------------------------


def copy_iterations(trace: Path, to: Path, limit: int | None = None) -> None:
    """Copy a trace up to its last whole iteration, or `limit` iterations of it."""
    with trace.open("rb") as file, to.open("wb") as out:
        waiting: list[bytes] = []
        done = 0
        for number, line in enumerate(file):
            if not line.endswith(b"\n") or done == limit:
                break
            waiting.append(line)
            if number == 0 or line.startswith(ITERATION_LINE):
                out.writelines(waiting)
                waiting.clear()
                done += line.startswith(ITERATION_LINE)


def iteration_chains(trace: Path) -> dict[int, str]:
    """By iteration, the digest of everything up to its end."""
    with trace.open("rb") as file:
        ends = (json.loads(line) for line in file if line.startswith(ITERATION_LINE))
        return {int(end[1]): str(end[-1]) for end in ends}


def timeless_rows(path: Path) -> list[dict[str, Any]]:
    """The whole rows of a `metrics.jsonl` without times; none where the run ended before its first row."""
    if not path.exists():
        return []
    rows, lines = [], path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(timeless(json.loads(line)))
        except (ValueError, AttributeError):
            if not line.endswith("\n"):  # the last row of a killed run
                break
            raise ConfigError(f"{path.parent.name}: line {number} of {paths.METRICS} is damaged") from None
    return rows


def timeless(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of metrics without times, which differ between equal runs."""
    return {name: value for name, value in row.items() if not name.startswith(("time/", "wall_time"))}
