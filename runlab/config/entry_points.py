"""Entry points by which installed packages bring algorithms, environments and sinks."""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from runlab.config.texts import choose, first_line
from runlab.errors import ConfigError


@cache
def brought(group: str) -> dict[str, EntryPoint]:
    """The entry points of a group by name; the name of the group outlives a renaming of this package."""
    return {each.name: each for each in entry_points(group=f"runlab.{group}")}


def load(key: str, group: str, name: str) -> Any:
    """The object behind an entry point; `ConfigError` in one line about the key that names it."""
    if (point := brought(group).get(name)) is None:
        allowed = choose(name, brought(group)) if brought(group) else "no installed package brings any"
        raise ConfigError(f"{key}: no such entry point of {group}; {allowed}")
    try:
        return point.load()
    except Exception as error:  # the module of a package may raise anything
        raise ConfigError(f"{key}: {point.value} cannot be loaded ({first_line(error)})") from error
