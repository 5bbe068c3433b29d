"""Readable names of runs, as in W&B, and of experiments: all runs that differ only in the seed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from decimal import Decimal, DecimalException
from functools import cache
from hashlib import sha256
from typing import Any

from runlab.config.affects_results import key_affects_results
from runlab.config.loading import CONF, environment_file

_MOST_LETTERS = 100  # W&B takes 128
_PLACE = ("algo", "env", "seed")
_MADE_WITH = ("kwargs", "wrappers", "training_wrappers")


def env_name(config: Mapping[str, Any], overrides: Sequence[str]) -> str:
    """The name given to `env=`, else the name of the file in conf/env/ with this environment, else the id."""
    if typed := [word.removeprefix("env=") for word in overrides if word.startswith("env=")]:
        return unescaped(typed[-1])
    env = config["env"]
    fitting = [
        (sum(map(len, made)), name)
        for name, env_id, *made in _in_files()
        if env_id == env["id"]
        and all(
            part.items() <= (env.get(key) or {}).items() for key, part in zip(_MADE_WITH, made, strict=True)
        )
    ]
    return max(fitting)[1] if fitting else str(env["id"])


@cache
def _in_files() -> list[tuple[Any, ...]]:
    """Name, id, arguments and wrappers of each environment in conf/env/."""
    files = [(path.stem, environment_file(path)) for path in CONF.glob("env/[!_]*.yaml")]
    return [(name, each.get("id"), *(each.get(key) or {} for key in _MADE_WITH)) for name, each in files]


def result_overrides(overrides: Sequence[str]) -> dict[str, str]:
    """Keys and values of arguments that may change results, except algorithm, environment and seed."""
    values = {}
    for word in sorted(overrides):
        key, _, value = word.lstrip("+").partition("=")
        if key not in _PLACE and not key.startswith(("hydra.", "hydra/")) and key_affects_results(key):
            values[key] = _plain(unescaped(value.strip("'\"")))
    return values


def unescaped(value: str) -> str:
    """The value of a single run where Hydra has written that of a sweep: `a:b` for `a\\:b`."""
    return re.sub(r"\\([\\()\[\]{}:=, \t])", r"\1", value)


def _plain(value: str) -> str:
    """One form for equal values: a single run may have `3e-4` where a sweep has `0.0003`."""
    with suppress(DecimalException):  # no number, or too large
        number = Decimal(value).normalize()
        return f"{number:e}" if 0 < abs(number) < Decimal("0.01") else f"{number:f}"
    return value.lower() if value.lower() in ("true", "false", "null") else value


def differences(config: Mapping[str, Any], overrides: Sequence[str]) -> list[str]:
    """Differences from the recipe, as `lr=3e-4` and `debug=fast`; `name=` where the user gave a name."""
    if config.get("name"):
        return [f"name={config['name']}"]
    words = result_overrides(overrides)
    if "total_env_steps" in words:  # a resume may have raised it
        words["total_env_steps"] = str(config["total_env_steps"])
    return [f"{short_key(key)}={value}" for key, value in words.items()]


def short_key(key: str) -> str:
    """A key in dotted form as names have it."""
    return key.rpartition(".")[2].replace("learning_rate", "lr")


def experiment_name(config: Mapping[str, Any], overrides: Sequence[str], *seed: str) -> str:
    """A name such as `ppo-Hopper-lr3e-4`."""
    start = [str(config["algo"]["name"]), env_name(config, overrides), *seed]
    # A number directly follows its key, and a name has no key.
    shorten = re.compile(r"^(?:name|debug|experiment)=|=(?=-?[.\d])")
    words = [shorten.sub("", each) for each in differences(config, overrides)]
    name = "-".join([*start, *words])
    if len(name) > _MOST_LETTERS:  # cut, with a digest of the arguments
        name = f"{name[: _MOST_LETTERS - 7]}-{sha256('-'.join(words).encode()).hexdigest()[:6]}"
    return name


def run_name(config: Mapping[str, Any], overrides: Sequence[str]) -> str:
    """The name of the experiment with the seed in it: `ppo-Hopper-s3-lr3e-4`."""
    return experiment_name(config, overrides, f"s{config['seed']}")
