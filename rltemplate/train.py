"""One run: the algorithm and its environments are built, then the loop trains and observes.

The process around it is runlab/launch/worker.py. In the loop, the end of an iteration is the only place where
anything is logged, evaluated, filmed or saved. Neither function asks which algorithm or environment it has.
"""

from __future__ import annotations

import pkgutil

from runlab.config.fit import check_fit
from runlab.config.project import ALGORITHMS
from runlab.config.schema import Config
from runlab.determinism.switches import resolve_device
from runlab.engine import Engine
from runlab.envs.envs import Envs
from runlab.interfaces import Algorithm, Observers
from runlab.rng import Streams, env_seeds

# Streams that draw on the CPU, so that weights and orders are the same whatever the device.
_ON_CPU = ("init", "minibatch", "warmup")


def build(config: Config) -> tuple[Algorithm, Envs]:
    """The algorithm of a configuration and its environments; `ConfigError` if they do not fit each other."""
    streams = Streams(config.seed, resolve_device(config.device.name), _ON_CPU)
    envs = Envs(config.env, env_seeds(config.seed, "env", config.env.num_envs))
    engine = Engine(config.compile, streams.device)
    implementation = pkgutil.resolve_name(ALGORITHMS[config.algo.name].implementation)
    try:
        algo = check_fit(config, envs.codec).algo
        return implementation(algo, envs, streams, config.total_env_steps, engine), envs
    except BaseException:
        envs.close()
        raise


def train(config: Config, algorithm: Algorithm, observers: Observers) -> None:
    """Train until all steps are made, or until the run has been asked to end."""
    while not observers.stopping() and algorithm.env_steps < config.total_env_steps:
        with observers.iteration():
            result = algorithm.train_iteration()
        observers.observe(result)
