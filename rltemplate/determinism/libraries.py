"""Settings read back from the libraries themselves: threads, instructions, branches."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.lib import introspect

V = TypeVar("V")

# MKL's conditional numerical reproducibility ("Intel oneMKL Developer Guide", CNR mode): the number that the
# library gives back for a branch, and the bit for its strict form.
_MKL_BRANCHES = {1: "none", 2: "AUTO", 3: "COMPATIBLE", 10: "AVX2", 12: "AVX512"}
_MKL_STRICT = 0x10000
_MKL_BLAS = 1  # of MKL's domains, each of which may have a number of threads of its own


@cache
def _function(name: str) -> Any:
    """A function that was preloaded, else one of torch's library for the CPU or of its libraries, or None."""
    for library in (None, str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")):
        with contextlib.suppress(OSError, AttributeError):
            return getattr(ctypes.CDLL(library), name)
    return None


def mkl_branch() -> str | None:
    """MKL's reproducibility branch as the library reports it, or None where there is no MKL.

    The function stands in Intel's manual as mkl_cbwr_get; torch carries it under its internal name.
    """
    function = _function("mkl_serv_cbwr_get")
    if function is None:
        return None
    number = function(-1)
    branch = _MKL_BRANCHES.get(number & ~_MKL_STRICT, f"number {number & ~_MKL_STRICT}")
    return f"{branch},STRICT" if number & _MKL_STRICT else branch


def mkl_threads() -> int | None:
    """The threads that MKL takes for products, or None where there is no MKL."""
    function = _function("mkl_serv_domain_get_max_threads")
    return None if function is None else int(function(_MKL_BLAS))


@cache
def openblas() -> ctypes.CDLL | None:
    """Numpy's own OpenBLAS, or None where numpy has another BLAS."""
    found = list(Path(np.__file__).parent.with_name("numpy.libs").glob("libscipy_openblas64_*"))
    return ctypes.CDLL(str(found[0])) if found else None


def use_blas_threads(number: int) -> None:
    """Have numpy's OpenBLAS compute with so many threads, or with as many as it was built for."""
    library = openblas()
    if library is not None:
        library.scipy_openblas_set_num_threads64_(number)


def blas_threads() -> int | None:
    """The number of threads of numpy's OpenBLAS, or None where numpy has another BLAS."""
    library = openblas()
    return None if library is None else int(library.scipy_openblas_get_num_threads64_())


def blas_kernels() -> str | None:
    """The processor whose kernels numpy's OpenBLAS uses, or None where numpy has another BLAS."""
    library = openblas()
    if library is None:
        return None
    library.scipy_openblas_get_corename64_.restype = ctypes.c_char_p
    return str(library.scipy_openblas_get_corename64_().decode())


def numpy_instructions() -> list[str]:
    """The sets of instructions that functions of numpy use here, named as numpy names them."""
    loops = introspect.opt_func_info().values()
    return sorted({loop["current"] for signatures in loops for loop in signatures.values()})


def openmp_dynamic() -> bool:
    """True if torch's OpenMP may start fewer threads than asked for on a busy machine."""
    function = _function("omp_get_dynamic")
    return function is not None and bool(function())


def in_parallel(work: Callable[[], V]) -> list[V] | None:
    """Results of `work` in each thread of a parallel region of torch's OpenMP; None without GNU's OpenMP.

    Starts the threads: a process that is forked afterwards must not use torch with more than one.
    """
    region = _function("GOMP_parallel")
    if region is None:
        return None
    found: dict[int, V] = {}

    def note(_: object) -> None:
        found[threading.get_native_id()] = work()

    region.restype = None
    # As many threads as OpenMP gives, whatever was asked for.
    region(ctypes.CFUNCTYPE(None, ctypes.c_void_p)(note), None, 0, 0)
    return list(found.values())
