"""Faults on request: one value changed in its last bit, to see that whoever should notice does.

A test sets the environment variable `RLTEMPLATE_FAULT` to `ITEM@ITERATION` or `ITEM@ITERATION:INDEX`, for
instance `action@3:17`: the action of step 17 in iteration 3. `start/net@3` is the entry `net` of the state
with which iteration 3 begins. The run goes on with the changed value, and the record names the variable.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from rltemplate.run.state import START
from rltemplate.types import Algorithm, ConfigError, Probe, V

if TYPE_CHECKING:
    import numpy as np

VARIABLE = "RLTEMPLATE_FAULT"


def flipped(value: V) -> V:
    """A copy of a tensor or an array, the last bit of its largest element flipped.

    For a float that is one unit in the last place, for an integer the neighbour, for a truth value the other.
    Of integers the first odd one is taken, where there is one: the result is then no larger than the largest.
    """
    import torch

    if isinstance(value, torch.Tensor):
        copy = value.detach().cpu().contiguous().clone()
        _flip(copy.numpy())
        return copy.to(value.device)  # type: ignore[return-value]
    array: Any = value
    copied = array.copy()
    _flip(copied)
    return copied  # type: ignore[no-any-return]


def _flip(array: np.ndarray) -> None:
    import numpy as np

    flat = array.reshape(-1)
    if flat.dtype == np.bool_:
        flat[0] = not flat[0]
        return
    words = flat.view(f"u{flat.dtype.itemsize}")
    place = int(np.argmax(np.abs(flat) if flat.dtype.kind == "f" else words & 1))
    words[place] ^= 1


def flip_entry(state: Any, path: str) -> bool:
    """Flip the entry of a state that has the path `adam/0` or the like; False if there is none."""
    *way, last = (int(key) if key.isdigit() else key for key in path.split("/"))
    try:
        for key in way:
            state = state[key]
        value = state[last]
    except (KeyError, IndexError, TypeError):
        return False
    state[last] = value ^ 1 if isinstance(value, int) else _other(value)
    return True


def _other(value: Any) -> Any:
    import numpy as np

    return flipped(np.array(value)).item() if isinstance(value, float) else flipped(value)


def parse_fault(wanted: str) -> tuple[str, int, int]:
    """Item, iteration and index of what the environment variable asks for. Raises ConfigError."""
    found = re.fullmatch(r"([^@]+)@(\d+)(?::(\d+))?", wanted)
    if found is None:
        raise ConfigError(f"{VARIABLE}={wanted}: expected ITEM@ITERATION or ITEM@ITERATION:INDEX")
    return found[1], int(found[2]), int(found[3] or 0)


class Fault(Probe):
    """Flips one item on its way, before `inner` sees it."""

    def __init__(self, inner: Probe, wanted: str, first_iteration: int = 0) -> None:
        """`wanted` as in the environment variable; `first_iteration` is the one that comes first."""
        self._inner = inner
        self._item, self._at, self._index = parse_fault(wanted)
        self._iteration, self._here = first_iteration, 0
        self.done = False

    def begin(self, algorithm: Algorithm) -> None:
        """Change an entry of the algorithm's state, if that is what is wanted."""
        self._iteration += 1
        when, _, path = self._item.partition("/")
        if when == START and self._iteration - 1 == self._at and not self.done:
            state = algorithm.state_dict()
            self.done = flip_entry(state, path)
            algorithm.load_state_dict(state)
        self._here = 0
        self._inner.begin(algorithm)

    def event(self, name: str, index: int = 0) -> None:
        """Follow where the algorithm is."""
        self._here = index
        self._inner.event(name, index)

    def __call__(self, item: str, value: V) -> V:
        """The value, or once another one."""
        # What comes before the first `start` belongs to iteration 0 as well.
        here = max(0, self._iteration - 1) == self._at and self._here == self._index
        if item == self._item and here and not self.done:
            self.done = True
            value = flipped(value)
        return self._inner(item, value)
