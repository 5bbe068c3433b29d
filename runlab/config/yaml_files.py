"""YAML, read so that each mistake is a line. Files of conf/ and folders like it are named with their line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from runlab.config.texts import first_line, from_here
from runlab.errors import ConfigError

DEEPEST = 20  # levels of nesting; recorded with the keys around them, they are below MAX_DEPTH
MAX_DEPTH = 32  # of what is read back
MAX_DIGITS = 300  # of a whole number: a float can hold its size
_MOST_VALUES = 100_000  # with the repeated ones of aliases, of which a few lines can make billions
_SCALARS = ("null", "bool", "int", "float", "str", "timestamp", "merge", "value")
_DEFAULTS = "expected a list of files, as in '- override /recipe: null'"
# libyaml is ten times as fast, and PyYAML's wheels include it.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def parse(text: str, deepest: int = MAX_DEPTH) -> tuple[yaml.Node | None, Any]:
    """The nodes and the values of a YAML text. All values are plain, and all keys are text.

    Raises `yaml.YAMLError`, mostly with the line, and ValueError for a value that is none, such as a day 99.
    """
    depth = 0
    # The parser of whole documents calls itself for each level, and would overflow the stack.
    for event in yaml.parse(text, Loader=_LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > deepest:
            raise _mistake(event, f"is nested more than {deepest} levels deep")
    loader = _LOADER(text)
    try:
        if (root := loader.get_single_node()) is None:
            return None, None
        _check(root, {})
        return root, loader.construct_document(root)
    finally:
        loader.dispose()


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
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        return ConfigError(f"{from_here(path)}{line}: {error.problem or error.context}")
    return ConfigError(f"{from_here(path)}: {first_line(error)}")


def check_yaml(path: Path) -> None:
    """Raise `ConfigError` for a file that is no YAML, or that Hydra or OmegaConf would stumble over."""
    try:
        root, _ = parse(path.read_bytes().decode("utf-8-sig"), DEEPEST)
        if root is not None:
            _check_form(root)
    except OSError as error:
        raise ConfigError(f"{from_here(path)}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{from_here(path)}, line {line}: is not text in UTF-8") from error
    except (ValueError, yaml.YAMLError) as error:
        raise explained(path, error) from error


def _mistake(part: yaml.Node | yaml.Event, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=part.start_mark)


def _check(node: yaml.Node, sizes: dict[int, int]) -> None:
    """Check a node. Fills in the number of values below each node: 0 until all of them are checked."""
    if id(node) in sizes:  # an alias
        if sizes[id(node)] == 0:
            raise _mistake(node, "contains itself")
        return
    sizes[id(node)], total = 0, 1
    kind, tag = node.tag.rpartition(":")[2], node.tag.replace("tag:yaml.org,2002:", "!!")
    if isinstance(node, yaml.ScalarNode):
        if kind not in _SCALARS:
            raise _mistake(node, f"{tag}: expected a plain value, a list or a mapping")
        if kind == "int" and len(node.value) > MAX_DIGITS:
            raise _mistake(node, f"a number of {len(node.value):,} digits")
    else:
        if kind not in ("seq", "map"):
            raise _mistake(node, f"{tag}: expected a list or a mapping")
        parts = node.value
        if isinstance(node, yaml.MappingNode):
            for key, _ in node.value:
                if key.tag.rpartition(":")[2] not in ("str", "merge", "value"):
                    name = key.value if isinstance(key, yaml.ScalarNode) else "a list or a mapping"
                    raise _mistake(key, f"names must be text: put {name or 'null'} in quotes")
            parts = [value for _, value in node.value]
        for part in parts:
            _check(part, sizes)
            total += sizes[id(part)]
        if total > _MOST_VALUES:
            raise _mistake(node, f"more than {_MOST_VALUES:,} values")
    sizes[id(node)] = total


def _check_form(root: yaml.Node) -> None:
    """Check the keys at the root of a file of conf/."""
    if root.tag == "tag:yaml.org,2002:null":
        return
    if not isinstance(root, yaml.MappingNode):
        raise _mistake(root, "expected keys with values, as in seed: 1")
    for key, value in root.value:
        is_list = isinstance(value, yaml.SequenceNode) and all(map(_is_default, value.value))
        if key.value == "defaults" and not is_list:
            raise _mistake(value, f"defaults: {_DEFAULTS}")
        if key.value == "hydra" and not isinstance(value, yaml.MappingNode):
            raise _mistake(value, "hydra: expected keys with values")


def _is_default(node: yaml.Node) -> bool:
    """True for an entry of `defaults` as Hydra takes them: a name, or one group with names or null."""
    if isinstance(node, yaml.ScalarNode):
        return bool(node.tag.endswith(":str"))
    if not (isinstance(node, yaml.MappingNode) and len(node.value) == 1):
        return False
    names = node.value[0][1]
    listed = names.value if isinstance(names, yaml.SequenceNode) else [names]
    return all(isinstance(each, yaml.ScalarNode) and each.tag.endswith((":str", ":null")) for each in listed)
