"""`make train`: check the command, then become the process of a run, or look after a sweep."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from rltemplate.config.algorithms import check_actions
from rltemplate.config.cli.composition import typed
from rltemplate.config.cli.preflight import Plan, job_context, preflight
from rltemplate.config.loading import to_dict
from rltemplate.config.schema import Config
from rltemplate.config.validation import check_memory
from rltemplate.determinism.machine import usable_memory
from rltemplate.launch.process import SWEEP_VARIABLE, run_single
from rltemplate.run import exits
from rltemplate.run.job import PROJECT
from rltemplate.types import ConfigError

if TYPE_CHECKING:
    from rltemplate.envs.codec import Codec

HERE = "here"  # debug=here: the run stays in the process of the command
# More observed numbers and action components than any environment of conf/env/ has.
_LARGE = (400, 20)


def main(command: Sequence[str], start_jobs: Callable[[], None], run_here: Callable[[], int]) -> int:
    """Check, then run; the exit status of the command.

    `start_jobs` hands `sys.argv` to Hydra, which calls `start_job`. `run_here` trains in this process.
    """
    os.environ.pop(SWEEP_VARIABLE, None)
    try:
        plan = preflight(command[1:])
        if plan.sweep and any(f"debug={HERE}" in words for words in plan.overrides):
            raise ConfigError(f"debug={HERE}: is for a single run; leave out lists of values")
        _check(plan)
        if plan.sweep:
            from rltemplate.launch.sweep import run_sweep

            return run_sweep(plan, command, start_jobs)
        if plan.alone is not None:
            config, choices, overrides, _ = plan.alone
            here = run_here if choices.get("debug") == HERE else None
            run_single(config, command, env_name=choices["env"], overrides=overrides, run_here=here)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    sys.argv[1:] = plan.argv
    start_jobs()
    return 0


def start_job(composed: DictConfig, command: Sequence[str], run_here: Callable[[], int]) -> float | None:
    """Run one job as Hydra composed it: a single run in its own process, or a job of a sweep."""
    choices, overrides, number, console = job_context()
    if number is not None and SWEEP_VARIABLE in os.environ:
        from rltemplate.launch.sweep_job import run_job

        return run_job(lambda: typed(composed, choices), choices["env"], overrides, number, console)
    try:
        config = typed(composed, choices)
        here = run_here if choices.get("debug") == HERE else None
        run_single(config, command, env_name=choices["env"], overrides=overrides, run_here=here)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def check_environments(configs: Sequence[Config]) -> None:
    """Make every environment once; `ConfigError` if it is missing, or if the algorithm cannot act in it.

    The last job of a sweep may start in days, and would be refused then.
    """
    from rltemplate.envs.make import EnvSpec, check_env

    made: dict[str, Codec] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run gives them again
        for config in configs:
            spec = EnvSpec(config.env.id, config.env.max_episode_steps, config.env.kwargs)
            name = f"{spec}"
            if name not in made:
                made[name] = check_env(spec)
            codec = made[name]
            check_actions(config.algo.name, codec)
            check_memory(config, usable_memory(), codec.obs_size, codec.action_size)


def _check(plan: Plan) -> None:
    """Refuse a plan that this machine cannot run, and print doubts about it."""
    if not plan.configs:
        return
    memory = usable_memory()
    for config in plan.configs:
        check_memory(config, memory)
    if not _is_known(plan, memory):
        with exits.seen():
            check_environments(plan.configs)
    if plan.resume is None and any(config.baseline is not None for config in plan.configs):
        from rltemplate.analysis.baseline import check_baseline

        configs = [to_dict(config) for config in plan.configs]
        for line in check_baseline(PROJECT, configs, plan.overrides, len(configs) == plan.num_jobs):
            print(line, file=sys.stderr)
    notes = (n for c in plan.configs for n in c.algo.notes(c.env.num_envs, c.total_env_steps))
    for note in dict.fromkeys(notes):
        print(f"note: {note}", file=sys.stderr)


def _is_known(plan: Plan, memory: int | None) -> bool:
    """True if the environment need not be made: a single run with the recipe of its pair, unchanged.

    What the machine may lack for it is found by the run's own process, a second later in the same words.
    """
    if plan.alone is None:
        return False
    config, choices, overrides, _ = plan.alone
    if choices.get("debug") == HERE:
        return True  # libraries are loaded after their environment variables are set
    touched = any(word.lstrip("+~").startswith(("env.kwargs", "env.id", "env.max_")) for word in overrides)
    if config.recipe != f"{choices['algo']}-{choices['env']}" or config.experiment is not None or touched:
        return False
    try:
        check_memory(config, memory, *_LARGE)
    except ConfigError:
        return False  # the need depends on what is observed
    return True
