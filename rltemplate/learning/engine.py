"""Runs the functions of an algorithm as they are written, or as compiled programs, and shows their results.

An algorithm writes a decision or an update as a function of tensors, *everything in, everything out*. One
definition is then stepped through in a debugger, compiled and traced: the names of its results are the fields
of the NamedTuples that it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from rltemplate.types import Probe

Function = Callable[..., Any]
Examples = Callable[[], Iterable[tuple[Any, ...]]]


class Engine:
    """Decides how the functions of one algorithm are run."""

    def __init__(self, compiles: bool = False) -> None:
        self.compiles = compiles
        self.probe = Probe()
        self._programs: dict[Function, Function] = {}
        self._cold: list[tuple[Function, Examples]] = []

    def run(self, function: Function, *arguments: Any) -> Any:
        """`function(*arguments)` of a step or an update, as it is written or compiled.

        It takes and returns tensors, in tuples and lists however nested, draws no random numbers and changes
        none of its arguments. A float among the arguments becomes a tensor. What else it reads is guarded by
        `torch.compile`: a number that changed compiles it anew, up to eight times. Each combination of shapes
        and of bools is a program of its own.
        """
        results = self._program(function)(*arguments)
        self.probe.results(function.__name__, results)
        return results

    def scan(
        self, function: Function, state: Any, inputs: Iterable[Any], *constants: Any
    ) -> tuple[Any, list[Any]]:
        """Chain `report, state = function(state, input, *constants)`: the last state, and all reports."""
        reports = []
        for each in inputs:
            report, state = self.run(function, state, each, *constants)
            reports.append(report)
        return state, reports

    def run_part(self, function: Function, *arguments: Any) -> Any:
        """`function(*arguments)` of a part of an iteration, which is never compiled."""
        results = function(*arguments)
        self.probe.results(function.__name__, results, whole=True)
        return results

    def prepare(self, function: Function, examples: Examples) -> None:
        """Have `warm_up` compile a function that is not called in the first iteration.

        `examples` are arguments of each combination of shapes and of bools.
        """
        if self.compiles:
            self._cold.append((function, examples))

    def warm_up(self) -> None:
        """Compile what waits for it, and drop the results.

        It takes a while, and a signal that arrives in it costs nothing as long as nothing is under way.
        """
        for function, examples in self._cold:
            for arguments in examples():
                self._program(function)(*arguments)
        self._cold = []

    def _program(self, function: Function) -> Function:
        if not self.compiles:
            return function
        if function not in self._programs:
            self._programs[function] = _compiled(function)
        return self._programs[function]


def _compiled(function: Function) -> Function:
    # A wrapper in C++ calls the kernels of a small update in half the time of one in Python.
    options: dict[str, Any] = {"cpp_wrapper": True}
    from rltemplate.learning.products import ProductsByOneDNN, onednn_is_faster  # imports the compiler

    if onednn_is_faster():
        options["post_grad_custom_post_pass"] = ProductsByOneDNN()
    compiled: Function = torch.compile(function, fullgraph=True, dynamic=False, options=options)

    def run(*arguments: Any) -> Any:
        try:
            return compiled(*[torch.tensor(x) if x.__class__ is float else x for x in arguments])
        except torch._dynamo.exc.FailOnRecompileLimitHit as error:
            raise RuntimeError(
                f"{function.__qualname__} was compiled too often, since a number that it reads keeps "
                "changing (named in the warning before): make the number an argument"
            ) from error

    return run
