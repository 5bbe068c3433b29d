"""A recorded run made again from its own code, and compared with what was recorded.

The code comes from the ref of the run, the recorded facts from its folder or from the ref alone. Compared are
the traces, byte for byte, then the rows of metrics without times. A run that ended early is made again as far
as it went; an interrupted and resumed run is compared with one straight run, since these are identical. The
process is ended as soon as the rest can tell nothing more.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rltemplate.analysis import compare, traces
from rltemplate.config.command_args import few
from rltemplate.launch.subprocesses import REFUSED, Children, last_words
from rltemplate.rerun.recorded_code import CodeTree, checked_out, with_packages
from rltemplate.rerun.recorded_run import (
    ITERATION_LINE,
    RecordedRun,
    check_possible,
    copy_iterations,
    iteration_chains,
    read_recorded,
    timeless,
    timeless_rows,
)
from rltemplate.run import paths
from rltemplate.run.git import checkout
from rltemplate.run.git.command import GitError
from rltemplate.run.job import PROJECT
from rltemplate.run.record import FAILED, RunRecord
from rltemplate.types import ConfigError

IDENTICAL, DIVERGED, SHORTER = compare.IDENTICAL, compare.DIVERGED, compare.SHORTER
FOLDER = "reproductions"
LOG = "rerun.log"

Say = Callable[[str], None]
Progress = Callable[[int, int], None]  # iterations made again, and all of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Reproduction:
    """The outcome of `reproduce`, ready for JSON.

    `verdict`: "identical" if traces and metrics are; "diverged" if either differs; "shorter" if the new run
    ended earlier and was equal until then. `comparison` is None where only digests could be compared;
    `metrics` are lines about rows that differ; `kept` is the folder of the new run, if it is left;
    `environment` is "present" or "install"; `status` is how the recorded run had ended.
    """

    run: str
    ref: str | None
    commit: str
    status: str
    verdict: str
    headline: str
    iterations: int
    env_steps: int | None
    digest: str | None
    metrics: list[str]
    notes: list[str]
    error: str | None
    kept: str | None = None
    environment: str = "present"
    seconds: float = 0.0
    comparison: compare.Comparison | None

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)


def reproduce(
    text: str,
    *,
    project: Path = PROJECT,
    runs_dir: Path = Path("runs"),
    install: bool = False,
    keep: Path | None = None,
    say: Say = print,
    progress: Progress = lambda done, total: None,
) -> Reproduction:
    """Make the run that `text` names again and compare.

    `install` makes an environment from the recorded lock file instead of taking the present one. `keep` is a
    folder for the new run; without it one that is not identical is kept below `runs_dir`. Raises ConfigError
    if the run cannot be made again, Interrupted after a signal. Leaves nothing but the folder it keeps.
    """
    began = time.monotonic()
    if keep is not None and keep.exists():
        if not keep.is_dir():
            raise ConfigError(f"keep={keep}: is a file; expected a folder")
        if any(keep.iterdir()):
            raise ConfigError(f"keep={keep}: is not empty; a run needs a folder of its own")
    children = Children()
    with children.listening(), tempfile.TemporaryDirectory(prefix="reproduce-") as name:
        scratch = Path(name).resolve()
        try:
            run = read_recorded(text, project, runs_dir, scratch)
            check_possible(run)
            if submodules := checkout.submodules(project, run.commit):
                run.notes.append(f"submodules are not checked out: {few(submodules)}; what needs them fails")
            with checked_out(project, run.commit) as tree:
                tree = with_packages(tree, run, project, children, install, say)
                trouble = _run_again(run, tree, scratch / "run", children, progress)
        except GitError as error:
            children.check()  # Ctrl-C reaches git as well
            raise ConfigError(str(error)) from error
        found = _compared(run, scratch / "run", scratch, trouble)
        children.check()
        kept = None
        if keep is not None or found.verdict != IDENTICAL:
            again = runs_dir.expanduser().absolute() / FOLDER / run.id / paths.new_id("again")
            kept = str(_keep(scratch / "run", keep or again))
        seconds = round(time.monotonic() - began, 1)
        return replace(found, kept=kept, seconds=seconds, environment="install" if install else "present")


# --- The run that is made again --------------------------------------------------------------------------


def _run_again(
    run: RecordedRun, tree: CodeTree, run_dir: Path, children: Children, progress: Progress
) -> str | None:
    """Run the recorded configuration with the recorded code, unobserved; the error that ended it, if any."""
    config = run.config
    config["logger"] |= {"console": False, "journal": False, "tensorboard": False}
    config["logger"]["wandb"] |= {"enabled": False}
    config |= {"run_dir": str(run_dir), "video_every": 0}
    # `auto` was the CPU, so it must be here, too.
    device = run.device if config.get("device") == "auto" else ""
    environment = tree.environment(run.record, config, run_dir, device)
    follower = _Follower(run_dir / paths.TRACE, run, progress)
    command = [str(tree.python), "-P", "-m", tree.training_module]
    log = run_dir.with_name(LOG)
    status = children.run(command, environment, log, cwd=tree.project, enough=follower.enough)
    follower.enough()  # the lines since its last look
    error = last_words(log, status)
    if status == REFUSED:
        raise ConfigError(f"{run.id}: cannot be run here: {error}")
    if follower.iterations == 0:
        raise ConfigError(f"{run.id}: came to no iteration this time: {error}")
    # Asked to end when it had done enough, it ends like an interrupted run.
    return error if status not in (0, 128 + signal.SIGTERM) else None


class _Follower:
    """Reads a trace while it is written, and compares it with the recorded one."""

    def __init__(self, trace: Path, run: RecordedRun, progress: Progress) -> None:
        self.iterations = 0
        self.differs = False
        self._trace, self._run, self._progress = trace, run, progress
        self._read = 0  # bytes of whole lines
        self._recorded_read = 0

    def enough(self) -> bool:
        """Read the new lines. True if the rest of the run could tell nothing."""
        try:
            with self._trace.open("rb") as file:
                file.seek(self._read)
                new = file.read()
        except FileNotFoundError:
            return False
        if new := new[: new.rfind(b"\n") + 1]:
            self._compare(new)
        return self.differs or (not self._run.finished and self.iterations >= self._run.iterations)

    def _compare(self, new: bytes) -> None:
        self.iterations += sum(line.startswith(ITERATION_LINE) for line in new.split(b"\n"))
        body = new if self._read else new[new.index(b"\n") + 1 :]  # behind the header
        self._read += len(new)
        if self._run.trace is not None:
            with self._run.trace.open("rb") as file:
                self._recorded_read = self._recorded_read or len(file.readline())
                file.seek(self._recorded_read)
                known = file.read(len(body))
            self._recorded_read += len(body)
            # The recorded run may have ended earlier, in an iteration that now comes to its end.
            self.differs |= body[: len(known)] != known
        self._progress(min(self.iterations, self._run.iterations), self._run.iterations)


# --- The comparison --------------------------------------------------------------------------------------


def _compared(run: RecordedRun, run_dir: Path, scratch: Path, error: str | None) -> Reproduction:
    # Its code is the recorded one, and its configuration too: observers that were off are no difference.
    record = replace(RunRecord.read(run_dir), git=run.record.git)
    record.write(run_dir)
    again = _folder(scratch / "again" / f"{run.id}-again", record, run.config_file)
    copy_iterations(run_dir / paths.TRACE, again / paths.TRACE, None if run.finished else run.iterations)
    digest = iteration_chains(again / paths.TRACE).get(run.iterations - 1)
    reached = traces.open_trace(again, "").reach
    comparison = None
    if run.trace is None:
        verdict, headline = _by_digest(run, digest, reached.iterations)
    else:
        # One straight run gives what an interrupted one gives.
        recorded = _folder(scratch / "recorded" / run.id, replace(run.record, resumed=[]), run.config_file)
        (recorded / paths.TRACE).symlink_to(run.trace)
        comparison = compare.compare_runs(recorded, again)
        a, b = replace(comparison.a, run_dir=run.place), replace(comparison.b, run_dir="made again")
        comparison = replace(comparison, a=a, b=b)
        verdict, headline = comparison.verdict, compare.headline(comparison)
    metrics: list[str] = []
    if verdict == IDENTICAL:
        metrics = list(_differing_metrics(run, run_dir, record))
        headline += "; metrics equal"
    if metrics:
        verdict = DIVERGED
        headline = f"diverged: traces are identical, and metrics are not: {metrics[0]}"
    if run.status == FAILED and run.record.error == record.error:
        run.notes.append(f"failed in the same way: {record.error}")
        error = None
    return Reproduction(
        run=run.id,
        ref=run.ref,
        commit=run.commit,
        status=run.status,
        verdict=verdict,
        headline=headline,
        iterations=min(reached.iterations, run.iterations),
        env_steps=run.env_steps if run.env_steps is not None else reached.env_steps,
        digest=digest,
        metrics=metrics,
        notes=run.notes,
        error=None if verdict == IDENTICAL else error,
        comparison=comparison,
    )


def _folder(folder: Path, record: RunRecord, config: Path) -> Path:
    """A run folder that can be compared, still without its trace."""
    folder.mkdir(parents=True)
    record.write(folder)
    shutil.copy(config, folder / paths.CONFIG)
    return folder


def _by_digest(run: RecordedRun, digest: str | None, iterations: int) -> tuple[str, str]:
    """Verdict and headline where only the digest of the trace was recorded."""
    if digest is None:
        return SHORTER, f"shorter: ended after {iterations:,} of {run.iterations:,} iterations"
    if digest != run.digest:
        return DIVERGED, f"diverged: the digest is {digest}, and was {run.digest}"
    return IDENTICAL, f"identical: {run.iterations:,} iterations, by their digest"


def _differing_metrics(run: RecordedRun, run_dir: Path, record: RunRecord) -> Iterator[str]:
    """Lines about the first differences in rows and in final values, without times."""
    if run.metrics is not None:
        before, again = (timeless_rows(path) for path in (run.metrics, run_dir / paths.METRICS))
        if run.finished and len(before) != len(again):
            yield f"{len(before)} rows were recorded, and {len(again)} made again"
        a, b = next(((a, b) for a, b in zip(before, again, strict=False) if a != b), ({}, {}))
        if name := _first_difference(a, b):
            yield f"{name} after {a.get('env_steps')} steps was {a.get(name)}, and is {b.get(name)}"
    if run.finished:
        a, b = timeless(run.record.final_metrics), timeless(record.final_metrics)
        if name := _first_difference(a, b):
            yield f"{name} was {a.get(name)} at the end, and is {b.get(name)}"


def _first_difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> str | None:
    """The name of the first value that differs or is missing on one side."""
    return next((name for name in {**a, **b} if name not in a or name not in b or a[name] != b[name]), None)


def _keep(run_dir: Path, folder: Path) -> Path:
    """Move the run's folder, with the output of its process, to `folder`."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if folder.exists():
            folder.rmdir()
        shutil.move(run_dir, folder)
        shutil.copy(run_dir.parent / LOG, folder / LOG)
    except OSError as error:
        raise ConfigError(f"keep={folder}: cannot be written, {error.strerror}") from error
    return folder.absolute()


def report(found: Reproduction) -> str:
    """The text for a terminal, the verdict first."""
    lines = [found.headline, ""]
    lines.append(f"  run     {found.run} ({found.status})")
    lines.append(f"  code    {found.ref or 'no ref'}, commit {found.commit[:12]}")
    lines.append(f"  took    {found.seconds:,.0f} s with the {found.environment} environment")
    lines += [f"  note    {note}" for note in found.notes]
    if found.error is not None:
        lines.append(f"  error   {found.error}")
    lines += [f"  metrics {line}" for line in found.metrics]
    if found.kept is not None:
        lines.append(f"  kept    {found.kept}")
    if found.comparison is not None and found.comparison.verdict == DIVERGED:
        lines += ["", "a was recorded, b was made again", "", compare.report(found.comparison)]
        if found.kept is not None:
            lines += ["", f"closer: make compare a={found.run} b={found.kept} zoom=true"]
    return "\n".join(lines)
