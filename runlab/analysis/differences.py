"""Differences between two runs besides their results, for every command that compares runs.

Sources are the records and configurations of the runs, and the diff of their code.

Factors are the things that were changed and that can change what a run computes. With one change at a time
its effect is known, so changes are counted as a researcher would:

* each key of the configuration is one, also if a file of conf/experiment/ has it. Keys that a choice brings
  along belong to the choice: if `algo`, `env`, `determinism` or `recipe` differs, that is one factor with all
  other keys that neither command line gave. A key that was given to one of the runs (`overrides` in its
  record) stays a factor of its own, unless the other algorithm or environment does not have it;
* `code` is one, with any number of files that can change a run. A key that only one version of the code has
  is part of this factor;
* `versions` of Python, the C library, the packages that compute and the compiler are one;
* `hardware` is one: the processor, its number of cores and, unless both ran on the CPU, the GPUs;
* `resumed` is one, for each run that was resumed with other code or libraries, or compiled on another
  processor;
* `settings` that were read back from the libraries or set in the process environment are one, unless another
  factor explains them;
* `computation` is one if known computations gave other bits at the starts, and nothing else explains that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runlab.analysis.runs import PLANNED, Run, single_line
from runlab.config.affects_results import (
    BOOKKEEPING_KEYS,
    COMPUTING_FACTS,
    COMPUTING_PACKAGES,
    GPU_FACTS,
    code_rule,
    key_affects_results,
    package_affects_results,
)
from runlab.config.texts import few
from runlab.machine import COMPILER
from runlab.run.computed import OtherComputation, first_other
from runlab.run.git import changes
from runlab.run.paths import PROJECT
from runlab.run.read import leaves
from runlab.run.used_code import files_of, outside_changes

# Settings are read back from the libraries, or set in the process environment.
SECTIONS = ("code", "configuration", "versions", "machine", "settings")
CODE, CONFIGURATION, VERSIONS, MACHINE, SETTINGS = SECTIONS
ABSENT = "(absent)"  # in the place of a value that one of the runs does not have
OUTSIDE = " (outside of the repository)"  # ends the key of a difference in code that git does not have
REVISION = "revision"  # the key of a difference in code with unknown files
NOT_RECORDED = "(not recorded)"
SEED = "seed"
_IDLE_KEYS = (SEED, "experiment")  # keys of the configuration that compute nothing themselves
_EVALUATION_KEYS = ("eval_every", "eval_episodes", "eval_policy")
_NAMED = 6  # factors in a line
_Facts = Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]]  # of both runs, by section

# Facts of a machine that are software. They are compared as versions.
_SOFTWARE = ("python", "python_implementation", "libc")

# Groups of the configuration that are chosen by name, and the key whose value is the choice.
_CHOICES = {
    "algo": "algo.name",
    "env": "env.id",
    "recipe": "recipe",
    "determinism": "determinism.level",
}
# A level may leave these keys to the machine: processor and networks then decide their values.
_FOLLOW = ("determinism.products", "determinism.blas_kernels")
# Keys that exist only in runs whose user gave them.
_GIVEN = ("env.kwargs.", "env.wrappers", "env.training_wrappers")
# Differences that can make known computations differ, besides those of processors, GPUs and settings.
_COMPUTING_KEYS = ("num_threads", "device", "determinism")
_COMPUTING_CODE = "runlab/determinism/"
_COMPUTING_VERSIONS = ("nvidia-", "torch's ", "numpy's ")  # starts of names
# Keys that determine settings and environment variables.
_SETTING_KEYS = {"num_threads", "device", "compile", "determinism", "algo", "env"}


@dataclass(frozen=True, slots=True)
class Difference:
    """One fact in which two runs differ.

    `section` is one of SECTIONS. `key` is a dotted key, a package, or a file of the code; the values of a
    file are the revisions of both runs. `idle` marks code that neither run used.
    """

    section: str
    key: str
    a: Any
    b: Any
    idle: bool = False

    @property
    def affects_results(self) -> bool:
        """True if it can change what a run computes, other than by its seed."""
        if self.section == CODE:
            return not self.idle
        if self.section == CONFIGURATION:
            return self.key not in _IDLE_KEYS and key_affects_results(self.key)
        if self.section == VERSIONS:
            return self.key in COMPUTING_PACKAGES if self.one_sided else package_affects_results(self.key)
        if self.section == MACHINE:
            return self.key in COMPUTING_FACTS and None not in (self.a, self.b) and not self.one_sided
        return True

    @property
    def remark(self) -> str:
        """The reason why the difference does not count; empty if it does."""
        if self.affects_results:
            return ""
        if self.section == CONFIGURATION and self.key == SEED:
            return "  (other random numbers; not counted)"
        if self.section == CONFIGURATION and self.key.startswith(_EVALUATION_KEYS):
            return "  (changes what is measured, not what is learned; not counted)"
        return "  (cannot change results)"

    @property
    def one_sided(self) -> bool:
        return ABSENT in (self.a, self.b)

    @property
    def change(self) -> str:
        one, other = single_line(self.a), single_line(self.b)
        if one == other and self.section == CODE:
            return f"{one}, the same commit with other uncommitted changes"
        if one == other:  # the text "1" and the number 1
            return f"{self.a!r} -> {self.b!r}"
        return f"{one} -> {other}"


@dataclass(frozen=True, slots=True)
class RunDiff:
    """Differences between two runs.

    `computation` is the first part of known computations that gave other bits. `factors` has the change by
    the name of the thing that was changed. `changed_files` is None where the code cannot be compared, and
    `not_recorded` has the sections that one of the records lacks. `notes` are facts that the factors do not
    show.
    """

    differences: list[Difference]
    computation: OtherComputation | None
    factors: dict[str, str]
    changed_files: list[str] | None
    not_recorded: list[str]
    notes: list[str]


def diff_runs(a: Run, b: Run) -> RunDiff:
    """Differences between two recorded runs, whose code is in this repository."""
    return compare_records(a, b, changes.files_between(PROJECT, a.record.git, b.record.git))


def compare_records(a: Run, b: Run, files: list[str] | None) -> RunDiff:
    """Differences between two loaded runs, of which `files` differ in their code (None: unknown)."""
    libraries = all(run.record.determinism.computed.libraries for run in (a, b))
    sides = (_facts(run, libraries) for run in (a, b))
    facts = dict(zip(SECTIONS[1:], zip(*sides, strict=True), strict=True))
    differences = list(_differences(a, b, files, facts))
    not_recorded = [] if _some_revision(a, b) else [CODE]
    not_recorded += [section for section, sides in facts.items() if not all(sides)]
    computation = first_other(*(run.record.determinism.computed for run in (a, b)))
    factors = _factors(a, b, differences)
    if computation is not None and not any(causes_of_computation(differences).values()):
        factors["computation"] = f'(from "{computation.part}" on)'
    notes = list(_notes(a, b, differences, files))
    return RunDiff(differences, computation, factors, files, not_recorded, notes)


def causes_of_computation(differences: Iterable[Difference]) -> dict[str, list[str]]:
    """By section, the keys of differences that can make known computations differ."""
    causes: dict[str, list[str]] = {section: [] for section in SECTIONS}
    for one in differences:
        root = one.key.partition(".")[0]
        can = {
            CODE: one.key == REVISION or _COMPUTING_CODE in one.key,
            CONFIGURATION: root in _COMPUTING_KEYS,
            VERSIONS: one.key in (*COMPUTING_PACKAGES, "libc", "python")
            or one.key.startswith(_COMPUTING_VERSIONS),
            MACHINE: root != "logical_cores",
            SETTINGS: True,
        }
        if can[one.section] and one.affects_results:
            causes[one.section].append(one.key)
    return causes


def _differences(a: Run, b: Run, files: list[str] | None, facts: _Facts) -> Iterator[Difference]:
    """All differences in the order of SECTIONS, except for sections that one of the records lacks."""
    used, now = a.record.used, b.record.used
    counts = code_rule(files_of(used), files_of(now))
    for name in files or ([REVISION] if files is None and _some_revision(a, b) else []):
        yield Difference(CODE, name, _revision(a), _revision(b), idle=name != REVISION and not counts(name))
    for name, digests in outside_changes(used, now).items():
        one, other = (each[:10] if each else ABSENT for each in digests)
        yield Difference(CODE, f"{name}{OUTSIDE}", one, other)
    for section, (facts_a, facts_b) in facts.items():
        flat_a, flat_b = dict(leaves(facts_a)), dict(leaves(facts_b))
        for key in {**flat_a, **flat_b} if flat_a and flat_b else ():
            one, other = flat_a.get(key, ABSENT), flat_b.get(key, ABSENT)
            if one != other or isinstance(one, bool) != isinstance(other, bool):  # True == 1
                yield Difference(section, key, one, other)


def _facts(run: Run, libraries: bool) -> Iterator[Mapping[str, Any]]:
    """The facts of each section but the code; empty where nothing was recorded.

    `libraries` says whether both runs recorded the libraries inside of packages, which are then versions.
    """
    record, settings = run.record, run.record.determinism.settings
    yield {key: value for key, value in run.config.items() if key not in BOOKKEEPING_KEYS}
    software = {key: record.machine[key] for key in _SOFTWARE if record.machine.get(key)}
    inside = record.determinism.computed.libraries if libraries else {}
    yield software | record.versions | inside if record.versions else {}
    on_gpu = run.config.get("device", "cpu") != "cpu"
    idle = (*_SOFTWARE, "memory_bytes", *(() if on_gpu else GPU_FACTS))
    yield {key: value for key, value in record.machine.items() if key not in idle}
    yield settings | record.environment if settings else {}


def _revision(run: Run) -> str:
    """The commit that a run's code was made from; `*` marks uncommitted changes."""
    git = run.record.git
    name = git.base_commit or git.commit or git.tree
    return NOT_RECORDED if name is None else f"{name[:10]}{'*' if git.dirty else ''}"


def _some_revision(a: Run, b: Run) -> bool:
    return {_revision(a), _revision(b)} != {NOT_RECORDED}


def _notes(a: Run, b: Run, differences: Sequence[Difference], files: list[str] | None) -> Iterator[str]:
    if files is None and not (a.record.git.problem or b.record.git.problem):  # those get a line below
        yield (
            "the code cannot be compared: this repository does not have both snapshots "
            "(`git fetch REMOTE 'refs/runs/*:refs/runs/*'`)"
        )
    elif files and not any(one.section == CODE and one.affects_results for one in differences):
        yield f"only files differ that cannot change a run: {few(files)}"
    definitions = {run.record.determinism.computed.definition for run in (a, b)} - {""}
    if len(definitions) > 1:
        yield "digests of known computations are not compared: other code made them"
    for run in (a, b):
        git, status = run.record.git, run.record.status
        if status not in ("finished", PLANNED):
            yield f"{run.id} {'is still running' if status == 'running' else f'ended {status}'}"
        if changed := [*dict.fromkeys(key for part in run.record.resumed for key in part.changed)]:
            yield f"{run.id} was resumed with other {', '.join(changed)} than before"
        if git.problem:
            yield f"{run.id} has no snapshot of its code ({git.problem})"
        compared = git.left_out()
        if compared:
            yield f"not in the snapshot of {run.id}, so compared by size and digest only: {few([*compared])}"
        if nested := [path for each in git.skipped if (path := str(each["path"])) not in compared]:
            yield f"not in the snapshot of {run.id}, so not compared: {few(nested)}"


def _factors(a: Run, b: Run, differences: Sequence[Difference]) -> dict[str, str]:
    counted = {
        name: [one for one in differences if one.section == name and one.affects_results] for name in SECTIONS
    }
    keys, code = counted[CONFIGURATION], [one.key for one in counted[CODE]]
    if code:  # keys of only one version of the code belong to `code`
        keys = [one for one in keys if not one.one_sided or one.key.startswith(_GIVEN)]
    typed = {word.lstrip("+~").partition("=")[0] for run in (a, b) for word in run.record.overrides}
    factors = _config_factors({one.key: one for one in keys}, typed, _other_files(a, b))
    if code and code != [REVISION]:
        factors["code"] = f"({few(code)})"
    # If only one run has a setting, perhaps only its version of the code reads this setting back.
    settings = [one for one in counted[SETTINGS] if not (code and one.one_sided)]
    if {name.partition(".")[0] for name in factors} & _SETTING_KEYS or counted[VERSIONS] or counted[MACHINE]:
        settings = []  # another factor explains them
    beside = {"versions": counted[VERSIONS], "hardware": counted[MACHINE], "settings": settings}
    for name, several in beside.items():
        if several:
            only = f"{several[0].key} {several[0].change}"
            factors[name] = f"({only if len(several) == 1 else few([one.key for one in several])})"
    resumed = [f"{run.id} with other {', '.join(named)}" for run in (a, b) if (named := resumed_with(run))]
    if resumed:
        factors["resumed"] = f"({'; '.join(resumed)})"
    return factors


def resumed_with(run: Run, *more: str) -> list[str]:
    """The changes at resumes of a run that may have changed its results, and changes of the keys `more`."""
    counted = ["code", "libraries", *["cpu"] * (COMPILER in run.record.versions), "computation", *more]
    return [key for key in counted if any(key in part.changed for part in run.record.resumed)]


def _other_files(a: Run, b: Run) -> dict[str, str]:
    """The change of `experiment` and `debug`, where both command lines name others of their files."""
    named = [
        dict(word.lstrip("+").split("=", 1) for word in r.record.overrides if "=" in word) for r in (a, b)
    ]
    each = {group: [words.get(group, "none") for words in named] for group in ("experiment", "debug")}
    return {group: f"{one} -> {other}" for group, (one, other) in each.items() if one != other}


def _config_factors(
    changed: dict[str, Difference], typed: set[str], files: Mapping[str, str]
) -> dict[str, str]:
    """Factors among changed keys of the configuration; `typed` are the keys of both command lines.

    A key that a choice brings may also come from one of `files`, which is then a factor as well.
    """
    chosen = {group: changed.pop(key) for group, key in _CHOICES.items() if key in changed}
    if chosen.keys() & {"algo", "env"} and "recipe" not in typed:
        chosen.pop("recipe", None)  # the other choice brings it
    factors = {group: one.change for group, one in chosen.items()}
    for key, one in changed.items():
        root = key.partition(".")[0]
        wrappers = key in _GIVEN  # one value, of which a part may be given
        explicit = any(
            f"{key}.".startswith(f"{name}.") or (wrappers and name.startswith(f"{key}."))
            for name in typed - _CHOICES.keys()
        )
        brought = key in _FOLLOW or bool(chosen.keys() & {root, "algo", "env", "recipe"})
        unknown_to_other = one.one_sided and root in ("algo", "env") and root in chosen and not wrappers
        if not unknown_to_other and (explicit or not brought):
            factors[key] = one.change
        elif key not in _FOLLOW:
            factors |= files
    return factors


def describe(factors: Mapping[str, str]) -> str:
    """The factors in one line, such as `algo.gamma 0.99 -> 0.95; code (2 files)`; the first of many."""
    texts = [f"{name} {change}" for name, change in factors.items()]
    more = f"; and {len(texts) - _NAMED} more" if len(texts) > _NAMED else ""
    return "; ".join(texts[:_NAMED]) + more


def verdict(diff: RunDiff) -> str:
    """The changes in a line; a warning if there is more than one, or the code is unknown."""
    count, unknown = len(diff.factors), diff.changed_files is None
    text = {0: "nothing differs", 1: "1 thing differs"}.get(count, f"{count} things differ")
    text += f": {describe(diff.factors)}" if count else ""
    if count > 1 or unknown:
        text += ", and the code cannot be compared" if unknown else ""
        return f"warning: {text}; the cause of a difference in returns is unclear"
    if count:
        return text
    seeds = next((one.change for one in diff.differences if one.key == SEED), None)
    return f"same experiment{', same seed' if seeds is None else f': only the seed differs, {seeds}'}"


def listed(differences: Iterable[Difference], section: str, most: int | None = None) -> Iterator[str]:
    """Lines about the differences of a section, those that can change results first."""
    chosen = sorted(
        (one for one in differences if one.section == section), key=lambda one: not one.affects_results
    )
    keys = [single_line(one.key) for one in chosen]
    width = max(map(len, keys), default=0)
    for key, one in list(zip(keys, chosen, strict=True))[:most]:
        yield f"  {key:{width}}  {one.change}{one.remark}"
    if most is not None and len(chosen) > most:
        yield f"  and {len(chosen) - most} more; json=true lists them all"
