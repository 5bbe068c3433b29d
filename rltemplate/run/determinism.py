"""A determinism level, from its switches in `conf/determinism/` to what the libraries really do.

Switches that are read when a process or a library starts are environment variables, set by whoever starts
the run's process; the others are set before the first tensor is made. Afterwards everything is read back
from where it takes effect, and a switch that did not take stops the run.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Protocol

from rltemplate.types import ConfigError

if TYPE_CHECKING:
    import torch


class Named(Protocol):
    """One of a few choices."""

    @property
    def name(self) -> str:
        """Its name."""
        ...


class Switches(Protocol):
    """What this module needs of the configuration."""

    hash_seed: int | None
    deterministic_algorithms: bool
    fill_uninitialized_memory: bool
    cudnn_benchmark: bool
    cudnn_deterministic: bool
    cublas_workspace: str | None

    @property
    def float32_precision(self) -> Named:
        """ieee or tf32."""
        ...


def process_environment(switches: Switches, num_threads: int) -> dict[str, str | None]:
    """Environment variables for the process of a run; None removes one that may be inherited."""
    threads = str(num_threads)
    return {
        "PYTHONHASHSEED": None if switches.hash_seed is None else str(switches.hash_seed),
        "CUBLAS_WORKSPACE_CONFIG": switches.cublas_workspace,
        # Thread pools are sized when their library loads; numpy's BLAS has one of its own.
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
    }


def apply(switches: Switches, num_threads: int, compiles: bool = False) -> dict[str, Any]:
    """Set everything that can be set from inside, then return what the libraries say is in force.

    `compiles` says whether the run compiles its updates.
    """
    import torch

    torch.set_num_threads(num_threads)
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
    wanted = _wanted(switches, num_threads)
    settings = read_back()
    for name, value in wanted.items():
        if settings[name] != value:
            raise ConfigError(
                f"determinism: {name} should be {value} and is {settings[name]}; start runs with "
                "scripts/train.py, which prepares their process, or use determinism=fast"
            )
    return settings


def _wanted(switches: Switches, num_threads: int) -> dict[str, Any]:
    wanted = {
        "torch_num_threads": num_threads,
        "deterministic_algorithms": switches.deterministic_algorithms,
        "fill_uninitialized_memory": switches.fill_uninitialized_memory,
        "cudnn_benchmark": switches.cudnn_benchmark,
        "cudnn_deterministic": switches.cudnn_deterministic,
        "cuda_float32_precision": switches.float32_precision.name,
    }
    if switches.hash_seed is not None:
        wanted["python_hash_seed"] = str(switches.hash_seed)
    if switches.cublas_workspace is not None:
        wanted["cublas_workspace"] = switches.cublas_workspace
    return wanted


def read_back() -> dict[str, Any]:
    """What is in force, asked from the libraries and not from the configuration."""
    import torch

    deterministic: Any = torch.utils.deterministic
    return {
        "torch_num_threads": torch.get_num_threads(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "fill_uninitialized_memory": deterministic.fill_uninitialized_memory,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "cuda_float32_precision": torch.backends.cuda.matmul.fp32_precision,
        "python_hash_seed": os.environ.get("PYTHONHASHSEED"),
        "cublas_workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "mkl": torch.backends.mkl.is_available(),
    }


def resolve_device(name: str) -> torch.device:
    """`cpu`, `cuda` or `auto` as a torch device; `ConfigError` where there is no such device."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda: torch finds no CUDA device here; use device=cpu or device=auto")
    return torch.device(name)
