"""Groups and keys of the configuration, their kinds of values, and the nearest match of a wrong one."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import yaml

from rltemplate.config.algorithms import ALGORITHMS
from rltemplate.config.fields import MOST_STEPS
from rltemplate.config.loading import CONF
from rltemplate.config.schema import Config
from rltemplate.config.validation import choose

# Chosen through their group, because recipe, folder name and further values go with the choice.
IDENTITY = {"env.id": "env", "algo.name": "algo", "determinism.level": "determinism"}

# Groups of which none may be chosen, and the name of that choice where Hydra needs one.
OPTIONAL = ("recipe", "experiment", "debug", "local")
NONE = "none"
# Of these the name that was applied is a value of the configuration.
NAMED = ("recipe", "experiment")
# Hydra's own that can be chosen.
HYDRA_GROUPS = ("hydra/launcher", "hydra/sweeper")

# Names of other programs, then the key that is meant; of several the first that the algorithm has.
_ELSEWHERE = """
lr learning_rate: algo.learning_rate algo.actor_learning_rate
steps total_steps max_steps timesteps total_timesteps: total_env_steps
batch_size minibatch_size: algo.batch_size algo.num_minibatches
n_epochs: algo.update_epochs
gradient_steps: algo.updates_per_step
anneal_lr lr_schedule: algo.learning_rate_schedule
norm_adv: algo.normalize_advantage
net_arch layers: algo.hidden_sizes
polyak: algo.tau
env_id env_name gym_id env.name: env
async_envs: env.num_workers
cuda gpu: device
level deterministic torch_deterministic: determinism
track: logger.wandb
capture_video: video_every
save_freq: checkpoint_every
log_interval: log_every
num_seeds n_seeds: seed
eval_freq: eval_every
log_dir output_dir: runs_dir
"""
_KEYS_ELSEWHERE: dict[str, list[str]] = {
    name: keys.split()
    for line in _ELSEWHERE.strip().splitlines()
    for names, _, keys in [line.partition(": ")]
    for name in names.split()
}
_VALUES_ELSEWHERE = {"gpu": "cuda", "float32": "ieee", "false": "off", "none": "off"} | dict.fromkeys(
    ("true", "on"), "iteration"
)
_LONGEST_KEY = 100  # characters; nothing that exists is like a longer one
_WANDB = "Weights & Biases is switched on with logger=wandb"


def group_names() -> list[str]:
    """The groups of conf/ that a user chooses from."""
    return sorted(path.name for path in CONF.iterdir() if path.is_dir() and path.name != "hydra")


def option_names(group: str) -> list[str]:
    """The files of a group; a leading underscore marks a file that others build on."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml") if not path.name.startswith("_"))


def default_option(group: str) -> str:
    """The choice of conf/config.yaml for a group."""
    defaults = yaml.safe_load((CONF / "config.yaml").read_text(encoding="utf-8"))["defaults"]
    return next(str(entry[group]) for entry in defaults if isinstance(entry, dict) and group in entry)


def known_keys(algorithms: Iterable[str]) -> list[str]:
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


def unknown_key(key: str, known: Sequence[str], algorithm: str | None = None) -> str:
    """The answer to an unknown key: the nearest known one, and the keys of the same group."""
    owners = [name for name in ALGORITHMS if key in known_keys([name])]
    if owners and algorithm is not None:
        own = [k.partition(".")[2] for k in known if k.startswith("algo.")]
        return f"algo={algorithm} has no such key, algo={owners[0]} has\nallowed in algo: {', '.join(own)}"
    candidates = [*known, *group_names(), *HYDRA_GROUPS]
    near = _known_elsewhere(key.lower(), candidates)
    of_other = f"algo.{_split_key(key)[1]}"
    owners = [name for name in ALGORITHMS if of_other in known_keys([name])]
    if near is None and owners and of_other not in known:
        hint = f"; algo={owners[0]} has {of_other}, algo={algorithm} has none"
    else:
        near = near or nearest_key(key, candidates)
        hint = f"; did you mean {near}?" if near else ""
    if near == "logger.wandb":
        hint = f"; {_WANDB}"
    parent = key.rpartition(".")[0]
    parent = parent if parent in known else ""
    prefix = f"{parent}." if parent else ""
    beside = [k[len(prefix) :] for k in known if k.startswith(prefix) and "." not in k[len(prefix) :]]
    if not parent:
        beside = list(dict.fromkeys([*group_names(), *beside]))
    return f"no such key{hint}\nallowed{f' in {parent}' if parent else ''}: {', '.join(beside)}"


def nearest_key(wrong: str, known: Iterable[str]) -> str | None:
    """The known key that was probably meant: the same last part, or similar letters."""
    known = list(known)
    wrong = wrong.lower().replace("-", "_")
    if len(wrong) > _LONGEST_KEY:
        return None
    there = _known_elsewhere(wrong, known)
    if there is not None:
        return there
    parent, leaf = _split_key(wrong)

    def likeness(key: str) -> float:
        beside, last = _split_key(key)
        whole = difflib.SequenceMatcher(None, wrong, key).ratio()
        part = difflib.SequenceMatcher(None, leaf, last).ratio()
        if last == leaf:
            return 2 + whole
        if last.startswith(f"{leaf}_") or (len(last) > 2 and leaf.startswith(last)):
            return 0.9 + whole / 10
        # What two keys of one group have in common says nothing about what was meant.
        return part if beside == parent else 0.95 * max(whole, part)

    sensible = [key for key in known if key not in IDENTITY and not wrong.startswith(f"{key}.")]
    best = max(sensible, key=likeness, default=None)
    return best if best is not None and likeness(best) >= 0.6 else None


def _known_elsewhere(wrong: str, known: Sequence[str]) -> str | None:
    """Our name for a key of other programs."""
    parent, leaf = _split_key(wrong)
    for key in [*_KEYS_ELSEWHERE.get(wrong, []), *_KEYS_ELSEWHERE.get(leaf, [])]:
        if key in known and parent in ("", key, _split_key(key)[0]):
            return key
    return None


def _split_key(key: str) -> tuple[str, str]:
    parts = re.split(r"[./]", key)
    return ".".join(parts[:-1]), parts[-1]


def chosen_algorithm(words: Sequence[str]) -> str:
    """The algorithm of a configuration with these overrides."""
    chosen = next((word.partition("=")[2] for word in words if word.startswith("algo=")), None)
    return chosen or default_option("algo")


def expected_value(key: str, value: str, words: Sequence[str]) -> str:
    """The kind of value that a key takes, in words, with the nearest one; empty for an unknown key."""
    algorithm = chosen_algorithm(words)
    hint: Any = Config
    for part in key.split("."):
        hints = _hints(hint, algorithm) if is_dataclass(hint) else {}
        if part not in hints:
            return ""
        hint = hints[part]
    kinds = [kind for kind in (get_args(hint) or (hint,)) if kind is not NoneType]
    optional = " or null" if NoneType in get_args(hint) else ""
    kind = hint if get_origin(hint) in (list, dict) else kinds[0]
    if isinstance(kind, type) and issubclass(kind, Enum):
        names = [*kind.__members__, *(["null"] if optional else [])]
        meant = _VALUES_ELSEWHERE.get(value.lower(), value)
        return choose(meant if meant in names else value, names)
    return f"expected {_kind(kind, key)}{optional}{_better(kind, key, value)}"


def _kind(kind: Any, key: str) -> str:
    if get_origin(kind) is list:
        inner = "whole numbers" if get_args(kind)[0] is int else "texts"
        example = "64,64" if inner == "whole numbers" else "a,b"
        return f"a list of {inner}, as in {key}=[{example}]"
    if get_origin(kind) is dict:
        return f"names with values; add one with +{key}.name=value"
    if is_dataclass(kind):
        instead = f"; {_WANDB}" if key == "logger.wandb" else ""
        return f"one of its keys: {', '.join(f'{key}.{spec.name}' for spec in fields(kind))}{instead}"
    names: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    return names[kind]


def _better(kind: Any, key: str, value: str) -> str:
    """Advice for a value of the wrong form whose meaning is plain."""
    if kind is int and value.startswith("["):
        return f"; several values for a sweep are written without brackets, as {key}={value.strip('[]')}"
    with suppress(ValueError, OverflowError):
        if kind is int and float(value).is_integer() and abs(float(value)) <= MOST_STEPS:
            return f"; did you mean {key}={int(float(value))}?"
    return ""
