"""Settings read back from the libraries: threads, instructions, branches.

Nothing is asked from the configuration or from the environment.
"""

from __future__ import annotations

import ctypes
import os
import re
import tempfile
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

V = TypeVar("V")

# MKL's conditional numerical reproducibility ("Intel oneMKL Developer Guide", CNR mode): the number that the
# library gives back for a branch, and the bit for its strict form.
_MKL_BRANCHES = {1: "none", 2: "AUTO", 3: "COMPATIBLE", 4: "SSE2", 6: "SSSE3", 7: "SSE4_1", 8: "SSE4_2"}
_MKL_BRANCHES |= {9: "AVX", 10: "AVX2", 12: "AVX512", 14: "AVX512_E1"}
_MKL_STRICT = 0x10000
_MKL_BLAS = 1  # of MKL's domains, each of which may have a number of threads of its own
# oneDNN's names in its messages, and in its variable ("CPU Dispatcher Control" in its guide), of those that
# were seen to come back.
ONEDNN = {
    "Intel SSE4.1": "SSE41",
    "Intel AVX": "AVX",
    "Intel AVX2": "AVX2",
    "Intel AVX2 with Intel DL Boost": "AVX2_VNNI",
    "Intel AVX-512 with AVX512BW, AVX512VL, and AVX512DQ extensions": "AVX512_CORE",
    "Intel AVX-512 with Intel DL Boost": "AVX512_CORE_VNNI",
    "Intel AVX-512 with Intel DL Boost and bfloat16 support": "AVX512_CORE_BF16",
}


@cache
def _function(name: str) -> Any:
    """A function that was preloaded, else one of torch's library for the CPU or of its libraries, or None."""
    import torch

    preloaded = getattr(ctypes.CDLL(None), name, None)
    if preloaded is not None:
        return preloaded
    try:
        return getattr(ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")), name)
    except (OSError, AttributeError):
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


def blas_kernels() -> str | None:
    """The processor whose kernels numpy's OpenBLAS uses, or None where numpy has another BLAS."""
    from rltemplate.determinism import blas

    library = blas.blas_library()
    if library is None:
        return None
    name = library.scipy_openblas_get_corename64_
    name.restype = ctypes.c_char_p
    return str(name().decode())


def mkl_threads() -> int | None:
    """The threads that MKL takes for products, or None where there is no MKL."""
    function = _function("mkl_serv_domain_get_max_threads")
    return None if function is None else int(function(_MKL_BLAS))


def numpy_instructions() -> list[str]:
    """The sets of instructions that functions of numpy use here, named as numpy names them."""
    from numpy.lib import introspect

    loops = introspect.opt_func_info().values()
    return sorted({loop["current"] for signatures in loops for loop in signatures.values()})


@cache
def onednn_isa() -> str | None:
    """The instructions that oneDNN uses, named as ONEDNN_MAX_CPU_ISA names them; None if it does not tell.

    It tells only in what it prints when it is first used, and by another name. With one thread, so that no
    others are started.
    """
    import torch

    verbose: Any = torch._C._verbose
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryFile() as printed:
            before = os.dup(1)
            os.dup2(printed.fileno(), 1)
            try:
                verbose.mkldnn_set_verbose(1)
                torch.zeros(1).to_mkldnn()
                verbose.mkldnn_set_verbose(0)
                ctypes.CDLL(None).fflush(None)
            finally:
                os.dup2(before, 1)
                os.close(before)
            printed.seek(0)
            found = re.search(r"cpu,isa:(.*)", printed.read().decode(errors="replace"))
    except (OSError, RuntimeError):  # no oneDNN in this torch, or no standard output
        return None
    finally:
        torch.set_num_threads(threads)
    return None if found is None else ONEDNN.get(found[1].strip(), found[1].strip())


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
