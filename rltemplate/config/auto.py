"""Values `auto` of the configuration, resolved on the machine that checks the command.

A run is recorded with values: resuming, reproducing and comparing it repeat what it was computed with.
"""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter
from typing import Any

from rltemplate.config.schema import Config, Device, Level, Products
from rltemplate.determinism.machine import cpp_compiler, usable_cores

# The keys that take `auto`, each with its plainest value. They decide only how fast a run is and, but for the
# workers, its last bits.
AUTO_KEYS: dict[str, Any] = {"num_threads": 1, "compile": False, "env.num_workers": 0}
# Multiplications in a layer from which a second thread pays: SAC's 256 rows of 256 to 256 units gain a third,
# PPO's 64 rows of 64 to 64 gain nothing. More than two threads have not been measured: on a larger machine
# further cores are for further seeds, which a sweep runs beside each other, or for num_threads=4 on trial.
_TWO_THREADS_FROM = 256**3


def may_compile(config: Config) -> bool:
    """True unless compiled updates, which round otherwise than the policy that acts, break the level."""
    level, products = config.determinism.level, config.determinism.products
    return products is Products.plain and level not in (Level.invariant, Level.profile)


def resolved(config: Config, auto: set[str], jobs: int) -> Config:
    """The configuration with the values of the keys `auto` for one of `jobs` runs beside each other."""
    algo, num_envs, values = config.algo, config.env.num_envs, dict[str, Any]()
    cores = usable_cores() // jobs
    if "num_threads" in auto:
        wide = algo.batch(num_envs) * max(algo.hidden_sizes) ** 2 >= _TWO_THREADS_FROM
        plain = config.determinism.products is Products.plain
        values["num_threads"] = max(1, min(2 if wide and plain else 1, cores))
    if "compile" in auto:
        values["compile"] = gains_by_compiling(config) and cpp_compiler() is not None
    if "env.num_workers" in auto:
        spare = cores - values.get("num_threads", config.num_threads)
        values["env"] = replace(config.env, num_workers=int(spare > 0 and num_envs > 1))
    return replace(config, **values)


def gains_by_compiling(config: Config) -> bool:
    """True if the run may be compiled and is long enough to gain by it. GPUs have not been measured."""
    long_enough = config.total_env_steps >= config.algo.compile_from()
    return long_enough and config.device is Device.cpu and may_compile(config)


def about_auto(config: Config, auto: set[str]) -> str:
    """The line about values that were resolved, and about a compiler that is missing; empty without any."""
    chosen = [f"{key}={str(attrgetter(key)(config)).lower()}" for key in AUTO_KEYS if key in auto]
    line = f"auto: {' '.join(chosen)}" if chosen else ""
    if "compile" in auto and not config.compile and gains_by_compiling(config):
        line += "; with a C++ compiler (apt install g++ python3-dev) this run would be about twice as fast"
    return line
