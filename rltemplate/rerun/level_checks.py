"""A level's checks in a process of their own: `python -P -m rltemplate.rerun.level_checks repeats rows`.

Started by `prove` with the job of a run. It tries all named checks, also after one has failed, trains nothing
and writes one JSON document to standard output.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from rltemplate.algos.build import build_algorithm
from rltemplate.config.loading import from_dict
from rltemplate.determinism import checks, switches
from rltemplate.envs.global_rng import seed_global_rng
from rltemplate.launch.subprocesses import REFUSED
from rltemplate.run.job import Job
from rltemplate.run.training_run import settled, trial
from rltemplate.types import ConfigError


def try_checks(job: Job, names: Sequence[str]) -> dict[str, Any]:
    """The settings read back, and by name the result of each check, with `problem` where it fails.

    Raises ConfigError where the run would be refused before its checks.
    """
    config = from_dict(settled(job).config)
    settings = switches.apply(config.determinism, config.num_threads, config.compile, config.device.name)
    seed_global_rng(config.seed)
    algorithm, _ = build_algorithm(config)
    found: dict[str, Any] = {}
    try:
        switches.confirm(settings)
        tried = trial(config, algorithm)
        for name in names:
            try:
                found[name] = checks.CHECKS[name](tried)
            except ConfigError as error:
                found[name] = {"holds": False, "problem": str(error)}
    finally:
        algorithm.close()
    return {"settings": settings, "checks": found}


if __name__ == "__main__":
    try:
        print(json.dumps(try_checks(Job.from_environment(), sys.argv[1:])))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(REFUSED)
