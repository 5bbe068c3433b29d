"""Trials of a search and their runs, which several commands share."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import starmap
from pathlib import Path
from statistics import fmean
from typing import Any

import optuna
from optuna import Trial, TrialPruned
from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback, fail_stale_trials
from optuna.trial import FrozenTrial, TrialState

from runlab.analysis.published import show
from runlab.config.cli.overrides import assigned
from runlab.config.cli.preflight import preflight
from runlab.config.command_args import program
from runlab.config.project import as_typed
from runlab.config.texts import choose, few
from runlab.errors import ConfigError, RunError
from runlab.launch.process import worker_command, worker_environment
from runlab.launch.search_args import Args
from runlab.launch.study import BEAT_EVERY_S, RUN_OF_SEED, distribution, open_study
from runlab.launch.subprocesses import Children, Interrupted, last_words
from runlab.run import paths
from runlab.run.continuation import only_begins_anew
from runlab.run.files import InUse, lock, say, to_stderr
from runlab.run.job import Job, new_job, resume_job, run_folder
from runlab.run.read import read_metrics
from runlab.run.record import SearchRecord, SearchTrial

# The folder may have locks of another database. Machines may differ in hours and minutes.
_LOCK = "trial_{0.number}-{0.datetime_start:%S%f}.lock"
_MORE = "try more steps, wider ranges, or keys that matter more"


class Search:
    def __init__(
        self, args: Args, space: dict[str, dict[str, Any]], folder: Path, seeds: Sequence[int], workers: int
    ) -> None:
        self._args, self._folder, self._seeds = args, folder, seeds
        self._workers, self._at_once = workers, max(1, workers // len(seeds))  # runs and trials
        self._ranges = {key: distribution(rule) for key, rule in space.items()}
        self._study, self._database = open_study(args, folder, self._ranges)
        self._one_at_a_time, self._waits = threading.Lock(), False
        self._failed, self._seen = 0, set[int]()  # numbers of all trials
        self._own = dict[int, Callable[[], None]]()  # its trials, also ended ones, and what unlocks them
        self._noted = threading.Event()  # that no row has the objective
        self._children, self._runs = Children(), ThreadPoolExecutor(workers)
        self._label = "return" if args.metric == "eval/return" else args.metric

    def run(self) -> int:
        """Run trials until there are enough or a signal came; the exit status."""
        say(f"search in {self._folder}, trials at once: {self._at_once}")
        with self._children.listening(), self._runs, ThreadPoolExecutor(self._at_once) as pool:
            for each in [pool.submit(self._work) for _ in range(self._at_once)]:
                each.result()
        self._write(self._importances())
        try:
            self._children.check()
        except Interrupted as stopped:
            print("interrupted; the same command goes on with the search", file=sys.stderr)
            return 128 + stopped.number
        return self._conclude()

    def _trials(self, *states: str) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False, states=[TrialState[name] for name in states])

    def _ended(self) -> list[FrozenTrial]:
        return self._trials("COMPLETE", "PRUNED")

    def _work(self) -> None:
        """Run one trial after another, in a thread of its own, until there are enough or a signal came."""
        try:
            while (trial := self._next()) is not None:
                self._finish(trial)
        except Interrupted:
            pass
        except BaseException:
            self._children.stop()
            raise

    def _next(self) -> Trial | None:
        """A queued or new trial; None if there are enough, which may wait for those of other commands."""
        while True:
            self._children.check()
            with suppress(InUse), self._one_at_a_time, ExitStack() as turn:
                turn.callback(lock(self._folder))  # until the trial that this command begins is locked
                self._take_up()
                ended, running = len(self._ended()) + self._failed, self._trials("RUNNING")
                if ended >= self._args.trials:
                    return None
                if ended + len(running) < self._args.trials:
                    trial = self._study.ask(self._ranges)
                    self._claim(trial)
                    begun = self._trials("RUNNING", "COMPLETE", "PRUNED")
                    if sum(one.number < trial.number for one in begun) + self._failed < self._args.trials:
                        return trial
                    self._study.tell(trial, state=TrialState.FAIL)  # another folder was faster
                    self._own[trial.number]()
                others = [str(one.number) for one in running if one.number not in self._own]
                if others and not self._waits:
                    self._waits = True
                    say(f"waiting for trials of other commands: {few(others)}")
            time.sleep(1)

    def _claim(self, trial: Trial | FrozenTrial) -> bool:
        """Lock a trial, to be unlocked once it has ended; False if this or another living command has it."""
        with suppress(InUse):
            if trial.number not in self._own:
                self._own[trial.number] = lock(self._folder, _LOCK.format(trial))
                return True
        return False

    def _take_up(self) -> None:
        """Queue the trials again whose commands have died."""
        fail_stale_trials(self._study)  # in a database, which also has trials of other folders
        for trial in self._trials("RUNNING"):
            if self._database is not None and trial.number not in self._seen:
                self._seen.add(trial.number)  # its command may have died before its first sign of life
                self._database.record_heartbeat(trial._trial_id)
            here = self._database is None or (self._folder / _LOCK.format(trial)).exists()
            if here and self._claim(trial):
                self._queue_again(trial.number)
                self._own[trial.number]()

    def _queue_again(self, trial: Trial | int) -> None:
        with suppress(ValueError):  # another command did it
            RetryHeartbeatStaleTrialCallback()(self._study, self._study.tell(trial, state=TrialState.FAIL))

    def _finish(self, trial: Trial) -> None:
        """Run a trial to its end, which the study gets."""
        value, state = None, TrialState.FAIL
        try:
            value, state = self._try(trial), TrialState.COMPLETE
        except TrialPruned:
            state = TrialState.PRUNED
        except UpdateFinishedTrialError:
            say(f"trial {trial.number}: was silent for a minute, and queued again for any command")
        except Interrupted:
            self._queue_again(trial)
            raise
        except ConfigError as error:  # values that do not work together, or a failed run
            self._failed += 1
            print(f"trial {trial.number}: failed, {error}", file=sys.stderr)
        ended = self._study.tell(trial, value, state, skip_if_finished=True)
        self._own[trial.number]()  # a command that thought it running is refused by the study
        self._show(ended)

    def _try(self, trial: Trial) -> float:
        """Run a trial with each seed; the mean of the last values. Raises TrialPruned."""
        words = [*starmap(assigned, self._params(trial).items())]
        watch = _Watch(trial, self._args.metric, len(self._seeds), self._database, self._noted)
        for each in [self._runs.submit(self._run, trial, words, seed, watch) for seed in self._seeds]:
            each.result()
        if watch.enough():
            raise TrialPruned
        return watch.value()

    def _run(self, trial: Trial, words: list[str], seed: int, watch: _Watch) -> None:
        """Run a trial with a seed, unless the trial ends before."""
        try:
            while not watch.enough():
                self._children.check()
                with suppress(InUse), self._one_at_a_time:  # Hydra has one global state per process
                    run_dir, job = self._find_run(trial, words, seed)
                    break
                time.sleep(1)  # the run of a dead command ends its iteration
            else:
                return
            watch.run_dirs.append(run_dir)
            if job is None:
                return
            own_seed = f" seed={seed}" * (len(self._seeds) > 1)
            say(f"trial {trial.number}: {' '.join(words)}{own_seed}{', resumed' * job.resume}")
            log = self._folder / f"trial_{trial.number}-seed{seed}.log"
            environment = worker_environment(job, os.environ)
            # Without a limit of time: a run ends its iteration and writes a checkpoint first.
            status = self._children.run(
                worker_command(), environment, log, enough=watch.enough, grace_s=math.inf
            )
            if status and not watch.over:
                raise ConfigError(last_words(log, status))
        except BaseException:
            watch.over = True
            raise

    def _find_run(self, trial: Trial, words: list[str], seed: int) -> tuple[Path, Job | None]:
        """The folder of a trial's run, and its job, new or resumed; no job if the run has finished."""
        own = [word for word in self._args.words if not word.startswith("seed=")]
        plan = preflight([*own, *words, f"seed={seed}"], self._workers)
        config, overrides, key = plan.configs[0], plan.overrides[0], f"{RUN_OF_SEED}{seed}"
        # The study may have come from somebody else: it names a run, and no folder.
        run_dir = run_folder(config, paths.safe_name(str(trial.user_attrs.get(key))), overrides)
        if (run_dir / paths.RECORD).is_file():
            lock(run_dir)()
            if not only_begins_anew(run_dir):
                accept = self._args.accept is not None
                return run_dir, resume_job(run_dir, _command(), typed=config, accept=accept)
        job = new_job(config, _command(), overrides, auto_compile="compile" in plan.auto_keys)
        trial.set_user_attr(key, job.run_id)
        return Path(job.run_dir), job

    def _show(self, trial: FrozenTrial) -> None:
        """Print how a trial has ended."""
        if trial.state is TrialState.PRUNED:
            after = max(trial.intermediate_values)
            say(f"trial {trial.number}: pruned after {after:,} steps")
        elif trial.state is TrialState.COMPLETE:
            words = " ".join(starmap(assigned, self._params(trial).items()))
            best = self._best()
            holder = f"trial {best[0].number}" if len(best) == 1 else f"{len(best)} trials alike"
            score, highest = show(trial.value or 0.0), show(best[0].value or 0.0)
            say(f"trial {trial.number}: {words}, {self._label} {score} (best {highest}, {holder})")
        with self._one_at_a_time:
            self._write({})

    def _params(self, trial: Trial | FrozenTrial) -> dict[str, Any]:
        """The drawn values as the run of the trial has them."""
        return {key: _rounded(value, self._ranges[key]) for key, value in trial.params.items()}

    def _best(self) -> list[FrozenTrial]:
        """All trials with the best value."""
        complete = self._trials("COMPLETE")
        best = self._study.best_value if complete else None
        return [each for each in complete if each.value == best]

    def _importances(self) -> dict[str, float]:
        """The importance of each key for the return; empty with too few trials or equal returns."""
        if len({each.value for each in self._trials("COMPLETE")}) < 2:  # Optuna would say: all keys alike
            return {}
        with suppress(ValueError, RuntimeError), warnings.catch_warnings(action="ignore"):
            return optuna.importance.get_param_importances(self._study)
        return {}

    def _write(self, importances: Mapping[str, float]) -> None:
        """Write `search.json`, which the report draws."""
        trials = [
            SearchTrial(number=one.number, state=one.state.name, value=one.value, params=self._params(one))
            for one in self._ended()
        ]
        SearchRecord(
            words=self._args.overrides,
            sweep=self._args.sweep,
            objective=self._args.objective,
            trials=trials,
            importances=dict(importances),
        ).write(self._folder)

    def _conclude(self) -> int:
        best = self._best()
        if not best:
            print(f"no trial has ended with a {self._label}", file=sys.stderr)
            return 1
        highest = show(best[0].value or 0.0)
        if len(self._ended()) == len(best) > 1:
            say(f"all {len(best)} trials have the {self._label} {highest}, so none is best: {_MORE}")
            return 1 if self._failed else 0
        words = [word for word in self._args.words if not word.startswith("seed=")]
        words += [*starmap(assigned, self._params(best[0]).items()), "seed=1,2,3,4,5"]
        alike = f", of trials {few([str(each.number) for each in best])} alike" * (len(best) > 1)
        say(f"best of {len(self._ended())} trials: {self._label} {highest}{alike}")
        say(f"next: {as_typed('train', words)}")
        return 1 if self._failed else 0


class _Watch:
    """The runs of a trial, whose rows are reported as they come."""

    def __init__(
        self, trial: Trial, metric: str, num_runs: int, database: RDBStorage | None, noted: threading.Event
    ) -> None:
        self.run_dirs: list[Path] = []
        self.over = False
        self._trial, self._metric, self._num_runs, self._noted = trial, metric, num_runs, noted
        self._database, self._beat_at = database, -math.inf
        self._lock, self._sizes, self._reported = threading.Lock(), [0], -1

    def enough(self) -> bool:
        """True if all runs of the trial are to end: it was pruned, or one of them has failed."""
        with self._lock:
            if self._database is not None and time.monotonic() > self._beat_at + BEAT_EVERY_S:
                self._beat_at = time.monotonic()
                with suppress(Exception):  # if the database is gone, the next report says so
                    self._database.record_heartbeat(self._trial._trial_id)
            files = [run_dir / paths.METRICS for run_dir in self.run_dirs]
            sizes = [file.stat().st_size for file in files if file.exists()]
            if len(sizes) == self._num_runs and sizes != self._sizes:
                self._sizes = sizes
                curves = [dict(self._curve(run_dir)) for run_dir in self.run_dirs]
                for step in sorted(set(curves[0]).intersection(*curves)):
                    if step > self._reported and not self.over:
                        self._trial.report(fmean(curve[step] for curve in curves), step)
                        self._reported, self.over = step, self._trial.should_prune()
                if not (any(curves) or self._noted.is_set()) and "eval/return" in (names := self._names()):
                    self._noted.set()  # long before the search is refused, at the end of its first trial
                    answer = choose(self._metric, names)
                    to_stderr(f"note: objective={self._metric}: no row has it so far; {answer}")
            return self.over

    def value(self) -> float:
        """The mean of the last values of the runs."""
        curves = [self._curve(run_dir) for run_dir in self.run_dirs]
        if not all(curves):
            raise RunError(f"objective={self._metric}: no row has it; {choose(self._metric, self._names())}")
        value = fmean(curve[-1][1] for curve in curves)
        if math.isnan(value):
            raise ConfigError(f"its {self._metric} is not a number")
        return value

    def _names(self) -> list[str]:
        return sorted({name for run_dir in self.run_dirs for row in read_metrics(run_dir) for name in row})

    def _curve(self, run_dir: Path) -> list[tuple[int, float]]:
        rows = read_metrics(run_dir)
        return [(int(row["env_steps"]), row[self._metric]) for row in rows if self._metric in row]


def _command() -> list[str]:
    """The command line as it is recorded: the address of a database may have a password."""
    return ["storage=..." if word.startswith("storage=") else word for word in program()]


def _rounded(value: Any, drawn_from: BaseDistribution) -> Any:
    """A drawn number with as many digits as matter: four, or a thousandth of the width of its range.

    A multiple of a given step loses only the error of its sum.
    """
    if not isinstance(drawn_from, FloatDistribution):
        return value
    if drawn_from.step is not None:
        return float(f"{value:.12g}")
    digits = 3 - math.floor(math.log10(drawn_from.high - drawn_from.low))
    rounded = float(f"{value:.4g}") if drawn_from.log else round(value, digits)
    return min(max(rounded, drawn_from.low), drawn_from.high)
