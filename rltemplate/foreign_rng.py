"""The global generators of Python, numpy and torch, from which nothing in this package draws.

Environments and libraries of others may, and with `determinism=repeat` their draws must repeat too.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rltemplate.rng import seed_sequence
from rltemplate.types import RunError


def seed_foreign_code(seed: int) -> None:
    """Start all three from `seed`, each from words of its own."""
    words = seed_sequence(seed, "foreign code").generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))  # noqa: NPY002
    torch.manual_seed(int(words[2]))


# After so many periods in which nobody has drawn, nobody is expected to.
_WATCHED_PERIODS = 2


class ForeignTurns:
    """The global generators for several runs of one process, each of which finds them as if it were alone.

    They are of one run at a time, and change hands where the next one's code may draw. That takes 0.08 ms,
    several times in a step of a small environment, and hardly any environment draws from them. So once nobody
    has for some periods, they stay where they are, and it is only looked after whether that remains true.
    """

    def __init__(self, seeds: Sequence[int] = (), period: str = "iterations") -> None:
        """A run is known by its place in `seeds`, or by what it is announced with (`expect`)."""
        self._seeds = dict(enumerate(seeds))
        self._period = period  # what `end_period` ends, for messages
        self._holder: int | None = None
        self._given: Any = None  # as the holder found them
        self._kept: dict[int, Any] = {}
        self._drawn = False
        self._periods = 0

    def expect(self, place: int, seed: int) -> None:
        """One more run."""
        self._seeds[place] = seed

    def turn_to(self, place: int) -> None:
        """From here on they are those of the run at `place`, as it left them; at first as its seed says."""
        if place == self._holder:
            return
        if self._holder is not None:
            self._kept[self._holder] = _raw_state()
            self._drawn = self._drawn or not _same(self._kept[self._holder], self._given)
        self._holder = place
        if place in self._kept:
            _set_raw_state(self._kept.pop(place))
        else:
            seed_foreign_code(self._seeds[place])
        self._given = _raw_state()

    def before_step(self, place: int) -> None:
        """`turn_to`, unless nobody draws."""
        if self._drawn or self._periods < _WATCHED_PERIODS:
            self.turn_to(place)

    def end_period(self) -> None:
        """The end of an iteration, or the like, of all runs.

        Raises RunError if somebody has drawn and nobody expected it: nobody knows who it was.
        """
        drawn = self._drawn or not _same(_raw_state(), self._given)
        if drawn and not self._drawn and self._periods >= _WATCHED_PERIODS:
            raise RunError(
                "an environment drew from a global generator of Python, NumPy or torch for the first time "
                f"after {self._periods} {self._period},\nwhere it is too late to tell its seeds apart; train "
                "them as runs of their own, with seed=1,2,... instead of seeds=[1,2,...]"
            )
        self._drawn = drawn
        self._periods += 1


def _same(one: Any, other: Any) -> bool:
    """Whether two states are equal."""
    (python, numpy_state, torch_state, cuda), others = one, other
    return bool(
        python == others[0]
        and numpy_state["state"]["pos"] == others[1]["state"]["pos"]
        and np.array_equal(numpy_state["state"]["key"], others[1]["state"]["key"])
        and numpy_state["has_gauss"] == others[1]["has_gauss"]
        and torch.equal(torch_state, others[2])
        # Where CUDA was not in use yet there is nothing to compare.
        and all(torch.equal(x, y) for x, y in zip(cuda, others[3], strict=False))
    )


def _raw_state() -> Any:
    """Where all three are, in a form that is quick and only of use in this process."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state(), cuda  # noqa: NPY002


def _set_raw_state(state: Any) -> None:
    python, numpy_state, torch_state, cuda = state
    random.setstate(python)
    np.random.set_state(numpy_state)  # noqa: NPY002
    torch.set_rng_state(torch_state)
    if cuda:
        torch.cuda.set_rng_state_all(cuda)


def foreign_state() -> dict[str, Any]:
    """Where all three are, as tensors and text; torch has one on each CUDA device that is in use too."""
    numpy_state = np.random.get_state(legacy=False)  # noqa: NPY002
    return {
        "python": json.dumps(random.getstate()),
        "numpy": json.dumps(numpy_state, default=lambda value: value.tolist()),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def restore_foreign_state(state: Mapping[str, Any]) -> None:
    """Go on from there."""
    version, words, gauss = json.loads(state["python"])
    random.setstate((version, tuple(words), gauss))
    numpy_state = json.loads(state["numpy"])
    numpy_state["state"]["key"] = np.array(numpy_state["state"]["key"], np.uint32)
    np.random.set_state(numpy_state)  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
