"""Facts about the machine and the installed packages: what a run's numbers and speed may depend on.

Nothing here starts a process on Linux, and all of it together takes a few milliseconds.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

# Those that select another code path, and with it other bits, in BLAS, oneDNN, SLEEF or the C library.
CPU_FLAGS = (
    *("sse4_2", "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"),
    *("avx512_bf16", "avx512_fp16", "avx_vnni", "amx_tile", "amx_bf16", "amx_int8", "amx_fp16"),
    *("asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2"),
)
_CGROUPS = Path("/sys/fs/cgroup")
_NO_LIMIT_BYTES = 2**60  # cgroup v1 writes a number near 2**63 where there is no limit


def machine_facts(with_gpus: bool | None = None) -> dict[str, Any]:
    """Operating system, Python, CPU, memory, container limits and GPUs, ready for JSON.

    `with_gpus`: ask torch about the GPUs, which starts CUDA where it has not been started. None asks only
    if this process uses CUDA already. Unknown values are None.
    """
    model, flags = _cpu()
    usable, affinity = _usable_cores()
    libc = " ".join(part for part in platform.libc_ver() if part)
    return {
        "os": _os_name(),
        "kernel": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
        "libc": libc or None,
        "python": platform.python_version(),
        "python_implementation": platform.python_implementation(),
        "python_compiler": platform.python_compiler(),
        "cpu": model,
        "cpu_flags": flags,
        "logical_cores": os.cpu_count(),
        "usable_cores": usable,
        "affinity": affinity,
        "memory_bytes": _memory_bytes(),
        "container": _container(),
        "gpu_driver": _gpu_driver(),
        "gpus": _gpus(with_gpus),
    }


def package_versions() -> dict[str, str]:
    """Version by normalised name of every installed distribution; of two, the one that Python imports.

    The names of the metadata folders say it all (wheel format, "File name convention"), which is some
    twenty times faster than to parse the metadata itself.
    """
    versions: dict[str, str] = {}
    for entry in sys.path:
        folder = Path(entry or ".")
        try:
            names = os.listdir(folder)  # noqa: PTH208 - half the time of iterdir()
        except OSError:
            continue
        for file_name in sorted(names):
            stem, _, suffix = file_name.rpartition(".")
            if suffix not in ("dist-info", "egg-info"):
                continue
            name, _, version = stem.partition("-")
            if not version:  # a checkout installed in place by an old tool
                from importlib.metadata import PathDistribution  # loads a library of mail for its headers

                version = PathDistribution(folder / file_name).metadata["Version"] or ""
            if suffix == "egg-info":
                version = re.sub(r"-py\d.*$", "", version)
            if version:
                versions.setdefault(re.sub(r"[-_.]+", "-", name).lower(), version)
    return dict(sorted(versions.items()))


def _text(path: Path | str) -> str | None:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return None


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return f"{platform.system()} {platform.mac_ver()[0]}".strip()


def _cpu() -> tuple[str | None, list[str]]:
    """Model name and those of its flags that matter."""
    facts = _first_core()
    if not facts:
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        try:
            model = subprocess.run(command, capture_output=True, text=True, timeout=2).stdout.strip()
        except (OSError, subprocess.TimeoutExpired):
            model = ""
        return model or None, []
    present = set(facts.get("flags", facts.get("Features", "")).split())
    arm = [facts[key] for key in ("CPU implementer", "CPU part", "CPU variant") if key in facts]
    model = facts.get("model name") or " ".join(arm)
    return model or None, [flag for flag in CPU_FLAGS if flag in present]


def cpp_compiler() -> str | None:
    """The C++ compiler that torch's compiler takes (`torch._inductor.config.cpp.cxx`), None without it."""
    return shutil.which(os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++"))


def compiler_version() -> str | None:
    """The first line of what that compiler says of itself, None where there is none or it says nothing."""
    compiler = cpp_compiler()
    if compiler is None:
        return None
    try:
        command = [compiler, "--version"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=10, errors="replace").stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    return next(iter(said.splitlines()), None)


def cpu_identity() -> tuple[str | None, frozenset[str]]:
    """The CPU's vendor as it names itself, such as GenuineIntel, and all its flags."""
    facts = _first_core()
    flags = facts.get("flags", facts.get("Features", "")).split()
    return facts.get("vendor_id"), frozenset(flags)


def _first_core() -> dict[str, str]:
    """The facts of Linux about the first core: describing all cores of a big machine takes long."""
    facts: dict[str, str] = {}
    with contextlib.suppress(OSError), Path("/proc/cpuinfo").open(errors="replace") as lines:
        for line in lines:
            key, colon, value = line.partition(":")
            if not colon:
                break
            facts[key.strip()] = value.strip()
    return facts


def _usable_cores() -> tuple[int | None, str | None]:
    """The number of cores that this process may use, and their list such as `0-3,8`; None if unknown."""
    if not hasattr(os, "sched_getaffinity"):
        return None, None
    cores = sorted(os.sched_getaffinity(0))
    ranges: list[tuple[int, int]] = []
    for core in cores:
        if ranges and ranges[-1][1] == core - 1:
            ranges[-1] = (ranges[-1][0], core)
        else:
            ranges.append((core, core))
    text = ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in ranges)
    return len(cores), text


@functools.cache  # it is asked for each job of a sweep
def usable_memory() -> int | None:
    """Bytes of memory that this process may use; None where the system does not tell."""
    limits = (_memory_bytes(), _container()["memory_limit_bytes"])
    return min((limit for limit in limits if limit is not None), default=None)


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def _container() -> dict[str, Any]:
    """The kind of container, if one is recognised, and the limits of the control group on this process."""
    kind = None
    if Path("/.dockerenv").exists():
        kind = "docker"
    elif Path("/run/.containerenv").exists():
        kind = "podman"
    elif "APPTAINER_CONTAINER" in os.environ or "SINGULARITY_CONTAINER" in os.environ:
        kind = "apptainer"
    elif "KUBERNETES_SERVICE_HOST" in os.environ:
        kind = "kubernetes"
    memory: list[int] = []
    cores: list[float] = []
    for group in (_text("/proc/self/cgroup") or "").splitlines():
        _, controllers, path = group.split(":", 2)
        version_1 = "/".join(name for name in controllers.split(",") if not name.startswith("name="))
        folder = _CGROUPS / version_1 / path.lstrip("/")
        # Limits of the groups around this one hold as well. A container may see its group's path as the host
        # does but mounted at the root, hence folders that do not exist.
        for level in (folder, *folder.parents):
            if not level.is_relative_to(_CGROUPS):
                break
            for name in ("memory.max", "memory.limit_in_bytes"):
                limit = _text(level / name)
                if limit is not None and limit.isdigit() and int(limit) < _NO_LIMIT_BYTES:
                    memory.append(int(limit))
            quota = (_text(level / "cpu.max") or "").split()
            old_quota = [_text(level / "cpu.cfs_quota_us"), _text(level / "cpu.cfs_period_us")]
            share, period = quota if len(quota) == 2 else old_quota
            if share and period and share.isdigit():
                cores.append(int(share) / int(period))
    return {
        "kind": kind,
        "memory_limit_bytes": min(memory, default=None),
        "cpu_limit_cores": min(cores, default=None),
    }


def _gpu_driver() -> str | None:
    """Version of NVIDIA's kernel driver, if one is loaded."""
    text = _text("/proc/driver/nvidia/version") or ""
    version = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return version.group(1) if version else None


def _gpus(asked: bool | None) -> list[dict[str, Any]]:
    torch = sys.modules.get("torch")
    if torch is None or asked is False or not torch.cuda.is_available():
        return []
    if asked is None and not torch.cuda.is_initialized():
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
