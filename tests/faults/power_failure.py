"""The state of a disk after a power failure: all that was not flushed is lost.

A file has the content of its last `fsync`, and is empty without one. The names in a folder are those of its
own last `fsync`. POSIX promises no more, and file systems usually keep more.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

_flush: Any = os.fsync  # of the system


def record(journal: Path) -> None:
    """Copy into the folder `journal` all that this process flushes from now on."""
    journal.mkdir(exist_ok=True)
    held = []  # the number of a removed file is not given to another one while it is open

    def fsync(fd: Any) -> None:
        _flush(fd)
        held.append(os.dup(fd))
        found = os.fstat(fd)
        flushed = journal / f"{found.st_ino}.new"
        if stat.S_ISDIR(found.st_mode):
            names = {each.name: [each.inode(), each.is_dir()] for each in os.scandir(fd)}
            flushed.write_text(json.dumps(names))
        else:
            shutil.copy(f"/proc/self/fd/{fd}", flushed)
        flushed.replace(flushed.with_suffix(""))

    os.fsync = fsync


def left(journal: Path, folder: Path, target: Path) -> Path:
    """Put what a power failure leaves of a folder into `target`, a new folder, which is returned."""
    _leave(journal, folder.stat().st_ino, target)
    return target


def _leave(journal: Path, inode: int, target: Path) -> None:
    flushed = journal / f"{inode}"
    target.mkdir()
    for name, (number, is_folder) in (json.loads(flushed.read_text()) if flushed.exists() else {}).items():
        content = journal / f"{number}"
        if is_folder:
            _leave(journal, number, target / name)
        elif content.exists():
            shutil.copy(content, target / name)
        else:
            (target / name).touch()
