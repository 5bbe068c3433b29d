"""The operation that made the first difference, found in the logs of torch's operations of two runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

# The kinds of causes of a first difference. `a` and `b` are operations, `item` is the first difference.
CAUSES = {
    "computed": "made by {a}: equal inputs, other results",
    "arguments": "made by {a}: called with other arguments",
    "drawn": "drawn by {a}: its random stream was in another state",
    "other operations": "the runs carried out other operations: a went on with {a}, b with {b}",
    "other tensors": "the runs went on with tensors of other shapes: see {a}",
    "outside": "made by no operation of torch that was logged: {item} came from elsewhere, such as the "
    "environment or numpy, or the code took other tensors; first seen by {a}",
    "between": "made where operations are not logged: while networks and streams were built, or between two "
    "iterations",
}

_SHAPE = re.compile(r"\w+\[[\d, ]*\]")  # of a tensor in the text of arguments, such as f32[3, 2]
# Operations that return uninitialised memory.
_UNWRITTEN = ("empty", "new_empty", "resize_")
_DRAWING = ("rand", "normal", "uniform", "bernoulli", "multinomial", "exponential", "poisson")


@dataclass(frozen=True, slots=True)
class LoggedOperation:
    """One operation of torch: digests of its inputs and outputs, and the lines that called it.

    In `arguments` a tensor is shown as its type and shape. `source` has the calling lines of this project,
    the innermost first. For a gradient, `forward_source` has the lines of the forward operation.
    """

    operation: str
    arguments: str
    inputs: list[str]
    outputs: list[str]
    source: list[str]
    forward_source: list[str]

    @property
    def base_name(self) -> str:
        """`select` for aten.select.int."""
        return self.operation.split(".")[1]


@dataclass(frozen=True, slots=True)
class Finding:
    """The cause of the first difference.

    `kind` is one of CAUSES. `agreeing` is the number of equal operations before. `a` and `b` are the
    operation with the difference, for `outside` the first one that reads it, and None if a run had no more
    operations. `logged_from` is the event in which the log begins.
    """

    kind: str
    agreeing: int = 0
    a: LoggedOperation | None = None
    b: LoggedOperation | None = None
    logged_from: str = ""


def cause_of(a: Sequence[LoggedOperation], b: Sequence[LoggedOperation], logged_from: str) -> Finding:
    """The cause of the first item that differs, from the operations of both runs before this item.

    An operation is the cause if it had equal inputs in both runs and different results; uninitialised memory
    does not count. If no operation is the cause, the first one with other inputs is reported: as `outside`,
    or as `other tensors` if the types or shapes of its inputs differ.
    """
    agreeing, saw = 0, None
    for one, other in zip_longest(a, b):
        if one is None or other is None or one.operation != other.operation:
            return saw or Finding("other operations", agreeing, one, other, logged_from)
        if one.outputs == other.outputs or one.base_name.startswith(_UNWRITTEN):
            agreeing += 1
        elif one.inputs == other.inputs:
            drawn = any(word in one.base_name for word in _DRAWING)
            same = one.arguments == other.arguments
            kind = "arguments" if not same else "drawn" if drawn else "computed"
            return Finding(kind, agreeing, one, other, logged_from)
        elif saw is None:
            same = _SHAPE.findall(one.arguments) == _SHAPE.findall(other.arguments)
            saw = Finding("outside" if same else "other tensors", agreeing, one, other, logged_from)
    return saw or Finding("outside", agreeing, logged_from=logged_from)
