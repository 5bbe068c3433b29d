"""C functions of the libraries that numpy and torch compute with."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_CORETYPE = "OPENBLAS_CORETYPE"
# OpenMP of GNU, LLVM and Intel.
_OPENMP = re.compile(r"/\S*/lib(?:gomp|omp|iomp5)\b[^/\s]*\.so\S*")
# The versions in torch's description of its build.
_BUILT_WITH = {"torch's MKL": r"Math Kernel Library Version (.+?) for", "torch's oneDNN": r"MKL-DNN v(\S+)"}


@cache
def openblas() -> Any:
    """Numpy's own OpenBLAS, or None where numpy has another BLAS."""
    import numpy as np

    for path in Path(np.__file__).parent.with_name("numpy.libs").glob("libscipy_openblas64_*"):
        library = ctypes.CDLL(str(path))
        library.scipy_openblas_get_corename64_.restype = ctypes.c_char_p
        library.scipy_openblas_get_config64_.restype = ctypes.c_char_p
        return library
    return None


@contextlib.contextmanager
def openblas_kernels(name: str) -> Iterator[bool]:
    """Let numpy's OpenBLAS use the kernels for another processor in the block; False if it cannot.

    Only for a try: a run sets the variable before its process starts.
    """
    library, before = openblas(), os.environ.get(_CORETYPE)

    def choose(kernels: str | None) -> None:
        os.environ.pop(_CORETYPE, None)
        if kernels is not None:
            os.environ[_CORETYPE] = kernels
        library.gotoblas_dynamic_quit()
        library.gotoblas_dynamic_init()

    if library is None or not hasattr(library, "gotoblas_dynamic_init"):
        yield False
        return
    try:
        choose(name)
        yield library.scipy_openblas_get_corename64_().decode() == name
    finally:
        choose(before)


@cache
def of_torch(name: str) -> Any:
    """A C function: a preloaded one, else one of torch's library for the CPU or of its libraries, or None."""
    import torch

    for library in (None, str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")):
        with contextlib.suppress(OSError, AttributeError):
            return getattr(ctypes.CDLL(library), name)
    return None


def library_versions(device: torch.device) -> dict[str, str]:
    """Versions of the libraries inside of torch and numpy: packages of equal version may have others."""
    import torch

    build = torch.__config__.show()
    found = {name: re.search(pattern, build) for name, pattern in _BUILT_WITH.items()}
    versions = {name: match[1] for name, match in found.items() if match}
    if (blas := openblas()) is not None:  # "OpenBLAS 0.3.30 USE64BITINT DYNAMIC_ARCH ..."
        versions["numpy's OpenBLAS"] = blas.scipy_openblas_get_config64_().decode().split()[1]
    if device.type == "cuda":
        versions["torch's CUDA"] = f"{torch.version.cuda}"
        versions["torch's cuDNN"] = f"{torch.backends.cudnn.version()}"
    return versions


def loaded_openmp() -> list[Any]:
    """The OpenMP libraries that this process has loaded, on Linux; it takes milliseconds."""
    if sys.platform != "linux":
        return []
    names = sorted({*_OPENMP.findall(Path("/proc/self/maps").read_text(errors="replace"))})
    libraries = []
    for name in names:
        with contextlib.suppress(OSError):
            libraries.append(ctypes.CDLL(name))
    return libraries
