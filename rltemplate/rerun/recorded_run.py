"""A run that is to be made again, found as a folder or, without one, as a ref.

A ref `refs/runs/<id>` holds the code, and beside it configuration, outcome, metrics and trace. A killed run
may have been writing: its last whole iteration is the end that counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rltemplate.analysis.runs import Run, load_run
from rltemplate.analysis.traces import Trace, open_trace
from rltemplate.config.command_args import few, nearest
from rltemplate.config.loading import complete
from rltemplate.run import paths
from rltemplate.run.git import snapshot
from rltemplate.run.git.command import repository
from rltemplate.run.read import find_run
from rltemplate.run.record import FINISHED
from rltemplate.types import ConfigError


def find_recorded(text: str, project: Path, runs_dir: Path, scratch: Path) -> Run:
    """The run that `text` names: a folder, an id or a part of it, or a ref; a folder goes before a ref.

    The files of a ref are written to a folder below `scratch`. Raises ConfigError if there is no such run.
    """
    try:
        run_dir = find_run(text, runs_dir)
    except ConfigError:
        run_dir = _folder_of_ref(text, project, scratch)
    return load_run(run_dir)


def _folder_of_ref(text: str, project: Path, scratch: Path) -> Path:
    """A folder with the files that the ref of a run holds."""
    with repository(project) as git:
        told = git.line("for-each-ref", "--format=%(refname)", paths.REF_PREFIX)
    known = [name.removeprefix(paths.REF_PREFIX) for name in told.splitlines()]
    wanted = text.removeprefix(paths.REF_PREFIX).strip("/")
    matches = [wanted] if wanted in known else [run for run in known if wanted in run]
    if len(matches) != 1:
        problem = f"no such run here, as a folder or a ref; {nearest(wanted, known)}"
        if matches:
            problem = f"in the ids of {len(matches)} refs, the last are {', '.join(matches[-3:])}; "
        raise ConfigError(f"run={text}: {problem}`{snapshot.fetch_command()}` brings runs that were pushed")
    ref, folder = paths.REF_PREFIX + matches[0], scratch / matches[0]
    folder.mkdir()
    files = snapshot.read_run_files(project, ref, folder)
    if snapshot.OUTCOME not in files:
        raise ConfigError(
            f"{ref}: does not say how a run ended; give one of the runs of a sweep, and the folder of a run "
            "that was killed"
        )
    return files[snapshot.OUTCOME].replace(folder / paths.RECORD).parent


def recorded_trace(run: Run) -> Trace:
    """The whole iterations of a run's trace; ConfigError if it cannot be compared with another one."""
    missing = f"it was made with trace={run.config.get('trace')}"
    if why := run.record.left_out.get(paths.TRACE):
        missing = f"it is too long for the run's ref ({why}); give the run's folder"
    trace = open_trace(run.dir, missing)
    if next(trace.iterations).index != 0:
        raise ConfigError(f"{run.id}: its trace has no first iteration, so it cannot be compared")
    return trace


def limits(run: Run, trace: Trace) -> Iterator[str]:
    """Notes about what may prevent an identical run; ConfigError if no single run can give this one."""
    record = run.record
    for part in record.resumed:
        changed = [*part.changed.get("code", []), *part.changed.get("libraries", [])]
        if part.changed.get("total_env_steps") and any(complete(run.config)[0].algo.tied_to_total()):
            changed.append("total_env_steps")
        if changed:
            raise ConfigError(
                f"{run.id}: went on after {part.env_steps:,} steps with another {few(changed)}, "
                "so it is not what any single run gives"
            )
    if record.resumed:
        yield f"was interrupted and resumed ({len(record.resumed)}); compared with one straight run"
    if record.status != FINISHED:
        yield f"was {run.value('status')} after {trace.reach[0]:,} iterations; made again up to there"
    if skipped := [f"{file['path']} ({file['reason']})" for file in record.git.skipped]:
        yield f"not in the snapshot: {few(skipped)}; what needs that fails or differs"
    if record.git.dirty_submodules:
        yield f"changes inside submodules were not recorded: {few(record.git.dirty_submodules)}"
    if record.determinism.level == "fast":
        yield "determinism=fast promises the same distribution of runs and not the same bits"
