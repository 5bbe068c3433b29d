"""Runs that should have been equal: those that were, and where the others part."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

from rltemplate.analysis import compare
from rltemplate.analysis.report.experiments import Experiment
from rltemplate.analysis.runs import Run
from rltemplate.types import ConfigError

MOST_COMPARED = 20  # pairs; each reads two traces from their beginning


class Pair(NamedTuple):
    """Two runs of the same configuration, seed and code with different traces.

    `headline` and `text` are what `make compare` says; if it could not be said, `headline` says why and
    `text` is empty.
    """

    a: Run
    b: Run
    headline: str
    text: str


class Repeats(NamedTuple):
    """What is known of runs that should be equal. `equal` are groups of runs with one and the same trace."""

    equal: list[list[Run]]
    pairs: list[Pair]
    left_out: int  # pairs that were not compared, because there are too many


def find_repeats(experiments: Iterable[Experiment]) -> Repeats:
    """Compare finished runs whose configuration, seed and code are equal; a copy of a run is no other run.

    Of each group the first run is compared with the first of every other trace. Code that no git has recorded
    is taken for equal to no other.
    """
    groups: dict[Any, dict[str, list[Run]]] = defaultdict(lambda: defaultdict(list))
    seen: set[str] = set()
    for experiment, run in ((each, run) for each in experiments for run in each.runs):
        digest = (run.record.get("trace") or {}).get("digest")
        tree = (run.record.get("git") or {}).get("tree")
        if run.record.get("status") != "finished" or not isinstance(digest, str) or tree is None:
            continue
        if run.id not in seen:
            seen.add(run.id)
            same = (experiment.number, run.config["seed"], run.config.get("trace"))
            groups[same][digest].append(run)
    equal: list[list[Run]] = []
    pairs: list[Pair] = []
    left_out = 0
    for traces in groups.values():
        equal += [runs for runs in traces.values() if len(runs) > 1]
        first, *others = (runs[0] for runs in traces.values())
        for other in others:
            if len(pairs) < MOST_COMPARED:
                pairs.append(_compared(first, other))
            else:
                left_out += 1
    return Repeats(equal, pairs, left_out)


def _compared(a: Run, b: Run) -> Pair:
    try:
        found = compare.compare_runs(a.dir, b.dir)
    except ConfigError as error:
        return Pair(a, b, f"the digests differ, but the traces cannot be compared: {error}", "")
    headline = compare.headline(found)
    if found.verdict == compare.IDENTICAL:
        headline = f"the records name two digests, but the files of the traces are {headline}"
    return Pair(a, b, headline, compare.report(found))
