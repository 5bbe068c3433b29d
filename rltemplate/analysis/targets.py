"""The standing of a return: between the random policy and published results for the environment.

reference_returns.csv has a row for each published result, with its source, and the returns of the uniformly
random policy. Published results come from other versions of an environment, from training episodes as well as
evaluations, and from one run as well as from twenty: they say where to look, and are no proof.
"""

from __future__ import annotations

import csv
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

TABLE = Path(__file__).with_name("reference_returns.csv")
RANDOM = "random"
# Results at this many times fewer or more steps count as results at the same number of steps.
_NEAR = 2.0


class Reference(NamedTuple):
    """One row of the table.

    `algo` is 'ppo', 'sac', 'random', or 'stretch' for later methods; `method` is the source's word for it.
    """

    env: str
    env_version: str
    algo: str
    method: str
    steps: int  # environment steps
    return_mean: float
    source: str


@dataclass(frozen=True, slots=True)
class Standing:
    """A mean return beside the results of the table.

    `published` are results of the same algorithm on any version of the environment at about as many steps, or
    else at the nearest number of steps: then `same_steps` is False. `random` is None if not measured.
    """

    algo: str
    env_steps: int
    value: float
    random: float | None
    published: tuple[Reference, ...]
    same_steps: bool

    @property
    def returns(self) -> list[float]:
        """The published returns."""
        return [row.return_mean for row in self.published]

    @property
    def summary(self) -> str:
        """The random and the published returns in one line."""
        parts = [] if self.random is None else [f"random {show(self.random)}"]
        if self.published:
            steps = [row.steps for row in self.published]
            versions = ", ".join(sorted({row.env_version for row in self.published}))
            count, beaten = len(steps), sum(each < self.value for each in self.returns)
            parts.append(
                f"published for {self.algo.upper()} at {_span(steps, _steps)} steps "
                f"{_span(self.returns, show)} ({count} result{'s' * (count > 1)}; {versions})"
                + (f"; above {beaten} of {count}" if self.same_steps else ", at another number of steps")
            )
        return ", ".join(parts)

    @property
    def text(self) -> str:
        """The summary after the return that it is about."""
        return f"eval/return {show(self.value)} at {self.env_steps:,} steps: {self.summary}"


def standing_of(config: Mapping[str, Any], env_steps: int, value: float) -> Standing | None:
    """The standing of a mean evaluation return of a run with this configuration.

    None if the table does not know the environment, or the run changed its arguments or episode length.
    """
    algo, (env, version) = str(config["algo"]["name"]), _name_and_version(config["env"])
    rows = [row for row in references() if row.env == env]
    chance = [row.return_mean for row in rows if row.algo == RANDOM and row.env_version == version]
    published, same = _nearest([row for row in rows if row.algo == algo], env_steps)
    if not (chance or published):
        return None
    return Standing(algo, env_steps, value, chance[0] if chance else None, published, same)


def _name_and_version(env: Mapping[str, Any]) -> tuple[str | None, str]:
    """Name and version of an environment in the table's words; no name if its arguments change the task."""
    name, _, version = str(env["id"]).rpartition(":")[2].rpartition("-")
    kwargs = dict(env.get("kwargs") or {})
    if (name, kwargs) == ("LunarLander", {"continuous": True}):  # has a name of its own in conf/env
        name, kwargs = "LunarLanderContinuous", {}
    return None if kwargs or env.get("max_episode_steps") is not None else name, version


@functools.cache
def references() -> tuple[Reference, ...]:
    """All rows of the table."""
    with TABLE.open(newline="", encoding="utf-8") as file:
        return tuple(
            Reference(
                **{key: row[key] for key in ("env", "env_version", "algo", "method", "source")},
                steps=int(row["steps"]),
                return_mean=float(row["return_mean"]),
            )
            for row in csv.DictReader(file)
        )


def _nearest(rows: Sequence[Reference], env_steps: int) -> tuple[tuple[Reference, ...], bool]:
    """The result of each source and method at the nearest number of steps, and True if that is near."""

    def distance(row: Reference, steps: int = max(env_steps, 1)) -> float:
        return abs(math.log(row.steps / steps))

    near, same = [row for row in rows if distance(row) <= math.log(_NEAR)], True
    if rows and not near:
        closest, same = min(rows, key=distance).steps, False
        near = [row for row in rows if distance(row, closest) <= math.log(_NEAR)]
    best: dict[tuple[str, str, str], Reference] = {}
    for row in sorted(near, key=distance):
        best.setdefault((row.source.partition(" ")[0], row.method, row.env_version), row)
    return tuple(best.values()), same


def show(value: float) -> str:
    """A return with as many digits as tell something."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.3g}"


def _span(values: Sequence[Any], name: Any) -> str:
    low, high = name(min(values)), name(max(values))
    return str(low if low == high else f"{low} to {high}")


def _steps(count: int) -> str:
    return f"{count / 1e6:.3g}M" if count >= 1_000_000 else f"{count:,}"
