"""Checks of a training command that need more than its configuration: environments, memory, the baseline."""

from __future__ import annotations

import shutil
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from runlab.config.cli.overrides import assigned
from runlab.config.cli.preflight import Plan, preflight
from runlab.config.fit import check_fit
from runlab.config.loading import to_dict
from runlab.config.project import require
from runlab.config.schema import Config
from runlab.errors import ConfigError
from runlab.interfaces import Codec
from runlab.machine import usable_cores
from runlab.run.paths import PROJECT
from runlab.run.read import find_run

_SLURM = "hydra/launcher=slurm"
HERE = "debug=here"  # the run stays in the process of the command


def check_plan(plan: Plan) -> None:
    """Refuse a plan that this machine cannot run, and print warnings."""
    in_process = any(HERE in words for words in plan.overrides)
    if plan.sweep and in_process:
        raise ConfigError(f"{HERE}: is for a single run; leave out lists of values")
    if _SLURM in plan.argv and shutil.which("srun") is None:  # submitit would say it in a sweep's folder
        raise ConfigError(f"{_SLURM}: no srun here; start the sweep where Slurm's commands are installed")
    if any(config.logger.wandb.enabled for config in plan.configs):
        require("wandb", "wandb", "logger.wandb.enabled=true")
    fitted = plan.configs
    if not in_process:  # no library may be loaded before its environment variables are set
        fitted = check_configs(plan.configs)
    if not plan.resume and any(config.baseline is not None for config in plan.configs):
        from runlab.analysis.baseline import check_baseline

        configs = [to_dict(config) for config in plan.configs]
        for line in check_baseline(PROJECT, configs, plan.overrides):
            print(line, file=sys.stderr)
    notes = [n for c in plan.configs for n in c.algo.notes(c.env.num_envs, c.total_env_steps)]
    notes += [
        f"{c.algo.name} on {c.env.id} without a recipe: the default values of {c.algo.name} are taken"
        for c in plan.configs
        if c.recipe is None and c.experiment is None
    ]
    notes += [
        f"{word}: has no effect with {assigned(f'algo.{other}', getattr(config.algo, other))}"
        for config, words in zip(fitted, plan.overrides, strict=True)
        for name, other in config.algo.without_effect()
        for word in words
        if word.startswith(f"algo.{name}=")
    ]
    cores = usable_cores()
    more = (c.num_threads for c in plan.configs if c.num_threads > cores)
    notes += [f"num_threads={each} on {cores} cores: threads wait for each other" for each in more]
    for line in [*(f"note: {note}" for note in dict.fromkeys(notes)), *plan.auto]:
        print(line, file=sys.stderr)


def planned(words: Sequence[str]) -> Plan:
    """The plan of a command, with the id of the run that `baseline=last` or `baseline=best` names now."""
    plan = preflight(words)
    name = next((config.baseline for config in plan.configs if config.baseline in ("last", "best")), None)
    if name is None:
        return plan
    run_id = find_run(name, Path(plan.configs[0].runs_dir), "baseline").name
    return preflight([f"baseline={run_id}", *(word for word in words if not word.startswith("baseline="))])


def check_configs(configs: Sequence[Config]) -> list[Config]:
    """Make every environment once: the configurations with the values that they decide.

    Raises `ConfigError` if the algorithm or this machine's memory does not fit one of them, or for a sink
    that no installed package brings. Without this the last job of a sweep might be refused only days later.
    """
    if any(config.logger.sinks for config in configs):
        from runlab.run.sinks import brought_sink

        for config in configs:
            for name, settings in config.logger.sinks.items():
                brought_sink(name, settings)
    from runlab.envs.make import check_env

    made, fitted = dict[str, Codec](), list[Config]()
    with warnings.catch_warnings(action="ignore"):  # the run will print them
        for config in configs:
            env = f"{replace(config.env, num_envs=1, num_workers=0)}"
            if env not in made:
                made[env] = check_env(config.env, lambda note: print(f"note: {note}", file=sys.stderr))
            fitted.append(check_fit(config, made[env]))
    return fitted
