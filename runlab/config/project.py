"""The project that this package serves: its algorithms, and the functions that build and train one.

`[tool.runlab] project` in pyproject.toml names the module that declares them. Where the package is installed
from a wheel, the entry point of the group `runlab.project` names it. No module imports the project in another
way.
"""

from __future__ import annotations

import importlib.util
import shlex
import sys
import tomllib
from collections.abc import Sequence
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from runlab import INSTALLED
from runlab.config.algorithms import Entry
from runlab.config.entry_points import brought, load
from runlab.config.texts import installing
from runlab.errors import ConfigError

if TYPE_CHECKING:
    import gymnasium as gym
    from gymnasium import spaces

    from runlab.interfaces import Algorithm, Codec, Environments, Observers

_MEMBERS = ("ALGORITHMS", "build", "train", "wrapped", "codec")
_SETTINGS = Path(__file__).resolve().parents[2] / "pyproject.toml"


class Project(Protocol):
    """The members of the module that declares a project."""

    __file__: str
    __name__: str
    ALGORITHMS: dict[str, Entry]

    def build(self, config: Any) -> tuple[Algorithm, Environments]:
        """The algorithm of a configuration and its environments; `ConfigError` if they do not fit."""

    def train(self, config: Any, algorithm: Algorithm, observers: Observers) -> None:
        """The loop: train and observe until the run is complete or asked to end.

        A run whose loop ends earlier, such as by early stopping, is recorded as interrupted and can resume.
        """

    def wrapped(self, env_id: str, env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
        """An environment with observations that the codec takes; `ConfigError` if it has none."""

    def codec(self, env_id: str, obs_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> Codec:
        """The translation of an environment's observations and actions to arrays and back."""


@cache
def project() -> Project:
    """The declared project, imported."""
    name = _declared()
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        if error.name == __name__:  # by way of a module that needs the table
            raise ConfigError(f"the project {name} cannot be declared by a module that imports it") from None
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(f"the project {name} cannot be imported: no module {error.name}") from error
    lacking = [member for member in _MEMBERS if not hasattr(module, member)]
    if lacking:
        raise ConfigError(f"the project {name} lacks {', '.join(lacking)}; see docs/design.md")
    return cast(Project, module)


def project_folder() -> Path:
    """The folder of the project's package."""
    return Path(project().__file__).parent


def reference_returns() -> Path | None:
    """The file of published returns in the project's package, if it has one."""
    file: Path | None = getattr(project(), "REFERENCE_RETURNS", None)
    return file


def as_typed(command: str, words: Sequence[str] = ()) -> str:
    """A command with its arguments, as typed here: with make in a repository, else the installed program."""
    flags = [word for word in words if word.startswith("-")]
    rest = [word for word in words if not word.startswith("-")]
    if flags and not INSTALLED:  # make would take them for its own
        flags = [f"ARGS={shlex.join(flags)}"]
    program = project().__name__.partition(".")[0] if INSTALLED else "make"
    return " ".join([program, command, *map(shlex.quote, [*rest, *flags])])


def require(module: str, extra: str, key: str) -> None:
    """Raise `ConfigError` in a line if a module that an extra of the project brings is not installed."""
    if importlib.util.find_spec(module) is None:
        raise ConfigError(f"{key}: {module} is not installed; {installing(extra, module)}")


def _declared() -> str:
    """The name of the module that declares the project."""
    if _SETTINGS.is_file():
        try:
            settings: Any = tomllib.loads(_SETTINGS.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{_SETTINGS} cannot be read: {error}") from error
        for key in ("tool", "runlab", "project"):
            settings = settings.get(key) if isinstance(settings, dict) else None
        if settings is not None:
            if not (isinstance(settings, str) and all(map(str.isidentifier, settings.split(".")))):
                raise ConfigError(
                    f"{_SETTINGS}: tool.runlab.project={settings!r}: expected the name of a module"
                )
            return settings
    names = sorted({point.value for point in entry_points(group="runlab.project")})
    if len(names) == 1:
        return names[0]
    text = f"several projects are installed: {', '.join(names)}" if names else "no project is declared"
    raise ConfigError(f"{text}; name it in pyproject.toml as [tool.runlab] project")


def _algorithms() -> dict[str, Entry]:
    """The algorithms of the project and of installed packages by name; the project's come first."""
    table = dict(project().ALGORITHMS)
    for name in brought("algorithms"):
        try:
            table.setdefault(name, load(f"algo={name}", "algorithms", name))
        except ConfigError as problem:
            print(f"note: {problem}", file=sys.stderr)
    return table


ALGORITHMS = _algorithms()
