"""Runs that differ only in the seed, as one experiment, and what one experiment changed against another."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from rltemplate.analysis.figures import thinned
from rltemplate.analysis.runs import Run, experiment_of, text_of
from rltemplate.run import paths
from rltemplate.run.influence import file_matters
from rltemplate.run.read import leaves, read_metrics
from rltemplate.types import ConfigError

# Of `git` of two records the names of the files that differ between them; None if nobody can tell.
ChangedFiles = Callable[[Mapping[str, Any], Mapping[str, Any]], list[str] | None]
Points = tuple[list[int], list[float]]  # environment steps and values of one metric

_FINISHED = "finished"
_LARGEST = 1e300  # beyond it, or not a number, a value is none that can be drawn or averaged
_LABEL_KEYS = 3  # values in the name of an experiment


@dataclass
class Experiment:
    """All runs of one configuration and code; they differ only in the seed.

    `counted` are those behind its statistics: of each seed the newest that finished. `label` names what sets
    it apart from the other experiments of its algorithm and environment; empty if there are none.
    """

    number: int
    runs: list[Run]
    label: str = ""
    metrics: dict[Path, dict[str, Points]] = field(default_factory=dict)  # by folder, then by metric

    @property
    def algo(self) -> str:
        """The algorithm's name."""
        return str(self.runs[0].config["algo"]["name"])

    @property
    def env(self) -> str:
        """The environment as it is called in `env=`."""
        return self.runs[0].env

    @property
    def title(self) -> str:
        """For headings: `PPO on CartPole, algo.gamma=0.9`."""
        name = f"{self.algo.upper()} on {self.env}"
        return f"{name}, {self.label}" if self.label else name

    @property
    def key(self) -> str:
        """For file names."""
        return paths.safe_name(f"{self.number:03d}-{self.algo}-{self.env}")

    @cached_property
    def counted(self) -> list[Run]:
        """See the class; in the order of seeds."""
        newest: dict[int, Run] = {}
        for run in self.runs:  # in the order of their starts
            if run.record.get("status") == _FINISHED:
                newest[run.config["seed"]] = run
        return [newest[seed] for seed in sorted(newest)]

    @cached_property
    def score(self) -> str:
        """The metric that says how good a policy is: of evaluations if there are any."""
        having = [self.metrics.get(run.dir, {}) for run in self.counted or self.runs]
        return "eval/return" if any("eval/return" in each for each in having) else "episode/return"

    def finals(self) -> list[tuple[Run, int, float]]:
        """Of each counted run with a score: the run, the environment steps of its last score, and this."""
        found = []
        for run in self.counted:
            steps, values = self.metrics.get(run.dir, {}).get(self.score, ([], []))
            if values:
                found.append((run, steps[-1], values[-1]))
        return found


def why_damaged(run: Run) -> str | None:
    """What in the run's record or configuration is not of the kind that a run writes; None if all is."""
    seed = run.config["seed"]
    if not isinstance(seed, int) or isinstance(seed, bool):
        return f"{run.id}: seed in {paths.CONFIG} is damaged: it is no whole number"
    if not isinstance(run.config["env"].get("kwargs") or {}, Mapping):
        return f"{run.id}: env.kwargs in {paths.CONFIG} is damaged: it has no values by name"
    started = run.record.get("started_at")
    if started is not None and not isinstance(started, str):
        return f"{run.id}: started_at in {paths.RECORD} is damaged: it is no time"
    for value in (
        (run.record.get("final_metrics") or {}) | {"duration": run.record.get("duration_s")}
    ).values():
        wrong = not isinstance(value, int | float) or isinstance(value, bool) or abs(value) > _LARGEST
        if value is not None and wrong:
            return f"{run.id}: a number in {paths.RECORD} is damaged"
    return None


def read_columns(run: Run) -> dict[str, Points]:
    """All metrics of a run, each over the environment steps at which it was logged. Raises ConfigError."""
    if not (run.dir / paths.METRICS).exists():
        return {}
    columns: dict[str, Points] = defaultdict(lambda: ([], []))
    for row in read_metrics(run.dir):
        step = row.pop("env_steps", None)
        if step is None or not abs(step) < _LARGEST:
            continue
        for name, value in row.items():
            if value is not None and abs(value) < _LARGEST:
                steps, values = columns[name]
                steps.append(int(step))
                values.append(value)
    return dict(columns)


def find_experiments(runs: Iterable[Run], changed_files: ChangedFiles) -> list[Experiment]:
    """Put runs together that differ only in the seed; by environment, algorithm and first start."""
    groups: dict[str, list[Run]] = defaultdict(list)
    for run in sorted(runs, key=_started):
        groups[json.dumps(experiment_of(run.config), sort_keys=True, default=str)].append(run)
    apart = [part for group in groups.values() for part in _by_code(group, changed_files)]
    apart.sort(key=lambda group: (group[0].env, str(group[0].config["algo"]["name"]), _started(group[0])))
    experiments = [Experiment(number, group) for number, group in enumerate(apart, start=1)]
    alike: dict[tuple[str, str], list[Experiment]] = defaultdict(list)
    for each in experiments:
        alike[each.algo, each.env].append(each)
    for group in alike.values():
        _give_labels(group)
    return experiments


def before(experiment: Experiment, experiments: Sequence[Experiment]) -> Experiment | None:
    """The experiment of the same algorithm and environment that was started last before this one."""
    earlier = [
        each
        for each in experiments
        if each.number < experiment.number and (each.algo, each.env) == (experiment.algo, experiment.env)
    ]
    return earlier[-1] if earlier else None


def _started(run: Run) -> tuple[str, str]:
    return run.record.get("started_at") or "", run.id


def _by_code(group: list[Run], changed_files: ChangedFiles) -> Iterator[list[Run]]:
    """Runs of one configuration, those of other code apart."""
    parts: list[tuple[Mapping[str, Any], list[Run]]] = []
    where: dict[Any, list[Run]] = {}  # the part of each tree that was met
    for run in group:
        git = run.record.get("git") or {}
        tree = git.get("tree")
        if tree not in where:
            same = (part for other, part in parts if _same_code(other, git, changed_files))
            part = next(same, None)
            if part is None:
                part = []
                parts.append((git, part))
            where[tree] = part
        where[tree].append(run)
    for _, part in parts:
        yield part


def _same_code(a: Mapping[str, Any], b: Mapping[str, Any], changed_files: ChangedFiles) -> bool:
    changed = changed_files(a, b)
    return changed is not None and not any(file_matters(name) for name in changed)


def _give_labels(group: list[Experiment]) -> None:
    """Name what differs between experiments of one algorithm and environment."""
    if len(group) < 2:
        return
    flat = [
        {key: text_of(value) for key, value in leaves(experiment_of(each.runs[0].config))} for each in group
    ]
    keys = sorted({key for values in flat for key in values})
    # What most of them have, or the first of them, goes without saying.
    usual = {key: Counter(values.get(key) for values in flat).most_common(1)[0][0] for key in keys}
    for each, values in zip(group, flat, strict=True):
        own = [key for key in keys if values.get(key) != usual[key]]
        words = [f"{key}={_short(values.get(key, 'none'))}" for key in own[:_LABEL_KEYS]]
        if len(own) > _LABEL_KEYS:
            words.append(f"and {len(own) - _LABEL_KEYS} more")
        each.label = ", ".join(words)
    labels = Counter(each.label for each in group)
    for each in group:
        if labels[each.label] > 1:  # the same values with other code
            each.label = ", ".join(filter(None, [each.label, f"code {code_name(each.runs[0])}"]))


def code_name(run: Run) -> str:
    """The commit that the run's code is based on, and whether it had changes."""
    git = run.record.get("git") or {}
    commit = str(git.get("base_commit") or "")[:10] or "unknown"
    return f"{commit} + changes" if git.get("dirty") else commit


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:37]}..."


def load_metrics(experiments: Iterable[Experiment], most: int) -> Iterator[str]:
    """Read the metrics of all runs, and give a line for each run that has unusable ones.

    Returns, which statistics are made of, stay as they are; of other metrics no more than `most` points.
    """
    for experiment in experiments:
        for run in experiment.runs:
            try:
                columns = read_columns(run)
            except ConfigError as error:
                yield str(error)
                continue
            experiment.metrics[run.dir] = {
                name: points if name.endswith("/return") else thinned(*points, most)
                for name, points in columns.items()
            }
