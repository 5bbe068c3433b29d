"""`env=` is a file of `conf/env/`, or any id that Gymnasium has registered."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Sequence

import yaml
from hydra.core.config_store import ConfigStore

from rltemplate.config.loading import CONF
from rltemplate.types import ConfigError


def environment_option(name: str, files: Sequence[str]) -> str:
    """The file of conf/env/ that stands for a Gymnasium id, or a node made for it on the spot."""
    for file in files:
        content = yaml.safe_load((CONF / "env" / f"{file}.yaml").read_text(encoding="utf-8"))
        if content.get("id") == name and not content.get("kwargs"):
            return file
    _check_registered(name, files)
    group, _, leaf = f"env/{name}".rpartition("/")
    node = {"defaults": ["/env/_gymnasium@_here_", "_self_"], "id": name}
    ConfigStore.instance().store(group=group, name=leaf, node=node)
    return name


def _check_registered(name: str, files: Sequence[str]) -> None:
    import gymnasium

    module, _, env_id = name.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        spec = gymnasium.registry.get(env_id)
        if spec is not None and isinstance(spec.entry_point, str):
            importlib.import_module(spec.entry_point.partition(":")[0])
    except Exception as error:  # a module of the user's may raise anything
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"env={name}: what it needs cannot be imported ({reason}); is it installed?"
        ) from error
    if spec is None:
        folded = {each.lower(): each for each in [*gymnasium.registry, *files]}
        near = difflib.get_close_matches(env_id.lower(), folded, n=1, cutoff=0.5)
        hint = f"; did you mean {folded[near[0]]}?" if near else ""
        raise ConfigError(
            f"env={name}: no such environment{hint}\n"
            f"allowed: any id registered in Gymnasium, package:id for one "
            f"that the import of a package registers, or {', '.join(files)}"
        )
