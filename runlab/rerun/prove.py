"""`make prove`: a test of a determinism level, with several runs of one configuration.

The first run is undisturbed. In the other runs everything is changed that must not matter: hash seed, working
directory, environment variables, caches, load, observers, and, if the level promises it, threads and the
grouping of rows. All runs must have the same trace. Then the inverse: without the additions of the level at
least one of its checks should fail. Otherwise the checks may see nothing.

A process `python -m runlab.rerun.prove FILE CHECK ...` only runs the checks of a level, without training.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runlab.analysis import compare
from runlab.config.command_args import argument, exit_status, make_folder, program, rest, switch, whole
from runlab.config.project import ALGORITHMS, project
from runlab.config.schema import Config, Level
from runlab.determinism.levels import PROMISES, ROW_GROUPS
from runlab.errors import REFUSED, ConfigError
from runlab.launch.process import worker_command, worker_environment
from runlab.launch.subprocesses import Children, complaint, end_with_parent, last_words
from runlab.machine import machine_facts, package_versions
from runlab.rerun.certificate import BROKEN, HOLDS, UNDECIDED, Certificate, RunResult
from runlab.rerun.perturbations import INVARIANT, WITHOUT, config_to_prove, inverse_config, perturbed
from runlab.run import paths
from runlab.run.files import to_stderr
from runlab.run.job import Job, new_job
from runlab.run.read import read_metrics
from runlab.run.record import FINISHED, RunRecord, TraceFacts, utc_now

FOLDER = "prove"
_CACHES = ("PYTHONPYCACHEPREFIX", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


@dataclass(frozen=True, kw_only=True)
class Args:
    """Proof that a level holds here: algo=ppo env=Hopper determinism=repeat [times=5].

    All other arguments are overrides, as for training.
    Exit status: 0 it holds, 1 it is broken, 2 it cannot be asked, or a run failed and the others are equal.
    """

    words: list[str] = rest(options=True)
    times: int = argument(whole(2, 1000), 5)
    json: bool = argument(switch, False)


def main(args: Args) -> int:
    """Print the certificate, and before it on standard error a line about each run."""
    with contextlib.redirect_stdout(sys.stderr):  # output of environments
        certificate = Proof(args.words, args.times).run()
    print(certificate.to_json() if args.json else f"\n{certificate.to_text()}")
    return {HOLDS: 0, BROKEN: 1, UNDECIDED: REFUSED}[certificate.verdict]


class Proof:
    """One proof. Its `folder` gets the runs and the certificate; it is made after the checks."""

    def __init__(self, words: Sequence[str], times: int) -> None:
        """`words` are overrides as for training. Raises ConfigError."""
        self.config, self.overrides = config_to_prove(words)
        self.level = self.config.determinism.level
        algo = self.config.algo
        self._ratio = ALGORITHMS[algo.name].zero_metric if algo.acts_as_it_learns() else None
        self._bare = inverse_config(self.level, self.overrides)
        self._times, self._children = times, Children()
        self.id = paths.new_id(FOLDER)
        self.folder = Path(self.config.runs_dir).expanduser().absolute() / FOLDER / self.id
        self._environment = {k: v for k, v in os.environ.items() if k != ROW_GROUPS}

    def run(self) -> Certificate:
        """Run the checks and the runs; the certificate, which is also written into all their folders.

        Raises ConfigError before anything is created if the run would be refused, and Interrupted after a
        signal. Finished runs then stay.
        """
        with self._children.listening(), tempfile.TemporaryDirectory(prefix="prove-") as scratch:
            self._scratch = Path(scratch)
            tried = self._try_checks(self.config)
            make_folder("runs_dir", self.folder)
            to_stderr(f"proof in {self.folder}")
            checks = tried["checks"].items()
            problems = [f"the check {name}: {each['problem']}" for name, each in checks if "problem" in each]
            runs: list[RunResult] = []
            for number in [] if problems else range(self._times):
                runs.append(self._run(number))
                to_stderr(str(runs[-1]))
                if runs[0].error:  # the other runs could not be compared with it
                    break
            problems += problems_of(runs, self.level, self._ratio)
            failures = [f"{run.title} failed: {run.error}" for run in runs if run.error]
            verdict = BROKEN if problems else UNDECIDED if failures else HOLDS
            claim = f"for {self.config.algo.name} on {self.config.env.id}"
            inverse: dict[str, str | None] = {}
            if verdict != HOLDS:
                sentence = f"{self.level.name} is {verdict} {claim}: {[*problems, *failures][0]}"
            else:
                without_it, inverse = self._inverse()
                sentence = (
                    f"{self.level.name} holds {claim}: {len(runs)} runs, {len(runs) - 1} of them disturbed, "
                    f"{runs[0].iterations:,} iterations each, one digest {runs[0].digest}\n{without_it}"
                )
            self._children.check()
            first = _record(Path(runs[0].run_dir)) if runs else RunRecord(id="", status="")
            certificate = Certificate(
                verdict=verdict,
                sentence=sentence,
                problems=[*problems, *failures],
                date=utc_now(),
                folder=str(self.folder),
                overrides=self.overrides,
                runs=runs,
                checks=tried["checks"],
                inverse=inverse,
                settings=tried["settings"],
                versions=package_versions(),
                machine=first.machine or machine_facts(),  # this process uses no GPU
                git=first.git,
            )
            certificate.write()
        return certificate

    def _inverse(self) -> tuple[str, dict[str, str | None]]:
        """A sentence about the checks without the additions of the level, and the problem of each check."""
        words = " ".join(WITHOUT[self.level])
        checks = self._try_checks(self._bare)["checks"].items()
        told: dict[str, str | None] = {name: each.get("problem") for name, each in checks}
        # Their advice is for the level that is proven, and might be the one that was just tried.
        problems = {name: problem and problem.partition("; use ")[0] for name, problem in told.items()}
        failing = [name for name, problem in problems.items() if problem]
        outcome = "all checks hold as well: this machine cannot tell them apart"
        if failing:
            outcome = f"{len(failing)} of {len(problems)} checks fail: {', '.join(failing)}"
        return f"Without it ({words}) {outcome}", problems

    def _try_checks(self, config: Config) -> dict[str, Any]:
        """Settings and results of the checks, from a process of their own; ConfigError if it refuses."""
        answer, log = self._scratch / "checks.json", self._scratch / "checks.log"
        # A file of its own: environments and their libraries may print lines at any time, also at the end.
        words = [str(answer), *PROMISES[self.level.name]]
        command = [sys.executable, "-P", "-m", "runlab.rerun.prove", *words]
        environment = worker_environment(self._job("checks", config), self._environment)
        status = self._children.run(command, environment, log)
        if status == REFUSED and (message := complaint(log)):
            raise ConfigError(message)
        if status:
            raise RuntimeError(f"the checks could not be tried: {last_words(log, status)}")
        return json.loads(answer.read_text())  # type: ignore[no-any-return]

    def _job(self, name: str, config: Config) -> Job:
        job = new_job(config, program(), self.overrides)
        return replace(job, run_id=f"{self.id}-{name.replace('_', '')}", run_dir=str(self.folder / name))

    def _run(self, number: int) -> RunResult:
        """Run 0 is undisturbed. The other runs are perturbed, with all observers and with none in turn."""
        name, config, perturbations = f"run_{number}", self.config, list[str]()
        variables: dict[str, str | None] = {}
        cwd, done = Path.cwd(), threading.Event()
        if number:
            config, variables, perturbations = perturbed(number, self.config)
            cwd = self._scratch / name
            cwd.mkdir()
            variables |= {each: str(cwd / each.lower()) for each in _CACHES}
            threading.Thread(target=_keep_busy, args=[done], daemon=True).start()
        job = self._job(name, config)
        merged = {**worker_environment(job, self._environment), **variables}
        environment = {key: value for key, value in merged.items() if value is not None}
        log, began = self.folder / f"{name}.log", time.monotonic()
        try:
            status = self._children.run(worker_command(), environment, log, cwd=cwd)
        finally:
            done.set()
        record = _record(run_dir := Path(job.run_dir))
        finished, trace = status == 0 and record.status == FINISHED, record.trace or TraceFacts()
        return RunResult(
            name=name,
            run_dir=str(run_dir),
            perturbations=perturbations,
            seconds=round(time.monotonic() - began, 2),
            error=None if finished else record.error or last_words(log, status),
            digest=trace.digest,
            iterations=trace.iterations,
            ratio=ratio_of(run_dir, self._ratio),
        )


def _record(run_dir: Path) -> RunRecord:
    """The record of a run; an empty one if the run ended before it had a record."""
    has_record = (run_dir / paths.RECORD).exists()
    return RunRecord.read(run_dir) if has_record else RunRecord(id=run_dir.name, status="")


def ratio_of(run_dir: Path, metric: str | None) -> float | None:
    """The first value of the metric that is not 0 (perhaps NaN); 0 if all are 0, None without any."""
    ratios = [row[metric] for row in read_metrics(run_dir) if metric in row]
    return next((ratio for ratio in ratios if ratio != 0.0), 0.0) if ratios else None


def problems_of(runs: Sequence[RunResult], level: Level, metric: str | None) -> Iterator[str]:
    """Problems of runs, all of which should equal the first one; one that failed, as far as it came."""
    for run in runs:
        if level in INVARIANT and run.ratio:
            yield f"{run.title}: {metric} is {run.ratio:g} and must be 0"
        elif run.digest != runs[0].digest:
            try:
                compared = compare.compare_runs(Path(runs[0].run_dir), Path(run.run_dir))
            except ConfigError:
                if run.error:  # before the end of an iteration
                    continue
                raise
            if not run.error or compared.verdict == compare.DIVERGED:
                yield f"{run.title} is not {runs[0].name}: {compare.headline(compared)}"


def _keep_busy(done: threading.Event) -> None:
    """Compute until `done` is set."""
    while not done.is_set():
        sum(range(100_000))


def try_checks(file: str, *names: str) -> None:
    """Write the settings read back, and the result of each check by name, with `problem` if it fails.

    Raises ConfigError if the run would be refused before its checks.
    """
    from runlab.determinism import checks, switches
    from runlab.envs.global_rng import seed_global_rng

    config = Job.from_environment().config
    settings = switches.apply(config)
    seed_global_rng(config.seed)
    algorithm, _ = project().build(config)
    results: dict[str, Any] = {}
    with contextlib.closing(algorithm):
        switches.confirm(settings)
        passes = checks.passes_of(algorithm, config, names)
        for name in names:
            try:
                results[name] = checks.CHECKS[name](config, passes)
            except ConfigError as error:
                results[name] = {"holds": False, "problem": str(error)}
    Path(file).write_text(json.dumps({"settings": settings, "checks": results}))


if __name__ == "__main__":
    end_with_parent()
    sys.exit(exit_status(lambda: try_checks(*sys.argv[1:])))
