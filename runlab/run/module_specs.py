"""The files of modules, found without importing anything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from importlib import util
from importlib.machinery import ModuleSpec
from pkgutil import get_importer
from typing import Any


def module_specs(name: str) -> Iterator[ModuleSpec]:
    """A module and the packages around it, the outermost first; none: it is missing.

    A package without `__init__.py` has no code, and is left out.
    """
    top, *rest = name.split(".")
    with suppress(ImportError, ValueError):
        spec, full = util.find_spec(top), top
        specs = [spec]
        for part in rest:
            full = f"{full}.{part}"
            spec = None if spec is None else _inside(spec, full)
            specs.append(spec)
        if spec is not None:
            yield from (each for each in specs if each is not None and each.origin)


def _inside(package: ModuleSpec, name: str) -> ModuleSpec | None:
    """A module in a package. Python's own search would import a package without `__init__.py`."""
    folders: list[str] = []
    for folder in package.submodule_search_locations or ():
        importer: Any = get_importer(folder)
        spec: ModuleSpec | None = None if importer is None else importer.find_spec(name)
        if spec is not None and spec.loader is not None:
            return spec
        folders += () if spec is None else spec.submodule_search_locations or ()
    spec = ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = folders
    return spec if folders else None
