"""The switches of a determinism level in the process of a run, and what the libraries really do.

Everything is set before the first tensor is made. Afterwards it is read back from where it takes effect, and
a switch that did not take stops the run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from rltemplate.determinism import denormals, kernels, libraries
from rltemplate.determinism.levels import ROW_GROUPS, on_cpu, strict_branch
from rltemplate.determinism.machine import compiler_version
from rltemplate.types import ConfigError

if TYPE_CHECKING:
    from rltemplate.config.schema import DeterminismConfig

_DETERMINISTIC: Any = torch.utils.deterministic  # an attribute is missing from torch's type stubs


def apply(
    switches: DeterminismConfig, num_threads: int, compiles: bool = False, device: str = "cpu"
) -> dict[str, Any]:
    """Set everything that can be set from inside, then return what the libraries say is in force.

    `compiles` says whether the run compiles its updates. Raises `ConfigError` naming the first setting that
    cannot be had, and what to use instead.
    """
    torch.set_num_threads(num_threads)
    denormals.keep()
    if compiles:
        torch.use_deterministic_algorithms(switches.deterministic_algorithms)
    else:
        # The same switch for everything but the compiler, whose import would cost each run a second.
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
    # Several threads divide a product as they like, and another kernel computes what lies at the seams.
    libraries.use_blas_threads(num_threads if products == "plain" else 1)
    settings = read_back()
    if compiles:
        settings["cpp_compiler"] = compiler_version()
    for name, value in _wanted(switches, num_threads, products, settings).items():
        if value is not None and settings[name] != value:  # null leaves it free
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
    """The settings in force, asked from the libraries and not from the configuration."""
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
        **libraries.read_back(),
        **asdict(kernels.chosen),
    }


def _wanted(
    switches: DeterminismConfig, num_threads: int, products: str, settings: Mapping[str, Any]
) -> dict[str, Any]:
    capability, forbidden = switches.cpu_capability, (switches.numpy_without or "").split()
    # Numpy may have another BLAS than OpenBLAS, which only the way `blas` cannot do with.
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
