"""Differences between two runs besides their results, for every command that compares runs.

They come from the records and configurations of the runs, and from the files that differ in their code.

Factors are the things that were changed and that can change what a run computes. With one change at a time
its effect is known, so changes are counted as a researcher would:

* each key of the configuration is one. Keys that a choice brings along belong to the choice: if `algo`,
  `env`, `determinism`, `experiment` or `recipe` differs, that is one factor with all other keys that neither
  command line gave. A key that was given to one of the runs (`overrides` in its record) stays a factor of its
  own, unless the other algorithm or environment does not have it;
* `code` is one, with any number of files that can change a run. A key that only one version of the code has
  is part of this factor;
* `versions` of Python, the C library and the packages that compute are one;
* `hardware` is one: the processor, its number of cores and, unless both ran on the CPU, the GPUs;
* `settings` that were read back from the libraries or set in the process environment are one, unless another
  factor explains them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
_IDLE_MACHINE = ("memory_bytes",)  # which changes no result
# Hardware that can change results. GPUs are compared only if one of the runs used them.
_GPU = ("gpu_driver", "gpus")
_COUNTED_MACHINE = ("architecture", "cpu", "cpu_flags", "logical_cores", *_GPU)

# Groups of the configuration that are chosen by name, and the key whose value is the choice.
_CHOICES = {
    "algo": "algo.name",
    "env": "env.id",
    "experiment": "experiment",
    "recipe": "recipe",
    "determinism": "determinism.level",
}
# Left open by a level: its value follows from processor and networks.
_FOLLOWS = "determinism.products"
# Keys that determine settings and environment variables.
_SETTING_KEYS = {"num_threads", "device", "compile", "determinism", "algo", "env"}


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


# --- Factors ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Factor:
    """One thing that was changed. `kind`: config, code, versions, hardware or settings.

    `change` says what became what, `detail` has the changes that belong to it.
    """

    kind: str
    name: str
    change: str
    detail: list[str]

    def __str__(self) -> str:
        return f"{self.name} {self.change}"


def describe(factors: Sequence[Factor], most: int | None = None) -> str:
    """The factors in one line: `algo.gamma 0.99 -> 0.95; code (2 files)`; beyond `most` only their number."""
    texts = [str(factor) for factor in factors]
    more = f"; and {len(texts) - most} more" if most is not None and len(texts) > most else ""
    return "; ".join(texts[:most]) + more


def count_files(files: Sequence[str]) -> str:
    """The number of files in words."""
    return f"{len(files)} file{'' if len(files) == 1 else 's'}"


def find_factors(a: Run, b: Run, found: Sequence[Difference]) -> list[Factor]:
    """The factors among the differences of two runs."""

    def counted(section: str) -> list[Difference]:
        return [one for one in found if one.section == section and one.affects_results]

    keys, code = counted(CONFIGURATION), [one.key for one in counted(CODE)]
    if code:  # keys that only one version of the code has are part of its change
        keys = [one for one in keys if not one.one_sided or one.key.startswith("env.kwargs.")]
    given = {word.lstrip("+~").partition("=")[0] for run in (a, b) for word in run.record.overrides}
    factors = list(_config_factors({one.key: one for one in keys}, given))
    if code and code != [REVISION]:
        factors.append(Factor("code", "code", f"({count_files(code)})", code))
    factors += [*_together("versions", counted(VERSIONS)), *_together("hardware", counted(MACHINE))]
    names = {factor.name.partition(".")[0] for factor in factors}
    if not names & {"versions", "hardware", *_SETTING_KEYS}:
        # Settings with one value may be read back by only one version of the code.
        factors += _together("settings", [one for one in counted(SETTINGS) if not (code and one.one_sided)])
    return factors


def _config_factors(changed: dict[str, Difference], given: set[str]) -> Iterator[Factor]:
    """Factors among changed keys of the configuration; `given` are the keys of both command lines."""
    chosen = {group: changed.pop(key) for group, key in _CHOICES.items() if key in changed}
    if chosen.keys() & {"algo", "env", "experiment"} and "recipe" not in given:
        chosen.pop("recipe", None)  # it comes along
    own: list[Difference] = []
    along: dict[str, list[str]] = {group: [] for group in chosen}
    for key, one in changed.items():
        root = key.partition(".")[0]
        explicit = any(f"{key}.".startswith(f"{name}.") for name in given - _CHOICES.keys())
        brought_by = [group for group in chosen if group in (root, "algo", "env", "experiment", "recipe")]
        unknown_to_other = one.one_sided and root in ("algo", "env") and root in chosen
        if brought_by and (unknown_to_other or not explicit):
            along[root if root in brought_by else brought_by[0]].append(f"{key} {one.change}")
        elif explicit or key != _FOLLOWS:
            own.append(one)
    yield from (Factor("config", group, one.change, along[group]) for group, one in chosen.items())
    yield from (Factor("config", one.key, one.change, []) for one in own)


def _together(kind: str, found: Sequence[Difference]) -> Iterator[Factor]:
    """The factor of several differences, if there are any."""
    if found:
        detail = [f"{one.key} {one.change}" for one in found]
        names = [one.key for one in found]
        yield Factor(kind, kind, f"({detail[0] if len(detail) == 1 else few(names)})", detail)
