"""Proof that a determinism level holds here: one configuration, run several times in separate processes.

The first run is left alone. The others are perturbed in everything that must not matter: hash seed, working
directory, environment variables, caches, load, observers, and where the level promises it also threads and
the grouping of rows. All must leave the same trace. Then the inverse: without the additions of the level at
least one check should fail, or else the checks may see nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rltemplate.analysis import compare, traces
from rltemplate.config.loading import to_dict
from rltemplate.config.schema import Config, Level
from rltemplate.determinism.levels import PROMISES
from rltemplate.determinism.machine import machine_facts, package_versions
from rltemplate.determinism.variables import ROW_GROUPS
from rltemplate.launch.process import worker_command, worker_environment
from rltemplate.launch.subprocesses import (
    REFUSED,
    Children,
    busy_core,
    complaint,
    last_words,
    lines_of,
)
from rltemplate.rerun.certificate import BROKEN, HOLDS, RATIO, Certificate, Inverse, RunResult
from rltemplate.rerun.perturbations import (
    CACHES,
    INVARIANT,
    PATIENT,
    WITHOUT,
    PlannedRun,
    as_typed,
    changed,
    plan_inverse,
    plan_runs,
    with_changes,
)
from rltemplate.rerun.proof_config import ProofConfig
from rltemplate.run import paths
from rltemplate.run.git.snapshot import GitRecord, take_snapshot
from rltemplate.run.job import PROJECT, Job
from rltemplate.run.record import FINAL_STATUSES, FINISHED, RunRecord
from rltemplate.types import ConfigError

FOLDER = "prove"
_NAMED_FILES = 100  # of a snapshot: Linux allows 128 KiB for the variable that holds a job

Say = Callable[[str], None]


class Proof:
    """The work on one proof. `folder` will have the runs and the certificate, once the checks were tried."""

    def __init__(self, asked: ProofConfig, command: Sequence[str] = (), *, say: Say = print) -> None:
        """`command` is the user's command line; `say` takes a line about each run."""
        self.asked = asked
        self.id = paths.new_id(FOLDER)
        self.folder = Path(asked.config.runs_dir).expanduser().absolute() / FOLDER / self.id
        self._command, self._say = list(command), say
        self._children = Children()
        self._snapshot: GitRecord | None = None

    def run(self) -> Certificate:
        """Do it, write the certificate and return it.

        Raises ConfigError, before anything is created, where the run would be refused; Interrupted after a
        signal. The runs made by then stay.
        """
        level = self.asked.level
        with self._children.listening(), tempfile.TemporaryDirectory(prefix="prove-") as workshop:
            self._workshop = Path(workshop)
            promised = self._try_checks(self.asked.config)
            try:
                self.folder.mkdir(parents=True)
            except OSError as error:
                runs_dir = self.asked.config.runs_dir
                raise ConfigError(f"runs_dir={runs_dir}: cannot be made, {error.strerror}") from error
            self._snapshot = take_snapshot(PROJECT, keep_ref=self.id)
            problems = [
                f"the check {name}: {found['problem']}"
                for name, found in promised["checks"].items()
                if not found["holds"]
            ]
            runs = [] if problems else self._runs()
            problems += [problem for run in runs for problem in _problems(run, level)]
            comparison = _first_divergence(runs)
            if comparison is not None:
                problems.insert(0, _diverged(comparison, runs))
            inverse = None if problems else self._inverse()
            self._children.check()
            certificate = self._certificate(promised, runs, problems, comparison, inverse)
            certificate.write()
        return certificate

    def _runs(self) -> list[RunResult]:
        planned = plan_runs(self.asked.config, self.asked.times, os.environ)
        results: list[RunResult] = []
        for i, each in enumerate(planned, start=1):
            run = self._run(each, self.asked.config, self.asked.overrides)
            self._say(f"{run.name}, {i} of {len(planned)} ({run.words}): {_outcome(run)}")
            results.append(run)
            if not results[0].finished:
                break  # the others cannot be compared with it
        return results

    def _inverse(self) -> Inverse:
        """Checks without the additions of the level, and for all but a profile two runs."""
        asked = self.asked
        without = "determinism=fast, 2 threads"
        if asked.level is not Level.repeat:
            without = ", ".join(f"{key}={as_typed(value)}" for key, value in WITHOUT[asked.level].items())
        self._say(f"without it ({without}):")
        seen: list[dict[str, Any]] = []
        try:
            for name, found in self._try_checks(asked.bare)["checks"].items():
                text = "holds all the same" if found["holds"] else found["problem"]
                seen.append({"what": f"check {name}", "fails": not found["holds"], "seen": text})
        except (ConfigError, RuntimeError) as error:
            seen.append({"what": "checks", "fails": False, "seen": f"could not be tried: {error}"})
        runs: list[RunResult] = []
        if asked.level is not Level.profile:
            for planned in plan_inverse(asked.bare, asked.level, os.environ):
                run = self._run(planned, asked.bare, asked.bare_overrides)
                self._say(f"{run.name} ({run.words}): {_outcome(run)}")
                runs.append(run)
            seen += _seen_in(runs, asked.level)
        failing = [each["what"] for each in seen if each["fails"]]
        sentence = f"without it ({without}) {len(failing)} of {len(seen)} fail: {', '.join(failing)}"
        if not failing:
            sentence = f"without it ({without}) all hold as well: this machine cannot tell them apart"
        return Inverse(without=without, tells_apart=bool(failing), sentence=sentence, seen=seen, runs=runs)

    def _try_checks(self, config: Config) -> dict[str, Any]:
        """Settings and checks of the level, from a separate process; ConfigError if it refuses."""
        module = "rltemplate.rerun.level_checks"
        command = [sys.executable, "-P", "-m", module, *PROMISES[self.asked.level.name]]
        environment = worker_environment(self._job("checks", config, []), config, os.environ) | PATIENT
        environment.pop(ROW_GROUPS, None)
        answer, log = self._workshop / "checks.json", self._workshop / "checks.log"
        status = self._children.run(command, environment, log, out=answer)
        if status == REFUSED and (said := complaint(log)):
            raise ConfigError(said)
        printed = lines_of(answer)
        if status or not printed:
            raise RuntimeError(f"{module} gave no answer: {last_words(log, status)}")
        found: dict[str, Any] = json.loads(printed[-1])  # environments may print as well
        return found

    def _job(self, name: str, config: Config, overrides: Sequence[str]) -> Job:
        snapshot = self._snapshot
        if snapshot is not None:
            named = snapshot.changed[:_NAMED_FILES], snapshot.skipped[:_NAMED_FILES]
            snapshot = replace(snapshot, changed=named[0], skipped=named[1])
        return Job(
            config=to_dict(config),
            run_id=f"{self.id}-{name.replace('_', '')}",
            run_dir=str(self.folder / name),
            command=self._command,
            overrides=list(overrides),
            snapshot=None if snapshot is None else snapshot.to_json(),
        )

    def _run(self, planned: PlannedRun, config: Config, overrides: Sequence[str]) -> RunResult:
        config, overrides = changed(config, planned.changes), with_changes(overrides, planned.changes)
        variables: dict[str, str | None] = dict(planned.environment)
        if planned.cold:
            variables |= {name: str(self._workshop / planned.name / name.lower()) for name in CACHES}
        cwd = Path.cwd()
        if planned.elsewhere:
            cwd = self._workshop / planned.name / "another folder"
            cwd.mkdir(parents=True)
        environment = worker_environment(self._job(planned.name, config, overrides), config, os.environ)
        kept = {name: value for name, value in environment.items() if name not in variables}
        environment = kept | {name: value for name, value in variables.items() if value is not None}
        log, began = self.folder / f"{planned.name}.log", time.monotonic()
        with busy_core() if planned.load else contextlib.nullcontext():
            status = self._children.run(worker_command(), environment, log, cwd=cwd)
        return replace(
            _result(planned.name, self.folder / planned.name, status, log),
            perturbations=planned.perturbations,
            overrides=overrides,
            # Of the variable that only makes the environment larger, the length.
            environment={
                k: v if v is None or len(v) < 1000 else f"{len(v):,} characters" for k, v in variables.items()
            },
            seconds=round(time.monotonic() - began, 2),
        )

    def _certificate(
        self,
        promised: Mapping[str, Any],
        runs: list[RunResult],
        problems: list[str],
        comparison: compare.Comparison | None,
        inverse: Inverse | None,
    ) -> Certificate:
        asked = self.asked
        config, level = asked.config, asked.level.name
        claim = f"{config.algo.name} on {config.env.id}"
        if problems:
            sentence = f"{level} is broken for {claim}: {problems[0]}"
        else:
            sentence = (
                f"{level} holds for {claim}: {len(runs)} runs, {len(runs) - 1} of them disturbed, "
                f"{runs[0].iterations:,} iterations each, one digest {runs[0].digest}"
            )
        record = _record(Path(runs[0].run_dir)) if runs else None
        git = GitRecord() if record is None else record.git
        if record is None and (snapshot := self._snapshot) is not None:
            names = ("base_commit", "branch", "dirty", "changed_count", "problem")
            git = replace(git, **{name: getattr(snapshot, name) for name in names})
        return Certificate(
            id=self.id,
            verdict=BROKEN if problems else HOLDS,
            sentence=sentence,
            problems=problems,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            folder=str(self.folder),
            asked={
                "command": self._command,
                "overrides": asked.overrides,
                "times": asked.times,
                "level": level,
                "shortened_from": asked.shortened_from,
                "config": to_dict(config),
            },
            runs=runs,
            checks=promised["checks"],
            ratio=_ratio_facts(runs) if asked.level in INVARIANT else None,
            comparison=comparison,
            report=None if comparison is None else compare.report(comparison),
            inverse=inverse,
            settings=promised["settings"],
            versions=package_versions() if record is None else record.versions,
            machine=machine_facts(with_gpus=False) if record is None else record.machine,
            git=git,
        )


# --- The results -----------------------------------------------------------------------------------------


def _record(run_dir: Path) -> RunRecord | None:
    """The record of a run; None if the run never came to one."""
    try:
        return RunRecord.read(run_dir)
    except ConfigError:
        return None


def _result(name: str, run_dir: Path, exit_status: int, log: Path) -> RunResult:
    """The result of a run by its folder."""
    record = _record(run_dir) or RunRecord(id=name, status="")
    status, error = record.status, record.error
    if exit_status or status != FINISHED:
        if status not in FINAL_STATUSES or status == FINISHED:  # it died, or never came to its record
            status = "refused" if exit_status == REFUSED else "failed"
        error = error or last_words(log, exit_status)
    env_steps = 0
    with contextlib.suppress(ConfigError):
        env_steps = traces.open_trace(run_dir, "").reach.env_steps
    ratios = list(_ratios(run_dir))
    return RunResult(
        name=name,
        run_dir=str(run_dir),
        working_directory=record.working_directory,
        exit_status=exit_status,
        status=status,
        error=error,
        digest=None if record.trace is None else record.trace.digest,
        iterations=0 if record.trace is None else record.trace.iterations,
        env_steps=env_steps,
        ratios=len(ratios),
        ratio=min(max(ratios), sys.float_info.max) if ratios else None,  # JSON has no infinity
        settings=record.determinism.settings,
        checks=record.determinism.checks,
    )


def _ratios(run_dir: Path) -> Iterator[float]:
    """The metric at every log point that has it; NaN, which is null in JSON, counts as infinite."""
    with contextlib.suppress(FileNotFoundError):
        for line in (run_dir / paths.METRICS).read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if RATIO in row:
                yield float("inf") if row[RATIO] is None else float(row[RATIO])


def _ratio_facts(runs: Sequence[RunResult]) -> dict[str, Any]:
    known = [run.ratio for run in runs if run.ratio is not None]
    return {"metric": RATIO, "values": sum(run.ratios for run in runs), "largest": max(known, default=None)}


def _problems(run: RunResult, level: Level) -> Iterator[str]:
    """The faults of a run on its own."""
    if not run.finished:
        yield f"{run.name} ({run.words}) {run.status}: {run.error}"
    for name, found in run.checks.items():
        if isinstance(found, Mapping) and not found.get("holds", True):
            yield f"{run.name} ({run.words}): the check {name} does not hold"
    if level in INVARIANT and run.ratio:
        yield f"{run.name} ({run.words}): {RATIO} is {run.ratio:g} and must be 0"


def _first_divergence(runs: Sequence[RunResult]) -> compare.Comparison | None:
    """The comparison with the first run that has another trace than the undisturbed one."""
    for run in runs[1:]:
        if run.finished:
            comparison = compare.compare_runs(Path(runs[0].run_dir), Path(run.run_dir))
            if comparison.verdict != compare.IDENTICAL or run.digest != runs[0].digest:
                return comparison
    return None


def _diverged(comparison: compare.Comparison, runs: Sequence[RunResult]) -> str:
    run = next(run for run in runs if run.run_dir == comparison.b.run_dir)
    return f"{run.name} ({run.words}) is not {runs[0].name}: {compare.headline(comparison)}"


def _seen_in(runs: Sequence[RunResult], level: Level) -> Iterator[dict[str, Any]]:
    """The findings of two runs without the level."""
    failed = next((run for run in runs if not run.finished), None)
    if failed is not None:
        text = f"could not be compared: {failed.name} {failed.status}, {failed.error}"
        yield {"what": "traces", "fails": False, "seen": text}
        return
    comparison = compare.compare_runs(*(Path(run.run_dir) for run in runs))
    differ = comparison.verdict != compare.IDENTICAL
    yield {"what": "traces", "fails": differ, "seen": compare.headline(comparison)}
    facts = _ratio_facts(runs)
    if level in INVARIANT and facts["values"]:
        text = f"{RATIO} is {facts['largest']:g} at most, in {facts['values']:,} values"
        yield {"what": "ratio", "fails": facts["largest"] != 0.0, "seen": text}


def _outcome(run: RunResult) -> str:
    if not run.finished:
        return f"{run.status}, {run.error}"
    return f"{run.env_steps:,} steps, digest {run.digest}, {run.seconds:.0f} s"
