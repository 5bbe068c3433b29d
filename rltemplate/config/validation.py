"""Checks of values: their ranges, and that they are consistent with each other."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from rltemplate.config.schema import Config, Device, Level, Products
from rltemplate.types import ConfigError

# Arguments of gymnasium.make that cannot come from env.kwargs as well, and what to use instead.
_SET_BY_THE_PROJECT = {
    "render_mode": "training shows nothing, and videos are made every video_every steps",
    "max_episode_steps": "use env.max_episode_steps",
    "id": "choose the environment with env=",
    "disable_env_checker": "the checker is off",
}


def check(config: Config) -> None:
    """Raise `ConfigError` for the first value out of its range or inconsistent with another."""
    for problem in _out_of_range(config, ""):
        raise ConfigError(problem)
    num_envs, num_workers = config.env.num_envs, config.env.num_workers
    if num_workers > num_envs:
        raise ConfigError(f"env.num_workers={num_workers}: must be at most env.num_envs={num_envs}")
    for problem in config.algo.problems(num_envs):
        raise ConfigError(problem)
    level, products = config.determinism.level, config.determinism.products
    if config.compile and (products is not Products.plain or level in (Level.invariant, Level.profile)):
        raise ConfigError(
            f"compile=true: not at determinism={level.name} with products={products.name}, for compiled "
            "updates round otherwise than the policy that acts; use compile=false, or determinism=repeat"
        )
    if level is Level.profile and config.determinism.profile is None:
        raise ConfigError("determinism.profile=null: the level profile needs one; use determinism=invariant")
    for name, instead in _SET_BY_THE_PROJECT.items():
        if name in config.env.kwargs:
            raise ConfigError(f"env.kwargs.{name}={config.env.kwargs[name]}: is not yours to set; {instead}")


def _out_of_range(node: Any, prefix: str) -> Iterator[str]:
    for spec in fields(node):
        key, value = prefix + spec.name, getattr(node, spec.name)
        if is_dataclass(value):
            yield from _out_of_range(value, key + ".")
            continue
        values = value if isinstance(value, list) else [value]
        if isinstance(value, list) and any(isinstance(v, list | dict) for v in values):
            yield f"{key}={value}: expected single values in the list"
        elif any(isinstance(v, float) and not math.isfinite(v) for v in values):
            yield f"{key}={value}: must be finite"
        elif "choices" in spec.metadata and value is not None and value not in spec.metadata["choices"]:
            yield f"{key}={value}: {choose(value, [*spec.metadata['choices'], 'null'])}"
        elif value == [] and "low" in spec.metadata:
            what = "layer" if spec.name == "hidden_sizes" else "value"
            yield f"{key}=[]: needs at least one {what}, as in {key}=[64,64]"
        elif "low" in spec.metadata and value is not None:
            low, high, open_low = (spec.metadata[name] for name in ("low", "high", "open_low"))
            if any(not (v > low if open_low else v >= low) or not v <= high for v in values):
                least = f"greater than {_shown(low)}" if open_low else f"at least {_shown(low)}"
                most = "" if high == float("inf") else f" and at most {_shown(high)}"
                yield f"{key}={value}: must be {least}{most}"


def _shown(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def check_folder(config: Config) -> None:
    """Raise `ConfigError` unless the run's folder can be made, or is there and empty."""
    key = "runs_dir" if config.run_dir is None else "run_dir"
    text = config.runs_dir if config.run_dir is None else config.run_dir
    if not text.strip():
        raise ConfigError(f"{key}: expected the name of a folder")
    try:
        folder = Path(text).expanduser().absolute()
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"{key}={text}: is a file; expected a folder")
        if key == "run_dir" and folder.is_dir() and any(folder.iterdir()):
            raise ConfigError(f"{key}={text}: is not empty; a run needs a folder of its own")
        # A link that leads nowhere does not exist, and nothing can be made in its place.
        there = next(parent for parent in (folder, *folder.parents) if os.path.lexists(parent))
    except RuntimeError:  # ~somebody
        raise ConfigError(f"{key}={text}: this machine does not know whose home that is") from None
    except OSError as error:  # a name that is too long
        raise ConfigError(f"{key}={text}: cannot be made, {error.strerror}") from None
    if not there.is_dir():
        raise ConfigError(f"{key}={text}: cannot be made, {there} is no folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{key}={text}: cannot be written, {there} does not allow it")


def check_memory(config: Config, memory: int | None, obs_size: int = 1, action_size: int = 1) -> None:
    """Raise `ConfigError` if the `memory` of this machine (bytes) cannot hold the least that a CPU run needs.

    The sizes are those of the environment, and small ones where it has not been made yet.
    """
    if memory is None or config.device is not Device.cpu:  # only torch knows the memory of a GPU
        return
    needs = config.algo.memory(config.env.num_envs, obs_size, action_size)
    total = sum(needs.values())
    if total > memory:
        key = max(needs, key=lambda key: needs[key])
        value = getattr(config.algo, key.removeprefix("algo."))
        left = memory - (total - needs[key])
        enough = f", enough for {value * left // needs[key]}" if isinstance(value, int) and left > 0 else ""
        raise ConfigError(
            f"{key}={value}: needs at least {_gib(needs[key])} of memory ({_gib(total)} with all else), and "
            f"this machine has {_gib(memory)}{enough}"
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB"


def choose(wrong: str, allowed: Any) -> str:
    """`did you mean X? allowed: ...` for an unknown name, the nearest match first."""
    names = sorted(allowed)
    folded = {name.lower(): name for name in names}
    near = difflib.get_close_matches(wrong.lower(), list(folded), n=1, cutoff=0.5)
    hint = f"did you mean {folded[near[0]]}? " if near else ""
    return f"{hint}allowed: {', '.join(names)}"
