"""Optuna's study of a search: storage that several commands share, sampler and pruner by name."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import optuna
from omegaconf import OmegaConf
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage, RetryHeartbeatStaleTrialCallback
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from yaml import YAMLError

from runlab.config.project import require
from runlab.config.texts import choose, first_line
from runlab.errors import ConfigError

BEAT_EVERY_S, SILENT_S = 10, 60  # signs of life of a trial in a database, and the longest time without


def open_database(url: str) -> RDBStorage:
    """A study's storage in a database, where trials without a sign of life can be queued again.

    Raises ConfigError for a wrong URL, of which it shows nothing: it may hold a password.
    """
    if url.startswith("postgresql:"):
        require("psycopg", "postgres", "storage")
    connect = partial(
        RDBStorage,
        url,
        heartbeat_interval=BEAT_EVERY_S,
        grace_period=SILENT_S,
        heartbeat_stale_trial_callback=RetryHeartbeatStaleTrialCallback(),
    )
    try:
        with suppress(SQLAlchemyError, StorageInternalError):  # another command makes the tables just now
            return connect()
        time.sleep(1)
        return connect()
    except ImportError as error:
        raise ConfigError(f"storage: {first_line(error.__cause__ or error)}") from None
    except (ArgumentError, ValueError):
        raise ConfigError("storage: expected a URL of SQLAlchemy as in postgresql://USER@HOST/NAME") from None


def open_journal(file: Path) -> BaseStorage:
    """A study's storage in a file. Raises ConfigError for one that is no journal."""
    backend = JournalFileBackend(str(file), lock := JournalFileOpenLock(str(file)))
    lock.acquire()  # waits for 30 seconds if a command was killed in the middle of a line
    try:
        lines = file.read_bytes()
        if not lines.endswith(b"\n"):  # of a machine that lost its power, or had a full disk
            os.truncate(file, lines.rfind(b"\n") + 1)
    finally:
        lock.release()
    try:
        return JournalStorage(backend)
    except Exception as error:  # it may have come from somebody else, and have anything
        raise ConfigError(f"{file} is no journal of Optuna: {first_line(error)}") from error


def make(kind: str, name: str, words: Sequence[str]) -> Any:
    """Optuna's sampler or pruner `name`, with its arguments among `words`. Raises ConfigError."""
    module = getattr(optuna, f"{kind}s")
    names = [each for each in module.__all__ if each.endswith(kind.title())]
    if name not in names:
        raise ConfigError(f"{kind}={name}: no such {kind}; {choose(name, names)}")
    try:
        values = OmegaConf.from_dotlist([word for word in words if word.startswith(f"{kind}.")])
        return getattr(module, name)(**values.get(kind, {}))
    except (TypeError, ValueError, ImportError, YAMLError) as error:
        raise ConfigError(f"{kind}={name}: {first_line(error)}") from error
