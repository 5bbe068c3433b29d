"""Runs the functions of an algorithm as they are written, or as compiled programs, and shows their results.

An algorithm writes a decision or an update as a function of tensors, *everything in, everything out*. One
definition can then be debugged, compiled and traced: the names of its results are the fields of the
NamedTuples that it returns.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from runlab.errors import RunError
from runlab.interfaces import Probe
from runlab.signals import stop_signals_wait

Function = Callable[..., Any]
_MAY_COMPILE = 8  # first calls of a program


class CompilerError(RunError):
    """A function could not be compiled, or its program not be loaded; the message is the cause."""


class Engine:
    """Decides how the functions of one algorithm are run."""

    def __init__(self, compiles: bool = False, device: torch.device | None = None) -> None:
        self.compiles, self._on_gpu = compiles, device is not None and device.type == "cuda"
        self.probe = Probe()
        # In a trial: gets a function, the results of its program, and its own results.
        self.compare: Callable[[Function, Any, Any], None] | None = None
        self._programs: dict[Function, Function] = {}
        self._loops: dict[tuple[Function, bool], Function] = {}

    def run(self, function: Function, *arguments: Any) -> Any:
        """`function(*arguments)` of a step or an update, as it is written or compiled.

        It takes and returns tensors, in nested tuples and lists, draws no random numbers and changes none of
        its arguments. A float among the arguments becomes a tensor. `torch.compile` guards everything else
        that it reads: if such a number changes, it is compiled again, up to eight times. Each combination of
        shapes and of bools is a separate program.
        """
        results = self._program(function)(*arguments)
        if self.compare is not None:
            self.compare(function, results, function(*arguments))
        self.probe.results(function.__name__, results)
        return results

    def scan(self, function: Function, state: Any, inputs: Any, *constants: Any) -> tuple[Any, Tensor]:
        """Chain `report, state = function(state, row, *constants)`: the last state, and all metrics.

        `inputs` is a NamedTuple of tensors, and the rows of their first axis are the inputs of one call each.
        The metrics are the tensors `report.metrics`, stacked along a new first axis; the rest of a report is
        for the probe alone, since the gradients of all updates would fill the memory. All leaves of state,
        inputs and reports are tensors, and those of the state keep their shapes and types.

        Compiled, all calls are one program: Python does nothing between two updates (docs/speed.md).
        """
        stepwise, num_rows = self.probe.stepwise, len(pytree.tree_leaves(inputs)[0])
        # A loop of one call gains nothing. On a GPU each call is a graph, and Python does little.
        if not self.compiles or num_rows == 1 or self._on_gpu:
            return _one_by_one(partial(self.run, function), state, inputs, constants)
        if (function, stepwise) not in self._loops:
            self._loops[function, stepwise] = _on_cpu(_loop(function, stepwise))
        last, shown = self._loops[function, stepwise](state, inputs, *constants)
        metrics = shown[0].metrics if stepwise else shown
        if self.compare is not None:
            self.compare(function, (last, metrics), _one_by_one(function, state, inputs, constants))
        for results in _rows(shown) if stepwise else ():
            self.probe.results(function.__name__, results)
        return last, metrics

    def run_eager(self, function: Function, *arguments: Any) -> Any:
        """`function(*arguments)` of a part of an iteration, which is never compiled."""
        results = function(*arguments)
        self.probe.results(function.__name__, results, whole=True)
        return results

    def _program(self, function: Function) -> Function:
        if not self.compiles:
            return function
        if function not in self._programs:
            self._programs[function] = (_as_cuda_graph if self._on_gpu else _on_cpu)(function)
        return self._programs[function]


def _one_by_one(function: Function, state: Any, inputs: Any, constants: Sequence[Any]) -> tuple[Any, Tensor]:
    """The last state and all metrics of `scan`, by calls of `function`."""
    metrics = []
    for row in _rows(inputs):
        report, state = function(state, row, *constants)
        metrics.append(report.metrics)
    return state, torch.stack(metrics)


def _loop(function: Function, stepwise: bool) -> Function:
    """`function` over the rows of its inputs: the last state, all metrics or all results if `stepwise`."""
    # Torch 2.13 has no public name for scan; its documentation imports it from here.
    from torch._higher_order_ops import scan

    def shown_of(report: Any, new: Any) -> Any:
        return (report, new) if stepwise else report.metrics

    def loop(state: Any, inputs: Any, *constants: Any) -> Any:
        start, of_state = pytree.tree_flatten(state)
        rows, of_row = pytree.tree_flatten(inputs)
        # Only the form is used: the compiler removes the computation.
        example = shown_of(*function(state, pytree.tree_unflatten([x[0] for x in rows], of_row), *constants))

        def body(carry: list[Tensor], row: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
            present, single = pytree.tree_unflatten(carry, of_state), pytree.tree_unflatten(row, of_row)
            report, new = function(present, single, *constants)
            return _copies(pytree.tree_leaves(new)), _copies(pytree.tree_leaves(shown_of(report, new)))

        last, shown = scan(body, _copies(start), rows)
        of_shown = pytree.tree_structure(example)
        return pytree.tree_unflatten(last, of_state), pytree.tree_unflatten(shown, of_shown)

    loop.__qualname__ = function.__qualname__
    loop.__code__ = loop.__code__.replace()  # its own: the compiler counts per code object
    return loop


def _copies(tensors: list[Tensor]) -> list[Tensor]:
    """Copies for `scan`, which refuses results that share memory with each other or with its inputs."""
    return [x.clone(memory_format=torch.contiguous_format) for x in tensors]


def _rows(stacked: Any) -> Iterator[Any]:
    """The rows along the first axis of nested tensors."""
    leaves, form = pytree.tree_flatten(stacked)
    return (pytree.tree_unflatten(row, form) for row in zip(*leaves, strict=True))


def _on_cpu(function: Function) -> Function:
    # A C++ wrapper calls the kernels of a small update in half the time of a Python wrapper.
    options: dict[str, Any] = {"cpp_wrapper": True}
    # Without this, each process compiles a loop anew. Its code is part of the key, whatever the name says.
    options["unsafe_marked_cacheable_functions"] = {"torch.ops.higher_order.scan": torch.__version__}
    from runlab.determinism.onednn import ProductsByOneDNN, onednn_is_faster  # imports the compiler

    if onednn_is_faster():
        options["post_grad_custom_post_pass"] = ProductsByOneDNN()
    return _compiled(function, options=options)


def _as_cuda_graph(function: Function) -> Function:
    # Without `deterministic` the compiler times ways of computing a product, and takes the faster one.
    deterministic = torch.are_deterministic_algorithms_enabled()
    program = _compiled(function, options={"triton.cudagraphs": True, "deterministic": deterministic})

    def run(*arguments: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        # A graph writes its results into the same memory at each call.
        return pytree.tree_map(torch.clone, program(*arguments))

    return run


def _compiled(function: Function, **how: Any) -> Function:
    compiled: Function = torch.compile(function, fullgraph=True, dynamic=False, **how)
    calls = itertools.count()

    def run(*arguments: Any) -> Any:
        try:
            with stop_signals_wait() if next(calls) < _MAY_COMPILE else contextlib.nullcontext():
                return compiled(*[torch.tensor(x) if x.__class__ is float else x for x in arguments])
        except torch._dynamo.exc.FailOnRecompileLimitHit as error:
            raise RuntimeError(
                f"{function.__qualname__} was compiled too often, since a number that it reads keeps "
                "changing (named in the warning before): make the number an argument"
            ) from error
        except RuntimeError as error:
            by_compiler = isinstance(error, torch._dynamo.exc.TorchDynamoException)
            if not (by_compiler or "found no compiled frames" in str(error)):
                raise
            raise CompilerError(f"{function.__qualname__}: {_cause(error)}") from error

    return run


def _cause(error: BaseException) -> str:
    """The cause of an error of the compiler in a line, with the line of code if it is about one."""
    inner = getattr(error, "inner_exception", None) or error
    if isinstance(inner, OSError) and inner.strerror:
        return f"{inner.filename}: {inner.strerror}"
    lines = [line.strip() for line in str(inner).splitlines() if line.strip()] or [type(inner).__name__]
    problem = lines[0]  # torch's own errors begin with the cause
    if problem.startswith("C++ compile error"):  # the output of the compiler comes after its command
        problem = next((line for line in lines[1:] if "error" in line.lower()), lines[-1])
        problem = f"the C++ compiler fails: {problem}"
    places = [line for line in lines if line.startswith('File "')]
    return f"{problem} ({places[-1]})" if places and "from user code" in str(inner) else problem
