"""Differences between two runs besides their results, for every command that compares runs.

They come from the records and configurations of the runs, and from the files that differ in their code.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rltemplate.analysis.runs import Run, text_of
from rltemplate.config.command_args import few
from rltemplate.run.git import changes
from rltemplate.run.influence import file_matters, package_matters, presence_matters
from rltemplate.run.paths import PROJECT
from rltemplate.run.read import leaves
from rltemplate.types import BOOKKEEPING_KEYS, affects_results

# Settings are read back from the libraries, or set in the process environment.
SECTIONS = ("code", "configuration", "versions", "machine", "settings")
CODE, CONFIGURATION, VERSIONS, MACHINE, SETTINGS = SECTIONS
ABSENT = "(absent)"  # stands for the value that one of the runs does not have
REVISION = "revision"  # the key where the files that differ are unknown
SEED = "seed"
_RESUMED = "resumed"

# Facts of a machine that are software. They are compared as versions.
_SOFTWARE = ("python", "python_implementation", "libc")
# The amount of memory and the choice among equal cores change no result.
_IDLE_MACHINE = ("memory_bytes", "affinity", "container.memory_limit_bytes")
# Hardware that can change results. GPUs are compared only if one of the runs used them.
_GPU = ("gpu_driver", "gpus")
_COUNTED_MACHINE = ("architecture", "cpu", "cpu_flags", "logical_cores", *_GPU)


@dataclass(frozen=True, slots=True)
class Difference:
    """One fact in which two runs differ.

    `section` is one of SECTIONS. `key` is a dotted key, a package, or a file of the code; the values of a
    file are the revisions of both runs.
    """

    section: str
    key: str
    a: Any
    b: Any

    @property
    def affects_results(self) -> bool:
        """True if it can change what a run computes, other than by its seed."""
        if self.section == CODE:
            return self.key == REVISION or file_matters(self.key)
        if self.section == CONFIGURATION:
            return self.key != SEED and affects_results(self.key)
        if self.section == VERSIONS:
            return presence_matters(self.key) if self.one_sided else package_matters(self.key)
        if self.section == MACHINE:
            return self.key in _COUNTED_MACHINE and None not in (self.a, self.b) and not self.one_sided
        return self.key != _RESUMED

    @property
    def one_sided(self) -> bool:
        """True if one of the runs has no such value."""
        return ABSENT in (self.a, self.b)

    @property
    def change(self) -> str:
        """Both values as text; of two lists of names only the names that the other lacks."""
        if isinstance(self.a, list) and isinstance(self.b, list) and isinstance([*self.a, *self.b][0], str):
            return f"{_without(self.a, self.b)} -> {_without(self.b, self.a)}"
        return f"{text_of(self.a)} -> {text_of(self.b)}"

    def __str__(self) -> str:
        return f"{self.change}{'' if self.affects_results else '  (no factor)'}"


def _without(values: list[str], others: list[str]) -> str:
    extra = [value for value in values if value not in others]
    return f"also has {', '.join(extra)}" if extra else "has nothing more"


def listed(found: Iterable[Difference], section: str, most: int | None = None) -> Iterator[str]:
    """Lines about the differences of a section, those that can change results first."""
    here = sorted((one for one in found if one.section == section), key=lambda one: not one.affects_results)
    width = min(32, max((len(one.key) for one in here), default=0))
    yield from (f"  {one.key:{width}}  {one}" for one in here[:most])
    if most is not None and len(here) > most:
        yield f"  and {len(here) - most} more; --json lists them all"


def changed_files(a: Run, b: Run, project: Path = PROJECT) -> list[str] | None:
    """Names of the files that differ in the code of two runs; None if the repository cannot tell."""
    return changes.files_between(project, asdict(a.record.git), asdict(b.record.git))


def differences(a: Run, b: Run, files: list[str] | None) -> list[Difference]:
    """All differences between two runs, in the order of SECTIONS; `files` are their `changed_files`.

    A section that was not recorded of one of the runs is left out.
    """
    names = [REVISION] if files is None else files
    found = [Difference(CODE, name, revision(a), revision(b)) for name in names]
    facts_a, facts_b = _facts(a), _facts(b)
    for section in SECTIONS[1:]:
        if facts_a[section] and facts_b[section]:
            found += [Difference(section, *pair) for pair in _differing(facts_a[section], facts_b[section])]
    return found


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Dotted keys of two nested mappings whose values differ, with both values."""
    flat_a, flat_b = dict(leaves(a)), dict(leaves(b))
    for key in {**flat_a, **flat_b}:
        one, other = flat_a.get(key, ABSENT), flat_b.get(key, ABSENT)
        if one != other or isinstance(one, bool) != isinstance(other, bool):  # True == 1
            yield key, one, other


def revision(run: Run) -> str:
    """The commit that a run's code was made from; `*` marks uncommitted changes."""
    git = run.record.git
    name = git.base_commit or git.commit or git.tree
    return "(not recorded)" if name is None else f"{name[:10]}{'*' if git.dirty else ''}"


def _facts(run: Run) -> dict[str, dict[str, Any]]:
    """Facts by section; empty where nothing was recorded."""
    record, settings = run.record, run.record.determinism.settings
    software = {key: record.machine[key] for key in _SOFTWARE if record.machine.get(key)}
    on_gpu = run.config.get("device", "cpu") != "cpu"
    idle = (*_SOFTWARE, *_IDLE_MACHINE, *(() if on_gpu else _GPU))
    resumed = [f"after {part.env_steps:,} steps, changed: {few([*part.changed])}" for part in record.resumed]
    return {
        CONFIGURATION: {key: value for key, value in run.config.items() if key not in BOOKKEEPING_KEYS},
        VERSIONS: software | record.versions if record.versions else {},
        MACHINE: {key: value for key, value in leaves(record.machine) if key not in idle},
        SETTINGS: settings | record.environment | {_RESUMED: resumed} if settings else {},
    }
