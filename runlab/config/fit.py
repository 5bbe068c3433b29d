"""Checks that an algorithm fits an environment and the memory of this machine."""

from __future__ import annotations

from dataclasses import replace

from runlab.config.project import ALGORITHMS
from runlab.config.schema import Config, Device, Products
from runlab.config.texts import few
from runlab.errors import ConfigError
from runlab.interfaces import Codec
from runlab.machine import usable_memory

_FLOAT32 = 4  # bytes


def check_fit(config: Config, codec: Codec) -> Config:
    """The configuration with the values that the environment of a codec decides.

    Raises `ConfigError` if the algorithm cannot act in it, or lacks memory, which is compared with
    `device=cpu` only.
    """
    check_actions(config.algo.name, codec)
    check_images(config, codec)
    check_masks(config.algo.name, codec)
    fitted = replace(config, algo=config.algo.fitted(codec))
    if config.device is Device.cpu:
        check_memory(fitted, codec, usable_memory())
    return fitted


def check_actions(algo: str, codec: Codec) -> None:
    """Raise `ConfigError` if the algorithm cannot choose the actions of a codec."""
    if _lacks(algo, codec):
        able = [name for name in ALGORITHMS if not _lacks(name, codec)]
        raise ConfigError(
            f"algo={algo} needs {_lacks(algo, codec)}, and {codec.env_id} has {codec.action_space}"
            f"{f'; use algo={few(able)}' if able else ''}"
        )


def _lacks(algo: str, codec: Codec) -> str:
    """The kind of actions that an algorithm needs and an environment lacks; empty if it has them."""
    entry = ALGORITHMS[algo]
    if entry.needs_bounded_box and not (codec.continuous and codec.bounded):
        return "continuous actions with finite bounds (Box)"
    return "Discrete actions" if entry.needs_discrete and len(codec.nvec) != 1 else ""


def check_images(config: Config, codec: Codec) -> None:
    """Raise `ConfigError` if a codec has images, and the algorithm or the level cannot compute with them."""
    if not getattr(codec, "image_shape", ()):
        return
    if not ALGORITHMS[config.algo.name].takes_images:
        able = [name for name, entry in ALGORITHMS.items() if entry.takes_images and not _lacks(name, codec)]
        other = f"algo={few(able)}, or " if able else ""
        raise ConfigError(
            f"algo={config.algo.name} takes no images, and {codec.env_id} observes one; "
            f"use {other}plain numbers: env.wrappers.FlattenObservation=null"
        )
    if config.determinism.products is Products.blas:
        raise ConfigError(
            f"determinism={config.determinism.level.name}: {codec.env_id} observes images, and NumPy "
            "(products=blas) has no convolutions; use determinism=invariant"
        )


def check_masks(algo: str, codec: Codec) -> None:
    """Raise `ConfigError` if a codec has masks of actions, and the algorithm would take forbidden ones."""
    if getattr(codec, "mask_size", 0) and not ALGORITHMS[algo].takes_masks:
        able = [name for name, entry in ALGORITHMS.items() if entry.takes_masks and not _lacks(name, codec)]
        raise ConfigError(
            f"algo={algo} applies no masks of actions, and {codec.env_id} has an action_mask"
            f"{f'; use algo={few(able)}' if able else ''}"
        )


def check_memory(config: Config, codec: Codec, available: int) -> None:
    """Raise `ConfigError` if a part of a run is larger than the `available` bytes of memory."""
    itemsize = getattr(getattr(codec, "obs_dtype", None), "itemsize", _FLOAT32)
    obs_size = -(-codec.obs_size * itemsize // _FLOAT32)
    for part, numbers in config.algo.memory(config.env.num_envs, obs_size, codec.action_size):
        if (needed := _FLOAT32 * numbers) > available:
            raise ConfigError(
                f"{part} {needed / 2**30:.1f} GiB, and this machine has {available / 2**30:.1f} GiB, "
                f"enough for {100 * available / needed:.2g} % of it"
            )
