"""Checks that an algorithm fits an environment and the memory of this machine."""

from __future__ import annotations

from runlab.config.project import ALGORITHMS
from runlab.config.schema import Config, Device
from runlab.errors import ConfigError
from runlab.interfaces import Codec
from runlab.machine import usable_memory

_FLOAT32 = 4  # bytes


def check_fit(config: Config, codec: Codec) -> None:
    """Raise `ConfigError` if the algorithm cannot choose the actions of a codec, or needs too much memory."""
    check_actions(config.algo.name, codec)
    if config.device is Device.cpu:
        check_memory(config, codec, usable_memory())


def check_actions(algo: str, codec: Codec) -> None:
    """Raise `ConfigError` if the algorithm cannot choose the actions of a codec."""
    if ALGORITHMS[algo].needs_bounded_box and not (codec.continuous and codec.bounded):
        able = [name for name, entry in ALGORITHMS.items() if not entry.needs_bounded_box]
        instead = f"; use algo={able[0]}" if able else ""
        raise ConfigError(
            f"algo={algo} needs continuous actions with finite bounds (Box), and {codec.env_id} has "
            f"{codec.action_space}{instead}"
        )
    if ALGORITHMS[algo].needs_discrete and len(codec.nvec) != 1:
        raise ConfigError(f"algo={algo} needs Discrete actions, and {codec.env_id} has {codec.action_space}")


def check_memory(config: Config, codec: Codec, available: int) -> None:
    """Raise `ConfigError` if a part of a run is larger than the `available` bytes of memory."""
    for part, numbers in config.algo.memory(config.env.num_envs, codec.obs_size, codec.action_size):
        if (needed := _FLOAT32 * numbers) > available:
            raise ConfigError(
                f"{part} {needed / 2**30:.1f} GiB, and this machine has {available / 2**30:.1f} GiB, "
                f"enough for {100 * available / needed:.2g} % of it"
            )
