"""Settings read back from the libraries themselves: threads, instructions, branches."""

from __future__ import annotations

import contextlib
import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib import introspect

# MKL's conditional numerical reproducibility ("Intel oneMKL Developer Guide", CNR mode): the number that the
# library gives back for a branch, and the bit for its strict form.
_MKL_BRANCHES = {1: "none", 2: "AUTO", 3: "COMPATIBLE", 10: "AVX2", 12: "AVX512"}
_MKL_STRICT = 0x10000
_MKL_BLAS = 1  # of MKL's domains, each of which may have a number of threads of its own


def read_back() -> dict[str, Any]:
    """The settings of OpenMP, MKL, OpenBLAS and numpy; None where torch or numpy has no such library."""
    # In Intel's manual mkl_cbwr_get; torch carries it under its internal name.
    branch, threads = _of_torch("mkl_serv_cbwr_get"), _of_torch("mkl_serv_domain_get_max_threads")
    dynamic, blas = _of_torch("omp_get_dynamic"), _openblas()
    loops = introspect.opt_func_info().values()
    return {
        # Where it is on, fewer threads may start than asked for on a busy machine.
        "openmp_dynamic": dynamic is not None and bool(dynamic()),
        "mkl_branch": branch and _branch(branch(-1)),
        "mkl_threads": threads and threads(_MKL_BLAS),  # for products
        "blas_kernels": blas and blas.scipy_openblas_get_corename64_().decode(),
        "blas_threads": blas and blas.scipy_openblas_get_num_threads64_(),
        "numpy_instructions": sorted({loop["current"] for each in loops for loop in each.values()}),
    }


def use_blas_threads(number: int) -> None:
    """Have numpy's OpenBLAS compute with so many threads, or with as many as it was built for."""
    library = _openblas()
    if library is not None:
        library.scipy_openblas_set_num_threads64_(number)


@cache
def _of_torch(name: str) -> Any:
    """A function that was preloaded, else one of torch's library for the CPU or of its libraries, or None."""
    for library in (None, str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")):
        with contextlib.suppress(OSError, AttributeError):
            return getattr(ctypes.CDLL(library), name)
    return None


@cache
def _openblas() -> ctypes.CDLL | None:
    """Numpy's own OpenBLAS, or None where numpy has another BLAS."""
    for path in Path(np.__file__).parent.with_name("numpy.libs").glob("libscipy_openblas64_*"):
        library = ctypes.CDLL(str(path))
        library.scipy_openblas_get_corename64_.restype = ctypes.c_char_p
        return library
    return None


def _branch(number: int) -> str:
    branch = _MKL_BRANCHES.get(number & ~_MKL_STRICT, f"number {number & ~_MKL_STRICT}")
    return f"{branch},STRICT" if number & _MKL_STRICT else branch
