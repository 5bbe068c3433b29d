"""How functions without side effects are computed: operation by operation, or as one compiled program.

An algorithm writes what it computes as functions of tensors, *everything in, everything out*, and hands them
to a `Programs`, which decides how they are run. So one definition is what a debugger steps through, what is
compiled, what a CUDA graph holds and what is computed for several seeds at once.

A program is made by writing down every operation of one call (`make_fx`), with gradients, clipping and
optimiser, and compiling the list as a whole (TorchInductor). Nothing but the shapes of the arguments is
looked at again: `torch.compile` checks on every call whether any object that it saw has changed, which takes
40 of the 300 microseconds of a small update.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

Function = Callable[..., Any]
# Gives for a function what does the same again, without Python, and the results that it then writes to.
Capture = Callable[[Callable[[], Sequence[Tensor]]], tuple[Callable[[], None], Sequence[Tensor]]]


class Capturing:
    """Whether what runs now becomes part of something that will be replayed."""

    now = False


class Programs:
    """Runs the functions of one algorithm; compiled, or as they are written.

    Where several algorithms that differ in their seed alone are trained together, `group` takes over.
    """

    def __init__(self, compiles: bool = False, capture: Capture | None = None) -> None:
        """With `capture`, whatever can be is held in memory of its own and replayed: `cuda_graph`."""
        self.compiles = compiles
        self.capture = capture
        self.capturing = Capturing()  # the same for all members of a group
        self.made = 0  # programs so far
        self.group: Group | None = None
        self.functions: list[Shared] = []  # by number
        self.num_joined = 0

    def __call__(self, function: Function) -> Shared:
        """`function`, to be called in the way in which functions are run here.

        It takes and returns tensors, in tuples and lists however nested, draws no random numbers, changes
        none of its arguments, and uses no other tensor that may change.
        """
        shared = Shared(self, len(self.functions), function)
        self.functions.append(shared)
        return shared

    def joined(self, function: Function, over: Sequence[int] = ()) -> Joined:
        """`function`, which calls many of those that are run here; started as one where that saves time.

        It does nothing with tensors but hand them on, and take its arguments at the places `over` apart, in
        which every tensor has a row for each call. In a group it may be given tensors of several members at
        once, as the function of one of them, so that what it notes elsewhere means little.
        """
        joined = Joined(self, self.num_joined, function, over)
        self.num_joined += 1
        return joined

    @property
    def opaque(self) -> bool:
        """Whether nothing can be seen of a function while it works."""
        return self.compiles or (self.group is not None and self.group.joint)

    def pause(self) -> None:
        """Something that takes a while has been begun elsewhere: whoever has work may do it now."""
        if self.group is not None:
            self.group.pause()

    def ready(self, graph: torch.fx.GraphModule, leaves: Sequence[Tensor]) -> Function:
        """What computes `graph` from a list of tensors with the shapes of `leaves`, and returns a list."""
        if not self.compiles:
            return partial(_one_by_one, graph)
        program = compiled(graph, leaves)
        self.made += 1
        return program if self.capture is None else _Replayed(self, program)


class Group(Protocol):
    """Who decides what is computed when, for several algorithms."""

    joint: bool  # whether functions are computed for all members at once

    def call(self, function: Shared | Joined, args: tuple[Any, ...]) -> Any:
        """What `function` returns for `args`."""
        ...

    def pause(self) -> None:
        """Let other members go on first."""
        ...


class Shared:
    """A function of an algorithm, which the others of its group have under the same number."""

    def __init__(self, programs: Programs, number: int, function: Function) -> None:
        self.programs = programs
        self.number = number
        self.function = function
        self.alone = Program(programs, function) if programs.compiles else function

    def __call__(self, *args: Any) -> Any:
        """What the function returns for `args`."""
        group = self.programs.group
        return self.alone(*args) if group is None else group.call(self, args)


class Program:
    """A function as one compiled program for each combination of shapes that it is called with."""

    def __init__(self, programs: Programs, function: Function) -> None:
        self._programs = programs
        self._function = function
        self._made: dict[Any, Function] = {}
        self._making = threading.Lock()

    def __call__(self, *args: Any) -> Any:
        """What the function returns for `args`."""
        leaves = flatten(args)
        key = layout(leaves)
        run = self._made.get(key)
        if run is None:
            with self._making:  # others of a group may have come here too
                run = self._made.get(key) or self._make(args, leaves)
                self._made[key] = run
        return run(leaves)

    def _make(self, args: Any, leaves: Sequence[Tensor]) -> Function:
        flat = Flat(self._function, args)
        run = self._programs.ready(traced(flat, leaves), leaves)
        return lambda values: rebuild(flat.like, iter(run(values)))


class Joined:
    """A function that calls others many times in a row, which others of its group have under its number."""

    def __init__(self, programs: Programs, number: int, function: Function, over: Sequence[int]) -> None:
        """`over` are the places of arguments in which every tensor has a row for each call."""
        self.number = number
        self.function = function
        self.over = over
        self._programs = programs
        self._made: dict[Any, tuple[Captured, Flat]] = {}

    def __call__(self, *args: Any) -> Any:
        """What the function returns for `args`."""
        group = self._programs.group
        return self.launch(*args) if group is None else group.call(self, args)

    def launch(self, *args: Any) -> Any:
        """The same without asking the group; where programs are captured, a single launch for each layout."""
        if self._programs.capture is None:
            return self.function(*args)
        leaves = flatten(args)
        key = layout(leaves)
        if key not in self._made:
            flat = Flat(self.function, args)
            self._made[key] = Captured(self._programs, lambda values: flat(*values), leaves), flat
        captured, flat = self._made[key]
        return rebuild(flat.like, iter(captured(leaves)))


class Flat:
    """A function of nested tensors as one from tensors to a list of tensors."""

    def __init__(self, function: Function, args: Any) -> None:
        """`args` show how the function's arguments are nested."""
        self._function = function
        self._args = skeleton(args)
        self.like: Any = None  # how the results were nested in the last call

    def __call__(self, *values: Tensor) -> list[Tensor]:
        """The results, in order."""
        results = self._function(*rebuild(self._args, iter(values)))
        self.like = skeleton(results)
        return flatten([results])


def flatten(value: Any) -> list[Tensor]:
    """The tensors in `value`, in order."""
    leaves: list[Tensor] = []
    _append(value, leaves)
    return leaves


def _append(value: Any, leaves: list[Tensor]) -> None:
    for part in value:
        if isinstance(part, Tensor):
            leaves.append(part)
        else:
            _append(part, leaves)


def layout(leaves: Sequence[Tensor]) -> tuple[Any, ...]:
    """What a program is made for: how tensors lie in memory, without their values."""
    return tuple([(x.shape, x.stride(), x.dtype) for x in leaves])


def rebuild(like: Any, values: Iterator[Tensor]) -> Any:
    """The structure of `like`, with the tensors that come next in `values` in place of its own."""
    if isinstance(like, tuple | list):
        parts = [rebuild(part, values) for part in like]
        return type(like)(*parts) if hasattr(like, "_fields") else type(like)(parts)
    return next(values)


def traced(function: Function, leaves: Sequence[Tensor], decompose: bool = True) -> torch.fx.GraphModule:
    """All operations of `function(*leaves)`, which returns a list of tensors.

    With `decompose`, operations that the compiler knows as several simpler ones are written as these.
    """
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    table = select_decomp_table() if decompose else None
    with torch.no_grad():
        return make_fx(function, table, tracing_mode="fake")(*leaves)


def compiled(graph: torch.fx.GraphModule, leaves: Sequence[Tensor]) -> Callable[[list[Tensor]], Any]:
    """The graph as one program, for tensors with the shapes of `leaves`."""
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    # Programs that were compiled earlier are only found again if there is a ShapeEnv, even if it is empty.
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fakes = [mode.from_tensor(x, static_shapes=True) for x in leaves]
    # A wrapper in C++ calls the kernels of a small update in half the time that one in Python takes.
    on_cpu = all(x.device.type == "cpu" for x in leaves)
    with torch.no_grad(), tracing(TracingContext(mode)):
        return compile_fx_inner(graph, fakes, cpp_wrapper=on_cpu)


def _one_by_one(graph: torch.fx.GraphModule, values: Sequence[Tensor]) -> Sequence[Tensor]:
    return graph(*values)  # type: ignore[no-any-return]


class _Replayed:
    """A program that is captured when it is first called by itself, and not as a part of something longer."""

    def __init__(self, programs: Programs, program: Function) -> None:
        self._programs = programs
        self._program = program
        self._captured: Captured | None = None

    def __call__(self, values: list[Tensor]) -> Sequence[Tensor]:
        if self._programs.capturing.now:
            return self._program(list(values))  # type: ignore[no-any-return]
        if self._captured is None:
            self._captured = Captured(self._programs, self._program, values)
        return self._captured(values)


class Captured:
    """A program whose arguments and results lie in memory of its own, so that it can be replayed as it is.

    Results are copied out: the next replay overwrites them.
    """

    def __init__(self, programs: Programs, program: Function, leaves: Sequence[Tensor]) -> None:
        """`program` takes and returns lists of tensors; `leaves` are its first arguments."""
        assert programs.capture is not None
        self._arguments = [x.clone() for x in leaves]
        programs.capturing.now = True
        try:
            self._replay, results = programs.capture(lambda: program(list(self._arguments)))
        finally:
            programs.capturing.now = False
        self._results = list(results)

    def __call__(self, leaves: list[Tensor]) -> list[Tensor]:
        """The results for `leaves`."""
        torch._foreach_copy_(self._arguments, leaves)
        self._replay()
        copies = [torch.empty_like(x) for x in self._results]
        torch._foreach_copy_(copies, self._results)
        return copies


def cuda_graph(function: Callable[[], Sequence[Tensor]]) -> tuple[Callable[[], None], Sequence[Tensor]]:
    """All kernels of `function` as a CUDA graph, after a few calls in which libraries choose their own."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()
    return graph.replay, results


def skeleton(like: Any) -> Any:
    """`like` without its tensors, which would be kept alive."""
    if isinstance(like, tuple | list):
        parts = [skeleton(part) for part in like]
        return type(like)(*parts) if hasattr(like, "_fields") else type(like)(parts)
    return None
