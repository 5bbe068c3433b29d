"""Checkpoints: whole or absent, compared with their digests, and loaded without executing code.

`step_<env_steps>.pt` holds the state. The manifest `step_<env_steps>.json` is written last and makes it a
checkpoint: format, configuration, and size and digest of every file that belongs to it.

A replay buffer may be large and changes at one end only. It is kept in chunks,
`experience_<first>_<last>.pt`, each with the transitions since the checkpoint before; a manifest names the
chunks that it needs.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import xxhash

from rltemplate.run import paths
from rltemplate.types import ConfigError, Experience

if TYPE_CHECKING:
    from torch import Tensor

FORMAT, VERSION = "rltemplate-checkpoint", 4
# Bytes of earlier chunks that are read again at each save, in turn.
_READ_AGAIN = 1 << 27
_STATE = re.compile(r"step_(\d+)\.pt")
_CHUNK = re.compile(r"experience_(\d+)_(\d+)\.pt")
# How file systems say that a folder cannot be flushed by itself.
_NO_FLUSH = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)


class Damaged(ConfigError):
    """A file of a checkpoint is not what was written."""


class Checkpoint(NamedTuple):
    """A checkpoint that was found to be whole."""

    path: Path  # of the state
    state: dict[str, Any]
    config: dict[str, Any]  # of the run that made it
    chunks: dict[str, Any]  # replay: size and digest of each file, oldest first


class Checkpoints:
    """Writes the checkpoints of one run, one after another."""

    def __init__(
        self, run_dir: Path, config: Mapping[str, Any], keep: int, since: Checkpoint | None = None
    ) -> None:
        """The newest `keep` remain. `since` is the checkpoint from which the run was resumed."""
        self._run_dir = run_dir
        self._config = dict(config)
        self._keep = keep
        self._turn = 0  # the chunk that is read again next
        self._chunks = {} if since is None else dict(since.chunks)

    def save(
        self, env_steps: int, state: Mapping[str, Any], experience: Callable[[int], Experience | None]
    ) -> Path:
        """Write `state`, and the transitions that `experience` gives from a number on.

        Each file is written under another name, flushed to the disk and renamed; older checkpoints go only
        when the new one has been read back. Raises OSError if the disk does not take it: then the earlier
        checkpoints are as they were.
        """
        path = paths.checkpoint_path(self._run_dir, env_steps)
        if path in list_checkpoints(self._run_dir) and not _problems(path):
            return path
        folder = path.parent
        folder.mkdir(parents=True, exist_ok=True)
        try:
            chunks = self._write_chunk(folder, experience)
            files = chunks | {path.name: _write(path, lambda file: _save(file, state))}
            manifest = {"format": FORMAT, "version": VERSION, "env_steps": env_steps}
            manifest |= {"files": files, "config": self._config}
            _write(path.with_suffix(".json"), lambda file: file.write(_sealed(manifest)))
            new = set(files) - set(self._chunks)
            if problems := _problems(path, deeply=new):
                path.with_suffix(".json").unlink()
                raise OSError(None, problems[0])
        except BaseException:
            prune_checkpoints(self._run_dir)
            raise
        self._chunks = chunks
        prune_checkpoints(self._run_dir, keep=self._keep)
        return path

    def _write_chunk(self, folder: Path, experience: Callable[[int], Experience | None]) -> dict[str, Any]:
        """The chunks that a checkpoint now needs, the last of them just written."""
        known, names = dict(self._chunks), list(self._chunks)
        again: set[str] = set()
        for name in (*names[self._turn :], *names[: self._turn]):
            if sum(known[each]["bytes"] for each in again) < _READ_AGAIN:
                again.add(name)
        self._turn = (self._turn + len(again)) % max(1, len(names))
        if any(_damage(folder / name, entry, deeply=name in again) for name, entry in known.items()):
            known = {}  # all transitions once more: a new checkpoint must not rest on a damaged file
        first = max((_range(name)[1] for name in known), default=0)
        came = experience(first)
        if came is None:
            return {}
        chunks = {n: entry for n, entry in known.items() if _range(n)[1] > came.last - came.capacity}
        if came.last > came.first:
            path = folder / f"experience_{came.first}_{came.last}.pt"
            chunks[path.name] = _write(path, lambda file: _save(file, came.rows))
        return chunks


class _Digesting:
    """A file for torch to write to: takes the digest on the way, and keeps an error for later.

    An exception inside of torch's writer would come out as another one, if at all.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._digest = xxhash.xxh3_128()
        self._size = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write all of `data`, or remember why not."""
        if self.error is None:
            try:
                view = memoryview(data).cast("B")
                while view:  # one call takes no more than 2 GB
                    view = view[self._file.write(view) :]
            except OSError as error:
                self.error = error
            self._digest.update(data)
            self._size += len(data)
        return len(data)

    def flush(self) -> None:
        """Nothing: the file is flushed once, at its end."""

    def entry(self) -> dict[str, Any]:
        """Size and digest of what was written."""
        if self.error is not None:
            raise self.error
        return {"bytes": self._size, "xxh3_128": self._digest.hexdigest()}


def _write(path: Path, write: Callable[[Any], object]) -> dict[str, Any]:
    """Put a file in place, whole and on the disk; its size and digest."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb", buffering=0) as raw:
        file = _Digesting(raw)
        write(file)
        entry = file.entry()
        os.fsync(raw.fileno())
    partial.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the name too
    except OSError as error:
        if error.errno not in _NO_FLUSH:
            raise
    finally:
        os.close(folder)
    return entry


def _save(file: Any, content: Mapping[str, Any]) -> None:
    import torch

    torch.save(dict(content), file)


def _sealed(manifest: Mapping[str, Any]) -> bytes:
    """A manifest as JSON, with the digest of itself as its last entry."""
    text = json.dumps(manifest, indent=1)
    digest = xxhash.xxh3_128_hexdigest(text.encode())
    return f'{text[:-2]},\n "digest": "{digest}"\n}}\n'.encode()


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Checkpoints of a run that were finished, the oldest first: the files of their states."""
    found = (run_dir / paths.CHECKPOINTS).glob("step_*.json")
    states = (path.with_suffix(".pt") for path in found)
    return sorted((path for path in states if _STATE.fullmatch(path.name)), key=steps_of)


def steps_of(checkpoint: Path) -> int:
    """Number of environment steps after which a checkpoint was taken."""
    return int(checkpoint.stem.removeprefix("step_"))


def _range(chunk: str) -> tuple[int, int]:
    """First and last (excluded) transition of a chunk."""
    _, first, last = chunk.removesuffix(".pt").split("_")
    return int(first), int(last)


def prune_checkpoints(run_dir: Path, keep: int | None = None, newest: int | None = None) -> None:
    """Remove all checkpoints but the newest `keep`, those beyond `newest` environment steps, and leftovers.

    Leftovers are files of ours that belong to no checkpoint, such as those of a write that was cut off.
    """
    folder, needed = run_dir / paths.CHECKPOINTS, set[str]()
    checkpoints = list_checkpoints(run_dir)
    for checkpoint in checkpoints:
        outdated = keep is not None and checkpoint not in checkpoints[-keep:]
        if outdated or (newest is not None and steps_of(checkpoint) > newest):
            checkpoint.with_suffix(".json").unlink()
            continue
        try:
            needed |= {checkpoint.name, *_read_manifest(checkpoint)["files"]}
        except ConfigError:  # a damaged one may need any chunk, and a copy of it may turn up
            needed |= {checkpoint.name, *(path.name for path in folder.glob("experience_*.pt"))}
    for path in folder.glob("*"):
        ours = _STATE.fullmatch(path.name) or _CHUNK.fullmatch(path.name) or path.suffix == ".partial"
        if ours and path.name not in needed:
            path.unlink(missing_ok=True)


def _read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint. Raises ConfigError in a line if it is missing or damaged."""
    try:
        text = path.with_suffix(".json").read_bytes()
    except FileNotFoundError:
        what = "was not finished, or was made by an earlier version" if path.exists() else "is gone"
        raise Damaged(f"{path} {what}") from None
    except OSError as error:
        raise ConfigError(f"{path.with_suffix('.json')} cannot be read: {error.strerror}") from None
    try:
        manifest = json.loads(text)
        del manifest["digest"]
        version = manifest["version"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise Damaged(f"{path.with_suffix('.json')} is damaged") from None
    if _sealed(manifest) != text or manifest.get("format") != FORMAT:
        raise Damaged(f"{path.with_suffix('.json')} is damaged")
    if version != VERSION:
        raise ConfigError(f"{path} has format {version}; this version of the code reads format {VERSION}")
    assert isinstance(manifest, dict)
    return manifest


def _damage(path: Path, entry: Mapping[str, Any], deeply: bool = True) -> str | None:
    """The damage of a file in a line, or None; `deeply` reads all of it. ConfigError if it cannot be read."""
    try:
        size = path.stat().st_size
        if size != entry["bytes"]:
            return f"{path} is damaged: {size:,} bytes instead of {entry['bytes']:,}"
        if deeply:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, xxhash.xxh3_128)
            if digest.hexdigest() != entry["xxh3_128"]:
                return f"{path} is damaged: its digest is not the one it was written with"
    except FileNotFoundError:
        return f"{path} is gone"
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    return None


def _problems(path: Path, deeply: set[str] | None = None) -> list[str]:
    """The damages of a checkpoint. Every file is read, or only the files named by `deeply`."""
    try:
        files = _read_manifest(path)["files"]
    except ConfigError as error:
        return [str(error)]
    found = (_damage(path.parent / n, e, deeply is None or n in deeply) for n, e in files.items())
    return [problem for problem in found if problem is not None]


def load_checkpoint(path: Path, experience: bool = True) -> Checkpoint:
    """A checkpoint, with its tensors on the CPU, after every file of it was compared with its digest.

    Without `experience` the chunks are not looked at. Only tensors and plain values are accepted. Raises
    Damaged if it is not whole, and ConfigError if it cannot be read for another reason.
    """
    import torch

    manifest = _read_manifest(path)
    names = set(manifest["files"]) if experience else {path.name}
    for name in sorted(names):
        if (problem := _damage(path.with_name(name), manifest["files"][name])) is not None:
            raise Damaged(problem)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch has no error of its own for content that it does not accept
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{path} cannot be read: {first}") from error
    chunks = {name: entry for name, entry in manifest["files"].items() if name != path.name}
    return Checkpoint(path, state, manifest["config"], chunks)


def newest_checkpoint(
    run_dir: Path, passed_over: Callable[[str], None], experience: bool = True
) -> Checkpoint | None:
    """The newest whole checkpoint; None if none was ever finished.

    `passed_over` gets a line about each newer one that is damaged. Raises ConfigError if all are, or if one
    cannot be read for another reason. Without `experience` chunks may be damaged.
    """
    checkpoints = list_checkpoints(run_dir)
    problems = []
    for path in reversed(checkpoints):
        try:
            return load_checkpoint(path, experience)
        except Damaged as error:
            problems.append(str(error))
            if path != checkpoints[0]:
                passed_over(str(error))
    if problems:
        raise ConfigError(f"no checkpoint of {run_dir} is whole: {problems[0]}")
    return None


def load_experience(checkpoint: Checkpoint, first: int, last: int) -> Iterator[dict[str, Tensor]]:
    """Transitions `first` to `last` (excluded) in parts, oldest first, each read when it is asked for.

    Raises ConfigError at once if some transitions are not there.
    """
    wanted: list[tuple[Path, slice]] = []
    reached = first
    for name in checkpoint.chunks:
        begin, end = _range(name)
        if begin <= reached < min(end, last):
            wanted.append((checkpoint.path.with_name(name), slice(reached - begin, min(end, last) - begin)))
            reached = min(end, last)
    if reached < last:
        raise ConfigError(f"{checkpoint.path}: transitions {reached:,} to {last:,} are gone")
    return _parts(wanted)


def _parts(wanted: Iterable[tuple[Path, slice]]) -> Iterator[dict[str, Tensor]]:
    import torch

    for path, taken in wanted:
        # Mapped, not read: it is copied once, to where it is wanted.
        chunk = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        yield {key: value[taken] for key, value in chunk.items()}
