"""The switches of a determinism level, set in the process of a run and read back from the libraries.

Everything is set before the first tensor is made. A switch that has not taken effect stops the run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from numpy.lib import introspect

from runlab.config.texts import few
from runlab.determinism import denormals, kernels, programs
from runlab.determinism.levels import ROW_GROUPS, on_cpu, strict_branch
from runlab.determinism.libraries import of_torch, openblas
from runlab.errors import ConfigError

if TYPE_CHECKING:
    from runlab.config.schema import Config, DeterminismConfig

_DETERMINISTIC: Any = torch.utils.deterministic  # an attribute is missing from torch's type stubs
# MKL's conditional numerical reproducibility ("Intel oneMKL Developer Guide", CNR mode): the number that the
# library gives back for a branch, and the bit for its strict form.
_MKL_BRANCHES = {1: "none", 2: "AUTO", 3: "COMPATIBLE", 10: "AVX2", 12: "AVX512"}
_MKL_STRICT = 0x10000
_MKL_BLAS = 1  # MKL's domain of matrix products; each domain has its own number of threads
_BACKENDS = (
    *("mkldnn.enabled", "mkldnn.deterministic", "mkldnn.matmul.fp32_precision", "mkldnn.conv.fp32_precision"),
    *("mkldnn.rnn.fp32_precision", "cudnn.enabled", "cudnn.conv.fp32_precision", "cudnn.rnn.fp32_precision"),
    *("cuda.matmul.allow_fp16_reduced_precision_reduction", "opt_einsum.enabled", "opt_einsum.strategy"),
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
)


def apply(config: Config) -> dict[str, Any]:
    """Set everything that the process itself can set; the settings in force, read back from the libraries.

    Raises `ConfigError` naming the first setting that cannot be had, and what to use instead.
    """
    switches, num_threads = config.determinism, config.num_threads
    torch.set_num_threads(num_threads)
    denormals.keep_in_threads(rescan=True)
    if config.compile:
        programs.use_cache()
        torch.use_deterministic_algorithms(switches.deterministic_algorithms)
    else:
        # The same switch without the one of the compiler, whose import would cost each run a second.
        torch.set_deterministic_debug_mode("error" if switches.deterministic_algorithms else "default")
    _DETERMINISTIC.fill_uninitialized_memory = switches.fill_uninitialized_memory
    torch.backends.cudnn.benchmark = switches.cudnn_benchmark
    torch.backends.cudnn.deterministic = switches.cudnn_deterministic
    torch.backends.cuda.matmul.fp32_precision = switches.float32_precision
    on_gpu, products = resolve_device(config.device.name).type == "cuda", switches.products.name
    if on_gpu and products == "blas":
        raise ConfigError(
            f"device={config.device}: determinism.products=blas is about CPUs; use device=cpu, or "
            "determinism=invariant with products=tiled"
        )
    products = "tiled" if on_gpu and products == "auto" else on_cpu(products)
    kernels.use(products, row_groups=int(os.environ.get(ROW_GROUPS, "0")))
    # Several threads divide a product among them, and another kernel computes the rows where parts meet.
    use_blas_threads(num_threads if products == "plain" else 1)
    denormals.restart_openblas()
    settings = read_back()
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

    Called after the environments were made and tried, which load libraries of their own.
    """
    denormals.keep_in_threads(rescan=True)
    if changed := changes(settings, read_back()):
        raise ConfigError(
            f"determinism: {changed} after the environment was made and tried; something in it sets that, "
            "which determinism=fast allows"
        )


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The settings that changed between two results of `read_back`, for people; empty if none did."""
    return few([f"{name} was {before[name]} and is {now[name]}" for name in now if now[name] != before[name]])


def read_back() -> dict[str, Any]:
    """The settings in force, read from the libraries; None where torch or numpy has no such library.

    Takes a tenth of a millisecond: it is called in each iteration.
    """
    # The function mkl_cbwr_get of Intel's manual; torch's library has it under its internal name.
    branch, threads = of_torch("mkl_serv_cbwr_get"), of_torch("mkl_serv_domain_get_max_threads")
    dynamic, blas = of_torch("omp_get_dynamic"), openblas()
    loops = introspect.opt_func_info().values()
    return {
        "torch_num_threads": torch.get_num_threads(),
        "flush_to_zero": denormals.flushed_in_pool(),
        "rounds_to_nearest": denormals.rounds_to_nearest(),
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
        **_of_torch(),
        **asdict(kernels.chosen),
    }


def _of_torch() -> dict[str, Any]:
    """Switches of torch that no level sets, and that any library may set."""
    try:
        precision: str | None = torch.get_float32_matmul_precision()
    except RuntimeError:  # the precisions below were set so that none of its names fits
        precision = None
    return {
        "default_dtype": str(torch.get_default_dtype()),
        "default_device": str(torch.get_default_device()),
        "grad_enabled": torch.is_grad_enabled(),
        "inference_mode": torch.is_inference_mode_enabled(),
        "autocast": [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)],
        "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "float32_matmul_precision": precision,
        "cuda_attention": [
            name
            for name in ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp")
            if getattr(torch.backends.cuda, f"{name}_enabled")()
        ],
        **{name.replace(".", "_"): attrgetter(name)(torch.backends) for name in _BACKENDS},
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
    library = openblas()
    if library is not None:
        library.scipy_openblas_set_num_threads64_(number)


def _branch(number: int) -> str:
    branch = _MKL_BRANCHES.get(number & ~_MKL_STRICT, f"number {number & ~_MKL_STRICT}")
    return f"{branch},STRICT" if number & _MKL_STRICT else branch
