"""The declaration of this project: its algorithms, and what builds and trains a run.

pyproject.toml names this module as `[tool.runlab] project`. It imports no torch, because every command reads
`ALGORITHMS`.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runlab.config.algorithms import Entry

from . import algos

if TYPE_CHECKING:
    import gymnasium as gym
    from gymnasium import spaces

    from runlab.config.schema import Config
    from runlab.interfaces import Algorithm, Codec, Environments, Observers

# An algorithm is <name>.py, <name>_config.py with its ENTRY, and its values in conf/algo/<name>.yaml.
_CONFIGS = [each.name for each in pkgutil.iter_modules(algos.__path__) if each.name.endswith("_config")]
_MODULES = {name.removesuffix("_config"): import_module(f"{algos.__name__}.{name}") for name in _CONFIGS}
ALGORITHMS: dict[str, Entry] = {
    name: module.ENTRY for name, module in _MODULES.items() if hasattr(module, "ENTRY")
}
# Returns of the random policy and of published results, for the report and `make stats`.
REFERENCE_RETURNS = Path(__file__).with_name("reference_returns.csv")


def build(config: Config) -> tuple[Algorithm, Environments]:
    """The algorithm of a configuration and its environments."""
    from . import train

    return train.build(config)


def train(config: Config, algorithm: Algorithm, observers: Observers) -> None:
    """The loop of a run."""
    from . import train

    train.train(config, algorithm, observers)


def wrapped(env_id: str, env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    """The environment with observations that the codec takes: those of several parts are flattened."""
    from runlab.envs.codec import flattened

    return flattened(env_id, env)


def codec(env_id: str, obs_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> Codec:
    """The translation of observations and actions. Another class can take images, masks or graphs."""
    from runlab.envs.codec import FlatCodec

    return FlatCodec(env_id, obs_space, action_space)
