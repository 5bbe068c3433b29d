"""What was changed between two recorded runs, counted: who changes one thing at a time can tell what did it.

A factor is one thing that was changed and that can change what a run computes:

* each key of the configuration, but for those of a choice, which come along with it. Where `algo.name`
  differs, all of `algo.*` belongs to the factor `algo`, and so do the recipe and every other key that neither
  run was given on its command line; likewise `env` with `env.id`, and `determinism` with `determinism.level`
  and `determinism.*`. Another experiment is a factor, and the recipe that it takes in place of the usual one
  comes along. With the same algorithm, environment and experiment another recipe is a factor, and so is
  another `debug=` or `local=`. A key that was given to one of the runs (`overrides` in its record)
  stays a factor of its own, unless it means nothing to the other algorithm or environment;
* `code`, whatever the number of files; those that cannot change a run (`rltemplate/run/influence.py`) count
  as none. A key that only one of two versions of the code has is part of this change, given or not;
* `versions` of Python, the C library and the packages that compute;
* `hardware`: processor and its number of cores, and unless both ran on the CPU also GPUs and their driver;
* `settings` that were read back from the libraries or stood in the environment of the process, where none
  of the other factors explains them.

The seed is no factor, nor is where a run lies and what it is for (`types.BOOKKEEPING_KEYS`), what only looks
at it (`types.OBSERVER_KEYS`), or by what means it is computed (`types.EXECUTION_KEYS`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rltemplate.analysis.compare import ABSENT
from rltemplate.analysis.runs import MISSING, Run, text_of
from rltemplate.config.recorded_keys import ADDED, name_in_added
from rltemplate.run.influence import file_matters, package_matters, presence_matters
from rltemplate.run.read import leaves
from rltemplate.types import BOOKKEEPING_KEYS, affects_results

SEED = "seed"
# By the group, the key of the configuration whose value is the choice.
_CHOICES = {"algo": "algo.name", "env": "env.id", "determinism": "determinism.level"}
_RECIPE, _EXPERIMENT = "recipe", "experiment"
# Chosen on the command line, and in the configuration only by the values that they bring.
_PRESETS = ("debug", "local")
_GROUPS = (*_CHOICES, _RECIPE, _EXPERIMENT, *_PRESETS, "logger")
# Left open by a level: what it becomes follows from processor and networks. Read back as a setting too.
_FOLLOWS = "determinism.products"
# Of a record's machine. How much memory there is changes nothing, and neither does which cores a process may
# use: how many of them compute is in the configuration.
_HARDWARE = ("architecture", "cpu", "cpu_flags", "logical_cores")
_GPU_HARDWARE = ("gpu_driver", "gpus")
_SOFTWARE = ("python", "python_implementation", "libc")
# Keys from which settings and variables of the environment follow.
_SETTING_KEYS = ("num_threads", "device", "compile", "determinism", "algo", "env", *_PRESETS)
_NAMED = 4  # things of one factor in a line

Pair = tuple[str, Any, Any]  # a name and its values in the two runs


@dataclass(frozen=True, slots=True)
class Factor:
    """One thing that was changed. `kind`: config, code, versions, hardware or settings.

    `a` and `b` are what it is in the two runs, `detail` what came along or is part of it. `brought` are keys
    that came with other code and were given, with their values.
    """

    kind: str
    name: str
    a: str
    b: str
    detail: list[str]
    brought: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Difference:
    """What differs between the runs `a` and `b`, and in `factors` what was changed.

    `config` has all keys that differ, but for `types.BOOKKEEPING_KEYS`; `versions` all packages, also such as
    compute nothing; `changed_files` is None where nobody can tell. A value is "(absent)" where a run has
    none. `metrics` are the last values of both, equal ones included, None where a run has none. `notes` are
    lines about what cannot be seen from factors alone.
    """

    a: str
    b: str
    factors: list[Factor]
    config: list[Pair]
    versions: list[Pair]
    hardware: list[Pair]
    settings: list[Pair]
    metrics: list[Pair]
    changed_files: list[str] | None
    notes: list[str]

    @property
    def many(self) -> bool:
        """Whether more than one thing differs, or may."""
        return len(self.factors) > 1 or self.changed_files is None

    @property
    def seeds(self) -> tuple[Any, Any] | None:
        """Both seeds, if they differ."""
        return next(((a, b) for key, a, b in self.config if key == SEED), None)


def compare_records(a: Run, b: Run, changed_files: list[str] | None) -> Difference:
    """What differs between two loaded runs; `changed_files` differ in their code (None: nobody can tell)."""
    given = _given(a), _given(b)
    config = [pair for pair in _unequal(a.config, b.config) if _root(pair[0]) not in BOOKKEEPING_KEYS]
    new = {key for key, *pair in config if ABSENT in pair and not key.startswith("env.kwargs.")}
    config = list(_since_before(config, a, b))
    versions, hardware = list(_versions(a, b)), list(_hardware(a, b))
    settings = list(_unequal(_settings(a), _settings(b))) if _settings(a) and _settings(b) else []
    files = changed_files or []
    code = [name for name in files if file_matters(name)]
    factors, came_along = _config_factors(given, config, new if code or changed_files is None else set())
    if code:
        brought = [f"{factor.name} {factor.a} -> {factor.b}" for factor in factors if factor.name in new]
        factors = [factor for factor in factors if factor.name not in new]
        factors.append(Factor("code", "code", _code(a), _code(b), code, brought))
    for kind, pairs in (
        ("versions", [pair for pair in versions if _version_matters(*pair)]),
        ("hardware", hardware),
    ):
        if pairs:
            factors.append(_together(kind, pairs))
    unexplained = list(_unexplained(settings, factors))
    if unexplained:
        factors.append(_together("settings", unexplained))
    notes = [*(f"came with the code: {text}" for text in came_along), *_notes(a, b, changed_files, code)]
    metrics = list(_metrics(a, b))
    return Difference(
        a.id, b.id, factors, config, versions, hardware, settings, metrics, changed_files, notes
    )


# --- Configuration ---------------------------------------------------------------------------------------


def _root(key: str) -> str:
    return key.partition(".")[0]


def _unequal(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Pair]:
    flat_a, flat_b = dict(leaves(a)), dict(leaves(b))
    for key in {**flat_a, **flat_b}:
        pair = flat_a.get(key, ABSENT), flat_b.get(key, ABSENT)
        # True == 1 in Python, and to no one else.
        if pair[0] != pair[1] or isinstance(pair[0], bool) != isinstance(pair[1], bool):
            yield key, *pair


def _since_before(config: Sequence[Pair], a: Run, b: Run) -> Iterator[Pair]:
    """The pairs, with the value that a key had before it existed where that is known."""
    algorithms = [run.config["algo"]["name"] for run in (a, b)]
    for key, *pair in config:
        if ABSENT in pair and not (key.startswith("algo.") and algorithms[0] != algorithms[1]):
            before = ADDED.get(name_in_added(key, algorithms[0]), ABSENT)
            pair = [before if value == ABSENT else value for value in pair]
            if pair[0] == pair[1]:
                continue
        yield key, pair[0], pair[1]


def _given(run: Run) -> dict[str, str]:
    """What was said on the command line of a run, by key."""
    split = (str(word).lstrip("+~").partition("=") for word in run.record.get("overrides") or [])
    return {key: value for key, _, value in split}


def _config_factors(
    given: tuple[Mapping[str, str], Mapping[str, str]], config: Sequence[Pair], new: Collection[str]
) -> tuple[list[Factor], list[str]]:
    """The factors among the keys, and those of the keys `new` with other code that nobody gave."""
    pairs = {key: (x, y) for key, x, y in config if key != SEED and affects_results(key)}
    explicit = {key for key in pairs if any(_names(words, key) for words in given)}
    # Choices that differ, the ones that carry others along first.
    chosen: dict[str, tuple[str, str]] = {
        group: (text_of(pairs[key][0]), text_of(pairs[key][1]))
        for group, key in _CHOICES.items()
        if key in pairs
    }
    recipe_said = any(_RECIPE in words for words in given)
    for group in (_EXPERIMENT, _RECIPE):
        along_with = {"algo", "env", _EXPERIMENT} & chosen.keys()
        if group in pairs and (group == _EXPERIMENT or recipe_said or not along_with):
            chosen[group] = (text_of(pairs[group][0]), text_of(pairs[group][1]))
    for group in _PRESETS:
        one, other = (_preset(each.get(group)) for each in given)
        if one != other:
            chosen[group] = (one, other)
    along: dict[str, list[str]] = {group: [] for group in chosen}
    own: list[Factor] = []
    came_along: list[str] = []
    for key, (x, y) in pairs.items():
        if key in (_CHOICES.get(group) for group in chosen) or (
            key in (_RECIPE, _EXPERIMENT) and key in chosen
        ):
            continue
        if key == _FOLLOWS and key not in explicit and "determinism" not in chosen:
            continue
        text = f"{key} {text_of(x)} -> {text_of(y)}"
        carrier = _carrier(key, ABSENT in (x, y), key in explicit, chosen)
        if carrier is not None:
            along[carrier].append(text)
        elif key in new and key not in explicit:
            came_along.append(text)
        else:
            own.append(Factor("config", key, text_of(x), text_of(y), []))
    factors = [
        Factor("config", group, *chosen[group], along[group])
        for group in chosen
        if group not in _PRESETS or along[group]  # a preset that brought nothing changed nothing
    ]
    return factors + own, came_along


def _names(words: Mapping[str, str], key: str) -> bool:
    """Whether the command line gave this key, or all that is below a key above it."""
    return any(
        key == name or key.startswith(f"{name}.") for name in words if name not in _GROUPS and "/" not in name
    )


def _preset(value: str | None) -> str:
    return "none" if value in (None, "", "null") else f"{value}"


def _carrier(key: str, absent: bool, explicit: bool, chosen: Mapping[str, Any]) -> str | None:
    """Which of the choices that differ brought this key along."""
    root = _root(key)
    if root in chosen and root in ("algo", "env") and absent:
        return root  # it means nothing to the other algorithm or environment
    if explicit:
        return None
    if root in chosen and root in _CHOICES:
        return root
    # Experiments come after recipes, and presets after both; the later one wins.
    first = [] if root in _CHOICES and root != "determinism" else list(_PRESETS)
    last = [] if first else list(_PRESETS)
    return next(
        (group for group in (*first, _EXPERIMENT, "algo", "env", _RECIPE, *last) if group in chosen), None
    )


# --- Versions, hardware, settings ------------------------------------------------------------------------


def _of(run: Run, section: str) -> Mapping[str, Any]:
    """A section of the record, which `load_run` has looked at."""
    found: Mapping[str, Any] = run.record.get(section) or {}
    return found


def _versions(a: Run, b: Run) -> Iterator[Pair]:
    """What differs in its version: the interpreter first, then packages that compute, then all others."""
    if not (_of(a, "versions") and _of(b, "versions")):
        return
    sides = [
        {name: _of(run, "machine").get(name) for name in _SOFTWARE if _of(run, "machine").get(name)}
        | dict(_of(run, "versions"))
        for run in (a, b)
    ]
    yield from sorted(
        _unequal(*sides),
        key=lambda pair: (pair[0] not in _SOFTWARE, not _version_matters(*pair), pair[0]),
    )


def _version_matters(name: str, a: Any, b: Any) -> bool:
    """Whether it may change a run that this package has another version, or is there at all."""
    return presence_matters(name) if ABSENT in (a, b) else package_matters(name)


def _hardware(a: Run, b: Run) -> Iterator[Pair]:
    machines = _of(a, "machine"), _of(b, "machine")
    if not all(machines):
        return
    on_gpu = any(run.config.get("device", "cpu") != "cpu" for run in (a, b))
    for name in (*_HARDWARE, *(_GPU_HARDWARE if on_gpu else ())):
        x, y = (machine.get(name) for machine in machines)
        if x == y or x is None or y is None:  # a fact that one of the systems does not tell
            continue
        if name == "cpu_flags" and isinstance(x, list) and isinstance(y, list):
            x, y = [flag for flag in x if flag not in y], [flag for flag in y if flag not in x]
        if name == "gpus":
            x, y = _gpus(x), _gpus(y)
        yield name, x, y


def _gpus(found: Any) -> list[str]:
    """GPUs by name; those of one name differ in what is added."""
    if not isinstance(found, list):
        return [str(found)]
    known = [gpu if isinstance(gpu, Mapping) else {} for gpu in found]
    return [f"{gpu.get('name')} ({gpu.get('multiprocessors')} multiprocessors)" for gpu in known]


def _settings(run: Run) -> dict[str, Any]:
    """What was read back from the libraries and stood in the environment; empty before a run begins."""
    settings = _of(run, "determinism").get("settings")
    if not isinstance(settings, Mapping):
        return {}
    return {**settings, "environment": dict(_of(run, "environment"))}


def _unexplained(settings: Sequence[Pair], factors: Sequence[Factor]) -> Iterator[Pair]:
    """Settings that differ and follow from nothing else that differs."""
    kinds = {factor.kind for factor in factors}
    if kinds & {"versions", "hardware"}:
        return
    if any(factor.kind == "config" and _root(factor.name) in _SETTING_KEYS for factor in factors):
        return
    for key, a, b in settings:
        if not ("code" in kinds and ABSENT in (a, b)):  # read back by one of two versions of the code
            yield key, a, b


def _together(kind: str, pairs: Sequence[Pair]) -> Factor:
    detail = [f"{name} {text_of(a)} -> {text_of(b)}" for name, a, b in pairs]
    a, b = ("; ".join(f"{pair[0]} {text_of(pair[side])}" for pair in pairs) for side in (1, 2))
    return Factor(kind, kind, a, b, detail)


def _code(run: Run) -> str:
    git = _of(run, "git")
    name = str(git.get("base_commit") or git.get("commit") or git.get("tree") or "unknown")[:10]
    return f"{name}*" if git.get("dirty") else name


# --- What else is to be known ----------------------------------------------------------------------------


def _metrics(a: Run, b: Run) -> Iterator[Pair]:
    names = {**(_of(a, "final_metrics") or a.last_row), **(_of(b, "final_metrics") or b.last_row)}
    first = [name for name in ("eval/return", "episode/return") if name in names]
    yield "steps", a.value("steps"), b.value("steps")
    for name in dict.fromkeys([*first, *names]):
        if name not in ("env_steps", "wall_time_s"):
            x, y = (run.value(name) for run in (a, b))
            yield name, None if x is MISSING else x, None if y is MISSING else y
    yield "duration", a.value("duration"), b.value("duration")


def _notes(a: Run, b: Run, changed_files: list[str] | None, code: Sequence[str]) -> Iterator[str]:
    if a.dir == b.dir and a.id == b.id:
        yield "a and b are the same run"
    for run in (a, b):
        status = run.record.get("status")
        if status is not None and status != "finished":
            yield f"{run.id} {'is still running' if status == 'running' else f'ended {status}'}"
        for again in run.record.get("resumed") or []:
            changed = again.get("changed") if isinstance(again, Mapping) else None
            if isinstance(changed, Mapping) and changed:
                yield f"{run.id} was resumed where another state was found of: {', '.join(changed)}"
    if changed_files is None:
        yield f"the code cannot be compared: {_why_unknown(a, b)}"
    elif changed_files and not code:
        yield f"of the files only such differ as cannot change a run: {_few(changed_files)}"
    for run in (a, b):
        git = _of(run, "git")
        for key, why in (("skipped", "left out of the snapshot"), ("dirty_submodules", "changed submodules")):
            found = git.get(key)
            if isinstance(found, list) and found:
                names = [str(each.get("path")) if isinstance(each, Mapping) else str(each) for each in found]
                yield f"not compared, {why} of {run.id}: {_few(names)}"
    for section, what in (("versions", "versions"), ("machine", "hardware")):
        lacking = [run.id for run in (a, b) if not _of(run, section)]
        if lacking:
            yield f"{what} cannot be compared: there are none in the record of {' and of '.join(lacking)}"
    on_gpu = any(run.config.get("device", "cpu") != "cpu" for run in (a, b))
    if on_gpu and any(_of(run, "machine") and _of(run, "machine").get("gpus") is None for run in (a, b)):
        yield "GPUs cannot be compared before a run has begun"


def _why_unknown(a: Run, b: Run) -> str:
    for run in (a, b):
        git = _of(run, "git")
        if not git.get("tree") and not git.get("commit"):
            why = f" ({git['problem']})" if git.get("problem") else ""
            return f"{run.id} has no snapshot{why}"
    return "this repository does not have both snapshots (`git fetch REMOTE 'refs/runs/*:refs/runs/*'`)"


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


# --- As text ---------------------------------------------------------------------------------------------


def describe(factors: Sequence[Factor], most: int | None = None) -> str:
    """The factors in one line: `algo.gamma 0.99 -> 0.95; code (2 files)`. Of more than `most`, the number."""
    told = [_describe(factor) for factor in factors]
    if most is not None and len(told) > most:
        told = [*told[:most], f"and {len(told) - most} more"]
    return "; ".join(told)


def _count(files: Sequence[str]) -> str:
    return f"{len(files)} file{'' if len(files) == 1 else 's'}"


def _describe(factor: Factor) -> str:
    if factor.kind == "config":
        return f"{factor.name} {factor.a} -> {factor.b}"
    if factor.kind == "code":
        brought = f" with {', '.join(factor.brought)}" if factor.brought else ""
        return f"code ({_count(factor.detail)}){brought}"
    if len(factor.detail) == 1:
        return f"{factor.name} ({factor.detail[0]})"
    return f"{factor.name} ({_few([each.partition(' ')[0] for each in factor.detail])})"


def verdict(difference: Difference) -> str:
    """What was changed, in a line; a warning if it is more than one thing or nobody can tell."""
    factors, seeds = difference.factors, difference.seeds
    unknown = difference.changed_files is None
    if len(factors) > 1:
        more = ", and the code cannot be compared" if unknown else ""
        return (
            f"warning: {len(factors)} things differ{more}: {describe(factors)}; what a difference of the "
            "returns comes from cannot be told"
        )
    if unknown:
        known = f"1 thing differs, {describe(factors)}" if factors else "nothing else differs"
        return (
            f"warning: {known}, but the code cannot be compared; what a difference of the returns comes from "
            "cannot be told"
        )
    if factors:
        return f"1 thing differs: {describe(factors)}"
    if seeds is not None:
        return f"same experiment: only the seed differs, {text_of(seeds[0])} -> {text_of(seeds[1])}"
    return "same experiment, same seed"


def report(difference: Difference, code: str | None = None) -> str:
    """All of it for a terminal, the verdict last. `code` is shown where the names of the files would be."""
    aside = {key for key, _, _ in difference.config if key == SEED or not affects_results(key)}
    config = sorted(difference.config, key=lambda pair: pair[0] in aside)
    aside |= {pair[0] for pair in difference.versions if not _version_matters(*pair)}
    lines = [f"a  {difference.a}", f"b  {difference.b}", "", *_section("configuration", config, aside), ""]
    files = difference.changed_files
    if files is None:
        lines.append("code: cannot be compared")
    elif not files:
        lines.append("code: equal")
    else:
        counted = next((len(factor.detail) for factor in difference.factors if factor.kind == "code"), 0)
        some = "" if counted == len(files) else f", {counted or 'none'} of which can change a run"
        lines += [f"code: {_count(files)}{some}", file_names(difference) if code is None else code]
    for title, pairs in (
        ("versions", difference.versions),
        ("hardware", difference.hardware),
        ("settings", difference.settings),
    ):
        lines += ["", *_section(title, pairs, aside)]
    lines += ["", "metrics at the end", *_metric_lines(difference.metrics)]
    if difference.notes:
        lines += ["", *(f"note: {note}" for note in difference.notes)]
    return "\n".join([*lines, "", verdict(difference)])


def file_names(difference: Difference) -> str:
    """The files that differ, a line for each."""
    names = difference.changed_files or []
    return "\n".join(f"  {name}{'' if file_matters(name) else '  (no factor)'}" for name in names)


def _section(title: str, pairs: Sequence[Pair], aside: Collection[str]) -> Iterator[str]:
    if not pairs:
        yield f"{title}: equal"
        return
    yield title
    width = max(len(name) for name, _, _ in pairs)
    for name, a, b in pairs:
        yield f"  {name:{width}}  {text_of(a)} -> {text_of(b)}{'  (no factor)' if name in aside else ''}"


def _metric_lines(metrics: Sequence[Pair]) -> Iterator[str]:
    rows = [("", "a", "b"), *((name, _figure(a), _figure(b)) for name, a, b in metrics)]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    for name, a, b in rows:
        yield f"  {name:{widths[0]}}  {a:>{widths[1]}}  {b:>{widths[2]}}"


def _figure(value: Any) -> str:
    if value is None or value is MISSING:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def to_dict(difference: Difference) -> dict[str, Any]:
    """For programs: all of it, with the number of factors and the verdict."""
    return asdict(difference) | {"things": len(difference.factors), "verdict": verdict(difference)}
