"""The determinism level of a run, tried on its own networks before the first step."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

from rltemplate.config.loading import from_dict, to_dict
from rltemplate.config.schema import Config, Products
from rltemplate.determinism import checks, kernels, switches
from rltemplate.determinism.levels import on_cpu
from rltemplate.envs.make import uses_mujoco
from rltemplate.run.job import Job
from rltemplate.run.record import DeterminismFacts
from rltemplate.types import Algorithm


def trial(config: Config, algorithm: Algorithm) -> checks.Trial:
    """The algorithm of a configuration as the checks of a level take it."""
    return checks.Trial(
        switches=config.determinism,
        passes=algorithm.forward_passes(),
        device=switches.resolve_device(config.device.name),
        products=kernels.chosen.products,
        # A user's environment may use MuJoCo unannounced; the first one has been made by now.
        physics=uses_mujoco(config.env.id) or "mujoco" in sys.modules,
    )


def check_level(config: Config, settings: Mapping[str, Any], algorithm: Algorithm) -> DeterminismFacts:
    """Try all that the level of a run promises; `ConfigError` if it does not hold here and now.

    `settings` are those that were applied, and are read back from the libraries.
    """
    switches.confirm(settings)
    tried = trial(config, algorithm)
    found = {name: checks.CHECKS[name](tried) for name in checks.promised(tried)}
    return DeterminismFacts(level=config.determinism.level.name, settings=dict(settings), checks=found)


def settled(job: Job) -> Job:
    """`job` with the way of matrix products by name, where the level of a new run leaves it open.

    So it stands in the recorded configuration, and a rerun takes the same way.
    """
    config = from_dict(job.config)
    level, device = config.determinism, switches.resolve_device(config.device.name)
    if level.products is not Products.auto or device.type != "cpu" or job.resume:
        return job
    products = Products[on_cpu(level.products.name)]
    named = dataclasses.replace(config, determinism=dataclasses.replace(level, products=products))
    return dataclasses.replace(job, config=to_dict(named))
