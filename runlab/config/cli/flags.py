"""Answers to flags, those of Hydra's command line among them. The command has arguments `key=value`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from runlab.config.cli.files import chosen_algorithm, group_names, option_names
from runlab.config.cli.overrides import wrong_key
from runlab.config.project import ALGORITHMS, as_typed
from runlab.config.schema import key_types
from runlab.config.texts import nearest
from runlab.errors import ConfigError

MULTIRUN = ("--multirun", "-m")
# Hydra's other flags, and what to do instead; docs/configuration.md shows these answers.
HYDRA_FLAGS = {
    "--cfg -c": "write --cfg job",
    "--config-dir -cd": "write --config-dir=FOLDER",
    "--config-name --config-path -cn -cp": "use experiment=NAME, or --config-dir=FOLDER for a folder",
    "--experimental-rerun": f"{as_typed('reproduce run=RUN')} makes a run again",
    "--hydra-help": f"{as_typed('help')} lists the commands, and --help shows the arguments of one",
    "--info --package --resolve -i -p": "--cfg job shows the whole configuration, with resolved values",
    "--run -r": "leave it out; without a list of values the command makes one run",
    "--shell-completion -sc": "there is none; a wrong word is answered with the nearest match",
    "--version": "record.json of a run has the versions of all packages",
}


def check_flags(flags: Sequence[str], words: Sequence[str]) -> None:
    """Raise `ConfigError` for the first of `flags` but --multirun; `words` are all arguments."""
    for flag in (each for each in flags if each not in MULTIRUN):
        name, _, value = flag.partition("=")
        for names, instead in HYDRA_FLAGS.items():
            if {name, name[1:]} & {*names.split()}:
                raise ConfigError(f"{flag}: {instead}")
        key = re.sub(r"-(?=\w)", "_", name.lstrip("-"))
        after = [*words[words.index(flag) + 1 :], ""][0]
        value = value or ("" if "=" in after or after.startswith("-") else after)
        known = key in group_names() or any(key in key_types(each) for each in ALGORITHMS)
        if known or (value and flag.startswith("--") and not key.isidentifier()):
            raise ConfigError(f"{flag}: write {key}={value or 'VALUE'}")
        if flag.startswith("--"):
            raise ConfigError(f"{flag}: {wrong_key(key, chosen_algorithm(words))}")
        options = {option: f"{group}={option}" for group in group_names() for option in option_names(group)}
        hint = (not {*"=~"} & {*flag} and nearest(flag, options)) or "as in seed=3"
        raise ConfigError(f"{flag}: expected key=value, {hint.strip()}")
