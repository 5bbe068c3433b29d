"""`make search`: hyperparameters drawn by Optuna, with a run for each trial and seed, and several at once.

The arguments of the command identify a search: the same command goes on with it, and several commands at
once share it. A trial whose command was interrupted or has died is queued again and resumes its runs.
"""

from __future__ import annotations

import math
import os
import secrets
import shlex
import sys
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import starmap
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from runlab import INSTALLED
from runlab.analysis.published import show
from runlab.config.affects_results import BOOKKEEPING_KEYS
from runlab.config.cli.files import read_sweep
from runlab.config.cli.overrides import assigned
from runlab.config.cli.preflight import announce, more_folders, preflight
from runlab.config.command_args import argument, existing, program, rest, switch, whole
from runlab.config.project import as_typed, require
from runlab.config.texts import choose, few, first_line, installing
from runlab.errors import ConfigError, RunError, in_a_line
from runlab.launch.checks import HERE, check_plan
from runlab.launch.process import worker_command, worker_environment
from runlab.launch.study import BEAT_EVERY_S, SILENT_S, make, open_database, open_journal
from runlab.launch.subprocesses import Children, Interrupted, last_words
from runlab.launch.sweep_job import digest
from runlab.machine import usable_cores
from runlab.run import paths
from runlab.run.continuation import only_begins_anew
from runlab.run.files import InUse, lock, make_durable_folder, say
from runlab.run.job import Job, new_job, resume_job, run_folder
from runlab.run.read import read_metrics
from runlab.run.record import SearchRecord, SearchTrial
from runlab.run.trust import check_folder

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial, Trial

_WIDEST = 1e300  # end of a range; Optuna draws from no wider one
_RETURN = "eval/return"
_OPTUNAS = ("sampler.", "pruner.")
_OF_A_COMMAND = (*BOOKKEEPING_KEYS, "--config-dir")  # commands that differ in these share a search
_MORE = "try more steps, wider ranges, or keys that matter more"


@dataclass(frozen=True, kw_only=True)
class Args:
    """Search for hyperparameters: sweep=ppo-rates algo=ppo env=Hopper [trials=20] [workers=N] [prune=true].

    `sweep` names a file of conf/sweep/ with a range or choices for each key. A trial is a run, and its value
    the last `objective`, a metric of its rows: the highest is best, with `objective=-NAME` the lowest. With
    `seed=1,2` a trial is a run for each seed, and its value the mean. With `prune` a trial ends early if its
    values are worse than the median of those before it at the same step. `workers` is the number of runs at
    once. The same command goes on with the search, up to `trials` in all, and may run several times at once:
    they share a file in the folder of the search, or with `storage=postgresql://USER@HOST/NAME` a database.
    `sampler` and `pruner` are Optuna's, with arguments as in sampler.seed=3. `--config-dir=FOLDER` adds a
    folder like conf/.
    """

    sweep: str = argument()
    trials: int = argument(whole(1, 100_000), 20)
    workers: int | None = argument(whole(1, 1024), None)
    objective: str = argument(str, _RETURN)
    storage: str | None = argument(str, None)
    sampler: str = argument(str, "TPESampler")
    pruner: str = argument(str, "MedianPruner")
    prune: bool = argument(switch, True)
    config_dir: Path | None = argument(existing, None, key="--config-dir")
    overrides: list[str] = rest()

    @property
    def words(self) -> list[str]:
        """Arguments of `make train` for a trial, without the values that are drawn."""
        own = [word for word in self.overrides if not word.startswith(_OPTUNAS)]
        return [*([] if self.config_dir is None else [f"--config-dir={self.config_dir}"]), *own]

    @property
    def metric(self) -> str:
        return self.objective.removeprefix("-")


def main(args: Args) -> int:
    """Draw and run trials; 0 if all have ended, 1 if one failed, 130 or 143 after a signal."""
    require("optuna", "search", "search")
    space = read_space(args.sweep, more_folders(args.config_dir))
    # The ends of all ranges and all choices are checked before a run starts.
    ends = {key: rule.get("choices") or [rule["low"], rule["high"]] for key, rule in space.items()}
    tried = [assigned(key, value) for key, values in ends.items() for value in values]
    announce(len(tried))
    # For this check, values `auto` are chosen as if each core had a trial.
    plans = [preflight([*args.words, each], usable_cores()) for each in tried]
    plan, config = plans[0], plans[0].configs[0]
    seeds = plan.seeds or [config.seed]
    if any(plan.num_jobs > len(seeds) for plan in plans):
        raise ConfigError("a search draws its own values: leave out lists, except for seeds as in seed=1,2")
    if unfit := [word for word in (*args.words, *tried) if word.startswith(("run_dir=", "hydra", HERE))]:
        raise ConfigError(
            f"{unfit[0]}: is for training and not for a search, whose trials are runs below runs_dir"
        )
    if not config.eval_every and args.metric.startswith("eval/"):
        raise ConfigError("eval_every=0: a search compares the returns of evaluations, or another objective=")
    check_plan(plan)
    words = sorted(word for word in args.words if word.partition("=")[0] not in _OF_A_COMMAND)
    name = f"search-{args.sweep}-{digest([words, space, args.objective])}"
    folder = Path(config.runs_dir).expanduser().absolute() / paths.SWEEPS / name
    cores = config.num_threads + config.env.num_workers  # of a run
    workers = args.workers or max(1, usable_cores() // cores)
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import SQLAlchemyError

    try:
        return _Search(args, space, folder, seeds, workers).run()
    except (StorageInternalError, SQLAlchemyError, OSError) as error:  # Optuna wraps most, but not all
        why = first_line(error.__cause__ or error)
        raise RunError(
            f"the search in {folder} has stopped: {why}; the same command goes on with it"
        ) from error


def read_space(name: str, more: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """The range or the choices of each key in a file of sweep/ in conf/ or in `more`. Raises ConfigError."""
    space = read_sweep(name, more)
    if fixed := {"seed", "runs_dir"} & space.keys():
        raise ConfigError(f"sweep={name}: {min(fixed)}: all trials of a search have the same")
    for key, rule in space.items():
        if not _is_rule(rule):
            form = "{low: 0.1, high: 0.4}, with log: true for magnitudes, or {choices: [8, 16]}"
            raise ConfigError(f"sweep={name}: {key}: expected {form}")
    return space


def _is_rule(rule: Any) -> bool:
    if not isinstance(rule, dict):
        return False
    if {*rule} == {"choices"}:
        choices = rule["choices"]
        return isinstance(choices, list) and bool(choices) and not any(isinstance(x, dict) for x in choices)
    if not {"low", "high"} <= {*rule} <= {"low", "high", "log"}:
        return False
    low, high, log = rule["low"], rule["high"], rule.get("log", False)
    ends = (low, high)
    numbers = all(isinstance(end, int | float) and not isinstance(end, bool) for end in ends)
    numbers = numbers and all(abs(end) <= _WIDEST for end in ends)  # not nan either
    return numbers and low < high and log in (False, low > 0)


class _Search:
    def __init__(
        self, args: Args, space: dict[str, dict[str, Any]], folder: Path, seeds: Sequence[int], workers: int
    ) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
        warnings.filterwarnings("ignore", "Heartbeat of storage")  # not only for Study.optimize
        self._args, self._space, self._folder, self._seeds = args, space, folder, seeds
        self._failed, self._states, self._lowest = 0, optuna.trial.TrialState, args.objective.startswith("-")
        self._beside = min(len(seeds), workers)  # runs of a trial at once
        self._at_once = workers // self._beside
        pruner = make(optuna.pruners, "pruner", args.pruner if args.prune else "NopPruner", args.overrides)
        self._sampler = partial(make, optuna.samplers, "sampler", args.sampler, args.overrides)
        sampler, trying = self._sampler(), optuna.create_study(sampler=self._sampler())
        try:
            for _ in range(12):  # as often as samplers draw before they learn; some need further packages
                trial = trying.ask()
                for key, rule in space.items():
                    _draw(trial, key, rule)
                trying.tell(trial, 0.0)
        except (TypeError, ValueError, ImportError) as error:
            needs = f"; {installing('', f'{error.name}')}" if isinstance(error, ImportError) else ""
            raise ConfigError(f"sampler={args.sampler}: {first_line(error)}{needs}") from error
        database = open_database(args.storage, self._queue) if args.storage else None
        check_folder(folder)  # logs go there, and it may have come from somebody else
        with in_a_line(f"runs_dir={folder} cannot be made"):
            make_durable_folder(folder)
        self._id = secrets.token_hex(6)  # of this command, which holds a lock with that name
        lock(folder, _lock_file(self._id))
        self._database = database
        self._study = optuna.create_study(
            storage=database or open_journal(folder / "study.journal"),
            study_name=folder.name,
            direction="minimize" if self._lowest else "maximize",
            sampler=sampler,
            pruner=pruner,
            load_if_exists=True,
        )
        self._one_at_a_time, self._seeded, self._waits = threading.Lock(), False, False
        self._children = Children()
        self._label = "return" if args.objective == _RETURN else args.metric

    def run(self) -> int:
        """Run trials until there are enough or a signal came; the exit status."""
        begun = f"; {len(self._trials())} were begun before" if self._trials() else ""
        say(f"search in {self._folder}, {self._at_once} trials at once{begun}")
        ended = threading.Event()
        threading.Thread(target=self._show_life, args=(ended,), daemon=True).start()
        try:
            with self._children.listening(), ThreadPoolExecutor(self._at_once) as pool:
                for each in [pool.submit(self._work) for _ in range(self._at_once)]:
                    each.result()
        finally:
            ended.set()
        self._write(self._importances())
        try:
            self._children.check()
        except Interrupted as stopped:
            print("interrupted; the same command goes on with the search", file=sys.stderr)
            return 128 + stopped.number
        return self._conclude()

    def _trials(self, *states: str) -> list[FrozenTrial]:
        """The trials with these states, or all."""
        return self._study.get_trials(deepcopy=False, states=[self._states[name] for name in states] or None)

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
            with self._one_at_a_time:
                self._take_up()
                ended, running = len(self._ended()) + self._failed, self._trials("RUNNING")
                if ended >= self._args.trials:
                    return None
                if ended + len(running) < self._args.trials and (trial := self._ask()) is not None:
                    return trial
                others = [one for one in running if one.user_attrs.get("command") != self._id]
                if others and not self._waits:
                    self._waits = True
                    say(f"waiting for trials of other commands: {few([str(one.number) for one in others])}")
            time.sleep(1)

    def _ask(self) -> Trial | None:
        """A trial for this command; None if other commands began the last ones at the same moment."""
        trial = self._study.ask()
        trial.set_user_attr("command", self._id)
        if self._database is not None:
            self._database.record_heartbeat(trial._trial_id)
        if not self._seeded:  # by a number that no other command has, so that it draws other values
            self._seeded, self._study.sampler = True, self._sampler(seed=trial.number)
        kept = self._trials("RUNNING", "COMPLETE", "PRUNED", "WAITING")
        queued = {one.number for one in kept if "fixed_params" in one.system_attrs}
        before = queued | {one.number for one in kept if one.number < trial.number}
        if trial.number in queued or len(before) + self._failed < self._args.trials:
            return trial
        self._study.tell(trial, state=self._states.FAIL)
        return None

    def _show_life(self, ended: threading.Event) -> None:
        """Show other machines that the trials of this command are alive."""
        while self._database is not None and not ended.wait(BEAT_EVERY_S):
            with suppress(Exception):  # the threads of the trials say that the database is gone
                for trial in self._trials("RUNNING"):
                    if trial.user_attrs.get("command") == self._id:
                        self._database.record_heartbeat(trial._trial_id)

    def _take_up(self) -> None:
        """Queue the trials again whose commands have died."""
        from optuna.storages import fail_stale_trials

        fail_stale_trials(self._study)  # in a database, which may be all that machines share
        for trial in self._trials("RUNNING"):
            command = str(trial.user_attrs.get("command"))  # None: killed before it could say so
            reached = self._database is None or (self._folder / _lock_file(command)).exists()
            begun = (datetime.now() - (trial.datetime_start or datetime.now())).total_seconds()
            if command != self._id and (begun > 2 * SILENT_S if command == "None" else reached):
                with suppress(InUse):
                    lock(self._folder, _lock_file(command))()
                    self._queue_again(trial)

    def _queue_again(self, trial: Trial | FrozenTrial) -> None:
        from optuna.exceptions import UpdateFinishedTrialError

        with suppress(UpdateFinishedTrialError):  # another command did it
            self._study._storage.set_trial_state_values(trial._trial_id, self._states.FAIL)
            self._queue(self._study, trial)

    def _queue(self, study: Study, trial: Trial | FrozenTrial) -> None:
        """Queue the values and the runs of a trial, for the first command that asks for one."""
        runs = {key: value for key, value in trial.user_attrs.items() if key != "command"}
        study.enqueue_trial(trial.params, user_attrs=runs)

    def _finish(self, trial: Trial) -> None:
        """Run a trial to its end, which the study gets."""
        from optuna import TrialPruned
        from optuna.exceptions import UpdateFinishedTrialError

        value, state = None, self._states.FAIL
        try:
            value, state = self._try(trial), self._states.COMPLETE
        except TrialPruned:
            state = self._states.PRUNED
        except UpdateFinishedTrialError:
            say(f"trial {trial.number}: was silent for a minute, and queued again for any command")
            return
        except Interrupted:
            self._queue_again(trial)
            raise
        except ConfigError as error:  # values that do not work together, or a failed run
            self._failed += 1
            print(f"trial {trial.number}: failed, {error}", file=sys.stderr)
        self._show(self._study.tell(trial, value, state, skip_if_finished=True))

    def _try(self, trial: Trial) -> float:
        """Run a trial with each seed; the mean of the last values. Raises TrialPruned."""
        from optuna import TrialPruned

        words = [*starmap(assigned, _drawn(trial, self._space).items())]
        watch = _Watch(trial, self._args.metric, len(self._seeds))
        with ThreadPoolExecutor(self._beside) as pool:
            for each in [pool.submit(self._run, trial, words, seed, watch) for seed in self._seeds]:
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
            several = f" seed={seed}" * (len(self._seeds) > 1)
            say(f"trial {trial.number}: {' '.join(words)}{several}{', resumed' * job.resume}")
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
        plan = preflight([*own, *words, f"seed={seed}"], self._beside * self._at_once)
        config, overrides, key = plan.configs[0], plan.overrides[0], f"run-seed{seed}"
        # The study may have come from somebody else: it names a run, and no folder.
        run_dir = run_folder(config, paths.safe_name(str(trial.user_attrs.get(key))), overrides)
        if (run_dir / paths.RECORD).is_file():
            lock(run_dir)()
            if not only_begins_anew(run_dir):
                return run_dir, resume_job(run_dir, _command(), typed=config)
        job = new_job(config, _command(), overrides, auto_compile="compile" in plan.auto_keys)
        trial.set_user_attr(key, job.run_id)
        return Path(job.run_dir), job

    def _show(self, trial: FrozenTrial) -> None:
        """Print how a trial has ended."""
        if trial.state is self._states.PRUNED:
            after = max(trial.intermediate_values)
            say(f"trial {trial.number}: pruned after {after:,} steps")
        elif trial.state is self._states.COMPLETE:
            words = " ".join(starmap(assigned, self._params(trial).items()))
            best = self._best()
            holder = f"trial {best[0].number}" if len(best) == 1 else f"{len(best)} trials alike"
            score, highest = show(trial.value or 0.0), show(best[0].value or 0.0)
            say(f"trial {trial.number}: {words}, {self._label} {score} (best {highest}, {holder})")
        with self._one_at_a_time:
            self._write({})

    def _params(self, trial: FrozenTrial) -> dict[str, Any]:
        """The drawn values as the run of the trial has them."""
        return {key: _rounded(value, self._space.get(key, {})) for key, value in trial.params.items()}

    def _best(self) -> list[FrozenTrial]:
        """All trials with the best value."""
        complete, best_of = self._trials("COMPLETE"), min if self._lowest else max
        best = best_of((each.value for each in complete if each.value is not None), default=None)
        return [each for each in complete if each.value == best]

    def _importances(self) -> dict[str, float]:
        """The importance of each key for the return; empty with too few trials or equal returns."""
        import optuna

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
        words, sweep, objective = self._args.overrides, self._args.sweep, self._args.objective
        record = SearchRecord(
            words=words, sweep=sweep, objective=objective, trials=trials, importances=dict(importances)
        )
        record.write(self._folder)

    def _conclude(self) -> int:
        best = self._best()
        if not best:
            print(f"no trial has ended with a {self._label}", file=sys.stderr)
            return 1
        highest = show(best[0].value or 0.0)
        if len(self._ended()) == len(best) > 1:
            say(f"all {len(best)} trials have the {self._label} {highest}, so none is best: {_MORE}")
            return 1 if self._failed else 0
        folder = self._args.config_dir
        flag = "" if INSTALLED else "ARGS="
        words = [] if folder is None else [f"{flag}--config-dir={folder}"]
        words += [word for word in self._args.overrides if not word.startswith(("seed=", *_OPTUNAS))]
        words += [*starmap(assigned, self._params(best[0]).items())]
        alike = f", of trials {few([str(each.number) for each in best])} alike" * (len(best) > 1)
        say(f"best of {len(self._ended())} trials: {self._label} {highest}{alike}")
        say(f"next: {as_typed('train')} {' '.join(map(shlex.quote, words))} seed=1,2,3,4,5")
        return 1 if self._failed else 0


class _Watch:
    """The runs of a trial, whose rows are reported as they come."""

    def __init__(self, trial: Trial, metric: str, num_runs: int) -> None:
        self.run_dirs: list[Path] = []
        self.over = False
        self._trial, self._metric, self._num_runs = trial, metric, num_runs
        self._lock, self._sizes, self._reported = threading.Lock(), [0], -1

    def enough(self) -> bool:
        """True if all runs of the trial are to end: it was pruned, or one of them has failed."""
        with self._lock:
            files = [run_dir / paths.METRICS for run_dir in self.run_dirs]
            sizes = [file.stat().st_size for file in files if file.exists()]
            if len(sizes) == self._num_runs and sizes != self._sizes:
                self._sizes = sizes
                curves = [dict(self._curve(run_dir)) for run_dir in self.run_dirs]
                for step in sorted(set(curves[0]).intersection(*curves)):
                    if step > self._reported and not self.over:
                        self._trial.report(fmean(curve[step] for curve in curves), step)
                        self._reported, self.over = step, self._trial.should_prune()
            return self.over

    def value(self) -> float:
        """The mean of the last values of the runs."""
        curves = [self._curve(run_dir) for run_dir in self.run_dirs]
        if not all(curves):
            names = {name for run_dir in self.run_dirs for row in read_metrics(run_dir) for name in row}
            raise RunError(f"objective={self._metric}: no row has it; {choose(self._metric, sorted(names))}")
        value = fmean(curve[-1][1] for curve in curves)
        if math.isnan(value):
            raise ConfigError(f"its {self._metric} is not a number")
        return value

    def _curve(self, run_dir: Path) -> list[tuple[int, float]]:
        rows = read_metrics(run_dir)
        return [(int(row["env_steps"]), row[self._metric]) for row in rows if self._metric in row]


def _lock_file(command: str) -> str:
    return f"command-{paths.safe_name(command)}.lock"


def _command() -> list[str]:
    """The command line as it is recorded: the address of a database may have a password."""
    return ["storage=..." if word.startswith("storage=") else word for word in program()]


def _drawn(trial: Trial, space: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The values of a trial. Raises ConfigError if Optuna cannot draw them, as in a damaged study."""
    try:
        return {key: _rounded(_draw(trial, key, rule), rule) for key, rule in space.items()}
    except (TypeError, ValueError, ImportError) as error:
        raise ConfigError(first_line(error)) from error


def _draw(trial: Trial, key: str, rule: Mapping[str, Any]) -> Any:
    if "choices" in rule:
        # Optuna compares choices by hash, which a list has none of.
        return trial.suggest_categorical(key, [str(x) if isinstance(x, list) else x for x in rule["choices"]])
    low, high, log = rule["low"], rule["high"], rule.get("log", False)
    if isinstance(low, int) and isinstance(high, int):
        return trial.suggest_int(key, low, high, log=log)
    return trial.suggest_float(key, low, high, log=log)


def _rounded(value: Any, rule: Mapping[str, Any]) -> Any:
    """A drawn number with as many digits as matter: four, or a thousandth of the width of its range."""
    if not isinstance(value, float) or "low" not in rule or rule["low"] == rule["high"]:
        return value
    low, high = float(rule["low"]), float(rule["high"])
    digits = 3 - math.floor(math.log10(high - low))
    rounded = float(f"{value:.4g}") if rule.get("log", False) else round(value, digits)
    return min(max(rounded, low), high)
