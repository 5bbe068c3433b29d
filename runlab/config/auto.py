"""Values `auto` of the configuration, resolved on the machine that checks the command.

A record has the resolved values, so that resuming and reproducing a run use the same ones.
"""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter
from typing import Any

from runlab.config.schema import AUTO, Config, Level, Products
from runlab.machine import blas_kernels, cpp_compiler, usable_cores

# The keys that take `auto`, each with its plainest value. They change the speed of a run and, except for the
# workers, the last bits of its numbers.
AUTO_KEYS: dict[str, Any] = {"num_threads": 1, "compile": False, "env.num_workers": 0}
# Multiplications in a layer from which a second thread pays: SAC's 256 rows of 256 to 256 units gain a third,
# PPO's 64 rows of 64 to 64 gain nothing. More than two threads have not been measured: further cores of a
# larger machine can run further seeds of a sweep at the same time, or be tried with num_threads=4.
_TWO_THREADS_FROM = 256**3


def may_compile(config: Config) -> bool:
    """False if compiled updates would break the level: they round differently from the policy that acts."""
    level, products = config.determinism.level, config.determinism.products
    return products is Products.plain and level not in (Level.invariant, Level.profile)


def resolved(config: Config, auto: set[str], jobs: int) -> Config:
    """The configuration with values for the keys `auto`, where `jobs` runs share this machine."""
    algo, num_envs, values = config.algo, config.env.num_envs, dict[str, Any]()
    cores = usable_cores() // jobs
    if "num_threads" in auto:
        wide = algo.multiplications(num_envs) >= _TWO_THREADS_FROM
        plain = config.determinism.products is Products.plain
        values["num_threads"] = max(1, min(2 if wide and plain else 1, cores))
    if "compile" in auto:
        values["compile"] = gains_by_compiling(config) and cpp_compiler() is not None
    if "env.num_workers" in auto:
        spare = cores - values.get("num_threads", config.num_threads)
        values["env"] = replace(config.env, num_workers=int(spare > 0 and num_envs > 1))
    level = config.determinism
    if level.blas_kernels == AUTO:
        values["determinism"] = replace(level, blas_kernels=blas_kernels(level.products.name))
    return replace(config, **values)


def gains_by_compiling(config: Config) -> bool:
    """True if the run may be compiled and is long enough to gain by it, on a CPU or a GPU."""
    least = config.algo.compile_from()
    return least is not None and config.total_env_steps >= least and may_compile(config)


def about_auto(config: Config, auto: set[str]) -> str:
    """A line with the resolved values, and a hint if a compiler is missing; empty if no key was `auto`."""
    chosen = [f"{key}={str(attrgetter(key)(config)).lower()}" for key in AUTO_KEYS if key in auto]
    line = f"auto: {' '.join(chosen)}" if chosen else ""
    if "compile" in auto and not config.compile and gains_by_compiling(config):
        line += "; with a C++ compiler (apt install g++ python3-dev) this run would be about twice as fast"
    return line
