"""Runs the functions of an algorithm as they are written, or as compiled programs.

An algorithm writes a decision or an update as a function of tensors, *everything in, everything out*. One
definition is then stepped through in a debugger and compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Function = Callable[..., Any]


class Engine:
    """Decides how the functions of one algorithm are run."""

    def __init__(self, compiles: bool = False) -> None:
        self.compiles = compiles

    def __call__(self, function: Function) -> Function:
        """`function` as it is run here.

        It takes and returns tensors, in tuples and lists however nested, draws no random numbers and changes
        none of its arguments. What else it reads is guarded by `torch.compile`: a Python number that changed
        compiles it anew. Each combination of shapes is a program of its own.
        """
        if not self.compiles:
            return function
        # A wrapper in C++ calls the kernels of a small update in half the time of one in Python.
        options: dict[str, Any] = {"cpp_wrapper": True}
        compiled: Function = torch.compile(function, fullgraph=True, dynamic=False, options=options)
        return compiled
