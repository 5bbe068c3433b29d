"""Statistics over the seeds of recorded runs, and comparisons of groups of runs: `make stats`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from rltemplate.analysis import stats, targets
from rltemplate.analysis.groups import newest_of_each_seed
from rltemplate.analysis.runs import Run
from rltemplate.analysis.stats import Comparison, Interval
from rltemplate.types import ConfigError

MOST_PAIRED = 8  # groups on one environment of which every two are compared


@dataclass(frozen=True)
class Group:
    """Finished runs of one experiment, one for each seed, in the order of their seeds.

    `by` is the value of the key that tells it from other groups on the same environment, as in `gamma=0.9`.
    """

    algo: str
    env: str
    by: str | None
    runs: list[Run]

    @property
    def name(self) -> str:
        """Algorithm and `by`."""
        return self.algo if self.by is None else f"{self.algo} {self.by}"

    @cached_property
    def returns(self) -> list[float]:
        """The last return of each run."""
        return [float(run.value(self.score)) for run in self.runs]

    @cached_property
    def score(self) -> str:
        """The metric that says how good a policy is: the one of evaluations if all runs have it."""
        evaluated = all(is_return(run.value("eval/return")) for run in self.runs)
        return "eval/return" if evaluated else "episode/return"

    @cached_property
    def steps(self) -> int:
        """Environment steps of the longest run."""
        return max(int(run.value("steps") or 0) for run in self.runs)

    def interval(self, statistic: str = "iqm") -> Interval:
        """A statistic of the returns."""
        return stats.interval(self.returns, statistic)

    @property
    def standing(self) -> targets.Standing | None:
        """The standing of the mean return, which is what others publish."""
        if self.score != "eval/return":
            return None
        return targets.standing_of(self.runs[0].config, self.steps, sum(self.returns) / len(self.returns))

    @property
    def cautions(self) -> list[str]:
        """Reasons to doubt the statistics."""
        found = stats.caution(len(self.runs))
        states = len({run.value("git.tree") for run in self.runs})
        if states > 1:
            found.append(
                f"they were made from {states} states of the code: make diff says whether that matters, and "
                "by=git.tree shows them apart"
            )
        return found


@dataclass(frozen=True, slots=True)
class Pair:
    """Two groups on one environment, or on several, over which the probability is averaged."""

    a: str
    b: str
    envs: list[str]
    found: Comparison | None
    improvement: Interval
    cautions: list[str]


def group_runs(runs: Iterable[Run], by: str | None = None) -> tuple[list[Group], list[str]]:
    """Groups by algorithm, environment and the key `by`, and a line about each run that is in none of them.

    Raises ConfigError for runs of one group that are not one experiment, and if there is no group at all.
    """
    counted: list[Run] = []
    left: list[str] = []
    for run in runs:
        if run.value("status") != "finished":
            left.append(f"{run.id}: is {run.value('status')}, not finished")
        elif not is_return(run.value("eval/return")):
            left.append(f"{run.id}: has no evaluation at its end")
        else:
            counted.append(run)
    found, replaced = newest_of_each_seed(counted, by)
    if not found:
        reason = f"; {left[0]}" if left else ""
        raise ConfigError(f"no finished run with an evaluation among these folders{reason}")
    groups = [
        Group(name.algo, name.env, name.by, [seeds[seed] for seed in sorted(seeds)])
        for name, seeds in found.items()
    ]
    return groups, [*left, *replaced]


def is_return(value: Any) -> bool:
    """True for a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def pairs(groups: Sequence[Group], statistic: str = "iqm") -> list[Pair]:
    """Every two groups on one environment, and every two names over the environments that both have.

    Of more than `MOST_PAIRED` groups on one environment each is compared with the first alone.
    """
    found = []
    for env in dict.fromkeys(group.env for group in groups):
        here = [group for group in groups if group.env == env]
        many = len(here) > MOST_PAIRED
        for a, b in [(here[0], b) for b in here[1:]] if many else itertools.combinations(here, 2):
            compared = stats.compare(a.returns, b.returns, statistic, (a.name, b.name))
            cautions = [*compared.cautions]
            if max(a.steps, b.steps) > 1.05 * min(a.steps, b.steps):
                cautions.append(f"they ran for other numbers of steps, {a.steps:,} and {b.steps:,}")
            if many:
                cautions.append(f"of {len(here)} groups, only compared with the first")
            found.append(Pair(a.name, b.name, [env], compared, compared.improvement, cautions))
    for pair in found if len(found) > 1 else []:
        pair.cautions.append(
            f"one of {len(found)} comparisons: of twenty that look at no difference, one is told all the same"
        )
    return [*found, *_over_environments(groups)]


def _over_environments(groups: Sequence[Group]) -> Iterator[Pair]:
    by_name: dict[str, dict[str, Group]] = {}
    for group in groups:
        by_name.setdefault(group.name, {})[group.env] = group
    if len(by_name) > MOST_PAIRED:
        return
    for (a, of_a), (b, of_b) in itertools.combinations(by_name.items(), 2):
        envs = sorted(of_a.keys() & of_b.keys())
        if len(envs) > 1:
            each = [stats.probability_of_improvement(of_a[env].returns, of_b[env].returns) for env in envs]
            fewest = [min(len(of[env].runs) for env in envs) for of in (of_a, of_b)]
            yield Pair(a, b, envs, None, stats.mean_probability(each), stats.caution(*fewest))


def as_json(groups: Sequence[Group], compared: Sequence[Pair], left: Sequence[str]) -> dict[str, Any]:
    """Groups, comparisons and runs left out in JSON's types; ends of an unknown interval are null."""
    documents = [
        {
            **{key: getattr(group, key) for key in ("name", "algo", "env", "by", "steps", "returns")},
            **{name: group.interval(name) for name in stats.STATISTICS},
            "seeds": [run.config["seed"] for run in group.runs],
            "runs": [run.id for run in group.runs],
            "standing": group.standing and asdict(group.standing),
            "cautions": group.cautions,
        }
        for group in groups
    ]
    found: dict[str, Any] = _plain({"groups": documents, "comparisons": [asdict(pair) for pair in compared]})
    return found | {"left_out": list(left)}


def _plain(value: Any) -> Any:
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def report(groups: Sequence[Group], compared: Sequence[Pair], statistic: str = "iqm") -> str:
    """Groups and comparisons for a terminal."""
    return "\n\n".join([*(_about(group, statistic) for group in groups), *map(_about_pair, compared)])


def _about(group: Group, statistic: str) -> str:
    count = len(group.runs)
    label = "" if group.by is None else f", {group.by}"
    what = f"{count} seed{'s' * (count != 1)}, return after {group.steps:,} steps"
    lines = [f"{group.algo} on {group.env}{label}: {what}"]
    names = dict.fromkeys([statistic, *stats.STATISTICS])
    lines += [f"  {stats.LABELS[name]:8}{group.interval(name)}" for name in names]
    if count > 1:
        lines.append(f"  {'range':8}{targets.show(min(group.returns))} to {targets.show(max(group.returns))}")
    if group.standing is not None:
        lines.append(f"  {'target':8}mean {group.standing.text.removeprefix('eval/return ')}")
    return "\n".join([*lines, *(f"  caution: {text}" for text in group.cautions)])


def _about_pair(pair: Pair) -> str:
    where = pair.envs[0] if len(pair.envs) == 1 else f"{len(pair.envs)} environments ({', '.join(pair.envs)})"
    lines = [f"{pair.a} against {pair.b} on {where}"]
    if pair.found is not None:
        lines.append(f"  {pair.found.verdict}; {' against '.join(map(str, pair.found.seeds))} seeds")
    value, low, high = pair.improvement
    lines.append(f"  P({pair.a} > {pair.b}) {value:.2f} ({low:.2f} to {high:.2f})")
    return "\n".join([*lines, *(f"  caution: {text}" for text in pair.cautions)])
