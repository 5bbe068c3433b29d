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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from rltemplate.analysis import compare
from rltemplate.launch.subprocesses import REFUSED, Children, last_words
from rltemplate.rerun.recorded_code import Code, check_versions, checked_out, installed
from rltemplate.rerun.recorded_run import ITERATION_LINE, RecordedRun, lay_out, read_recorded
from rltemplate.run import paths
from rltemplate.run.git.command import GitError
from rltemplate.run.job import PROJECT
from rltemplate.run.read import read_metrics
from rltemplate.run.record import FAILED, RunRecord
from rltemplate.types import ConfigError

IDENTICAL, DIVERGED, SHORTER = compare.IDENTICAL, compare.DIVERGED, compare.SHORTER
FOLDER = "reproductions"
LOG = "rerun.log"

Progress = Callable[[int, int], None]  # iterations made again, and all of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Reproduction:
    """The outcome of `reproduce`, ready for JSON.

    `verdict`: "identical" if traces and metrics are; "diverged" if either differs; "shorter" if the new run
    ended earlier and was equal until then. `comparison` is None where only digests could be compared; `kept`
    is the folder of the new run, if it is left; `status` is how the recorded run had ended.
    """

    run: str
    ref: str | None
    commit: str
    status: str
    verdict: str
    headline: str
    iterations: int
    digest: str | None
    notes: list[str]
    error: str | None
    kept: str | None = None
    seconds: float = 0.0
    comparison: compare.Comparison | None


def reproduce(
    text: str,
    *,
    project: Path = PROJECT,
    runs_dir: Path = Path("runs"),
    install: bool = False,
    keep: Path | None = None,
    progress: Progress = lambda done, total: None,
) -> Reproduction:
    """Make the run that `text` names again and compare.

    `install` makes an environment from the recorded lock file instead of taking the present one. `keep` is a
    folder for the new run; without it one that is not identical is kept below `runs_dir`. Raises ConfigError
    if the run cannot be made again, Interrupted after a signal. Leaves nothing but the folder it keeps.
    """
    began, children = time.monotonic(), Children()
    if keep is not None and keep.exists() and any(keep.iterdir()):
        raise ConfigError(f"keep={keep}: is not empty; a run needs a folder of its own")
    with children.listening(), tempfile.TemporaryDirectory(prefix="reproduce-") as name:
        scratch = Path(name).resolve()
        try:
            run = read_recorded(text, project, runs_dir, scratch)
            with checked_out(project, run.commit) as code:
                if (code.project / ".gitmodules").exists():
                    run.notes.append("submodules are not checked out; what needs them fails")
                run.notes.extend(check_versions(code, run.record, install))
                code = installed(code, run.record, children) if install else code
                trouble = _run_again(run, code, scratch / "run", children, progress)
        except GitError as error:
            children.check()  # Ctrl-C reaches git as well
            raise ConfigError(str(error)) from error
        found = _compared(run, scratch / "run", scratch / "again" / run.record.id, trouble)
        children.check()
        kept = None
        if keep is not None or found.verdict != IDENTICAL:
            kept = keep or runs_dir.expanduser() / FOLDER / run.record.id / paths.new_id("again")
            _keep(scratch / "run", kept)
        seconds = round(time.monotonic() - began, 1)
        return replace(found, kept=None if kept is None else str(kept.absolute()), seconds=seconds)


def _run_again(
    run: RecordedRun, code: Code, run_dir: Path, children: Children, progress: Progress
) -> str | None:
    """Run the recorded configuration with the recorded code, unobserved; the error that ended it, if any."""
    config, log = run.config, run_dir.with_name(LOG)
    config["logger"] |= {"console": False, "journal": False, "tensorboard": False}
    config["logger"]["wandb"] |= {"enabled": False}
    config |= {"run_dir": str(run_dir), "video_every": 0}
    follower = _Follower(run_dir / paths.TRACE, run, progress)
    status = code.run("train", [], run.record, config, run_dir, log, children, follower.enough)
    follower.enough()  # the lines since its last look
    error = last_words(log, status)
    if status == REFUSED:
        raise ConfigError(f"{run.record.id}: cannot be run here: {error}")
    if follower.iterations == 0:
        raise ConfigError(f"{run.record.id}: came to no iteration this time: {error}")
    # Asked to end when it had done enough, it ends like an interrupted run.
    return error if status not in (0, 128 + signal.SIGTERM) else None


class _Follower:
    """Reads a trace while it is written, and compares it with the recorded one."""

    def __init__(self, trace: Path, run: RecordedRun, progress: Progress) -> None:
        self.iterations = 0
        self._trace, self._run, self._progress = trace, run, progress
        self._differs, self._read = False, 0

    def enough(self) -> bool:
        """Read the new lines. True if the rest of the run could tell nothing."""
        new = _after(self._trace, self._read)
        if new := new[: new.rfind(b"\n") + 1]:
            known = _after(self._run.folder / paths.TRACE, self._read, len(new))
            # The recorded run may have ended earlier, in an iteration that now comes to its end.
            self._differs |= new[: len(known)] != known
            self._read += len(new)
            self.iterations += new.count(b"\n" + ITERATION_LINE) + new.startswith(ITERATION_LINE)
            total = self._run.length.iterations
            self._progress(min(self.iterations, total), total)
        return self._differs or (not self._run.finished and self.iterations >= self._run.length.iterations)


def _after(path: Path, offset: int, most: int = -1) -> bytes:
    """Bytes of a file from `offset` on; none if there is no such file."""
    if not path.exists():
        return b""
    file: BinaryIO
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(most)


# --- The comparison --------------------------------------------------------------------------------------


def _compared(run: RecordedRun, run_dir: Path, again: Path, error: str | None) -> Reproduction:
    # Its code is the recorded one, and its configuration too: observers that were off are no difference.
    made, recorded = replace(RunRecord.read(run_dir), git=run.record.git), run.length
    made.write(run_dir)
    most = None if run.finished else recorded.iterations
    length = lay_out(again, run_dir, made, run.folder / paths.CONFIG, most)
    comparison = None
    if run.traced:
        comparison = compare.compare_runs(run.folder, again)
        a, b = replace(comparison.a, run_dir=run.place), replace(comparison.b, run_dir="made again")
        comparison = replace(comparison, a=a, b=b)
        verdict, headline = str(comparison.verdict), compare.headline(comparison)
    elif length.iterations != recorded.iterations:
        verdict = SHORTER
        headline = f"shorter: ended after {length.iterations:,} of {recorded.iterations:,} iterations"
    elif length.digest != recorded.digest:
        verdict, headline = DIVERGED, f"diverged: the digest is {length.digest}, and was {recorded.digest}"
    else:
        verdict, headline = IDENTICAL, f"identical: {length.iterations:,} iterations, by their digest"
    if verdict == IDENTICAL:
        metrics = _differing_metrics(run, run_dir, made)
        if metrics is not None:
            verdict, headline = DIVERGED, f"diverged: traces are identical, and metrics are not: {metrics}"
        else:
            headline += "; metrics equal"
    if run.record.status == FAILED and run.record.error == made.error:
        run.notes.append(f"failed in the same way: {made.error}")
        error = None
    return Reproduction(
        run=run.record.id,
        ref=run.record.git.ref,
        commit=run.commit,
        status=run.status,
        verdict=verdict,
        headline=headline,
        iterations=min(length.iterations, recorded.iterations),
        digest=length.digest,
        notes=run.notes,
        error=None if verdict == IDENTICAL else error,
        comparison=comparison,
    )


def _differing_metrics(run: RecordedRun, run_dir: Path, made: RunRecord) -> str | None:
    """The first difference in rows and in final values, without times."""
    if not (run.folder / paths.METRICS).exists():
        return None
    before, again = ([_timeless(row) for row in read_metrics(path)] for path in (run.folder, run_dir))
    if run.finished:
        if len(before) != len(again):
            return f"{len(before)} rows were recorded, and {len(again)} made again"
        before, again = (
            [*rows, _timeless(of.final_metrics)] for rows, of in ((before, run.record), (again, made))
        )
    for a, b in zip(before, again, strict=False):
        for name in {**a, **b}:
            if a.get(name) != b.get(name):
                return f"{name} after {a.get('env_steps')} steps was {a.get(name)}, and is {b.get(name)}"
    return None


def _timeless(row: Mapping[str, Any]) -> dict[str, str]:
    """The values as text, in which NaN equals NaN, without times, which differ between equal runs."""
    return {name: str(value) for name, value in row.items() if not name.startswith(("time/", "wall_time"))}


def _keep(run_dir: Path, folder: Path) -> None:
    """Move the run's folder, with the output of its process, to `folder`."""
    try:
        shutil.copy(run_dir.with_name(LOG), run_dir)
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(run_dir, folder, dirs_exist_ok=True)
    except OSError as error:
        raise ConfigError(f"keep={folder}: cannot be written, {error.strerror}") from error


def report(found: Reproduction) -> str:
    """The text for a terminal, the verdict first."""
    lines = [found.headline, ""]
    lines.append(f"  run     {found.run} ({found.status}), made again in {found.seconds:,.0f} s")
    lines.append(f"  code    {found.ref or 'no ref'}, commit {found.commit[:12]}")
    lines += [f"  note    {note}" for note in found.notes]
    lines += [] if found.error is None else [f"  error   {found.error}"]
    lines += [] if found.kept is None else [f"  kept    {found.kept}"]
    if found.comparison is not None and found.comparison.verdict == DIVERGED:
        lines += ["", "a was recorded, b was made again", "", compare.report(found.comparison)]
        lines += ["", f"closer: make compare a={found.run} b={found.kept} zoom=true"]
    return "\n".join(lines)
