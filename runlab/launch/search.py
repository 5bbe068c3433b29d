"""`make search`: hyperparameters drawn by Optuna, with a run for each trial and seed, and several at once.

The arguments of the command identify a search: the same command goes on with it, and several commands at
once share it. A trial whose command was interrupted or has died is queued again and resumes its runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runlab.config.affects_results import BOOKKEEPING_KEYS
from runlab.config.cli.files import read_sweep
from runlab.config.cli.overrides import assigned
from runlab.config.cli.preflight import announce, cores_of, more_folders, preflight
from runlab.config.loading import to_dict
from runlab.config.project import require
from runlab.config.texts import first_line
from runlab.errors import ConfigError, RunError
from runlab.launch.checks import HERE, check_plan
from runlab.launch.search_args import Args
from runlab.launch.sweep_job import digest
from runlab.machine import usable_cores
from runlab.run import paths
from runlab.run.read import leaves

_OF_A_COMMAND = (*BOOKKEEPING_KEYS, "--config-dir")  # commands that differ in these share a search


def main(args: Args) -> int:
    """Draw and run trials; 0 if all have ended, 1 if one failed, 130 or 143 after a signal."""
    require("optuna", "search", "search")
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import SQLAlchemyError

    from runlab.launch.trials import Search

    space = read_space(args.sweep, more_folders(args.config_dir))
    # The ends of all ranges and all choices are checked before a run starts.
    ends = {key: rule.get("choices") or [rule["low"], rule["high"]] for key, rule in space.items()}
    of_keys = [(key, assigned(key, value)) for key, values in ends.items() for value in values]
    tried = [word for _, word in of_keys]
    announce(len(tried))
    # For this check, values `auto` are chosen as if each core had a trial.
    plans = [preflight([*args.words, each], usable_cores()) for each in tried]
    for (key, _), plan in zip(of_keys, plans, strict=True):
        found = dict(leaves(to_dict(plan.configs[0]))).get(key)
        if "low" in space[key] and isinstance(found, float):  # from 0 to 1 is more than these two
            space[key] |= {end: float(space[key][end]) for end in ("low", "high")}
    plan, config = plans[0], plans[0].configs[0]
    seeds = plan.seeds or [config.seed]
    if any(plan.num_jobs > len(seeds) for plan in plans):
        raise ConfigError("a search draws its own values: leave out lists, except for seeds as in seed=1,2")
    of_training = ("run_dir=", "hydra", HERE)
    if unfit := [each for each in (*args.words, *tried) if each.lstrip("+").startswith(of_training)]:
        raise ConfigError(
            f"{unfit[0]}: is for training and not for a search, whose trials are runs below runs_dir"
        )
    if not config.eval_every and args.metric.startswith("eval/"):
        raise ConfigError("eval_every=0: a search compares the returns of evaluations, or another objective=")
    check_plan(plan)
    words = sorted(word for word in args.words if word.partition("=")[0] not in _OF_A_COMMAND)
    name = f"search-{args.sweep}-{digest([words, space, args.objective])}"
    folder = Path(config.runs_dir).expanduser().absolute() / paths.SWEEPS / name
    workers = args.workers or max(1, usable_cores() // cores_of(config))
    try:
        return Search(args, space, folder, seeds, workers).run()
    except (StorageInternalError, SQLAlchemyError, OSError) as error:  # Optuna wraps most, but not all
        why = first_line(error.__cause__ or error)
        raise RunError(
            f"the search in {folder} has stopped: {why}; the same command goes on with it"
        ) from error


def read_space(name: str, more: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """The range or the choices of each key in a file of sweep/ in conf/ or in `more`. Raises ConfigError."""
    from runlab.launch.study import distribution

    space = read_sweep(name, more)
    if fixed := {"seed", "runs_dir"} & space.keys():
        raise ConfigError(f"sweep={name}: {min(fixed)}: all trials of a search have the same")
    for key, rule in space.items():
        try:
            distribution(rule)
        except (TypeError, ValueError, ArithmeticError) as error:  # the last: an endless step
            form = "{low: 0.1, high: 0.4}, with log: true for magnitudes, or {choices: [8, 16]}"
            raise ConfigError(f"sweep={name}: {key}: expected {form}") from error
    return space
