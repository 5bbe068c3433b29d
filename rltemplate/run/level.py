"""The determinism level of a run, tried on its own networks before the first step."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any

from rltemplate.config.loading import from_dict, to_dict
from rltemplate.config.schema import Config, Products
from rltemplate.determinism import checks, kernels, switches
from rltemplate.envs.envs import Envs
from rltemplate.envs.global_rng import seed_global_rng
from rltemplate.envs.make import uses_mujoco
from rltemplate.run.job import Job
from rltemplate.run.lines import to_stderr
from rltemplate.run.record import DeterminismFacts
from rltemplate.types import Algorithm

Build = Callable[[Config], tuple[Algorithm, Envs]]


def trial(config: Config, algorithm: Algorithm) -> checks.Trial:
    """The algorithm of a configuration as the checks of a level take it."""
    return checks.Trial(
        switches=config.determinism,
        passes=algorithm.forward_passes(),
        device=switches.resolve_device(config.device.name),
        products=kernels.in_force()["products"],
        # A user's environment may use MuJoCo unannounced; the first one has been made by now.
        physics=uses_mujoco(config.env.id) or "mujoco" in sys.modules,
    )


def check_level(config: Config, settings: Mapping[str, Any], algorithm: Algorithm) -> DeterminismFacts:
    """Try all that the level of a run promises; `ConfigError` if it does not hold here and now.

    `settings` are those that were applied, and are read back from the libraries.
    """
    confirmed = switches.confirm(settings)
    tried = trial(config, algorithm)
    found = {name: checks.CHECKS[name](tried) for name in checks.promised(tried)}
    return DeterminismFacts(level=config.determinism.level.name, settings=dict(confirmed), checks=found)


def settled(job: Job, build: Build) -> Job:
    """`job` with the way of matrix products by name, where the level of a new run leaves it open.

    So it stands in the recorded configuration, and a rerun takes the same way. Notes an unusual one.
    """
    config = from_dict(job.config)
    level, device = config.determinism, switches.resolve_device(config.device.name)
    if level.products is not Products.auto or device.type != "cpu" or job.resume:
        return job
    switches.apply(level, config.num_threads, config.compile, config.device.name)
    chosen = str(kernels.in_force()["products"])
    if chosen == "padded":
        seed_global_rng(config.seed)
        here = dataclasses.replace(config, env=dataclasses.replace(config.env, num_workers=0))
        algorithm, _ = build(here)
        try:
            chosen, problem = checks.choose_products(trial(config, algorithm))
        finally:
            algorithm.close()
        if problem is not None:
            to_stderr(f"determinism.products=auto: {problem}; {chosen} is taken")
    named = dataclasses.replace(config, determinism=dataclasses.replace(level, products=Products[chosen]))
    return dataclasses.replace(job, config=to_dict(named))
