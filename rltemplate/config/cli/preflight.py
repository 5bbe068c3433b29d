"""The words of the command, checked before anything is created and before torch is imported.

Hydra's own answers to mistakes are long, and one of its hints (`+key`) adds a key that nothing reads. So
every word is looked at here first: keys, groups, names and values are compared with what exists, and every
configuration that the command stands for is composed once. What Hydra receives afterwards cannot fail.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from hydra import initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override, ValueType
from hydra.plugins.sweeper import Sweeper

from rltemplate.config.cli.composition import (
    Composed,
    compose_config,
    compose_job,
    compose_with_hydra,
)
from rltemplate.config.cli.flags import pop_sweep_args, quote_text, split_words
from rltemplate.config.cli.keys import NONE, OPTIONAL
from rltemplate.config.cli.overrides import check_overrides, parse_override
from rltemplate.config.cli.secret_values import check_words
from rltemplate.config.command_args import readable
from rltemplate.config.loading import CONF
from rltemplate.config.schema import Config, register_schemas
from rltemplate.config.validation import check_folder
from rltemplate.types import BOOKKEEPING_KEYS, ConfigError

# Jobs composed in advance, at a tenth of a second each; mistakes in later jobs refuse these jobs. Jobs that
# differ in their seed alone count once.
_COMPOSE_AT_MOST = 100
_SEED = re.compile(r"seed=[0-9]{1,18}")
_JOBS_AT_MOST = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The meaning of a command: the words for Hydra, and the configurations that it stands for."""

    argv: list[str]
    sweep: bool = False
    num_jobs: int | None = None  # None: the sweeper decides while it runs
    configs: list[Config] = field(default_factory=list)  # none if nothing is going to run (--help, --cfg)
    overrides: list[list[str]] = field(default_factory=list)  # of each configuration
    words: list[str] = field(default_factory=list)  # which sweep it is, wherever and however it runs
    resume: str | None = None  # the sweep that goes on, as the user named it
    accept: bool = False  # it may go on with changed code and libraries
    alone: Composed | None = None  # a single run that Hydra need not compose and start once more


def preflight(argv: Sequence[str]) -> Plan:
    """Check the words of the command (without the program's name); the plan for what is to be done.

    Raises `ConfigError` with one or two lines for the first mistake. Creates nothing.
    """
    try:
        check_words(argv)
        return _plan(argv)
    except ConfigError as error:
        raise ConfigError(readable(str(error), argv)) from error


def _plan(argv: Sequence[str]) -> Plan:
    words, flags, arguments = split_words(argv)
    register_schemas()
    if arguments.shell_completion:
        return Plan(argv=list(argv))
    words, resume, accept = pop_sweep_args(words)
    for group in OPTIONAL:
        ConfigStore.instance().store(group=group, name=NONE, node={}, package="_global_")
    with initialize_config_dir(str(CONF), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        overrides = check_overrides([parse_override(quote_text(word), loader) for word in words], loader)
        sweep = arguments.multirun or any(override.is_sweep_override() for override in overrides)
        plain = [str(override.input_line) for override in overrides]
        if resume is not None and not sweep:
            raise ConfigError(f"sweep={resume}: this is a single run; make resume run=RUN goes on with one")
        if arguments.cfg or arguments.info or arguments.help or arguments.hydra_help:
            if sweep:
                raise ConfigError("--cfg and --info show one configuration: leave out lists of values")
            if arguments.cfg or arguments.info:
                compose_config(plain)
            return Plan(argv=[*plain, *flags])
        if not sweep:
            job = compose_job(plain)
            check_folder(job.config)
            alone = job if job.plain and not flags else None
            argv = [*plain, *flags]
            return Plan(argv=argv, num_jobs=1, configs=[job.config], overrides=[plain], alone=alone)
        jobs, exact = _jobs(overrides, plain, loader)
        chosen = _sample(jobs)
        configs = _compose(chosen)
        if exact and len(configs) == len(jobs):
            # All jobs are known to be good; Hydra would be silent for a tenth of a second for each.
            Sweeper.validate_batch_is_legal = lambda *_: None  # type: ignore[method-assign]
        _check_sweep(configs)
        return Plan(
            argv=[*plain, *flags, *([] if arguments.multirun else ["--multirun"])],
            sweep=True,
            num_jobs=len(jobs) if exact else None,
            configs=configs,
            overrides=chosen,
            words=_words_of_sweep(plain),
            resume=resume,
            accept=accept,
        )


def _words_of_sweep(plain: Sequence[str]) -> list[str]:
    """Overrides that say which sweep it is, without place, purpose and launcher of its runs."""
    other = (*BOOKKEEPING_KEYS, "hydra/launcher")
    keyed = [(word.lstrip("+~").partition("=")[0], word) for word in plain]
    return [word for key, word in keyed if key not in other and not key.startswith("hydra.launcher.")]


def _jobs(
    overrides: Sequence[Override], plain: Sequence[str], loader: ConfigLoader
) -> tuple[list[list[str]], bool]:
    """The overrides of every job, and true if these are all of them (another sweeper draws its own)."""
    single = [line for line, o in zip(plain, overrides, strict=True) if not o.is_sweep_override()]
    hydra = compose_with_hydra(single).hydra
    if not str(hydra.sweeper["_target_"]).endswith("BasicSweeper"):
        return [single], False
    params = [f"{key}={value}" for key, value in (hydra.sweeper.params or {}).items()]
    everything = [*(parse_override(param, loader) for param in params), *overrides]
    number = 1
    for override in everything:
        if override.is_sweep_override() or override.value_type == ValueType.GLOB_CHOICE_SWEEP:
            number *= _num_values(override)
        if number > _JOBS_AT_MOST:
            limit = f"more than {_JOBS_AT_MOST:,} jobs; give fewer values"
            raise ConfigError(f"{override.input_line}: would make a sweep of {limit}")
    return BasicSweeper.split_arguments(everything, None)[0], True


def _num_values(override: Override) -> int:
    """The number of values of a list, counted up to the limit."""
    line = override.input_line
    if override.value_type == ValueType.GLOB_CHOICE_SWEEP:
        raise ConfigError(f"{line}: glob() is for names of files, as in env=glob(*Walker*)")
    if not override.is_discrete_sweep():
        raise ConfigError(f"{line}: interval() needs a sweeper that draws; use choice() or range()")
    try:
        number = sum(1 for _ in islice(override.sweep_string_iterator(), _JOBS_AT_MOST + 1))
    except ValueError as error:
        raise ConfigError(f"{line}: the step of a range must not be 0; write range(1,9,2)") from error
    if not number:
        raise ConfigError(f"{line}: has no value; range(1,4) stands for 1, 2 and 3")
    return number


def _sample(jobs: list[list[str]]) -> list[list[str]]:
    """All jobs, or of too many those that bring a new pair of algorithm and environment or a new value.

    Values of shorter lists come first: a list of hundreds of values is a range of one kind.
    """
    if len(set(map(_but_seed, jobs))) <= _COMPOSE_AT_MOST:
        return jobs
    first: dict[tuple[str, ...], list[str]] = {}
    for job in jobs:
        first.setdefault(tuple(word for word in job if word.startswith(("algo=", "env="))), job)
    num_pairs = len(first)
    for values in sorted((dict.fromkeys(column) for column in zip(*jobs, strict=True)), key=len):
        for value in values:
            first.setdefault((value,), next(job for job in jobs if value in job))
    chosen = list({tuple(job): job for job in first.values()}.values())
    return chosen[: max(num_pairs, _COMPOSE_AT_MOST)]


def _but_seed(job: Sequence[str]) -> tuple[str, ...]:
    return tuple(word for word in job if not _SEED.fullmatch(word))


def _compose(jobs: Sequence[Sequence[str]]) -> list[Config]:
    """The configuration of each job. Of jobs that differ in their seed alone two are composed.

    If these two differ in the seed alone, no other value is computed from it.
    """
    composed: dict[tuple[str, ...], list[Config]] = {}
    configs = []
    for job in jobs:
        first = composed.setdefault(_but_seed(job), [])
        seed = next((int(word.partition("=")[2]) for word in job if _SEED.fullmatch(word)), None)
        if seed is not None and len(first) >= 2 and replace(first[0], seed=first[1].seed) == first[1]:
            configs.append(replace(first[0], seed=seed))
            continue
        configs.append(compose_config(job, sweep=True))
        first.append(configs[-1])
    return configs


def _check_sweep(configs: Sequence[Config]) -> None:
    shared = next((config.run_dir for config in configs if config.run_dir is not None), None)
    if shared is not None:
        raise ConfigError(
            f"run_dir={shared}: all jobs of a sweep would share this folder; use runs_dir, or leave it out"
        )
    if len({config.runs_dir for config in configs}) > 1:
        raise ConfigError("runs_dir: all jobs of a sweep have one runs_dir")
    check_folder(configs[0])


def job_context() -> tuple[dict[str, Any], list[str], int | None, bool]:
    """Facts of the job that Hydra runs: choices by group, overrides, number in the sweep, own console."""
    hydra = HydraConfig.get()
    number = None if hydra.mode is None or hydra.mode.name != "MULTIRUN" else int(hydra.job.num)
    console = str(hydra.launcher["_target_"]).endswith("BasicLauncher")
    return dict(hydra.runtime.choices), list(hydra.overrides.task), number, console
