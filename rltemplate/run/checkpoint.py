"""Checkpoints: whole or absent, and loading one never executes code from it.

What an algorithm holds to learn from later may be large and changes at one end only. It is therefore kept in
chunks beside the checkpoints, each holding what came in since the chunk before; a checkpoint together with
the chunks up to its own step is everything that a run needs to go on.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rltemplate.run import paths
from rltemplate.types import ConfigError, Experience

if TYPE_CHECKING:
    from torch import Tensor


def save_checkpoint(
    run_dir: Path,
    env_steps: int,
    state: Mapping[str, Any],
    keep: int,
    experience: Experience | None = None,
) -> Path:
    """Write `state` beside the earlier checkpoints, which are removed down to the newest `keep`.

    `experience` is what came in since the checkpoint before. Each file is written under another name, flushed
    to the disk and renamed, so that a reader finds a whole file or none.
    """
    path = paths.checkpoint_path(run_dir, env_steps)
    path.parent.mkdir(parents=True, exist_ok=True)
    if experience is not None:
        _write(path.parent / f"experience_{experience.first}_{experience.last}.pt", dict(experience.rows))
    _write(path, dict(state))
    for old in list_checkpoints(run_dir)[:-keep]:
        old.unlink()
    if experience is not None:
        oldest = _env_steps(list_checkpoints(run_dir)[0])
        for first, last in _chunks(run_dir):
            if last <= oldest - experience.capacity:
                (path.parent / f"experience_{first}_{last}.pt").unlink()
    return path


def _write(path: Path, content: Mapping[str, Any]) -> None:
    import torch

    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Checkpoints of a run, the oldest first."""
    found = (run_dir / paths.CHECKPOINTS).glob("step_*.pt")
    return sorted(found, key=_env_steps)


def _env_steps(checkpoint: Path) -> int:
    return int(checkpoint.stem.removeprefix("step_"))


def _chunks(run_dir: Path) -> list[tuple[int, int]]:
    """First and last (excluded) transition of each chunk, in order."""
    found = (run_dir / paths.CHECKPOINTS).glob("experience_*_*.pt")
    names = (path.stem.split("_") for path in found)
    return sorted((int(first), int(last)) for _, first, last in names)


def load_checkpoint(run_dir: Path, path: Path | None = None) -> dict[str, Any]:
    """A checkpoint of a run, the newest if none is named, on the CPU.

    Only tensors and plain values are accepted. Raises ConfigError if there is none or it cannot be read.
    """
    checkpoints = list_checkpoints(run_dir)
    if path is None and not checkpoints:
        raise ConfigError(f"{run_dir} has no checkpoint yet")
    return _read(path or checkpoints[-1])


def _read(path: Path) -> dict[str, Any]:
    import torch

    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ConfigError(f"{path} is gone") from None
    except Exception as error:  # torch has no error of its own for a file that is damaged
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{path} cannot be read: {first}") from error
    assert isinstance(state, dict)
    return state


def load_experience(run_dir: Path, first: int, last: int) -> dict[str, Tensor]:
    """Transitions `first` to `last` (excluded). Raises ConfigError if some of them are not there."""
    import torch

    folder = run_dir / paths.CHECKPOINTS
    parts: list[dict[str, Tensor]] = []
    reached = first
    for begin, end in _chunks(run_dir):
        if begin <= reached < min(end, last):
            rows = _read(folder / f"experience_{begin}_{end}.pt")
            taken = slice(reached - begin, min(end, last) - begin)
            parts.append({name: value[taken] for name, value in rows.items()})
            reached = min(end, last)
    if reached < last:
        raise ConfigError(f"{folder}: transitions {reached:,} to {last:,} are gone")
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]} if parts else {}
