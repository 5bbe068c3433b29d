"""What the user typed, checked before anything is created and before torch is imported.

Hydra's own answers to mistakes are long, and one of its hints (`+key`) adds a key that nothing reads. So
every word is looked at here first: keys, groups, names and values are compared with what exists, and every
configuration that the command stands for is composed once. What Hydra receives afterwards cannot fail.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType, QuotedString, ValueType
from hydra.errors import ConfigCompositionException, HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from rltemplate import config as schemas
from rltemplate import launch
from rltemplate.algos import ALGORITHMS
from rltemplate.config import Config, choose, to_config
from rltemplate.types import ConfigError

CONF = Path(__file__).resolve().parents[1] / "conf"

# Groups of which none may be chosen, and the name that choice has where a name is needed.
_OPTIONAL = ("experiment", "debug", "local")
_NONE = "none"
# Chosen through their group, because recipe, folder name and further values go with the choice.
_IDENTITY = {"env.id": "env", "algo.name": "algo", "determinism.level": "determinism"}
_HYDRA_GROUPS = ("hydra/launcher", "hydra/sweeper")
_REFUSED_FLAGS = ("config_path", "config_name", "config_dir", "experimental_rerun")
# Packages that register a namespace of their own, for whoever has not installed them yet.
_NAMESPACES = {"ALE": "ale-py", "dm_control": "shimmy[dm-control]", "mo-gymnasium": "mo-gymnasium"}
# Jobs composed in advance, at some hundredths of a second each; what is wrong with others shows later.
_COMPOSE_AT_MOST = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the command means: the words for Hydra, and the configurations that were seen to be good."""

    argv: list[str]
    sweep: bool
    num_jobs: int | None  # None: the sweeper decides while it runs
    configs: list[Config]  # empty where nothing is going to run (--help, --cfg, ...)


def preflight(argv: Sequence[str]) -> Plan:
    """Check what the user typed (without the program's name) and say what is to be done.

    Raises `ConfigError` with one or two lines for the first mistake. Creates nothing.
    """
    words, flags, arguments = _split(argv)
    schemas.register_schemas()
    for group in _OPTIONAL:
        ConfigStore.instance().store(group=group, name=_NONE, node={}, package="_global_")
    with initialize_config_dir(str(CONF), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        overrides = [_parse(word, loader) for word in words]
        overrides = _check_groups(overrides, loader)
        _check_keys(overrides)
        sweep = arguments.multirun or any(override.is_sweep_override() for override in overrides)
        plain = [str(override.input_line) for override in overrides]
        if arguments.cfg or arguments.info:
            if sweep:
                raise ConfigError("--cfg and --info show one configuration: leave out lists of values")
            _compose(plain, overrides)
            return Plan(argv=[*plain, *flags], sweep=False, num_jobs=None, configs=[])
        if arguments.help or arguments.hydra_help or arguments.shell_completion:
            return Plan(argv=[*plain, *flags], sweep=False, num_jobs=None, configs=[])
        if not sweep:
            config = _compose(plain, overrides)
            launch.check_folder(config)
            return Plan(argv=[*plain, *flags], sweep=False, num_jobs=1, configs=[config])
        jobs, exact = _jobs(overrides, plain, loader)
        configs = [_compose(job, overrides, sweep=True) for job in _sample(jobs)]
        _check_sweep(configs)
        if not arguments.multirun:
            flags = [*flags, "--multirun"]
        return Plan(argv=[*plain, *flags], sweep=True, num_jobs=len(jobs) if exact else None, configs=configs)


def typed(composed: DictConfig, choices: Mapping[str, Any]) -> Config:
    """The typed configuration of one job; `choices` are Hydra's, which know whether a recipe was applied."""
    try:
        recipe = choices.get("experiment")
        applied = recipe is not None and (CONF / "experiment" / f"{recipe}.yaml").is_file()
        composed.experiment = recipe if applied else None
        OmegaConf.resolve(composed)
    except OmegaConfBaseException as error:
        raise ConfigError(_first_line(error)) from error
    return to_config(composed)


# ------------------------------------------------------------------------------------------------ words


def _split(argv: Sequence[str]) -> tuple[list[str], list[str], argparse.Namespace]:
    """Overrides, flags (with their values) and the flags as Hydra will read them."""
    parser = get_args_parser()
    parser.error = _refuse_flag  # type: ignore[method-assign]
    arguments = parser.parse_intermixed_args(list(argv))
    for name in _REFUSED_FLAGS:
        if getattr(arguments, name) is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} is not supported: configuration is read from conf/"
            )
    if arguments.run and arguments.multirun:
        raise ConfigError("--run and --multirun exclude each other")
    commands = [name for name in ("cfg", "info", "shell_completion") if getattr(arguments, name)]
    if len(commands) + (arguments.run or arguments.multirun) > 1:
        raise ConfigError("only one of --run, --multirun, --cfg, --info and --shell-completion can be given")
    if arguments.resolve and not arguments.cfg and not arguments.help:
        raise ConfigError("--resolve goes with --cfg")
    words = list(arguments.overrides)
    flags = list(argv)
    for word in words:
        flags.remove(word)
    return words, flags, arguments


def _refuse_flag(message: str) -> Any:
    unknown = re.match(r"unrecognized arguments: (-+)([A-Za-z_.]+)([ =].*)?$", message)
    if unknown:
        dashes, name, rest = unknown.groups()
        value = (rest or " ...")[1:].split()
        example = f"{_nearest(name, _keys(ALGORITHMS)) or name}={value[0] if value else '...'}"
        raise ConfigError(f"{dashes}{name}: no such option; values are written without dashes, as {example}")
    raise ConfigError(message)


def _parse(word: str, loader: ConfigLoader) -> Override:
    key, equals, value = word.partition("=")
    if not equals and not word.startswith("~"):
        raise ConfigError(_leftover(word))
    if not key.strip("+~ "):
        raise ConfigError(f"{word}: a key is missing before '='")
    if key != key.strip() or value != value.strip():
        raise ConfigError(f"{word!r}: leave no spaces around '=', write {key.strip()}={value.strip()}")
    try:
        override: Override = OverridesParser.create(config_loader=loader).parse_overrides([word])[0]
    except HydraException as error:
        raise ConfigError(f"{word}: {_unreadable(key, value, error)}") from error
    if override.package is not None:
        raise ConfigError(f"{word}: '@' in a key is not supported; write {override.key_or_group}={value}")
    return override


def _leftover(word: str) -> str:
    for group in _groups():
        for option in _options(group):
            if word.lower() == option.lower():
                return f"{word}: expected key=value; did you mean {group}={option}?"
    near = _nearest(word, [*_keys(ALGORITHMS), *_groups()])
    return f"{word}: expected key=value" + (f"; did you mean {near}=...?" if near else "")


def _unreadable(key: str, value: str, error: HydraException) -> str:
    for opening, closing in ("[]", "{}", "()"):
        if value.count(opening) != value.count(closing):
            wrong = opening if value.count(opening) > value.count(closing) else closing
            return f"'{wrong}' has no partner; brackets come in pairs, as in {key}=[64,64]"
    expected = _expected(key.lstrip("+"), value, [])
    if expected and "a text" not in expected:
        return expected
    quoted = '{}="{}"'.format(key, value.replace("\\", "\\\\").replace('"', '\\"'))
    with suppress(HydraException):
        OverridesParser.create().parse_override(quoted)
        return f"quotes, brackets and commas inside a text need quoting; write {shlex.quote(quoted)}"
    return f"cannot be read as key=value ({str(error).splitlines()[0]})"


# ----------------------------------------------------------------------------------------------- groups


def _groups() -> list[str]:
    return sorted(path.name for path in CONF.iterdir() if path.is_dir() and path.name != "hydra")


def _options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml") if not path.name.startswith("_"))


def _check_groups(overrides: Sequence[Override], loader: ConfigLoader) -> list[Override]:
    """Refuse what the groups do not have; bring names into the form in which Hydra finds them."""
    groups, seen, checked = _groups(), set[str](), []
    for override in overrides:
        key, line = override.key_or_group, str(override.input_line)
        if key in seen:
            raise ConfigError(f"{line}: {key} is given twice")
        seen.add(key)
        _check_sign(override, groups)
        if key in groups:
            names = [_option(key, value) for value in _values(override, loader)]
            line = f"{key}={','.join(names)}"
            checked.append(_parse(line, loader))
        elif key in _HYDRA_GROUPS:
            allowed = loader.get_group_options(key, results_filter=ObjectType.CONFIG)
            for value in _values(override, loader):
                if value not in allowed:
                    raise ConfigError(f"{line}: not installed; {choose(str(value), allowed)}")
            if override.is_sweep_override():
                raise ConfigError(f"{line}: a sweep has one {key.partition('/')[2]}")
            checked.append(override)
        else:
            checked.append(override)
    return checked


def _check_sign(override: Override, groups: Sequence[str]) -> None:
    """`+` and `~` only where they do what one would think: for the arguments of the environment."""
    if override.type == OverrideType.CHANGE or override.key_or_group.startswith("env.kwargs."):
        return
    key, line = override.key_or_group, str(override.input_line)
    if override.type == OverrideType.DEL:
        instead = f"write {key}=null" if key in _OPTIONAL else "set another value instead"
        raise ConfigError(f"{line}: nothing can be removed; {instead}")
    if key in groups or key in _keys(ALGORITHMS):
        raise ConfigError(f"{line}: exists already; write it without '+', as {line.lstrip('+')}")
    raise ConfigError(f"{line}: keys can be added to env.kwargs only; {_unknown_key(key, _keys(ALGORITHMS))}")


def _values(override: Override, loader: ConfigLoader) -> list[Any]:
    """The values that the override stands for, one unless it is a sweep."""
    if not override.is_sweep_override():
        return [override.value()]
    if not override.is_discrete_sweep():
        raise ConfigError(f"{override.input_line}: a name is needed, or several separated by commas")
    if override.value_type == ValueType.GLOB_CHOICE_SWEEP:
        found = [str(name) for name in override.sweep_string_iterator() if not str(name).startswith("_")]
        if not found:
            group = override.key_or_group
            raise ConfigError(
                f"{override.input_line}: matches nothing; allowed: {', '.join(_options(group))}"
            )
        return found
    return [value.text if isinstance(value, QuotedString) else value for value in override.sweep_iterator()]


def _option(group: str, value: Any) -> str:
    """The name under which Hydra finds what the user calls `value`."""
    if value is None and group in _OPTIONAL:
        return _NONE
    allowed = _options(group)
    if isinstance(value, str) and (value in allowed or (value == _NONE and group in _OPTIONAL)):
        return value
    if group == "env" and isinstance(value, str) and value:
        return _environment(value, allowed)
    shown = "null" if value is None else value
    more = [*allowed, _NONE] if group in _OPTIONAL else allowed
    what = f"allowed: {', '.join(more)}" if value is None else choose(str(shown), more)
    raise ConfigError(f"{group}={shown}: conf/{group}/ has no such file; {what}")


def _environment(name: str, files: Sequence[str]) -> str:
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


def _check_registered(name: str, files: Sequence[str]) -> None:
    import gymnasium

    module, _, env_id = name.rpartition(":")
    if module:
        try:
            importlib.import_module(module)
        except Exception as error:  # whatever a module of the user's raises is the user's to read
            package = _NAMESPACES.get(env_id.rpartition("/")[0])
            remedy = f"; pip install {package}" if package else ""
            raise ConfigError(f"env={name}: cannot import {module} ({_reason(error)}){remedy}") from error
    spec = gymnasium.registry.get(env_id)
    if spec is None:
        known = {known_id.rpartition("/")[0] for known_id in gymnasium.registry}
        namespace = env_id.rpartition("/")[0]
        if namespace not in known:
            package = _NAMESPACES.get(namespace)
            remedy = (
                f"pip install {package}" if package else f"install the package that registers {namespace}/"
            )
            raise ConfigError(
                f"env={name}: no installed package provides {namespace}/ environments; {remedy}"
            )
        folded = {each.lower(): each for each in [*gymnasium.registry, *files]}
        near = difflib.get_close_matches(env_id.lower(), list(folded), n=1, cutoff=0.5)
        hint = f"; did you mean {folded[near[0]]}?" if near else ""
        raise ConfigError(
            f"env={name}: no such environment{hint}\n"
            f"allowed: any id registered in Gymnasium, or {', '.join(files)}"
        )
    if isinstance(spec.entry_point, str):
        try:
            importlib.import_module(spec.entry_point.partition(":")[0])
        except (ImportError, gymnasium.error.Error) as error:
            raise ConfigError(
                f"env={name}: is registered, but what it needs is not installed ({_reason(error)})"
            ) from error


def _reason(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__


# ------------------------------------------------------------------------------------------------- keys


def _keys(algorithms: Iterable[str]) -> list[str]:
    """Every dotted key that a configuration with one of these algorithms has."""
    keys: dict[str, None] = {}
    for name in algorithms:
        keys.update(dict.fromkeys(_walk(Config, "", name)))
    return list(keys)


def _walk(node: Any, prefix: str, algorithm: str) -> Iterator[str]:
    for name, hint in _hints(node, algorithm).items():
        yield prefix + name
        if is_dataclass(hint):
            yield from _walk(hint, f"{prefix}{name}.", algorithm)


def _hints(node: Any, algorithm: str) -> dict[str, Any]:
    hints = get_type_hints(node)
    if node is Config:
        hints["algo"] = ALGORITHMS[algorithm].config
    return {spec.name: hints[spec.name] for spec in fields(node)}


def _check_keys(overrides: Sequence[Override]) -> None:
    groups = [*_groups(), *_HYDRA_GROUPS]
    algorithms = _algorithms(overrides)
    for override in overrides:
        key, line = override.key_or_group, str(override.input_line)
        if key in groups or key.startswith(("hydra.launcher.", "hydra.sweeper.")):
            continue
        if key == "hydra" or key.startswith(("hydra.", "hydra/")):
            raise ConfigError(
                f"{line}: of Hydra's own settings only hydra/launcher, hydra/sweeper and the keys below "
                "hydra.launcher and hydra.sweeper can be set; folders are chosen with runs_dir and run_dir"
            )
        if key in _IDENTITY:
            group = _IDENTITY[key]
            raise ConfigError(
                f"{line}: goes with other values; choose it with {group}=, as in {_example(group)}"
            )
        if key.startswith("env.kwargs."):
            if override.type == OverrideType.CHANGE and not _has_kwarg(key, overrides):
                raise ConfigError(f"{line}: adds an argument; arguments are added with '+', as +{line}")
            continue
        value = None if override.is_sweep_override() else override.value()
        if key == "env.kwargs" and isinstance(value, dict):
            added = " ".join(f"+env.kwargs.{name}={each}" for name, each in value.items())
            raise ConfigError(
                f"{line}: arguments are added one by one, as {added or '+env.kwargs.name=value'}"
            )
        for algorithm in algorithms:
            if key not in _keys([algorithm]):
                raise ConfigError(f"{line}: {_unknown_key(key, _keys([algorithm]), algorithm)}")
        if override.is_sweep_override() and key in ("runs_dir", "run_dir"):
            raise ConfigError(f"{line}: all jobs of a sweep have one {key}")


def _has_kwarg(key: str, overrides: Sequence[Override]) -> bool:
    """Whether every chosen environment passes this argument already, so that it can be changed."""
    chosen = [str(o.input_line) for o in overrides if o.key_or_group == "env"]
    names = chosen[0].partition("=")[2].split(",") if chosen else [_default("env")]
    composed = [_with_hydra([f"env={name}"]) for name in names]
    return all(OmegaConf.select(each, key, default=None) is not None for each in composed)


def _example(group: str) -> str:
    return {"env": "env=Hopper-v5", "algo": "algo=sac", "determinism": "determinism=fast"}[group]


def _algorithms(overrides: Sequence[Override]) -> list[str]:
    for override in overrides:
        if override.key_or_group == "algo":
            line = str(override.input_line)
            return line.partition("=")[2].split(",")
    return [_default("algo")]


def _default(group: str) -> str:
    """What conf/config.yaml chooses where the user does not."""
    defaults = yaml.safe_load((CONF / "config.yaml").read_text(encoding="utf-8"))["defaults"]
    return next(str(entry[group]) for entry in defaults if isinstance(entry, dict) and group in entry)


def _unknown_key(key: str, known: Sequence[str], algorithm: str | None = None) -> str:
    """What to say about a key that nothing has: the nearest that exists, and what stands beside it."""
    owners = [name for name in ALGORITHMS if key in _keys([name])]
    if owners and algorithm is not None:
        own = [k.partition(".")[2] for k in known if k.startswith("algo.")]
        return f"algo={algorithm} has no such key, algo={owners[0]} has\nallowed in algo: {', '.join(own)}"
    candidates = [*known, *_groups(), *_HYDRA_GROUPS]
    near = _nearest(key, candidates) or _nearest(key, _keys(ALGORITHMS))
    hint = f"; did you mean {near}?" if near else ""
    parent = key.rpartition(".")[0]
    if parent and parent not in known:
        parent = ""
    prefix = f"{parent}." if parent else ""
    beside = [k[len(prefix) :] for k in known if k.startswith(prefix) and "." not in k[len(prefix) :]]
    if not parent:
        beside = list(dict.fromkeys([*_groups(), *beside]))
    return f"no such key{hint}\nallowed{f' in {parent}' if parent else ''}: {', '.join(beside)}"


def _nearest(wrong: str, known: Iterable[str]) -> str | None:
    """The known key that was probably meant: the same last part, its initials, or similar letters."""
    wrong = wrong.lower().replace("-", "_")
    parent, leaf = _split_key(wrong)

    def likeness(key: str) -> float:
        beside, last = _split_key(key)
        whole = difflib.SequenceMatcher(None, wrong, key).ratio()
        part = difflib.SequenceMatcher(None, leaf, last).ratio()
        if last == leaf:
            return 2 + whole
        if len(leaf) > 1 and "".join(word[0] for word in last.split("_") if word) == leaf:
            return 1 + whole
        if last.startswith(f"{leaf}_") or (len(last) > 2 and leaf.startswith(last)):
            return 0.9 + whole / 10
        # What two keys of one group have in common says nothing about what was meant.
        return part if beside == parent else 0.95 * max(whole, part)

    sensible = [key for key in known if key not in _IDENTITY and not wrong.startswith(f"{key}.")]
    best = max(sensible, key=likeness, default=None)
    return best if best is not None and likeness(best) >= 0.6 else None


def _split_key(key: str) -> tuple[str, str]:
    parts = re.split(r"[./]", key)
    return ".".join(parts[:-1]), parts[-1]


# ------------------------------------------------------------------------------------------ composition


def _jobs(
    overrides: Sequence[Override], plain: Sequence[str], loader: ConfigLoader
) -> tuple[list[list[str]], bool]:
    """The overrides of every job, and whether these are all of them (another sweeper draws its own)."""
    single = [line for line, o in zip(plain, overrides, strict=True) if not o.is_sweep_override()]
    hydra = _with_hydra(single).hydra
    if not str(hydra.sweeper["_target_"]).endswith("BasicSweeper"):
        return [single], False
    params = [f"{key}={value}" for key, value in (hydra.sweeper.params or {}).items()]
    everything = [*(_parse(param, loader) for param in params), *overrides]
    for override in everything:
        if override.value_type == ValueType.GLOB_CHOICE_SWEEP:
            raise ConfigError(
                f"{override.input_line}: glob() is for names of files, as in env=glob(*Walker*)"
            )
        if override.is_sweep_override() and not override.is_discrete_sweep():
            raise ConfigError(
                f"{override.input_line}: interval() needs a sweeper that draws; use choice() or range()"
            )
    return BasicSweeper.split_arguments(everything, None)[0], True


def _sample(jobs: list[list[str]]) -> list[list[str]]:
    """All jobs, or of too many some in which the values occur, those of the shortest lists before others."""
    if len(jobs) <= _COMPOSE_AT_MOST:
        return jobs
    chosen: dict[int, list[str]] = {}
    for values in sorted((dict.fromkeys(column) for column in zip(*jobs, strict=True)), key=len):
        for value in values:
            number = next(number for number, job in enumerate(jobs) if value in job)
            chosen.setdefault(number, jobs[number])
            if len(chosen) == _COMPOSE_AT_MOST:
                return list(chosen.values())
    return list(chosen.values())


def _check_sweep(configs: Sequence[Config]) -> None:
    if any(config.run_dir is not None for config in configs):
        raise ConfigError(
            "run_dir: all jobs of a sweep would share this folder; use runs_dir, or leave it out"
        )
    if len({config.runs_dir for config in configs}) > 1:
        raise ConfigError("runs_dir: all jobs of a sweep have one runs_dir")
    launch.check_folder(configs[0])


def _compose(words: Sequence[str], overrides: Sequence[Override], *, sweep: bool = False) -> Config:
    """The configuration that Hydra would hand to the job with these overrides."""
    try:
        composed = _with_hydra(words)
        choices = dict(composed.hydra.runtime.choices)
        # Hydra's own settings were needed for the choices only; the schema has no place for them.
        OmegaConf.set_struct(composed, False)
        del composed["hydra"]
        OmegaConf.set_struct(composed, True)
        return typed(composed, choices)
    except ConfigError as error:
        where = ""
        if isinstance(error.__cause__, InterpolationResolutionError):
            where = "".join(f"{word}: " for word in words if "${" in word)
        job = f" (in the job {' '.join(words)})" if sweep else ""
        raise ConfigError(f"{where}{error}{job}") from error


def _with_hydra(words: Sequence[str]) -> DictConfig:
    try:
        return compose("config", overrides=list(words), return_hydra_config=True)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(_explain(error, words)) from error


def _explain(error: Exception, words: Sequence[str]) -> str:
    """One or two lines for what composition refused."""
    cause = error.__cause__
    merging = re.match(r"Error merging override (.*)$", str(error).splitlines()[0])
    if merging and isinstance(error, ConfigCompositionException):
        line = merging.group(1)
        key, _, value = line.lstrip("+").partition("=")
        expected = _expected(key, value, words)
        if expected:
            return f"{line}: {expected}"
        return f"{line}: {_first_line(cause)}" if cause else line
    hydra_key = re.match(r"Could not override '(hydra\.\w+)\.([\w.]+)'", str(error))
    if hydra_key:
        parent, leaf = hydra_key.groups()
        node = OmegaConf.select(_with_hydra([word for word in words if word.startswith("hydra/")]), parent)
        allowed = [str(name) for name in node if not str(name).startswith("_")]
        if not allowed:
            group = parent.replace(".", "/")
            return f"{parent}.{leaf}: no such key; choose {group}= first, as in hydra/launcher=joblib"
        return f"{parent}.{leaf}: no such key; {choose(leaf, allowed)}"
    return f"{_first_line(error)}{f' ({_first_line(cause)})' if cause else ''}"


def _first_line(error: BaseException) -> str:
    """The first line of a message, with the key in front that OmegaConf puts behind."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{mark.name}, line {mark.line + 1}: {error.problem or error.context}"
    lines = str(error).splitlines()
    located = re.search(r"full_key: (\S+)", str(error))
    key = getattr(error, "full_key", None) or (located.group(1) if located else None)
    return f"{key}: {lines[0]}" if key and lines else _reason(error)


def _expected(key: str, value: str, words: Sequence[str]) -> str:
    """What a key takes, in words, with the nearest right value where there is one; empty: unknown key."""
    algorithm = next((word.partition("=")[2] for word in words if word.startswith("algo=")), None)
    hint: Any = Config
    for part in key.split("."):
        hints = _hints(hint, algorithm or _algorithms([])[0]) if is_dataclass(hint) else {}
        if part not in hints:
            return ""
        hint = hints[part]
    kinds = [kind for kind in (get_args(hint) or (hint,)) if kind is not NoneType]
    optional = " or null" if NoneType in get_args(hint) else ""
    kind = hint if get_origin(hint) in (list, dict) else kinds[0]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return choose(value, [*kind.__members__, *(["null"] if optional else [])])
    return f"expected {_kind(kind, key)}{optional}{_better(kind, key, value)}"


def _kind(kind: Any, key: str) -> str:
    if get_origin(kind) is list:
        inner = "whole numbers" if get_args(kind)[0] is int else "texts"
        return f"a list of {inner}, as in {key}=[{'64,64' if inner == 'whole numbers' else 'a,b'}]"
    if get_origin(kind) is dict:
        return f"names with values; add one with +{key}.name=value"
    if is_dataclass(kind):
        return f"one of its keys: {', '.join(f'{key}.{spec.name}' for spec in fields(kind))}"
    names: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    return names[kind]


def _better(kind: Any, key: str, value: str) -> str:
    """The value in the form that the key takes, if it is plain what was meant."""
    if kind is int and value.startswith("["):
        return f"; several values for a sweep are written without brackets, as {key}={value.strip('[]')}"
    with suppress(ValueError, OverflowError):
        if kind is int and float(value).is_integer():
            return f"; did you mean {key}={int(float(value))}?"
    return ""


def job_context() -> tuple[dict[str, Any], list[str], int | None, bool]:
    """Of the job that Hydra is running: choices by group, overrides, number in the sweep, own console."""
    hydra = HydraConfig.get()
    number = None if hydra.mode is None or hydra.mode.name != "MULTIRUN" else int(hydra.job.num)
    console = str(hydra.launcher["_target_"]).endswith("BasicLauncher")
    return dict(hydra.runtime.choices), list(hydra.overrides.task), number, console
