"""Factors: things that were changed between two runs and that can change what a run computes.

With one change at a time its effect is known, so changes are counted as a researcher would:

* each key of the configuration is one. Keys that a choice brings along belong to the choice: if `algo`,
  `env`, `determinism`, `experiment`, `recipe`, `debug` or `local` differs, that is one factor with all other
  keys that neither command line gave. A key that was given to one of the runs (`overrides` in its record)
  stays a factor of its own, unless the other algorithm or environment does not have it;
* `code` is one, with any number of files that can change a run. A key that only one version of the code has
  is part of this factor;
* `versions` of Python, the C library and the packages that compute are one;
* `hardware` is one: the processor, its number of cores and, unless both ran on the CPU, the GPUs;
* `settings` that were read back from the libraries or set in the process environment are one, unless another
  factor explains them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rltemplate.analysis.differences import (
    ABSENT,
    CODE,
    CONFIGURATION,
    ENVIRONMENT,
    MACHINE,
    REVISION,
    SECTIONS,
    SETTINGS,
    VERSIONS,
    Difference,
    revision,
)
from rltemplate.analysis.runs import Run
from rltemplate.config.command_args import few

# Groups of the configuration that are chosen by name, and the key whose value is the choice. An experiment
# comes after a recipe and replaces the usual one.
_CHOICES = {
    "algo": "algo.name",
    "env": "env.id",
    "determinism": "determinism.level",
    "experiment": "experiment",
    "recipe": "recipe",
}
# Chosen on the command line, and seen in the configuration only by the values that they bring.
_PRESETS = ("debug", "local")
_GROUPS = (*_CHOICES, *_PRESETS, "logger")
# Left open by a level: its value follows from processor and networks.
_FOLLOWS = "determinism.products"
# Keys that determine settings and environment variables.
_SETTING_KEYS = ("num_threads", "device", "compile", "determinism", "algo", "env", *_PRESETS)


@dataclass(frozen=True, slots=True)
class Factor:
    """One thing that was changed. `kind`: config, code, versions, hardware or settings.

    `a` and `b` are its values in the two runs, `detail` the changes that belong to it.
    """

    kind: str
    name: str
    a: str
    b: str
    detail: list[str]

    def __str__(self) -> str:
        if self.kind == "config":
            return f"{self.name} {self.a} -> {self.b}"
        if self.kind == "code":
            return f"code ({count_files(self.detail)})"
        if len(self.detail) == 1:
            return f"{self.name} ({self.detail[0]})"
        return f"{self.name} ({few([each.partition(' ')[0] for each in self.detail])})"


def describe(factors: Sequence[Factor], most: int | None = None) -> str:
    """The factors in one line: `algo.gamma 0.99 -> 0.95; code (2 files)`; beyond `most` only their number."""
    texts = [str(factor) for factor in factors]
    if most is not None and len(texts) > most:
        texts = [*texts[:most], f"and {len(texts) - most} more"]
    return "; ".join(texts)


def count_files(files: Sequence[str]) -> str:
    """The number of files in words."""
    return f"{len(files)} file{'' if len(files) == 1 else 's'}"


def find_factors(a: Run, b: Run, found: Sequence[Difference]) -> list[Factor]:
    """The factors among the differences of two runs."""
    counted: dict[str, list[Difference]] = {section: [] for section in SECTIONS}
    for one in found:
        if one.affects_results:
            counted[one.section].append(one)
    keys, code = counted[CONFIGURATION], [one.key for one in counted[CODE]]
    if code:  # keys that only one version of the code has are part of its change
        keys = [one for one in keys if ABSENT not in (one.a, one.b) or one.key.startswith("env.kwargs.")]
    factors = _config_factors(_given(a), _given(b), keys)
    if code and code != [REVISION]:
        factors.append(Factor("code", "code", revision(a), revision(b), code))
    for kind, section in (("versions", VERSIONS), ("hardware", MACHINE)):
        if counted[section]:
            factors.append(_together(kind, counted[section]))
    settings = list(_unexplained([*counted[SETTINGS], *counted[ENVIRONMENT]], factors))
    return [*factors, _together("settings", settings)] if settings else factors


def _given(run: Run) -> dict[str, str]:
    """Values on the command line of a run, by key."""
    split = (word.lstrip("+~").partition("=") for word in run.record.overrides)
    return {key: value for key, _, value in split}


def _config_factors(
    given_a: Mapping[str, str], given_b: Mapping[str, str], found: Sequence[Difference]
) -> list[Factor]:
    given = given_a, given_b
    values = {one.key: one.shown() for one in found}
    chosen = {group: values[key] for group, key in _CHOICES.items() if key in values}
    if {"algo", "env", "experiment"} & chosen.keys() and not any("recipe" in words for words in given):
        chosen.pop("recipe", None)  # it comes along
    for group in _PRESETS:
        one, other = ((words.get(group) or "null").replace("null", "none") for words in given)
        if one != other:
            chosen[group] = one, other
    along: dict[str, list[str]] = {group: [] for group in chosen}
    own: list[Factor] = []
    for difference in found:
        key = difference.key
        explicit = any(_gives(words, key) for words in given)
        if key in (_CHOICES.get(group) for group in chosen):
            continue
        if key == _FOLLOWS and not explicit and "determinism" not in chosen:
            continue
        choice = _choice_of(key, ABSENT in (difference.a, difference.b), explicit, chosen)
        if choice is None:
            own.append(Factor("config", key, *values[key], []))
        else:
            along[choice].append(f"{key} {' -> '.join(values[key])}")
    # A preset that brought nothing changed nothing.
    kept = [group for group in chosen if group not in _PRESETS or along[group]]
    return [Factor("config", group, *chosen[group], along[group]) for group in kept] + own


def _gives(words: Mapping[str, str], key: str) -> bool:
    """True if a command line gave this key, or all keys below one above it."""
    names = [name for name in words if name not in _GROUPS and "/" not in name]
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _choice_of(key: str, absent: bool, explicit: bool, chosen: Collection[str]) -> str | None:
    """The differing choice that brought a key along."""
    root = key.partition(".")[0]
    if root in ("algo", "env") and root in chosen and absent:
        return root  # it means nothing to the other algorithm or environment
    if explicit:
        return None
    order = (*([root] if root in _CHOICES else []), *_PRESETS, "experiment", "algo", "env", "recipe")
    return next((group for group in order if group in chosen), None)


def _unexplained(settings: Sequence[Difference], factors: Sequence[Factor]) -> Iterator[Difference]:
    """Settings that differ and follow from nothing else that differs."""
    kinds = {factor.kind for factor in factors}
    names = {factor.name.partition(".")[0] for factor in factors if factor.kind == "config"}
    if not kinds & {"versions", "hardware"} and not names & set(_SETTING_KEYS):
        for one in settings:
            if not (
                "code" in kinds and ABSENT in (one.a, one.b)
            ):  # only one version of the code reads it back
                yield one


def _together(kind: str, found: Sequence[Difference]) -> Factor:
    shown = [(one.key, *one.shown()) for one in found]
    a, b = ("; ".join(f"{each[0]} {each[side]}" for each in shown) for side in (1, 2))
    return Factor(kind, kind, a, b, [f"{key} {one} -> {other}" for key, one, other in shown])
