"""Names inside a run folder, for the code that writes a run and the code that reads one.

Nothing heavy is imported here, so that tools that only read runs start quickly.
"""

from __future__ import annotations

import re
import secrets
import time
from pathlib import Path

from runlab import PROJECT as PROJECT

CONFIG = "config.yaml"
RECORD = "record.json"
METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
VIDEOS = "videos"
TENSORBOARD = "tensorboard"
TRACE = "trace.jsonl"
OLD_TRACE = "trace.old.jsonl"  # with lines missing or damaged, before a resume
WANDB = "wandb"
SWEEPS = "sweeps"
SWEEP_INDEX = "sweep.json"
SEARCH = "search.json"
LOCK = ".lock"
REF_PREFIX = "refs/runs/"

_STEP = "step_"  # the start of names of videos and checkpoints
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


def safe_name(text: str) -> str:
    """`text` with `-` in the place of characters that a folder name or a git ref might not take."""
    return _UNSAFE.sub("-", text).strip("-.") or "unnamed"


def new_id(label: str) -> str:
    """An id such as `20261121-093015-seed3-9f2c41`: sorts by time, unique under concurrency.

    The random part comes from the operating system, so no training stream is touched.
    """
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{safe_name(label)}-{secrets.token_hex(3)}"


def video_path(run_dir: Path, env_steps: int) -> Path:
    return run_dir / VIDEOS / f"{_STEP}{env_steps}.mp4"


def checkpoint_path(run_dir: Path, env_steps: int) -> Path:
    return run_dir / CHECKPOINTS / f"{_STEP}{env_steps}.pt"


def by_steps(folder: Path, suffix: str) -> dict[int, Path]:
    """Videos or checkpoints by their environment steps, the fewest first."""
    # A name such as step_best.json is a file of the user.
    named = (path for path in folder.glob(f"{_STEP}*{suffix}") if path.stem[len(_STEP) :].isdecimal())
    # Opening a FIFO would wait for ever. A folder is a checkpoint that cannot be read, and is named so.
    return dict(sorted((steps_of(path), path) for path in named if not path.is_fifo()))


def steps_of(path: Path) -> int:
    """Environment steps in the name of a video or a checkpoint."""
    return int(path.stem.removeprefix(_STEP))
