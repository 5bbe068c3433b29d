"""Experiments: runs that differ only in the seed, with the curves of their metrics."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from rltemplate.analysis import stats
from rltemplate.analysis.runs import Run, experiment_of, text_of
from rltemplate.analysis.seeds import Group, is_return
from rltemplate.analysis.stats import Interval
from rltemplate.run import paths
from rltemplate.run.influence import file_matters
from rltemplate.run.read import leaves
from rltemplate.types import ConfigError

# The names of the files that differ between the code of two runs; None if that cannot be told.
ChangedFiles = Callable[[Run, Run], list[str] | None]
Points = list[tuple[int, float]]  # environment steps and value

_MOST_INTERVALS = 100  # along a curve; each is a bootstrap
_LABEL_KEYS = 3


@dataclass
class Experiment:
    """All runs of one configuration and code.

    `group` has the runs behind the statistics: the newest finished run of each seed that logged a return. Its
    `by` names the differences from the other experiments of the algorithm in the environment.
    """

    number: int
    runs: list[Run]  # in the order of their starts
    group: Group
    metrics: dict[str, dict[str, Points]] = field(default_factory=dict)  # by id of the run, then by name

    @property
    def name(self) -> str:
        """Number, algorithm and differences, for legends."""
        return f"{self.number}. {self.group.algo.upper()}{f', {self.group.by}' if self.group.by else ''}"

    @property
    def title(self) -> str:
        """Algorithm, environment and differences, for headings."""
        title = f"{self.group.algo.upper()} on {self.group.env}"
        return f"{title}, {self.group.by}" if self.group.by else title

    @property
    def key(self) -> str:
        """A name for files."""
        return paths.safe_name(f"{self.number:03d}-{self.group.algo}-{self.group.env}")

    @cached_property
    def curve(self) -> list[tuple[int, Interval]]:
        """The IQM over seeds at steps that all seeds share."""
        per_seed = [self.metrics.get(run.id, {}).get(self.group.score, []) for run in self.group.runs]
        found = [dict(points) for points in per_seed if points]
        shared = sorted(set.intersection(*map(set, found))) if found else []
        last = len(shared) - 1
        if last >= _MOST_INTERVALS:
            shared = [shared[i * last // (_MOST_INTERVALS - 1)] for i in range(_MOST_INTERVALS)]
        return [(step, stats.interval([each[step] for each in found])) for step in shared]

    def run_name(self, run: Run) -> str:
        """The seed of a run, with its status or the end of its id if it is in no statistic."""
        name, status = f"seed {run.config['seed']}", run.value("status")
        if status != "finished":
            return f"{name}, {status}"
        return name if run in self.group.runs else f"{name}, not counted ({run.id[-6:]})"

    def cautions(self) -> Iterator[str]:
        """Reasons to doubt the statistics."""
        if self.group.runs:
            yield from self.group.cautions()
        else:
            yield "no run of it has finished with a return, so there are no statistics"
        older = sum(run.value("status") == "finished" for run in self.runs) - len(self.group.runs)
        if older:
            yield f"of the finished runs {older} not counted: the seed was run again, or there is no return"


def find_experiments(runs: Iterable[Run], changed_files: ChangedFiles) -> list[Experiment]:
    """Runs that differ only in the seed put together; by environment, algorithm and first start."""
    alike: dict[str, list[list[Run]]] = defaultdict(list)
    for run in sorted(runs, key=_started):
        parts = alike[json.dumps(experiment_of(run.config), sort_keys=True, default=str)]
        same = next((part for part in parts if _same_code(part[0], run, changed_files)), None)
        if same is None:
            parts.append([run])
        else:
            same.append(run)
    apart = [part for parts in alike.values() for part in parts]
    apart.sort(key=lambda part: (part[0].env, part[0].value("algo"), _started(part[0])))
    labels = _labels(apart)
    return [
        Experiment(i + 1, part, Group(str(part[0].value("algo")), part[0].env, labels[i], _counted(part)))
        for i, part in enumerate(apart)
    ]


def load_metrics(experiments: Iterable[Experiment]) -> Iterator[str]:
    """Read the metrics of all runs, and give a line for each run that has unusable ones."""
    for experiment in experiments:
        for run in experiment.runs:
            columns: dict[str, Points] = defaultdict(list)
            try:
                for row in run.rows:
                    step = row.get("env_steps", math.nan)
                    for name in row.keys() - {"env_steps", "wall_time_s"}:
                        if is_return(step) and is_return(row[name]):
                            columns[name].append((int(step), float(row[name])))
            except ConfigError as error:
                yield str(error)
            experiment.metrics[run.id] = dict(columns)


def code_name(run: Run) -> str:
    """The commit that the run's code is based on, and whether it had changes."""
    return f"{run.value('commit') or 'unknown'}{' + changes' if run.value('dirty') else ''}"


def _counted(runs: Iterable[Run]) -> list[Run]:
    newest = {
        run.config["seed"]: run
        for run in runs
        if run.value("status") == "finished"
        and (is_return(run.value("eval/return")) or is_return(run.value("episode/return")))
    }
    return [newest[seed] for seed in sorted(newest)]


def _started(run: Run) -> tuple[str, str]:
    return str(run.value("started") or ""), run.id


def _same_code(a: Run, b: Run, changed_files: ChangedFiles) -> bool:
    if a.value("git.tree") == b.value("git.tree"):
        return True
    changed = changed_files(a, b)
    return changed is not None and not any(file_matters(name) for name in changed)


def _labels(parts: Sequence[Sequence[Run]]) -> list[str | None]:
    """The values by which each part differs from most parts of its algorithm and environment."""
    flat = [{key: text_of(value) for key, value in leaves(experiment_of(part[0].config))} for part in parts]
    kinds = [(part[0].value("algo"), part[0].env) for part in parts]
    labels: list[str | None] = []
    for part, values, kind in zip(parts, flat, kinds, strict=True):
        others = [each for each, its in zip(flat, kinds, strict=True) if its == kind]
        words = []
        for key in sorted({key for each in others for key in each}):
            usual = Counter(each.get(key) for each in others).most_common(1)[0][0]
            if values.get(key) != usual:
                words.append(f"{key}={values.get(key, 'none')[:40]}")
        if len(words) > _LABEL_KEYS:
            words[_LABEL_KEYS:] = [f"and {len(words) - _LABEL_KEYS} more"]
        if sum(each == values for each in others) > 1:  # the same values with other code
            words.append(f"code {code_name(part[0])}")
        labels.append(", ".join(words) or None)
    return labels
