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
from rltemplate.analysis.stats import Interval
from rltemplate.analysis.targets import show
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
    def score(self) -> str:
        """The metric that says how good a policy is: the one of evaluations if all runs have it."""
        evaluated = all(is_return(run.value("eval/return")) for run in self.runs)
        return "eval/return" if evaluated else "episode/return"

    @cached_property
    def returns(self) -> list[float]:
        """The last return of each run."""
        return [float(run.value(self.score)) for run in self.runs]

    @property
    def steps(self) -> int:
        """Environment steps of the longest run."""
        return max(int(run.value("steps") or 0) for run in self.runs)

    def interval(self, statistic: str = "iqm") -> Interval:
        """A statistic of the returns."""
        return stats.interval(self.returns, statistic)

    @property
    def standing(self) -> targets.Standing | None:
        """The standing of the mean return, which is what others publish."""
        mean = sum(self.returns) / len(self.returns)
        found = targets.standing_of(self.runs[0].config, self.steps, mean)
        return found if self.score == "eval/return" else None

    def cautions(self) -> Iterator[str]:
        """Reasons to doubt the statistics."""
        yield from stats.caution(len(self.runs))
        ends = sorted({int(run.value("steps") or 0) for run in self.runs})
        if len(ends) > 1:
            yield f"the seeds ended at different steps: {', '.join(f'{end:,}' for end in ends)}"
        if self.score != "eval/return":
            yield "no evaluations, so these are returns of training episodes, with exploration"
        if len({run.value("git.tree") for run in self.runs}) > 1:
            yield "made from several states of the code, which by=git.tree shows apart and make diff compares"


@dataclass(frozen=True, slots=True)
class Pair:
    """The comparison of two groups, on one environment or averaged over several.

    `improvement` is the probability that a run of a scores higher than one of b. `difference` is that of the
    statistic, a minus b, None over several environments. `better` is 'a' or 'b' if its interval leaves out 0.
    """

    a: str
    b: str
    envs: list[str]
    seeds: list[int]
    improvement: Interval
    cautions: list[str]
    difference: Interval | None = None
    better: str | None = None
    verdict: str | None = None


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
    """True for a number that can be averaged."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def pairs(groups: Sequence[Group], statistic: str = "iqm") -> list[Pair]:
    """Every two groups on one environment, and every two names over the environments that both have.

    Of more than `MOST_PAIRED` groups on one environment each is compared with the first alone.
    """
    found = []
    for env in dict.fromkeys(group.env for group in groups):
        here = [group for group in groups if group.env == env]
        many = len(here) > MOST_PAIRED
        for a, b in [(here[0], b) for b in here[1:]] if many else itertools.combinations(here, 2):
            found.append(compare(a, b, statistic))
            if many:
                found[-1].cautions.append(f"of {len(here)} groups, only compared with the first")
    for pair in found if len(found) > 1 else []:
        pair.cautions.append(
            f"one of {len(found)} comparisons: of twenty that look at no difference, one is told all the same"
        )
    return [*found, *_over_environments(groups)]


def compare(a: Group, b: Group, statistic: str = "iqm") -> Pair:
    """The difference of two groups on one environment, and a verdict if their seeds can tell it from zero."""
    found, label = stats.difference(a.returns, b.returns, statistic), stats.LABELS[statistic]
    counts, better = [len(a.runs), len(b.runs)], None
    cautions = stats.caution(*counts)
    if found.low > 0 or found.high < 0:
        better = "a" if found.value > 0 else "b"
        first, second = (a, b) if better == "a" else (b, a)
        gain = found if better == "a" else Interval(-found.value, -found.high, -found.low)
        few = min(counts) < stats.FEW
        verdict = (
            f"{first.name} {'looks' if few else 'is'} better than {second.name}: {label} higher by {gain}"
        )
        verdict += ", a hint and no proof with so few seeds" if few else ""
    elif math.isnan(found.low):
        verdict = f"cannot be told: a single seed has no spread; {label} differs by {show(found.value)}"
    elif found.low == found.high == 0:
        verdict = f"every run of {a.name} and {b.name} has the same score"
    else:
        verdict = f"cannot be told: {label} of {a.name} minus that of {b.name} is {found}"
    one, other = a.interval(statistic), b.interval(statistic)
    if one.low <= other.high and other.low <= one.high:
        cautions.append(
            "the intervals overlap, which tells neither that the groups differ nor that they do not: look at "
            "the interval of the difference"
        )
    if max(a.steps, b.steps) > 1.05 * min(a.steps, b.steps):
        cautions.append(f"they ran for other numbers of steps, {a.steps:,} and {b.steps:,}")
    improvement = stats.probability_of_improvement(a.returns, b.returns)
    return Pair(a.name, b.name, [a.env], counts, improvement, cautions, found, better, verdict)


def _over_environments(groups: Sequence[Group]) -> Iterator[Pair]:
    by_name: dict[str, dict[str, Group]] = {}
    for group in groups:
        by_name.setdefault(group.name, {})[group.env] = group
    for (a, of_a), (b, of_b) in itertools.combinations(by_name.items(), 2):
        envs = sorted(of_a.keys() & of_b.keys())
        if len(envs) > 1 and len(by_name) <= MOST_PAIRED:
            each = [stats.probability_of_improvement(of_a[env].returns, of_b[env].returns) for env in envs]
            counts = [min(len(of[env].runs) for env in envs) for of in (of_a, of_b)]
            yield Pair(a, b, envs, counts, stats.mean_probability(each), stats.caution(*counts))


def as_json(groups: Sequence[Group], compared: Sequence[Pair], left: Sequence[str]) -> dict[str, Any]:
    """Groups, comparisons and runs left out in JSON's types; ends of an unknown interval are null."""
    documents = [
        {
            **{key: getattr(group, key) for key in ("name", "algo", "env", "by", "steps", "returns")},
            **{name: group.interval(name) for name in stats.STATISTICS},
            "seeds": [run.config["seed"] for run in group.runs],
            "runs": [run.id for run in group.runs],
            "standing": group.standing and asdict(group.standing),
            "cautions": list(group.cautions()),
        }
        for group in groups
    ]
    found: dict[str, Any] = _plain({"groups": documents, "comparisons": list(map(asdict, compared))})
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
    count, label = len(group.runs), "" if group.by is None else f", {group.by}"
    what = f"{count} seed{'s' * (count != 1)}, return after {group.steps:,} steps"
    lines = [f"{group.algo} on {group.env}{label}: {what}"]
    names = dict.fromkeys([statistic, *stats.STATISTICS])
    lines += [f"  {stats.LABELS[name]:8}{group.interval(name)}" for name in names]
    if count > 1:
        lines.append(f"  {'range':8}{show(min(group.returns))} to {show(max(group.returns))}")
    if group.standing is not None:
        lines.append(f"  {'target':8}mean {group.standing.text.removeprefix('eval/return ')}")
    return "\n".join([*lines, *(f"  caution: {text}" for text in group.cautions())])


def _about_pair(pair: Pair) -> str:
    where = pair.envs[0] if len(pair.envs) == 1 else f"{len(pair.envs)} environments ({', '.join(pair.envs)})"
    value, low, high = pair.improvement
    lines = [f"{pair.a} against {pair.b} on {where}"]
    if pair.verdict is not None:
        lines.append(f"  {pair.verdict}; {' against '.join(map(str, pair.seeds))} seeds")
    lines.append(f"  P({pair.a} > {pair.b}) {value:.2f} ({low:.2f} to {high:.2f})")
    return "\n".join([*lines, *(f"  caution: {text}" for text in pair.cautions)])
