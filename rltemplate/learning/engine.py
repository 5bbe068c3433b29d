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
        self._cold: list[tuple[Function, Examples]] = []

    def __call__(self, function: Function, examples: Examples | None = None) -> Function:
        """`function` as it is run here, a step or an update.

        It takes and returns tensors, in tuples and lists however nested, draws no random numbers and changes
        none of its arguments. A float among the arguments becomes a tensor. What else it reads is guarded by
        `torch.compile`: a number that changed compiles it anew, up to eight times. Each combination of shapes
        and of bools is a program of its own. `examples` are arguments of each such combination, for functions
        that are not called in the first iteration.
        """
        prepared = self._prepared(function)
        if self.compiles and examples is not None:
            self._cold.append((prepared, examples))
        return self._shown(prepared, function.__name__)

    def plain(self, function: Function) -> Function:
        """A part of an iteration, which is always run as it is written."""
        return self._shown(function, function.__name__, whole=True)

    def warm_up(self) -> None:
        """Compile what waits for it, and drop the results.

        It takes a while, and a signal that arrives in it costs nothing as long as nothing is under way.
        """
        for prepared, examples in self._cold:
            for arguments in examples():
                prepared(*arguments)
        self._cold = []

    @staticmethod
    def scan(function: Function, state: Any, inputs: Iterable[Any], *constants: Any) -> tuple[Any, list[Any]]:
        """Chain `report, state = function(state, input, *constants)`: the last state, and all reports."""
        reports = []
        for each in inputs:
            report, state = function(state, each, *constants)
            reports.append(report)
        return state, reports

    def _prepared(self, function: Function) -> Function:
        if not self.compiles:
            return function
        # A wrapper in C++ calls the kernels of a small update in half the time of one in Python.
        options: dict[str, Any] = {"cpp_wrapper": True}
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

    def _shown(self, prepared: Function, name: str, whole: bool = False) -> Function:
        def run(*arguments: Any) -> Any:
            results = prepared(*arguments)
            self.probe.results(name, results, whole)
            return results

        return run
