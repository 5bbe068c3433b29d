"""Runs that are seeds of one experiment: what they show together, and whether two experiments differ."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rltemplate.analysis import stats, targets
from rltemplate.analysis.groups import Name, newest_of_each_seed
from rltemplate.analysis.runs import Run
from rltemplate.analysis.stats import Comparison, Interval
from rltemplate.types import ConfigError

MOST_PAIRED = 8  # groups of which every two are compared


@dataclass(frozen=True, slots=True)
class Group:
    """Finished runs of one experiment that differ in their seed, in the order of their seeds.

    `returns` are those of the last evaluation. `by` is the value of the key that tells the group from others
    on the same environment, None without such a key. `standing` is that of the mean return.
    """

    algo: str
    env: str
    by: str | None
    steps: int
    seeds: list[int]
    returns: list[float]
    runs: list[str]
    iqm: Interval
    mean: Interval
    median: Interval
    standing: targets.Standing | None
    cautions: list[str]

    @property
    def name(self) -> str:
        """What tells it from other groups on its environment."""
        return self.algo if self.by is None else f"{self.algo} {self.by}"


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
    """Groups by algorithm and environment, and one line about each run that is in none of them.

    A newer run replaces one with the same seed. `by` is any name of `Run.value`, such as `algo.gamma` or
    `commit`, whose values are shown apart. Raises ConfigError for runs that would be in one group and are not
    one experiment, and if there is no group at all.
    """
    counted: list[Run] = []
    left: list[str] = []
    for run in runs:
        why = _why_not(run)
        if why is None:
            counted.append(run)
        else:
            left.append(f"{run.id}: {why}")
    groups, replaced = newest_of_each_seed(counted, by)
    if not groups:
        reason = f"; {left[0]}" if left else ""
        raise ConfigError(f"no finished run with an evaluation among these folders{reason}")
    return [_group(name, list(runs.values())) for name, runs in groups.items()], [*left, *replaced]


def _why_not(run: Run) -> str | None:
    status = run.value("status")
    if status != "finished":
        return f"is {status}, not finished"
    if _final(run) is None:
        return "has no evaluation at its end"
    return None


def _final(run: Run) -> float | None:
    value = (run.record.get("final_metrics") or {}).get("eval/return")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _group(name: Name, runs: Sequence[Run]) -> Group:
    runs = sorted(runs, key=lambda run: run.config["seed"])
    returns = [value for run in runs if (value := _final(run)) is not None]
    steps = max(int(run.value("steps") or 0) for run in runs)
    mean = stats.interval(returns, "mean")
    return Group(
        algo=name.algo,
        env=name.env,
        by=name.by,
        steps=steps,
        seeds=[run.config["seed"] for run in runs],
        returns=returns,
        runs=[run.id for run in runs],
        iqm=stats.interval(returns, "iqm"),
        mean=mean,
        median=stats.interval(returns, "median"),
        standing=targets.standing_of(runs[0].config, steps, mean.value),
        cautions=[*stats.caution(len(runs)), *_other_code(runs)],
    )


def _other_code(runs: Sequence[Run]) -> Iterator[str]:
    trees = {run.value("git.tree") for run in runs}
    if len(trees) > 1:
        yield (
            f"they were made from {len(trees)} states of the code: make diff says whether that matters, and "
            "by=git.tree shows them apart"
        )


def pairs(groups: Sequence[Group], statistic: str = "iqm") -> list[Pair]:
    """Every two groups on one environment; and every two names on all environments that both have.

    Of more than `MOST_PAIRED` groups on one environment each is compared with the first alone.
    """
    found = []
    for env in dict.fromkeys(group.env for group in groups):
        here = [group for group in groups if group.env == env]
        many = len(here) > MOST_PAIRED
        for a, b in (
            zip(here[:1] * len(here), here[1:], strict=False) if many else itertools.combinations(here, 2)
        ):
            compared = stats.compare(a.returns, b.returns, statistic, (a.name, b.name))
            cautions = [*compared.cautions, *_other_steps(a, b)]
            if many:
                cautions.append(f"of {len(here)} groups, only compared with the first")
            found.append(Pair(a.name, b.name, [env], compared, compared.improvement, cautions))
    if len(found) > 1:
        note = (
            f"one of {len(found)} comparisons: of twenty that look at no difference, one is told all the same"
        )
        for pair in found:
            pair.cautions.append(note)
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
            first, second = ([of[env].returns for env in envs] for of in (of_a, of_b))
            improvement = stats.probability_of_improvement(first, second)
            cautions = stats.caution(min(map(len, first)), min(map(len, second)))
            yield Pair(a, b, envs, None, improvement, cautions)


def _other_steps(a: Group, b: Group) -> Iterator[str]:
    if max(a.steps, b.steps) > 1.05 * min(a.steps, b.steps):
        yield f"they ran for other numbers of steps, {a.steps:,} and {b.steps:,}"


def as_json(groups: Sequence[Group], compared: Sequence[Pair], left: Sequence[str]) -> dict[str, Any]:
    """All of it in JSON's types; an interval that is not known has nulls for its ends."""
    document = {
        "groups": [asdict(group) | {"name": group.name} for group in groups],
        "comparisons": [asdict(pair) for pair in compared],
        "left_out": list(left),
    }
    plain = _plain(document)
    assert isinstance(plain, dict)
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, Interval):
        return {name: _plain(each) for name, each in value._asdict().items()}
    if isinstance(value, targets.Reference):
        return value._asdict()
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def report(groups: Sequence[Group], compared: Sequence[Pair], statistic: str = "iqm") -> str:
    """All of it for a terminal."""
    return "\n\n".join([*(_about(group, statistic) for group in groups), *map(_about_pair, compared)])


def _about(group: Group, statistic: str) -> str:
    count = len(group.returns)
    label = "" if group.by is None else f", {group.by}"
    what = f"{count} seed{'s' * (count != 1)}, return after {group.steps:,} steps"
    lines = [f"{group.algo} on {group.env}{label}: {what}"]
    names = [statistic, *(name for name in stats.STATISTICS if name != statistic)]
    lines += [f"  {_LABEL[name]:8}{spelled(getattr(group, name))}" for name in names]
    if count > 1:
        lines.append(f"  {'range':8}{stats.show(min(group.returns))} to {stats.show(max(group.returns))}")
    if group.standing is not None:
        lines.append(f"  {'target':8}mean {group.standing.text.removeprefix('eval/return ')}")
    return "\n".join([*lines, *(f"  caution: {text}" for text in group.cautions)])


_LABEL = {"iqm": "IQM", "mean": "mean", "median": "median"}


def spelled(interval: Interval) -> str:
    """A value with its interval, as far as it has one."""
    if math.isnan(interval.low):
        return f"{stats.show(interval.value)} (no interval)"
    return f"{stats.show(interval.value)} ({stats.show(interval.low)} to {stats.show(interval.high)})"


def _about_pair(pair: Pair) -> str:
    where = pair.envs[0] if len(pair.envs) == 1 else f"{len(pair.envs)} environments ({', '.join(pair.envs)})"
    lines = [f"{pair.a} against {pair.b} on {where}"]
    if pair.found is not None:
        seeds = " against ".join(map(str, pair.found.seeds))
        lines.append(f"  {pair.found.verdict}; {seeds} seeds")
    low, high = pair.improvement.low, pair.improvement.high
    lines.append(f"  P({pair.a} > {pair.b}) {pair.improvement.value:.2f} ({low:.2f} to {high:.2f})")
    return "\n".join([*lines, *(f"  caution: {text}" for text in pair.cautions)])
