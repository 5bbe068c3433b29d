"""Proof that a determinism level holds here: one configuration, run several times in separate processes.

The first run is left alone. The others are perturbed in everything that must not matter: hash seed, working
directory, environment variables, caches, load, observers, and where the level promises it also threads and
the grouping of rows. All must leave the same trace. Then the inverse: without the additions of the level at
least one check should fail, or else the checks may see nothing.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rltemplate.analysis import compare
from rltemplate.config.command_args import make_folder
from rltemplate.config.loading import to_dict
from rltemplate.config.schema import Config, Level
from rltemplate.determinism.levels import PROMISES, ROW_GROUPS
from rltemplate.determinism.machine import machine_facts, package_versions
from rltemplate.launch.process import worker_command, worker_environment
from rltemplate.launch.subprocesses import REFUSED, Children, complaint, last_words, lines_of
from rltemplate.rerun.certificate import BROKEN, HOLDS, RATIO, Certificate, Inverse, RunResult, Seen
from rltemplate.rerun.perturbations import (
    INVARIANT,
    PlannedRun,
    changed,
    plan_inverse,
    plan_runs,
)
from rltemplate.rerun.proof_config import ProofConfig
from rltemplate.run import paths
from rltemplate.run.git.snapshot import GitRecord
from rltemplate.run.job import Job
from rltemplate.run.read import read_metrics
from rltemplate.run.record import FINISHED, RunRecord, TraceFacts
from rltemplate.types import ConfigError

FOLDER = "prove"
_CACHES = ("PYTHONPYCACHEPREFIX", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
# Threads that have to wait sleep at once, for other processes need the cores as well.
_PATIENT = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}

Say = Callable[[str], None]


class Proof:
    """The work on one proof. `folder` will have the runs and the certificate, once the checks were tried."""

    def __init__(self, asked: ProofConfig, command: Sequence[str] = (), *, say: Say = print) -> None:
        """`command` is the user's command line; `say` takes a line about each run."""
        self.asked = asked
        self.level = asked.config.determinism.level
        self.id = paths.new_id(FOLDER)
        self.folder = Path(asked.config.runs_dir).expanduser().absolute() / FOLDER / self.id
        self._command, self._say = list(command), say
        self._children = Children()
        self._environment = {k: v for k, v in os.environ.items() if k != ROW_GROUPS} | _PATIENT

    def run(self) -> Certificate:
        """Do it, write the certificate and return it.

        Raises ConfigError, before anything is created, where the run would be refused; Interrupted after a
        signal. The runs made by then stay.
        """
        asked = self.asked
        with self._children.listening(), tempfile.TemporaryDirectory(prefix="prove-") as scratch:
            self._scratch = Path(scratch)
            promised = self._try_checks(asked.config)
            make_folder("runs_dir", self.folder)
            checks = promised["checks"]
            problems = [f"the check {name}: {x['problem']}" for name, x in checks.items() if not x["holds"]]
            runs: list[RunResult] = []
            if not problems:
                runs = self._train(plan_runs(asked.config, asked.times, os.environ), asked.config)
            problems += [problem for run in runs for problem in _problems(run, self.level)]
            comparison = _first_divergence(runs)
            if comparison is not None:
                run = next(run for run in runs if run.run_dir == comparison.b.run_dir)
                said = f"{run.name} ({', '.join(run.perturbations)}) is not {runs[0].name}"
                problems.insert(0, f"{said}: {compare.headline(comparison)}")
            inverse = None if problems else self._inverse()
            self._children.check()
            certificate = self._certificate(promised, runs, problems, comparison, inverse)
            certificate.write()
        return certificate

    def _train(self, planned: Sequence[PlannedRun], config: Config) -> list[RunResult]:
        """Make the runs, up to one that the others cannot be compared with."""
        results: list[RunResult] = []
        for each in planned:
            results.append(self._run(each, config))
            self._say(str(results[-1]))
            if not results[0].finished:
                break
        return results

    def _inverse(self) -> Inverse:
        """Checks without the additions of the level, and for all but a profile two runs."""
        without = self.asked.without
        self._say(f"without it ({without}):")
        seen: list[Seen] = []
        try:
            for name, found in self._try_checks(self.asked.bare)["checks"].items():
                text = "holds all the same" if found["holds"] else found["problem"]
                seen.append(Seen(what=f"check {name}", fails=not found["holds"], text=text))
        except (ConfigError, RuntimeError) as error:
            seen.append(Seen(what="checks", fails=False, text=f"could not be tried: {error}"))
        runs: list[RunResult] = []
        if self.level is not Level.profile:
            runs = self._train(plan_inverse(self.asked.bare, self.level, os.environ), self.asked.bare)
            seen += _seen_in(runs, self.level)
        failing = [each.what for each in seen if each.fails]
        said = "all hold as well: this machine cannot tell them apart"
        if failing:
            said = f"{len(failing)} of {len(seen)} fail: {', '.join(failing)}"
        return Inverse(
            without=without,
            tells_apart=bool(failing),
            sentence=f"Without it ({without}) {said}",
            seen=seen,
            runs=runs,
        )

    def _try_checks(self, config: Config) -> dict[str, Any]:
        """Settings and checks of the level, from a separate process; ConfigError if it refuses."""
        module = "rltemplate.rerun.level_checks"
        command = [sys.executable, "-P", "-m", module, *PROMISES[self.level.name]]
        environment = worker_environment(self._job("checks", config), config, self._environment)
        answer, log = self._scratch / "checks.json", self._scratch / "checks.log"
        status = self._children.run(command, environment, log, out=answer)
        if status == REFUSED and (said := complaint(log)):
            raise ConfigError(said)
        printed = lines_of(answer)
        if status or not printed:
            raise RuntimeError(f"{module} gave no answer: {last_words(log, status)}")
        found: dict[str, Any] = json.loads(printed[-1])  # environments may print as well
        return found

    def _job(self, name: str, config: Config) -> Job:
        return Job(
            config=to_dict(config),
            run_id=f"{self.id}-{name.replace('_', '')}",
            run_dir=str(self.folder / name),
            command=self._command,
            overrides=self.asked.overrides,
        )

    def _run(self, planned: PlannedRun, config: Config) -> RunResult:
        config = changed(config, planned.changes)
        job, variables = self._job(planned.name, config), dict(planned.environment)
        cwd, load = Path.cwd(), contextlib.ExitStack()
        if planned.perturbations:
            cwd = self._scratch / planned.name
            cwd.mkdir()
            variables |= {name: str(cwd / name.lower()) for name in _CACHES}
            load.enter_context(busy_core())
        environment = worker_environment(job, config, self._environment)
        for name, value in variables.items():
            environment.pop(name, None)
            environment |= {} if value is None else {name: value}
        log, began = self.folder / f"{planned.name}.log", time.monotonic()
        with load:
            status = self._children.run(worker_command(), environment, log, cwd=cwd)
        return _result(planned, Path(job.run_dir), status, log, round(time.monotonic() - began, 2))

    def _certificate(
        self,
        promised: dict[str, Any],
        runs: list[RunResult],
        problems: list[str],
        comparison: compare.Comparison | None,
        inverse: Inverse | None,
    ) -> Certificate:
        config = self.asked.config
        claim = f"for {config.algo.name} on {config.env.id}"
        if problems:
            sentence = f"{self.level.name} is broken {claim}: {problems[0]}"
        else:
            sentence = (
                f"{self.level.name} holds {claim}: {len(runs)} runs, {len(runs) - 1} of them disturbed, "
                f"{runs[0].iterations:,} iterations each, one digest {runs[0].digest}"
            )
        return Certificate(
            id=self.id,
            verdict=BROKEN if problems else HOLDS,
            sentence=sentence,
            problems=problems,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            folder=str(self.folder),
            overrides=self.asked.overrides,
            config=to_dict(config),
            shortened_from=self.asked.shortened_from,
            runs=runs,
            checks=promised["checks"],
            comparison=comparison,
            report=None if comparison is None else compare.report(comparison),
            inverse=inverse,
            settings=promised["settings"],
            versions=package_versions(),
            machine=machine_facts(),
            git=_record(Path(runs[0].run_dir)).git if runs else GitRecord(),
        )


# --- The results -----------------------------------------------------------------------------------------


def _record(run_dir: Path) -> RunRecord:
    """The record of a run, which has no facts if the run never came to one."""
    try:
        return RunRecord.read(run_dir)
    except ConfigError:
        return RunRecord(id=run_dir.name, status="")


def _result(planned: PlannedRun, run_dir: Path, exit_status: int, log: Path, seconds: float) -> RunResult:
    """The result of a run by its folder."""
    record = _record(run_dir)
    finished = exit_status == 0 and record.status == FINISHED
    trace = record.trace or TraceFacts()
    # NaN, which is null in JSON, counts as the largest number, for JSON has no infinity.
    ratios = [row[RATIO] for row in read_metrics(run_dir) if RATIO in row]
    ratios = [sys.float_info.max if math.isnan(ratio) else ratio for ratio in ratios]
    return RunResult(
        name=planned.name,
        run_dir=str(run_dir),
        perturbations=planned.perturbations,
        seconds=seconds,
        status=FINISHED if finished else "failed" if record.status else "refused",
        error=None if finished else record.error or last_words(log, exit_status),
        digest=trace.digest or None,
        iterations=trace.iterations,
        ratio=max(ratios, default=None),
    )


def _problems(run: RunResult, level: Level) -> Iterator[str]:
    """The faults of a run on its own."""
    name = f"{run.name} ({', '.join(run.perturbations) or 'undisturbed'})"
    if not run.finished:
        yield f"{name} {run.status}: {run.error}"
    if level in INVARIANT and run.ratio:
        yield f"{name}: {RATIO} is {run.ratio:g} and must be 0"


def _first_divergence(runs: Sequence[RunResult]) -> compare.Comparison | None:
    """The comparison with the first run that has another trace than the undisturbed one."""
    for run in runs[1:]:
        if run.finished:
            comparison = compare.compare_runs(Path(runs[0].run_dir), Path(run.run_dir))
            if comparison.verdict != compare.IDENTICAL or run.digest != runs[0].digest:
                return comparison
    return None


def _seen_in(runs: Sequence[RunResult], level: Level) -> Iterator[Seen]:
    """The findings of two runs without the level."""
    failed = next((run for run in runs if not run.finished), None)
    if failed is not None:
        text = f"could not be compared: {failed.name} {failed.status}, {failed.error}"
        yield Seen(what="traces", fails=False, text=text)
        return
    comparison = compare.compare_runs(*(Path(run.run_dir) for run in runs))
    differ = comparison.verdict != compare.IDENTICAL
    yield Seen(what="traces", fails=differ, text=compare.headline(comparison))
    if level in INVARIANT and (known := [run.ratio for run in runs if run.ratio is not None]):
        yield Seen(what="ratio", fails=max(known) != 0.0, text=f"{RATIO} is {max(known):g} at most")


# Ends by itself when its parent is gone, however that ended.
_BUSY = "import os, sys\nwhile os.getppid() == int(sys.argv[1]):\n    sum(range(100_000))"


@contextlib.contextmanager
def busy_core() -> Iterator[None]:
    """A process that does nothing but compute while the block runs."""
    command = [sys.executable, "-I", "-S", "-c", _BUSY, str(os.getpid())]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        yield
    finally:
        process.kill()
        process.wait()
