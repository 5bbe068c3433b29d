"""Algorithms that differ in their seed alone, trained in step with each other in one process.

Each is built as if it were alone, with environments and random streams of its own, and all have taken the
same number of environment steps whenever they can be observed. What one of them cannot go on with ends that
one only.

Every member runs in a coroutine of its own (greenlet) up to the next function that it wants to have computed.
As soon as all of them wait, their arguments are stacked, the function is computed once for several of them
(`torch.func.vmap`), and each goes on with its row of the result. On the CPU a stack has `_STACKED` members at
most: more would save little, and where a whole epoch is computed, each stack has a thread, as long as there
are cores. The algorithms know nothing of it. All members set their environments going before the first one
looks at what they gave: those of this process are stepped at once, and others meanwhile in theirs.

A product of stacked matrices may round otherwise than the single ones. So at the levels that promise that a
result does not depend on its company, every member's functions are computed by themselves. So are those of
large networks on the CPU, where arithmetic takes the time and not the calls, and nothing is won by stacking.
These are computed in threads, as many members at once as there are cores for.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import Tensor
from torch.func import vmap

from rltemplate import kernels
from rltemplate.programs import Flat, Function, Joined, Shared, builder, flatten, layout, traced
from rltemplate.types import Algorithm, IterationResult, Turns
from rltemplate.vector import available_cores

# Numbers that a member learns and keeps; with more of them its arithmetic takes longer than its calls.
_LARGE = 200_000
# Members stacked on the CPU. It must not depend on the machine, because it decides last bits.
_STACKED = 4
# What takes longer than this many seconds is worth a thread.
_WORTH_A_THREAD_S = 1e-3


class Together:
    """Algorithms that differ in their seed alone, trained in step with each other."""

    def __init__(
        self,
        members: Sequence[Algorithm],
        turns: Turns | None = None,
        size: int | None = None,
        rows: Sequence[int] | None = None,
    ) -> None:
        """Members are known by their place in `members`.

        `turns` is told of it before anything of a member's environments runs, so that what they draw from
        the global generators of others is the member's own. `size` is how many there were at first, where
        some are not here any more, and `rows` which of them these are: the row that a member has in a batch
        may decide its last bits, as may how many there are, but not what is in the others.
        """
        self._members = list(members)
        self._turns = turns
        self._size = len(self._members) if size is None else size
        self._row = list(range(self._size) if rows is None else rows)  # by place
        self.joint = False
        self._hub: greenlet | None = None
        self._stacks: list[range] = []  # rows that are computed at once; the last may have too many
        self._stacked: dict[int, _Stacked] = {}  # by number of the function
        self._batches: dict[tuple[int, range], _Batch] = {}
        self._joined: dict[int, Joined] = {}  # by number
        self._here = _Here()
        self._at_once = 1  # members or stacks computed in threads
        self._warm: set[int] = set()  # numbers of joined functions
        self._calls: Counter[int] = Counter()  # of functions, by number
        self._long: set[int] = set()  # numbers of functions that are worth a thread
        if self._size == 1:
            return
        first = self._members[0]
        learned = list(_learned(first.state_dict()))
        on_cpu = all(x.device.type == "cpu" for x in learned)
        large = on_cpu and sum(x.numel() for x in learned) > _LARGE
        self.joint = kernels.in_force()["products"] == "plain" and not large
        threads = torch.get_num_threads()
        most = max(1, available_cores() // threads) if on_cpu else 1
        if self.joint:
            count = -(-self._size // _STACKED) if on_cpu else 1
            rows_each = -(-self._size // count)
            self._stacks = [range(k * rows_each, (k + 1) * rows_each) for k in range(count)]
            # Operation by operation it is Python that takes the time, one thread after the other.
            self._at_once = min(count, most) if first.programs.compiles else 1
        elif large:
            self._at_once = min(len(self._members), most)
        self._pool = ThreadPoolExecutor(self._at_once, initializer=torch.set_num_threads, initargs=(threads,))
        for member in self._members:
            member.programs.group = self
            member.programs.capturing = first.programs.capturing
            for mine, theirs in zip(member.programs.functions, first.programs.functions, strict=True):
                if member.programs.compiles:
                    mine.alone = theirs.alone  # the same program, made once

    def train_iteration(self, going: Sequence[int]) -> dict[int, IterationResult | Exception]:
        """One iteration of the members at the places `going`, and by place what it gave.

        What a member raised stands in for its result: it is over for that member, and for no other. What is
        no `Exception` passes.
        """
        if self._size == 1:
            return {place: self._iteration(place) for place in going}
        self._hub = getcurrent()
        running = {place: greenlet(self._iteration) for place in going}
        results: dict[int, IterationResult | Exception] = {}
        waiting: dict[int, _Request] = {}

        def resume(place: int, value: Any) -> None:
            if self._turns is not None:
                self._turns.before_step(place)
            failed = isinstance(value, _Failed)
            answer = running[place].throw(value.error) if failed else running[place].switch(value)
            if isinstance(answer, _Request):
                waiting[place] = answer
            else:
                results[place] = answer

        try:
            # Gradients are switched off for the thread, not for the coroutine that leaves or enters a block.
            with torch.no_grad():
                for place in going:
                    resume(place, place)
                while waiting:
                    # Those that set something going come first, and in order.
                    paused = [place for place, request in waiting.items() if request.function is None]
                    if paused:
                        for place in sorted(paused):
                            del waiting[place]
                            resume(place, None)
                        continue
                    first = waiting[min(waiting)].function
                    assert first is not None
                    same = {
                        place: waiting.pop(place)
                        for place, request in sorted(waiting.items())
                        if type(request.function) is type(first) and request.function.number == first.number
                    }
                    answers = self._compute(first, same) if self.joint else self._compute_apart(same)
                    for place, answer in answers.items():
                        resume(place, answer)
            if self._turns is not None:
                self._turns.end_period()
        finally:
            self._hub = None
            with torch.no_grad():
                for coroutine in running.values():
                    if not coroutine.dead:
                        coroutine.throw(GreenletExit)
        return results

    def call(self, function: Shared | Joined, args: tuple[Any, ...]) -> Any:
        """What `function` returns for `args`, when all others have come to the same place."""
        if isinstance(function, Joined):
            if self._hub is None or not self.joint:
                return function.function(*args)
            return self._hub.switch(_Request(function, args))
        # Called by a function that is computed for a stack, maybe in a thread that nobody waits for any more.
        if self._here.stacked:
            return self._of(function).nested(args)
        if self._hub is None:
            return function.alone(*args)
        if self.joint or function.number in self._long:
            return self._hub.switch(_Request(function, args))
        started = time.perf_counter()
        result = function.alone(*args)
        self._calls[function.number] += 1
        # Programs are made in the first calls. What is found out here changes no number.
        warm = self._calls[function.number] > self._size
        if self._at_once > 1 and warm and time.perf_counter() - started > _WORTH_A_THREAD_S:
            self._long.add(function.number)
        return result

    def pause(self) -> None:
        """Let other members go on first."""
        if self._hub is not None:
            self._hub.switch(_Request(None, ()))

    def _iteration(self, place: int) -> IterationResult | Exception:
        try:
            return self._members[place].train_iteration()
        except Exception as error:
            return error

    def _compute(self, function: Shared | Joined, requests: dict[int, _Request]) -> dict[int, Any]:
        """The results of a function by place, always computed for as many as there were at first.

        For those that are not here, because they failed or ended their epochs early, the first one of their
        stack stands in: for fewer of them another program would have to be made, which may round otherwise.
        """
        if isinstance(function, Joined):  # one for all, whoever of them is here
            function = self._joined.setdefault(function.number, function)
        args = {self._row[place]: request.args for place, request in requests.items()}
        stacks = [rows for rows in self._stacks if any(row in args for row in rows)]
        work = [(function, rows, {row: args[row] for row in rows if row in args}) for rows in stacks]
        if isinstance(function, Joined) and self._at_once > 1 and function.number in self._warm:
            parts = list(self._pool.map(lambda each: self._compute_stack(*each), work))
        else:
            parts = [self._compute_stack(*each) for each in work]
        if isinstance(function, Joined):
            self._warm.add(function.number)  # its programs have been made, which is nothing for threads
        results = {row: result for part in parts for row, result in part.items()}
        return {place: results[self._row[place]] for place in requests}

    def _compute_stack(
        self, function: Shared | Joined, rows: range, args: Mapping[int, tuple[Any, ...]]
    ) -> dict[int, Any]:
        """The results of a function by row, for a stack of which some or all have arguments."""
        first = next(iter(args.values()))
        every = [args.get(row, first) for row in rows]
        if isinstance(function, Shared):
            batch = self._batches.get((function.number, rows))
            if batch is None:
                batch = _Batch(self._of(function), self._rows)
                self._batches[function.number, rows] = batch
            results = batch(every)
        else:
            stacked = [
                builder(values[0])(
                    map(partial(torch.stack, dim=int(place in function.over)), _leaves(values))
                )
                for place, values in enumerate(zip(*every, strict=True))
            ]
            self._here.stacked = True
            try:
                with torch.no_grad():  # which every thread says for itself
                    whole = function.launch(*stacked)
            finally:
                self._here.stacked = False
            tensors = zip(*(leaf.unbind() for leaf in flatten([whole])), strict=True)
            build = builder(whole)
            results = [build(iter(mine)) for mine in tensors]
        return dict(zip(rows, results, strict=True))

    def _of(self, function: Shared) -> _Stacked:
        found = self._stacked.get(function.number)
        if found is None:
            found = self._stacked[function.number] = _Stacked(function)
        return found

    def _compute_apart(self, requests: dict[int, _Request]) -> dict[int, Any]:
        """The results of each member's function by place, computed by themselves."""
        return dict(zip(requests, self._pool.map(_attempted, requests.values()), strict=True))

    def _rows(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """The tensor whose rows these are in order, if it is still there."""
        for batch in self._batches.values():
            found = batch.whole(tensors)
            if found is not None:
                return found
        return None


class _Here(threading.local):
    """What is going on in a thread."""

    stacked = False  # whether the function that runs has been given stacked arguments


class _Request(NamedTuple):
    """What a member waits for: a result, or, without a function, its turn."""

    function: Shared | Joined | None
    args: tuple[Any, ...]


class _Failed(NamedTuple):
    """What a function raised in a thread: to be raised where the member called it."""

    error: Exception


def _attempted(request: _Request) -> Any:
    try:
        return _alone(request)
    except Exception as error:
        return _Failed(error)


def _alone(request: _Request) -> Any:
    assert isinstance(request.function, Shared)
    with torch.no_grad():  # which every thread says for itself
        return request.function.alone(*request.args)


def _learned(state: Any) -> Iterator[Tensor]:
    """The tensors of a member's state that hold numbers and no bits of generators."""
    if isinstance(state, Tensor):
        if state.is_floating_point():
            yield state
    elif isinstance(state, Mapping):
        yield from (x for part in state.values() for x in _learned(part))
    elif isinstance(state, tuple | list):
        yield from (x for part in state for x in _learned(part))


def _leaves(parts: Sequence[Any]) -> Iterator[tuple[Tensor, ...]]:
    """The tensors at the same place of things that are nested alike, one place after the other."""
    return zip(*(flatten([part]) for part in parts), strict=True)


class _Stacked:
    """A function of arguments that are stacked along a first dimension, as its results are."""

    def __init__(self, function: Shared) -> None:
        self._function = function.function
        self._programs = function.programs
        self._made: dict[Any, tuple[Function, Function]] = {}  # a program, and what nests its results
        self._making = threading.Lock()

    def __call__(self, args: Any, stacked: list[Tensor]) -> tuple[Sequence[Tensor], Function]:
        """The tensors of the results for those of the arguments, and what nests them.

        The function's arguments are nested as `args`.
        """
        key = layout(stacked)
        if key not in self._made:
            with self._making:
                if key not in self._made:
                    flat = Flat(self._function, args)
                    graph = traced(vmap(flat), stacked, decompose=self._programs.compiles)
                    self._made[key] = self._programs.ready(graph, stacked), flat.build
        program, build = self._made[key]
        return program(stacked), build

    def nested(self, args: Any) -> Any:
        """The results for stacked `args`, nested as those of the function are."""
        results, build = self(args, flatten(args))
        return build(iter(results))


class _Batch:
    """A function for a stack of members, from the arguments of each to the results of each."""

    def __init__(self, stacked: _Stacked, rows: Callable[[Sequence[Tensor]], Tensor | None]) -> None:
        self._stacked = stacked
        self._rows = rows
        self._last: dict[int, tuple[Tensor, Sequence[Tensor]]] = {}  # first row's id: the whole, its rows

    def __call__(self, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """What each member gets for its arguments."""
        results, build = self._stacked(args[0], [self._stack(tensors) for tensors in _leaves(args)])
        rows = [whole.unbind(0) for whole in results]
        self._last = {id(row[0]): (whole, row) for whole, row in zip(results, rows, strict=True)}
        return [build(iter(mine)) for mine in zip(*rows, strict=True)]

    def whole(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """The last result whose rows `tensors` are."""
        found = self._last.get(id(tensors[0]))
        if found is not None and all(a is b for a, b in zip(tensors, found[1], strict=True)):
            return found[0]
        return None

    def _stack(self, tensors: Sequence[Tensor]) -> Tensor:
        # Parameters come back as they were given out, and need not be put together again.
        found = self._rows(tensors)
        return torch.stack(list(tensors)) if found is None else found
