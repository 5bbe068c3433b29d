"""Completions of the last argument of a command, for the shell (scripts/completion.sh)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any, get_args

from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType

from rltemplate.config.cli.overrides import (
    IDENTITY,
    LAUNCHER,
    chosen_algorithm,
    group_names,
    key_types,
    option_names,
)
from rltemplate.config.loading import CONF

_RUNS = ("run", "a", "b", "baseline")  # arguments that name a run


def complete(words: Sequence[str], commands: Iterable[str], args_of: Callable[[str], Any]) -> list[str]:
    """The texts that the last of `words` can become. The first argument is a command or a target of make.

    `args_of` gives the dataclass with the arguments of a command.
    """
    command, before, last = words[0], words[1:-1], words[-1]
    key, equals, value = last.partition("=")
    if len(words) == 1:
        targets = re.findall(r"^([a-z-]+):.*##", Path("Makefile").read_text(), re.MULTILINE)
        found = sorted({*commands, *targets})
    elif command not in commands:
        found = []
    elif not equals and command == "train":
        known = {*key_types(chosen_algorithm(before)), *group_names(), LAUNCHER} - IDENTITY.keys()
        found = [f"{name}=" for name in sorted(known)]
    elif not equals:
        words_of = [field for field in fields(args_of(command)) if "kind" in field.metadata]
        found = [f"{field.metadata['key'] or field.name}=" for field in words_of]
    else:
        runs = sorted(path.parent.name for path in Path("runs").glob("*/*/record.json"))
        values = ["last", "best", *runs] if key in _RUNS else []
        if command == "train" and not values:
            values = _values(key, chosen_algorithm(before))
        listed = value[: value.rfind(",") + 1]  # a list of values: the last one is completed
        found = [f"{key}={listed}{each}" for each in values]
    return [text for text in found if text.startswith(last)]


def _values(key: str, algorithm: str) -> list[str]:
    if key in group_names():
        return option_names(key) + ["resume"] * (key == "sweep")
    if key == LAUNCHER:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return GlobalHydra.instance().config_loader().get_group_options(key, ObjectType.CONFIG)
    kind = key_types(algorithm).get(key)
    found: list[str] = []
    for each in (kind, *get_args(kind)):
        if isinstance(each, type) and issubclass(each, Enum):
            found += each.__members__
        elif each is bool:
            found += ["true", "false"]
        elif each is type(None):
            found += ["null"]
    return found
