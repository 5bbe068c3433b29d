"""The words of the command, checked before anything is created and before torch is imported.

Hydra's own answers to mistakes are long, and one of its hints (`+key`) adds a key that nothing reads. So
groups and names are compared with what exists, and every configuration that the command stands for is
composed once. What Hydra receives afterwards cannot fail.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, NoReturn

from hydra import initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.plugins.sweeper import Sweeper

from rltemplate.config.cli.composition import compose_job, compose_with_hydra
from rltemplate.config.cli.overrides import read_overrides
from rltemplate.config.command_args import one_of, parse, readable, rest, word
from rltemplate.config.loading import CONF
from rltemplate.config.schema import Config, register_schemas
from rltemplate.config.secrets import refuse_secret_words
from rltemplate.config.validation import check_folder
from rltemplate.types import BOOKKEEPING_KEYS, ConfigError

# Jobs composed in advance, at a tenth of a second each; jobs that differ in their seed alone count once.
_COMPOSE_AT_MOST = 100
_SEED = re.compile(r"seed=[0-9]{1,18}")
_STRIDE = 104_729  # a prime above _JOBS_AT_MOST, so that it divides no number of jobs
_JOBS_AT_MOST = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The meaning of a command: the words for Hydra, and the configurations that it stands for."""

    argv: list[str]
    sweep: bool = False
    num_jobs: int | None = None  # None: the sweeper decides while it runs
    configs: list[Config] = field(default_factory=list)  # none if nothing is going to run (--help, --cfg)
    overrides: list[list[str]] = field(default_factory=list)  # of each configuration
    choices: dict[str, Any] = field(default_factory=dict)  # of a single run, by group
    words: list[str] = field(default_factory=list)  # which sweep it is, wherever and however it runs
    resume: str | None = None  # the sweep that goes on, as the user named it
    accept: bool = False  # it may go on with changed code and libraries


@dataclass(frozen=True, kw_only=True)
class Words:
    """Words of `make train`: overrides, and how a sweep is carried out."""

    sweep: str | None = word(default=None)
    accept: str | None = word(one_of("changes"), None)
    overrides: list[str] = rest(options=True)


def preflight(argv: Sequence[str]) -> Plan:
    """Check the words of the command (without the program's name); the plan for what is to be done.

    Raises `ConfigError` with one or two lines for the first mistake. Creates nothing.
    """
    try:
        refuse_secret_words(argv)
        return _plan(argv)
    except ConfigError as error:
        raise ConfigError(readable(str(error), argv)) from error


def _plan(argv: Sequence[str]) -> Plan:
    register_schemas()
    options = _options(argv)
    if options.shell_completion:
        return Plan(argv=list(argv))
    flags = list(argv)
    for override in options.overrides:
        flags.remove(override)
    words = parse(options.overrides, Words)
    if words.accept and words.sweep is None:
        raise ConfigError("accept=changes: goes with sweep=resume, or with make resume run=RUN")
    with initialize_config_dir(str(CONF), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        overrides = read_overrides(words.overrides, loader)
        sweep = options.multirun or any(override.is_sweep_override() for override in overrides)
        plain = [str(override.input_line) for override in overrides]
        shows = options.cfg or options.info or options.help or options.hydra_help
        if sweep and shows:
            raise ConfigError("--cfg and --info show one configuration: leave out lists of values")
        if not sweep:
            if words.sweep:
                raise ConfigError(
                    f"sweep={words.sweep}: this is a single run; make resume run=RUN goes on with one"
                )
            job = compose_job(plain)
            if shows:
                return Plan(argv=[*plain, *flags])
            check_folder(job.config)
            configs, jobs = [job.config], [job.overrides]
            return Plan(argv=plain, num_jobs=1, configs=configs, overrides=jobs, choices=job.choices)
        jobs, exact = _jobs(overrides, loader)
        chosen = _sample(jobs)
        configs = _compose(chosen)
        if exact and len(chosen) == len(jobs):
            # All jobs are known to be good; Hydra would be silent for a tenth of a second for each.
            Sweeper.validate_batch_is_legal = lambda *_: None  # type: ignore[method-assign]
        if len({config.runs_dir for config in configs}) > 1 or any(config.run_dir for config in configs):
            raise ConfigError("run_dir is the folder of a single run; all jobs of a sweep have one runs_dir")
        check_folder(configs[0])
        return Plan(
            argv=[*plain, *flags, *([] if options.multirun else ["--multirun"])],
            sweep=True,
            num_jobs=len(jobs) if exact else None,
            configs=configs,
            overrides=chosen,
            words=_words_of_sweep(plain),
            resume=words.sweep,
            accept=words.accept is not None,
        )


def _options(argv: Sequence[str]) -> argparse.Namespace:
    """Hydra's options, with the overrides under `overrides`."""

    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"{message}; values are written without dashes, as seed=3")

    for text in argv:
        if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
            raise ConfigError(f"{text}: is no text, for its bytes are not UTF-8")
    parser = get_args_parser()
    parser.error = refuse  # type: ignore[method-assign]
    options = parser.parse_intermixed_args(list(argv))
    for name in ("config_path", "config_name", "config_dir", "experimental_rerun"):
        if getattr(options, name) is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} is not supported: configuration is read from conf/"
            )
    return options


def _words_of_sweep(plain: Sequence[str]) -> list[str]:
    """Overrides that say which sweep it is, without place, purpose and launcher of its runs."""
    other = (*BOOKKEEPING_KEYS, "hydra/launcher")
    keyed = [(text.lstrip("+").partition("=")[0], text) for text in plain]
    return [text for key, text in keyed if key not in other and not key.startswith("hydra.launcher.")]


def _jobs(overrides: Sequence[Override], loader: ConfigLoader) -> tuple[list[list[str]], bool]:
    """The overrides of every job, and true if these are all of them (another sweeper draws its own)."""
    single = [str(each.input_line) for each in overrides if not each.is_sweep_override()]
    sweeper = compose_with_hydra(single).hydra.sweeper
    if not str(sweeper["_target_"]).endswith("BasicSweeper"):
        return [single], False
    params = read_overrides([f"{key}={value}" for key, value in (sweeper.params or {}).items()], loader)
    number = 1
    for each in (*params, *overrides):
        if each.is_sweep_override():
            number *= _num_values(each)
        if number > _JOBS_AT_MOST:
            raise ConfigError(f"{each.input_line}: would make a sweep of more than {_JOBS_AT_MOST:,} jobs")
    return BasicSweeper.split_arguments([*params, *overrides], None)[0], True


def _num_values(override: Override) -> int:
    """The number of values of a list, counted up to the limit."""
    number = 0
    with suppress(HydraException, ValueError):  # of interval() and glob(), and of a step of 0
        number = sum(1 for _ in islice(override.sweep_string_iterator(), _JOBS_AT_MOST + 1))
    if not number:
        raise ConfigError(
            f"{override.input_line}: is no list of values; seed=1,2 is one, and choice(1,2) and range(1,3)"
        )
    return number


def _sample(jobs: list[list[str]]) -> list[list[str]]:
    """All jobs, or some of too many. The stride meets every value of short lists."""
    if len({_but_seed(job) for job in jobs}) <= _COMPOSE_AT_MOST:
        return jobs
    distinct = list({_but_seed(job): job for job in jobs}.values())
    return [distinct[i * _STRIDE % len(distinct)] for i in range(_COMPOSE_AT_MOST)]


def _but_seed(job: Sequence[str]) -> tuple[str, ...]:
    return tuple(text for text in job if not _SEED.fullmatch(text))


def _compose(jobs: Sequence[list[str]]) -> list[Config]:
    """The configuration of each job. Of jobs that differ in their seed alone one is composed."""
    composed: dict[tuple[str, ...], Config] = {}
    configs = []
    for job in jobs:
        key = _but_seed(job)
        seed = next((int(text.partition("=")[2]) for text in job if _SEED.fullmatch(text)), None)
        if key not in composed or any("$" in text for text in job):  # as in logger.wandb.group=of-${seed}
            composed[key] = compose_job(job, sweep=True).config
        configs.append(composed[key] if seed is None else replace(composed[key], seed=seed))
    return configs


def job_context() -> tuple[dict[str, Any], list[str], int, bool]:
    """Facts of the job that Hydra runs: choices by group, overrides, number in the sweep, own console."""
    hydra = HydraConfig.get()
    console = str(hydra.launcher["_target_"]).endswith("BasicLauncher")
    return dict(hydra.runtime.choices), list(hydra.overrides.task), int(hydra.job.num), console
