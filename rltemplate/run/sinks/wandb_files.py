"""What W&B's client left on disk of a run: one folder for each process that worked on it.

A folder holds the client's log, `run-ID.wandb`, from which everything can be uploaded later. This reads
such logs, to find out where a run that goes on has to begin. Used in the helper process of `wandb_sink`
alone, because it imports the client.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_HEADER = 7  # bytes at the beginning of a log, and in front of each piece of a record
_MAGIC = b":W&B\xe1\xbe\x00"  # with the version, 0
_BLOCK = 32768
_WHOLE, _LAST = 1, 4  # kinds of pieces that end a record
_FIRST, _MIDDLE = 2, 3


@dataclass
class Part:
    """What one process logged of a run. `videos`: W&B's own step of each, by its `env_steps`."""

    log: Path
    started: float = 0.0  # seconds since 1970
    last_row: int = -1  # `env_steps`
    last_step: int = -1  # W&B's own
    videos: dict[int, int] = field(default_factory=dict)

    @property
    def uploaded(self) -> bool:
        """Whether this is marked as being with W&B; `wandb sync` then leaves it out."""
        return self._mark.exists()

    def mark_uploaded(self) -> None:
        """Mark this as being with W&B, in the way of `wandb sync`."""
        with contextlib.suppress(OSError):  # the folder may be gone
            self._mark.touch()

    @property
    def _mark(self) -> Path:
        return self.log.with_name(self.log.name + ".synced")


def parts_of(folder: Path, run_id: str) -> list[Part]:
    """The parts of a run under W&B's `folder` that hold anything, in the order in which they were made.

    A torn end, as the death of the machine leaves it, is cut off: `wandb sync` would stop there, and leave
    out later parts. So no client may be at work on this run any more.
    """
    found = (_read(log) for log in folder.glob(f"*run-*-{run_id}/run-{run_id}.wandb"))
    # Not by the clock, which may have gone backwards: each part goes on where the one before had stopped.
    return sorted((part for part in found if part is not None), key=lambda part: part.last_step)


def upload_command(parts: Sequence[Part]) -> str:
    """What the user types to upload `parts`, which are in the order in which they were made."""
    # Parts that began online are left out without being asked for.
    options = " --include-online" if any(p.log.parent.name.startswith("run-") for p in parts) else ""
    folders = [shlex.quote(str(part.log.parent)) for part in parts]
    starts = [part.started for part in parts]
    if starts == sorted(starts):
        return f"wandb sync{options} {' '.join(folders)}"
    # One call takes them in the order of the clock, which went backwards between them.
    return " && ".join(f"wandb sync{options} {folder}" for folder in folders)


def _read(log: Path) -> Part | None:
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    part, data, whole = Part(log), log.read_bytes(), 0
    for content, end in _records(data):
        record, whole = Record.FromString(content), end
        if record.WhichOneof("record_type") == "run" and not part.started:
            part.started = record.run.start_time.ToMicroseconds() / 1e6
        elif record.WhichOneof("record_type") == "history":
            _take(part, record.history.item)
    if 0 < whole < len(data):
        with log.open("r+b") as file:
            file.truncate(whole)
    return part if part.started and part.last_step >= 0 else None


def _take(part: Part, items: Sequence[Any]) -> None:
    # A name is in one of two fields; of a video there are several items, `video.path` and others.
    values = {item.key or ".".join(item.nested_key): item.value_json for item in items}
    step = json.loads(values.get("_step", "-1"))
    part.last_step = max(part.last_step, step)
    if "env_steps" in values:
        at = json.loads(values["env_steps"])
        if "wall_time_s" in values:
            part.last_row = max(part.last_row, at)
        if "video.path" in values:
            part.videos[at] = step


def _records(data: bytes) -> Iterator[tuple[bytes, int]]:
    """The records of a log and where each ends, up to the first that is not whole.

    The form is LevelDB's: blocks of 32 KiB, in them pieces of records, each behind a checksum (4 bytes), its
    length (2) and its kind (1). The checksum is the CRC-32 of zlib over kind and content.
    """
    if data[:_HEADER] != _MAGIC:
        return
    at, pieces = _HEADER, b""
    while at + _HEADER <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER:
            at += left  # filled with zeros
            continue
        check, length, kind = struct.unpack_from("<IHB", data, at)
        end = at + _HEADER + length
        begins, pending = kind in (_WHOLE, _FIRST), bool(pieces)
        if kind not in (_WHOLE, _FIRST, _MIDDLE, _LAST) or end > len(data) or begins == pending:
            return
        if zlib.crc32(data[at + _HEADER - 1 : end]) != check:
            return
        pieces += data[at + _HEADER : end]
        at = end
        if kind in (_WHOLE, _LAST):
            yield pieces, at
            pieces = b""
