"""Finished runs that belong together: by algorithm and environment, and by a key that tells them apart."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from rltemplate.analysis.differences import differing
from rltemplate.analysis.runs import MISSING, Run, experiment_of, text_of
from rltemplate.run.read import nearest_key
from rltemplate.types import ConfigError

_NAMED = 3  # differing keys in a message


class Name(NamedTuple):
    """The name of a group of runs; `by` is such as `gamma=0.9`, or None."""

    env: str
    algo: str
    by: str | None

    @property
    def place(self) -> str:
        """The environment, with the value that tells its groups apart."""
        return self.env if self.by is None else f"{self.env} {self.by}"


def newest_of_each_seed(
    runs: Iterable[Run], by: str | None = None
) -> tuple[dict[Name, dict[int, Run]], list[str]]:
    """The newest run of each seed of each group, and a line about each run that a newer one replaces.

    `by` is any name of `Run.value`, such as `algo.gamma` or `commit`, whose values are shown apart. Raises
    ConfigError, naming the keys that differ, for runs of one group that are not one experiment.
    """
    groups: dict[Name, dict[int, Run]] = {}
    replaced: list[str] = []
    for run in sorted(runs, key=lambda run: (run.record.started_at or "", run.id)):
        label = None if by is None else f"{by.rpartition('.')[2]}={_value_by(run, by)}"
        name = Name(run.env, str(run.config["algo"]["name"]), label)
        group = groups.setdefault(name, {})
        _check_one_experiment(run, next(iter(group.values()), run), by)
        seed = run.config["seed"]
        before = group.pop(seed, None)
        if before is not None:
            other = before.value("git.tree") != run.value("git.tree")
            code = " from other code; by=git.tree shows them apart" if other else ""
            replaced.append(
                f"{before.id}: {name.algo} on {name.place} with seed {seed} was run again as {run.id}{code}"
            )
        group[seed] = run
    return {
        name: groups[name] for name in sorted(groups, key=lambda n: (n.env, n.algo, n.by or ""))
    }, replaced


def _value_by(run: Run, key: str) -> Any:
    value = run.value(key)
    if value is MISSING:
        near = nearest_key(key, dict.fromkeys(run.keys()))
        hint = f"; did you mean {near}?" if near else ""
        raise ConfigError(f"by={key}: no such key in the configuration or the record of these runs{hint}")
    if isinstance(value, dict):
        names = ", ".join(f"{key}.{name}" for name in value)
        raise ConfigError(f"by={key}: expected a key with a single value, as one of {names}")
    return value


def _check_one_experiment(run: Run, other: Run, by: str | None) -> None:
    different = list(differing(experiment_of(other.config), experiment_of(run.config)))
    if not different:
        return
    keys = ", ".join(f"{key} ({text_of(a)} and {text_of(b)})" for key, a, b in different[:_NAMED])
    more = f" and {len(different) - _NAMED} more" if len(different) > _NAMED else ""
    apart = "" if by is not None else f", or show them apart, as with by={different[0][0]}"
    raise ConfigError(
        f"{other.id} and {run.id} differ in {keys}{more}, so no mean of them is drawn\n"
        f"name fewer in runs={apart}"
    )
