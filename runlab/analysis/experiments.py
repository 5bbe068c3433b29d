"""Experiments: runs that differ only in the seed, and statistics of their returns."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import mode
from typing import Any, TypeGuard, TypeVar

import xxhash

from runlab.analysis import published, stats
from runlab.analysis.differences import resumed_with
from runlab.analysis.runs import Run, check_name, experiment_of, json_of, single_line, text_of
from runlab.analysis.stats import Interval
from runlab.config.affects_results import code_rule, package_affects_results
from runlab.config.project import project
from runlab.config.texts import few
from runlab.run.git.changes import CodeFiles, code_contents, code_digest
from runlab.run.names import short_key
from runlab.run.paths import PROJECT
from runlab.run.used_code import files_of

Points = list[tuple[int, float]]  # environment steps and value
T = TypeVar("T")
_Parts = list[tuple[dict[str, str], list[Run]]]  # of each experiment: shared values as JSON, and runs

_MOST_INTERVALS = 100  # along a curve; each takes a bootstrap
_CLOSE = 1.05  # numbers of steps within this factor count as equal


@dataclass
class Experiment:
    """All runs of one configuration and code, in the order of their starts.

    `by` names the differences from the recipe.
    """

    number: int
    runs: list[Run]
    by: str | None

    @property
    def algo(self) -> str:
        return str(self.runs[0].value("algo"))

    @property
    def env(self) -> str:
        return self.runs[0].env

    @property
    def task(self) -> dict[str, Any]:
        """The values that make the environment, in training as well as in evaluations."""
        env = self.runs[0].config["env"]
        return {key: env.get(key) for key in ("id", "kwargs", "wrappers", "max_episode_steps")}

    @property
    def name(self) -> str:
        """The algorithm and the differences."""
        return self.algo if self.by is None else f"{self.algo} {self.by}"

    @property
    def title(self) -> str:
        """The experiment as a heading."""
        return f"{self.number}. {self.algo} on {self.env}, {self.by or 'default'}"

    def __str__(self) -> str:
        return f"{self.name} on {self.env}"

    @cached_property
    def counted(self) -> list[Run]:
        """The runs behind the statistics: the newest finished run of each seed that logged a return."""
        newest = {
            run.config["seed"]: run
            for run in self.runs
            if run.value("status") == "finished" and is_usable(run.value("return"))
        }
        return [newest[seed] for seed in sorted(newest)]

    @cached_property
    def score(self) -> str:
        """The metric that says how good a policy is: the one of evaluations if all runs have it."""
        evaluated = all("eval/return" in run.record.final_metrics for run in self.counted)
        return "eval/return" if evaluated else "episode/return"

    @cached_property
    def returns(self) -> list[float]:
        return [float(run.value("return")) for run in self.counted]

    @property
    def steps(self) -> int:
        """Environment steps of the longest counted run."""
        return max(int(run.value("steps") or 0) for run in self.counted)

    def interval(self, statistic: str = "iqm") -> Interval:
        return stats.interval(self.returns, statistic)

    @property
    def summary(self) -> str:
        """The IQM of the returns with its interval; below five seeds the returns, which say more."""
        if len(self.counted) < stats.FEW:
            return ", ".join(map(published.show, self.returns))
        return str(self.interval())

    @property
    def result(self) -> str:
        """The summary of the returns, in a line."""
        seeds, what = len(self.counted), "of training episodes " * (self.score != "eval/return")
        few = f"({what}of {seeds} seed{'s' * (seeds > 1)})"  # or "0.5, 1 of 2 seeds" would be two numbers
        many = f"{what}of {seeds} seeds, IQM with its 95 % interval"
        return f"{self}: return {self.summary} {few if seeds < stats.FEW else many}"

    @property
    def standing(self) -> published.Standing | None:
        """The standing of the mean return of evaluations among published returns."""
        if not self.counted or self.score != "eval/return":
            return None
        mean = sum(self.returns) / len(self.returns)
        return published.standing_of(self.counted[0].config, self.steps, mean)

    @cached_property
    def curve(self) -> list[tuple[int, Interval]]:
        """The IQM over seeds at steps that all counted runs share."""
        curves = [dict(points(run, self.score)) for run in self.counted]
        shared = sorted(set.intersection(*map(set, curves))) if curves else []
        steps = thinned(shared, _MOST_INTERVALS)
        return [(step, stats.interval([each[step] for each in curves])) for step in steps]

    def without_curve(self) -> Iterator[str]:
        """The reason why several seeds have no curve together, and no line beside other experiments."""
        if len(self.counted) > 1 and not self.curve:
            lacking = [run.id for run in self.counted if not points(run, self.score)]
            why = f"{few(lacking)} has no rows of it" if lacking else "its seeds share no step"
            yield f"no IQM of {self.score} is drawn: {why}"

    def cautions(self) -> Iterator[str]:
        """Reasons to doubt the statistics."""
        if not self.counted:
            yield "no run of it has finished with a return, so there are no statistics"
            return
        if len(self.counted) < stats.FEW:
            yield stats.FEW_SEEDS
        for run in self.counted:
            if changed := resumed_with(run, "total_env_steps"):
                yield f"{run.id} was resumed with other {', '.join(changed)} than before"
        versions = [run.record.versions for run in self.counted]
        packages = sorted(filter(package_affects_results, {name for each in versions for name in each}))
        if changed := [
            name for name in packages if len({each[name] for each in versions if name in each}) > 1
        ]:
            yield f"the runs have different versions of {few(changed)}"
        if any(run.record.git.tree is None for run in self.counted):
            yield "the code of some runs was not recorded: it may differ between them"
        if len({run.value("steps") for run in self.counted}) > 1:
            yield "the seeds ended at different steps"
        if self.score != "eval/return":
            yield "no evaluations, so these are returns of training episodes, with exploration"

    def left_out(self) -> Iterator[str]:
        """A line about each run that is in no statistic."""
        for run in self.runs:
            if run not in self.counted:
                why = str(run.value("status"))
                if why == "finished":
                    newer = [each.id for each in self.counted if each.config["seed"] == run.config["seed"]]
                    usable = is_usable(run.value("return"))
                    why = f"its seed was run again, as {newer[0]}" if newer and usable else "has no return"
                yield f"{run.id}: {why}"


def close(a: Experiment, b: Experiment) -> bool:
    """True if both ran for about as many steps."""
    return max(a.steps, b.steps) <= _CLOSE * min(a.steps, b.steps)


def find_experiments(runs: Sequence[Run], by: str | None = None) -> list[Experiment]:
    """Groups of runs that differ only in the seed, by environment, algorithm and first start.

    `by` is any name of `Run.value`, such as `algo.gamma` or `commit`, whose values are kept apart and shown.
    Raises ConfigError if no run has it.
    """
    if by is not None:
        check_name(runs, by, f"by={by}")
    codes = dict[str, CodeFiles | None]()  # by the name of the code in records
    groups: dict[tuple[tuple[str, str], ...], list[Run]] = {}
    for run in sorted(runs, key=lambda run: (run.record.started_at or "", run.id)):
        values = experiment_of(run.config)
        if by is not None:
            values[by] = json_of(run.value(by))
        groups.setdefault(tuple(sorted(values.items())), []).append(run)
    parts = [(dict(values), part) for values, same in groups.items() for part in _by_code(same, codes)]
    parts.sort(key=lambda part: (part[1][0].env, part[1][0].value("algo")))
    return [
        Experiment(number, part, ", ".join(map(single_line, _words(values, part[0], parts, by))) or None)
        for number, (values, part) in enumerate(parts, start=1)
    ]


def _by_code(runs: Sequence[Run], codes: dict[str, CodeFiles | None]) -> Iterator[list[Run]]:
    """Runs with the same values, divided by the code that any of them used."""
    names = [f"{run.record.git.tree} {run.record.git.left_out()}" for run in runs]
    for run, name in zip(runs, names, strict=True):
        if name not in codes:
            codes[name] = code_contents(PROJECT, run.record.git)
    run_codes, used = [codes[name] for name in names], [run.record.used for run in runs]
    package = project().__name__.partition(".")[0]  # it may have had another name at some of the runs
    counts = code_rule(
        *(
            files if files is None or code is None else code.named_as(package, files)
            for files, code in zip(map(files_of, used), run_codes, strict=True)
        )
    )
    groups = dict[str, list[Run]]()
    for run, key, code, own in zip(runs, names, run_codes, used, strict=True):
        if code is not None:
            paths = code.named_as(package, code.contents)
            key = code_digest(dict(zip(paths, code.contents.values(), strict=True)), counts)
        outside = "" if own is None or None in used else f" {sorted(own.outside.items())}"
        groups.setdefault(key + outside, []).append(run)
    yield from groups.values()


def _words(values: dict[str, str], run: Run, parts: _Parts, by: str | None) -> list[str]:
    """Differences from the recipe, and from most experiments with the same differences from it."""

    def shown(key: str) -> str:
        return f"{short_key(key)}={text_of(json.loads(values[key])) if key in values else 'absent'}"

    words = [] if by is None else [shown(by)]
    words += [text for text in run.changes if by is None or not text.startswith(f"{short_key(by)}=")]
    kind = run.value("algo"), run.env, run.changes
    firsts = [(shared, part[0]) for shared, part in parts]
    others = [each for each, first in firsts if (first.value("algo"), first.env, first.changes) == kind]
    for key in sorted({key for each in others for key in each} - {by}):
        if values.get(key) != mode(each.get(key) for each in others):
            words.append(shown(key))
    if others.count(values) > 1:  # the same values with other code
        code = f"tree {str(run.value('git.tree'))[:7]}" if run.value("dirty") else run.value("commit")
        beside = (
            run.record.git.left_out(),
            run.record.used and run.record.used.outside,
        )  # perhaps all that differs
        mark = f"+{xxhash.xxh3_64_hexdigest(str(beside).encode())[:4]}" if any(beside) else ""
        words.append(f"code {code or 'unknown'}{mark}")
    return words


def points(run: Run, metric: str) -> Points:
    """The curve of a metric that the run logged."""
    return [(int(row["env_steps"]), float(row[metric])) for row in run.rows if is_usable(row.get(metric))]


def thinned(values: list[T], most: int) -> list[T]:
    """At most about as many of the values, evenly, and the last one."""
    return values[: -1 : -(-len(values) // most) or 1] + values[-1:]


def is_usable(value: float | None) -> TypeGuard[float]:
    """True for a number that can be averaged and drawn: intervals need its fourth power."""
    return value is not None and abs(value) < 1e60
