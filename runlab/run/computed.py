"""Digests of known computations in a record, and the first in which two records differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from runlab.run.validation import Line

PartName = Annotated[str, Meta(pattern=r"^[a-z][a-z ]{0,39}\Z")]
Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]


@dataclass(slots=True, kw_only=True)
class ComputationFacts:
    """Digests of known computations at the start of a run, and the libraries inside of packages by version.

    The digests are by the name of the part, from causes to effects (determinism/computations.py). Those of
    another `definition` cannot be compared.
    """

    definition: Line = ""
    digests: Annotated[dict[PartName, Digest], Meta(max_length=50)] = field(default_factory=dict)
    libraries: Annotated[dict[Line, Line], Meta(max_length=50)] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OtherComputation:
    """The first part that two runs compute differently, its digests, and the equal parts around it."""

    part: str
    a: str
    b: str
    before: Sequence[str]
    after: Sequence[str]

    def __str__(self) -> str:
        equal = [f"equal before it: {', '.join(self.before)}"] * bool(self.before)
        equal += [f"equal after it: {', '.join(self.after)}"] * bool(self.after)
        return "; ".join([f'differently from "{self.part}" on (digest a {self.a}, b {self.b})', *equal])


def first_other(a: ComputationFacts, b: ComputationFacts) -> OtherComputation | None:
    """The first part with other digests among those that both runs have; None if all are equal."""
    shared = [part for part in a.digests if part in b.digests] if a.definition == b.definition else []
    other = [part for part in shared if a.digests[part] != b.digests[part]]
    if not other:
        return None
    at, first = shared.index(other[0]), other[0]
    after = [part for part in shared[at:] if part not in other]
    return OtherComputation(first, a.digests[first], b.digests[first], shared[:at], after)
