"""The files that enter a snapshot of the code, and those that are left out.

A snapshot may be pushed one day, so likely secrets (config/secrets.py) never enter it. Left out, and named in
the record, are a new file whose name speaks of a secret; a new or changed file that holds a token or is
larger than `MAX_FILE_BYTES`; of new files that take more than `MAX_NEW_BYTES` together, the largest; a file
that git cannot take in, such as one of git-lfs where that is not installed. Of a changed file the version of
the base commit is kept, as of a submodule. The record has sizes and digests of these, so that other content
is other code: of a file over `MAX_FILE_BYTES` a digest of three parts, of a file with a secret one of its
lines without secrets, and none of a file named like a secret.

A file that `make report` has written here, and that nobody has changed since, counts as neither new nor
changed. The folder of git has the list of these files with their digests.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, NotRequired, TypedDict

import xxhash
from msgspec import Meta

from runlab.config.secrets import LIKELY, masked, secret_content, secret_in_name, secret_name
from runlab.run.files import replace_text
from runlab.run.git.command import Git, GitError, as_text, repository
from runlab.run.paths import LOCK

MAX_FILE_BYTES = 10_000_000
MAX_NEW_BYTES = 100_000_000
_PART_BYTES = 1_000_000
_WRITTEN = "written-by-runlab.json"  # in the folder of git: digests by path


class SkippedFile(TypedDict):
    """A file, or a submodule (with a slash at its end), that a snapshot lacks or holds as in its base."""

    path: Annotated[str, Meta(pattern=r"[^./]")]
    reason: NotRequired[str]
    bytes: NotRequired[int | None]
    digest: NotRequired[str | None]  # None: only its size is known


def add_files(git: Git, paths: Sequence[bytes], skipped: list[SkippedFile], new: bool) -> None:
    """Put changed files, or new ones, into the index, and name those that are left out in `skipped`.

    Raises GitError if filters were not tried yet, one of which may have failed.
    """
    _put(git, _select(git, paths, skipped, new), skipped, new)
    if new and paths:
        _name_ignored(git, paths, skipped)


def note_written(project: Path, files: Iterable[Path]) -> None:
    """Remember that these files in the repository around `project` are results, and no code."""
    with suppress(GitError, OSError), repository(project) as git:
        new = {os.path.realpath(file): _digest(file, "", "") for file in files}
        replace_text(git.common / _WRITTEN, [json.dumps(_noted(git) | new)])


def written_here(git: Git, paths: Iterable[bytes]) -> set[bytes]:
    """The files among `paths` that are as `note_written` has seen them."""
    if not (noted := _noted(git)):
        return set()
    digests = {path: noted.get(os.path.realpath(git.file(path))) for path in paths}
    return {path for path, digest in digests.items() if digest and digest == _digest(git.file(path), "", "")}


def _noted(git: Git) -> dict[str, str | None]:
    with suppress(OSError, ValueError):
        return dict(json.loads((git.common / _WRITTEN).read_text()))
    return {}


def _put(git: Git, paths: Sequence[bytes], skipped: list[SkippedFile], new: bool) -> None:
    """Put files into the index. Those that git cannot take in are named in `skipped`, and cost no other."""
    words = ("--add", "--remove", "--replace", "-z", "--stdin")
    try:
        git("update-index", *words, stdin=b"\0".join(paths))
    except GitError as error:
        if git.failing is None:
            raise
        if len(paths) == 1:
            skipped.append(_skipped(git, paths[0], f"git cannot take it in: {error}", new))
        else:
            for half in (paths[: len(paths) // 2], paths[len(paths) // 2 :]):
                _put(git, half, skipped, new)


def _name_ignored(git: Git, new: Iterable[bytes], skipped: list[SkippedFile]) -> None:
    """Name new files that git has left out without a word, such as `git~1`, a name of its own on Windows."""
    stored, named = {*git.names("ls-files", "-z")}, {str(each["path"]) for each in skipped}
    lost = (path for path in new if path not in stored and masked(as_text(path)) not in named)
    reason = "git takes no file of this name"
    skipped += [_skipped(git, path, reason, new=True) for path in lost if git.file(path).exists()]


def _select(git: Git, paths: Iterable[bytes], skipped: list[SkippedFile], new: bool) -> list[bytes]:
    """Paths that may be recorded; the others are named in `skipped`."""
    taken, total, sizes = [], 0, dict.fromkeys(paths, 0)
    filtered = git.left_by_filters([*sizes])
    for path in sizes:
        with suppress(OSError):
            sizes[path] = git.file(path).lstat().st_size
    for path, size in sorted(sizes.items(), key=lambda item: (item[1], item[0])):
        reason = _why_left_out(git, path, size, new, room=MAX_NEW_BYTES - total)
        if reason is None and path in filtered:
            reason = f"the filter {filtered[path]} of git, which it needs, fails here"
        if reason is None:
            total += size
            taken.append(path)
        else:
            skipped.append(_skipped(git, path, reason, new))
    return taken


def _why_left_out(git: Git, path: bytes, size: int, new: bool, room: int) -> str | None:
    file = git.file(path)
    if path.endswith(b"/"):
        return "a git repository of its own"
    if new and (reason := secret_name(os.fsdecode(path)) or secret_in_name(os.fsdecode(path))):
        return reason
    if file.is_symlink():
        return secret_in_name(str(file.readlink()), "target")
    # A submodule. Or the lock of a run: closing the file would end a lock that this process has on it.
    if not file.is_file() or file.name == LOCK:
        return None
    if size > MAX_FILE_BYTES:
        return f"larger than {MAX_FILE_BYTES // 1_000_000} MB"
    if new and size > room:
        return f"new files together exceed {MAX_NEW_BYTES // 1_000_000} MB"
    try:
        return secret_content(file.read_bytes(), file.name)
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _skipped(git: Git, path: bytes, reason: str, new: bool) -> SkippedFile:
    """The entry of the record about a file that is left out."""
    file, size = git.file(path), 0
    with suppress(OSError):
        size = file.lstat().st_size
    digest = _digest(file, os.fsdecode(path), reason)
    reason += "" if new else "; the version of the base commit is kept"
    return {"path": masked(as_text(path)), "reason": reason, "bytes": size, "digest": digest}


def _digest(file: Path, path: str, reason: str) -> str | None:
    """Stands for the content of a file without its secrets, left out for `reason`; None: all may be one."""
    if secret_name(path):
        return None
    if file.is_symlink():
        return xxhash.xxh3_128_hexdigest(masked(str(file.readlink())).encode(errors="replace"))
    if not file.is_file():  # reading a pipe would never end
        return None
    with suppress(OSError), file.open("rb") as opened:
        size = file.stat().st_size
        if size > MAX_FILE_BYTES:
            digest = xxhash.xxh3_128()
            for start in (0, size // 2, max(0, size - _PART_BYTES)):
                opened.seek(start)
                digest.update(opened.read(_PART_BYTES))
            return digest.hexdigest()
        content = opened.read()
        if reason.startswith(LIKELY):
            if size > _PART_BYTES:  # looking for secrets line by line would take seconds
                return None
            lines = (line for line in content.splitlines() if not secret_content(line, file.name))
            content = b"\n".join(lines)
        return xxhash.xxh3_128_hexdigest(content)
    return None
