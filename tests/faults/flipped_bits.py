"""One value of a run changed in its last bit, in front of the trace: the change must be found.

A test sets the environment variable `ATEN_TEST_FAULT` to `ITEM@ITERATION` or `ITEM@ITERATION:INDEX`, for
instance `action@3:17`: the action of step 17 in iteration 3. `start/net/mu@3` is the entry `net`, `mu` of the
state with which iteration 3 begins. The run goes on with the changed value; its record names the variable.
It has to be imported before the modules that make traces.
"""

from __future__ import annotations

import os
from typing import Any

from runlab.run import trace

VARIABLE = "ATEN_TEST_FAULT"


def flipped(value: Any) -> Any:
    """A copy of a number, a tensor or an array, with the last bit of its largest element flipped.

    For a float that is one unit in the last place, for an integer the neighbour, for a truth value the other.
    Of these the first odd one is taken, where there is one: the result is then no larger than the largest.
    """
    import numpy as np
    import torch

    if isinstance(value, int):
        return value ^ 1
    if isinstance(value, torch.Tensor):
        return torch.from_numpy(flipped(value.detach().cpu().contiguous().numpy())).to(value.device)
    array: np.ndarray = np.array(value)
    flat = array.reshape(-1)
    words = flat.view(f"u{flat.dtype.itemsize}")
    words[int(np.argmax(np.abs(flat) if flat.dtype.kind == "f" else words & 1))] ^= 1
    return array.item() if isinstance(value, float) else array


def flip_entry(state: Any, path: str) -> bool:
    """Flip the entry of a state that has the path `adam/0` or the like; False if there is none."""
    *way, last = (int(key) if key.isdigit() else key for key in path.split("/"))
    try:
        for key in way:
            state = state[key]
        state[last] = flipped(state[last])
    except (KeyError, IndexError, TypeError):
        return False
    return True


class FlippingTrace(trace.TraceWriter):
    """A trace that flips the item that the environment variable names when it is made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.item, _, place = os.environ.get(VARIABLE, "").partition("@")
        self.at, _, self.number = place.partition(":")
        self.seen = 0
        self.done = False

    def begin(self, algorithm: Any) -> None:
        self.seen = 0
        if self.item.startswith("start/") and self.at == str(self._iteration) and not self.done:
            state = algorithm.state_dict()
            self.done = flip_entry(state, self.item.removeprefix("start/"))
            state.pop("envs", None)  # those that step already keep theirs
            algorithm.load_state_dict(state)
        super().begin(algorithm)

    def draw(self, stream: str, value: Any) -> None:
        self.passed(f"draw/{stream}", value)
        super().draw(stream, value)

    def results(self, event: str, values: Any, whole: bool = False) -> None:
        for item, value in trace.named_leaves(values):
            self.passed(item, value)
        super().results(event, values, whole)

    def passed(self, item: str, value: Any) -> None:
        """An item passes, for the n-th time in this iteration."""
        if item != self.item or self.at != str(self._iteration) or self.done:
            return
        if self.seen == int(self.number or 0):
            value[...] = flipped(value)
            self.done = True
        self.seen += 1


trace.TraceWriter = FlippingTrace  # type: ignore[misc]
