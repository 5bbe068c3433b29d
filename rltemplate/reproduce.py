"""A recorded run made again from its own code, and compared with what was recorded.

The code is the one that `refs/runs/<id>` holds, laid out in a linked worktree of its own; nothing of the
present package can be imported there. What was recorded comes from the run's folder or, where there is none,
from the ref alone: configuration, outcome, trace and metrics lie in it. The run is started by the script of
the recorded tree, `scripts/rerun.py`, with the variables that may change bits as they were.

Compared are the traces, byte for byte, and then the rows of metrics but for times. A run that ended early is
made again as far as it went; one that was interrupted and went on is compared with one straight run, for
these are identical. The child is ended as soon as nothing more can be learned from it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from rltemplate import launch
from rltemplate.analysis import compare, traces
from rltemplate.analysis.run_files import read_config
from rltemplate.run import checkout, paths, remotes
from rltemplate.run.determinism import INFLUENTIAL
from rltemplate.run.git import GitError
from rltemplate.run.influence import package_matters, presence_matters
from rltemplate.run.lines import replace_text
from rltemplate.run.lock import RunLock
from rltemplate.run.machine import machine_facts
from rltemplate.run.record import RUNNING, SCHEMA_VERSION, read_record
from rltemplate.types import STOP_SIGNALS, ConfigError

IDENTICAL, DIVERGED, SHORTER = compare.IDENTICAL, compare.DIVERGED, compare.SHORTER
FOLDER = "reproductions"
SCRIPT = "scripts/rerun.py"
LOG = "rerun.log"

Say = Callable[[str], None]
# Iterations that were made again, of so many.
Progress = Callable[[int, int], None]

_LOCK_FILE = "requirements.lock"
_SETUP = "scripts/setup.sh"
_ITERATION = b'["iteration",'
_GRACE_S = 8.0  # for a child that is asked to end because the user wants to go
_PATIENCE_S = 120.0  # for one that is to end its iteration
_LOOK_EVERY_S = 0.1
_REFUSED = 2
_SHOWN = 3  # of a longer list so many are named
# Paths and choices of one machine, which another one need not have.
_OF_A_MACHINE = ("LD_PRELOAD", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "MUJOCO_GL")

# What the interpreter of the child says about itself; the argument is its package.
_PROBE = """
import importlib, json, platform, sys
package = importlib.import_module(sys.argv[1])
machine = importlib.import_module(sys.argv[1] + ".run.machine")
found = {"package": package.__file__, "python": platform.python_version()}
found["versions"] = machine.package_versions()
if sys.argv[2] == "cuda":
    import torch
    found["cuda"] = torch.cuda.is_available()
print(json.dumps(found))
"""
# Takes the present project out of the import path, where the .pth file of its environment has put it.
_BAR = """
import os, sys
sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry or os.curdir) not in {barred!r}]
"""


class Interrupted(Exception):
    """A signal ended the reproduction; its child is gone, and all that it had written."""

    def __init__(self, number: int) -> None:
        super().__init__("interrupted, so nothing is known; everything was removed")
        self.number = number


@dataclass(slots=True, kw_only=True)
class Recorded:
    """What there is of a run that is to be made again.

    `record` is `record.json` or, from a ref, the outcome; `trace` ends with a whole iteration, the last of
    `iterations`. None where the ref has only the digest of the trace. `commit` has the code.
    """

    id: str
    ref: str | None
    commit: str
    record: dict[str, Any]
    config: dict[str, Any]
    config_file: Path
    trace: Path | None
    metrics: Path | None
    iterations: int
    env_steps: int | None
    place: str
    notes: list[str] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Whether it came to its end, so that the end can be compared as well."""
        return self.record.get("status") == "finished"

    @property
    def digest(self) -> str | None:
        """Of everything that was computed, as the record says."""
        facts = self.record.get("trace")
        return facts.get("digest") if isinstance(facts, Mapping) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reproduction:
    """What came out.

    `verdict`: "identical" if traces and metrics are; "diverged" if either differs; "shorter" if the run ended
    earlier this time, equal until then. `comparison` is None where only digests could be compared, `metrics`
    are lines about rows that differ, `kept` is the folder of the run that was made again, if it is left.
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
    project: Path = launch.PROJECT,
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
    if keep is not None and (not keep.is_dir() if keep.exists() else False):
        raise ConfigError(f"keep={keep}: is a file; expected a folder")
    if keep is not None and keep.exists() and any(keep.iterdir()):
        raise ConfigError(f"keep={keep}: is not empty; a run needs a folder of its own")
    child = _Child()
    with child.listening(), tempfile.TemporaryDirectory(prefix="reproduce-") as name:
        folder = Path(name).resolve()
        try:
            recorded = _read(text, project, runs_dir, folder)
            _check_possible(recorded)
            with _laid_out(project, recorded, folder / "tree") as (top, prefix):
                work = _Work(recorded, project, top / prefix, folder, child, say, progress)
                work.prepare(install)
                found = work.run()
        except GitError as error:
            child.check()  # Ctrl-C reaches git as well
            raise ConfigError(str(error)) from error
        child.check()
        kept = None
        if keep is not None or found.verdict != IDENTICAL:
            where = keep or runs_dir.expanduser().absolute() / FOLDER / recorded.id / paths.new_id("again")
            kept = str(_keep(work.run_dir, where))
        seconds = time.monotonic() - began
        environment = "install" if install else "present"
        return replace(found, kept=kept, seconds=round(seconds, 1), environment=environment)


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


# --- What was recorded -----------------------------------------------------------------------------------


def _read(text: str, project: Path, runs_dir: Path, folder: Path) -> Recorded:
    """What `text` names: a run's folder, else its ref. Raises ConfigError if there is neither."""
    if text.startswith(paths.REF_PREFIX):
        return _from_ref(remotes.choose_ids("run", text, remotes.run_refs(project), "here"), project, folder)
    try:
        run_dir = paths.find_run(text, runs_dir)
    except ConfigError:
        if os.sep in text or os.path.lexists(text):
            raise
        refs = remotes.run_refs(project)
        folders = {path.parent.name for path in runs_dir.glob(f"*/*/{paths.RECORD}")}
        try:  # the nearest match may be either; a folder that matches was found above
            chosen = remotes.choose_ids("run", text, {*refs, *folders}, "here, as a folder or a ref")
        except ConfigError as error:
            raise ConfigError(f"{error}\nmake fetch-runs brings what colleagues have pushed") from None
        return _from_ref(chosen, project, folder)
    return _from_folder(run_dir, project, folder)


def _from_folder(run_dir: Path, project: Path, folder: Path) -> Recorded:
    record = read_record(run_dir)
    run_id = str(record.get("id", run_dir.name))
    git = record.get("git")
    if not isinstance(git, Mapping) or not git.get("commit"):
        why = git.get("problem") if isinstance(git, Mapping) else None
        raise ConfigError(f"{run_id}: has no snapshot of its code, so it cannot be made again: {why}")
    if record.get("status") == RUNNING:
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
    commit = checkout.find_commit(project, str(git["commit"]))
    if commit is None:
        raise ConfigError(
            f"{run_id}: its code, {git.get('ref')} at {str(git['commit'])[:12]}, is not in this repository; "
            f"make fetch-runs run={run_id} brings it from where it was pushed"
        )
    config = read_config(run_dir)[1]
    trace, metrics = run_dir / paths.TRACE, run_dir / paths.METRICS
    return _checked(
        Recorded(
            id=run_id,
            ref=git.get("ref"),
            commit=commit,
            record=record,
            config=config,
            config_file=run_dir / paths.CONFIG,
            trace=trace if trace.exists() else None,
            metrics=metrics if metrics.exists() else None,
            iterations=0,
            env_steps=None,
            place=str(run_dir),
        ),
        folder,
    )


def _from_ref(chosen: Sequence[str], project: Path, folder: Path) -> Recorded:
    """From the ref alone, as it is after `make fetch-runs`."""
    (run_id,) = chosen
    ref = paths.REF_PREFIX + run_id
    commit = checkout.find_commit(project, ref)
    if commit is None:
        raise ConfigError(f"{ref} leads to no commit")
    held = folder / run_id
    held.mkdir()
    tree = checkout.read_tree(project, commit, held)
    if paths.CONFIG not in tree.files:
        raise ConfigError(f"{ref}: holds the code of a sweep or a proof, and no run; give one of its runs")
    if checkout.OUTCOME not in tree.files:
        raise ConfigError(
            f"{ref}: does not say how the run ended; it is still running, or was killed, and then its folder "
            "has what is left of its trace"
        )
    try:
        record = json.loads(tree.files[checkout.OUTCOME].read_text(encoding="utf-8"))
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise ConfigError(f"{ref}: the outcome that it holds is damaged")
    if record.get("schema") != SCHEMA_VERSION:
        raise ConfigError(f"{ref}: was recorded by another version, without its trace; its folder is needed")
    record.setdefault("git", {})
    recorded = Recorded(
        id=run_id,
        ref=ref,
        commit=commit,
        record=record,
        config=read_config(held)[1],
        config_file=held / paths.CONFIG,
        trace=tree.files.get(paths.TRACE),
        metrics=tree.files.get(paths.METRICS),
        iterations=0,
        env_steps=None,
        place=ref,
    )
    left_out = record.get("left_out") or {}
    if recorded.trace is None and paths.TRACE in left_out:
        recorded.notes.append(f"the ref holds only the digest of the trace ({left_out[paths.TRACE]})")
    return _checked(recorded, folder)


def _checked(recorded: Recorded, folder: Path) -> Recorded:
    """How far the trace goes, which is cut behind its last whole iteration where nobody closed it."""
    facts = recorded.record.get("trace")
    if recorded.trace is None:
        if isinstance(facts, Mapping):
            recorded.iterations = int(facts.get("iterations", 0))
        return recorded
    if recorded.record.get("status") == RUNNING:
        whole = folder / "whole"
        whole.mkdir()
        _copy_iterations(recorded.trace, whole / paths.TRACE)
        recorded.trace = whole / paths.TRACE
    with traces.open_trace(recorded.trace.parent, "") as trace:
        recorded.iterations, recorded.env_steps = trace.reach
    first, last = _ends(recorded.trace)
    if first > 0:
        raise ConfigError(
            f"{recorded.id}: its trace begins with iteration {first:,}, behind a part that was lost; "
            "only a run that was traced from its start can be compared"
        )
    if recorded.digest is not None and last != recorded.digest:
        recorded.notes.append(
            f"the trace ends with the digest {last}, and the record says {recorded.digest}: one was changed"
        )
    return recorded


def _check_possible(recorded: Recorded) -> None:
    """Raise ConfigError for what no run can reproduce, and note what may be in its way."""
    record, notes = recorded.record, recorded.notes
    if recorded.config.get("trace") in ("off", False):
        raise ConfigError(f"{recorded.id}: was made with trace=off, so there is nothing to compare with")
    if recorded.iterations == 0:
        raise ConfigError(f"{recorded.id}: ended before its first iteration; there is nothing to compare")
    resumed = record.get("resumed") or []
    for part in resumed:
        changed = part.get("changed") or {}
        steps = part.get("env_steps", 0)
        for what in ("code", "libraries"):
            if changed.get(what):
                few = _few(changed[what])
                raise ConfigError(
                    f"{recorded.id}: went on with changed {what} after {steps:,} steps ({few}), so it is not "
                    "what any single run gives"
                )
        if changed.get("total_env_steps") and _tied_to_total(recorded):
            before, after = changed["total_env_steps"]
            raise ConfigError(
                f"{recorded.id}: went on with total_env_steps={after} instead of {before}, which decides "
                "what it learns, so it is not what any single run gives"
            )
    if resumed:
        times = "once" if len(resumed) == 1 else f"{len(resumed)} times"
        notes.append(f"was interrupted and went on {times}; it is compared with one straight run")
    if not recorded.finished:
        status = "killed" if record.get("status") == RUNNING else str(record.get("status"))
        notes.append(f"was {status} after {recorded.iterations:,} iterations, and is made again up to there")
    git = record.get("git") or {}
    if skipped := git.get("skipped"):
        named = ", ".join(f"{file['path']} ({file['reason']})" for file in skipped[:_SHOWN])
        more = f" and {git['skipped_count'] - _SHOWN} more" if git["skipped_count"] > _SHOWN else ""
        notes.append(f"not in the snapshot: {named}{more}; what needs that fails or differs")
    if dirty := git.get("dirty_submodules"):
        notes.append(f"changes inside submodules were not recorded: {', '.join(dirty[:_SHOWN])}")
    if (record.get("determinism") or {}).get("level") == "fast":
        notes.append("determinism=fast promises the same distribution of runs and not the same bits")


def _tied_to_total(recorded: Recorded) -> bool:
    """Whether what the run learned depends on how long it was meant to be."""
    from rltemplate.config import load_config

    return bool(load_config(recorded.config_file).algo.tied_to_total())


# --- The run that is made again --------------------------------------------------------------------------


@contextlib.contextmanager
def _laid_out(project: Path, recorded: Recorded, tree: Path) -> Iterator[tuple[Path, str]]:
    """The recorded tree beside the user's work, and the project's place in it."""
    if checkout.read_file(project, recorded.commit, SCRIPT) is None:
        raise ConfigError(f"{recorded.id}: its code is older than {SCRIPT}, which makes recorded runs again")
    facts = checkout.read_tree(project, recorded.commit)
    if facts.submodules:
        named = ", ".join(facts.submodules[:_SHOWN])
        recorded.notes.append(f"submodules are not checked out: {named}; what needs them fails")
    with checkout.worktree(project, recorded.commit, tree):
        yield tree, facts.prefix


class _Child:
    """One process after the other, in sessions of their own; a signal ends the present one, and all."""

    def __init__(self) -> None:
        self.signals: list[int] = []

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Take what asks a process to end as a request while the block runs; what is ignored stays so."""
        numbers = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self._hear) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        self.signals.append(number)

    def check(self) -> None:
        """Raise `Interrupted` if there was a signal."""
        if self.signals:
            raise Interrupted(self.signals[0])

    def run(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        cwd: Path,
        log: Path,
        enough: Callable[[], bool] = lambda: False,
    ) -> int:
        """Run a command to its end, or until `enough` says so; its exit status, as of a shell."""
        self.check()
        with log.open("wb") as out:
            process = subprocess.Popen(
                command,
                env=dict(environment),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        try:
            while process.poll() is None and not self.signals:
                if enough():
                    self._end(process, _PATIENCE_S)
                    break
                time.sleep(_LOOK_EVERY_S)
            if self.signals:
                self._end(process, _GRACE_S)
        finally:
            # Also what it has left behind, such as processes of its environments.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        self.check()
        return code if code >= 0 else 128 - code

    def _end(self, process: subprocess.Popen[bytes], patience_s: float) -> None:
        """Ask once, and wait; another signal shortens that."""
        process.terminate()
        until, heard = time.monotonic() + patience_s, len(self.signals)
        while process.poll() is None and time.monotonic() < until and len(self.signals) == heard:
            time.sleep(0.02)


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
        self.iterations += sum(line.startswith(_ITERATION) for line in new.split(b"\n"))
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


class _Work:
    """One reproduction, once the code is laid out in `tree`."""

    def __init__(
        self,
        recorded: Recorded,
        project: Path,
        tree: Path,
        folder: Path,
        child: _Child,
        say: Say,
        progress: Progress,
    ) -> None:
        self.recorded = recorded
        self.run_dir = folder / "run"
        self._project, self._tree, self._folder = project, tree, folder
        self._child, self._say, self._progress = child, say, progress
        self._python = Path(sys.executable)
        self._log = folder / LOG

    def prepare(self, install: bool) -> None:
        """Have an interpreter with what the run was made with. Raises ConfigError if that cannot be had."""
        recorded = self.recorded
        if install:
            self._install()
        device = self._device()
        found = self._probe(device)
        self._check_versions(found, install)
        if device == "cuda" and not found["cuda"]:
            asked = recorded.config.get("device")
            raise ConfigError(f"{recorded.id}: was made on CUDA (device={asked}), and there is none here")
        before = recorded.record.get("machine") or {}
        now = machine_facts(with_gpus=False)
        for key in ("cpu", "libc"):
            if before.get(key) and before[key] != now[key]:
                recorded.notes.append(f"{key}: was {before[key]}, here {now[key]}")

    def run(self) -> Reproduction:
        """Make it again and compare."""
        recorded = self.recorded
        follower = _Follower(self.run_dir / paths.TRACE, recorded, self._progress)
        words = [f"config={recorded.config_file}", f"run_dir={self.run_dir}"]
        command = [str(self._python), "-P", str(self._tree / SCRIPT), *words]
        code = self._child.run(command, self._environment(), self._tree, self._log, follower.enough)
        follower.enough()
        complaint = _last_words(self._log, code)
        if code == _REFUSED:
            raise ConfigError(f"{recorded.id}: cannot be run here: {complaint}")
        if follower.iterations == 0:
            raise ConfigError(f"{recorded.id}: came to no iteration this time: {complaint}")
        return self._compared(complaint if code not in (0, 128 + signal.SIGTERM) else None)

    def _compared(self, error: str | None) -> Reproduction:
        recorded = self.recorded
        view = self._view()
        record = read_record(self.run_dir)
        comparison, chain = None, _chain(view / paths.TRACE, recorded.iterations - 1)
        with traces.open_trace(view, "") as trace:
            reached = trace.reach
        if recorded.trace is None:
            verdict = SHORTER if chain is None else IDENTICAL if chain == recorded.digest else DIVERGED
            headline = {
                IDENTICAL: f"identical: {recorded.iterations:,} iterations, by their digest",
                DIVERGED: f"diverged: the digest is {chain}, and was {recorded.digest}",
                SHORTER: f"shorter: ended after {reached.iterations:,} of {recorded.iterations:,} iterations",
            }[verdict]
        else:
            comparison = self._comparison(view)
            verdict, headline = comparison.verdict, compare.headline(comparison)
        metrics: list[str] = []
        if verdict == IDENTICAL:
            metrics = list(self._metrics(record))
            if metrics:
                verdict, headline = (
                    DIVERGED,
                    f"diverged: traces are identical, and metrics are not: {metrics[0]}",
                )
            else:
                headline += "; metrics equal"
        if recorded.record.get("status") == "failed" and recorded.record.get("error") == record.get("error"):
            recorded.notes.append(f"failed in the same way: {record.get('error')}")
            error = None
        return Reproduction(
            run=recorded.id,
            ref=recorded.ref,
            commit=recorded.commit,
            status="killed"
            if recorded.record.get("status") == RUNNING
            else str(recorded.record.get("status")),
            verdict=verdict,
            headline=headline,
            iterations=min(reached.iterations, recorded.iterations),
            env_steps=recorded.env_steps if recorded.env_steps is not None else reached.env_steps,
            digest=chain,
            metrics=metrics,
            notes=list(recorded.notes),
            error=None if verdict == IDENTICAL else error,
            kept=None,
            environment="",
            seconds=0.0,
            comparison=comparison,
        )

    def _view(self) -> Path:
        """The run that was made again as a folder to be compared, no longer than what was recorded.

        It says that its code is the recorded one, and its configuration too: what was switched off for it is
        no difference that anybody would look for.
        """
        recorded, record = self.recorded, read_record(self.run_dir)
        record["git"] = recorded.record.get("git") or {}
        replace_text(self.run_dir / paths.RECORD, [json.dumps(record, indent=2) + "\n"])
        view = self._folder / "again" / f"{recorded.id}-again"
        view.mkdir(parents=True)
        shutil.copy(self.run_dir / paths.RECORD, view / paths.RECORD)
        shutil.copy(recorded.config_file, view / paths.CONFIG)
        most = None if recorded.finished else recorded.iterations
        _copy_iterations(self.run_dir / paths.TRACE, view / paths.TRACE, most)
        return view

    def _comparison(self, again: Path) -> compare.Comparison:
        recorded = self.recorded
        assert recorded.trace is not None
        view = self._folder / "recorded" / recorded.id
        view.mkdir(parents=True)
        # One straight run gives what one that was interrupted gives.
        record = {**recorded.record, "resumed": []}
        (view / paths.RECORD).write_text(json.dumps(record))
        shutil.copy(recorded.config_file, view / paths.CONFIG)
        (view / paths.TRACE).symlink_to(recorded.trace)
        found = compare.compare_runs(view, again)
        a, b = replace(found.a, run_dir=recorded.place), replace(found.b, run_dir="made again")
        return replace(found, a=a, b=b)

    def _metrics(self, record: Mapping[str, Any]) -> Iterator[str]:
        """Lines about what differs in rows and final values, but for times."""
        recorded = self.recorded
        if recorded.metrics is not None:
            rows = [_rows(path) for path in (recorded.metrics, self.run_dir / paths.METRICS)]
            if recorded.finished and len(rows[0]) != len(rows[1]):
                yield f"{len(rows[0])} rows were recorded, and {len(rows[1])} made again"
            for a, b in zip(*rows, strict=False):
                if a != b:
                    name = next(name for name in {**a, **b} if a.get(name) != b.get(name))
                    steps = a.get("env_steps")
                    yield f"{name} after {steps} steps was {a.get(name)}, and is {b.get(name)}"
                    break
        if recorded.finished:
            a, b = (_timeless(each.get("final_metrics") or {}) for each in (recorded.record, record))
            for name in {**a, **b}:
                if a.get(name) != b.get(name):
                    yield f"{name} was {a.get(name)} at the end, and is {b.get(name)}"
                    break

    def _device(self) -> str:
        """Where the run computed: its trace says what `device=auto` was."""
        if self.recorded.trace is not None:
            with traces.open_trace(self.recorded.trace.parent, "") as trace:
                return "cuda" if trace.digest.startswith("keyed_sum") else "cpu"
        return "cuda" if self.recorded.config.get("device") == "cuda" else "cpu"

    def _environment(self) -> dict[str, str]:
        """The variables of the child: this process's, and those that may change bits as they were."""
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in INFLUENTIAL or name in _OF_A_MACHINE
        }
        before = self.recorded.record.get("environment") or {}
        environment |= {
            name: str(value)
            for name, value in before.items()
            if name in INFLUENTIAL and name not in _OF_A_MACHINE
        }
        for name in ("PYTHONHOME", "VIRTUAL_ENV", launch.JOB_VARIABLE, launch.SWEEP_VARIABLE):
            environment.pop(name, None)
        if self.recorded.config.get("device") == "auto" and self._device() == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""  # there was none
        barred = {os.path.realpath(path) for path in (self._project, launch.PROJECT)}
        bar = self._folder / "bar"
        bar.mkdir(exist_ok=True)
        (bar / "sitecustomize.py").write_text(_BAR.format(barred=barred))
        others = environment.get("PYTHONPATH", "").split(os.pathsep)
        others = [path for path in others if path and os.path.realpath(path) not in barred]
        environment["PYTHONPATH"] = os.pathsep.join([str(self._tree), str(bar), *others])
        return environment

    def _probe(self, device: str) -> dict[str, Any]:
        """Python, packages and devices of the child, from a process like it."""
        package = next(self._tree.glob("*/run/machine.py")).parents[1].name
        log = self._folder / "probe.log"
        command = [str(self._python), "-P", "-c", _PROBE, package, device]
        code = self._child.run(command, self._environment(), self._tree, log)
        if code:
            raise ConfigError(f"{self.recorded.id}: its code cannot be loaded: {_last_words(log, code)}")
        found: dict[str, Any] = json.loads(log.read_text().splitlines()[-1])
        if not Path(found["package"]).resolve().is_relative_to(self._tree.resolve()):
            raise RuntimeError(f"{found['package']} would run instead of the recorded code")
        return found

    def _check_versions(self, found: Mapping[str, Any], installed: bool) -> None:
        recorded = self.recorded
        before, now = recorded.record.get("versions") or {}, found["versions"]
        changed, lacking = [], []
        locked = _locked(self._tree / _LOCK_FILE)
        for name, version in before.items():
            if not package_matters(name) or version == now.get(name):
                continue
            if name not in now and not presence_matters(name) and locked is not None and name not in locked:
                lacking.append(f"{name} {version}")
            elif now.get(name, "").partition("+")[0] == version.partition("+")[0]:
                # A build for other processors or another CUDA: its numbers may differ, its name need not.
                recorded.notes.append(f"{name} was {version}, here it is {now[name]}")
            else:
                changed.append(f"{name} {version} -> {now.get(name, 'not installed')}")
        if lacking:  # somebody had installed it beside what the project needs
            what = "belongs" if len(lacking) == 1 else "belong"
            named = _few(lacking)
            recorded.notes.append(f"not installed here: {named}, which {what} to no {_LOCK_FILE} of the run")
        python, here = str((recorded.record.get("machine") or {}).get("python")), found["python"]
        if python != here:
            if python.split(".")[:2] != here.split(".")[:2]:
                changed.insert(0, f"Python {python} -> {here}")
            else:
                recorded.notes.append(f"Python was {python}, here it is {here}")
        if not changed:
            return
        what = _few(changed)
        if installed:
            raise ConfigError(f"{recorded.id}: its record does not fit its own {_LOCK_FILE}: {what}")
        lock = self._tree / _LOCK_FILE
        here_lock = self._project / _LOCK_FILE
        other = lock.exists() and here_lock.exists() and lock.read_bytes() != here_lock.read_bytes()
        why = f"; its {_LOCK_FILE} is another one" if other else ""
        raise ConfigError(
            f"{recorded.id}: other versions than it had: {what}{why}\n"
            "env=install makes an environment from its own lock file and takes that"
        )

    def _install(self) -> None:
        """An environment from the recorded lock file, made by the recorded script."""
        recorded = self.recorded
        if not (self._tree / _SETUP).exists() or not (self._tree / _LOCK_FILE).exists():
            raise ConfigError(f"env=install: the code of {recorded.id} has no {_SETUP} with a {_LOCK_FILE}")
        version = str((recorded.record.get("machine") or {}).get("python"))
        minor = ".".join(version.split(".")[:2])
        same = minor == f"{sys.version_info.major}.{sys.version_info.minor}"
        base = Path(sys.base_prefix) / "bin" / f"python{minor}"
        python = str(base) if same and base.exists() else shutil.which(f"python{minor}")
        if python is None:
            raise ConfigError(
                f"env=install: {recorded.id} was made with Python {version}; no python{minor} here"
            )
        self._say(f"installing what {recorded.id} was made with ...")
        environment = self._environment()
        environment.pop("PYTHONPATH")
        log = self._folder / "install.log"
        code = self._child.run(["sh", str(self._tree / _SETUP), python], environment, self._tree, log)
        if code:
            lines = " ".join(_lines(log)[-4:])
            raise ConfigError(f"env=install: it could not be installed: {lines or f'exit status {code}'}")
        self._python = self._tree / ".venv" / "bin" / "python"


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


def _few(names: Sequence[str]) -> str:
    """The first of many, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


# --- Files -----------------------------------------------------------------------------------------------


def _copy_iterations(trace: Path, to: Path, most: int | None = None) -> None:
    """Copy a trace up to its last whole iteration, or to the end of iteration `most` - 1."""
    with trace.open("rb") as file, to.open("wb") as out:
        waiting: list[bytes] = []
        done = 0
        for number, line in enumerate(file):
            if not line.endswith(b"\n"):
                break
            waiting.append(line)
            if number == 0 or line.startswith(_ITERATION):
                out.writelines(waiting)
                waiting.clear()
                done += line.startswith(_ITERATION)
                if most is not None and done >= most:
                    break


def _ends(trace: Path) -> tuple[int, str]:
    """The number of the first iteration of a trace, and the chain at the end of its last."""
    first, last = 0, b""
    with trace.open("rb") as file:
        for line in file:
            if line.startswith(_ITERATION):
                if not last:
                    first = int(json.loads(line)[1])
                last = line
    return first, str(json.loads(last)[-1]) if last else ""


def _chain(trace: Path, iteration: int) -> str | None:
    """The digest of everything up to the end of an iteration; None if the trace does not go so far."""
    wanted = _ITERATION + f"{iteration},".encode()
    with trace.open("rb") as file:
        line = next((line for line in file if line.startswith(wanted)), None)
    return None if line is None else str(json.loads(line)[-1])


def _locked(lock: Path) -> set[str] | None:
    """The normalised names of the packages that a lock file pins; None if there is none."""
    if not lock.exists():
        return None
    lines = lock.read_text(encoding="utf-8", errors="replace").splitlines()
    found = (re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", line) for line in lines)
    return {re.sub(r"[-_.]+", "-", match[0]).lower() for match in found if match}


def _rows(path: Path) -> list[dict[str, Any]]:
    """Whole rows of `metrics.jsonl` without times."""
    rows, lines = [], path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(_timeless(json.loads(line)))
        except (ValueError, AttributeError):
            if not line.endswith("\n"):  # the last of a run that was killed
                break
            raise ConfigError(f"{path.parent.name}: line {number} of {paths.METRICS} is damaged") from None
    return rows


def _timeless(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not name.startswith(("time/", "wall_time"))}


def _lines(log: Path) -> list[str]:
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return [line.strip() for line in text.splitlines() if line.strip()]


def _last_words(log: Path, code: int) -> str:
    """What a process said in the end."""
    lines = _lines(log)
    told = next((line for line in reversed(lines) if line.startswith("error:")), lines[-1] if lines else "")
    return told.removeprefix("error:").strip() or f"exit status {code}"
