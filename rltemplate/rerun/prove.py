"""Whether a level keeps its promise here: one configuration, run several times in processes of their own.

The first run is left alone. The others are disturbed in everything that must not matter: hash seed, working
directory, environment variables, caches, load, observers, and where the level promises it also threads and
the grouping of rows. All must leave the same trace. Then the other way round: without what the level adds, at
least one check should fail, or else the checks may see nothing.

What was asked, done and seen is written as a certificate, for programs and for people.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rltemplate.analysis import compare, traces
from rltemplate.config.cli.keys import option_names
from rltemplate.config.cli.preflight import preflight
from rltemplate.config.loading import to_dict
from rltemplate.config.schema import Config, Level, TraceDetail
from rltemplate.determinism.checks import PROMISES
from rltemplate.determinism.machine import machine_facts, package_versions
from rltemplate.determinism.variables import ROW_GROUPS
from rltemplate.launch.process import worker_environment
from rltemplate.launch.subprocesses import (
    REFUSED,
    busy_core,
    complaint,
    last_words,
    lines_of,
)
from rltemplate.rerun import certificate
from rltemplate.rerun.perturbations import (
    CACHES,
    INVARIANT,
    PATIENT,
    WITHOUT,
    Planned,
    as_typed,
    changed,
    plan_inverse,
    plan_runs,
    with_changes,
)
from rltemplate.rerun.series import (
    Series,
    check_environment,
    record_of,
    take_out,
)
from rltemplate.run import paths
from rltemplate.run.record import FINAL_STATUSES
from rltemplate.types import ConfigError

FORMAT, VERSION = "rltemplate-certificate", 1
FOLDER = "prove"
# The largest |ratio - 1| before the first update of an iteration; 0 where rows depend on nothing else.
METRIC = "policy/first_ratio_max_error"
HOLDS, BROKEN = "holds", "broken"
TIMES, MOST = 5, 1000
SHORT = 10_000  # environment steps of each run, where the user names no other number

Say = Callable[[str], None]


# --- The question ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is to be proved. `bare` is the configuration without what the level adds.

    `shortened_from` is the number of environment steps that the configuration had, if the runs have fewer.
    """

    config: Config
    overrides: list[str]
    bare: Config
    bare_overrides: list[str]
    times: int
    shortened_from: int | None = None

    @property
    def level(self) -> Level:
        """The level on trial."""
        return self.config.determinism.level


def ask(words: Sequence[str]) -> Question:
    """The question that a command line stands for: overrides as for training, and `times=N`.

    Raises `ConfigError` with one or two lines for the first mistake. Creates nothing.
    """
    word, overrides = take_out("times", words)
    times = TIMES if word is None else _number(word)
    plan = preflight(overrides)
    if plan.sweep:
        several = next((f"{word}: " for word in overrides if _is_list_of_values(word)), "")
        raise ConfigError(f"{several}a proof is about one configuration; give one value, or prove one by one")
    config = plan.configs[0]
    _check_provable(config)
    shortened_from = None
    short = _short(config)
    if not any(word.startswith("total_env_steps=") for word in overrides) and short < config.total_env_steps:
        shortened_from = config.total_env_steps
        plan = preflight([*overrides, f"total_env_steps={short}"])
        config = plan.configs[0]
    check_environment(config)
    if config.determinism.level is Level.repeat:
        left = [word for word in plan.argv if not word.startswith(("determinism", "num_threads="))]
        bare_plan = preflight([*left, "determinism=fast", "num_threads=2"])
        bare, bare_overrides = bare_plan.configs[0], bare_plan.argv
    else:
        without = WITHOUT[config.determinism.level]
        bare, bare_overrides = changed(config, without), with_changes(plan.argv, without)
    silent = {"video_every": 0}
    return Question(
        config=changed(config, silent),
        overrides=with_changes(plan.argv, silent),
        bare=changed(bare, silent),
        bare_overrides=with_changes(bare_overrides, silent),
        times=times,
        shortened_from=shortened_from,
    )


def _number(word: str) -> int:
    text = word.partition("=")[2]
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < 2:
        raise ConfigError(f"{word}: expected a whole number, at least 2, for runs are compared")
    if int(text) > MOST:
        raise ConfigError(f"{word}: expected at most {MOST}, for each is a run of its own")
    return int(text)


def _is_list_of_values(word: str) -> bool:
    """Whether an override is what makes a sweep; a comma inside of brackets is not."""
    value = re.sub(r"[\[{].*[\]}]", "", word.partition("=")[2])
    return "," in value or "(" in value


def _check_provable(config: Config) -> None:
    level = config.determinism.level
    if not PROMISES[level.name]:
        allowed = ", ".join(name for name in option_names("determinism") if name != level.name)
        raise ConfigError(f"determinism={level.name}: promises nothing that could be proved; use {allowed}")
    if config.run_dir is not None:
        raise ConfigError(f"run_dir={config.run_dir}: each run of a proof has its own folder; use runs_dir")
    if config.trace is TraceDetail.off:
        raise ConfigError("trace=off: a proof compares traces; use trace=iteration or trace=step")


def _short(config: Config) -> int:
    """Environment steps of a short run in which something is learned."""
    steps = SHORT
    while steps < config.total_env_steps and any(config.algo.notes(config.env.num_envs, steps)):
        steps *= 2
    return min(steps, config.total_env_steps)


# --- The runs --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """One run that came to its end, whatever that was. `ratio` is the largest, of `ratios` values."""

    name: str
    run_dir: str
    disturbances: list[str]
    overrides: list[str]
    environment: dict[str, str | None]
    working_directory: str
    seconds: float
    exit_status: int
    status: str
    error: str | None
    digest: str | None
    iterations: int
    env_steps: int
    ratios: int
    ratio: float | None
    settings: dict[str, Any]
    checks: dict[str, Any]

    @property
    def finished(self) -> bool:
        """Whether there is something to compare."""
        return self.status == "finished"

    @property
    def words(self) -> str:
        """In what it was disturbed, for people."""
        return ", ".join(self.disturbances) or "undisturbed"


class Proof:
    """The work on one question."""

    def __init__(
        self,
        question: Question,
        command: Sequence[str] = (),
        *,
        say: Say = print,
        extra: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        """`say` takes a line about each run; `extra` gives runs further variables by name, for tests."""
        self.question = question
        self._series = Series(FOLDER, question.config, command)
        self._say = say
        self._extra = extra or {}

    @property
    def folder(self) -> Path:
        """Where the runs and the certificate go; it is there once the checks have been tried."""
        return self._series.folder

    def run(self) -> dict[str, Any]:
        """Do it, write the certificate and return it.

        Raises `ConfigError`, before anything is created, for what would refuse the run; `Interrupted` after
        a signal. The runs that there are then stay.
        """
        question, children = self.question, self._series.children
        with children.listening(), tempfile.TemporaryDirectory(prefix="prove-") as workshop:
            self._workshop = Path(workshop)
            promised = self._try_checks(question.config, PROMISES[question.level.name])
            self._series.begin()
            problems = [
                f"the check {name}: {found['problem']}"
                for name, found in promised["checks"].items()
                if not found["holds"]
            ]
            runs: list[Done] = []
            if not problems:
                runs = self._runs()
                problems = [problem for run in runs for problem in _problems(run, question.level)]
            comparison = _first_divergence(runs)
            if comparison is not None:
                problems.insert(0, _diverged(comparison, runs))
            inverse = None if problems else self._inverse()
            children.check()
            document = self._document(promised, runs, problems, comparison, inverse)
            certificate.write(document, [self.folder, *(Path(run.run_dir) for run in runs)])
        return document

    def _runs(self) -> list[Done]:
        planned = plan_runs(self.question.config, self.question.times, os.environ)
        done: list[Done] = []
        for i, each in enumerate(planned, start=1):
            run = self._run(each, self.question.config, self.question.overrides)
            self._say(f"{run.name}, {i} of {len(planned)} ({each.words}): {_outcome(run)}")
            done.append(run)
            if not done[0].finished:
                break  # nothing to compare the others with
        return done

    def _inverse(self) -> dict[str, Any]:
        """What happens without what the level adds, in checks and for all but a profile in two runs."""
        question = self.question
        seen: list[dict[str, Any]] = []
        without = _words_without(question.level)
        self._say(f"without it ({without}):")
        try:
            found = self._try_checks(question.bare, PROMISES[question.level.name])["checks"]
        except (ConfigError, RuntimeError) as error:
            seen.append({"what": "checks", "fails": False, "seen": f"could not be tried: {error}"})
            found = {}
        for name, each in found.items():
            text = "holds all the same" if each["holds"] else each["problem"]
            seen.append({"what": f"check {name}", "fails": not each["holds"], "seen": text})
        runs: list[Done] = []
        if question.level is not Level.profile:
            for planned in plan_inverse(question.bare, question.level, os.environ):
                run = self._run(planned, question.bare, question.bare_overrides)
                self._say(f"{run.name} ({planned.words}): {_outcome(run)}")
                runs.append(run)
            seen += _seen_in(runs, question.level)
        failing = [each["what"] for each in seen if each["fails"]]
        if failing:
            sentence = f"without it ({without}) {len(failing)} of {len(seen)} fail: {', '.join(failing)}"
        else:
            sentence = f"without it ({without}) all hold as well: this machine cannot tell them apart"
        return {
            "without": without,
            "tells_apart": bool(failing),
            "sentence": sentence,
            "seen": seen,
            "runs": [asdict(run) for run in runs],
        }

    def _try_checks(self, config: Config, names: Sequence[str]) -> dict[str, Any]:
        """Settings and checks from a process of their own; `ConfigError` if it refuses the configuration."""
        module = "rltemplate.rerun.level_checks"
        command = [sys.executable, "-P", "-m", module, *names]
        job = self._series.job("checks", config, [])
        environment = worker_environment(job, config, os.environ) | PATIENT
        environment.pop(ROW_GROUPS, None)
        answer, log = self._workshop / "checks.json", self._workshop / "checks.log"
        status = self._series.children.run(command, environment, log, out=answer)
        if status == REFUSED and (said := complaint(log)):
            raise ConfigError(said)
        printed = lines_of(answer)
        if status or not printed:
            raise RuntimeError(f"{module} gave no answer: {last_words(log, status)}")
        found: dict[str, Any] = json.loads(printed[-1])  # environments may print as well
        return found

    def _run(self, planned: Planned, config: Config, overrides: Sequence[str]) -> Done:
        config, overrides = changed(config, planned.changes), with_changes(overrides, planned.changes)
        variables: dict[str, str | None] = dict(planned.environment)
        if planned.cold:
            variables |= {name: str(self._workshop / planned.name / name.lower()) for name in CACHES}
        variables |= self._extra.get(planned.name, {})
        cwd = Path.cwd()
        if planned.elsewhere:
            cwd = self._workshop / planned.name / "another folder"
            cwd.mkdir(parents=True)
        began = time.monotonic()
        with busy_core() if planned.load else contextlib.nullcontext():
            status = self._series.run(planned.name, config, overrides, variables=variables, cwd=cwd)
        seconds, log = time.monotonic() - began, self._series.log(planned.name)
        run_dir = self._series.run_dir(planned.name)
        return _done(planned, overrides, variables, cwd, seconds, status, run_dir, log)

    def _document(
        self,
        promised: Mapping[str, Any],
        runs: Sequence[Done],
        problems: Sequence[str],
        comparison: compare.Comparison | None,
        inverse: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        question = self.question
        config, level = question.config, question.level.name
        what = f"{config.algo.name} on {config.env.id}"
        if problems:
            sentence = f"{level} is broken for {what}: {problems[0]}"
        else:
            sentence = (
                f"{level} holds for {what}: {len(runs)} runs, {len(runs) - 1} of them disturbed, "
                f"{runs[0].iterations:,} iterations each, one digest {runs[0].digest}"
            )
        record = record_of(Path(runs[0].run_dir)) if runs else {}
        assert self._series.snapshot is not None
        snapshot = asdict(self._series.snapshot)
        code = ("base_commit", "branch", "dirty", "changed_count", "problem")
        return {
            "format": FORMAT,
            "version": VERSION,
            "id": self._series.id,
            "verdict": BROKEN if problems else HOLDS,
            "sentence": sentence,
            "problems": list(problems),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "folder": str(self.folder),
            "asked": {
                "command": self._series.command,
                "overrides": question.overrides,
                "times": question.times,
                "level": level,
                "shortened_from": question.shortened_from,
                "config": to_dict(config),
            },
            "runs": [asdict(run) for run in runs],
            "checks": promised["checks"],
            "ratio": _ratio_facts(runs) if question.level in INVARIANT else None,
            "comparison": None if comparison is None else asdict(comparison),
            "report": None if comparison is None else compare.report(comparison),
            "inverse": inverse,
            "settings": promised["settings"],
            "versions": record.get("versions") or package_versions(),
            "machine": record.get("machine") or machine_facts(with_gpus=False),
            "git": record.get("git") or {key: snapshot[key] for key in code},
        }


# --- What was seen ---------------------------------------------------------------------------------------


def _done(
    planned: Planned,
    overrides: list[str],
    variables: dict[str, str | None],
    cwd: Path,
    seconds: float,
    exit_status: int,
    run_dir: Path,
    log: Path,
) -> Done:
    """What the folder of a run says about it."""
    record = record_of(run_dir)
    status, error = str(record.get("status")), record.get("error")
    if exit_status or status != "finished":
        if status not in FINAL_STATUSES or status == "finished":  # it died, or never came to its record
            status = "refused" if exit_status == REFUSED else "failed"
        error = error or last_words(log, exit_status)
    trace = record.get("trace") or {}
    ratios = list(_ratios(run_dir))
    level = record.get("determinism") or {}
    return Done(
        name=planned.name,
        run_dir=str(run_dir),
        disturbances=planned.disturbances,
        overrides=overrides,
        environment=_shown(variables),
        working_directory=str(record.get("working_directory", cwd)),
        seconds=round(seconds, 2),
        exit_status=exit_status,
        status=status,
        error=error,
        digest=trace.get("digest"),
        iterations=int(trace.get("iterations", 0)),
        env_steps=_env_steps(run_dir),
        ratios=len(ratios),
        ratio=_largest(ratios),
        settings=level.get("settings") or {},
        checks=level.get("checks") or {},
    )


def _shown(variables: Mapping[str, str | None]) -> dict[str, str | None]:
    """What the certificate says of variables; the length of those that only make the environment larger."""
    return {
        name: value if value is None or len(value) < 1000 else f"{len(value):,} characters"
        for name, value in variables.items()
    }


def _env_steps(run_dir: Path) -> int:
    try:
        with traces.open_trace(run_dir, "") as trace:
            return trace.reach.env_steps
    except ConfigError:
        return 0


def _ratios(run_dir: Path) -> Iterator[float]:
    """The metric at every log point that has it; a value that is no number counts as infinite."""
    with contextlib.suppress(FileNotFoundError):
        for line in (run_dir / paths.METRICS).read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if METRIC in row:
                yield float("inf") if row[METRIC] is None else float(row[METRIC])


def _largest(ratios: Sequence[float]) -> float | None:
    """None where there are none; JSON has no infinity, so that is the largest number instead."""
    return min(max(ratios), sys.float_info.max) if ratios else None


def _ratio_facts(runs: Sequence[Done]) -> dict[str, Any]:
    known = [run.ratio for run in runs if run.ratio is not None]
    return {"metric": METRIC, "values": sum(run.ratios for run in runs), "largest": max(known, default=None)}


def _problems(run: Done, level: Level) -> Iterator[str]:
    """What is wrong with a run on its own."""
    who = f"{run.name} ({run.words})"
    if not run.finished:
        yield f"{who} {run.status}: {run.error}"
    for name, found in run.checks.items():
        if isinstance(found, Mapping) and not found.get("holds", True):
            yield f"{who}: the check {name} does not hold"
    if level in INVARIANT and run.ratio:
        yield f"{who}: {METRIC} is {run.ratio:g} and must be 0"


def _first_divergence(runs: Sequence[Done]) -> compare.Comparison | None:
    """The first run with another trace than the first one, which is undisturbed."""
    for run in runs[1:]:
        if run.finished and runs[0].finished:
            comparison = compare.compare_runs(Path(runs[0].run_dir), Path(run.run_dir))
            if comparison.verdict != compare.IDENTICAL or run.digest != runs[0].digest:
                return comparison
    return None


def _diverged(comparison: compare.Comparison, runs: Sequence[Done]) -> str:
    words = next(run.words for run in runs if run.run_dir == comparison.b.run_dir)
    first, other = (Path(side.run_dir).name for side in (comparison.a, comparison.b))
    return f"{other} ({words}) is not {first}: {compare.headline(comparison)}"


def _seen_in(runs: Sequence[Done], level: Level) -> Iterator[dict[str, Any]]:
    """What two runs without the level show."""
    failed = next((run for run in runs if not run.finished), None)
    if failed is not None:
        text = f"could not be compared: {failed.name} {failed.status}, {failed.error}"
        yield {"what": "traces", "fails": False, "seen": text}
        return
    first, other = runs
    comparison = compare.compare_runs(Path(first.run_dir), Path(other.run_dir))
    differ = comparison.verdict != compare.IDENTICAL
    yield {"what": "traces", "fails": differ, "seen": compare.headline(comparison)}
    facts = _ratio_facts(runs)
    if level in INVARIANT and facts["values"]:
        text = f"{METRIC} is {facts['largest']:g} at most, in {facts['values']:,} values"
        yield {"what": "ratio", "fails": facts["largest"] != 0.0, "seen": text}


def _words_without(level: Level) -> str:
    if level is Level.repeat:
        return "determinism=fast, 2 threads"
    return ", ".join(f"{key}={as_typed(value)}" for key, value in WITHOUT[level].items())


def _outcome(run: Done) -> str:
    if not run.finished:
        return f"{run.status}, {run.error}"
    return f"{run.env_steps:,} steps, digest {run.digest}, {run.seconds:.0f} s"
