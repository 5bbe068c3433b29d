"""`make reproduce`: a recorded run made again from its own code, and compared with its record.

The code comes from the ref of the run, the record from its folder or from the ref. The traces are compared,
byte for byte, and then the rows of metrics without times. A run that ended early is made again up to its end,
which for a killed run is its last whole iteration. A resumed run is compared with an uninterrupted run, since
the two must be identical. The process is ended at the first difference and at the recorded end.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from runlab.analysis import compare
from runlab.analysis.runs import Run, load_run
from runlab.analysis.traces import ITERATION_LINE, RecordedTrace, open_trace
from runlab.config.command_args import argument, new_folder, runs_folder, switch
from runlab.config.loading import complete
from runlab.config.project import as_typed
from runlab.config.texts import few, from_here, nearest
from runlab.errors import REFUSED, ConfigError, in_a_line
from runlab.launch.subprocesses import Children, last_words
from runlab.rerun.recorded_code import RUN, Code, check_versions, recorded_code
from runlab.run import paths
from runlab.run.files import strict_json, to_stderr
from runlab.run.git import changes, snapshot
from runlab.run.git.command import repository
from runlab.run.read import Row, find_run, read_metrics
from runlab.run.record import FAILED, FINISHED, RunRecord

IDENTICAL, DIVERGED, SHORTER = compare.IDENTICAL, compare.DIVERGED, compare.SHORTER
FOLDER = "reproductions"
LOG = "rerun.log"
_LINE_EVERY_S = 10.0  # between two lines of progress


@dataclass(frozen=True, kw_only=True)
class Args:
    """Make a recorded run again from its own code, and compare: run=RUN [keep=FOLDER].

    RUN may also be a ref `refs/runs/...` that was fetched. The recorded code runs with your rights: code that
    is neither of this clone nor in the history of its branch needs `trust=true`. `keep=FOLDER` keeps the run
    that was made again; without it one that diverged is kept below `<runs_dir>/reproductions/`.
    Exit status: 0 identical, 1 diverged or ended earlier, 2 it cannot be made again, 130 or 143 interrupted.
    """

    run: str = argument()
    keep: Path | None = argument(new_folder, None)
    trust: bool = argument(switch, False)
    runs_dir: Path = argument(runs_folder, Path("runs"))
    json: bool = argument(switch, False)


def main(args: Args) -> int:
    """Make the run again, and print the result."""
    result = reproduce(args.run, runs_dir=args.runs_dir, keep=args.keep, trust=args.trust)
    print(strict_json(asdict(result)) if args.json else report(result))
    return 0 if result.verdict == IDENTICAL else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Reproduction:
    """The outcome of `reproduce`, ready for JSON.

    `verdict`: "identical" if traces and metrics are; "diverged" if either differs; "shorter" if the new run
    ended earlier and was equal until then. `kept` is the folder of the new run, if it was kept; `status` is
    the status of the recorded run.
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
    kept: str | None
    seconds: float
    comparison: compare.Comparison


def reproduce(
    text: str,
    *,
    project: Path = paths.PROJECT,
    runs_dir: Path = Path("runs"),
    keep: Path | None = None,
    trust: bool = False,
) -> Reproduction:
    """Make the run that `text` names again and compare.

    `keep` is an empty folder for the new run; without it one that is not identical is kept below `runs_dir`.
    Raises ConfigError if the run cannot be made again, Interrupted after a signal. Leaves nothing else.
    """
    began, children = time.monotonic(), Children()
    with children.listening(), tempfile.TemporaryDirectory(prefix="reproduce-") as name:
        scratch = Path(name).resolve()
        run, run_dir = load_run(_find_recorded(text, project, runs_dir, scratch)), scratch / "run"
        record, trace = run.record, compare.recorded_trace(run)
        recorded = run.rows  # refuses damaged rows before the run is made again
        notes = [*_limits(run, trace), *check_versions(record)]
        with recorded_code(project, record, run.config, run.dir, trust) as code:
            to_stderr(f"runs the code of {run.id}, {code}, with your rights")
            notes += code.missing
            try:
                error = _run_again(run, trace, code, run_dir, children)
            except ConfigError as problem:
                if not code.missing:
                    raise
                cause = str(problem).replace("\n", "; ")
                raise ConfigError(f"{cause}\n{'; '.join(code.missing)}") from None
        # The new run has the recorded code and configuration: switched-off observers are no difference.
        made = replace(RunRecord.read(run_dir), git=record.git)
        made.write(run_dir)
        outside = [set[str]() if used is None else {*used.outside} for used in (made.used, record.used)]
        if elsewhere := sorted(outside[0] - outside[1]):
            notes.append(f"not from the recorded commit, but from elsewhere: {few(elsewhere)}")
        total, finished = trace.reach[0], record.status == FINISHED
        again = replace(open_trace(run_dir).whole(None if finished else total), run=run.id)
        remade = replace(run, dir=Path("made again"), record=made)
        comparison = compare.compare_traces(run, remade, trace, again)
        verdict, headline = comparison.verdict, compare.headline(comparison)
        rows = _without_old_ends(run, recorded, read_metrics(run_dir))
        metrics = _differing_metrics(*rows, finished)
        if verdict == IDENTICAL and metrics:
            verdict, headline = DIVERGED, f"diverged: traces are identical, and metrics are not: {metrics}"
        if not recorded:
            notes.append("no metrics were recorded, so only traces were compared")
        if record.status == FAILED and record.error == made.error:
            notes.append(f"failed in the same way: {made.error}")
            error = None
        elif record.status == FAILED:
            notes.append(f"failed with {record.error}; this time {made.error or 'it went on'}")
        children.check()
        folder = keep
        if verdict != IDENTICAL and keep is None:
            folder = runs_dir / FOLDER / run.id / paths.new_id("again")
        if folder is not None:
            _keep(run_dir, folder)
        return Reproduction(
            run=run.id,
            ref=record.git.ref,
            commit=code.commit,
            status=run.value("status"),
            verdict=verdict,
            headline=headline,
            iterations=min(again.reach[0], total),
            digest=json.loads(again.lines[-1])[-1],
            notes=notes,
            error=None if verdict == IDENTICAL else error,
            kept=None if folder is None else str(folder.absolute()),
            seconds=round(time.monotonic() - began, 1),
            comparison=comparison,
        )


def _run_again(run: Run, trace: RecordedTrace, code: Code, run_dir: Path, children: Children) -> str | None:
    """Run the recorded configuration with the recorded code, without sinks and videos; its error, if any."""
    log, logger = run_dir.with_name(LOG), run.config.get("logger", {})
    if not (isinstance(logger, dict) and isinstance(logger.get("wandb"), dict)):  # every version had both
        raise ConfigError(f"{run.id}: {paths.CONFIG} is damaged: it has no logger.wandb")
    off = ("console", "journal", "tensorboard")  # older code has a journal
    logger = logger | {name: False for name in off if name in logger}
    logger["wandb"] = logger["wandb"] | {"enabled": False}
    logger |= {"sinks": {}} if "sinks" in logger else {}  # older code has no such key
    config = {**run.config, "run_dir": str(run_dir), "video_every": 0, "logger": logger}
    follower = _Follower(run_dir / paths.TRACE, run.dir / paths.TRACE, trace.reach[0])
    status = code.run(RUN, [], config, run_dir, log, children, follower.enough)
    error = last_words(log, status)
    if status == REFUSED:
        raise ConfigError(f"{run.id}: cannot be run here: {error}")
    open_trace(run_dir, f"{run.id} came to no iteration this time: {error}")
    # A run that was asked to end has the status of an interrupted run.
    return error if status not in (0, 128 + signal.SIGTERM) else None


class _Follower:
    """Reads a trace while it is written, and compares it with the recorded one."""

    def __init__(self, again: Path, recorded: Path, iterations: int) -> None:
        self._again, self._recorded, self._iterations = again, recorded.read_bytes(), iterations
        self._read, self._differs, self._printed_s = 0, False, time.monotonic()

    def enough(self) -> bool:
        """True if the new trace differs from the recorded one, or is longer."""
        with contextlib.suppress(FileNotFoundError), self._again.open("rb") as file:  # not written yet
            file.seek(self._read)
            new = file.read()
            self._differs |= self._recorded[self._read : self._read + len(new)] != new
            self._read += len(new)
        if time.monotonic() - self._printed_s >= _LINE_EVERY_S and not self._differs:
            self._printed_s = time.monotonic()
            done = self._recorded[: self._read].count(b"\n" + ITERATION_LINE)
            to_stderr(f"iteration {done:,} of {self._iterations:,}, equal so far")
        return self._differs


def _without_old_ends(run: Run, before: list[Row], again: list[Row]) -> tuple[list[Row], list[Row]]:
    """Rows of both runs, without what only the old ends of a run whose total was raised have.

    An uninterrupted run may log no row at an old end, and its next row then has means over a longer time. If
    it logs one, it may have no evaluation in it.
    """
    made = {row["env_steps"]: row for row in again}
    raised = {part.env_steps for part in run.record.resumed if "total_env_steps" in part.changed}
    ends = raised - made.keys()
    left_out = ends | {min((step for step in made if step > end), default=end) for end in ends}
    old, new = ([row for row in rows if row["env_steps"] not in left_out] for rows in (before, again))
    for i, row in enumerate(old):
        if (step := row["env_steps"]) in raised:
            old[i] = {k: v for k, v in row.items() if k in made[step] or not k.startswith("eval/")}
    return old, new


def _differing_metrics(before: list[Row], again: list[Row], finished: bool) -> str | None:
    """The first difference between the rows of metrics, except for times."""
    if before and finished and len(before) != len(again):
        return f"{len(before)} rows were recorded, and {len(again)} made again"
    for a, b in zip(before, again, strict=False):
        if names := compare.differing_metrics(a, b):
            return f"{few(names)} after {a['env_steps']:,.0f} environment steps"
    return None


def _keep(run_dir: Path, folder: Path) -> None:
    """Move the run's folder, with the output of its process, to `folder`."""
    with in_a_line(f"{folder} cannot be written"):
        shutil.copy(run_dir.with_name(LOG), run_dir)
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(run_dir, folder, dirs_exist_ok=True)


def _find_recorded(text: str, project: Path, runs_dir: Path, scratch: Path) -> Path:
    """The folder of the run that `text` names: a folder, an id or a part of it, or a ref, in this order.

    The files of a ref are written to a folder below `scratch`. Raises ConfigError if there is no such run.
    """
    with contextlib.suppress(ConfigError):
        return find_run(text, runs_dir)
    with repository(project) as git:
        refs = git.line("for-each-ref", "--format=%(refname)", paths.REF_PREFIX)
    ids = [name.removeprefix(paths.REF_PREFIX) for name in refs.splitlines()]
    wanted = text.removeprefix(paths.REF_PREFIX).strip("/")
    matches = [wanted] if wanted in ids else [run for run in ids if wanted in run]
    if len(matches) != 1:
        problem = f"no such run here, as a folder or a ref; {nearest(wanted, ids)}"
        if matches:
            problem = f"in the ids of {len(matches)} refs, the last are {', '.join(matches[-3:])}; "
        raise ConfigError(f"run={text}: {problem}`{snapshot.fetch_command()}` brings runs that were pushed")
    ref, folder = paths.REF_PREFIX + matches[0], scratch / "recorded" / matches[0]
    folder.mkdir(parents=True)
    files = snapshot.read_run_files(project, ref, folder)
    if snapshot.OUTCOME not in files:
        raise ConfigError(
            f"{ref}: does not say how a run ended; give one of the runs of a sweep, and the folder of a run "
            "that was killed"
        )
    files[snapshot.OUTCOME].replace(folder / paths.RECORD)
    record = RunRecord.read(folder)
    if record.id != matches[0]:
        raise ConfigError(f"{ref}: says that it is the run {record.id}, so it is not what a run has written")
    if not changes.holds_code(project, ref, record.git):
        raise ConfigError(
            f"{ref}: does not hold the code that it names, commit {f'{record.git.commit}'[:12]}"
        )
    return folder


def _limits(run: Run, trace: RecordedTrace) -> Iterator[str]:
    """Notes on obstacles to an identical run; ConfigError if no uninterrupted run can equal this one."""
    record = run.record
    for part in record.resumed:
        changed = [str(each) for what in ("code", "libraries") for each in part.changed.get(what, [])]
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
    if record.determinism.level == "fast":
        yield "determinism=fast promises the same distribution of runs and not the same bits"


def report(result: Reproduction) -> str:
    """The text for a terminal, the verdict first."""
    lines = [result.headline, ""]
    lines.append(f"  run     {result.run} ({result.status}), made again in {result.seconds:,.0f} s")
    lines.append(f"  code    {result.ref or 'no ref'}, commit {result.commit[:12]}")
    lines += [f"  note    {note}" for note in result.notes]
    lines += [] if result.error is None else [f"  error   {result.error}"]
    lines += [] if result.kept is None else [f"  kept    {result.kept}"]
    if result.comparison.verdict == DIVERGED:
        lines += ["", "a was recorded, b was made again", "", compare.report(result.comparison)]
        if (recorded := Path(result.comparison.a.run_dir)).exists():  # a run known by its ref has none
            lines += ["", f"closer: {as_typed('compare')} a={from_here(recorded)} b={result.kept} zoom=true"]
    return "\n".join(lines)
