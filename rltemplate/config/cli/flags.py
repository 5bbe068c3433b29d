"""Words of the command that are no overrides: Hydra's options, and how a sweep is carried out."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.types import Quote, QuotedString

from rltemplate.config.algorithms import ALGORITHMS
from rltemplate.config.cli.keys import expected_value, known_keys, nearest_key
from rltemplate.config.validation import choose
from rltemplate.types import ConfigError

_REFUSED_FLAGS = ("config_path", "config_name", "config_dir", "experimental_rerun")
_ALONE = ("run", "multirun", "cfg", "info", "shell_completion")
_LONGEST_NAME = 100  # characters; nothing that exists is like a longer one


def split_words(argv: Sequence[str]) -> tuple[list[str], list[str], argparse.Namespace]:
    """Overrides, flags (with their values) and the flags as Hydra will read them."""
    for word in argv:
        if any("\ud800" <= letter <= "\udfff" for letter in word):
            raise ConfigError(f"{word}: is no text, for its bytes are not UTF-8")
    parser = get_args_parser()
    actions = (action for action in parser._actions if action.dest not in _REFUSED_FLAGS)
    flags = [name for action in actions for name in action.option_strings if name.startswith("--")]
    parser.error = partial(_refuse_flag, flags)  # type: ignore[method-assign]
    arguments = parser.parse_intermixed_args(list(argv))
    for name in _REFUSED_FLAGS:
        if getattr(arguments, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} is not supported: configuration is read from conf/")
    if sum(bool(getattr(arguments, name)) for name in _ALONE) > 1:
        allowed = ", ".join(f"--{name.replace('_', '-')}" for name in _ALONE)
        raise ConfigError(f"only one of {allowed} can be given")
    given = list(argv)
    for word in arguments.overrides:
        given.remove(word)
    return list(arguments.overrides), given, arguments


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


def pop_sweep_args(words: Sequence[str]) -> tuple[list[str], str | None, bool]:
    """The words for Hydra, the sweep that goes on (None: a new one), and true if it may with changes."""
    given: dict[str, str] = {}
    rest = []
    for word in words:
        key, equals, value = word.partition("=")
        if key not in ("sweep", "accept") or not equals:
            rest.append(word)
        elif key in given:
            raise ConfigError(f"{word}: {key} is given twice")
        else:
            given[key] = value.strip()
    if given.get("sweep") == "":
        raise ConfigError("sweep=: expected resume, or the id of a sweep")
    accept = given.get("accept")
    if accept not in (None, "changes"):
        raise ConfigError(f"accept={accept}: {choose(str(accept), ['changes'])}")
    if accept is not None and "sweep" not in given:
        raise ConfigError("accept=changes: goes with sweep=resume, or with make resume run=RUN")
    return rest, given.get("sweep"), accept is not None


def quote_text(word: str) -> str:
    """The word with quotes where the override grammar would change its text.

    That is: a note, whose commas and brackets are prose; ~folder; and a name like 9e5387, a number elsewhere.
    """
    key, equals, text = word.partition("=")
    if not equals or text == "null" or re.fullmatch(r"""(["']).*\1""", text, re.DOTALL):
        return word
    if key == "note" and "${" in text:
        raise ConfigError(f"{word}: '${{' would be taken for the name of another value; write it otherwise")
    if (
        key == "note"
        or text.startswith("~")
        or (_is_number(text) and "a text" in expected_value(key, text, []))
    ):
        return f"{key}={QuotedString(text, Quote.double).with_quotes()}"
    return word


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
