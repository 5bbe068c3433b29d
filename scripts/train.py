#!/usr/bin/env python3
"""Train: `python scripts/train.py algo=sac env=Hopper seed=3`; a list of values makes it a sweep.

The command of a sweep with `sweep=resume` (or `sweep=ID`) added to it goes on with that sweep.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

# Until the run's own process takes over there is nothing to save: Ctrl-C ends this one at once.
signal.signal(signal.SIGINT, lambda *_, leave=os._exit: leave(130))
# Nothing that is imported is garbage, and to look for some meanwhile takes a tenth of the start.
gc.disable()
# The code that lies beside this file, whichever copy is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import hydra  # noqa: E402
from omegaconf import DictConfig  # noqa: E402

from rltemplate.config.algorithms import check_actions  # noqa: E402
from rltemplate.config.cli.composition import typed  # noqa: E402
from rltemplate.config.cli.preflight import Plan, job_context, preflight  # noqa: E402
from rltemplate.config.loading import CONF, to_dict  # noqa: E402
from rltemplate.config.schema import Config  # noqa: E402
from rltemplate.launch.process import SWEEP_VARIABLE, check_memory, run_single  # noqa: E402
from rltemplate.run import exits  # noqa: E402
from rltemplate.run.job import PROJECT  # noqa: E402
from rltemplate.types import ConfigError  # noqa: E402

gc.enable()

if TYPE_CHECKING:
    from rltemplate.launch.sweep import Sweep


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def train(composed: DictConfig) -> float | None:
    """One job, in this process until it is known what to run, then in its own."""
    from rltemplate.launch.sweep import Sweep

    choices, overrides, number, console = job_context()
    sweep = Sweep.from_environment()
    try:
        config = typed(composed, choices)
        if sweep is None or number is None:
            run_single(config, COMMAND, env_name=choices["env"], overrides=overrides)
        return sweep.run(number, config, overrides, env_name=choices["env"], console=console)
    except ConfigError as error:
        if sweep is None or number is None:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
        sweep.refuse(number, overrides, error)
        return None


def is_known(plan: Plan) -> bool:
    """Whether a single run has the recipe of its pair, and the environment as it is: the two fit each other.

    What the machine may lack for it is found by the run's own process, a second later in the same words.
    """
    if plan.alone is None:
        return False
    config, choices, overrides, _ = plan.alone
    touched = any(word.lstrip("+~").startswith(("env.kwargs", "env.id", "env.max_")) for word in overrides)
    if config.recipe != f"{choices['algo']}-{choices['env']}" or config.experiment is not None or touched:
        return False
    try:
        check_memory(config, *_LARGE)
    except ConfigError:
        return False  # how much it needs depends on what is observed
    return True


def check_environments(configs: Sequence[Config]) -> None:
    """Make every environment once; `ConfigError` if there is none, or if an algorithm cannot act in it.

    The last job of a sweep may start in days, and would be refused then.
    """
    if not configs:
        return
    from rltemplate.envs.envs import Codec, EnvSpec, check_env

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
            check_memory(config, codec.obs_size, codec.action_size)


def compare_with_baseline(plan: Plan) -> None:
    """Say what changes against `baseline=`; `ConfigError` if that is more than one thing and must not be.

    A sweep that goes on was compared when it began.
    """
    if plan.resume is not None or all(config.baseline is None for config in plan.configs):
        return
    from rltemplate.analysis.baseline import check_baseline

    configs = [to_dict(config) for config in plan.configs]
    for line in check_baseline(PROJECT, configs, plan.overrides, len(configs) == plan.num_jobs):
        print(line, file=sys.stderr)


def note_doubts(configs: Sequence[Config]) -> None:
    """Say once what will run and is probably not what was meant."""
    notes = (n for c in configs for n in c.algo.notes(c.env.num_envs, c.total_env_steps))
    for note in dict.fromkeys(notes):
        print(f"note: {note}", file=sys.stderr)


def begin(plan: Plan) -> Sweep:
    """A new sweep, or the one that is to go on; `ConfigError` if it is not there or must not."""
    from rltemplate.launch.sweep import Sweep, find_sweep, sweeps_dir

    config = plan.configs[0]
    if plan.resume is None:
        return Sweep.create(config, COMMAND, plan.words, plan.num_jobs)
    folder, note = find_sweep(sweeps_dir(config), plan.resume, plan.words)
    if note is not None:
        print(f"note: {note}", file=sys.stderr)
    return Sweep.resume(folder, COMMAND, plan.configs, plan.num_jobs, plan.accept)


def main() -> int:
    """Check, then run; the exit status of the command."""
    os.environ.pop(SWEEP_VARIABLE, None)
    try:
        plan = preflight(sys.argv[1:])
        if not is_known(plan):
            with exits.seen():
                check_environments(plan.configs)
        compare_with_baseline(plan)
        note_doubts(plan.configs)
        if plan.alone is not None:
            config, choices, overrides, _ = plan.alone
            run_single(config, COMMAND, env_name=choices["env"], overrides=overrides)
        sweep = begin(plan) if plan.sweep else None
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    sys.argv[1:] = plan.argv
    if sweep is None:
        train()
        return 0
    if plan.resume is not None:
        if sweep.finished:
            print("every job has finished already; nothing is started")
            sweep.show()
            return 0
        sys.argv[1:] = sweep.in_order(plan.argv)
    launcher = sweep.fork_launcher()
    if launcher == 0:
        train()
        return 0
    return sweep.finish(sweep.wait(launcher))


COMMAND = list(sys.argv)
# As many observed numbers and action components as no environment of conf/env/ has.
_LARGE = (400, 20)

if __name__ == "__main__":
    sys.exit(main())
