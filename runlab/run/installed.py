"""Modules that are no code of a run's own: Python's, those of installed packages, and what torch compiled."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Collection
from functools import cache
from importlib.metadata import distributions
from pathlib import Path


@cache
def _installed_names(_import_path: tuple[str, ...]) -> Collection[str]:
    """The first parts of the names of files of installed packages, and of modules where these are not listed.

    `packages_distributions()` gives the names of their modules alone, and takes ten times as long.
    """
    lists = (each.read_text(name) or "" for each in distributions() for name in ("RECORD", "top_level.txt"))
    return {re.split("[/.,]", line, maxsplit=1)[0] for text in lists for line in text.splitlines()}


class Installed:
    """The modules of Python itself and of installed packages."""

    def __init__(self) -> None:
        self._roots = sorted(
            {os.path.realpath(path or os.curdir) for path in sys.path}, key=len, reverse=True
        )
        paths = sysconfig.get_paths()
        self._python = [os.path.realpath(paths[kind]) for kind in ("stdlib", "platstdlib")]
        self._python += [f"{path}{os.sep}lib-dynload" for path in self._python]
        self._names = _installed_names(tuple(sys.path))
        self._root_of, self._has_packages = cache(self._find_root), cache(self._find_packages)

    def has(self, file: Path) -> bool:
        """True if the file of a module is one of them, or a program that torch compiled."""
        folder = real_folder(str(file.parent))
        root = self._root_of(str(folder))
        if root is not None and self._has_packages(root):
            # The name of the package, which may be imported by another name.
            top = str(folder / file.name)[len(root) + 1 :].partition(os.sep)[0].partition(".")[0]
            if top in self._names:
                return True
        return root in self._python or is_program(folder / file.name)

    def _find_root(self, folder: str) -> str | None:
        roots = (*self._roots, *self._python)
        return next((root for root in roots if f"{folder}{os.sep}".startswith(f"{root}{os.sep}")), None)

    def _find_packages(self, root: str) -> bool:
        """True for a folder into which packages are installed. The source of an editable one is none."""
        folder = Path(root)
        return folder.name in ("site-packages", "dist-packages") or any(folder.glob("*.dist-info"))


def is_program(file: Path) -> bool:
    """True for what torch compiled, which sets these variables. It follows from other code."""
    caches = (os.environ.get(name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"))
    return any(file.is_relative_to(real_folder(cache)) for cache in caches if cache)


@cache
def real_folder(path: str) -> Path:
    """A folder without links in its path, as it was at the first call."""
    return Path(path).resolve()
