"""Arguments of the command as overrides; answers to wrong ones with the nearest match and allowed values."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import yaml
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import OmegaConf

from rltemplate.config.algorithms import ALGORITHMS
from rltemplate.config.command_args import ENOUGH, choose, few, first_line, nearest
from rltemplate.config.entry_points import brought, load
from rltemplate.config.loading import CONF, environment_file, literal
from rltemplate.config.schema import NONE, OPTIONAL, ComposedConfig
from rltemplate.interfaces import ConfigError

# Keys that are set by choosing a file of a group: the choice also sets recipe, folder name and more values.
IDENTITY = {"env.id": "env", "algo.name": "algo", "determinism.level": "determinism"}
LAUNCHER, SEARCHPATH = "hydra/launcher", "hydra.searchpath"
# Keys with a mapping of arbitrary names as value. An argument adds a name, and {} empties the mapping.
MAPPINGS = r"env\.(?:kwargs|wrappers|training_wrappers)|logger\.sinks|determinism\.golden(?!\.)"

# Names that other programs have for our keys.
_ELSEWHERE = {
    "algo.learning_rate": "lr",
    "algo.actor_learning_rate": "lr learning_rate",
    "algo.learning_rate_schedule": "anneal_lr lr_schedule",
    "algo.num_minibatches": "batch_size minibatch_size",
    "algo.update_epochs": "n_epochs",
    "algo.clip_coef": "clip_range clip_eps",
    "algo.hidden_sizes": "net_arch layers",
    "algo.tau": "polyak",
    "algo.updates_per_step": "gradient_steps",
    "algo.normalize_advantage": "norm_adv",
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


def group_names() -> list[str]:
    """The groups of conf/ that a user chooses from."""
    return sorted(path.name for path in CONF.iterdir() if path.is_dir() and path.name != "hydra")


def option_files(group: str, more: Iterable[Path] = ()) -> dict[str, Path]:
    """The files of a group by name, in `more` folders and in conf/, which Hydra asks first.

    A leading underscore marks a file that others build on.
    """
    files = {path.stem: path for folder in (*more, CONF) for path in (folder / group).glob("*.yaml")}
    return {name: files[name] for name in sorted(files) if not name.startswith("_")}


def option_names(group: str, more: Iterable[Path] = ()) -> list[str]:
    """The names of `option_files`, and of algorithms that packages bring."""
    brings = [name for name, entry in ALGORITHMS.items() if group == "algo" and entry.values]
    return sorted({*option_files(group, more), *brings})


def read_sweep(name: str, more: Iterable[Path] = (), other: Sequence[str] = ()) -> dict[str, Any]:
    """The values of each key in a file of conf/sweep/. `other` are further allowed names, for the message."""
    files = option_files("sweep", more)
    if name not in files:
        raise ConfigError(f"sweep={name}: {choose(name, [*other, *files], 'conf/sweep/')}")
    try:
        values = OmegaConf.to_container(OmegaConf.load(files[name]))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"sweep={name}: {yaml_problem(error) or first_line(error)}") from error
    if not isinstance(values, dict) or not values:
        raise ConfigError(f"sweep={name}: {files[name]}: expected keys with values, as in seed: 1,2")
    return {str(key): value for key, value in values.items()}


def yaml_problem(error: Exception) -> str:
    """File, line and kind of a mistake in a YAML file; empty for another error."""
    if not isinstance(error, yaml.MarkedYAMLError) or (at := error.problem_mark) is None:
        return ""
    return f"{at.name}, line {at.line + 1}: {error.problem or error.context}"


def assigned(key: str, value: Any) -> str:
    """The argument that gives a key this value."""
    return f"{key}={'null' if value is None else value}"


def chosen_algorithm(words: Iterable[str]) -> str:
    """The algorithm of a configuration with these overrides."""
    defaults = yaml.safe_load((CONF / "config.yaml").read_text(encoding="utf-8"))["defaults"]
    default = next(entry["algo"] for entry in defaults if isinstance(entry, dict) and "algo" in entry)
    named = (
        name for word in words if word.startswith("algo=") for name in word.removeprefix("algo=").split(",")
    )
    return next((name for name in named if name in ALGORITHMS), str(default))


@cache
def key_types(algorithm: str, node: Any = ComposedConfig, prefix: str = "") -> dict[str, Any]:
    """The type of every dotted key of a configuration with this algorithm."""
    types, hints = {}, get_type_hints(node)
    if node is ComposedConfig:
        hints["algo"] = ALGORITHMS[algorithm].config
    for spec in fields(node):
        types[prefix + spec.name] = hints[spec.name]
        if is_dataclass(hints[spec.name]):
            types |= key_types(algorithm, hints[spec.name], f"{prefix}{spec.name}.")
    return types


def wrong_key(key: str, algorithm: str) -> str:
    """The answer to an unknown key: the nearest known one, and the keys beside it."""
    known = [name for name in key_types(algorithm) if name not in IDENTITY]
    parent = key.rpartition(".")[0]
    prefix = f"{parent}." if any(name.startswith(f"{parent}.") for name in known) else ""
    beside = [name.removeprefix(prefix) for name in known if name.startswith(prefix)]
    beside = [*([] if prefix else group_names()), *(name for name in beside if "." not in name)]
    owner = next((name for name in ALGORITHMS if key in key_types(name)), None)
    if owner is not None:
        said = f"algo={algorithm} has no such key, algo={owner} has; "
    else:
        names = [*known, *group_names(), LAUNCHER]
        spoken = {name.rpartition(".")[2]: name for name in reversed(names)}
        for name, aliases in _ELSEWHERE.items():
            if name in names or "=" in name:
                spoken |= dict.fromkeys(aliases.split(), name)
        last = key.rpartition(".")[2].lower()
        spoken |= {name: name for name in names}
        said = f"no such key; {nearest(last if last in spoken else key, spoken)}"
    where = f"conf/{parent.partition('.')[0]}/" if prefix else "conf/config.yaml"
    return f"{said}allowed{f' in {parent}' if prefix else ''}: {few([*dict.fromkeys(beside)], ENOUGH, where)}"


def wrong_value(key: str, value: str, algorithm: str) -> str:
    """The answer to a value of the wrong type: the values that the key takes; empty for an unknown key."""
    kind = key_types(algorithm).get(key)
    null = ["null"] if NoneType in get_args(kind) else []
    kind = get_args(kind)[0] if null else kind
    if isinstance(kind, type) and issubclass(kind, Enum):
        return choose(value, [*kind.__members__, *null])
    if is_dataclass(kind):
        return f"expected a value for one of its keys: {', '.join(f'{key}.{s.name}' for s in fields(kind))}"
    if kind is None or get_origin(kind) is dict:
        return f"expected names with values, as in {key}.name=value, or {{}} for none" if kind else ""
    return f"expected {' or '.join([*null, _KINDS[kind]])}"


def read_overrides(words: Iterable[str], loader: ConfigLoader, more: Sequence[Path] = ()) -> list[Override]:
    """The arguments as Hydra's overrides; `ConfigError` for the first that Hydra would not read, or misread.

    `more` are further folders like conf/, which become the override hydra.searchpath.
    """
    parser = OverridesParser.create(config_loader=loader)
    overrides: dict[str, Override] = {}
    for path in more:
        quoted = QuotedString(f"file://{path}", Quote.double).with_quotes()
        overrides[SEARCHPATH] = parser.parse_overrides([f"{SEARCHPATH}=[{quoted}]"])[0]
    for word in words:
        override = _read(word, parser)
        key = override.get_key_element().lstrip("+")
        if key in overrides:
            raise ConfigError(f"{word}: {key} is given twice")
        if key in IDENTITY:
            raise ConfigError(f"{word}: goes with other values; choose it with {IDENTITY[key]}=")
        if key.startswith("hydra") and not key.startswith((LAUNCHER, "hydra.launcher.")):
            raise ConfigError(
                f"{word}: of Hydra's own settings only hydra/launcher and the keys below it can be set; "
                "folders are chosen with runs_dir and run_dir"
            )
        if key.startswith("hydra") and override.is_sweep_override():
            raise ConfigError(f"{word}: all jobs of a sweep have one launcher; give one value")
        if key in (*group_names(), LAUNCHER):
            hydras = key == LAUNCHER
            named = loader.get_group_options(key, ObjectType.CONFIG) if hydras else option_names(key, more)
            allowed: dict[str, Any] = {**dict.fromkeys(named), **option_files(key, more)}
            names = [_option(key, name, allowed) for name in _names(override)]
            override = parser.parse_overrides([f"{key}={','.join(names)}"])[0]
        overrides[key] = override
    return list(overrides.values())


def _read(word: str, parser: OverridesParser) -> Override:
    sign, key, value = re.fullmatch(r"([+~]*)([^=]*)(=.*)?", word, re.DOTALL).groups()  # type: ignore[union-attr]
    if not key.strip() or value is None or "~" in sign:
        raise ConfigError(f"{word}: expected key=value, as in env=Hopper")
    # A sign is not needed: names are added to mappings, and every other key is there.
    added = re.match(rf"({MAPPINGS})\b", key)
    if added and ":" in key:
        raise ConfigError(
            f"{word}: a name with a colon stands in braces, as in '{added[1]}={{NAME:{{x:1}}}}'"
        )
    kept = "++" if added else sign if key.startswith("hydra") else ""
    # A colon within a key, as in {package.module:Class:{}}, has to be escaped for Hydra.
    value = re.sub(r"([\w.]+):(\w+):(?=\s*(\{|null))", r"\1\:\2:", value) if added else value
    value, override = value[1:], None
    with suppress(HydraException, ValueError):  # ValueError: a number of thousands of digits
        override = parser.parse_overrides([f"{kept}{key}={value}"])[0]
    is_text = any(key_types(name).get(key) in (str, str | None) for name in ALGORITHMS)
    if (is_text or key in group_names()) and _would_change(key, value, override):
        value = QuotedString(literal(value) if key == "note" else value, Quote.double).with_quotes()
        override = parser.parse_overrides([f"{key}={value}"])[0]
    if override is None:
        expected = wrong_value(key, value, next(iter(ALGORITHMS))) or "it cannot be read as key=value"
        raise ConfigError(f"{word}: {expected}; quotes and brackets come in pairs, as in seed=range(1,3)")
    return override


def _would_change(key: str, value: str, override: Override | None) -> bool:
    """True if the override grammar reads another value than the text: for 9e5387, or a note with commas."""
    if value == "null":
        return False
    if override is None or override.is_sweep_override():
        return override is None or key == "note"
    quoted = re.fullmatch(r"""(["']).*\1""", value, re.DOTALL)
    return not quoted and (key == "note" or not isinstance(override.value(), str))


def _names(override: Override) -> list[str]:
    """The names in the override of a group: one, or several in a sweep."""
    if override.is_discrete_sweep():
        values: list[Any] = ["null" if str(each) == "None" else each for each in override.sweep_iterator()]
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
    raise ConfigError(f"{group}={name}: no such {group}; {choose(name, allowed, f'conf/{group}/')}")


def _environment(name: str, files: Mapping[str, Path]) -> str:
    """The name of the file in conf/env/ with this Gymnasium id, or of a node that is made for it here."""
    import gymnasium

    for file, path in files.items():
        values = environment_file(path)
        if values.get("id") == name and not values.get("kwargs"):
            return file
    module, _, env_id = name.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
    except Exception as error:  # a user's module may raise anything
        why = first_line(error)
        raise ConfigError(f"env={name}: {module} cannot be imported ({why}); is it installed?") from error
    for point in brought("envs"):
        if not module and env_id not in gymnasium.registry:
            load(f"env={name}", "envs", point)
            module = brought("envs")[point].module if env_id in gymnasium.registry else ""
    if env_id not in gymnasium.registry:
        hint = nearest(env_id, [*gymnasium.registry, *files])
        raise ConfigError(
            f"env={name}: no such environment; {hint}allowed: any id registered in Gymnasium, package:id for "
            f"one that the import of a package registers, or {few([*files], ENOUGH, 'conf/env/')}"
        )
    group, _, leaf = f"env/{name}".rpartition("/")
    node = {"id": f"{module}:{env_id}".lstrip(":")}
    ConfigStore.instance().store(group=group, name=leaf, node=node)
    return name
