"""The files of modules, found without importing anything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from importlib import util
from importlib.machinery import ModuleSpec, PathFinder


def module_specs(name: str) -> Iterator[ModuleSpec]:
    """A module and the packages around it, the outermost first; none: it is missing.

    A package without `__init__.py` has no code, and is left out.
    """
    top, *rest = name.split(".")
    with suppress(ImportError, ValueError):
        specs, full = [util.find_spec(top)], top
        for part in rest:
            folders = specs[-1] and specs[-1].submodule_search_locations
            # By its last name: with the names before it, Python needs the package around it to be imported.
            spec, full = PathFinder.find_spec(part, [*(folders or ())]), f"{full}.{part}"
            if spec is not None:
                spec.name = full
            specs.append(spec)
        if specs[-1] is not None:
            yield from (each for each in specs if each is not None and each.origin)
