"""The determinism levels: their promises, and the environment variables that change bits.

Variables that a process or a library reads at its start are set here, before the process of the run starts.
`switches` sets everything else. Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from runlab.machine import cpu_identity

if TYPE_CHECKING:
    from runlab.config.schema import DeterminismConfig

# The checks (`checks.CHECKS`) that the name of a level promises, whatever the values of its switches.
PROMISES: dict[str, tuple[str, ...]] = {
    "fast": (),
    "repeat": ("repeats",),
    "invariant": ("repeats", "rows"),
    "profile": ("golden", "repeats", "rows"),
}

# Splits every forward pass without gradient into groups of this many rows. It is no key of the configuration,
# since it must change nothing: `prove` sets it to test that.
ROW_GROUPS = "RUNLAB_ROW_GROUPS"

# How often a thread of OpenMP looks for work before it sleeps. By default two threads do so for milliseconds,
# and where other programs need the cores an update of SAC takes seconds. Of the numbers tried this is the
# smallest that costs nothing on idle cores (docs/speed.md).
_SPINS = 10_000

# Removed from the environment of every run. With these variables OpenMP and MKL start fewer threads than
# `num_threads`, some of them depending on the load of the machine.
_REMOVED = (
    *("OMP_DYNAMIC", "OMP_THREAD_LIMIT", "OMP_MAX_ACTIVE_LEVELS", "OMP_NESTED", "OMP_SCHEDULE"),
    *("OMP_TEAMS_THREAD_LIMIT", "KMP_ALL_THREADS", "KMP_MAX_THREADS", "KMP_DEVICE_THREAD_LIMIT"),
    *("KMP_TEAMS_THREAD_LIMIT", "KMP_DYNAMIC_MODE", "KMP_LIBRARY", "KMP_HW_SUBSET", "KMP_SCHEDULE"),
    *("MKL_DYNAMIC", "MKL_DOMAIN_NUM_THREADS"),
)
# Starts of names: of numerical libraries; and of torch's compiler and C++ compilers, for compiled runs only.
_FAMILIES = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NPY_", "ATEN_", "ONEDNN_", "DNNL_", "CUBLAS", "CUDNN_"),
)
_COMPILERS = (
    *("TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCH_COMPILE_", "TRITON_", "CXX", "CPATH", "CPLUS_INCLUDE_PATH"),
    *("LIBRARY_PATH", "COMPILER_PATH", "GCC_EXEC_PREFIX"),
)
_OTHERS = (
    *("PYTHONHASHSEED", "NUMEXPR_NUM_THREADS", "GLIBC_TUNABLES", "LD_PRELOAD", "LD_LIBRARY_PATH"),
    *("CUDA_VISIBLE_DEVICES", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"),
    *("MUJOCO_GL", ROW_GROUPS),
)
# Paths and choices that differ between machines.
OF_A_MACHINE = ("LD_PRELOAD", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "MUJOCO_GL")
# Ends of names of variables that change no bits: about output, waiting threads, and folders of caches.
_IDLE = (
    *("_VERBOSE", "_DISPLAY_ENV", "_DISPLAY_AFFINITY", "_AFFINITY_FORMAT", "_STACKSIZE", "_WAIT_POLICY"),
    *("_SPINCOUNT", "_BLOCKTIME", "_CACHE_DIR", "_COMPILE_THREADS", "_LOGPATH"),
)


def is_influential(name: str, compiles: bool = True) -> bool:
    """True if this environment variable may change the bits of a run, compiled or not."""
    families = _FAMILIES + _COMPILERS if compiles else _FAMILIES
    return name in _OTHERS or (name.startswith(families) and not name.endswith(_IDLE))


def may_name_program(name: str, value: str) -> bool:
    """True if the value of an influential variable may name a program, a library or a file."""
    return "/" in value or name.startswith((*_COMPILERS, "OMP_TOOL"))


def influences(environment: Mapping[str, str], compiles: bool = True) -> dict[str, str]:
    """The variables that may change a run's bits, with their values."""
    return {name: environment[name] for name in sorted(environment) if is_influential(name, compiles)}


def compiler_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that may change what torch's compiler and a C++ compiler make, with their values."""
    return {name: each for name, each in influences(environment).items() if name.startswith(_COMPILERS)}


def prepared(environment: Mapping[str, str], switches: DeterminismConfig, num_threads: int) -> dict[str, str]:
    """`environment` as the process of a run needs it."""
    threads, products = str(num_threads), on_cpu(switches.products.name)
    hash_seed = None if switches.hash_seed is None else str(switches.hash_seed)
    removed = {*_REMOVED, "PYTHONHASHSEED", "CUBLAS_WORKSPACE_CONFIG"}
    if switches.numpy_without is not None:
        removed.add("NPY_ENABLE_CPU_FEATURES")  # numpy refuses to have both variables
    variables = {name: value for name, value in environment.items() if name not in removed}
    if "OMP_WAIT_POLICY" not in variables:
        variables.setdefault("GOMP_SPINCOUNT", str(_SPINS))
    named = {
        # The size of a thread pool is read when its library is loaded. Numpy's BLAS has its own pool.
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        # More threads divide a batch at other rows. Above `repeat` results must not depend on that.
        "OPENBLAS_NUM_THREADS": threads if products == "plain" else "1",
        "PYTHONHASHSEED": hash_seed,
        "CUBLAS_WORKSPACE_CONFIG": switches.cublas_workspace,
        "ATEN_CPU_CAPABILITY": switches.cpu_capability,
        "OPENBLAS_CORETYPE": switches.blas_kernels,
        "NPY_DISABLE_CPU_FEATURES": switches.numpy_without,
        "MKL_CBWR": strict_branch() if products == "strict" else None,
    }
    return variables | {name: value for name, value in named.items() if value is not None}


def on_cpu(products: str) -> str:
    """A way of matrix products, and for `auto` the one for this machine's CPU."""
    if products != "auto":
        return products
    vendor, flags = cpu_identity()
    return "strict" if vendor == "GenuineIntel" and "avx2" in flags else "padded"


def strict_branch() -> str:
    """The strict branch of MKL for this CPU."""
    return "AVX512,STRICT" if "avx512f" in cpu_identity()[1] else "AVX2,STRICT"
