"""Optuna's study of a search: ranges, sampler and pruner, and the storage that several commands share."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import optuna
from omegaconf import OmegaConf
from optuna.distributions import BaseDistribution
from optuna.exceptions import ExperimentalWarning, StorageInternalError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage, RetryHeartbeatStaleTrialCallback
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from yaml import YAMLError

from runlab.config.project import require
from runlab.config.texts import choose, first_line
from runlab.errors import ConfigError
from runlab.launch.search_args import Args
from runlab.launch.sweep_job import make_folder
from runlab.run import paths
from runlab.run.continuation import check_changes
from runlab.run.git.snapshot import take_snapshot
from runlab.run.record import RunRecord

_WIDEST = 1e300  # end of a range; Optuna draws from no wider one
# The state of the first is in the study, perhaps somebody else's. The second stops the loop of Optuna's own.
_REFUSED = {
    "CmaEsSampler": "runs code that a study holds",
    "BruteForceSampler": "a sweep over several values of each key tries all combinations",
}
RUN_OF_SEED = "run-seed"  # begins the attribute of a trial that names the run with a seed
BEAT_EVERY_S, SILENT_S = 10, 60  # signs of life of a trial in a database, and the longest time without


def distribution(rule: dict[str, Any]) -> BaseDistribution:
    """A range or choices. Raises TypeError or ValueError for anything else, as Optuna does."""
    match rule:
        case {"choices": list(choices), **rest} if not any(isinstance(each, dict) for each in choices):
            # Optuna compares choices by hash, which a list has none of.
            plain = [str(each) if isinstance(each, list) else each for each in choices]
            return optuna.distributions.CategoricalDistribution(plain, **rest)
        case {"low": int(), "high": int(), "step": float()}:  # is no range of whole numbers
            return distribution({**rule, "low": float(rule["low"])})
        case {"low": int(low), "high": int(high), **rest} if low < high:
            return optuna.distributions.IntDistribution(low, high, **rest)
        case {"low": int() | float() as low, "high": int() | float() as high, **rest}:
            if -_WIDEST <= low < high <= _WIDEST:  # not nan either
                return optuna.distributions.FloatDistribution(low, high, **rest)
    raise ValueError(rule)


def open_study(
    args: Args, folder: Path, ranges: Mapping[str, BaseDistribution]
) -> tuple[Study, RDBStorage | None]:
    """The study of a search, new or begun before, and its database, if it has one.

    Raises ConfigError for a sampler, pruner or storage that does not fit, before it makes the folder.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=ExperimentalWarning)
    warnings.filterwarnings("ignore", "Heartbeat of storage")  # not only for Study.optimize
    pruner = _make("pruner", args.pruner if args.prune else "NopPruner", args.overrides)
    sampler = _make("sampler", args.sampler, args.overrides)
    trying = optuna.create_study(sampler=deepcopy(sampler))
    try:
        for _ in range(12):  # as often as samplers draw before they learn, or need another package
            trying.tell(trying.ask(dict(ranges)), 0.0)
    except (TypeError, ValueError, ImportError) as error:
        raise ConfigError(f"sampler={args.sampler}: {first_line(error)}") from error
    database = open_database(args.storage) if args.storage else None
    make_folder(folder)
    direction = StudyDirection.MINIMIZE if args.objective.startswith("-") else StudyDirection.MAXIMIZE
    study = optuna.create_study(
        storage=database or open_journal(folder / "study.journal"),
        study_name=folder.name,
        direction=direction,
        sampler=sampler,
        pruner=pruner,
        load_if_exists=True,
    )
    trials = study.get_trials(deepcopy=False)
    if study.directions != [direction] or not all(_fits(trial, ranges) for trial in trials):
        raise ConfigError(f"the study of {folder} has what this search cannot have written")
    _check_code(folder.parents[1], trials, args.accept is not None)
    return study, database


def _check_code(runs_dir: Path, trials: Sequence[FrozenTrial], accept: bool) -> None:
    """Raise ConfigError for other code or libraries than the first run of the search had that is here."""
    attributes = [(key, name) for trial in trials for key, name in trial.user_attrs.items()]
    ids = [paths.safe_name(str(name)) for key, name in attributes if key.startswith(RUN_OF_SEED)]
    for file in (file for each in ids for file in runs_dir.glob(f"*/{each}/{paths.RECORD}")):
        with suppress(ConfigError):  # a damaged one is no reason to end a search
            run = RunRecord.read(file.parent)
            break
    else:
        return
    check_changes("the search", run.git, run.versions, take_snapshot(paths.PROJECT), accept, [run.used])


def _fits(trial: FrozenTrial, ranges: Mapping[str, BaseDistribution]) -> bool:
    """True if a search of these ranges can have written a trial, which may be somebody else's."""
    with suppress(Exception):  # of Optuna, for values of any type
        values = trial.params | trial.system_attrs.get("fixed_params", {})
        optuna.create_trial(value=0.0, params=values, distributions={key: ranges[key] for key in values})
        return (
            trial.distributions.items() <= ranges.items()
            and all(isinstance(each, float) for each in trial.intermediate_values.values())
            and isinstance(trial.system_attrs.get("retry_history", []), list)
            and (trial.state is not TrialState.COMPLETE or f"{trial.value:g}" != "nan")
        )
    return False


def open_database(url: str) -> RDBStorage:
    """A study's storage in a database, where trials without a sign of life can be queued again.

    Raises ConfigError for a wrong URL, of which it shows nothing, since it may hold a password, and for what
    is no database of this Optuna.
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
    except (SQLAlchemyError, StorageInternalError, RuntimeError) as error:  # the last: of another Optuna
        raise ConfigError(f"storage: cannot be opened: {first_line(error.__cause__ or error)}") from error


class _Lock(JournalFileOpenLock):
    """The lock of a journal, which Optuna takes to append. Who has it first cuts half a line off the end.

    A machine that lost its power, a full disk or a killed command leaves one. Another command that shares the
    study would append to it, and make a line that nobody can read.
    """

    def __init__(self, file: Path) -> None:
        super().__init__(str(file))
        self._file = file

    def acquire(self) -> bool:
        super().acquire()  # waits for 30 seconds if a command was killed while it had the lock
        try:
            with self._file.open("rb+") as journal:
                journal.seek(max(0, journal.seek(0, os.SEEK_END) - 1))
                if journal.read() not in (b"\n", b""):
                    journal.seek(0)
                    journal.truncate(journal.read().rfind(b"\n") + 1)
        except BaseException:
            self.release()
            raise
        return True


def open_journal(file: Path) -> BaseStorage:
    """A study's storage in a file. Raises ConfigError for one that is no journal."""
    try:
        return JournalStorage(JournalFileBackend(str(file), _Lock(file)))
    except Exception as error:  # it may have come from somebody else, and have anything
        raise ConfigError(f"{file} is no journal of Optuna: {first_line(error)}") from error


def _make(kind: str, name: str, words: Sequence[str]) -> Any:
    """Optuna's sampler or pruner `name`, with its arguments among `words`. Raises ConfigError."""
    module = getattr(optuna, f"{kind}s")
    left_out = (*_REFUSED, f"Base{kind.title()}")
    names = [each for each in module.__all__ if each.endswith(kind.title()) and each not in left_out]
    if name not in names:
        why = _REFUSED.get(name, f"no such {kind}")
        raise ConfigError(f"{kind}={name}: {why}; {choose(name, names)}")
    try:
        values = OmegaConf.from_dotlist([word for word in words if word.startswith(f"{kind}.")])
        return getattr(module, name)(**values.get(kind, {}))
    except (TypeError, ValueError, ImportError, YAMLError) as error:
        raise ConfigError(f"{kind}={name}: {first_line(error)}") from error
