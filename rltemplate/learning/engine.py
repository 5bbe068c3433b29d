"""How functions without side effects are computed: operation by operation, or as one compiled program.

An algorithm writes what it computes as functions of tensors, *everything in, everything out*, and hands them
to a `Programs`, which decides how they are run. So one definition is what a debugger steps through and what
is compiled.

A program is made by writing down every operation of one call (`make_fx`), with gradients, clipping and
optimiser, and compiling the list as a whole (TorchInductor). Nothing but the shapes of the arguments is
looked at again: `torch.compile` checks on every call whether any object that it saw has changed, which takes
40 of the 300 microseconds of a small update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten
Function = Callable[..., Any]


class Programs:
    """Runs the functions of one algorithm; compiled, or as they are written."""

    def __init__(self, compiles: bool = False) -> None:
        self.compiles = compiles
        self.made = 0  # programs so far

    def __call__(self, function: Function) -> Function:
        """`function`, to be called in the way in which functions are run here.

        It takes and returns tensors, in tuples and lists however nested, draws no random numbers, changes
        none of its arguments, and uses no other tensor that may change.
        """
        return Program(self, function) if self.compiles else function


class Program:
    """A function as one compiled program for each combination of shapes that it is called with."""

    def __init__(self, programs: Programs, function: Function) -> None:
        self._programs = programs
        self._function = function
        self._made: dict[Any, Function] = {}

    def __call__(self, *args: Any) -> Any:
        """What the function returns for `args`."""
        leaves = flatten(args)
        key = layout(leaves)
        run = self._made.get(key)
        if run is None:
            run = self._made[key] = self._make(args, leaves)
        return run(leaves)

    def _make(self, args: Any, leaves: Sequence[Tensor]) -> Function:
        flat = Flat(self._function, args)
        run = compiled(traced(flat, leaves), leaves)
        self._programs.made += 1
        build = flat.build
        return lambda values: build(iter(run(values)))


class Flat:
    """A function of nested tensors as one from tensors to a list of tensors."""

    def __init__(self, function: Function, args: Any) -> None:
        """`args` show how the function's arguments are nested."""
        self._function = function
        self._args = builder(args)
        self.build: Callable[[Iterator[Tensor]], Any]  # nests the results as those of the last call were

    def __call__(self, *values: Tensor) -> list[Tensor]:
        """The results, in order."""
        results = self._function(*self._args(iter(values)))
        self.build = builder(results)
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


def builder(like: Any) -> Callable[[Iterator[Tensor]], Any]:
    """What makes a structure like that of `like` of the tensors that come next.

    The structure is looked at only here, for that takes as long as a small layer of a network.
    """
    if not isinstance(like, tuple | list):
        return next
    parts = [builder(part) for part in like]
    kind: Any = type(like)
    make = kind._make if hasattr(like, "_fields") else kind
    return lambda values: make([part(values) for part in parts])


def traced(function: Function, leaves: Sequence[Tensor]) -> torch.fx.GraphModule:
    """All operations of `function(*leaves)`, which returns a list of tensors.

    Operations that the compiler knows as several simpler ones are written as these, tanh on the CPU in a way
    of our own, and columns of products that are cut off are left out.
    """
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    table = select_decomp_table()
    if all(x.device.type == "cpu" for x in leaves):
        table = {**table, _aten.tanh.default: _tanh}
    # Otherwise another thread would write down the gradients of what is on a GPU.
    with torch.no_grad(), torch.autograd.set_multithreading_enabled(False):
        module = make_fx(function, table, tracing_mode="fake")(*leaves)
    _narrow_products(module)
    return module


def _narrow_products(module: torch.fx.GraphModule) -> None:
    """Leave out the columns of a product of which only a slice is used.

    A gradient by a part of an input is written as that by all of it, which is cut afterwards. For the actions
    of SAC that is 8 % of all arithmetic where they stand beside the observations of Humanoid.
    """
    graph = module.graph
    graph.eliminate_dead_code()
    for node in list(graph.nodes):
        if node.target is _aten.slice.Tensor and len(node.args) == 4:
            value, dim, first, last = node.args
            if dim % len(_shape(value)) == len(_shape(value)) - 1 and _is_wide(value):
                node.replace_all_uses_with(_columns(graph, value, first, last))
    graph.eliminate_dead_code()
    module.recompile()


def _is_wide(node: Any) -> bool:
    """Whether it is a product that is used only once, or a sum of such of one shape."""
    if not isinstance(node, torch.fx.Node) or len(node.users) != 1 or node.kwargs:
        return False
    if node.target is _aten.add.Tensor:
        parts = node.all_input_nodes
        return len(parts) == 2 and _shape(parts[0]) == _shape(parts[1]) and all(map(_is_wide, parts))
    return node.target is _aten.mm.default


def _columns(graph: torch.fx.Graph, node: Any, first: int, last: int) -> torch.fx.Node:
    """Some columns of what `_is_wide`."""
    if node.target is _aten.add.Tensor:
        arguments = [_columns(graph, part, first, last) for part in node.args]
    else:
        left, right = node.args
        arguments = [
            left,
            _inserted(graph, node, _aten.slice.Tensor, right, len(_shape(right)) - 1, first, last),
        ]
    return _inserted(graph, node, node.target, *arguments)


def _inserted(graph: torch.fx.Graph, before: torch.fx.Node, target: Any, *arguments: Any) -> torch.fx.Node:
    """A call of `target` before a node, with the value that later passes look at."""
    with graph.inserting_before(before):
        node = graph.call_function(target, arguments)
    values = [part.meta["val"] if isinstance(part, torch.fx.Node) else part for part in arguments]
    node.meta["val"] = target(*values)
    return node


def _shape(node: torch.fx.Node) -> torch.Size:
    shape: torch.Size = node.meta["val"].shape
    return shape


# tanh(x) / x as a fraction of two polynomials in x^2, by ascending powers; fitted to the least relative error
# for |x| <= 9, which is 6e-8 with these digits. From 8.1 on what comes out in float32 is 1.
_TANH_ABOVE = (1.0, 0.13381008803844452, 0.003495568409562111, 2.060875885945279e-05, 1.3354224392969627e-08)
_TANH_BELOW = (1.0, 0.4671432375907898, 0.025876907631754875, 0.0003285602724645287, 7.776376946821983e-07)
_TANH_ENDS = 9.0


def _tanh(x: Tensor) -> Tensor:
    """The hyperbolic tangent, within 4e-7 of what it is; no result is beyond -1 or 1.

    The compiler's own takes 2 ns for each, and there are 16,000 in a small update of PPO.
    """
    if x.dtype != torch.float32:
        return NotImplemented  # type: ignore[no-any-return]
    x = x.clamp(-_TANH_ENDS, _TANH_ENDS)
    square = x * x
    above, below = (_polynomial(square, factors) for factors in (_TANH_ABOVE, _TANH_BELOW))
    return (x * above / below).clamp(-1.0, 1.0)


def _polynomial(x: Tensor, factors: Sequence[float]) -> Tensor:
    """The sum of factors[i] x^i."""
    *rest, last = factors
    result = x * last
    for factor in rest[:0:-1]:
        result = (result + factor) * x
    return result + rest[0]


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
