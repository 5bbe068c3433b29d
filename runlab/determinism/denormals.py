"""Denormal numbers (too small for a full mantissa), which a run must not flush to zero.

Any shared library that was linked with -ffast-math may switch flushing on when it is loaded: in the thread
that loads it and in those that are started from there, such as the threads of OpenMP, which compute parts of
torch's operations, and those of numpy's OpenBLAS. With it sums, square roots and Adam give other bits.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import sys
import time
from collections.abc import Sequence
from typing import Any

from runlab.determinism.libraries import loaded_openmp, openblas
from runlab.errors import ConfigError

_SMALLEST = sys.float_info.min  # with a full mantissa
_ONE, _QUARTER = 1.0, sys.float_info.epsilon / 4.0  # a quarter of the distance to the next number
_DEFAULT = ctypes.c_void_p(-1)  # FE_DFL_ENV of glibc and musl
_RESCAN_S = 1.0  # an environment may switch flushing on in each step
_GRAIN = 32_768  # elements from which on torch gives a part to each of its threads


def flushed() -> bool:
    """True if this thread reads denormal numbers as zero, or writes zero in their place."""
    return not _SMALLEST * 0.5 > 0.0


def flushed_in_pool() -> bool:
    """True if this thread or one of torch's threads of OpenMP flushes: each halves the smallest number."""
    import torch

    threads = torch.get_num_threads()
    if threads == 1:
        return flushed()
    x = torch.full((threads * _GRAIN,), torch.finfo(torch.float32).tiny, dtype=torch.float32, device="cpu")
    return flushed() or not (x * 0.5).min().item() > 0.0


def rounds_to_nearest() -> bool:
    """True if this thread rounds as usual; a library may choose another direction."""
    return _ONE + _QUARTER == _ONE and _ONE + 3.0 * _QUARTER > _ONE


def keep() -> None:
    """Switch flushing off after anything that may have loaded a library; `ConfigError` if it stays on."""
    if flushed():
        keep_in_threads(rescan=time.monotonic() - _pools.scanned > _RESCAN_S)


def keep_in_threads(rescan: bool = False) -> None:
    """Switch flushing off in this thread and in all threads of OpenMP; `ConfigError` if it stays on here.

    `rescan` looks for libraries that were loaded since the last time.
    """
    if rescan:
        _pools.scan()
    for run in _pools.run:
        run(_pools.reset, _DEFAULT, 0, 0)  # 0: as many threads as a parallel region has
    if flushed():
        import torch  # slow to import, and hardly ever needed

        torch.set_flush_denormal(False)
    if flushed():
        raise ConfigError(
            "a library flushes denormal numbers to zero, and that cannot be switched off here; look for one "
            "that was linked with -ffast-math, among LD_PRELOAD and what the environment loads"
        )


class _Pools:
    """The thread pools of the OpenMP libraries of this process: each belongs to the thread that uses it."""

    scanned = -math.inf
    run: Sequence[Any] = ()  # functions that run another one in all threads of a pool
    reset: Any = None  # gives a thread the usual floating-point environment

    def scan(self) -> None:
        """Find the libraries that are loaded now."""
        self.scanned = time.monotonic()
        # LLVM's and Intel's libraries have the function of GNU's as well.
        self.run = [each.GOMP_parallel for each in loaded_openmp() if hasattr(each, "GOMP_parallel")]
        for run in self.run:
            run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        if self.run:
            self.reset = ctypes.cast(ctypes.CDLL("libm.so.6").fesetenv, ctypes.c_void_p)


_pools = _Pools()


def restart_openblas() -> None:
    """Start the threads of numpy's OpenBLAS anew from this thread, which does not flush.

    They were started when numpy was imported. `ConfigError` if one of them flushes.
    """
    library = openblas()
    if library is None or library.scipy_openblas_get_num_threads64_() == 1:
        return
    import numpy as np

    with contextlib.suppress(AttributeError):  # not in each build
        library.blas_thread_shutdown_()
    # Each product is denormal; each thread computes some of them.
    row = np.full((1, 512), 2.0**-70, np.float32)
    if not (np.repeat(row.T, 4, 1) @ np.repeat(row, 4, 0)).min() > 0.0:
        raise ConfigError(
            "a thread of numpy's OpenBLAS flushes denormal numbers to zero; look for a library that was "
            "linked with -ffast-math in LD_PRELOAD, or use num_threads=1"
        )
