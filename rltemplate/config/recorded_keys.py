"""Configurations that older code recorded, with their values under the keys that this code has for them.

The one place for keys that were removed, were added or mean something else now. Whatever reads a recorded
configuration passes through here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Keys of earlier versions, in dotted form, each with the value at which a run does not depend on it.
REMOVED: dict[str, Any] = {"env.backend": "gymnasium", "seeds": None}

# Keys that earlier versions lack, in dotted form (a key `algo.x` of PPO as `ppo.x`), each with the value at
# which a run does what these did. A recorded configuration without another key takes the value of conf/.
ADDED: dict[str, Any] = {}


def name_in_added(key: str, algorithm: str) -> str:
    """The name that a key of the configuration has in `ADDED`."""
    return f"{algorithm}.{key.removeprefix('algo.')}" if key.startswith("algo.") else key


def removed_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of `REMOVED` that a recorded configuration has, with their values."""
    found = {}
    for key in REMOVED:
        parent, _, name = key.rpartition(".")
        holder = values.get(parent) if parent else values
        if isinstance(holder, Mapping) and name in holder:
            found[key] = holder[name]
    return found


def with_present_keys(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """A recorded configuration (nested, not checked) as this code would have recorded it."""
    values = _without_removed(recorded)
    if "experiment" in values and "recipe" not in values:
        # One key was for both, so that an experiment of one's own left the recipe out.
        values["recipe"], values["experiment"] = _recipe_and_experiment(values)
    return values


def _without_removed(values: Mapping[str, Any]) -> dict[str, Any]:
    """A recorded configuration without the keys of `REMOVED` that have their neutral value."""
    kept = dict(values)
    for key, value in removed_keys(values).items():
        if value == REMOVED[key]:
            parent, _, name = key.rpartition(".")
            if parent:
                kept[parent] = dict(kept[parent])
            del (kept[parent] if parent else kept)[name]
    return kept


def _recipe_and_experiment(values: Mapping[str, Any]) -> tuple[Any, Any]:
    algo, name = values.get("algo"), values["experiment"]
    # Recipes were named after the pair.
    if isinstance(algo, Mapping) and isinstance(name, str) and name.startswith(f"{algo.get('name')}-"):
        return name, None
    return None, name
