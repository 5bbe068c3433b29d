"""Arguments of the command as overrides; answers to wrong ones with the nearest match and allowed values."""

from __future__ import annotations

import importlib
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException

from runlab.config.cli.files import chosen_algorithm, group_names, option_files, option_names
from runlab.config.entry_points import brought, load
from runlab.config.loading import CONF_NAME, environment_file, literal
from runlab.config.project import ALGORITHMS, as_typed
from runlab.config.schema import NONE, OPTIONAL, check_kinds, key_types
from runlab.config.texts import ENOUGH, choose, few, first_line, nearest, package_of, to_install, with_digits
from runlab.config.yaml_files import DEEPEST, MAX_DIGITS
from runlab.errors import ConfigError

# Keys that are set by choosing a file of a group: the choice also sets recipe, folder name and more values.
IDENTITY = {"env.id": "env", "algo.name": "algo", "determinism.level": "determinism"}
LAUNCHER, SEARCHPATH = "hydra/launcher", "hydra.searchpath"
# Keys with a mapping of arbitrary names as value. An argument adds a name, and {} empties the mapping.
MAPPINGS = r"env\.(?:kwargs|wrappers|training_wrappers)|logger\.sinks|determinism\.golden(?!\.)"
_NAME = r"[A-Za-z_][\w-]{0,99}(?:\.\w[\w-]{0,99}){0,9}"  # below a mapping or the launcher
JOBS_AT_MOST = 10_000
_MOST_IN_BRACKETS = 2_000  # values; Hydra's parser takes a second, and four for twice as many

# Names that other programs have for our keys; those for keys of an algorithm stand beside its fields.
_ELSEWHERE = {
    "total_env_steps": "steps max_steps timesteps total_timesteps",
    "env": "env_id env_name gym_id",
    "device": "cuda gpu",
    "seed": "num_seeds n_seeds",
    "env.num_workers": "async_envs",
    "log_every": "log_interval",
    "checkpoint_every": "save_freq",
    "runs_dir": "log_dir output_dir",
    "determinism": "level deterministic torch_deterministic",
    "logger=wandb": "track wandb",
    "video_every": "capture_video",
}
_MEANS = {"gpu": "cuda"}  # by its letters it is nearest to cpu
_SEVERAL = "; a sweep over several is written without brackets, as 1,2"
_KINDS: dict[Any, str] = {
    int: f"a whole number, as 1000000{_SEVERAL}",
    float: "a number",
    bool: "true or false",
    int | str: f"auto, or a whole number{_SEVERAL}",
    Any: f"auto, or a whole number{_SEVERAL}",  # env.num_workers
    bool | str: "auto, true or false",
    str: "a text",
    list[int]: "a list, as [64,64]",
    list[str]: "a list, as [a,b]",
}


def assigned(key: str, value: Any) -> str:
    """The argument that gives a key this value."""
    return f"{key}={'null' if value is None else str(value).lower() if isinstance(value, bool) else value}"


def wrong_key(key: str, algorithm: str) -> str:
    """The answer to an unknown key: the nearest known one, and the keys beside it."""
    keys = [name for name in key_types(algorithm) if name not in IDENTITY]
    parent = key.rpartition(".")[0]
    prefix = f"{parent}." if any(name.startswith(f"{parent}.") for name in keys) else ""
    beside = [name.removeprefix(prefix) for name in keys if name.startswith(prefix)]
    beside = [*([] if prefix else group_names()), *(name for name in beside if "." not in name)]
    owner = next((name for name in ALGORITHMS if key in key_types(name)), None)
    if owner is not None:
        answer = f"algo={algorithm} has no such key, algo={owner} has; "
    else:
        names = [*keys, *group_names(), LAUNCHER]
        spoken = {name.rpartition(".")[2]: name for name in reversed(names)}
        specs = fields(ALGORITHMS[algorithm].config)
        own = {f"algo.{spec.name}": spec.metadata.get("aliases", "") for spec in specs}
        for name, aliases in (own | _ELSEWHERE).items():
            spoken |= dict.fromkeys(aliases.split(), name)
        last = key.rpartition(".")[2].lower()
        spoken |= {name: name for name in names}
        answer = f"no such key; {nearest(last if last in spoken else key, spoken)}"
    where = f"{CONF_NAME}/{parent.partition('.')[0] + '/' if prefix else 'config.yaml'}"
    return (
        f"{answer}allowed{f' in {parent}' if prefix else ''}: {few([*dict.fromkeys(beside)], ENOUGH, where)}"
    )


def wrong_value(key: str, value: str, algorithm: str) -> str:
    """The answer to a value of the wrong type: the values that the key takes; empty for an unknown key."""
    kind = key_types(algorithm).get(key)
    null = ["null"] if NoneType in get_args(kind) else []
    kind = get_args(kind)[0] if null else kind
    if isinstance(kind, type) and issubclass(kind, Enum):
        return choose(_MEANS.get(value, value), [*kind.__members__, *null])
    if is_dataclass(kind):
        return f"expected a value for one of its keys: {', '.join(f'{key}.{s.name}' for s in fields(kind))}"
    if kind is None or get_origin(kind) is dict:
        return f"expected names with values, as in {key}.name=value, or {{}} for none" if kind else ""
    return f"expected {' or '.join([*null, _KINDS[kind]])}"


def read_overrides(words: Iterable[str], loader: ConfigLoader, more: Sequence[Path]) -> list[Override]:
    """The arguments as Hydra's overrides; `ConfigError` for the first that Hydra would not read, or misread.

    `more` are further folders like conf/, which become the override hydra.searchpath.
    """
    words = list(words)
    parser = OverridesParser.create(config_loader=loader)
    overrides: dict[str, Override] = {}
    for path in more:
        quoted = QuotedString(f"file://{path}", Quote.double).with_quotes()
        overrides[SEARCHPATH] = parser.parse_overrides([f"{SEARCHPATH}=[{quoted}]"])[0]
    for word in words:
        parts = re.fullmatch(r"(\+{0,2})([^=+~][^=]*)=(.*)", word, re.DOTALL)
        if parts is None or not parts[2].strip():
            raise ConfigError(f"{word}: expected key=value, as in env=Hopper")
        sign, key, value = parts.groups()
        if key in overrides:
            raise ConfigError(f"{word}: {key} is given twice")
        _check_key(key, word, words)
        override = _read(word, key, sign, value, parser)
        if key.startswith("hydra") and override.is_sweep_override():
            raise ConfigError(f"{word}: all jobs of a sweep have one launcher; give one value")
        if key in (*group_names(), LAUNCHER):
            hydras = key == LAUNCHER
            named = loader.get_group_options(key, ObjectType.CONFIG) if hydras else option_names(key, more)
            named = [each for each in named if not each.startswith("_")]
            allowed: dict[str, Any] = {**dict.fromkeys(named), **option_files(key, more)}
            names = [_option(key, name, allowed) for name in _names(override)]
            override = parser.parse_overrides([f"{key}={','.join(names)}"])[0]
        overrides[key] = override
    return list(overrides.values())


def _check_key(key: str, word: str, words: Iterable[str]) -> None:
    """Raise `ConfigError` for a key that no configuration has: Hydra's answers are long, or tracebacks."""
    if key in IDENTITY:
        raise ConfigError(f"{word}: goes with other values; choose it with {IDENTITY[key]}=")
    if key.startswith("hydra"):
        if key.replace("/", ".").startswith("hydra.sweeper"):
            raise ConfigError(f"{word}: use {as_typed('search')} sweep=NAME, with a file of conf/sweep/")
        if key != LAUNCHER and not re.fullmatch(rf"hydra\.launcher\.{_NAME}", key, re.ASCII):
            raise ConfigError(
                f"{word}: of Hydra's own settings only hydra/launcher and the keys below it can be set; "
                "folders are chosen with runs_dir and run_dir"
            )
    elif added := re.match(rf"({MAPPINGS})\b(?=.)", key):
        if ":" in key:
            raise ConfigError(
                f"{word}: a name with a colon stands in braces, as in '{added[1]}={{NAME:{{x:1}}}}'"
            )
        if not re.fullmatch(rf"\.{_NAME}", key.removeprefix(added[1]), re.ASCII):
            raise ConfigError(
                f"{word}: expected {added[1]}.NAME=value, NAME of letters from a to z, digits, _ and -"
            )
    elif key not in group_names() and not any(key in key_types(algorithm) for algorithm in ALGORITHMS):
        raise ConfigError(f"{word}: {wrong_key(key, chosen_algorithm(words))}")


def _read(word: str, key: str, sign: str, value: str, parser: OverridesParser) -> Override:
    kinds = [kinds[key] for name in ALGORITHMS if key in (kinds := key_types(name))]
    is_text = key in group_names() or any(kind in (str, str | None) for kind in kinds)
    quoted = re.fullmatch(r"""(["']).*\1""", value, re.DOTALL) is not None
    if any(kind is Any or int in (kind, *get_args(kind)) for kind in kinds):
        value = with_digits(value)
    prose = key == "note" and value != "null" and not quoted  # never a list, and so not read as one
    if not prose:
        _check_size(word, value)
    added = re.match(rf"({MAPPINGS})\b", key)
    # Only the launcher needs a sign: names are added to mappings, and every other key exists.
    prefix = "++" if added or (sign and key.startswith("hydra")) else ""
    # A colon within a key, as in {package.module:Class:{}}, has to be escaped for Hydra.
    value = re.sub(r"([\w.]+):(\w+):(?=\s*(\{|null))", r"\1\:\2:", value) if added else value
    texts, override = [] if prose else [value], None
    if not (prose or is_text or value.isascii()):
        texts.append(_quoted(value))
    for text in texts:
        # ValueError: a number of thousands of digits; RecursionError: thousands of brackets.
        with suppress(HydraException, ValueError, RecursionError):
            override = override or parser.parse_overrides([f"{prefix}{key}={text}"])[0]
    if is_text and value != "null":
        # The grammar would read another value than the text: for 9e5387, or a note with commas.
        if override is not None and override.is_sweep_override():
            override = None if key == "note" else override
        elif override is not None and not (quoted or isinstance(override.value(), str)):
            override = None
        if override is None:
            value = QuotedString(literal(value) if key == "note" else value, Quote.double).with_quotes()
            override = parser.parse_overrides([f"{key}={value}"])[0]
    if override is None:
        expected = wrong_value(key, value, next(iter(ALGORITHMS))) or "it cannot be read as key=value"
        raise ConfigError(f"{word}: {expected}; quotes and brackets come in pairs, as in seed=range(1,3)")
    if key in ("run_dir", "runs_dir") and override.is_sweep_override():
        raise ConfigError(f"{word}: one folder, and no list; with a comma in its name: \"{key}='{value}'\"")
    for each in sweep_values(override) if bool in kinds else ():
        check_kinds({key: each})
    return override


def sweep_values(override: Override) -> list[Any]:
    """The values of an override, cut beyond the limit of jobs; `ConfigError` for a list that has none."""
    if not override.is_sweep_override():
        return [override.value()]
    if getattr(override.value(), "shuffle", False):
        raise ConfigError(
            f"{override.input_line}: has another order at each start, and jobs are numbered by it"
        )
    values: list[Any] = []
    # Of interval(), and of a range with a step of 0 or with nan.
    with suppress(HydraException, ValueError, ArithmeticError):
        values = list(itertools.islice(override.sweep_iterator(), JOBS_AT_MOST + 1))
    if not values:
        raise ConfigError(
            f"{override.input_line}: is no list of values; seed=1,2 is one, and choice(1,2) and range(1,3)"
        )
    return values


def _quoted(value: str) -> str:
    """The value with quotes around all that is not ASCII, which the override grammar lacks."""
    if re.fullmatch(r"""[^,{}\[\]()'"]*""", value):
        return QuotedString(value.strip(), Quote.double).with_quotes()

    def quote(text: re.Match[str]) -> str:
        plain = text[0].isascii() or text[0][0] in "'\""
        return text[0] if plain else QuotedString(text[0].strip(), Quote.double).with_quotes()

    return re.sub(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[^,{}\[\]():'"]+""", quote, value)


def _check_size(word: str, value: str) -> None:
    """Raise `ConfigError` for a value that would keep Hydra's parser busy for minutes, or end it."""
    most = _MOST_IN_BRACKETS if {*"([{"}.intersection(value) else JOBS_AT_MOST
    if value.count(",") >= most:
        raise ConfigError(f"{word}: more than {most:,} values; of numbers, range(1,1001) is a shorter form")
    if re.search(rf"[0-9]{{{MAX_DIGITS + 1}}}", value):
        raise ConfigError(f"{word}: more than {MAX_DIGITS} digits in a row")
    depth = itertools.accumulate((each in "([{") - (each in ")]}") for each in value)
    if max(depth, default=0) > DEEPEST:
        raise ConfigError(f"{word}: brackets within brackets, more than {DEEPEST} deep")


def _names(override: Override) -> list[str]:
    """The names in the override of a group: one, or several in a sweep."""
    if override.is_discrete_sweep():
        values: list[Any] = ["null" if str(each) == "None" else each for each in sweep_values(override)]
        names = [each.text if isinstance(each, QuotedString) else str(each) for each in values]
        # glob() also finds files with an underscore, on which other files build.
        if names := [name for name in names if not name.startswith("_")]:
            return names
    value = override.value()
    return [value if isinstance(value, str) else override.get_value_string()]


def _option(group: str, name: str, allowed: Mapping[str, Any]) -> str:
    """The name under which Hydra finds an option of a group."""
    if name in allowed:
        return name
    if group in OPTIONAL and name in ("null", NONE):
        return NONE
    if group == "env" and name not in ("", "null"):
        return _environment(name, allowed)
    raise ConfigError(f"{group}={name}: no such {group}; {choose(name, allowed, f'{CONF_NAME}/{group}/')}")


def _environment(name: str, files: Mapping[str, Path]) -> str:
    """The name of the file in conf/env/ with this Gymnasium id, or of a node that is made for it here."""
    import gymnasium

    module, _, env_id = name.rpartition(":")
    for point in brought("envs"):
        if not module and env_id not in gymnasium.registry:
            load(f"env={name}", "envs", point)
            module = brought("envs")[point].module if env_id in gymnasium.registry else ""
    spec, package = gymnasium.registry.get(env_id), package_of(env_id)
    if not module and (spec is None or f"{spec.entry_point}".startswith(package)):
        module = package
    for file, path in files.items():
        values = environment_file(path)
        if values.get("id") in (name, f"{module}:{env_id}") and not values.get("kwargs"):
            return file
    try:
        if module:
            importlib.import_module(module)
    except Exception as error:  # a user's module may raise anything
        why = first_line(error)
        cure = to_install(error) or "; is it installed?"
        raise ConfigError(f"env={name}: {module} cannot be imported ({why}){cure}") from error
    if env_id not in gymnasium.registry:
        # The registry has ids of the module as well, which need its name in front.
        of_module = (
            each for each, spec in gymnasium.registry.items() if f"{spec.entry_point}".startswith(module)
        )
        named = {each: f"{module}:{each}" for each in of_module} if module else {}
        names = {each: each for each in [*gymnasium.registry, *files]} | named
        bare = partial(re.sub, r"-v\d+$", "")  # an equal version makes no names alike
        alike = {each: names[each] for each in names if nearest(bare(env_id), [bare(each)])}
        hint = nearest(env_id, alike)
        raise ConfigError(
            f"env={name}: no such environment; {hint}allowed: any id registered in Gymnasium, package:id for "
            f"one that the import of a package registers, or {few([*files], ENOUGH, f'{CONF_NAME}/env/')}"
        )
    group, _, leaf = f"env/{name}".rpartition("/")
    node = {"id": f"{module}:{env_id}".lstrip(":")}
    ConfigStore.instance().store(group=group, name=leaf, node=node)
    return name
