"""The standing of a return: between the random policy and published results for the environment.

reference_returns.csv has a row for each published result, with its source, and the returns of the uniformly
random policy. Published results come from other versions of an environment, from training episodes as well as
evaluations, and from one run as well as from twenty: they are a hint and no proof.
"""

from __future__ import annotations

import csv
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from runlab.config.project import reference_returns

RANDOM = "random"
# Results with up to this many times fewer or more steps are compared.
_NEAR = 2.0


class Reference(NamedTuple):
    """One row of the table. `algo` is the name of an algorithm, or 'random'."""

    env: str
    env_version: str
    algo: str
    method: str  # as the source names it: 'PPO (SB3 2.7.1)'
    steps: int  # environment steps
    return_mean: float
    n_seeds: str  # empty if not published
    source: str  # owner/repository@commit path
    note: str  # the kind of number that the source gives


class Standing(NamedTuple):
    """A mean return beside the results of the table.

    `published` are returns of the same algorithm at about as many steps. `random` is that of the random
    policy, None if not measured. `summary` names both in a line.
    """

    random: float | None
    published: list[float]
    summary: str


def standing_of(config: Mapping[str, Any], env_steps: int, value: float) -> Standing | None:
    """The standing of a mean evaluation return of a run with this configuration.

    None if the table has nothing to compare with, or the run changed the environment's arguments, episode
    length or wrappers.
    """
    algo, env = str(config["algo"]["name"]), config["env"]
    name, _, version = str(env["id"]).rpartition(":")[2].rpartition("-")
    kwargs = dict(env.get("kwargs") or {})
    if (name, kwargs) == ("LunarLander", {"continuous": True}):  # has its own name in conf/env
        name, kwargs = "LunarLanderContinuous", {}
    wrapped = env.get("wrappers") or env.get("training_wrappers")
    if kwargs or wrapped or env.get("max_episode_steps") is not None:
        return None
    rows = [row for row in references() if row.env == name]
    chance = [row.return_mean for row in rows if row.algo == RANDOM and row.env_version == version]
    near = published_near(algo, name, env_steps)
    parts = [f"random policy {show(each)}" for each in chance[:1]]
    published = [row.return_mean for row in near]
    if published:
        ends = dict.fromkeys((show(min(published)), show(max(published))))
        versions = ", ".join(sorted({row.env_version for row in near}))
        parts.append(
            f"published for {algo.upper()} at about as many steps {' to '.join(ends)} ({versions}); the "
            f"mean is above {sum(each < value for each in published)} of {len(published)}"
        )
    return Standing(chance[0] if chance else None, published, ", ".join(parts)) if parts else None


def published_near(algo: str, env: str, env_steps: int) -> list[Reference]:
    """Published results of an algorithm at about as many steps, the lowest return first.

    Of a learning curve its nearest point.
    """
    rows = [row for row in references() if (row.algo, row.env) == (algo, env)]
    near = [row for row in rows if 1 / _NEAR <= row.steps / max(env_steps, 1) <= _NEAR]
    nearest: dict[tuple[str, ...], Reference] = {}
    for row in sorted(near, key=lambda row: abs(math.log(row.steps / env_steps))):
        nearest.setdefault((row.source.partition("@")[0], row.method, row.env_version), row)
    return sorted(nearest.values(), key=lambda row: row.return_mean)


@functools.cache
def references() -> tuple[Reference, ...]:
    """All rows of the project's table; none if it has no table."""
    if (table := reference_returns()) is None:
        return ()
    with table.open(newline="", encoding="utf-8") as file:
        rows: Iterator[dict[str, Any]] = csv.DictReader(file)
        number = {"steps": int, "return_mean": float}
        return tuple(Reference(**{k: number.get(k, str)(row[k]) for k in Reference._fields}) for row in rows)


def show(value: float) -> str:
    """A return with three or more significant digits."""
    if 1000 <= abs(value) < 1e15:
        return f"{value:,.0f}"
    return f"{value:,.1f}" if 100 <= abs(value) < 1000 else f"{value:.3g}"
