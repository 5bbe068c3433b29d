"""The arguments of the command, checked before anything is created and before torch is imported.

Hydra's own answers to mistakes are long, and one of its hints (`+key`) adds a key that nothing reads. So
groups and names are compared with the existing ones, and every configuration of the command is composed
once. Hydra then receives only overrides that are known to work.
"""

from __future__ import annotations

import itertools
import math
import re
import socket
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override, Transformer
from omegaconf import DictConfig, OmegaConf

from runlab import INSTALLED, PROJECT
from runlab.config.affects_results import BOOKKEEPING_KEYS
from runlab.config.auto import about_auto
from runlab.config.cli.composition import Composed, compose_job, compose_values
from runlab.config.cli.files import check_files, read_sweep
from runlab.config.cli.flags import check_flags
from runlab.config.cli.overrides import JOBS_AT_MOST, SEARCHPATH, assigned, read_overrides, sweep_values
from runlab.config.command_args import argument, converted, existing, folder, new_folder, one_of, parse, rest
from runlab.config.loading import CONF, in_one_line
from runlab.config.project import as_typed, require
from runlab.config.schema import Config, register_schemas
from runlab.config.secrets import refuse_secret_words
from runlab.config.texts import readable
from runlab.errors import ConfigError, in_a_line
from runlab.machine import usable_cores

_RESUME = "resume"
_SEED = re.compile(r"seed=[0-9]{1,18}")
_SOON = 50  # configurations that are checked without a word
_N_JOBS = "hydra.launcher.n_jobs"
_CONNECT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The meaning of a command: the arguments for Hydra, and its configurations."""

    argv: list[str]
    shown: bool  # instead of run
    sweep: bool
    num_jobs: int
    seeds: list[int]  # of the jobs, as typed
    configs: list[Config]  # of jobs that differ only in their seed, one
    overrides: list[list[str]]  # of each configuration
    words: list[str]  # identify a sweep, whatever its folder and launcher
    resume: bool  # the newest sweep with these arguments goes on
    accept: bool  # it may go on with changed code and libraries
    jobs: int  # at the same time
    auto: list[str]  # lines about values that were `auto`
    auto_keys: set[str]  # of the first configuration


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Arguments of `make train`: overrides and flags, sweep files and resume, another folder like conf/.

    `--cfg job` is Hydra's: print the configuration and run nothing.
    """

    sweep: str = argument(default="")
    accept: str | None = argument(one_of("changes"), None)
    config_dir: Path | None = argument(existing, None, key="--config-dir")
    cfg: str | None = argument(one_of("job"), None, key="--cfg")
    others: list[str] = rest(options=True)


def preflight(argv: Sequence[str], jobs: int = 1) -> Plan:
    """Check the arguments of the command (without the program's name) and return the plan.

    `jobs` such runs share this machine; for a sweep the number of its own jobs counts instead.
    Raises `ConfigError` with one or two lines for the first mistake. Creates nothing.
    """
    try:
        for word in argv:
            if not word.isascii() and word.encode(errors="replace").decode() != word:
                raise ConfigError(f"{word}: is not text in UTF-8")
        refuse_secret_words(argv)
        return _plan(argv, jobs)
    except ConfigError as error:
        raise ConfigError(readable(str(error))) from error


def _plan(argv: Sequence[str], beside: int) -> Plan:
    register_schemas()
    check_files()
    again = f"sweep={_RESUME}"  # may be added to a command that names a file of conf/sweep/
    arguments = parse([text for text in argv if text != again], Arguments)
    more = more_folders(arguments.config_dir)
    others = [re.sub(r"^~([^=]+)$", r"\1=null", text) for text in arguments.others]
    typed = [text for text in others if "=" in text and not text.startswith("-")]
    flags = [text for text in others if text not in typed]
    check_flags(flags, others)
    chosen = [name for name in arguments.sweep.split(",") if name]
    resume = again in argv or _RESUME in chosen
    if arguments.accept and not resume:
        raise ConfigError(f"accept=changes: goes with sweep=resume, or with {as_typed('resume')} run=RUN")
    with initialize_config_dir(str(CONF), version_base="1.3"):
        files = [name for name in chosen if name != _RESUME]
        in_files = [each for name in files for each in _words_of(name, more, typed)]
        try:
            overrides = read_overrides([*in_files, *typed], GlobalHydra.instance().config_loader(), more)
        except ConfigError as error:
            in_file = any(str(error).startswith(f"{word}: ") for word in in_files)
            raise ConfigError(f"{error}{f' (in sweep={arguments.sweep})' * in_file}") from error
        plain = [str(override.input_line) for override in overrides]
        sweep = bool(flags) or any(override.is_sweep_override() for override in overrides)
        if sweep and arguments.cfg is not None:
            raise ConfigError("--cfg job: shows one configuration; leave out lists of values")
        if resume and not sweep:
            raise ConfigError(f"sweep=resume: this is a single run; use {as_typed('resume')} run=RUN")
        jobs, argv = [plain], plain
        if sweep:
            jobs = _jobs(overrides)
            beside, launcher = _beside(compose_values(jobs[0]), len(jobs))
            argv = [text for text in plain if not text.lstrip("+").startswith(_N_JOBS)]
            argv += [*launcher, "--multirun"]
        seeds = [word.removeprefix("seed=") for job in jobs for word in job if _SEED.fullmatch(word)]
        distinct: dict[tuple[str, ...], list[str]] = {}
        for each in jobs:
            distinct.setdefault(tuple(text for text in each if not _SEED.fullmatch(text)), each)
        announce(len(distinct))
        checked = [_compose_one(each, beside, sweep) for each in distinct.values()]
        configs, own_words = [each.config for each in checked], [*map(_of_the_run, distinct.values())]
        folders = {config.runs_dir for config in configs}
        if sweep and (len(folders) > 1 or any(config.run_dir for config in configs)):
            raise ConfigError("run_dir is the folder of a single run; all jobs of a sweep have one runs_dir")
        if (run_dir := configs[0].run_dir) is not None:
            converted("run_dir", run_dir, new_folder)
        else:
            converted("runs_dir", configs[0].runs_dir, folder)
        return Plan(
            argv=argv,
            shown=arguments.cfg is not None,
            sweep=sweep,
            num_jobs=len(jobs),
            seeds=[*map(int, dict.fromkeys(seeds))],
            configs=configs,
            overrides=own_words,
            words=_words_of_sweep(plain),
            resume=resume,
            accept=arguments.accept is not None,
            jobs=beside,
            auto=_about_auto(checked, own_words),
            auto_keys=checked[0].auto,
        )


def more_folders(given: Path | None) -> list[Path]:
    """Folders like conf/: the one given, or where the package is installed, that of the working folder."""
    beside = PROJECT / "conf"
    return [given] if given is not None else [beside] * (INSTALLED and beside.is_dir())


def announce(number: int) -> None:
    """Say that many configurations are checked, each of which takes a tenth of a second."""
    if number > _SOON:
        to_say = f"{number:,} configurations are checked first, which takes about {number // 10:,} s"
        print(to_say, file=sys.stderr)


def _words_of(name: str, more: Sequence[Path], typed: Sequence[str]) -> list[str]:
    """The arguments in a file of conf/sweep/, except for keys that are typed as well."""
    values = read_sweep(name, more, [_RESUME])
    if any(isinstance(value, dict) for value in values.values()):
        raise ConfigError(f"sweep={name}: has values to draw from; use {as_typed('search')} sweep={name}")
    keys = {text.partition("=")[0] for text in typed}
    return [assigned(key, value) for key, value in values.items() if key not in keys]


def _about_auto(composed: Sequence[Composed], jobs: Iterable[Sequence[str]]) -> list[str]:
    """Lines about values that were `auto`, with the first job of each if they differ."""
    lines: dict[str, Sequence[str]] = {}
    for each, job in zip(composed, jobs, strict=True):
        lines.setdefault(about_auto(each.config, each.auto), job)
    several = len(lines) > 1
    return [line + f", as in {' '.join(job)}" * several for line, job in lines.items() if line]


def _words_of_sweep(plain: Sequence[str]) -> list[str]:
    """Overrides that identify a sweep: all but the folder, purpose and launcher of its runs."""
    other = (*BOOKKEEPING_KEYS, "hydra/launcher", SEARCHPATH)
    keyed = [(text.lstrip("+").partition("=")[0], text) for text in plain]
    return [text for key, text in keyed if key not in other and not key.startswith("hydra.launcher.")]


def _jobs(overrides: Sequence[Override]) -> list[list[str]]:
    """The overrides of every job."""
    values = [_values(each) for each in overrides]
    if math.prod(map(len, values)) > JOBS_AT_MOST:
        raise ConfigError(f"these lists of values make a sweep of more than {JOBS_AT_MOST:,} jobs")
    return [list(job) for job in itertools.product(*values)]


def _beside(composed: DictConfig, num_jobs: int) -> tuple[int, list[str]]:
    """The number of jobs that run at once on this machine, and the words for the launcher.

    Ray starts as many as there are cores for, counted as if its nodes were like this machine. Launchers other
    than these two decide themselves: 1. Only joblib's gets an override.
    """
    with in_one_line():
        launcher = str(OmegaConf.select(composed, "hydra.launcher._target_"))
        if launcher.endswith("RayLauncher"):
            _check_ray(composed.hydra.launcher)
            taken = math.ceil(composed.hydra.launcher.num_cpus or cores_of(composed))
            return max(1, min(usable_cores() // taken, num_jobs)), []
        if not launcher.endswith("JoblibLauncher"):
            return 1, []
        at_once, most = composed.hydra.launcher.n_jobs, usable_cores() // cores_of(composed)
    beside = max(1, min(at_once if at_once > 0 else most, num_jobs))
    return beside, [f"{_N_JOBS}={beside}"]


def cores_of(composed: DictConfig | Config) -> int:
    """The cores that a run uses. Values `auto` count as the least: they share what is left."""
    # Wrong values are refused later.
    threads = composed.num_threads if isinstance(composed.num_threads, int) else 1
    workers = composed.env.num_workers if isinstance(composed.env.num_workers, int) else 0
    return max(1, threads + workers)


def _check_ray(launcher: DictConfig) -> None:
    """Raise `ConfigError` for numbers that Ray refuses, and if it is not there: it would try for ever."""
    require("ray", "ray", "hydra/launcher=ray")
    for key, least in {"num_cpus": 0, "num_gpus": 0, "max_retries": -1}.items():
        value = launcher[key]
        if value is not None and (not least <= value < 2**31 or (value > 1 and value % 1)):
            wanted = f"a number from {least}, whole if above 1"
            raise ConfigError(f"hydra.launcher.{key}={value:g}: expected {wanted}")
    address = launcher.address
    if address in ("local", "auto"):
        return
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal() and int(port) < 2**16):
        raise ConfigError(f"hydra.launcher.address={address}: expected local, auto or HOST:PORT")
    with in_a_line(f"hydra.launcher.address={address}: no head of Ray answers"):
        socket.create_connection((host, int(port)), _CONNECT_S).close()


def _values(override: Override) -> list[str]:
    """`key=value` for each value of an override, as Hydra writes it."""
    key = override.get_key_element()
    if not override.is_sweep_override():
        return [f"{key}={override.get_value_element_as_str()}"]
    return [f"{key}={Transformer.str(value)}" for value in sweep_values(override)]


def _compose_one(job: Sequence[str], beside: int, sweep: bool) -> Composed:
    try:
        return compose_job(job, beside)
    except ConfigError as error:
        where = f" (in the job {' '.join(_of_the_run(job))})" if sweep else ""
        raise ConfigError(f"{error}{where}") from error


def _of_the_run(job: Sequence[str]) -> list[str]:
    """The arguments of a job, except for Hydra's own settings."""
    return [text for text in job if not text.lstrip("+").startswith("hydra")]
