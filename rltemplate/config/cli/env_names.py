"""What `env=` can be: a file of `conf/env/`, or any id that Gymnasium has registered."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from collections.abc import Sequence

import yaml
from hydra.core.config_store import ConfigStore

from rltemplate.config.cli.composition import reason
from rltemplate.config.loading import CONF
from rltemplate.types import ConfigError

# Packages that register a namespace of their own when their module is imported: package and module.
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


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _check_registered(name: str, files: Sequence[str]) -> None:
    import gymnasium

    module, colon, env_id = name.rpartition(":")
    if colon:
        if not all(part.isidentifier() for part in module.split(".")):
            raise ConfigError(f"env={name}: expected the name of a module before ':', as in package:{env_id}")
        try:
            importlib.import_module(module)
        except Exception as error:  # whatever a module of the user's raises is the user's to read
            package, provider = _PACKAGES.get(env_id.rpartition("/")[0], (None, None))
            remedy = f"; pip install {package}" if package and not _is_installed(str(provider)) else ""
            raise ConfigError(f"env={name}: cannot import {module} ({reason(error)}){remedy}") from error
    spec = gymnasium.registry.get(env_id)
    if spec is None:
        known = {known_id.rpartition("/")[0] for known_id in gymnasium.registry}
        namespace = env_id.rpartition("/")[0]
        if namespace not in known:
            package, provider = _PACKAGES.get(namespace, (f"the package that registers {namespace}/", None))
            if provider is not None and not module and _is_installed(provider):
                raise ConfigError(
                    f"env={name}: {package} registers it when it is imported; write env={provider}:{name}"
                )
            install = "install" if provider is None else "pip install"
            raise ConfigError(
                f"env={name}: no installed package provides {namespace}/ environments; {install} {package}"
            )
        folded = {each.lower(): each for each in [*gymnasium.registry, *files]}
        near = difflib.get_close_matches(env_id.lower(), list(folded), n=1, cutoff=0.5)
        meant = f"{folded[near[0]]}" if near else ""
        prefix = f"{module}:" if module and meant not in files else ""
        hint = f"; did you mean {prefix}{meant}?" if near else ""
        if module and not hint:
            hint = f"; {module} registers nothing of that name"
        raise ConfigError(
            f"env={name}: no such environment{hint}\n"
            f"allowed: any id registered in Gymnasium, or {', '.join(files)}"
        )
    if isinstance(spec.entry_point, str):
        try:
            importlib.import_module(spec.entry_point.partition(":")[0])
        except (ImportError, gymnasium.error.Error) as error:
            raise ConfigError(
                f"env={name}: is registered, but what it needs is not installed ({reason(error)})"
            ) from error
