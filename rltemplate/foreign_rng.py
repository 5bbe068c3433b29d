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


def seed_foreign_code(seed: int) -> None:
    """Start all three from `seed`, each from words of its own."""
    words = seed_sequence(seed, "foreign code").generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))  # noqa: NPY002
    torch.manual_seed(int(words[2]))


class ForeignTurns:
    """The global generators for several runs of one process, each of which finds them as if it were alone.

    They are of one run at a time, and change hands where the next one's code may draw: 0.08 ms.
    """

    def __init__(self, seeds: Sequence[int]) -> None:
        self._seeds = list(seeds)
        self._holder: int | None = None
        self._kept: dict[int, Any] = {}

    def turn_to(self, place: int) -> None:
        """From here on they are those of the run at `place`, as it left them; at first as its seed says."""
        if place == self._holder:
            return
        if self._holder is not None:
            self._kept[self._holder] = _raw_state()
        self._holder = place
        if place in self._kept:
            _set_raw_state(self._kept.pop(place))
        else:
            seed_foreign_code(self._seeds[place])


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
