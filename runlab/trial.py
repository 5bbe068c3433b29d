"""Trial of compiled programs before a run begins: they can be made, and compute what their functions do."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from runlab.determinism import kernels, programs
from runlab.determinism.programs import NoCompilerError
from runlab.engine import CompilerError, Engine, Function
from runlab.errors import ConfigError
from runlab.interfaces import Probe
from runlab.rng import Streams

# In about one rehearsal of twenty, rounding decides whether a unit of ReLU passes its gradient on. A wrong
# program is wrong with all numbers.
_ATTEMPTS = 3
# Largest difference between the results of a program and of its function, as a share of their norm or of 1.
# By rounding it is below 1e-6.
_TOLERANCE = 1e-4


@runtime_checkable
class Compiled(Protocol):
    """An algorithm whose functions are run by an engine."""

    engine: Engine
    streams: Streams
    device: torch.device

    def rehearse(self) -> None:
        """Call each function of the engine once, with made-up numbers in the shapes of a run."""


class WrongProgramError(ConfigError):
    """A compiled program computes something else than its function."""


def try_programs(algorithm: Any, stepwise: bool, note: Callable[[str], None]) -> dict[str, Any]:
    """Compile the functions of an algorithm, and compare them with what they are made of; facts about that.

    `stepwise` is the one of the probe that the run will have. Changes nothing of the run. Raises
    NoCompilerError if they cannot be compiled, even after the cache was emptied, and WrongProgramError if
    they compute something else.
    """
    if not isinstance(algorithm, Compiled):
        return {}
    note("compiling: this may take a minute")
    try:
        compare_programs(algorithm, stepwise)
    except CompilerError as error:
        folder = programs.cache_folder(os.environ)
        if not programs.remove_all(folder):
            raise NoCompilerError(f"{error}") from error
        try:
            compare_programs(algorithm, stepwise)
        except CompilerError as again:
            raise NoCompilerError(f"{again}") from again
        note(f"damaged programs in {folder} were removed and made again ({error})")
    on_cpu = algorithm.device.type == "cpu"
    return {"vector_instructions": programs.vector_instructions()} if on_cpu else {}


def compare_programs(algorithm: Compiled, stepwise: bool) -> None:
    """Compare the programs that a rehearsal calls; draws from no stream of the run."""
    if not torch.compile(_is_compiled, backend="eager", dynamic=False)(torch.zeros(())):
        raise CompilerError("TORCHDYNAMO_DISABLE or TORCH_COMPILE_DISABLE switches torch's compiler off")
    engine, streams, probe = algorithm.engine, algorithm.streams, algorithm.engine.probe
    engine.compare, engine.probe = _compare, Probe()
    engine.probe.stepwise = stepwise
    try:
        for attempt in range(_ATTEMPTS):
            algorithm.streams = Streams(attempt, algorithm.device, streams.on_cpu)
            try:
                with torch.no_grad():
                    return algorithm.rehearse()
            except WrongProgramError:
                if attempt == _ATTEMPTS - 1:
                    raise
    finally:
        engine.compare, engine.probe, algorithm.streams = None, probe, streams


def _is_compiled(x: Tensor) -> Tensor:
    return x + 1.0 if torch.compiler.is_compiling() else x


def _compare(function: Function, results: Any, plain: Any) -> None:
    """Raise WrongProgramError unless a program's results are those of the function as it is written."""
    for result, other in zip(pytree.tree_leaves(results), pytree.tree_leaves(plain), strict=True):
        a, b = result.double(), other.double()
        share = math.sqrt(kernels.total((a - b) ** 2) / kernels.total(b**2).clamp(min=1.0))
        if not share <= _TOLERANCE:  # NaN is none
            raise WrongProgramError(
                f"{function.__qualname__}: its compiled program is wrong: results differ by {share:.3g} of "
                f"their size from those of the function as it is written\nremove "
                f"{programs.cache_folder(os.environ)}, where it comes from, or use compile=false"
            )
