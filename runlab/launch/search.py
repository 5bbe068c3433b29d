"""`make search`: hyperparameters drawn by Optuna, with a run for each trial and several trials at once.

The arguments of the command identify a search: the same command goes on with it, and interrupted trials
resume their runs. Optuna's study is an SQLite file in the folder of the search.
"""

from __future__ import annotations

import math
import os
import shlex
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runlab import INSTALLED
from runlab.analysis.published import show
from runlab.config.cli.files import read_sweep
from runlab.config.cli.overrides import assigned
from runlab.config.cli.preflight import announce, more_folders, preflight
from runlab.config.command_args import argument, existing, program, rest, switch, whole
from runlab.config.project import as_typed, require
from runlab.config.texts import few, first_line
from runlab.errors import ConfigError, RunError
from runlab.launch.checks import HERE, check_plan
from runlab.launch.process import worker_command, worker_environment
from runlab.launch.subprocesses import Children, Interrupted, last_words
from runlab.launch.sweep_job import claim_folder, digest
from runlab.machine import usable_cores
from runlab.run import paths
from runlab.run.continuation import only_begins_anew
from runlab.run.files import say
from runlab.run.job import Job, new_job, resume_job
from runlab.run.read import read_metrics
from runlab.run.record import SearchRecord, SearchTrial

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial, Trial

_WIDEST = 1e300  # end of a range; Optuna draws from no wider one
_MORE = "try more steps, wider ranges, or keys that matter more"


@dataclass(frozen=True, kw_only=True)
class Args:
    """Search for hyperparameters: sweep=ppo-rates algo=ppo env=Hopper [trials=20] [workers=N] [prune=true].

    `sweep` names a file of conf/sweep/ with a range or choices for each key. A trial is a run, and its value
    the return of the last evaluation. With `prune` a trial ends early if its evaluations are below the median
    of those before it at the same step. `seed=N` is the seed of all runs. The same command goes on with the
    search, up to `trials` in all. `--config-dir=FOLDER` adds a folder like conf/.
    """

    sweep: str = argument()
    trials: int = argument(whole(1, 100_000), 20)
    workers: int | None = argument(whole(1, 1024), None)
    prune: bool = argument(switch, True)
    config_dir: Path | None = argument(existing, None, key="--config-dir")
    overrides: list[str] = rest()

    @property
    def words(self) -> list[str]:
        """Arguments of `make train` for a trial, without the values that are drawn."""
        return [*([] if self.config_dir is None else [f"--config-dir={self.config_dir}"]), *self.overrides]


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
    if any(plan.sweep for plan in plans):
        raise ConfigError("a search draws its own values: leave out lists such as seed=1,2")
    plan, config = plans[0], plans[0].configs[0]
    if unfit := [word for word in (*args.overrides, *tried) if word.startswith(("run_dir=", "hydra", HERE))]:
        raise ConfigError(
            f"{unfit[0]}: is for training and not for a search, whose trials are runs below runs_dir"
        )
    if not config.eval_every:
        raise ConfigError("eval_every=0: a search compares the returns of evaluations")
    check_plan(plan)
    name = f"search-{args.sweep}-{digest([sorted(args.overrides), space])}"
    folder = Path(config.runs_dir).expanduser().absolute() / paths.SWEEPS / name
    claim_folder(folder)
    cores = config.num_threads + config.env.num_workers  # of a trial
    workers = args.workers or max(1, usable_cores() // cores)
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import SQLAlchemyError

    try:
        return _Search(args, space, folder, workers).run()
    except (StorageInternalError, SQLAlchemyError) as error:  # Optuna wraps most, but not all
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
    def __init__(self, args: Args, space: dict[str, dict[str, Any]], folder: Path, workers: int) -> None:
        import optuna

        self._failed, self._states = 0, optuna.trial.TrialState
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._args, self._space, self._folder, self._workers = args, space, folder, workers
        pruner = optuna.pruners.MedianPruner() if args.prune else optuna.pruners.NopPruner()
        self._study = optuna.create_study(
            storage=_storage(f"sqlite:///{folder / 'study.db'}"),
            study_name=folder.name,
            direction="maximize",
            pruner=pruner,
            load_if_exists=True,
        )
        # With another seed: a search that goes on must not draw its first values again.
        self._study.sampler = optuna.samplers.TPESampler(seed=len(self._trials()), constant_liar=True)
        self._one_at_a_time = threading.Lock()
        self._children = Children()

    def run(self) -> int:
        """Run trials until there are enough or a signal came; the exit status."""
        say(f"search in {self._folder}, {self._workers} trials at once")
        for interrupted in self._trials("RUNNING"):
            self._study.tell(interrupted.number, state=self._states.FAIL)
            self._study.enqueue_trial(interrupted.params, user_attrs=interrupted.user_attrs)
        with self._children.listening():
            self._study.optimize(
                self._try,
                n_trials=max(0, self._args.trials - len(self._ended())),
                n_jobs=self._workers,
                catch=(ConfigError, Interrupted),
                callbacks=[self._show],
            )
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

    def _try(self, trial: Trial) -> float:
        """Run a trial, in its own thread; the return of its last evaluation."""
        words = [assigned(key, _rounded(_draw(trial, key, rule), rule)) for key, rule in self._space.items()]
        try:
            with self._one_at_a_time:  # Hydra has one global state per process
                run_dir, job = self._find_run(trial, words)
            if job is not None:
                self._train(trial, job, f"{' '.join(words)}{', resumed' * job.resume}")
            return _evaluations(run_dir)[-1][1]
        except ConfigError as error:  # values that do not work together, or a failed run
            self._failed += 1
            print(f"trial {trial.number}: failed, {error}", file=sys.stderr)
            raise

    def _find_run(self, trial: Trial, words: list[str]) -> tuple[Path, Job | None]:
        """The folder of a trial's run, and its job, new or resumed; no job if the run has finished."""
        run_dir = Path(trial.user_attrs.get("run_dir", "/nowhere"))
        plan = preflight([*self._args.words, *words], self._workers)
        if (run_dir / paths.RECORD).is_file() and not only_begins_anew(run_dir):
            return run_dir, resume_job(run_dir, program(), typed=plan.configs[0])
        job = new_job(plan.configs[0], program(), plan.overrides[0], auto_compile="compile" in plan.auto_keys)
        trial.set_user_attr("run_dir", job.run_dir)
        return Path(job.run_dir), job

    def _train(self, trial: Trial, job: Job, about: str) -> None:
        """Make the run of a trial and report its evaluations, until it has ended or is pruned."""
        import optuna

        log, metrics = self._folder / f"trial_{trial.number}.log", Path(job.run_dir) / paths.METRICS
        size, reported, pruned = 0, -1, False

        def hopeless() -> bool:
            nonlocal size, reported, pruned
            if metrics.exists() and (now := metrics.stat().st_size) != size:
                size = now
                for step, value in _evaluations(metrics.parent):
                    if step > reported and not pruned:
                        trial.report(value, step)
                        reported, pruned = step, trial.should_prune()
            return pruned

        say(f"trial {trial.number}: {about}")
        environment = worker_environment(job, os.environ)
        try:
            # Without a limit of time: a run ends its iteration and writes a checkpoint first.
            status = self._children.run(worker_command(), environment, log, enough=hopeless, grace_s=math.inf)
        except Interrupted:
            self._study.enqueue_trial(trial.params, user_attrs=trial.user_attrs)
            self._study.stop()
            raise
        if hopeless():
            raise optuna.TrialPruned
        if status:
            raise ConfigError(last_words(log, status))

    def _show(self, _: Study, trial: FrozenTrial) -> None:
        """Print how a trial has ended."""
        if trial.state is self._states.PRUNED:
            after = max(trial.intermediate_values)
            say(f"trial {trial.number}: pruned after {after:,} steps")
        elif trial.state is self._states.COMPLETE:
            words = " ".join(starmap(assigned, self._params(trial).items()))
            best = self._best()
            holder = f"trial {best[0].number}" if len(best) == 1 else f"{len(best)} trials alike"
            score, highest = show(trial.value or 0.0), show(best[0].value or 0.0)
            say(f"trial {trial.number}: {words}, return {score} (best {highest}, {holder})")
        with self._one_at_a_time:
            self._write({})

    def _params(self, trial: FrozenTrial) -> dict[str, Any]:
        """The drawn values as the run of the trial has them."""
        return {key: _rounded(value, self._space.get(key, {})) for key, value in trial.params.items()}

    def _best(self) -> list[FrozenTrial]:
        """All trials with the highest return."""
        complete = self._trials("COMPLETE")
        highest = max((each.value for each in complete if each.value is not None), default=None)
        return [each for each in complete if each.value == highest]

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
        words, sweep = self._args.overrides, self._args.sweep
        record = SearchRecord(words=words, sweep=sweep, trials=trials, importances=dict(importances))
        record.write(self._folder)

    def _conclude(self) -> int:
        best = self._best()
        if not best:
            print("no trial has ended with a return", file=sys.stderr)
            return 1
        highest = show(best[0].value or 0.0)
        if len(self._ended()) == len(best) > 1:
            say(f"all {len(best)} trials have the return {highest}, so none is best: {_MORE}")
            return 1 if self._failed else 0
        folder = self._args.config_dir
        flag = "" if INSTALLED else "ARGS="
        words = [] if folder is None else [f"{flag}--config-dir={folder}"]
        words += [word for word in self._args.overrides if not word.startswith("seed=")]
        words += [*starmap(assigned, self._params(best[0]).items())]
        alike = f", of trials {few([str(each.number) for each in best])} alike" * (len(best) > 1)
        say(f"best of {len(self._ended())} trials: return {highest}{alike}")
        say(f"next: {as_typed('train')} {' '.join(map(shlex.quote, words))} seed=1,2,3,4,5")
        return 1 if self._failed else 0


def _storage(url: str) -> Any:
    """Optuna's storage in which two threads cannot take the same waiting trial: SQLite locks no row."""
    from optuna.storages import RDBStorage

    taking = threading.Lock()

    class Storage(RDBStorage):
        def set_trial_state_values(self, *args: Any, **more: Any) -> bool:
            with taking:
                return super().set_trial_state_values(*args, **more)

    return Storage(url)


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


def _evaluations(run_dir: Path) -> list[tuple[int, float]]:
    rows = read_metrics(run_dir)
    return [(int(row["env_steps"]), row["eval/return"]) for row in rows if "eval/return" in row]
