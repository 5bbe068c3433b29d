"""Factors: things that were changed between two runs and that can change what a run computes.

With one change at a time its effect is known, so changes are counted as a researcher would:

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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rltemplate.analysis.differences import (
    CODE,
    CONFIGURATION,
    MACHINE,
    REVISION,
    SETTINGS,
    VERSIONS,
    Difference,
)
from rltemplate.analysis.runs import Run
from rltemplate.config.command_args import few

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
