"""Run folders and what is in them, for those who look at runs that others have made, moved or damaged."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from rltemplate.config.recorded_keys import with_present_keys
from rltemplate.run import paths
from rltemplate.types import ConfigError


def find_run_dirs(pattern: str) -> list[Path]:
    """The run folders that `runs=pattern` stands for, or several with commas. Raises ConfigError for none."""
    parts = [part for part in pattern.split(",") if part] or [pattern]
    return list(dict.fromkeys(run_dir for part in parts for run_dir in _run_dirs(part)))


def _run_dirs(pattern: str) -> list[Path]:
    """Those of one pattern, sorted: of folders, or of the ids of runs."""
    found = _matching(pattern, paths.RECORD) or _matching(f"runs/*/{pattern}", paths.RECORD)
    if not found:
        deeper = next((deep for deep in ("*", "*/*") if _matching(pattern, f"{deep}/{paths.RECORD}")), None)
        hint = f"; did you mean runs='{Path(pattern) / deeper}'?" if deeper else ""
        raise ConfigError(f"runs={pattern}: no run folders there{hint}")
    return [path.parent for path in found]


def _matching(pattern: str, below: str) -> list[Path]:
    try:
        wanted = Path(pattern).expanduser()
        root = Path(wanted.anchor or ".")
        return sorted(root.glob(f"{wanted.relative_to(root)}/{below}"))
    except ValueError as error:
        raise ConfigError(f"runs={pattern}: is no pattern of folders, {str(error).lower()}") from None
    except (OSError, RuntimeError):  # longer than any name, or ~somebody whom this machine does not know
        return []


def read_config(run_dir: Path) -> tuple[str, dict[str, Any]]:
    """The text of the run's `config.yaml`, and what it says under present keys. Raises ConfigError."""
    name = f"{run_dir.name}: {paths.CONFIG}"
    try:
        text = (run_dir / paths.CONFIG).read_text(encoding="utf-8")
        values = _parsed(text)
    except FileNotFoundError:
        raise ConfigError(f"{run_dir.name}: has no {paths.CONFIG}") from None
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ConfigError(f"{name} cannot be read, {line}{error.problem or error.context}") from None
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{name} cannot be read, {_reason(error)}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{name} holds no configuration")
    return text, with_present_keys(values)


def _parsed(text: str) -> Any:
    """Ten times as fast where PyYAML was built with libyaml, as its wheels are."""
    try:
        return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError:
        return yaml.safe_load(text)  # which says better what is wrong, and where


def read_metrics(run_dir: Path) -> Iterator[dict[str, Any]]:
    """The rows of the run's `metrics.jsonl`. Raises ConfigError if it cannot be read."""
    name = f"{run_dir.name}: {paths.METRICS}"
    try:
        lines = (run_dir / paths.METRICS).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise ConfigError(f"{run_dir.name}: has no {paths.METRICS}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name} cannot be read, {_reason(error)}") from None
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or not all(_is_number(value) for value in row.values()):
            where = f"{run_dir.name}: line {number} of {paths.METRICS}"
            raise ConfigError(f"{where} is damaged; expected names with numbers")
        yield row


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def value_of(values: Mapping[str, Any], key: str, where: str) -> Any:
    """The value of a dotted key of a record or a configuration. Raises ConfigError if it has none."""
    value: Any = values
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise ConfigError(f"{where} has no {key}")
        value = value[part]
    return value


def nearest_key(wrong: str, values: Mapping[str, Any]) -> str | None:
    """The dotted key with a single value that is most like `wrong`, or has the same last part."""
    keys = [key for key, _ in leaves(values)]
    same_end = [key for key in keys if key.rpartition(".")[2] == wrong.rpartition(".")[2]]
    return next(iter([*same_end, *difflib.get_close_matches(wrong[:100], keys, n=1)]), None)


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Single values with their dotted keys."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _reason(error: BaseException) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "it is no text"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return (error.strerror if isinstance(error, OSError) else None) or str(error).partition("\n")[0]
