"""The state of an algorithm entry by entry, as a checkpoint keeps it, and NaN and infinity in it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rltemplate.types import Algorithm, IterationResult

START, END = "start", "end"  # of an iteration; how the names of its entries begin


class State:
    """State of an algorithm at both ends of an iteration, as named tensors and arrays.

    `start/net/mu` and `end/net/mu` are the entry `net`, `mu` of its `state_dict`. Of what it holds to learn
    from later only the part that came in during the iteration is looked at: `end/experience/reward`.
    """

    def __init__(self) -> None:
        self._held = 0  # transitions that had come in when the iteration began

    def begin(self, algorithm: Algorithm) -> Iterator[tuple[str, Any]]:
        """The entries at the start of an iteration."""
        self._held = 0 if algorithm.replay is None else algorithm.replay.added
        yield from entries(algorithm.state_dict(), START)

    def end(self, algorithm: Algorithm) -> Iterator[tuple[str, Any]]:
        """The entries at the end of an iteration."""
        yield from entries(algorithm.state_dict(), END)
        if algorithm.replay is not None:
            yield from entries(algorithm.replay.since(self._held).rows, f"{END}/experience")


def entries(state: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The tensors, numbers and texts in nested dictionaries and lists, named by their keys and sorted."""
    if isinstance(state, Mapping):
        for key in sorted(state):
            yield from entries(state[key], f"{path}/{key}")
    elif isinstance(state, Sequence) and not isinstance(state, str):
        for place, value in enumerate(state):
            yield from entries(value, f"{path}/{place}")
    elif hasattr(state, "detach"):
        yield path, state
    elif state is not None:
        import numpy as np  # not needed to compare traces

        yield path, np.frombuffer(state.encode(), np.uint8) if isinstance(state, str) else np.asarray(state)


def first_not_finite(algorithm: Algorithm, result: IterationResult) -> str | None:
    """Name, value and index of the first NaN or infinity in the losses, then in the state."""
    losses = [(name, value) for name, value in result.metrics.items() if name.startswith("loss/")]
    for name, values in (*losses, *entries(algorithm.state_dict(), END)):
        if not hasattr(values, "is_floating_point") or not values.is_floating_point():
            continue
        # A finite sum has finite terms, and costs a tenth of a look at each. Some sums only overflow.
        if not math.isfinite(values.sum().item()) and len(bad := (~values.isfinite()).nonzero()):
            return f"{name} became {values[tuple(bad[0])].item()} at {bad[0].tolist()}"
    return None
