"""Configurations as dicts, as YAML and as recorded files, with their checks. `CONF` is the folder conf/."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runlab import INSTALLED
from runlab.config.auto import AUTO_KEYS, may_compile, resolved
from runlab.config.project import ALGORITHMS, project_folder
from runlab.config.schema import AUTO, ComposedConfig, Config, Level, check_kinds, register_schemas
from runlab.config.texts import choose
from runlab.config.yaml_files import parse
from runlab.errors import ConfigError

# Inside the package of the project where that is installed from a wheel, else beside it.
CONF = next(
    folder / "conf" for folder in (project_folder(), project_folder().parent) if (folder / "conf").is_dir()
)
CONF_NAME = str(CONF) if INSTALLED else "conf"  # in messages
_MOST_VALUES = 10_000  # of a recorded configuration; OmegaConf takes a second for four thousand
_LEAST = 1.2e-38  # a smaller number is 0 in float32, and a divisor such as algo.adam_eps must not be
_MOST_LISTED = 64  # of numbers with a range, such as hidden layers
# Every version had these keys: a recorded configuration that lacks one is damaged.
_NEVER_ADDED = ("env.id", "determinism.level", "seed", "total_env_steps")


def environment_file(path: Path) -> dict[str, Any]:
    """The values of a file of conf/env/ and of the files that it begins with; empty if it cannot be read."""
    own = _values(path)
    names = own.pop("defaults", [])
    values: dict[str, Any] = {}
    for name in names if isinstance(names, list) else []:  # no file is called _self_
        values |= _values(path.with_name(f"{name}.yaml"))
    return values | own


def _values(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError, yaml.YAMLError):
        _, values = parse(path.read_text(encoding="utf-8"))
        return values if isinstance(values, dict) else {}
    return {}


def to_config(composed: DictConfig, jobs: int = 1) -> Config:
    """Resolve composed values into typed dataclasses; `ConfigError` names the first wrong value.

    Values `auto` are chosen for `jobs` runs that share this machine.
    """
    with in_one_line():
        auto = auto_keys(composed)
        if missing := sorted(OmegaConf.missing_keys(composed)):
            raise ConfigError(
                f"no value for {missing[0]}: ??? stands for none; set it in a file of conf/, or on the "
                "command line"
            )
        if OmegaConf.get_type(composed) is ComposedConfig:
            composed = _without_auto(composed)
        config = OmegaConf.to_object(composed)
    assert isinstance(config, Config)
    check(config)
    return resolved(config, auto, jobs)


def _without_auto(composed: DictConfig) -> DictConfig:
    """A typed copy, with the plainest value in the place of each `auto`."""
    plain = composed.copy()
    for key in auto_keys(composed):
        OmegaConf.update(plain, key, AUTO_KEYS[key])
    values: Any = OmegaConf.to_container(plain, resolve=True, enum_to_str=True)
    try:
        return _typed(values)
    except ConfigError as error:
        if (key := str(error).partition(":")[0]) not in AUTO_KEYS:
            raise
        kind = "true or false" if AUTO_KEYS[key] is False else "a whole number"
        raise ConfigError(f"{key}={OmegaConf.select(plain, key)}: expected auto, or {kind}") from error


def auto_keys(composed: DictConfig) -> set[str]:
    """The keys whose value is `auto` and is resolved."""
    return {key for key in AUTO_KEYS if OmegaConf.select(composed, key) == AUTO}


def check(config: Config) -> None:
    """Raise `ConfigError` for the first value out of its range or inconsistent with another."""
    num_envs, num_workers = config.env.num_envs, config.env.num_workers
    level, products = config.determinism.level, config.determinism.products
    by_algo = config.algo.problems(num_envs), config.algo.product_problems(products.name)
    wandb = config.logger.wandb.problems() if config.logger.wandb.enabled else ()
    for problem in itertools.chain(_out_of_range(config, ""), *by_algo, wandb):
        raise ConfigError(problem)
    if config.keep_best and not (config.eval_every and config.checkpoint_every):
        raise ConfigError("keep_best=true: eval_every and checkpoint_every must be at least 1")
    if own := sorted({"return", "length"}.intersection(config.env.logged_infos)):
        raise ConfigError(f"env.logged_infos: every row has episode/{own[0]} already; leave out {own[0]}")
    if num_workers > num_envs:
        raise ConfigError(f"env.num_workers={num_workers}: must be at most env.num_envs={num_envs}")
    if config.compile and not may_compile(config):
        raise ConfigError(
            f"compile=true: not at determinism={level.name} with products={products.name}, for compiled "
            "updates round otherwise than the policy that acts; use compile=false, or determinism=repeat"
        )
    if level is Level.profile and config.determinism.profile is None:
        raise ConfigError("determinism.profile=null: the level profile needs one; use determinism=invariant")


def _out_of_range(node: Any, prefix: str) -> Iterator[str]:
    for spec in fields(node):
        key, value = prefix + spec.name, getattr(node, spec.name)
        if is_dataclass(value):
            yield from _out_of_range(value, key + ".")
            continue
        values = value if isinstance(value, list) else [value]
        if any(isinstance(v, float) and not math.isfinite(v) for v in values):
            yield f"{key}={value}: must be finite"
        elif "Any" not in str(spec.type) and any(isinstance(each, list | Mapping) for each in _parts(value)):
            yield f"{key}={value}: a list or a mapping inside it; expected plain values"
        elif odd := [name for name in _names(value) if not isinstance(name, str)]:
            yield f"{key}: names inside it must be text: put {json.dumps(odd[0], default=str)} in quotes"
        elif any(isinstance(v, float) and 0 < abs(v) < _LEAST for v in values):
            yield f"{key}={value}: is zero in single precision; use 0, or at least {_LEAST}"
        elif "low" in spec.metadata and len(values) > _MOST_LISTED:
            yield f"{key}: {len(values):,} values; must be at most {_MOST_LISTED}"
        elif value not in spec.metadata.get("choices", [value]):
            names = ("null" if name is None else name for name in spec.metadata["choices"])
            yield f"{key}={value}: {choose(value, names)}"
        elif value == [] and "low" in spec.metadata:
            yield f"{key}=[]: needs at least one value, as in {key}=[64,64]"
        elif "low" in spec.metadata and any(isinstance(v, list | dict | str) for v in values):
            yield f"{key}={value}: expected numbers"
        elif "low" in spec.metadata and value is not None:
            low, high, open_low = (spec.metadata[name] for name in ("low", "high", "open_low"))
            if any(not (v > low if open_low else v >= low) or not v <= high for v in values):
                least = "greater than" if open_low else "at least"
                yield f"{key}={value}: must be {least} {low} and at most {high}"


def _parts(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()


def _names(value: Any) -> Iterator[Any]:
    """The keys of dictionaries in a value, at any depth. JSON, as in a record, turns every key into text."""
    if isinstance(value, Mapping):
        yield from value
        value = [*value.values()]
    for item in value if isinstance(value, list) else ():
        yield from _names(item)


@contextlib.contextmanager
def in_one_line() -> Iterator[None]:
    """OmegaConf's message with the key in front: `seed=1.5: ... could not be converted to Integer`."""
    try:
        yield
    except OmegaConfBaseException as error:
        first = str(error.msg if error.msg is not None else error).splitlines()[0]
        raise ConfigError(f"{error.full_key}: {first}" if error.full_key else first) from error


def to_dict(config: Any) -> dict[str, Any]:
    """A configuration as plain dicts, lists and scalars, enums by name."""

    def plain(items: list[tuple[str, Any]]) -> dict[str, Any]:
        return {key: value.name if isinstance(value, Enum) else value for key, value in items}

    return asdict(config, dict_factory=plain)


def from_dict(values: Mapping[str, Any]) -> Config:
    """The inverse of `to_dict`; wrong keys, types and ranges raise `ConfigError`.

    Values are data: a `${...}` in them stands for itself.
    """
    return to_config(_typed(values))


def _typed(values: Mapping[str, Any]) -> DictConfig:
    """The values with their types. An absent key becomes a missing value."""
    algo = values.get("algo")
    name = algo.get("name") if isinstance(algo, Mapping) else None
    if not isinstance(algo, Mapping) or not isinstance(name, str) or name not in ALGORITHMS:
        raise ConfigError(f"algo.name={name}: {choose(str(name), ALGORITHMS)}")
    check_kinds(values)
    if isinstance(logger := values.get("logger"), Mapping):  # earlier versions had the key journal
        values = {**values, "logger": {key: logger[key] for key in logger if key != "journal"}}
    entry = ALGORITHMS[name]
    gone = entry.former.keys() - {each.name for each in fields(entry.config)}
    for key in sorted(gone & algo.keys()):
        if algo[key] != entry.former[key]:
            raise ConfigError(
                f"algo.{key}={algo[key]}: algo={name} has only what {entry.former[key]} meant; earlier code, "
                "such as that of the run, has the other values"
            )
    values = {**values, "algo": {key: algo[key] for key in algo if key not in gone}}
    with in_one_line():
        schema = OmegaConf.structured(Config)
        OmegaConf.update(schema, "algo", OmegaConf.structured(entry.config), merge=False)
        merged = OmegaConf.merge(schema, literal(values))
    assert isinstance(merged, DictConfig)
    return merged


def literal(value: Any) -> Any:
    """`value` with backslashes before each `${...}`, so that OmegaConf keeps it as text."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", value)
    if isinstance(value, Mapping):
        return {key: literal(item) for key, item in value.items()}
    return [literal(item) for item in value] if isinstance(value, list) else value


def to_yaml(config: Config) -> str:
    """The text of `config.yaml`: the resolved configuration and nothing else."""
    return str(yaml.safe_dump(to_dict(config), allow_unicode=True, sort_keys=False))


def complete(values: Mapping[str, Any]) -> tuple[Config, dict[str, Any]]:
    """A recorded configuration, and the values that were added for keys that it lacks.

    Raises `ConfigError` like `from_dict`.
    """
    if _count(values) > _MOST_VALUES:
        raise ConfigError(f"the recorded configuration has more than {_MOST_VALUES:,} values")
    typed = _typed(values)
    added: dict[str, Any] = {}
    with in_one_line():
        lacking = sorted(OmegaConf.missing_keys(typed))
        if lacking and not {*lacking}.intersection(_NEVER_ADDED):
            shipped = _shipped(typed.algo.name, typed.determinism.level.name)
            for key in lacking:
                value = OmegaConf.select(shipped, key)
                OmegaConf.update(typed, key, value)
                added[key] = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    return to_config(typed), added


def _count(value: Any) -> int:
    return 1 + sum(map(_count, _parts(value)))


def _shipped(algorithm: str, level: str) -> Any:
    """The values that conf/ has for an algorithm and a level."""
    # Imported here: only a record that lacks keys needs Hydra.
    from hydra import compose, initialize_config_dir

    register_schemas()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        # Older runs were not compiled and had one thread, whatever `auto` would choose here.
        words = [f"algo={algorithm}", f"determinism={level}", "~recipe", "~local"]
        words += ["num_threads=1", "compile=false"]
        composed = compose("config", overrides=words)
    return OmegaConf.create(OmegaConf.to_container(composed, enum_to_str=True))


def about_added(name: str, added: Mapping[str, Any]) -> str:
    """A line that says which values a run takes for keys that were added after it was recorded."""
    values = ", ".join(f"{key}={value}" for key, value in added.items())
    return f"{name} was recorded without keys that exist now; it takes {values}, as in conf/"
