"""The determinism levels: their switches, and the environment that the process of a run needs for them.

Variables that are read when a process or a library starts are set here, by whoever starts the run's process;
`switches` sets all others. Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rltemplate.determinism.machine import cpu_identity
from rltemplate.determinism.variables import REMOVED

if TYPE_CHECKING:
    from rltemplate.config.schema import DeterminismConfig

# The checks (`checks.CHECKS`) that the name of a level promises, whatever its switches have been set to.
PROMISES: dict[str, tuple[str, ...]] = {
    "fast": (),
    "repeat": ("repeats",),
    "invariant": ("repeats", "rows"),
    "profile": ("golden", "repeats", "rows"),
}


# How often a thread of OpenMP looks for work before it sleeps. By default two threads do so for milliseconds,
# and where other programs need the cores an update of SAC takes seconds. Of the numbers tried this is the
# smallest that costs nothing on idle cores (docs/determinism.md).
_SPINS = 10_000


def prepared(environment: Mapping[str, str], switches: DeterminismConfig, num_threads: int) -> dict[str, str]:
    """`environment` as the process of a run needs it."""
    waiting = {} if "OMP_WAIT_POLICY" in environment else {"GOMP_SPINCOUNT": str(_SPINS)}
    merged = {**waiting, **environment, **process_environment(switches, num_threads)}
    return {name: value for name, value in merged.items() if value is not None}


def process_environment(switches: DeterminismConfig, num_threads: int) -> dict[str, str | None]:
    """Environment variables for the process of a run; None removes one that may be inherited."""
    threads, products = str(num_threads), on_cpu(switches.products.name)
    variables: dict[str, str | None] = {
        **dict.fromkeys(REMOVED),
        "PYTHONHASHSEED": None if switches.hash_seed is None else str(switches.hash_seed),
        "CUBLAS_WORKSPACE_CONFIG": switches.cublas_workspace,
        # Thread pools are sized when their library loads; numpy's BLAS has one of its own.
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        # More threads would cut batches in other places, where nothing is to depend on their number.
        "OPENBLAS_NUM_THREADS": threads if products == "plain" else "1",
    }
    if switches.numpy_without is not None:
        variables["NPY_ENABLE_CPU_FEATURES"] = None  # numpy takes the one variable or the other
    chosen = {
        "ATEN_CPU_CAPABILITY": switches.cpu_capability,
        "OPENBLAS_CORETYPE": switches.blas_kernels,
        "NPY_DISABLE_CPU_FEATURES": switches.numpy_without,
        "MKL_CBWR": strict_branch() if products == "strict" else None,
    }
    return variables | {name: value for name, value in chosen.items() if value is not None}


def on_cpu(products: str) -> str:
    """A way of matrix products, and for `auto` the one for this machine's CPU."""
    if products != "auto":
        return products
    vendor, flags = cpu_identity()
    return "strict" if vendor == "GenuineIntel" and "avx2" in flags else "padded"


def strict_branch() -> str:
    """The strict branch of MKL for this CPU."""
    return "AVX512,STRICT" if "avx512f" in cpu_identity()[1] else "AVX2,STRICT"
