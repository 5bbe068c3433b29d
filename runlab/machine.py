"""Facts about the machine and the installed packages that may change a run's numbers or speed.

Only `compiler_version` starts a process; everything else together takes a few milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import xxhash

from runlab import INSTALLED, __version__

# CPU flags that select another code path, and so other bits, in BLAS, oneDNN, SLEEF or the C library.
CPU_FLAGS = (
    *("sse4_2", "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"),
    *("avx512_bf16", "avx512_fp16", "avx_vnni", "amx_tile", "amx_bf16", "amx_int8", "amx_fp16"),
    *("asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2"),
)
_CGROUPS = Path("/sys/fs/cgroup")  # version 2
# Libraries add folders later: torch's compiler loads setuptools, which adds the packages that it brings.
_IMPORT_PATH = (*sys.path,)
# Names among the versions of packages: the compiler, and the project, whose own name a renaming changes.
COMPILER, PROJECT_VERSION = "c++ compiler", "runlab project"
# Facts of /proc/cpuinfo by which a C++ compiler chooses instructions: of x86, and of ARM.
_CPU_MODEL = (
    *("vendor_id", "cpu family", "model", "model name", "stepping", "flags"),
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision", "Features"),
)


def usable_cores() -> int:
    """The CPU cores that this process may use; with a quota of CPU time, as in a container, at most that."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = (os.cpu_count() or 1) if affinity is None else len(affinity(0))
    return max(1, min([cores, *(quota // period for quota, period in _group_limits("cpu.max"))]))


def machine_facts() -> dict[str, Any]:
    """Operating system, Python, CPU, memory and GPUs, ready for JSON. Unknown values are None.

    GPUs are listed by torch, and only if this process uses CUDA.
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


def package_versions(compiles: bool = False) -> dict[str, str]:
    """Versions of installed distributions by normalised name, and of this package.

    Of two versions of a distribution it is the one that Python imports. A distribution that declares a
    project (config/project.py) is under `PROJECT_VERSION`, with a digest of its files where it is the code.

    They are those at the start of the process, and do not depend on what it has imported.

    With `compiles` the C++ compiler is one of them. The name of a metadata folder has name and version (wheel
    format, "File name convention"). Reading names is a hundred times faster than parsing metadata.
    """
    versions = {"runlab": __version__} | ({COMPILER: compiler_version() or "none"} if compiles else {})
    for entry in _IMPORT_PATH:
        for folder in Path(entry or ".").glob("*.dist-info"):
            name, _, version = folder.stem.partition("-")
            if "[runlab.project]" in (_text(folder / "entry_points.txt") or ""):
                name, version = PROJECT_VERSION, f"{name} {version}{_digest(folder) if INSTALLED else ''}"
            versions.setdefault(name.replace("_", "-").replace(".", "-").lower(), version)
    return dict(sorted(versions.items()))


def _digest(facts: Path) -> str:
    """A digest of the modules of an installed package, by the list in its metadata folder."""
    modules = sorted(re.findall(r"(?m)^.*\.py,sha256=.*$", _text(facts / "RECORD") or ""))
    return f" {xxhash.xxh3_64_hexdigest(repr(modules).encode())}"


def cpp_compiler() -> str | None:
    """The C++ compiler that torch's compiler takes (`torch._inductor.config.cpp.cxx`).

    None without it, and without Python's headers, which every compiled program includes.
    """
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return None
    return shutil.which(os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++"))


def compiler_version() -> str | None:
    """The first line that the C++ compiler prints about its version; None without a compiler."""
    if (compiler := cpp_compiler()) is None:
        return None
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    return done.stdout.partition("\n")[0]


def cpu_identity() -> tuple[str | None, frozenset[str]]:
    """The CPU's vendor as it names itself, such as GenuineIntel, and all its flags."""
    facts = _first_core()
    return facts.get("vendor_id"), frozenset(facts.get("flags", facts.get("Features", "")).split())


def cpu_model() -> dict[str, str]:
    """Everything about the CPU by which a C++ compiler chooses instructions."""
    facts = _first_core()
    return {key: facts[key] for key in _CPU_MODEL if key in facts} | {"machine": platform.machine()}


def cpu_family() -> int:
    """The family number of an x86 CPU, such as 26 for AMD's Zen 5; 0 if there is none."""
    return int(_first_core().get("cpu family", "0"))


def blas_kernels(products: str) -> str | None:
    """The kernels of numpy's OpenBLAS that go with a way of matrix products; None: as inherited.

    With those for Haswell a row's results depend on that row alone (determinism/blas.py). Those for AVX-512
    compute a single row in another way.
    """
    return "Haswell" if products == "blas" and {"avx2", "fma"} <= cpu_identity()[1] else None


@cache
def _first_core() -> dict[str, str]:
    """Linux's facts about the first core: on a big machine reading all cores takes long."""
    with contextlib.suppress(OSError), Path("/proc/cpuinfo").open(errors="replace") as lines:
        pairs = [line.partition(":") for line in takewhile(str.strip, lines)]
        return {key.strip(): value.strip() for key, _, value in pairs}
    return {}


def usable_memory() -> int:
    """Bytes of memory that this process may use."""
    limits = [limit for limit, *_ in _group_limits("memory.max")]
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *limits])


@cache  # called for each job of a sweep
def _group_limits(name: str) -> list[list[int]]:
    """The numbers in the files `name` of this process's control group and its parents, if all are numbers.

    Limits of parent groups hold as well. In a container the path may be the one of the host while the group
    is mounted at the root: some of these folders then do not exist.
    """
    group = _CGROUPS / (_text("/proc/self/cgroup") or "").rpartition(":")[2].lstrip("/")
    words = [(_text(level / name) or "").split() for level in (group, *group.parents)]
    return [[*map(int, each)] for each in words if each and all(map(str.isdigit, each))]


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
