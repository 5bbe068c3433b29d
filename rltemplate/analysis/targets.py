"""Where a return stands: between the random policy and what others have published for the environment.

The table beside this module holds one row for each published result, with its source, and the returns of
the uniformly random policy as `results/random_returns.py` measured them. Published results come from other
versions of an environment, from training episodes as well as from evaluations, and from one run as well as
from twenty: they say where to look, and are no proof. Nothing is said of runs on a changed environment, whose
returns mean something else.
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
# Results at this many times fewer or more steps still count as being at the same number of steps.
_NEAR = 2.0
# Arguments of an environment that make another one, with a name of its own in conf/env.
_NAMED = {("LunarLander", "continuous", True): "LunarLanderContinuous"}


class Reference(NamedTuple):
    """One row of the table.

    `algo` is that of this repository whose result it is ('ppo', 'sac'), 'random', or 'stretch' for what later
    methods reach; `method` is the source's own word for it. `steps` are environment steps, `n_seeds` is None
    where the source does not say.
    """

    env: str
    env_version: str
    algo: str
    method: str
    steps: int
    return_mean: float
    return_std: float | None
    n_seeds: int | None
    source: str


@dataclass(frozen=True, slots=True)
class Standing:
    """What the table says about a return.

    `published` are the results of the same algorithm on any version of the environment at about as many
    steps, or else at the nearest number of steps there is: then `same_steps` is False. `floor` and `top` are
    the lowest and highest of them, `beaten` how many lie below the value. `random` and `stretch` (the best of
    a later method at up to as many steps) are None where the table has none.
    """

    env: str
    algo: str
    env_steps: int
    value: float
    random: float | None
    published: tuple[Reference, ...]
    same_steps: bool
    floor: float | None
    top: float | None
    beaten: int
    stretch: Reference | None

    @property
    def text(self) -> str:
        """One line for people."""
        parts = [] if self.random is None else [f"random {_number(self.random)}"]
        if self.published:
            parts.append(self._about_published())
        return f"eval/return {_number(self.value)} at {self.env_steps:,} steps: {', '.join(parts)}"

    @property
    def brief(self) -> str:
        """The same for the cell of a table."""
        parts = [] if self.random is None else [f"random {_number(self.random)}"]
        if self.floor is not None and self.top is not None:
            returns = _span([_number(value) for value in (self.floor, self.top)])
            count = len(self.published)
            above = f": above {self.beaten} of {count}" if self.same_steps else ", at other steps"
            parts.append(f"published {returns}{above}")
        return ", ".join(parts)

    def _about_published(self) -> str:
        assert self.floor is not None
        assert self.top is not None
        steps = [row.steps for row in self.published]
        at = _span([_steps(value) for value in (min(steps), max(steps))])
        returns = _span([_number(value) for value in (self.floor, self.top)])
        versions = ", ".join(sorted({row.env_version for row in self.published}))
        text = f"published for {self.algo.upper()} at {at} steps {returns}"
        count = len(self.published)
        if not self.same_steps:
            return f"{text} ({count} result{'s' * (count > 1)}; {versions}), at another number of steps"
        return f"{text} ({count} result{'s' * (count > 1)}; {versions}); above {self.beaten} of {count}"


def standing(
    algo: str, env: str, env_steps: int, value: float, version: str | None = None
) -> Standing | None:
    """Where `value`, a mean undiscounted return of evaluations after `env_steps` steps, stands.

    `env` is a name of conf/env such as 'Hopper', `version` such as 'v5' the one that was used, if it is not
    the one of conf/env. None if nothing is known of the environment.
    """
    rows = [row for row in references() if row.env == env]
    chance = [row for row in rows if row.algo == RANDOM and version in (None, row.env_version)]
    published, same = _nearest([row for row in rows if row.algo == algo], env_steps)
    if not (chance or published):
        return None
    returns = [row.return_mean for row in published]
    later = [row for row in rows if row.algo == "stretch" and row.steps <= env_steps * _NEAR]
    return Standing(
        env=env,
        algo=algo,
        env_steps=env_steps,
        value=value,
        random=chance[0].return_mean if chance else None,
        published=published,
        same_steps=same,
        floor=min(returns, default=None),
        top=max(returns, default=None),
        beaten=sum(mean < value for mean in returns),
        stretch=max(later, key=lambda row: row.return_mean, default=None),
    )


def standing_of(config: Mapping[str, Any], env_steps: int, value: float) -> Standing | None:
    """The same for a run with this configuration; None where its returns cannot be compared with others.

    They cannot if the environment was made with other arguments than those of conf/env, or its episodes were
    cut at another length.
    """
    name = comparable_env(config["env"])
    if name is None:
        return None
    return standing(str(config["algo"]["name"]), name[0], env_steps, value, name[1])


def comparable_env(env: Mapping[str, Any]) -> tuple[str, str] | None:
    """Name and version of an environment as the table calls it, None if it was changed.

    `env` is that part of a configuration: `id`, `kwargs`, `max_episode_steps`.
    """
    if env.get("max_episode_steps") is not None:
        return None
    name, _, version = str(env["id"]).rpartition(":")[2].rpartition("-")
    for key, value in (env.get("kwargs") or {}).items():
        other = _NAMED.get((name, key, value)) if isinstance(value, bool) else None
        if other is None:
            return None
        name = other
    return name, version


@functools.cache
def references() -> tuple[Reference, ...]:
    """All rows of the table."""
    with TABLE.open(newline="", encoding="utf-8") as file:
        return tuple(
            Reference(
                env=row["env"],
                env_version=row["env_version"],
                algo=row["algo"],
                method=row["method"],
                steps=int(row["steps"]),
                return_mean=float(row["return_mean"]),
                return_std=float(row["return_std"]) if row["return_std"] else None,
                n_seeds=int(row["n_seeds"]) if row["n_seeds"] else None,
                source=row["source"],
            )
            for row in csv.DictReader(file)
        )


def _nearest(rows: Sequence[Reference], env_steps: int) -> tuple[tuple[Reference, ...], bool]:
    """Of each source and method the result at the nearest number of steps, and whether that is near."""

    def distance(row: Reference) -> float:
        return abs(math.log(row.steps / max(env_steps, 1)))

    same = True
    near = [row for row in rows if distance(row) <= math.log(_NEAR)]
    if not near and rows:
        same, closest = False, min(rows, key=distance)
        near = [row for row in rows if abs(math.log(row.steps / closest.steps)) <= math.log(_NEAR)]
    best: dict[tuple[str, str, str], Reference] = {}
    for row in sorted(near, key=distance):
        best.setdefault((row.source.partition(" ")[0], row.method, row.env_version), row)
    return tuple(best.values()), same


def _span(ends: Sequence[str]) -> str:
    return ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"


def _number(value: float) -> str:
    """Whole where that is four digits or more, else three significant digits."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _steps(count: int) -> str:
    return f"{count / 1e6:.3g}M" if count >= 1_000_000 else f"{count:,}"
