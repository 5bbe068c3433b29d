"""YAML files of conf/ and of folders like it, read so that each mistake has its file and line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from rltemplate.config.command_args import first_line
from rltemplate.interfaces import ConfigError

DEEPEST = 50  # levels of nesting; OmegaConf gives up at about 200
_MOST_VALUES = 100_000  # with the repeated ones of aliases, of which a few lines can make billions
_LONGEST_NUMBER = 1000  # digits; Python reads 4,300
_SCALARS = ("null", "bool", "int", "float", "str", "timestamp")
_DEFAULTS = "expected a list of files, as in '- override /recipe: null'"


def read_yaml(path: Path) -> Any:
    """The content of a file as OmegaConf reads it; `ConfigError` names the file and, mostly, the line."""
    check_yaml(path)
    try:
        return OmegaConf.to_container(OmegaConf.load(path))
    except Exception as error:  # of OmegaConf, which alone runs here
        raise explained(path, error) from error


def explained(path: Path, error: Exception) -> ConfigError:
    """An error of a YAML parser, OmegaConf or Hydra with the file in front."""
    if isinstance(error, yaml.MarkedYAMLError):
        return _at(path, error.problem_mark, f"{error.problem or error.context}")
    return ConfigError(f"{shown(path)}: {first_line(error)}")


def check_yaml(path: Path) -> None:
    """Raise `ConfigError` for a file that is no YAML, or that Hydra or OmegaConf would stumble over."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except OSError as error:
        raise ConfigError(f"{shown(path)}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{shown(path)}, line {line}: is not text in UTF-8") from error
    except yaml.YAMLError as error:
        raise explained(path, error) from error
    except RecursionError as error:
        raise ConfigError(f"{shown(path)}: is nested too deeply") from error
    if root is None:
        return
    for node, problem in _problems(root):
        raise _at(path, node.start_mark, problem)


def shown(path: Path) -> str:
    """The path for a message, short below this folder."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _at(path: Path, mark: yaml.Mark | None, problem: str) -> ConfigError:
    return ConfigError(f"{shown(path)}{'' if mark is None else f', line {mark.line + 1}'}: {problem}")


def _problems(root: yaml.Node) -> Iterator[tuple[yaml.Node, str]]:
    if not isinstance(root, yaml.MappingNode):
        if root.tag != "tag:yaml.org,2002:null":
            yield root, "expected keys with values, as in seed: 1"
        return
    yield from _of_node(root, [], {})
    for key, value in root.value:
        if key.value == "defaults" and not (
            isinstance(value, yaml.SequenceNode) and all(map(_is_default, value.value))
        ):
            yield value, f"defaults: {_DEFAULTS}"
        if key.value == "hydra" and not isinstance(value, yaml.MappingNode):
            yield value, "hydra: expected keys with values"


def _of_node(
    node: yaml.Node, above: list[yaml.Node], sizes: dict[int, int]
) -> Iterator[tuple[yaml.Node, str]]:
    """The problems of a node, the nodes `above` which lead to it. Fills in the values below each node."""
    if id(node) in sizes:  # an alias
        return
    kind, total = node.tag.rpartition(":")[2], 1
    if any(node is each for each in above):
        yield node, "contains itself"
    elif len(above) >= DEEPEST:
        yield node, f"is nested more than {DEEPEST} levels deep"
    elif isinstance(node, yaml.ScalarNode) and kind not in (*_SCALARS, "merge", "value"):
        yield (
            node,
            f"{node.tag.replace('tag:yaml.org,2002:', '!!')}: expected a plain value, a list or a mapping",
        )
    elif isinstance(node, yaml.ScalarNode) and kind == "int" and len(node.value) > _LONGEST_NUMBER:
        yield node, f"a number of {len(node.value):,} digits"
    elif isinstance(node, yaml.CollectionNode):
        if kind not in ("seq", "map"):
            yield node, f"{node.tag.replace('tag:yaml.org,2002:', '!!')}: expected a list or a mapping"
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if key.tag.rpartition(":")[2] not in ("str", "merge", "value"):
                name = key.value if isinstance(key, yaml.ScalarNode) else "a list or a mapping"
                yield key, f"names must be text: put {name or 'null'} in quotes"
        parts = [part[1] for part in node.value] if isinstance(node, yaml.MappingNode) else node.value
        for part in parts:
            yield from _of_node(part, [*above, node], sizes)
            total += sizes.get(id(part), 1)
        if total > _MOST_VALUES:
            yield node, f"more than {_MOST_VALUES:,} values"
    sizes[id(node)] = total


def _is_default(node: yaml.Node) -> bool:
    """True for an entry of `defaults` as Hydra takes them: a name, or one group with names or null."""
    if isinstance(node, yaml.ScalarNode):
        return bool(node.tag.endswith(":str"))
    if not (isinstance(node, yaml.MappingNode) and len(node.value) == 1):
        return False
    names = node.value[0][1]
    listed = names.value if isinstance(names, yaml.SequenceNode) else [names]
    return all(isinstance(each, yaml.ScalarNode) and each.tag.endswith((":str", ":null")) for each in listed)
