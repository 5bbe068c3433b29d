"""Optuna's study of a search: storage that several commands share, sampler and pruner by name."""

from __future__ import annotations

import fcntl
import inspect
import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from runlab.config.texts import choose, first_line, installing
from runlab.errors import ConfigError, RunError

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

BEAT_EVERY_S, SILENT_S = 10, 60  # signs of life of a trial in a database, and the longest time without
_DATABASES = ("postgresql", "mysql", "mariadb", "oracle", "mssql", "sqlite")
_PLAIN: dict[str, Any] = {"int": int, "float": float, "bool": bool, "str": str, "None": None}


def open_database(url: str, again: Callable[..., None]) -> Any:
    """A study's storage in a database; `again` gets each trial that gave no sign of life. Raises ConfigError.

    Of the URL, which may hold a password, messages show the kind of database only.
    """
    from optuna.exceptions import StorageInternalError
    from optuna.storages import RDBStorage, get_storage
    from sqlalchemy.exc import ArgumentError, SQLAlchemyError

    name = url.partition("://")[0] if "://" in url else ""
    kind = f"storage={name}://..." if name else "storage"
    beats: dict[str, Any] = {"heartbeat_interval": BEAT_EVERY_S, "grace_period": SILENT_S}
    for last in (False, False, True):
        try:
            return get_storage(RDBStorage(url, **beats, heartbeat_stale_trial_callback=again))
        except (ArgumentError, ValueError):
            databases = choose(name, _DATABASES)
            raise ConfigError(
                f"{kind}: expected postgresql://USER@HOST/NAME or the like; {databases}"
            ) from None
        except ImportError as error:
            module = str(getattr(error.__cause__, "name", "its driver"))
            extra, packages = ("postgres", "'psycopg[binary]'") if module == "psycopg" else ("", module)
            raise ConfigError(f"{kind}: {module} is not installed; {installing(extra, packages)}") from None
        except (StorageInternalError, SQLAlchemyError) as error:
            if last:
                raise RunError(f"{kind}: {first_line(error.__cause__ or error)}") from None
            time.sleep(1)  # another command makes the tables at this moment
    raise AssertionError


def open_journal(file: Path) -> BaseStorage:
    """A study's storage in a file. Raises ConfigError for one that is no journal."""
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

    class Lock(JournalFileOpenLock):
        """A lock that the kernel releases with a killed process; Optuna's own stay for 30 seconds."""

        def acquire(self) -> bool:
            self._fd = os.open(f"{file}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            fcntl.lockf(self._fd, fcntl.LOCK_EX)
            lines = file.read_bytes()
            if not lines.endswith(b"\n"):  # of a process that was killed, or had a full disk
                os.truncate(file, lines.rfind(b"\n") + 1)
            return True

        def release(self) -> None:
            os.close(self._fd)

    try:
        return JournalStorage(JournalFileBackend(str(file), Lock(str(file))))
    except OSError:
        raise
    except Exception as error:  # it may have come from somebody else, and have anything
        raise ConfigError(f"{file} is no journal of Optuna: {first_line(error)}") from error


def make(module: Any, kind: str, name: str, words: Sequence[str], **default: Any) -> Any:
    """Optuna's sampler or pruner `name`, with its arguments among `words`. Raises ConfigError."""
    classes = {each: getattr(module, each) for each in module.__all__ if each.endswith(kind.title())}
    known = {name: _plain_arguments(made) for name, made in classes.items() if not name.startswith("Base")}
    if (plain := known.get(name)) is None:
        allowed = [name for name, arguments in known.items() if arguments is not None]
        raise ConfigError(f"{kind}={name}: no such {kind}; {choose(name, allowed)}")
    values = {key: value for key, value in default.items() if key in plain}
    for word in words:
        if not word.startswith(f"{kind}."):
            continue
        key, _, text = word.removeprefix(f"{kind}.").partition("=")
        if key not in plain:
            raise ConfigError(f"{word}: {name} has no such argument; {choose(key, plain)}")
        for each in plain[key]:
            with suppress(msgspec.ValidationError):
                values[key] = msgspec.convert(text, _PLAIN[each], strict=False)
                break
        else:
            raise ConfigError(f"{word}: expected {' or '.join(plain[key])}")
    try:
        return classes[name](**values)
    except (TypeError, ValueError, ImportError) as error:
        raise ConfigError(f"{kind}={name}: {first_line(error)}") from error


def _plain_arguments(made: type[Any]) -> dict[str, list[str]] | None:
    """Arguments with plain values, and their types; None if it needs another argument."""
    plain = {}
    for each in inspect.signature(made).parameters.values():
        names = re.findall(r"\w+", str(each.annotation))
        if {*names} <= {*_PLAIN}:
            plain[each.name] = [name for name in _PLAIN if name in names]
        elif each.default is each.empty:
            return None
    return plain
