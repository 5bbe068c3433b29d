"""Names inside a run folder: the contract between what writes a run and what reads one.

Nothing heavy is imported here, so that tools which merely look at runs start at once.
"""

from __future__ import annotations

import re
import secrets
import time
from pathlib import Path

from rltemplate.types import ConfigError

CONFIG = "config.yaml"
RECORD = "record.json"
METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
VIDEOS = "videos"
TENSORBOARD = "tensorboard"
TRACE = "trace.jsonl"
WANDB = "wandb"
SWEEPS = "sweeps"
SWEEP_INDEX = "sweep.json"
LOCK = ".lock"
REF_PREFIX = "refs/runs/"

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


def safe_name(text: str) -> str:
    """`text` with every character that a folder name or a git ref could choke on replaced by `-`."""
    return _UNSAFE.sub("-", text).strip("-.") or "unnamed"


def new_id(label: str) -> str:
    """An id such as `20261121-093015-seed3-9f2c41`: sorts by time, unique under concurrency.

    The random part comes from the operating system, so no training stream is touched.
    """
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{safe_name(label)}-{secrets.token_hex(3)}"


def video_path(run_dir: Path, env_steps: int) -> Path:
    """Where the video taken after `env_steps` environment steps lies."""
    return run_dir / VIDEOS / f"step_{env_steps}.mp4"


def checkpoint_path(run_dir: Path, env_steps: int) -> Path:
    """Where the checkpoint taken after `env_steps` environment steps lies."""
    return run_dir / CHECKPOINTS / f"step_{env_steps}.pt"


def find_run(text: str, runs_dir: Path) -> Path:
    """The folder of the run that `text` names: a folder, an id, a unique part of an id, or its git ref.

    Raises ConfigError in a line if there is none, or more than one.
    """
    folder = Path(text).expanduser()
    if (folder / RECORD).is_file():
        return folder.absolute()
    wanted = text.removeprefix(REF_PREFIX).strip("/")
    known = {record.parent.name: record.parent for record in runs_dir.expanduser().glob(f"*/*/{RECORD}")}
    if wanted in known:
        return known[wanted].absolute()
    matches = sorted(name for name in known if wanted and wanted in name)
    if len(matches) == 1:
        return known[matches[0]].absolute()
    if matches:
        last = ", ".join(matches[-3:])
        raise ConfigError(
            f"run={text}: in the ids of {len(matches)} runs, the last are {last}; use more of it"
        )
    newest = f"; the newest is {max(known)}" if known else ""
    raise ConfigError(f"run={text}: no such run under {runs_dir}{newest}")
