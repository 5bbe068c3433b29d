"""The words of a command: which are flags, which are overrides, and what is wrong with their form."""

from __future__ import annotations

import argparse
import difflib
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from hydra._internal.utils import get_args_parser
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException

from rltemplate.config.algorithms import ALGORITHMS
from rltemplate.config.cli.groups import group_names, option_names
from rltemplate.config.cli.keys import expected_value, known_keys, nearest_key
from rltemplate.config.command_args import shown
from rltemplate.config.validation import choose
from rltemplate.types import ConfigError

_REFUSED_FLAGS = ("config_path", "config_name", "config_dir", "experimental_rerun")
_LONGEST_NAME = 100  # characters; nothing that exists is like a longer one


def split_words(argv: Sequence[str]) -> tuple[list[str], list[str], argparse.Namespace]:
    """Overrides, flags (with their values) and the flags as Hydra will read them."""
    for word in argv:
        if not word.isascii() and any("\ud800" <= letter <= "\udfff" for letter in word):
            raise ConfigError(f"{word}: is no text, for its bytes are not UTF-8")
    parser = get_args_parser()
    parser.error = partial(_refuse_flag, _flag_names(parser))  # type: ignore[method-assign]
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


def check_completion(words: Sequence[str]) -> None:
    """`ConfigError` unless the words are what `--shell-completion` takes."""
    commands, shells = ["install", "uninstall", "query"], ["bash", "fish", "zsh"]
    command, _, shell = words[0].partition("=") if words else ("", "", "")
    if len(words) != 1 or command not in commands:
        near = choose(command, commands)
        raise ConfigError(f"--shell-completion: takes one word such as install=bash; {near}")
    if shell not in shells:
        raise ConfigError(f"{words[0]}: {choose(shell, shells)}")


def take_resumption(words: Sequence[str]) -> tuple[list[str], str | None, bool]:
    """The words that are Hydra's, which sweep is to go on (None: a new one), and whether it may with changes.

    `sweep=` and `accept=` say how a command is carried out and are no part of a configuration.
    """
    given: dict[str, str] = {}
    rest = []
    for word in words:
        key, equals, value = word.partition("=")
        if key not in ("sweep", "accept") or not equals:
            rest.append(word)
        elif key in given:
            raise ConfigError(f"{word}: {key} is given twice")
        else:
            given[key] = value
    if "sweep" in given and not given["sweep"].strip():
        raise ConfigError("sweep=: expected resume, or the id of a sweep")
    if "accept" in given:
        if given["accept"] != "changes":
            raise ConfigError(f"accept={given['accept']}: {choose(given['accept'], ['changes'])}")
        if "sweep" not in given:
            raise ConfigError("accept=changes: goes with sweep=resume, or with make resume run=RUN")
    return rest, given.get("sweep"), "accept" in given


def as_prose(word: str) -> str:
    """The word, with quotes around a note, whose commas and brackets are the reader's, and around ~folder."""
    key, equals, text = word.partition("=")
    if text.startswith("~") and equals:  # which the grammar of overrides has no place for
        return f"{key}={QuotedString(text, Quote.double).with_quotes()}"
    if key != "note" or not equals or text == "null" or re.fullmatch(r"""(["']).*\1""", text, re.DOTALL):
        return word
    if "${" in text:
        raise ConfigError(f"{word}: '${{' would be taken for the name of another value; write it otherwise")
    return f"{key}={QuotedString(text, Quote.double).with_quotes()}"


def _flag_names(parser: argparse.ArgumentParser) -> list[str]:
    """The options that can be used here."""
    actions = (action for action in parser._actions if action.dest not in _REFUSED_FLAGS)
    return [name for action in actions for name in action.option_strings if name.startswith("--")]


def _refuse_flag(flags: Sequence[str], message: str) -> Any:
    unknown = re.match(r"unrecognized arguments: (-+)([^\s=]+)([ =].*)?$", message, re.DOTALL)
    if not unknown:
        raise ConfigError(message)
    dashes, name, rest = unknown.groups()
    near = difflib.get_close_matches(f"--{name[:_LONGEST_NAME]}", flags, n=1, cutoff=0.75)
    if near:
        raise ConfigError(f"{dashes}{name}: no such option; did you mean {near[0]}?")
    value = (rest or " ...")[1:].split()
    example = f"{nearest_key(name, known_keys(ALGORITHMS)) or name}={value[0] if value else '...'}"
    raise ConfigError(f"{dashes}{name}: no such option; values are written without dashes, as {example}")


def parse_override(word: str, loader: ConfigLoader) -> Override:
    """The word as Hydra reads it; `ConfigError` where Hydra could not, or would read what nobody meant."""
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
        raise ConfigError(f"{word}: {_unreadable(key, value)}") from error
    except ValueError as error:  # Python reads no numbers of thousands of digits
        raise ConfigError(f"{word}: has more digits than a number can have here") from error
    if override.package is not None:
        raise ConfigError(f"{word}: '@' in a key is not supported; write {override.key_or_group}={value}")
    return override


def _leftover(word: str) -> str:
    if not word.strip():
        return f"{shown(word)}: expected key=value"
    for group in group_names():
        for option in option_names(group):
            if word.lower() == option.lower():
                return f"{word}: expected key=value; did you mean {group}={option}?"
    near = nearest_key(word, [*known_keys(ALGORITHMS), *group_names()])
    return f"{word}: expected key=value" + (f"; did you mean {near}=...?" if near else "")


def _unreadable(key: str, value: str) -> str:
    if "" in key.lstrip("+~").split("."):
        start = key.partition("..")[0].rstrip(".")
        return f"a name is missing beside a dot of the key, as in {start}.name={value}"
    for opening, closing, example in (
        ("[", "]", "[64,64]"),
        ("{", "}", "{a:1}"),
        ("(", ")", "range(1,3)"),
    ):
        if value.count(opening) != value.count(closing):
            wrong = opening if value.count(opening) > value.count(closing) else closing
            return f"'{wrong}' has no partner; brackets come in pairs, as in {key}={example}"
    if key in group_names():
        return f"conf/{key}/ has no such file; {choose(value, option_names(key))}"
    expected = expected_value(key.lstrip("+"), value, [])
    if expected and "a text" not in expected:
        return expected
    quoted = '{}="{}"'.format(key, value.replace("\\", "\\\\").replace('"', '\\"'))
    with suppress(HydraException):
        OverridesParser.create().parse_override(quoted)
        return f"quotes, brackets and commas inside a text need quoting; write {shlex.quote(quoted)}"
    return "cannot be read as key=value; keys are words with dots between them, as algo.gamma=0.99"
