"""A level's checks in a process of their own: `python -P -m rltemplate.rerun.level_checks repeats rows`.

Started by `prove`, which hands over a job as for a run. The process applies the job's switches, builds the
algorithm and tries every check that is named, also after one has failed: whether a check can fail is part of
what a proof is about. It trains nothing and writes nothing but one JSON document on standard output.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from rltemplate.algos.build import build_algorithm
from rltemplate.config.loading import from_dict
from rltemplate.determinism import checks, switches
from rltemplate.envs.global_rng import seed_foreign_code
from rltemplate.run.job import Job
from rltemplate.run.level import settled, trial
from rltemplate.types import ConfigError

REFUSED = 2


def try_checks(job: Job, names: Sequence[str]) -> dict[str, Any]:
    """The settings read back and, by name, what each of the named checks found.

    A check that fails has `holds` false and its message as `problem`. Raises `ConfigError` for what would
    refuse the run before its checks.
    """
    config = from_dict(settled(job, build_algorithm).config)
    settings = switches.apply(config.determinism, config.num_threads, config.compile, config.device.name)
    seed_foreign_code(config.seed)
    algorithm, _ = build_algorithm(config)
    found: dict[str, Any] = {}
    try:
        settings = switches.confirm(settings)
        tried = trial(config, algorithm)
        for name in names:
            try:
                found[name] = checks.CHECKS[name](tried)
            except ConfigError as error:
                found[name] = {"holds": False, "problem": str(error)}
    finally:
        algorithm.close()
    return {"settings": settings, "checks": found}


def main(names: Sequence[str]) -> int:
    """Print what the checks found; the exit status is 0 whether they hold or not, and 2 for a refusal."""
    try:
        print(json.dumps(try_checks(Job.from_environment(), names)))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
