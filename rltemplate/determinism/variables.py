"""Variables of the environment that select another code path in some library, and with it other bits.

The one table of them: a run's record holds those that were set, and whoever runs it again sets them as they
were.
"""

from __future__ import annotations

from collections.abc import Mapping

# Splits every forward pass without gradient into groups of so many rows. No key of the configuration, for it
# must change nothing: `prove` sets it to see whether that is so.
ROW_GROUPS = "RLTEMPLATE_ROW_GROUPS"

# Taken away from every run, for the number of threads is a key of the configuration: these make OpenMP and
# MKL start fewer than asked for, some of them depending on how busy the machine is.
REMOVED = (
    *("OMP_DYNAMIC", "OMP_THREAD_LIMIT", "OMP_MAX_ACTIVE_LEVELS", "OMP_NESTED", "OMP_SCHEDULE"),
    *("OMP_TEAMS_THREAD_LIMIT", "KMP_ALL_THREADS", "KMP_MAX_THREADS", "KMP_DEVICE_THREAD_LIMIT"),
    *("KMP_TEAMS_THREAD_LIMIT", "KMP_DYNAMIC_MODE", "KMP_LIBRARY", "KMP_HW_SUBSET", "KMP_SCHEDULE"),
    *("MKL_DYNAMIC", "MKL_DOMAIN_NUM_THREADS"),
)
# Of libraries that compute, then of torch's compiler and the compilers behind it, which only some runs use.
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
# Members of a family that print something, or say how long a thread waits awake, or where something is kept.
_IDLE = (
    *("_VERBOSE", "_DISPLAY_ENV", "_DISPLAY_AFFINITY", "_AFFINITY_FORMAT", "_STACKSIZE", "_WAIT_POLICY"),
    *("_SPINCOUNT", "_BLOCKTIME", "_CACHE_DIR", "_COMPILE_THREADS", "_LOGPATH"),
)


def is_influential(name: str, compiles: bool = True) -> bool:
    """True if this environment variable may change the bits of a run, compiled or not."""
    families = _FAMILIES + _COMPILERS if compiles else _FAMILIES
    return name in _OTHERS or (name.startswith(families) and not name.endswith(_IDLE))


def influences(environment: Mapping[str, str], compiles: bool = True) -> dict[str, str]:
    """The variables that may change a run's bits, with their values."""
    return {name: environment[name] for name in sorted(environment) if is_influential(name, compiles)}
