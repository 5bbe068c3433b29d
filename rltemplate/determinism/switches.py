"""A determinism level, from its switches in `conf/determinism/` to what the libraries really do.

Switches that are read when a process or a library starts are environment variables, set by whoever starts
the run's process; the others are set before the first tensor is made. Afterwards everything is read back
from where it takes effect, and a switch that did not take stops the run.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from rltemplate.determinism import denormals, libraries
from rltemplate.determinism.machine import compiler_version, cpu_identity
from rltemplate.determinism.variables import REMOVED, ROW_GROUPS
from rltemplate.types import ConfigError

if TYPE_CHECKING:
    import torch


class Switches(Protocol):
    """The switches of a level, as the configuration has them."""

    level: Any  # an enumeration, as are the other two of type Any
    hash_seed: int | None
    deterministic_algorithms: bool
    fill_uninitialized_memory: bool
    cudnn_benchmark: bool
    cudnn_deterministic: bool
    float32_precision: Any
    cublas_workspace: str | None
    products: Any
    profile: str | None
    cpu_capability: str | None
    onednn_isa: str | None
    blas_kernels: str | None
    numpy_without: str | None
    golden: dict[str, str]


# How often a thread of OpenMP looks for work before it sleeps. By default two threads do so for milliseconds,
# and where other programs need the cores an update of SAC takes seconds. Of the numbers tried this is the
# smallest that costs nothing on idle cores (docs/determinism.md).
_SPINS = 10_000
_WAITING_SAID = frozenset({"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"})


def process_environment(switches: Switches, num_threads: int) -> dict[str, str | None]:
    """Environment variables for the process of a run; None removes one that may be inherited."""
    threads = str(num_threads)
    variables: dict[str, str | None] = dict.fromkeys(REMOVED)
    variables |= {
        "PYTHONHASHSEED": None if switches.hash_seed is None else str(switches.hash_seed),
        "CUBLAS_WORKSPACE_CONFIG": switches.cublas_workspace,
        # Thread pools are sized when their library loads; numpy's BLAS has one of its own.
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        # More threads would cut batches in other places, where nothing is to depend on their number.
        "OPENBLAS_NUM_THREADS": threads if switches.products.name == "plain" else "1",
    }
    if switches.numpy_without is not None:
        variables["NPY_ENABLE_CPU_FEATURES"] = None  # numpy takes the one variable or the other
    chosen = {
        "ATEN_CPU_CAPABILITY": switches.cpu_capability,
        "ONEDNN_MAX_CPU_ISA": switches.onednn_isa,
        "OPENBLAS_CORETYPE": switches.blas_kernels,
        "NPY_DISABLE_CPU_FEATURES": switches.numpy_without,
        "MKL_CBWR": _strict_branch() if _on_cpu(switches.products.name) == "strict" else None,
    }
    return variables | {name: value for name, value in chosen.items() if value is not None}


def prepared(environment: Mapping[str, str], switches: Switches, num_threads: int) -> dict[str, str]:
    """`environment` as the process of a run needs it."""
    waiting = {} if environment.keys() & _WAITING_SAID else {"GOMP_SPINCOUNT": str(_SPINS)}
    merged = {**environment, **waiting, **process_environment(switches, num_threads)}
    return {name: value for name, value in merged.items() if value is not None}


def _on_cpu(products: str) -> str:
    """`products` with what `auto` means on this machine's CPU."""
    if products != "auto":
        return products
    vendor, flags = cpu_identity()
    return "strict" if vendor == "GenuineIntel" and "avx2" in flags else "padded"


def _strict_branch() -> str:
    return "AVX512,STRICT" if "avx512f" in cpu_identity()[1] else "AVX2,STRICT"


def apply(
    switches: Switches, num_threads: int, compiles: bool = False, device: str = "cpu"
) -> dict[str, Any]:
    """Set everything that can be set from inside, then return what the libraries say is in force.

    `compiles` says whether the run compiles its updates. Raises `ConfigError` naming the first setting that
    cannot be had, and what to use instead.
    """
    import torch

    from rltemplate.determinism import blas, kernels

    torch.set_num_threads(num_threads)
    _keep_denormals()
    if compiles:
        torch.use_deterministic_algorithms(switches.deterministic_algorithms)
    else:
        # The same switch for everything but the compiler, whose import would cost each run a second.
        torch.set_deterministic_debug_mode("error" if switches.deterministic_algorithms else "default")
    deterministic: Any = torch.utils.deterministic  # the attribute is missing from torch's type stubs
    deterministic.fill_uninitialized_memory = switches.fill_uninitialized_memory
    torch.backends.cudnn.benchmark = switches.cudnn_benchmark
    torch.backends.cudnn.deterministic = switches.cudnn_deterministic
    torch.backends.cuda.matmul.fp32_precision = switches.float32_precision.name
    products = switches.products.name
    if products == "auto":
        products = "tiled" if resolve_device(device).type == "cuda" else _on_cpu(products)
    if products == "blas" and resolve_device(device).type != "cpu":
        raise ConfigError(f"determinism.products=blas: is about CPUs, not device={device}; use tiled")
    kernels.use(products)
    kernels.group_rows(_row_groups())
    # A library may have been built for fewer threads; with none at all it is not OpenBLAS.
    blas_threads = blas.use_blas_threads(num_threads if products == "plain" else 1)
    settings = read_back()
    if compiles:
        settings["cpp_compiler"] = compiler_version()
    if switches.onednn_isa is not None:
        settings["onednn_isa"] = libraries.onednn_isa()
    wanted = _wanted(switches, num_threads, products) | {"blas_threads": blas_threads}
    if products == "blas":
        wanted["blas_threads"] = 1
    if settings["mkl_threads"] is not None:
        wanted["mkl_threads"] = num_threads
    forbidden = (switches.numpy_without or "").split()
    wanted["numpy_instructions"] = [each for each in settings["numpy_instructions"] if each not in forbidden]
    for name, value in wanted.items():
        if settings[name] != value:
            instead = _instead(switches, name)
            raise ConfigError(f"determinism: {name} should be {value} and is {settings[name]}; {instead}")
    return settings


def confirm(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings read back after the environments were made, which load libraries of their own.

    Raises `ConfigError` if that is not what `apply` returned, or if fewer threads compute than asked for.
    """
    now = dict(settings) | read_back()
    wanted = dict(settings)
    flushed = libraries.in_parallel(_keep_denormals)
    if flushed is not None:
        now |= {"parallel_threads": len(flushed), "flush_to_zero": any(flushed)}
        wanted["parallel_threads"] = wanted["torch_num_threads"]
    for name, value in wanted.items():
        if now[name] != value:
            raise ConfigError(
                f"determinism: {name} should be {value} and is {now[name]} after the environment was made; "
                "something in it, or a variable of OpenMP, sets that"
            )
    return now


def _keep_denormals() -> bool:
    """Have the calling thread keep denormal numbers; whether it flushes them all the same."""
    with contextlib.suppress(ConfigError):
        denormals.keep()
    return denormals.flushed()


def _row_groups() -> int:
    text = os.environ.get(ROW_GROUPS, "0")
    if not text.isdecimal():
        raise ConfigError(f"{ROW_GROUPS}={text}: expected a number of rows, or 0 for no groups")
    return int(text)


def _instead(switches: Switches, name: str) -> str:
    if name == "mkl_branch":
        return "this CPU does not have it; use determinism.products=padded"
    if name == "blas_threads":
        return "numpy has another BLAS than OpenBLAS; use determinism=invariant with products=padded"
    if name in ("cpu_capability", "blas_kernels", "onednn_isa"):
        if switches.profile is None:
            return f"this machine cannot; leave determinism.{name} at null"
        return f"this machine cannot be {switches.profile}; use determinism=invariant"
    return "start runs with scripts/train.py, which prepares their process, or use determinism=fast"


def _wanted(switches: Switches, num_threads: int, products: str) -> dict[str, Any]:
    isa = switches.onednn_isa
    if isa is not None and isa.upper() not in libraries.ONEDNN.values():
        allowed = ", ".join(libraries.ONEDNN.values())
        raise ConfigError(f"determinism.onednn_isa={isa}: cannot be read back; use one of {allowed}")
    wanted = {
        "torch_num_threads": num_threads,
        "openmp_dynamic": False,
        "flush_to_zero": False,
        "deterministic_algorithms": switches.deterministic_algorithms,
        "fill_uninitialized_memory": switches.fill_uninitialized_memory,
        "cudnn_benchmark": switches.cudnn_benchmark,
        "cudnn_deterministic": switches.cudnn_deterministic,
        "cuda_float32_precision": switches.float32_precision.name,
        "products": products,
        "python_hash_seed": None if switches.hash_seed is None else str(switches.hash_seed),
        "cublas_workspace": switches.cublas_workspace,
        "mkl_branch": _strict_branch() if products == "strict" else None,
        "cpu_capability": None if switches.cpu_capability is None else switches.cpu_capability.upper(),
        "blas_kernels": switches.blas_kernels,
        "onednn_isa": None if isa is None else isa.upper(),
    }
    return {name: value for name, value in wanted.items() if value is not None}  # null leaves it free


def read_back() -> dict[str, Any]:
    """The settings in force, asked from the libraries and not from the configuration."""
    import torch

    from rltemplate.determinism import blas, kernels

    deterministic: Any = torch.utils.deterministic
    return {
        "torch_num_threads": torch.get_num_threads(),
        "flush_to_zero": denormals.flushed(),
        "openmp_dynamic": libraries.openmp_dynamic(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "fill_uninitialized_memory": deterministic.fill_uninitialized_memory,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "cuda_float32_precision": torch.backends.cuda.matmul.fp32_precision,
        "python_hash_seed": os.environ.get("PYTHONHASHSEED"),
        "cublas_workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "mkl": torch.backends.mkl.is_available(),
        "mkl_branch": libraries.mkl_branch(),
        "mkl_threads": libraries.mkl_threads(),
        "blas_kernels": libraries.blas_kernels(),
        "blas_threads": blas.blas_threads(),
        "numpy_instructions": libraries.numpy_instructions(),
        **kernels.in_force(),
    }


def resolve_device(name: str) -> torch.device:
    """`cpu`, `cuda` or `auto` as a torch device; `ConfigError` where there is no such device."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda: torch finds no CUDA device here; use device=cpu or device=auto")
    return torch.device(name)
