"""What was recorded of a run, for those who make it again: from its folder or, without one, from its ref.

A ref `refs/runs/<id>` holds the code, and beside it configuration, outcome, metrics and trace, if this is not
too long. A run may have been killed while it wrote: what counts ends with its last whole iteration.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rltemplate.analysis import traces
from rltemplate.run import paths
from rltemplate.run.continuation import few
from rltemplate.run.git import checkout
from rltemplate.run.git.command import attempt
from rltemplate.run.lock import RunLock
from rltemplate.run.read import find_run, read_config
from rltemplate.run.record import RUNNING, SCHEMA_VERSION, check_alone, read_record
from rltemplate.types import ConfigError

ITERATION_LINE = b'["iteration",'  # how a line of a trace begins that ends an iteration
_SHOWN = 3  # of a longer list so many are named


@dataclass(slots=True, kw_only=True)
class Recorded:
    """What there is of a run that is to be made again.

    `record` is `record.json` or, from a ref, the outcome; `commit` has the code. `trace` ends with a whole
    iteration, the last of `iterations`; None where the ref has only the digest of the trace, and then
    nothing says after how many `env_steps` it ended. `place` is the folder or the ref, for people, and
    `notes` are sentences about what may be in the way.
    """

    id: str
    ref: str | None
    commit: str
    record: dict[str, Any]
    config: dict[str, Any]
    config_file: Path
    trace: Path | None
    metrics: Path | None
    place: str
    iterations: int = 0
    env_steps: int | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Whether it came to its end, so that the end can be compared as well."""
        return self.record.get("status") == "finished"

    @property
    def status(self) -> str:
        """How it ended; whoever is killed has no time to say so."""
        status = self.record.get("status")
        return "killed" if status == RUNNING else str(status)

    @property
    def digest(self) -> str | None:
        """Of everything that was computed, as the record says."""
        facts = self.record.get("trace")
        return facts.get("digest") if isinstance(facts, Mapping) else None

    @property
    def python(self) -> str:
        """The version of Python that it had."""
        return str((self.record.get("machine") or {}).get("python"))

    @property
    def device(self) -> str:
        """Where it computed, "cpu" or "cuda": its trace says what `device=auto` was."""
        if self.trace is not None:
            with traces.open_trace(self.trace.parent, "") as trace:
                return "cuda" if trace.digest.startswith("keyed_sum") else "cpu"
        return "cuda" if self.config.get("device") == "cuda" else "cpu"


def read_recorded(text: str, project: Path, runs_dir: Path, scratch: Path) -> Recorded:
    """What was recorded of the run that `text` names: a folder, an id or a part of it, or a ref.

    A folder goes before a ref. What a ref holds is written below `scratch`. Raises ConfigError if there is
    neither, or it is damaged.
    """
    if text.startswith(paths.REF_PREFIX):
        return _measured(_from_ref(_find_id(text, run_refs(project), "here"), project, scratch), scratch)
    try:
        run_dir = find_run(text, runs_dir)
    except ConfigError:
        if os.sep in text or os.path.lexists(text):
            raise
        run_id = _id_of_ref(text, project, runs_dir)
        return _measured(_from_ref(run_id, project, scratch), scratch)
    return _measured(_from_folder(run_dir, project), scratch)


def _id_of_ref(text: str, project: Path, runs_dir: Path) -> str:
    """The run that `text` names and that has no folder here."""
    # The nearest match to a mistyped id may be a folder, though none is found by the id as it stands.
    folders = {path.parent.name for path in runs_dir.glob(f"*/*/{paths.RECORD}")}
    try:
        return _find_id(text, folders | run_refs(project), "here, as a folder or a ref")
    except ConfigError as error:
        raise ConfigError(
            f"{error}\n`{checkout.fetch_command()}` brings the runs that were pushed there"
        ) from None


def run_refs(project: Path) -> set[str]:
    """Ids of the runs that this repository has a ref of. Raises GitError."""
    told = attempt(project, lambda git: git.line("for-each-ref", "--format=%(refname)", paths.REF_PREFIX))
    return {name.removeprefix(paths.REF_PREFIX) for name in told.splitlines()}


def _find_id(text: str, known: Collection[str], where: str) -> str:
    """The run among `known` that `text` names: an id, a unique part of one or a ref. ConfigError if none."""
    wanted = text.removeprefix(paths.REF_PREFIX).strip("/")
    if wanted in known:
        return wanted
    matches = [run for run in sorted(known) if wanted and wanted in run]
    if len(matches) == 1:
        return matches[0]
    if matches:
        last = ", ".join(matches[-3:])
        raise ConfigError(f"run={text}: in the ids of {len(matches)} runs {where}, the last are {last}")
    near = difflib.get_close_matches(wanted[:255], known, n=1)
    newest = f"the newest is {max(known)}" if known else "there are none"
    hint = f"did you mean {near[0]}?" if near else newest
    raise ConfigError(f"run={text}: no such run {where}; {hint}")


def _from_folder(run_dir: Path, project: Path) -> Recorded:
    record = read_record(run_dir)
    run_id = str(record.get("id", run_dir.name))
    git = record.get("git")
    if not isinstance(git, Mapping) or not git.get("commit"):
        why = git.get("problem") if isinstance(git, Mapping) else None
        raise ConfigError(f"{run_id}: has no snapshot of its code, so it cannot be made again: {why}")
    if record.get("status") == RUNNING:
        _check_nobody_writes(run_dir, run_id)
    commit = checkout.find_commit(project, str(git["commit"]))
    if commit is None:
        raise ConfigError(
            f"{run_id}: its code, {git.get('ref')} at {str(git['commit'])[:12]}, is not in this repository; "
            f"`{checkout.fetch_command(run_id)}` brings it from the remote that it was pushed to"
        )
    trace, metrics = run_dir / paths.TRACE, run_dir / paths.METRICS
    return Recorded(
        id=run_id,
        ref=git.get("ref"),
        commit=commit,
        record=record,
        config=read_config(run_dir)[1],
        config_file=run_dir / paths.CONFIG,
        trace=trace if trace.exists() else None,
        metrics=metrics if metrics.exists() else None,
        place=str(run_dir),
    )


def _check_nobody_writes(run_dir: Path, run_id: str) -> None:
    """Raise ConfigError if a run that says it is running does so, and was not killed."""
    lock = RunLock(run_dir)
    try:
        lock.acquire()
    except ConfigError as error:
        raise ConfigError(
            f"{run_id}: is still running, so there is no end to compare with: {error}"
        ) from None
    except OSError:
        pass  # a folder that nobody can write to is written to by nobody
    lock.release()


def _from_ref(run_id: str, project: Path, scratch: Path) -> Recorded:
    """From the ref alone, as it is after a fetch of `refs/runs/*`."""
    ref = paths.REF_PREFIX + run_id
    commit = checkout.find_commit(project, ref)
    if commit is None:
        raise ConfigError(f"{ref} leads to no commit")
    held = scratch / run_id
    held.mkdir()
    files = checkout.read_tree(project, commit, held).files
    if paths.CONFIG not in files:
        raise ConfigError(f"{ref}: holds the code of a sweep or a proof, and no run; give one of its runs")
    if checkout.OUTCOME not in files:
        raise ConfigError(
            f"{ref}: does not say how the run ended; it is still running, or was killed, and then its folder "
            "has what is left of its trace"
        )
    outcome = _read_outcome(files[checkout.OUTCOME], ref)
    recorded = Recorded(
        id=run_id,
        ref=ref,
        commit=commit,
        record=outcome,
        config=read_config(held)[1],
        config_file=held / paths.CONFIG,
        trace=files.get(paths.TRACE),
        metrics=files.get(paths.METRICS),
        place=ref,
    )
    left_out = outcome.get("left_out") or {}
    if recorded.trace is None and paths.TRACE in left_out:
        recorded.notes.append(f"the ref holds only the digest of the trace ({left_out[paths.TRACE]})")
    return recorded


def _read_outcome(path: Path, ref: str) -> dict[str, Any]:
    try:
        outcome = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        outcome = None
    if not isinstance(outcome, dict):
        raise ConfigError(f"{ref}: the outcome that it holds is damaged")
    if outcome.get("schema") != SCHEMA_VERSION:
        raise ConfigError(f"{ref}: was recorded by another version, without its trace; its folder is needed")
    outcome.setdefault("git", {})
    return outcome


def _measured(recorded: Recorded, scratch: Path) -> Recorded:
    """How far the trace goes, which is cut behind its last whole iteration where nobody closed it."""
    if recorded.trace is None:
        facts = recorded.record.get("trace")
        if isinstance(facts, Mapping):
            recorded.iterations = int(facts.get("iterations", 0))
        return recorded
    if recorded.record.get("status") == RUNNING:
        whole = scratch / "whole"
        whole.mkdir()
        copy_iterations(recorded.trace, whole / paths.TRACE)
        recorded.trace = whole / paths.TRACE
    with traces.open_trace(recorded.trace.parent, "") as trace:
        recorded.iterations, recorded.env_steps = trace.reach
    first, digest = _first_and_last(recorded.trace)
    if first > 0:
        raise ConfigError(
            f"{recorded.id}: its trace begins with iteration {first:,}, behind a part that was lost; "
            "only a run that was traced from its start can be compared"
        )
    if recorded.digest is not None and digest != recorded.digest:
        recorded.notes.append(
            f"the trace ends with the digest {digest}, and the record says {recorded.digest}: one was changed"
        )
    return recorded


# --- What can be made again ------------------------------------------------------------------------------


def check_possible(recorded: Recorded) -> None:
    """Raise ConfigError for what no run can reproduce, and note what may be in its way."""
    record, notes = recorded.record, recorded.notes
    check_alone(record)
    if recorded.config.get("trace") in ("off", False):
        raise ConfigError(f"{recorded.id}: was made with trace=off, so there is nothing to compare with")
    if recorded.iterations == 0:
        raise ConfigError(f"{recorded.id}: ended before its first iteration; there is nothing to compare")
    resumed = record.get("resumed") or []
    for part in resumed:
        _check_same_run(recorded, part)
    if resumed:
        times = "once" if len(resumed) == 1 else f"{len(resumed)} times"
        notes.append(f"was interrupted and went on {times}; it is compared with one straight run")
    if not recorded.finished:
        so_far = f"after {recorded.iterations:,} iterations, and is made again up to there"
        notes.append(f"was {recorded.status} {so_far}")
    git = record.get("git") or {}
    if skipped := git.get("skipped"):
        named = ", ".join(f"{file['path']} ({file['reason']})" for file in skipped[:_SHOWN])
        more = f" and {git['skipped_count'] - _SHOWN} more" if git["skipped_count"] > _SHOWN else ""
        notes.append(f"not in the snapshot: {named}{more}; what needs that fails or differs")
    if dirty := git.get("dirty_submodules"):
        notes.append(f"changes inside submodules were not recorded: {few(dirty)}")
    if (record.get("determinism") or {}).get("level") == "fast":
        notes.append("determinism=fast promises the same distribution of runs and not the same bits")


def _check_same_run(recorded: Recorded, part: Mapping[str, Any]) -> None:
    """Raise ConfigError if the run went on in `part` as no uninterrupted run would have."""
    changed, steps = part.get("changed") or {}, part.get("env_steps", 0)
    for what in ("code", "libraries"):
        if changed.get(what):
            raise ConfigError(
                f"{recorded.id}: went on with changed {what} after {steps:,} steps ({few(changed[what])}), "
                "so it is not what any single run gives"
            )
    if changed.get("total_env_steps") and _tied_to_total(recorded):
        before, after = changed["total_env_steps"]
        raise ConfigError(
            f"{recorded.id}: went on with total_env_steps={after} instead of {before}, which decides what it "
            "learns, so it is not what any single run gives"
        )


def _tied_to_total(recorded: Recorded) -> bool:
    """Whether what the run learned depends on how long it was meant to be."""
    from rltemplate.config.loading import load_config

    return bool(load_config(recorded.config_file).algo.tied_to_total())


# --- Traces and metrics ----------------------------------------------------------------------------------


def copy_iterations(trace: Path, to: Path, most: int | None = None) -> None:
    """Copy a trace up to its last whole iteration, or `most` iterations of it."""
    with trace.open("rb") as file, to.open("wb") as out:
        waiting: list[bytes] = []
        done = 0
        for number, line in enumerate(file):
            if not line.endswith(b"\n"):
                break
            waiting.append(line)
            if number == 0 or line.startswith(ITERATION_LINE):
                out.writelines(waiting)
                waiting.clear()
                done += line.startswith(ITERATION_LINE)
                if most is not None and done >= most:
                    break


def _first_and_last(trace: Path) -> tuple[int, str]:
    """The number of the first iteration of a trace, and the digest of everything in it."""
    first, last = 0, b""
    with trace.open("rb") as file:
        for line in file:
            if line.startswith(ITERATION_LINE):
                if not last:
                    first = int(json.loads(line)[1])
                last = line
    return first, str(json.loads(last)[-1]) if last else ""


def digest_after(trace: Path, iteration: int) -> str | None:
    """The digest of everything up to the end of an iteration; None if the trace does not go so far."""
    wanted = ITERATION_LINE + f"{iteration},".encode()
    with trace.open("rb") as file:
        line = next((line for line in file if line.startswith(wanted)), None)
    return None if line is None else str(json.loads(line)[-1])


def timeless_rows(path: Path) -> list[dict[str, Any]]:
    """The whole rows of a `metrics.jsonl`, without times. Raises ConfigError for a damaged one.

    There is none where the run ended before it came to its first row.
    """
    if not path.exists():
        return []
    rows, lines = [], path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(timeless(json.loads(line)))
        except (ValueError, AttributeError):
            if not line.endswith("\n"):  # the last of a run that was killed
                break
            raise ConfigError(f"{path.parent.name}: line {number} of {paths.METRICS} is damaged") from None
    return rows


def timeless(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of metrics without times, which no two runs share."""
    return {name: value for name, value in row.items() if not name.startswith(("time/", "wall_time"))}
