"""Groups and keys of the configuration, and answers to wrong ones: what is allowed, and the nearest match."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import yaml

from rltemplate.config.algorithms import ALGORITHMS
from rltemplate.config.loading import CONF
from rltemplate.config.schema import Config
from rltemplate.config.validation import choose

# Chosen through their group, because recipe, folder name and further values go with the choice.
IDENTITY = {"env.id": "env", "algo.name": "algo", "determinism.level": "determinism"}
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
clip clip_range clip_eps: algo.clip_coef
net_arch layers: algo.hidden_sizes
polyak: algo.tau
env_id env_name gym_id: env
async_envs: env.num_workers
cuda gpu: device
level deterministic torch_deterministic: determinism
track wandb: logger=wandb
tensorboard: logger.tensorboard
capture_video: video_every
save_freq: checkpoint_every
eval_freq: eval_every
log_interval: log_every
num_seeds n_seeds: seed
log_dir output_dir: runs_dir
"""
_MEANT = {
    name: keys.split()
    for names, _, keys in (line.partition(": ") for line in _ELSEWHERE.strip().splitlines())
    for name in names.split()
}
_KINDS: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
_LONGEST_KEY = 100  # characters; nothing that exists is like a longer one


def group_names() -> list[str]:
    """The groups of conf/ that a user chooses from."""
    return sorted(path.name for path in CONF.iterdir() if path.is_dir())


def option_names(group: str) -> list[str]:
    """The files of a group; a leading underscore marks a file that others build on."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml") if not path.name.startswith("_"))


def chosen_algorithm(words: Iterable[str]) -> str:
    """The algorithm of a configuration with these overrides."""
    defaults = yaml.safe_load((CONF / "config.yaml").read_text(encoding="utf-8"))["defaults"]
    default = next(entry["algo"] for entry in defaults if isinstance(entry, dict) and "algo" in entry)
    return next((word.partition("=")[2] for word in words if word.startswith("algo=")), str(default))


@cache
def key_types(algorithm: str) -> dict[str, Any]:
    """The type of every dotted key of a configuration with this algorithm."""
    return dict(_walk(Config, "", algorithm))


def _walk(node: Any, prefix: str, algorithm: str) -> Iterator[tuple[str, Any]]:
    hints = get_type_hints(node)
    if node is Config:
        hints["algo"] = ALGORITHMS[algorithm].config
    for spec in fields(node):
        yield prefix + spec.name, hints[spec.name]
        if is_dataclass(hints[spec.name]):
            yield from _walk(hints[spec.name], f"{prefix}{spec.name}.", algorithm)


def takes_text(key: str) -> bool:
    """True if the values of a key are texts of any content."""
    return any(key_types(name).get(key) in (str, str | None) for name in ALGORITHMS)


def wrong_key(key: str, algorithm: str) -> str:
    """The answer to an unknown key: the nearest known one, and the keys beside it."""
    known = list(key_types(algorithm))
    owner = next((name for name in ALGORITHMS if key in key_types(name)), None)
    if owner is not None:
        hint = f"algo={algorithm} has no such key, algo={owner} has"
    else:
        near = nearest_key(key, known)
        hint = f"no such key{f'; did you mean {near}?' if near else ''}"
    parent = key.rpartition(".")[0]
    prefix = f"{parent}." if parent in known else ""
    beside = [name.removeprefix(prefix) for name in known if name.startswith(prefix) and name not in IDENTITY]
    beside = [*([] if prefix else group_names()), *(name for name in beside if "." not in name)]
    return f"{hint}\nallowed{f' in {parent}' if prefix else ''}: {', '.join(dict.fromkeys(beside))}"


def nearest_key(wrong: str, known: Sequence[str]) -> str | None:
    """The key, group or choice that was probably meant: the same last part, or similar letters."""
    names = [name for name in (*known, *group_names(), *HYDRA_GROUPS) if name not in IDENTITY]
    wrong = wrong[:_LONGEST_KEY].strip("-+~").lower().replace("-", "_")
    last = wrong.rpartition(".")[2]
    meant = [name for name in _MEANT.get(last, ()) if name in names or "=" in name]
    if meant:
        return meant[0]
    by_last = {name.rpartition(".")[2]: name for name in reversed(names)}
    near = difflib.get_close_matches(wrong, names, n=1, cutoff=0.85)
    near = near or [by_last[name] for name in difflib.get_close_matches(last, by_last, n=1)]
    return next(iter(near or difflib.get_close_matches(wrong, names, n=1)), None)


def wrong_value(key: str, value: str, algorithm: str) -> str:
    """The answer to a value of the wrong type: the values that the key takes; empty for an unknown key."""
    hint = key_types(algorithm).get(key)
    kinds = [kind for kind in (get_args(hint) or (hint,)) if kind is not NoneType]
    or_null = " or null" if NoneType in get_args(hint) else ""
    if hint is None or get_origin(hint) is dict:
        return f"expected names with values, as in {key}.name=value" if hint else ""
    if get_origin(hint) is list:
        return f"expected a list, as in {key}=[{'64,64' if kinds[0] is int else 'a,b'}]"
    if is_dataclass(hint):
        return f"expected a value for one of its keys: {', '.join(f'{key}.{s.name}' for s in fields(hint))}"
    if issubclass(kinds[0], Enum):
        return choose(value, [*kinds[0].__members__, *(["null"] if or_null else [])])
    better = ""
    with suppress(ValueError, OverflowError):
        if kinds[0] is int and float(value).is_integer():
            better = f"; did you mean {key}={int(float(value))}?"
    if kinds[0] is int and value.startswith("["):
        better = f"; several values for a sweep are written without brackets, as {key}={value.strip('[]')}"
    return f"expected {_KINDS[kinds[0]]}{or_null}{better}"
