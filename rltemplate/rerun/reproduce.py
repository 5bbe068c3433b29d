"""A recorded run made again from its own code, and compared with what was recorded.

The code is the one that `refs/runs/<id>` holds, laid out in a linked worktree of its own; nothing of the
present package can be imported there. What was recorded comes from the run's folder or, where there is none,
from the ref alone. The run is started by the script of the recorded tree, `scripts/rerun.py`, with the
variables that may change bits as they were.

Compared are the traces, byte for byte, and then the rows of metrics but for times. A run that ended early is
made again as far as it went; one that was interrupted and went on is compared with one straight run, for
these are identical. The process is ended as soon as nothing more can be learned from it.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rltemplate.analysis import compare, traces
from rltemplate.launch.subprocesses import REFUSED, Children, last_words
from rltemplate.rerun.recorded_run import (
    ITERATION_LINE,
    Recorded,
    check_possible,
    copy_iterations,
    digest_after,
    read_recorded,
    timeless,
    timeless_rows,
)
from rltemplate.rerun.rerun_environment import Conditions
from rltemplate.run import paths
from rltemplate.run.continuation import few
from rltemplate.run.git import checkout
from rltemplate.run.git.command import GitError
from rltemplate.run.job import PROJECT
from rltemplate.run.lines import replace_text
from rltemplate.run.record import read_record
from rltemplate.types import ConfigError

IDENTICAL, DIVERGED, SHORTER = compare.IDENTICAL, compare.DIVERGED, compare.SHORTER
FOLDER = "reproductions"
SCRIPT = "scripts/rerun.py"
LOG = "rerun.log"

Say = Callable[[str], None]
# Iterations that were made again, of so many.
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reproduction:
    """What came out.

    `verdict`: "identical" if traces and metrics are; "diverged" if either differs; "shorter" if the run ended
    earlier this time, equal until then. `comparison` is None where only digests could be compared, `metrics`
    are lines about rows that differ, `kept` is the folder of the run that was made again, if it is left.
    `environment` is "present" or "install", `status` how the recorded run had ended.
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
    kept: str | None
    environment: str
    seconds: float
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

    `install` makes an environment from the recorded tree's lock file instead of taking the present one.
    `keep` is a folder for the run that was made again; without it one that diverged is kept below `runs_dir`.
    Raises ConfigError in a line or two if it cannot be made again, and Interrupted after a signal. Leaves
    nothing but what it keeps.
    """
    began = time.monotonic()
    _check_keep(keep)
    children = Children()
    with children.listening(), tempfile.TemporaryDirectory(prefix="reproduce-") as name:
        scratch = Path(name).resolve()
        run_dir = scratch / "run"
        try:
            recorded = read_recorded(text, project, runs_dir, scratch)
            check_possible(recorded)
            with _laid_out(project, recorded, scratch / "tree") as tree:
                conditions = Conditions(
                    recorded, tree, project=project, scratch=scratch, children=children, say=say
                )
                conditions.prepare(install)
                trouble = _run_again(recorded, tree, run_dir, conditions, children, progress)
        except GitError as error:
            children.check()  # Ctrl-C reaches git as well
            raise ConfigError(str(error)) from error
        found = _compared(recorded, run_dir, scratch, trouble)
        children.check()
        kept = None
        if keep is not None or found.verdict != IDENTICAL:
            where = keep or runs_dir.expanduser().absolute() / FOLDER / recorded.id / paths.new_id("again")
            kept = str(_keep(run_dir, where))
        seconds = round(time.monotonic() - began, 1)
        return replace(found, kept=kept, seconds=seconds, environment="install" if install else "present")


def _check_keep(keep: Path | None) -> None:
    """Raise ConfigError unless a run can be kept there."""
    if keep is None or not keep.exists():
        return
    if not keep.is_dir():
        raise ConfigError(f"keep={keep}: is a file; expected a folder")
    if any(keep.iterdir()):
        raise ConfigError(f"keep={keep}: is not empty; a run needs a folder of its own")


# --- The run that is made again --------------------------------------------------------------------------


@contextlib.contextmanager
def _laid_out(project: Path, recorded: Recorded, top: Path) -> Iterator[Path]:
    """The recorded code beside the user's work, as a repository at `top`; the project's folder in it."""
    if checkout.read_file(project, recorded.commit, SCRIPT) is None:
        raise ConfigError(f"{recorded.id}: its code is older than {SCRIPT}, which makes recorded runs again")
    facts = checkout.read_tree(project, recorded.commit)
    if facts.submodules:
        named = few(facts.submodules)
        recorded.notes.append(f"submodules are not checked out: {named}; what needs them fails")
    with checkout.worktree(project, recorded.commit, top):
        yield top / facts.prefix


def _run_again(
    recorded: Recorded,
    tree: Path,
    run_dir: Path,
    conditions: Conditions,
    children: Children,
    progress: Progress,
) -> str | None:
    """Run the recorded configuration with the recorded code; the error with which it ended, if any."""
    follower = _Follower(run_dir / paths.TRACE, recorded, progress)
    words = [f"config={recorded.config_file}", f"run_dir={run_dir}"]
    command = [str(conditions.python), "-P", str(tree / SCRIPT), *words]
    log = run_dir.with_name(LOG)
    code = children.run(command, conditions.environment(), log, cwd=tree, enough=follower.enough)
    follower.enough()  # what was written since it looked last
    error = last_words(log, code)
    if code == REFUSED:
        raise ConfigError(f"{recorded.id}: cannot be run here: {error}")
    if follower.iterations == 0:
        raise ConfigError(f"{recorded.id}: came to no iteration this time: {error}")
    # Asked to end when it had done enough, it ends as one that was interrupted.
    return error if code not in (0, 128 + signal.SIGTERM) else None


class _Follower:
    """Reads a trace while it is written, beside the recorded one, and says when it has seen enough."""

    def __init__(self, trace: Path, recorded: Recorded, progress: Progress) -> None:
        self.iterations = 0
        self.differs = False
        self._trace, self._recorded, self._progress = trace, recorded, progress
        self._read = 0  # bytes of whole lines
        self._place: int | None = None  # in the recorded trace

    def enough(self) -> bool:
        """Look at what is new. True if the rest could tell nothing."""
        try:
            with self._trace.open("rb") as file:
                file.seek(self._read)
                new = file.read()
        except FileNotFoundError:
            return False
        new = new[: new.rfind(b"\n") + 1]
        if new:
            self._take(new)
        return self.differs or (not self._recorded.finished and self.iterations >= self._recorded.iterations)

    def _take(self, new: bytes) -> None:
        self.iterations += sum(line.startswith(ITERATION_LINE) for line in new.split(b"\n"))
        body = new if self._read else new[new.index(b"\n") + 1 :]  # behind the header
        self._read += len(new)
        if self._recorded.trace is not None:
            with self._recorded.trace.open("rb") as file:
                if self._place is None:
                    self._place = len(file.readline())
                file.seek(self._place)
                known = file.read(len(body))
            self._place += len(body)
            # The recorded run may have ended earlier, in an iteration that now comes to its end.
            self.differs |= body[: len(known)] != known
        total = self._recorded.iterations
        self._progress(min(self.iterations, total), total)


# --- What came out ---------------------------------------------------------------------------------------


def _compared(recorded: Recorded, run_dir: Path, scratch: Path, error: str | None) -> Reproduction:
    record = read_record(run_dir)
    again = _as_recorded(recorded, run_dir, record, scratch)
    digest = digest_after(again / paths.TRACE, recorded.iterations - 1)
    with traces.open_trace(again, "") as trace:
        reached = trace.reach
    comparison = None
    if recorded.trace is None:
        verdict, headline = _by_digest(recorded, digest, reached.iterations)
    else:
        comparison = _comparison(recorded, again, scratch)
        verdict, headline = comparison.verdict, compare.headline(comparison)
    metrics: list[str] = []
    if verdict == IDENTICAL:
        metrics = list(_differing_metrics(recorded, run_dir, record))
        headline += "; metrics equal"
    if metrics:
        verdict = DIVERGED
        headline = f"diverged: traces are identical, and metrics are not: {metrics[0]}"
    if recorded.status == "failed" and recorded.record.get("error") == record.get("error"):
        recorded.notes.append(f"failed in the same way: {record.get('error')}")
        error = None
    return Reproduction(
        run=recorded.id,
        ref=recorded.ref,
        commit=recorded.commit,
        status=recorded.status,
        verdict=verdict,
        headline=headline,
        iterations=min(reached.iterations, recorded.iterations),
        env_steps=recorded.env_steps if recorded.env_steps is not None else reached.env_steps,
        digest=digest,
        metrics=metrics,
        notes=list(recorded.notes),
        error=None if verdict == IDENTICAL else error,
        kept=None,
        environment="present",
        seconds=0.0,
        comparison=comparison,
    )


def _as_recorded(recorded: Recorded, run_dir: Path, record: dict[str, Any], scratch: Path) -> Path:
    """The run that was made again as a folder to be compared, no longer than what was recorded.

    It says that its code is the recorded one, and its configuration too: what was switched off for it is no
    difference that anybody would look for. Of its code the run's own folder says so as well.
    """
    record["git"] = recorded.record.get("git") or {}
    replace_text(run_dir / paths.RECORD, [json.dumps(record, indent=2) + "\n"])
    again = scratch / "again" / f"{recorded.id}-again"
    again.mkdir(parents=True)
    shutil.copy(run_dir / paths.RECORD, again / paths.RECORD)
    shutil.copy(recorded.config_file, again / paths.CONFIG)
    most = None if recorded.finished else recorded.iterations
    copy_iterations(run_dir / paths.TRACE, again / paths.TRACE, most)
    return again


def _by_digest(recorded: Recorded, digest: str | None, iterations: int) -> tuple[str, str]:
    """Verdict and headline where no trace was recorded, but what all of it comes to."""
    if digest is None:
        return SHORTER, f"shorter: ended after {iterations:,} of {recorded.iterations:,} iterations"
    if digest != recorded.digest:
        return DIVERGED, f"diverged: the digest is {digest}, and was {recorded.digest}"
    return IDENTICAL, f"identical: {recorded.iterations:,} iterations, by their digest"


def _comparison(recorded: Recorded, again: Path, scratch: Path) -> compare.Comparison:
    assert recorded.trace is not None
    before = scratch / "recorded" / recorded.id
    before.mkdir(parents=True)
    # One straight run gives what one that was interrupted gives.
    (before / paths.RECORD).write_text(json.dumps({**recorded.record, "resumed": []}))
    shutil.copy(recorded.config_file, before / paths.CONFIG)
    (before / paths.TRACE).symlink_to(recorded.trace)
    found = compare.compare_runs(before, again)
    a, b = replace(found.a, run_dir=recorded.place), replace(found.b, run_dir="made again")
    return replace(found, a=a, b=b)


def _differing_metrics(recorded: Recorded, run_dir: Path, record: Mapping[str, Any]) -> Iterator[str]:
    """Lines about what differs first in rows, and in final values, but for times."""
    if recorded.metrics is not None:
        before, again = (timeless_rows(path) for path in (recorded.metrics, run_dir / paths.METRICS))
        if recorded.finished and len(before) != len(again):
            yield f"{len(before)} rows were recorded, and {len(again)} made again"
        a, b = next(((a, b) for a, b in zip(before, again, strict=False) if a != b), ({}, {}))
        if name := _first_difference(a, b):
            steps = a.get("env_steps")
            yield f"{name} after {steps} steps was {a.get(name)}, and is {b.get(name)}"
    if recorded.finished:
        a, b = (timeless(each.get("final_metrics") or {}) for each in (recorded.record, record))
        if name := _first_difference(a, b):
            yield f"{name} was {a.get(name)} at the end, and is {b.get(name)}"


def _first_difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> str | None:
    """The name of the first value that differs, or that only one of them has."""
    return next((name for name in {**a, **b} if name not in a or name not in b or a[name] != b[name]), None)


def _keep(run_dir: Path, where: Path) -> Path:
    """Move the folder of a run, with what its process said, to where the user finds it."""
    try:
        where.parent.mkdir(parents=True, exist_ok=True)
        if where.exists():
            where.rmdir()
        shutil.move(run_dir, where)
        shutil.copy(run_dir.parent / LOG, where / LOG)
    except OSError as error:
        raise ConfigError(f"keep={where}: cannot be written, {error.strerror}") from error
    return where.absolute()


def report(found: Reproduction) -> str:
    """All of it for a terminal, the verdict first."""
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
