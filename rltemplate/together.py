"""Algorithms that differ in their seed alone, trained in step with each other in one process.

Each is built as if it were alone, with environments and random streams of its own, and all have taken the
same number of environment steps whenever they can be observed. What one of them cannot go on with ends that
one only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rltemplate.types import Algorithm, IterationResult


class Together:
    """Algorithms that differ in their seed alone, trained in step with each other."""

    def __init__(
        self, members: Sequence[Algorithm], turn_to: Callable[[int], None] = lambda place: None
    ) -> None:
        """Members are known by their place in `members`.

        `turn_to` is called with it before anything of a member's environments runs, so that what they draw
        from the global generators of others is the member's own (`foreign_rng.ForeignTurns`).
        """
        self._members = list(members)
        self._turn_to = turn_to

    def train_iteration(self, going: Sequence[int]) -> dict[int, IterationResult | Exception]:
        """One iteration of the members at the places `going`, and by place what it gave.

        What a member raised stands in for its result: it is over for that member, and for no other. What is
        no `Exception` passes.
        """
        results: dict[int, IterationResult | Exception] = {}
        for place in going:
            self._turn_to(place)
            try:
                results[place] = self._members[place].train_iteration()
            except Exception as error:
                results[place] = error
        return results
