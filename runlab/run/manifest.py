"""Manifests of checkpoints, which are read without torch: the configuration, and the digest of each file.

A manifest is written last and makes its files a checkpoint. Its first line is the digest of the second.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import xxhash
from msgspec import Meta

from runlab.errors import ConfigError
from runlab.run import paths
from runlab.run.validation import parse_json, read_bytes, typed

VERSION = 6


class Damaged(ConfigError):
    """A file of a checkpoint differs from the one that was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The second line of a manifest: digests of the checkpoint's files, and the configuration of its run.

    `state` has two digests, with a space between them, while the state of the same step is written again.
    """

    version: int = VERSION
    state: str
    chunks: dict[Annotated[str, Meta(pattern=r"^experience_\d{1,18}_\d{1,18}\.pt$")], str]
    config: dict[str, Any]

    def sealed(self) -> list[bytes]:
        """The content of the file."""
        text = json.dumps(asdict(self)).encode()
        return [xxhash.xxh3_128_hexdigest(text).encode(), b"\n", text]


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Finished checkpoints of a run, the oldest first: the files of their states."""
    finished = paths.by_steps(run_dir / paths.CHECKPOINTS, ".json")
    return [paths.checkpoint_path(run_dir, steps) for steps in finished]


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
