"""Facts about the machine and the installed packages: what a run's numbers and speed may depend on.

Only `compiler_version` starts a process; all else together takes a few milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

# Those that select another code path, and with it other bits, in BLAS, oneDNN, SLEEF or the C library.
CPU_FLAGS = (
    *("sse4_2", "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"),
    *("avx512_bf16", "avx512_fp16", "avx_vnni", "amx_tile", "amx_bf16", "amx_int8", "amx_fp16"),
    *("asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2"),
)
_CGROUPS = Path("/sys/fs/cgroup")  # version 2


def usable_cores() -> int:
    """The CPU cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return (os.cpu_count() or 1) if affinity is None else len(affinity(0))


def machine_facts() -> dict[str, Any]:
    """Operating system, Python, CPU, memory and GPUs, ready for JSON. Unknown values are None.

    Of GPUs only torch knows, so they are listed where this process uses CUDA.
    """
    present = cpu_identity()[1]
    return {
        "os": platform.platform(),
        "architecture": platform.machine(),
        "libc": " ".join(filter(None, platform.libc_ver())) or None,
        "python": platform.python_version(),
        "python_implementation": platform.python_implementation(),
        "cpu": _first_core().get("model name") or platform.processor() or None,
        "cpu_flags": [flag for flag in CPU_FLAGS if flag in present],
        "logical_cores": os.cpu_count(),
        "usable_cores": usable_cores(),
        "memory_bytes": usable_memory(),
        "gpu_driver": (_text("/proc/driver/nvidia/version") or "").partition("\n")[0] or None,
        "gpus": _gpus(),
    }


def package_versions() -> dict[str, str]:
    """Version by normalised name of every installed distribution; of two, the one that Python imports.

    The names of the metadata folders say it all (wheel format, "File name convention"), which is a hundred
    times faster than to parse the metadata itself.
    """
    versions: dict[str, str] = {}
    for entry in sys.path:
        for folder in Path(entry or ".").glob("*.dist-info"):
            name, _, version = folder.stem.partition("-")
            versions.setdefault(name.replace("_", "-").replace(".", "-").lower(), version)
    return dict(sorted(versions.items()))


def cpp_compiler() -> str | None:
    """The C++ compiler that torch's compiler takes (`torch._inductor.config.cpp.cxx`).

    None without it, and without Python's headers, which every compiled program includes.
    """
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return None
    return shutil.which(os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++"))


def compiler_version() -> str | None:
    """The first line of the version that this compiler prints, None without one."""
    if (compiler := cpp_compiler()) is None:
        return None
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    return done.stdout.partition("\n")[0]


def cpu_identity() -> tuple[str | None, frozenset[str]]:
    """The CPU's vendor as it names itself, such as GenuineIntel, and all its flags."""
    facts = _first_core()
    return facts.get("vendor_id"), frozenset(facts.get("flags", facts.get("Features", "")).split())


def cpu_family() -> int:
    """The number that a maker of x86 CPUs gives a generation, such as 26 for AMD's Zen 5; 0 without one."""
    return int(_first_core().get("cpu family", "0"))


@cache
def _first_core() -> dict[str, str]:
    """The facts of Linux about the first core: describing all cores of a big machine takes long."""
    with contextlib.suppress(OSError), Path("/proc/cpuinfo").open(errors="replace") as lines:
        pairs = [line.partition(":") for line in takewhile(str.strip, lines)]
        return {key.strip(): value.strip() for key, _, value in pairs}
    return {}


@cache  # it is asked for each job of a sweep
def usable_memory() -> int:
    """Bytes of memory that this process may use."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    # Limits of the groups around the process's own hold as well. A container may see its group's path as the
    # host does but mounted at the root, hence folders that do not exist.
    group = _CGROUPS / (_text("/proc/self/cgroup") or "").rpartition(":")[2].lstrip("/")
    for level in (group, *group.parents):
        limit = _text(level / "memory.max") or ""
        if limit.isdigit():
            limits.append(int(limit))
    return min(limits)


def _text(path: Path | str) -> str | None:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return None


def _gpus() -> list[dict[str, Any]]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return []
    return [
        {
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
        }
        for properties in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    ]
