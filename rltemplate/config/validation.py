"""Checks of values: their ranges, and that they are consistent with each other."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from rltemplate.config.schema import Config, Level, Products
from rltemplate.types import ConfigError

# Arguments of gymnasium.make that the environment is made with, and that env.kwargs cannot give as well.
_SET_BY_THE_PROJECT = ("id", "render_mode", "max_episode_steps", "disable_env_checker")
_LONGEST = 100  # characters; nothing that exists is like a longer word


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
    for name in _SET_BY_THE_PROJECT:
        if name in config.env.kwargs:
            raise ConfigError(
                f"env.kwargs.{name}: is set by the program; use env=, env.max_episode_steps or video_every"
            )


def _out_of_range(node: Any, prefix: str) -> Iterator[str]:
    for spec in fields(node):
        key, value = prefix + spec.name, getattr(node, spec.name)
        if is_dataclass(value):
            yield from _out_of_range(value, key + ".")
            continue
        values = value if isinstance(value, list) else [value]
        if any(isinstance(v, float) and not math.isfinite(v) for v in values):
            yield f"{key}={value}: must be finite"
        elif "choices" in spec.metadata and value is not None and value not in spec.metadata["choices"]:
            yield f"{key}={value}: {choose(value, [*spec.metadata['choices'], 'null'])}"
        elif value == [] and "low" in spec.metadata:
            yield f"{key}=[]: needs at least one value, as in {key}=[64,64]"
        elif "low" in spec.metadata and value is not None:
            low, high, open_low = (spec.metadata[name] for name in ("low", "high", "open_low"))
            if any(not (v > low if open_low else v >= low) or not v <= high for v in values):
                least = "greater than" if open_low else "at least"
                yield f"{key}={value}: must be {least} {low} and at most {high}"


def check_folder(config: Config) -> None:
    """Raise `ConfigError` unless the run's folder can be made, or is there and empty."""
    key = "runs_dir" if config.run_dir is None else "run_dir"
    text = config.runs_dir if config.run_dir is None else config.run_dir
    if not text.strip():
        raise ConfigError(f"{key}: expected the name of a folder")
    try:
        folder = Path(text).expanduser().absolute()
        if folder.is_dir() and key == "run_dir" and any(folder.iterdir()):
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


def choose(wrong: str, allowed: Iterable[Any]) -> str:
    """`did you mean X? allowed: ...` for an unknown name, the nearest match first."""
    names = [str(name) for name in allowed]
    return f"{nearest(wrong, names)}allowed: {', '.join(names)}"


def nearest(wrong: str, allowed: Iterable[str]) -> str:
    """The hint at the name most like `wrong`, or nothing."""
    names = {name.lower().strip("-="): name for name in allowed}
    near = difflib.get_close_matches(wrong[:_LONGEST].lower().strip("-="), names, n=1, cutoff=0.5)
    return f"did you mean {names[near[0]]}? " if near else ""
