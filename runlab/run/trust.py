"""Trust in files of other people: the code that a received policy, run or ref may name.

A configuration names code: an environment's package and wrappers are imported, and called with the arguments
beside them. What a user types may name anything. What came with a file may name environments that Gymnasium,
an installed package or a committed file of this repository registers, and wrappers of Gymnasium. It may name
anything that a run of this clone was made with. Everything else needs `trust=true`. So do, in arguments of
an environment, a number above 100,000 and a file that is not committed, such as a model of MuJoCo.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from runlab.config.texts import few
from runlab.errors import ConfigError
from runlab.run.git.command import repository
from runlab.run.git.origin import made_here
from runlab.run.git.snapshot import RESERVED
from runlab.run.module_specs import module_specs
from runlab.run.paths import CONFIG, PROJECT, WANDB
from runlab.run.record import RunRecord
from runlab.run.validation import parse_yaml

_GYMNASIUMS = re.compile(r"(?:gymnasium\.wrappers(?:\.\w+)*[.:])?\w+")
# One writes files where its arguments say; the others make any environment of old Gym, by its module.
_NOT_HARMLESS = ("RecordVideo", "GymV21Environment-v0", "GymV26Environment-v0")
_SIZES = ("stack_size", "bins", "shape", "screen_size")  # arguments by which wrappers take memory
_LARGEST = 100_000
_INSTALLED = ("site-packages", "dist-packages")


def check_config(
    config: Mapping[str, Any], run_dir: Path, *, resumed: bool = False, project: Path | None = None
) -> None:
    """Raise `ConfigError` if the configuration of a recorded run names code that needs `trust=true`.

    `run_dir` has the record of the run, or none, as for a policy file. A run that is `resumed` also uses its
    sinks. Imports nothing that the configuration names.
    """
    project = PROJECT if project is None else project
    names = [*_foreign_names(config, resumed, project)]
    if names and not _of_this_clone(config, run_dir, resumed, project):
        raise ConfigError(
            f"{run_dir.name}: is not known as a run of this clone, and names {few(names)}\n"
            "without trust=true, which trusts its author, it may have wrappers of Gymnasium and environments "
            f"of installed packages or files committed here, with numbers up to {_LARGEST:,}"
        )


_LOG_OF_WANDB = f"{WANDB}/*run-*/logs/debug-core.log"


def check_folder(run_dir: Path, trust: bool = False) -> None:
    """Raise `ConfigError` if writing into a run folder might write elsewhere, or wait for ever.

    A run has no links of its own. Those that W&B makes stay inside of the folder, but for one to the log of
    its service, which nothing writes through. With `trust` a folder in it may be a link, such as
    `checkpoints` to a larger disk.
    """
    top = os.path.realpath(run_dir)
    for path in run_dir.rglob("*"):
        if not path.is_symlink():
            if not (path.is_file() or path.is_dir()) and path.exists():  # it may be gone: another command's
                raise ConfigError(f"{path} is no file, and nothing that a run writes; remove it")
        elif path.parent == run_dir or not Path(os.path.realpath(path)).is_relative_to(top):
            if (trust and path.is_dir()) or (path.match(_LOG_OF_WANDB) and not path.is_dir()):
                continue
            leads = f"{path} is a link to {path.readlink()}"
            cure = "; trust=true writes there" if path.is_dir() else ""
            raise ConfigError(f"{leads}, and a run writes into its own folder only{cure}")


def _foreign_names(config: Mapping[str, Any], resumed: bool, project: Path) -> Iterator[str]:
    env = config["env"]
    module, _, name = env["id"].rpartition(":")
    if name in _NOT_HARMLESS or (module and not _belongs_here(module, project)):
        yield f"env.id={env['id']}"
    for key, value in (env.get("kwargs") or {}).items():
        if not all(_is_harmless(part, project) for part in _parts(value)):
            yield f"env.kwargs.{key}={value}"[:200]
    size = 1.0  # of all wrappers together
    for key in ("wrappers", "training_wrappers"):
        for wrapper, arguments in (env.get(key) or {}).items():
            plain = _GYMNASIUMS.fullmatch(wrapper)
            size *= max(1.0, own := _size(arguments))
            large = own > _LARGEST or size > 10 * _LARGEST
            if plain is None or re.split("[.:]", wrapper)[-1] in _NOT_HARMLESS or large:
                yield f"env.{key}.{wrapper}={arguments}"[:200]
    if resumed:
        yield from (f"logger.sinks.{name}" for name in _sinks(config))


def _parts(value: Any) -> Iterator[Any]:
    """The texts and numbers in an argument of an environment."""
    if isinstance(value, Mapping | list):
        for part in [*value, *value.values()] if isinstance(value, Mapping) else value:
            yield from _parts(part)
    else:
        yield value


def _is_harmless(part: Any, project: Path) -> bool:
    """True unless it names a file that is not committed, or is a number such as 2e9 frames for each step."""
    if isinstance(part, str):
        return not _names_file(part) or _is_committed(Path(part), project)
    return not isinstance(part, int | float) or abs(part) <= _LARGEST or math.isinf(part)


def _names_file(text: str) -> bool:
    with suppress(OSError, ValueError):  # too long, or with a zero
        return "/" in text or Path(text).exists()
    return False


def _size(arguments: Any) -> float:
    """The largest product of numbers that an argument multiplies observations with."""
    sizes = [arguments.get(key, 0) for key in _SIZES] if isinstance(arguments, Mapping) else [0]
    numbers = (size if isinstance(size, list) else [size] for size in sizes)
    return max(math.prod(abs(n) for n in each if isinstance(n, int | float)) for each in numbers)


def _belongs_here(module: str, project: Path) -> bool:
    """True if importing a module executes only installed files, and files that are committed here."""
    # A `__main__` does something when it is imported.
    specs = [] if "__main__" in module.split(".") else [*module_specs(module)]
    return bool(specs) and all(
        _is_installed(spec) or _is_committed(Path(f"{spec.origin}"), project) for spec in specs
    )


def _is_installed(spec: ModuleSpec) -> bool:
    folders = (Path(entry) for entry in sys.path if Path(entry).name in _INSTALLED)
    return any(Path(f"{spec.origin}").absolute().is_relative_to(folder.absolute()) for folder in folders)


def _is_committed(path: Path, project: Path) -> bool:
    """True for a file in the last commit of this repository, or of an installed package in editable form."""
    file = path.resolve()
    for folder in (project.resolve(), *_editable_folders()):
        with suppress(ConfigError, OSError, ValueError), repository(folder) as git:
            inside = file.relative_to(git.top.resolve())
            if file.is_relative_to(folder) and git.find(f"HEAD:{inside.as_posix()}"):
                return True
    return False


def _editable_folders() -> Iterator[Path]:
    for package in metadata.distributions():
        with suppress(ValueError, AttributeError, KeyError):
            source = json.loads(package.read_text("direct_url.json") or "{}")
            if source.get("dir_info", {}).get("editable"):
                yield Path(unquote(urlparse(source["url"]).path)).resolve()


def _of_this_clone(config: Mapping[str, Any], run_dir: Path, resumed: bool, project: Path) -> bool:
    """True if a run of this clone was begun with the same environment (and sinks), as its commit says."""
    with suppress(ConfigError, OSError):
        commit = RunRecord.read(run_dir).git.commit
        with repository(project) as git:
            if made_here(git, commit):
                text = git("cat-file", "blob", f"{commit}:{RESERVED}{CONFIG}").decode()
                return names_same_code(parse_yaml(text, CONFIG), config, resumed)
    return False


def names_same_code(a: Mapping[str, Any], b: Mapping[str, Any], resumed: bool = True) -> bool:
    """True if two configurations name the same code, with the same arguments."""
    return _named(a, resumed) == _named(b, resumed)


def _named(config: Mapping[str, Any], resumed: bool) -> str:
    """The names of code with their arguments, as text, since the order of wrappers counts."""
    env = config["env"]
    parts = [env.get(key) or {} for key in ("kwargs", "wrappers", "training_wrappers")]
    return repr((env["id"], parts, _sinks(config) if resumed else {}))


def _sinks(config: Mapping[str, Any]) -> dict[str, Any]:
    sinks: dict[str, Any] = (config.get("logger") or {}).get("sinks") or {}
    return sinks
