"""From a configuration to its algorithm in its environments."""

from __future__ import annotations

import importlib

from rltemplate.config.algorithms import ALGORITHMS
from rltemplate.config.schema import Config
from rltemplate.determinism import switches
from rltemplate.determinism.machine import cpp_compiler
from rltemplate.envs.envs import Envs
from rltemplate.envs.make import EnvSpec
from rltemplate.learning.engine import Engine
from rltemplate.rng import Streams, env_seeds
from rltemplate.types import Algorithm, ConfigError


def env_spec(config: Config) -> EnvSpec:
    """The environment of a configuration in Gymnasium's terms."""
    return EnvSpec(config.env.id, config.env.max_episode_steps, config.env.kwargs)


def build_algorithm(config: Config) -> tuple[Algorithm, Envs]:
    """The algorithm of a configuration and its environments; `ConfigError` if they do not fit each other."""
    if config.compile and cpp_compiler() is None:
        raise ConfigError(
            "compile=true needs a C++ compiler (apt install g++); use compile=false without one"
        )
    streams = Streams(config.seed, switches.resolve_device(config.device.name))
    num_envs = config.env.num_envs
    seeds = env_seeds(config.seed, "env", num_envs)
    envs = Envs(env_spec(config), num_envs, seeds, config.env.num_workers)
    module, name = ALGORITHMS[config.algo.name].implementation.split(":")
    implementation = getattr(importlib.import_module(module), name)
    try:
        algorithm = implementation(config.algo, envs, streams, config.total_env_steps, Engine(config.compile))
    except ConfigError:
        envs.close()
        raise
    return algorithm, envs
