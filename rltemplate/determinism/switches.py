"""The switches of a determinism level, set in the process of a run and read back from the libraries.

Everything is set before the first tensor is made. A switch that has not taken effect stops the run.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.lib import introspect

from rltemplate.determinism import denormals, kernels
from rltemplate.determinism.levels import ROW_GROUPS, on_cpu, strict_branch
from rltemplate.determinism.machine import compiler_version
from rltemplate.interfaces import ConfigError

if TYPE_CHECKING:
    from rltemplate.config.schema import DeterminismConfig

_DETERMINISTIC: Any = torch.utils.deterministic  # an attribute is missing from torch's type stubs
# MKL's conditional numerical reproducibility ("Intel oneMKL Developer Guide", CNR mode): the number that the
# library gives back for a branch, and the bit for its strict form.
_MKL_BRANCHES = {1: "none", 2: "AUTO", 3: "COMPATIBLE", 10: "AVX2", 12: "AVX512"}
_MKL_STRICT = 0x10000
_MKL_BLAS = 1  # MKL's domain of matrix products; each domain has its own number of threads


def apply(
    switches: DeterminismConfig, num_threads: int, compiles: bool = False, device: str = "cpu"
) -> dict[str, Any]:
    """Set everything that the process itself can set; the settings in force, read back from the libraries.

    `compiles` says whether the run compiles its updates. Raises `ConfigError` naming the first setting that
    cannot be had, and what to use instead.
    """
    torch.set_num_threads(num_threads)
    denormals.keep()
    if compiles:
        torch.use_deterministic_algorithms(switches.deterministic_algorithms)
    else:
        # The same switch without the one of the compiler, whose import would cost each run a second.
        torch.set_deterministic_debug_mode("error" if switches.deterministic_algorithms else "default")
    _DETERMINISTIC.fill_uninitialized_memory = switches.fill_uninitialized_memory
    torch.backends.cudnn.benchmark = switches.cudnn_benchmark
    torch.backends.cudnn.deterministic = switches.cudnn_deterministic
    torch.backends.cuda.matmul.fp32_precision = switches.float32_precision
    on_gpu, products = resolve_device(device).type == "cuda", switches.products.name
    if on_gpu and products == "blas":
        raise ConfigError(
            f"device={device}: determinism.products=blas is about CPUs; use device=cpu, or "
            "determinism=invariant with products=tiled"
        )
    products = "tiled" if on_gpu and products == "auto" else on_cpu(products)
    kernels.use(products, row_groups=int(os.environ.get(ROW_GROUPS, "0")))
    # Several threads divide a product among them, and another kernel computes the rows where parts meet.
    use_blas_threads(num_threads if products == "plain" else 1)
    settings = read_back()
    if compiles:
        settings["cpp_compiler"] = compiler_version()
    for name, value in _wanted(switches, num_threads, products, settings).items():
        if value is not None and settings[name] != value:  # None: any value is right
            instead = "start runs with scripts/train.py, which prepares their process, or use "
            if switches.profile is not None:
                instead = f"this machine cannot be {switches.profile}; use determinism=invariant"
            else:
                instead += "determinism=fast" if products == "plain" else "determinism.products=padded"
            raise ConfigError(f"determinism: {name} should be {value} and is {settings[name]}; {instead}")
    return settings


def confirm(settings: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if a setting is no longer what `apply` returned.

    Called after the environments were made, which load libraries of their own.
    """
    for name, value in read_back().items():
        if value != settings[name]:
            raise ConfigError(
                f"determinism: {name} should be {settings[name]} and is {value} after the environment was "
                "made; something in it sets that"
            )


def read_back() -> dict[str, Any]:
    """The settings in force, read from the libraries; None where torch or numpy has no such library."""
    # The function mkl_cbwr_get of Intel's manual; torch's library has it under its internal name.
    branch, threads = _of_torch("mkl_serv_cbwr_get"), _of_torch("mkl_serv_domain_get_max_threads")
    dynamic, blas = _of_torch("omp_get_dynamic"), _openblas()
    loops = introspect.opt_func_info().values()
    return {
        "torch_num_threads": torch.get_num_threads(),
        "flush_to_zero": denormals.flushed(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "fill_uninitialized_memory": _DETERMINISTIC.fill_uninitialized_memory,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "cuda_float32_precision": torch.backends.cuda.matmul.fp32_precision,
        "python_hash_seed": os.environ.get("PYTHONHASHSEED"),
        "cublas_workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "mkl": torch.backends.mkl.is_available(),
        # If it is on, fewer threads may start on a busy machine.
        "openmp_dynamic": dynamic is not None and bool(dynamic()),
        "mkl_branch": branch and _branch(branch(-1)),
        "mkl_threads": threads and threads(_MKL_BLAS),  # for products
        "blas_kernels": blas and blas.scipy_openblas_get_corename64_().decode(),
        "blas_threads": blas and blas.scipy_openblas_get_num_threads64_(),
        "numpy_instructions": sorted({loop["current"] for each in loops for loop in each.values()}),
        **asdict(kernels.chosen),
    }


def _wanted(
    switches: DeterminismConfig, num_threads: int, products: str, settings: Mapping[str, Any]
) -> dict[str, Any]:
    capability, forbidden = switches.cpu_capability, (switches.numpy_without or "").split()
    # Numpy may have another BLAS than OpenBLAS. Only the way `blas` needs OpenBLAS.
    one_thread = products == "blas" or (products != "plain" and settings["blas_threads"] is not None)
    same = ("deterministic_algorithms", "fill_uninitialized_memory", "cudnn_benchmark", "cudnn_deterministic")
    return {
        "torch_num_threads": num_threads,
        "openmp_dynamic": False,
        "python_hash_seed": None if switches.hash_seed is None else str(switches.hash_seed),
        **{name: getattr(switches, name) for name in (*same, "cublas_workspace", "blas_kernels")},
        "cuda_float32_precision": switches.float32_precision,
        "mkl_branch": strict_branch() if products == "strict" else None,
        "mkl_threads": None if settings["mkl_threads"] is None else num_threads,
        "cpu_capability": None if capability is None else capability.upper(),
        "blas_threads": 1 if one_thread else None,
        "numpy_instructions": [each for each in settings["numpy_instructions"] if each not in forbidden],
    }


def resolve_device(name: str) -> torch.device:
    """`cpu`, `cuda` or `auto` as a torch device; `ConfigError` where there is no such device."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda: torch finds no CUDA device here; use device=cpu or device=auto")
    return torch.device(name)


def use_blas_threads(number: int) -> None:
    """Set the number of threads of numpy's OpenBLAS, which has a maximum of its own."""
    library = _openblas()
    if library is not None:
        library.scipy_openblas_set_num_threads64_(number)


@cache
def _of_torch(name: str) -> Any:
    """A C function: a preloaded one, else one of torch's library for the CPU or of its libraries, or None."""
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
