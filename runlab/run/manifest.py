"""Manifests of checkpoints, which are read without torch: the configuration, and the digest of each file.

A manifest is written last and makes its files a checkpoint. Its first line is the digest of the second.
"""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import xxhash
from msgspec import Meta

from runlab.config.texts import choose
from runlab.errors import ConfigError
from runlab.run import paths
from runlab.run.validation import parse_json, read_bytes, typed

VERSION = 6
LAST = "last"  # in `checkpoint=`: the newest


class Damaged(ConfigError):
    """A file of a checkpoint differs from the one that was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The second line of a manifest: digests of the checkpoint's files, and the configuration of its run.

    `eval_return` is the return by which it became the best checkpoint.
    """

    version: int = VERSION
    state: str
    chunks: dict[Annotated[str, Meta(pattern=r"^experience_\d{1,18}_\d{1,18}\.pt$")], str]
    config: dict[str, Any]
    eval_return: float | None = None

    def sealed(self) -> list[bytes]:
        """The content of the file."""
        text = json.dumps(asdict(self)).encode()
        return [xxhash.xxh3_128_hexdigest(text).encode(), b"\n", text]


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Finished checkpoints of a run, the oldest first: the files of their states."""
    finished = paths.by_steps(run_dir / paths.CHECKPOINTS, ".json")
    return [paths.checkpoint_path(run_dir, steps) for steps in finished]


def best_checkpoint(run_dir: Path) -> tuple[Path | None, float]:
    """The checkpoint with the highest `eval_return`, the first of several such, and this return."""
    best: tuple[Path | None, float] = None, -math.inf
    for path in list_checkpoints(run_dir):
        with contextlib.suppress(ConfigError):  # a damaged one is not the best
            if (value := read_manifest(path).eval_return) is not None and value > best[1]:
                best = path, value
    return best


def chosen_checkpoints(run_dir: Path, wanted: str, *more: str) -> list[Path]:
    """The checkpoints that `checkpoint=` names, the oldest first; each name in `more` names all of them."""
    if not (checkpoints := list_checkpoints(run_dir)):
        raise ConfigError(f"{run_dir} has no checkpoint yet")
    best, _ = best_checkpoint(run_dir)
    choices = {LAST: checkpoints[-1:], "best": [best] if best else [], **dict.fromkeys(more, checkpoints)}
    choices |= {str(paths.steps_of(path)): [path] for path in checkpoints}
    if wanted not in choices:
        raise ConfigError(f"checkpoint={wanted}: {choose(wanted, choices)}")
    if not choices[wanted]:
        raise ConfigError(
            f"checkpoint=best: {run_dir.name} has kept none; it needs keep_best=true in training"
        )
    return choices[wanted]


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest of a checkpoint: `Damaged` if it is not whole, else as `read_bytes` raises."""
    path = checkpoint.with_suffix(".json")
    digest, _, text = read_bytes(path).partition(b"\n")
    if digest != xxhash.xxh3_128_hexdigest(text).encode():
        raise Damaged(f"{path} is damaged")
    values = typed(parse_json(text, str(path), finite=False), dict[str, Any], str(path))
    if values.get("version") != VERSION:
        raise ConfigError(f"{path} was made by another version of this code, which can read it")
    return typed(values, Manifest, str(path))
