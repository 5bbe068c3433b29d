"""Names inside a run folder: the contract between what writes a run and what reads one.

Nothing heavy is imported here, so that tools which merely look at runs start at once.
"""

from __future__ import annotations

import difflib
import os
import re
import secrets
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

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
JOURNAL = "journal.md"
REF_PREFIX = "refs/runs/"

_LONGEST_ID = 255  # characters; no file system has longer names
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


def job_run(folder: Path, job: Mapping[str, Any]) -> Path | None:
    """The folder of the run of a job; None if there is none yet.

    `job` is an entry of the index of the sweep in `folder`, wherever that has been moved to with its runs.
    """
    return None if job["run_dir"] is None else Path(os.path.normpath(folder / job["run_dir"]))


def find_run(text: str, runs_dir: Path) -> Path:
    """The folder of the run that `text` names: a folder, an id, a unique part of an id, or its git ref.

    Raises ConfigError in a line if there is none, or more than one.
    """
    folder, runs_dir = _expanded(text), _expanded(str(runs_dir))
    if _is_file(folder / RECORD):
        return folder.absolute()
    wanted = text.removeprefix(REF_PREFIX).strip("/")
    there = runs_dir.glob(f"*/*/{RECORD}") if _is_dir(runs_dir) else ()
    known = {record.parent.name: record.parent for record in there}
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
    raise ConfigError(f"run={text}: {_why_none(folder, runs_dir)}{_instead(wanted, known)}")


def _expanded(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError:  # ~somebody, whom this machine does not know
        return Path(text)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # longer than any name of a file
        return False


def _is_dir(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False


def _why_none(folder: Path, runs_dir: Path) -> str:
    if _is_file(folder):
        return "is a file, and no run folder"
    if _is_dir(folder):
        return f"is a folder without {RECORD}, and no run folder"
    return f"no such run under {runs_dir}" if _is_dir(runs_dir) else f"there is no folder runs_dir={runs_dir}"


def _instead(wanted: str, known: Collection[str]) -> str:
    """What was probably meant: the id that is nearest, compared as a whole or by its last part."""
    ends = {name[-len(wanted) :]: name for name in sorted(known)} if wanted else {}
    near = difflib.get_close_matches(wanted[:_LONGEST_ID], [*known, *ends], n=1, cutoff=0.75)
    if near:
        return f"; did you mean {ends.get(near[0], near[0])}?"
    return (
        f"; the newest is {max(known)}" if known else "; expected a run's folder, or its id or a part of it"
    )
