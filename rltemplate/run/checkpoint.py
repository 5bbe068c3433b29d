"""Checkpoints: whole or absent, and loading one never executes code from it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rltemplate.run import paths
from rltemplate.types import ConfigError


def save_checkpoint(run_dir: Path, env_steps: int, state: Mapping[str, Any], keep: int) -> Path:
    """Write `state` beside the earlier checkpoints, which are removed down to the newest `keep`.

    Written under another name, flushed to the disk and renamed, so that a reader finds a whole file or none.
    """
    import torch

    path = paths.checkpoint_path(run_dir, env_steps)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        torch.save(dict(state), file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    for old in list_checkpoints(run_dir)[:-keep]:
        old.unlink()
    return path


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Checkpoints of a run, the oldest first."""
    found = (run_dir / paths.CHECKPOINTS).glob("step_*.pt")
    return sorted(found, key=lambda path: int(path.stem.removeprefix("step_")))


def load_checkpoint(run_dir: Path) -> dict[str, Any]:
    """The newest checkpoint of a run, on the CPU; only tensors and plain values are accepted."""
    import torch

    checkpoints = list_checkpoints(run_dir)
    if not checkpoints:
        raise ConfigError(f"{run_dir} has no checkpoint yet")
    state = torch.load(checkpoints[-1], map_location="cpu", weights_only=True)
    assert isinstance(state, dict)
    return state
