"""Where code that was changed first made other numbers: in two logs of operations, by the bits that flow.

Operations of other code do not stand side by side: lines come and go, and most of them change nothing. But
numbers are known by digests of their bits. The codes part where one run first makes a result that the other
does not have, and not of a result of that kind; unless nothing comes of it, for what is computed with it are
again numbers that both have, as where a sum was only written in another way.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

# An operation as `replay` logs it: digests of what it read and of what it made under these keys.
_READ, _MADE = "inputs", "outputs"
# Operations that take a part out of a tensor.
_TAKING = ("select", "slice", "index", "index_select", "gather", "unbind", "split", "split_with_sizes")


class Own(NamedTuple):
    """Operation number `at` made a result of its own.

    `known` says whether the other run has all that it read. Otherwise it read what no logged operation made,
    and that may be what differs.
    """

    at: int
    known: bool


def first_own(log: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> Own | None:
    """Where `log` first has a result that lasts, that is not in `other`, and that follows from no such."""
    known = {digest for call in other for key in (_READ, _MADE) for digest in call[key]}
    lasting = _lasting(log, known, {_part(call) for call in other})
    made: set[str] = set()
    for i, call in enumerate(log):
        strange = [digest for digest in call[_READ] if digest not in known]
        if lasting[i] and made.isdisjoint(strange):
            return Own(i, not strange)
        made.update(call[_MADE])
    return None


def shared(log: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> int:
    """How many operations of `log` have results that `other` has as well."""
    known = {digest for call in other for digest in call[_MADE]}
    return sum(known.issuperset(call[_MADE]) for call in log)


def _part(call: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """The rows that an operation takes out of a tensor, and their place; None for other operations.

    The rows of a mask are ones and zeros wherever they stand, and both runs have such rows.
    """
    if len(call[_MADE]) < 2 and not any(f".{name}." in f"{call['operation']}." for name in _TAKING):
        return None
    return call["operation"], call["arguments"], *call[_MADE]


def _lasting(log: Sequence[Mapping[str, Any]], known: Collection[str], parts: Collection[Any]) -> list[bool]:
    """By operation, whether it made something that is not known and that does not end in what is known.

    `known` are numbers, and `parts` are those that were taken out of a tensor at a certain place. What no
    operation reads any more may be anything, such as what is kept.
    """
    lasting = [False] * len(log)
    readers: dict[str, list[int]] = {}
    for i in range(len(log) - 1, -1, -1):
        elsewhere = _part(log[i]) not in parts and _part(log[i]) is not None
        for digest in log[i][_MADE]:
            if elsewhere or digest not in known:
                read_by = readers.get(digest, [])
                lasting[i] |= not read_by or any(lasting[j] for j in read_by)
        for digest in log[i][_READ]:
            readers.setdefault(digest, []).append(i)
    return lasting
