"""The files of conf/ and of --config-dir: their names, and a check when Hydra reads them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins import file_config_source
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult
from omegaconf import OmegaConf

from runlab.config.loading import CONF, CONF_NAME
from runlab.config.project import ALGORITHMS
from runlab.config.schema import check_kinds
from runlab.config.texts import choose, from_here
from runlab.config.yaml_files import check_yaml, explained, read_yaml
from runlab.errors import ConfigError

# Groups whose files set keys of the whole configuration.
_GLOBAL = ("algo", "recipe", "experiment", "debug", "local")


def group_names() -> list[str]:
    """The groups of conf/ that a user chooses from."""
    return sorted(path.name for path in CONF.iterdir() if path.is_dir() and path.name != "hydra")


def option_files(group: str, more: Iterable[Path]) -> dict[str, Path]:
    """The files of a group by name, in `more` folders and in conf/, which Hydra asks first.

    A leading underscore marks a file that others build on.
    """
    paths = [path for folder in (*more, CONF) for path in (folder / group).glob("*.yaml")]
    files = {path.stem: path for path in paths if path.is_file()}
    return {name: files[name] for name in sorted(files) if not name.startswith("_")}


def option_names(group: str, more: Iterable[Path] = ()) -> list[str]:
    """The names of `option_files`, and of algorithms that packages bring."""
    brings = [name for name, entry in ALGORITHMS.items() if group == "algo" and entry.values]
    return sorted({*option_files(group, more), *brings})


def read_sweep(name: str, more: Iterable[Path], other: Sequence[str] = ()) -> dict[str, Any]:
    """The values of each key in a file of conf/sweep/. `other` are further allowed names, for the message."""
    files = option_files("sweep", more)
    if name not in files:
        raise ConfigError(f"sweep={name}: {choose(name, [*other, *files], f'{CONF_NAME}/sweep/')}")
    try:
        values = read_yaml(files[name])
    except ConfigError as error:
        raise ConfigError(f"sweep={name}: {error}") from error
    if not values:
        raise ConfigError(
            f"sweep={name}: {from_here(files[name])}: expected keys with values, as in seed: 1,2"
        )
    return dict(values)


def chosen_algorithm(words: Iterable[str]) -> str:
    """The algorithm of a configuration with these overrides."""
    values = read_yaml(CONF / "config.yaml") or {}
    listed = [entry.get("algo") for entry in values.get("defaults", []) if isinstance(entry, dict)]
    default = next((name for name in [*listed, *ALGORITHMS] if name in ALGORITHMS), "")
    named = (
        name for word in words if word.startswith("algo=") for name in word.removeprefix("algo=").split(",")
    )
    return next((name for name in named if name in ALGORITHMS), default)


def check_files() -> None:
    """Let Hydra read no file that is refused here, whether a word or another file names it."""
    Plugins.instance()  # registers Hydra's own sources, once
    SourcesRegistry.instance().types["file"] = FileConfigSource


class FileConfigSource(file_config_source.FileConfigSource):
    """Hydra's source of files, under the same name, for Hydra may register its own again.

    Its errors would lack the file or be tracebacks.
    """

    def load_config(self, config_path: str) -> ConfigResult:
        path = Path(self.path, self._normalize_file_name(config_path))
        if path.exists():
            _check(path, path.stat().st_mtime_ns)
        try:
            result = super().load_config(config_path)
        except Exception as error:  # of Hydra and OmegaConf, which alone run here
            raise explained(path, error) from error
        package, group = result.header["package"], str(Path(config_path).parent)
        values: Any = OmegaConf.to_container(result.config)
        if package is None and group in _GLOBAL and {*values} - {"defaults"}:
            raise ConfigError(f"{from_here(path)}: its first line has to be '# @package _global_'")
        prefix = group.replace("/", ".") if package is None else package
        try:
            check_kinds(values, "" if prefix in ("_global_", ".") else f"{prefix}.")
        except ConfigError as error:
            raise ConfigError(f"{from_here(path)}: {error}") from None
        return result


@cache
def _check(path: Path, _changed: int) -> None:
    """Check a file once, for a sweep composes it with each job."""
    check_yaml(path)
