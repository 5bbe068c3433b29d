"""Checkpoints: whole or absent, compared with their digests, and loaded without executing code.

`step_<env_steps>.pt` holds the state. The manifest `step_<env_steps>.json` is written last and makes it a
checkpoint: format, configuration, and the digest of every file that belongs to it.

A replay buffer may be large and changes at one end only. It is kept in chunks,
`experience_<first>_<last>.pt`, each with the transitions since the checkpoint before; a manifest names the
chunks that it needs.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import xxhash

from rltemplate.run import paths
from rltemplate.run.lines import replace_file
from rltemplate.types import ConfigError, Experience

if TYPE_CHECKING:
    from torch import Tensor

VERSION = 5
_STATE = re.compile(r"step_(\d+)\.pt")
_CHUNK = re.compile(r"experience_(\d+)_(\d+)\.pt")


class Damaged(ConfigError):
    """A file of a checkpoint is not the one that was written."""


class Checkpoint(NamedTuple):
    """A checkpoint that was found to be whole."""

    path: Path  # of the state
    state: dict[str, Any]
    config: dict[str, Any]  # of the run that made it
    chunks: dict[str, str]  # replay: digest of each file, oldest first


class Checkpoints:
    """Writes the checkpoints of one run, one after another."""

    def __init__(
        self, run_dir: Path, config: Mapping[str, Any], keep: int, since: Checkpoint | None = None
    ) -> None:
        """The newest `keep` remain. `since` is the checkpoint from which the run was resumed."""
        self._run_dir = run_dir
        self._config = dict(config)
        self._keep = keep
        self._chunks = {} if since is None else dict(since.chunks)

    def save(
        self, env_steps: int, state: Mapping[str, Any], experience: Callable[[int], Experience | None]
    ) -> Path:
        """Write `state`, and the transitions that `experience` gives from a number on.

        Each file is flushed to the disk and put in place in one step; older checkpoints go only after that.
        Raises OSError if the disk does not take it: then the earlier checkpoints are as they were.
        """
        path = paths.checkpoint_path(self._run_dir, env_steps)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            chunks = self._write_chunk(path.parent, experience)
            replace_file(path, lambda file: _save(file, state))
            manifest = {"version": VERSION, "files": chunks | {path.name: _digest(path)}}
            sealed = _sealed(manifest | {"config": self._config})
            replace_file(path.with_suffix(".json"), lambda file: file.write(sealed))
        except BaseException:
            prune_checkpoints(self._run_dir)
            raise
        self._chunks = chunks
        prune_checkpoints(self._run_dir, keep=self._keep)
        return path

    def _write_chunk(self, folder: Path, experience: Callable[[int], Experience | None]) -> dict[str, str]:
        """The chunks that a checkpoint now needs, the last of them just written."""
        came = experience(max((_range(name)[1] for name in self._chunks), default=0))
        if came is None:
            return {}
        oldest = came.last - came.capacity
        chunks = {name: digest for name, digest in self._chunks.items() if _range(name)[1] > oldest}
        if came.last > came.first:
            path = folder / f"experience_{came.first}_{came.last}.pt"
            replace_file(path, lambda file: _save(file, came.rows))
            chunks[path.name] = _digest(path)
        return chunks


def _save(file: IO[bytes], content: Mapping[str, Any]) -> None:
    import torch

    try:
        torch.save(dict(content), file)
    except RuntimeError as error:
        # Torch closes its archive while the error of the disk passes, fails at it, and raises this instead.
        raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def _sealed(manifest: Mapping[str, Any]) -> bytes:
    """A manifest as JSON, with its own digest as the last entry."""
    text = json.dumps(manifest, indent=1)
    return f'{text[:-2]},\n "digest": "{xxhash.xxh3_128_hexdigest(text.encode())}"\n}}\n'.encode()


def _unreadable(path: Path, error: OSError) -> ConfigError:
    """Damaged if the file is gone. Any other trouble may pass, and the checkpoint is not given up for it."""
    kind = Damaged if isinstance(error, FileNotFoundError) else ConfigError
    return kind(f"{path} cannot be read: {error.strerror}")


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Finished checkpoints of a run, the oldest first: the files of their states."""
    states = (path.with_suffix(".pt") for path in (run_dir / paths.CHECKPOINTS).glob("step_*.json"))
    return sorted((path for path in states if _STATE.fullmatch(path.name)), key=_steps)


def _steps(checkpoint: Path) -> int:
    """Number of environment steps after which a checkpoint was taken."""
    return int(checkpoint.stem.removeprefix("step_"))


def _range(chunk: str) -> tuple[int, int]:
    """First and last (excluded) transition of a chunk."""
    _, first, last = chunk.removesuffix(".pt").split("_")
    return int(first), int(last)


def prune_checkpoints(run_dir: Path, keep: int = 0, newest: int | None = None) -> None:
    """Remove checkpoints but for the newest `keep` (0: all), those beyond `newest` steps, and leftovers.

    Leftovers are files of ours that belong to no checkpoint, such as those of a write that was cut off.
    """
    needed = set[str]()
    checkpoints = list_checkpoints(run_dir)
    for checkpoint in checkpoints:
        if checkpoint not in checkpoints[-keep:] or (newest is not None and _steps(checkpoint) > newest):
            checkpoint.with_suffix(".json").unlink()
            continue
        try:
            needed |= _read_manifest(checkpoint)["files"].keys()
        except ConfigError:
            return  # it may need any chunk, and a whole copy of it may turn up
    for path in (run_dir / paths.CHECKPOINTS).glob("*"):
        ours = _STATE.fullmatch(path.name) or _CHUNK.fullmatch(path.name) or path.suffix == ".tmp"
        if ours and path.name not in needed:
            path.unlink(missing_ok=True)


def _read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint. Raises Damaged in a line if it is missing or damaged."""
    path = path.with_suffix(".json")
    try:
        text = path.read_bytes()
        manifest = json.loads(text)
        del manifest["digest"]
        whole = _sealed(manifest) == text
    except OSError as error:
        raise _unreadable(path, error) from None
    except (ValueError, TypeError, KeyError, RecursionError):
        whole = False
    if not whole:
        raise Damaged(f"{path} is damaged")
    if manifest["version"] != VERSION:
        raise ConfigError(f"{path} was made by another version of this code, which can read it")
    return dict(manifest)


def load_checkpoint(path: Path, experience: bool = True) -> Checkpoint:
    """A checkpoint, with its tensors on the CPU, after every file of it was compared with its digest.

    Without `experience` the chunks are not looked at. Only tensors and plain values are accepted. Raises
    Damaged if it is not whole, and ConfigError if it cannot be read for another reason.
    """
    import torch

    manifest = _read_manifest(path)
    chunks = dict(manifest["files"])
    digest = chunks.pop(path.name)
    for name, expected in {path.name: digest, **(chunks if experience else {})}.items():
        file = path.with_name(name)
        try:
            found = _digest(file)
        except OSError as error:
            raise _unreadable(file, error) from None
        if found != expected:
            raise Damaged(f"{file} is damaged: its digest is not the one it was written with")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch has no error of its own for content that it does not accept
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{path} cannot be read: {first}") from error
    return Checkpoint(path, state, manifest["config"], chunks)


def newest_checkpoint(
    run_dir: Path, passed_over: Callable[[str], None], experience: bool = True
) -> Checkpoint | None:
    """The newest whole checkpoint; None if none was ever finished. See `load_checkpoint`.

    `passed_over` gets a line about each newer one that is damaged. Raises ConfigError if all are.
    """
    problems = list[str]()
    for path in reversed(list_checkpoints(run_dir)):
        try:
            found = load_checkpoint(path, experience)
        except Damaged as error:
            problems.append(str(error))
            continue
        for problem in problems:
            passed_over(f"{problem}; an older one is taken")
        return found
    if problems:
        raise ConfigError(f"no checkpoint of {run_dir} is whole: {problems[0]}")
    return None


def load_experience(checkpoint: Checkpoint, first: int, last: int) -> Iterator[dict[str, Tensor]]:
    """Transitions `first` to `last` (excluded) in parts, oldest first, each read when it is asked for.

    Raises ConfigError if some transitions are missing.
    """
    import torch

    for name in checkpoint.chunks:
        begin, end = _range(name)
        if begin <= first < min(end, last):
            # Mapped, not read: it is copied once, to where it is wanted.
            chunk = torch.load(
                checkpoint.path.with_name(name), map_location="cpu", weights_only=True, mmap=True
            )
            taken = slice(first - begin, min(end, last) - begin)
            yield {key: value[taken] for key, value in chunk.items()}
            first = min(end, last)
    if first < last:
        raise ConfigError(f"{checkpoint.path}: transitions {first:,} to {last:,} are missing")
