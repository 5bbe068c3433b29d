"""The code that a run uses: files of the repository, and digests of code that git does not have.

The process of a run knows its modules (`sys.modules`) and the files that Python opened (opened_files.py).

Code outside is a module that is neither in the snapshot nor of an installed package: a package that git
ignores or that a link leads to, a folder in front on PYTHONPATH, an installation in editable form. So is an
ignored file that was opened. It is not stored; a digest lets other code of the same name be noticed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from runlab.config.affects_results import is_prose, repository_top
from runlab.config.secrets import masked
from runlab.config.texts import few
from runlab.run.git.command import GitError, as_text, repository
from runlab.run.git.snapshot import GitRecord
from runlab.run.installed import Installed, is_program, real_folder
from runlab.run.module_specs import module_specs
from runlab.run.opened_files import opened, unheard, watch

_MOST_FILES = 2000  # of a package outside that its digest knows; its source comes first
_WHOLE_BYTES = 100_000_000  # of a package outside that its digest reads; of what is beyond, the sizes count
_SOURCES = (".py", ".so", ".pyd")
# Made by tools in an environment of Python, and imported at the start of any process.
_OF_ENVIRONMENTS = ("__main__", "__mp_main__", "_virtualenv")


@dataclass(slots=True, kw_only=True)
class UsedCode:
    """Files of the repository that a run used, relative to its top, and the digest of each part outside.

    A part outside has the name of its module, or the path of an ignored file.
    """

    files: list[str] = field(default_factory=list)
    outside: dict[str, str] = field(default_factory=dict)

    def joined(self, other: UsedCode) -> UsedCode:
        """The code of this and of another part of a run."""
        files = sorted({*self.files, *other.files})
        return UsedCode(files=files, outside=other.outside | self.outside)


def files_of(used: UsedCode | None) -> list[str] | None:
    """The files that a run used; None: an earlier version did not record them."""
    return None if used is None else used.files


def outside_changes(a: UsedCode | None, b: UsedCode | None) -> dict[str, tuple[str | None, str | None]]:
    """Digests of both, by name, of code outside of the repository that differs; none if one is unknown."""
    if a is None or b is None:
        return {}
    names = sorted({*a.outside, *b.outside})
    pairs = {name: (a.outside.get(name), b.outside.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


class CodeWatch:
    """Notes what this process opens from now on, and finds the code that it uses.

    `git` is the snapshot of the repository around `project`. What lies in the folders `aside` is no code. A
    module in `declaring` is code only if another file that was used names it.
    """

    def __init__(
        self, project: Path, git: GitRecord, aside: Iterable[Path] = (), declaring: Collection[str] = ()
    ) -> None:
        self._declaring = declaring
        self._top, self._recorded, self._submodules = project.resolve(), None, list[str]()
        with suppress(GitError, OSError), repository(project) as commands:
            self._top = commands.top.resolve()
            if git.tree is not None:
                listed = [each.partition(b"\t") for each in commands.names("ls-tree", "-r", "-z", git.tree)]
                left_out = (str(each["path"]) for each in git.skipped)
                self._recorded = {*(as_text(path) for _, _, path in listed), *left_out}
                self._submodules = [f"{as_text(path)}/" for facts, _, path in listed if b" commit " in facts]
        places = [path.resolve() for path in aside]
        self._aside = {path for path in places if not self._top.is_relative_to(path)}
        self.places = dict[str, Path]()  # of the code outside
        watch(self._top)

    def used(self, modules: Mapping[str, Any] | None = None) -> UsedCode:
        """The code that was used up to now; `modules` stand in for those of this process."""
        files, outside, installed = set[str](), dict[str, Path](), Installed()
        declared = dict[str, str]()  # the name of a module by its path
        # A module inside of a package that is known belongs to it: torch's compiler makes some of its own.
        ends = set[str]()
        for name, file in _modules(sys.modules if modules is None else modules):
            is_installed = installed.has(file)
            if not is_installed and (path := self._path(file)) is not None:
                files.add(path)
                if name in self._declaring:
                    declared[path] = name.rpartition(".")[2]
            elif name not in _OF_ENVIRONMENTS and not _parents(name) & ends:
                ends.add(name)
                if not is_installed:
                    outside[name] = file
        packages = {file.parent for file in outside.values() if _is_package(file)}  # with their data
        for file in (each for each in opened() if not self._is_aside(each) and each.suffix != ".pyc"):
            if (path := self._path(file)) is not None:
                files.add(path)
            elif self._is_data(file) and not {*file.parents} & packages:
                outside[masked(file.relative_to(self._top).as_posix())] = file
        self.places = outside
        with unheard():
            files -= declared.keys()
            while named := {path for path in declared.keys() - files if self._named(declared[path], files)}:
                files |= named
            return UsedCode(files=sorted(files), outside=_digests(outside))

    def __str__(self) -> str:
        """The code outside, and its places."""
        return few([f"{name} ({file})" for name, file in sorted(self.places.items())])

    def _named(self, name: str, files: Iterable[str]) -> bool:
        """True if the text of any of these modules has the name; constants that it imports show no origin."""
        sources = (self._top / path for path in files if path.endswith(".py"))
        return any(name.encode() in source.read_bytes() for source in sources if source.is_file())

    def _is_aside(self, file: Path) -> bool:
        folder = real_folder(str(file.parent))  # the folder of runs may be a link to a larger disk
        return not self._aside.isdisjoint([folder, *folder.parents])

    def _path(self, file: Path) -> str | None:
        """The path of a file in the snapshot; None: it is not there."""
        real = real_folder(str(file.parent)) / file.name
        if not real.is_relative_to(self._top):
            return None
        real = real.resolve()
        if not real.is_relative_to(self._top):
            return None
        path = as_text(os.fsencode(real.relative_to(self._top).as_posix()))
        recorded = self._recorded is None or path in self._recorded or path.startswith((*self._submodules,))
        return path if recorded else None

    def _is_data(self, file: Path) -> bool:
        """True for a file of the repository that git ignores and that is neither a cache nor of a run."""
        if self._recorded is None or not file.is_relative_to(self._top) or not file.is_file():
            return False
        parts = file.relative_to(self._top).parts
        if file.suffix in (".py", ".pyc") or any(part.startswith((".", "__")) for part in parts):
            return False
        folders = (folder for folder in file.parents if folder.is_relative_to(self._top))
        return not is_program(file) and not any((folder / "pyvenv.cfg").exists() for folder in folders)


def digests_now(project: Path, used: UsedCode) -> UsedCode:
    """`used` with the digests that its code outside has now, without what is gone. Nothing is imported."""
    places = {name: _ignored_file(project, name) or _module_file(name) for name in used.outside}
    present = {name: file for name, file in places.items() if file is not None}
    return UsedCode(files=used.files, outside=_digests(present))


def _module_file(name: str) -> Path | None:
    spec = next((each for each in module_specs(name) if each.name == name and each.has_location), None)
    return None if spec is None else Path(f"{spec.origin}")


def _ignored_file(project: Path, name: str) -> Path | None:
    """The file `name` of the repository around `project`."""
    file = repository_top(project) / name
    return file if file.is_file() else None


def _modules(modules: Mapping[str, Any]) -> Iterator[tuple[str, Path]]:
    """The modules that are files, each package before what is inside of it."""
    for name, module in sorted([*modules.items()]):
        try:
            values = object.__getattribute__(module, "__dict__")  # asking a lazy module would import it
        except AttributeError:
            continue
        if isinstance(file := values.get("__file__"), str):
            yield name, Path(os.path.normpath(Path(file).absolute()))


def _parents(name: str) -> set[str]:
    parts = name.split(".")
    return {".".join(parts[:count]) for count in range(1, len(parts))}


def _digests(places: Mapping[str, Path]) -> dict[str, str]:
    return {name: _digest(file) for name, file in sorted(places.items())}


def _is_package(file: Path) -> bool:
    return file.name.startswith("__init__.")


def _digest(file: Path) -> str:
    """Stands for a module that is a file, or for all files of a package that may be code or data."""
    digest, read = xxhash.xxh3_128(), 0
    folder = file.parent
    for each in _package_files(folder) if _is_package(file) else [file]:
        if not each.is_file():  # reading a pipe would never end
            continue
        with suppress(OSError), each.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            digest.update(f"{each.relative_to(folder).as_posix()}\0{size}\0".encode(errors="replace"))
            if (read := read + size) <= _WHOLE_BYTES:
                digest.update(opened.read())
    return digest.hexdigest()


def _package_files(folder: Path) -> list[Path]:
    """The files of a package, its source first; of a very large one not all."""
    files = list[Path]()
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__pycache__")))
        counted = (name for name in sorted(names) if not is_prose(name) and not name.endswith(".pyc"))
        files += (Path(place, name) for name in counted)
        if len(files) > 10 * _MOST_FILES:
            break
    return sorted(files, key=lambda file: file.suffix not in _SOURCES)[:_MOST_FILES]
