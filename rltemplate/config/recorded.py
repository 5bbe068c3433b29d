"""Recorded configurations as they are, read without OmegaConf."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from rltemplate.types import ConfigError


def raw_config(path: Path) -> dict[str, Any]:
    """The values of a recorded `config.yaml`, nested. Raises ConfigError in a line if it cannot be read."""
    try:
        # libyaml, which PyYAML's wheels have, is ten times as fast.
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=loader)
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict) or not isinstance(values.get("algo"), dict):
        raise ConfigError(f"{path} is damaged: it holds no configuration")
    return values
