"""`env=` is a file of `conf/env/`, or any id that Gymnasium has registered."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Sequence

import yaml
from hydra.core.config_store import ConfigStore

from rltemplate.config.cli.composition import reason
from rltemplate.config.loading import CONF
from rltemplate.types import ConfigError

# Packages that register a namespace when their module is imported: package and module.
_PACKAGES = {
    "ALE": ("ale-py", "ale_py"),
    "dm_control": ("shimmy[dm-control]", "shimmy"),
    "mo-gymnasium": ("mo-gymnasium", "mo_gymnasium"),
}


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

    module, colon, env_id = name.rpartition(":")
    if colon:
        if not all(part.isidentifier() for part in module.split(".")):
            raise ConfigError(f"env={name}: expected the name of a module before ':', as in package:{env_id}")
        try:
            importlib.import_module(module)
        except Exception as error:  # a module of the user's may raise anything
            raise ConfigError(f"env={name}: cannot import {module} ({reason(error)})") from error
    spec = gymnasium.registry.get(env_id)
    if spec is None:
        raise ConfigError(f"env={name}: {_why_none(module, env_id, files)}")
    if isinstance(spec.entry_point, str):
        try:
            importlib.import_module(spec.entry_point.partition(":")[0])
        except (ImportError, gymnasium.error.Error) as error:
            raise ConfigError(
                f"env={name}: is registered, but what it needs is not installed ({reason(error)})"
            ) from error


def _why_none(module: str, env_id: str, files: Sequence[str]) -> str:
    import gymnasium

    namespace = env_id.rpartition("/")[0]
    if namespace not in {known.rpartition("/")[0] for known in gymnasium.registry}:
        package, provider = _PACKAGES.get(namespace, ("", ""))
        if not package:
            package = f"the package that registers {namespace}/"
            return f"no installed package provides {namespace}/ environments; install {package}"
        return (
            f"no imported package provides {namespace}/ environments; pip install {package}, and write "
            f"env={provider}:{env_id}"
        )
    folded = {each.lower(): each for each in [*gymnasium.registry, *files]}
    near = difflib.get_close_matches(env_id.lower(), list(folded), n=1, cutoff=0.5)
    hint = f"; {module} registers nothing of that name" if module else ""
    if near:
        meant = folded[near[0]]
        hint = f"; did you mean {f'{module}:' if module and meant not in files else ''}{meant}?"
    return f"no such environment{hint}\nallowed: any id registered in Gymnasium, or {', '.join(files)}"
