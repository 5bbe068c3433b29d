"""Global generators that several runs of one process have in turns."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch

from rltemplate.foreign_rng import ForeignTurns, foreign_state, restore_foreign_state
from rltemplate.types import RunError


@pytest.fixture(autouse=True)
def as_they_were() -> Iterator[None]:
    """No other test draws what it would not have drawn."""
    before = foreign_state()
    yield
    restore_foreign_state(before)


def draw() -> float:
    return random.random() + float(np.random.random()) + float(torch.rand(()))  # noqa: NPY002


def played(seeds: Sequence[int], iterations: int, first: int = 0) -> list[list[float]]:
    """What each run draws, one after the other in each of three steps, from the iteration `first` on."""
    turns = ForeignTurns(seeds)
    drawn: list[list[float]] = [[] for _ in seeds]
    for iteration in range(iterations):
        for _ in range(3):
            for place in range(len(seeds)):
                turns.before_step(place)
                if iteration >= first:
                    drawn[place].append(draw())
        turns.end_period()
    return drawn


@pytest.mark.parametrize("first", [0, 1])
def test_each_draws_what_it_would_draw_alone(first: int) -> None:
    both = played([1, 2], 5, first)
    assert both == [*played([1], 5, first), *played([2], 5, first)]
    assert both[0] != both[1]


def test_nothing_changes_hands_where_nobody_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    turned: list[int] = []
    turn_to = ForeignTurns.turn_to

    def noted(turns: ForeignTurns, place: int) -> None:
        turned.append(place)
        turn_to(turns, place)

    monkeypatch.setattr(ForeignTurns, "turn_to", noted)
    played([1, 2], 2, first=9)
    assert len(turned) == 12
    played([1, 2], 9, first=9)
    assert len(turned) == 24  # no more than in two iterations


@pytest.mark.parametrize("which", ["python", "numpy", "torch"])
def test_a_draw_that_nobody_expects_is_noticed(which: str) -> None:
    turns = ForeignTurns([1, 2])
    for _ in range(3):
        turns.before_step(0)
        turns.before_step(1)
        turns.end_period()
    draws: dict[str, Callable[[], object]] = {
        "python": random.random,
        "numpy": np.random.random,
        "torch": lambda: torch.rand(()),
    }
    draws[which]()
    with pytest.raises(RunError, match="for the first time after 3 iterations"):
        turns.end_period()
