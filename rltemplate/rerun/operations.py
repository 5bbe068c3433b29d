"""The operation that made the first difference, found in the logs of torch's operations of two runs.

With the same code, operations stand side by side, and the cause is the first with equal inputs and another
result. Operations of other code do not: lines come and go, and most of them change nothing. But numbers are
known by digests of their bits. The codes part where one run first makes a lasting result that the other run
does not have, from inputs that follow from no such result.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

# How the first difference was made.
COMPUTED = "computed"  # an operation made another result of equal inputs
ARGUMENTS = "arguments"  # an operation was called with other numbers or shapes
DRAWN = "drawn"  # a random stream gave other numbers
OUTSIDE = "outside"  # no operation made it
OTHER_OPERATIONS = "other operations"  # the runs did not carry out the same ones
UNSEEN = "unseen"  # it was made where operations are not logged
BETWEEN = "between"  # it was changed after one iteration had ended and before the next began
OTHER_CODE = "other code"  # lines that differ between the codes of the runs made other numbers

# Results of these are whatever was in memory.
_UNWRITTEN = ("empty", "new_empty", "resize_")
_DRAWING = ("rand", "normal", "uniform", "bernoulli", "multinomial", "exponential", "poisson")
# These show a part of a tensor and compute nothing.
_SHOWING = (
    *("select", "slice", "view", "t", "transpose", "expand", "split", "split_with_sizes", "unbind"),
    *("unsqueeze", "squeeze", "detach", "alias", "permute", "as_strided", "_unsafe_view"),
)
# These take a part out of a tensor.
_TAKING = ("select", "slice", "index", "index_select", "gather", "unbind", "split", "split_with_sizes")


@dataclass(frozen=True, slots=True)
class LoggedOperation:
    """One operation as `replay` logs it: digests of what it read and made, and the lines that led to it."""

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

    @property
    def unwritten(self) -> bool:
        """True if its result is memory that was never written."""
        return self.base_name.startswith(_UNWRITTEN)

    @property
    def part(self) -> tuple[Any, ...] | None:
        """The rows that it takes out of a tensor, and their place; None for other operations.

        The rows of a mask are ones and zeros wherever they stand, and both runs have such rows.
        """
        if len(self.outputs) < 2 and self.base_name not in _TAKING:
            return None
        return self.operation, self.arguments, *self.outputs


Log = Sequence[LoggedOperation]


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of torch on both sides.

    `source` are the lines of this project that led to it, the innermost first; `forward_source` those of the
    operation whose gradient it computes; `source_b` and `forward_source_b` those of b where the code of the
    runs differs. In arguments a tensor is shown as its type and shape; None where a run did nothing like it.
    """

    name: str
    arguments_a: str | None
    arguments_b: str | None
    source: list[str]
    forward_source: list[str]
    source_b: list[str] = field(default_factory=list)
    forward_source_b: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Finding:
    """The cause of the first difference.

    `kind` is one of this module's words. `agreeing` operations came before; `operation` is the one that made
    the difference, or for OUTSIDE the first that saw it. `logged_from` is the event in which the log begins.
    """

    kind: str
    agreeing: int = 0
    operation: Operation | None = None
    other_name: str | None = None  # the operation of b, for OTHER_OPERATIONS and OTHER_CODE
    logged_from: str = ""


def how_made(a: Log, b: Log, limits: Sequence[int], logged_from: str) -> Finding:
    """The cause of the first item that differs, from the operations of both runs.

    The item came after `limits` operations of a and of b. An operation is the cause if it had equal inputs in
    both runs and another result; memory that was never written does not count.
    """
    limit = min(limits)
    pairs = list(zip(a, b, strict=False))
    alike = next((i for i, (x, y) in enumerate(pairs) if x.operation != y.operation), len(pairs))
    apart = [i for i, (x, y) in enumerate(pairs[:alike]) if x.outputs != y.outputs and not x.unwritten]

    def found(kind: str, at: int | None, other_name: str | None = None) -> Finding:
        end = limit if at is None else min(at, limit)
        operation = None if at is None else _operation(*pairs[at])
        return Finding(kind, end - sum(i < end for i in apart), operation, other_name, logged_from)

    for i in apart:
        one, other = pairs[i]
        if i < limit and one.inputs == other.inputs:
            drawn = any(word in one.base_name for word in _DRAWING)
            kind = ARGUMENTS if one.arguments != other.arguments else DRAWN if drawn else COMPUTED
            return found(kind, i)
    if alike < limit:
        return found(OTHER_OPERATIONS, alike, pairs[alike][1].operation)
    if limits[0] != limits[1]:
        ahead, name = (a, "b") if limits[0] > limit else (b, "a")
        finding = found(OTHER_OPERATIONS, None, f"the item, which {name} had by then")
        return replace(finding, operation=_operation(ahead[limit], ahead[limit]))
    for i in apart:
        if pairs[i][0].inputs != pairs[i][1].inputs and pairs[i][0].base_name not in _SHOWING:
            return found(OUTSIDE, i)
    return found(OUTSIDE, None)


def made_by_other_code(a: Log, b: Log, limits: Sequence[int], logged_from: str) -> Finding | None:
    """The operation by which other code made the first item that differs; None if none can be named."""
    logs = [[x for x in log[:limit] if not x.unwritten] for log, limit in zip((a, b), limits, strict=True)]
    found = [_first_own(*logs), _first_own(*reversed(logs))]
    calls = [None if own is None else log[own.at] for own, log in zip(found, logs, strict=True)]
    mine = 0 if found[0] is not None else 1
    own, one, other = found[mine], calls[mine], calls[1 - mine]
    if own is None or one is None:
        return None
    alike = other is not None and (one.operation, one.arguments) == (other.operation, other.arguments)
    if alike and not any(each is not None and each.known for each in found):
        return None  # the same in both, of numbers that came from elsewhere
    operation = _operation(one, other or one)
    if other is None:
        operation = replace(operation, arguments_a=None) if mine else replace(operation, arguments_b=None)
    known = {digest for each in logs[1 - mine] for digest in each.outputs}
    return Finding(
        kind=OTHER_CODE,
        agreeing=sum(known.issuperset(each.outputs) for each in logs[mine][: own.at]),
        operation=operation,
        other_name=None if other is None else other.operation,
        logged_from=logged_from,
    )


class _Own(NamedTuple):
    """Operation number `at` made a result of its own; `known` if the other run has all that it read.

    Otherwise it read what no logged operation made, and that may be the difference.
    """

    at: int
    known: bool


def _first_own(log: Log, other: Log) -> _Own | None:
    """The first operation of `log` with a lasting result that is not in `other` and follows from no such."""
    known = {digest for each in other for digest in (*each.inputs, *each.outputs)}
    lasting = _lasting(log, known, {each.part for each in other})
    made: set[str] = set()
    for i, each in enumerate(log):
        strange = [digest for digest in each.inputs if digest not in known]
        if lasting[i] and made.isdisjoint(strange):
            return _Own(i, not strange)
        made.update(each.outputs)
    return None


def _lasting(log: Log, known: Collection[str], parts: Collection[Any]) -> list[bool]:
    """By operation, True if it made something unknown that is not only used to compute what is known.

    `known` are digests of numbers, `parts` numbers taken out of a tensor at a certain place. A result that no
    operation reads may be kept, so it lasts.
    """
    lasting = [False] * len(log)
    readers: dict[str, list[int]] = {}
    for i in range(len(log) - 1, -1, -1):
        elsewhere = log[i].part not in parts and log[i].part is not None
        for digest in log[i].outputs:
            if elsewhere or digest not in known:
                read_by = readers.get(digest, [])
                lasting[i] |= not read_by or any(lasting[j] for j in read_by)
        for digest in log[i].inputs:
            readers.setdefault(digest, []).append(i)
    return lasting


def _operation(a: LoggedOperation, b: LoggedOperation) -> Operation:
    return Operation(
        name=a.operation,
        arguments_a=a.arguments,
        arguments_b=b.arguments,
        source=a.source,
        forward_source=a.forward_source,
        source_b=b.source if b.source != a.source else [],
        forward_source_b=b.forward_source if b.forward_source != a.forward_source else [],
    )
