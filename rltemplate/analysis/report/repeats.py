"""Runs that should have been equal: groups that were, and where others diverge."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

from rltemplate.analysis import compare
from rltemplate.analysis.report.experiments import Experiment
from rltemplate.analysis.runs import MISSING, Run
from rltemplate.types import ConfigError

_MOST_COMPARED = 20  # pairs; each reads two traces from their beginning


class Repeats(NamedTuple):
    """Groups of runs with one trace; two runs each with different traces, and what `make compare` says."""

    equal: list[list[Run]]
    pairs: list[tuple[Run, Run, str, str]]
    left_out: int  # pairs that were not compared, because there are too many


def find_repeats(experiments: Iterable[Experiment]) -> Repeats:
    """Compare finished runs of one experiment and seed: of each other trace the first run with the first."""
    groups: dict[Any, dict[str, dict[str, Run]]] = defaultdict(lambda: defaultdict(dict))
    for experiment, run in ((each, run) for each in experiments for run in each.runs):
        digest, tree = run.value("trace.digest"), run.value("git.tree")
        # Code that git has not recorded is equal to no other, and a copy of a run is no other run.
        if run.value("status") == "finished" and MISSING not in (digest, tree) and digest and tree:
            groups[experiment.number, run.config["seed"], run.config.get("trace")][digest].setdefault(
                run.id, run
            )
    equal = [list(runs.values()) for traces in groups.values() for runs in traces.values() if len(runs) > 1]
    pairs = []
    for traces in groups.values():
        first, *others = (next(iter(runs.values())) for runs in traces.values())
        pairs += [(first, other) for other in others]
    compared = [(a, b, *_compared(a, b)) for a, b in pairs[:_MOST_COMPARED]]
    return Repeats(equal, compared, len(pairs) - len(compared))


def _compared(a: Run, b: Run) -> tuple[str, str]:
    try:
        found = compare.compare_runs(a.dir, b.dir)
    except ConfigError as error:
        return f"the digests differ, but the traces cannot be compared: {error}", ""
    return compare.headline(found), compare.report(found)
