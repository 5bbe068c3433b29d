"""Checkpoints: whole or absent, compared with their digests, and loaded without executing code.

`step_<env_steps>.pt` holds the state. The manifest `step_<env_steps>.json` (manifest.py) has the
configuration and the digest of every file that belongs to the checkpoint.

A replay buffer may be large and changes at one end only. It is kept in chunks,
`experience_<first>_<last>.pt`, each with the transitions since the previous checkpoint. A manifest names the
chunks of its checkpoint.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import xxhash

from runlab.config.texts import first_line
from runlab.errors import ConfigError
from runlab.interfaces import Replay
from runlab.run import paths
from runlab.run.files import make_durable_folder, replace_file, to_stderr
from runlab.run.limits import Excess, check_archive, check_content
from runlab.run.manifest import Damaged, Manifest, list_checkpoints, read_manifest
from runlab.run.read import LAST, best_steps, chosen_checkpoints, no_checkpoint
from runlab.run.validation import Missing, reading

if TYPE_CHECKING:
    from torch import Tensor

_OURS = re.compile(r"step_\d+\.pt|experience_\d+_\d+\.pt|.*\.tmp")


class Checkpoint(NamedTuple):
    """A checkpoint that was found to be whole."""

    path: Path  # of the state
    state: dict[str, Any]
    config: dict[str, Any]  # of the run that made it
    chunks: dict[str, str]  # replay: digest of each file, oldest first


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Writes the checkpoints of a run, and keeps the newest `keep` and, with `keep_best`, the best one."""

    run_dir: Path
    config: Mapping[str, Any]
    keep: int
    note: Callable[[str], None] = to_stderr

    def save(self, env_steps: int, state: Mapping[str, Any], replay: Replay | None) -> Path:
        """Write `state`, and the transitions that came into the replay buffer since the last checkpoint.

        Each file is flushed to the disk and put in place in one step. Then older checkpoints are removed;
        `note` gets a line about one that cannot be. Raises OSError if the disk refuses the new one: then the
        earlier checkpoints are unchanged.
        """
        path = paths.checkpoint_path(self.run_dir, env_steps)
        make_durable_folder(path.parent)
        try:
            chunks = {} if replay is None else self._write_chunk(path.parent, replay)
            replace_file(path, lambda file: _save(file, state), partial(self._announce, path))
            manifest = Manifest(state=_digest(path), chunks=chunks, config=dict(self.config))
            replace_file(path.with_suffix(".json"), lambda file: file.writelines(manifest.sealed()))
        except BaseException:
            with contextlib.suppress(OSError):  # the first error counts
                prune_checkpoints(self.run_dir)
            raise
        try:
            best = best_steps(self.run_dir) if self.config.get("keep_best") else None
            prune_checkpoints(self.run_dir, keep=self.keep, best=best)
        except ConfigError as error:
            self.note(f"{path.name} is written, and no older one is removed: {error}")
        except OSError as error:
            self.note(f"{path.name} is written, but {error.filename} cannot be removed: {error.strerror}")
        return path

    def _announce(self, path: Path, new: Path) -> None:
        """Before a state is written again, have its manifest accept both, for a crash leaves one of them."""
        with contextlib.suppress(ConfigError):  # there is none, or none that is whole
            old = read_manifest(path)
            both = replace(old, state=f"{_digest(new)} {old.state}")
            replace_file(path.with_suffix(".json"), lambda file: file.writelines(both.sealed()))

    def _write_chunk(self, folder: Path, replay: Replay) -> dict[str, str]:
        """Write the newest transitions as a chunk; all chunks of the new checkpoint, with digests."""
        held: dict[str, str] = {}
        with contextlib.suppress(IndexError, ConfigError):  # nothing readable: write all
            held = read_manifest(list_checkpoints(self.run_dir)[-1]).chunks
        came = replay.since(max((_range(name)[1] for name in held), default=0))
        first = replay.added - len(next(iter(came.values())))
        oldest = replay.added - replay.capacity
        chunks = {name: digest for name, digest in held.items() if _range(name)[1] > oldest}
        if replay.added > first:
            path = folder / f"experience_{first}_{replay.added}.pt"
            replace_file(path, lambda file: _save(file, came))
            chunks[path.name] = _digest(path)
        return chunks


def _save(file: IO[bytes], content: Mapping[str, Any]) -> None:
    import torch

    try:
        torch.save(dict(content), file)
    except RuntimeError as error:
        # After an error of the disk, torch fails to close its archive, and raises this error instead.
        raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def _range(chunk: str) -> tuple[int, int]:
    """First and last (excluded) transition of a chunk."""
    _, first, last = chunk.removesuffix(".pt").split("_")
    return int(first), int(last)


def prune_checkpoints(
    run_dir: Path, keep: int = 0, newest: int | None = None, best: int | None = None
) -> None:
    """Remove leftovers, checkpoints after `newest` steps, and all but the last `keep` (0: all).

    The checkpoint after `best` steps stays.
    Leftovers are our files that belong to no checkpoint, such as files of an interrupted write. Raises the
    first OSError once everything that can be removed is.
    """
    needed, refused = set[str](), list[OSError]()

    def removed(path: Path) -> bool:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            refused.append(error)
            return False
        return True

    checkpoints = list_checkpoints(run_dir)
    for checkpoint in checkpoints:
        unwanted = checkpoint not in checkpoints[-keep:] and paths.steps_of(checkpoint) != best
        unwanted |= newest is not None and paths.steps_of(checkpoint) > newest
        if unwanted and removed(checkpoint.with_suffix(".json")):
            continue
        try:
            needed |= {checkpoint.name, *read_manifest(checkpoint).chunks}
        except ConfigError:
            return  # it may need any chunk, and the user may have a copy of it
    for path in (run_dir / paths.CHECKPOINTS).glob("*"):
        if _OURS.fullmatch(path.name) and path.name not in needed:
            removed(path)
    if refused:
        raise refused[0]


def load_checkpoint(path: Path, experience: bool = True) -> Checkpoint:
    """A checkpoint with its tensors on the CPU. Every file is compared with its digest first.

    Without `experience` the chunks are not read. Only tensors and plain values are accepted. Raises
    Missing or Damaged if it is not whole, and ConfigError if it cannot be read for another reason.
    """
    manifest = read_manifest(path)
    for name, digests in {path.name: manifest.state, **(manifest.chunks if experience else {})}.items():
        file = path.with_name(name)
        with reading(file):
            if _digest(file) not in digests.split():
                raise Damaged(f"{file} is damaged: its digest is not the one it was written with")
    return Checkpoint(path, _load(path), manifest.config, manifest.chunks)


def _load(path: Path, mmap: bool = False) -> dict[str, Any]:
    import torch

    with reading(path):
        try:
            check_archive(path)
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
            check_content(state, path.stat().st_size)
        except OSError:
            raise
        except Excess as error:
            raise Damaged(f"{path} is damaged: it {error}") from None
        except Exception as error:  # torch raises various errors for damaged content
            raise Damaged(f"{path} is damaged, torch cannot load it: {first_line(error)}") from error
    return state


def newest_checkpoint(
    run_dir: Path, passed_over: Callable[[str], None], experience: bool = True
) -> Checkpoint | None:
    """The newest whole checkpoint; None if no checkpoint was finished. See `load_checkpoint`.

    `passed_over` gets a line about each newer, damaged one. Raises ConfigError if all are damaged.
    """
    problems = list[str]()
    for path in reversed(list_checkpoints(run_dir)):
        try:
            checkpoint = load_checkpoint(path, experience)
        except (Missing, Damaged) as error:
            problems.append(str(error))
        else:
            for problem in problems:
                passed_over(f"{problem}; an older one is taken")
            return checkpoint
    if problems:
        raise ConfigError(f"no checkpoint of {run_dir} is whole: {problems[0]}")
    return None


def load_chosen(run_dir: Path, wanted: str) -> Checkpoint:
    """The checkpoint that `checkpoint=` names, without experience. The last one is the newest whole one."""
    if wanted != LAST:
        return load_checkpoint(chosen_checkpoints(run_dir, wanted)[0], experience=False)
    if (newest := newest_checkpoint(run_dir, to_stderr, experience=False)) is None:
        raise no_checkpoint(run_dir)
    return newest


def load_experience(checkpoint: Checkpoint, first: int, last: int) -> Iterator[dict[str, Tensor]]:
    """Transitions `first` to `last` (excluded) in parts, oldest first, each read when it is asked for.

    Raises ConfigError if some transitions are missing.
    """
    for name in checkpoint.chunks:
        begin, end = _range(name)
        if begin <= first < min(end, last):
            # Mapped into memory: the rows are copied once, into the replay buffer.
            chunk = _load(checkpoint.path.with_name(name), mmap=True)
            taken = slice(first - begin, min(end, last) - begin)
            yield {key: value[taken] for key, value in chunk.items()}
            first = min(end, last)
    if first < last:
        raise ConfigError(f"{checkpoint.path}: transitions {first:,} to {last:,} are missing")
