"""The cache of torch's compiler, with a folder for each kind of machine.

The keys of that cache know neither the CPU nor the vector instructions in force nor the version of the C++
compiler. Without folders, a program for AVX-512 would be loaded into a process that is limited to AVX2, or on
another node of a cluster with the same home folder: it computes wrong numbers, or writes beyond its arrays.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from runlab.determinism.levels import compiler_variables
from runlab.errors import ConfigError
from runlab.machine import COMPILER, cpp_compiler, cpu_model, package_versions

CACHE_DIR = "TORCHINDUCTOR_CACHE_DIR"
_FOLDER = re.compile(r"machine-[0-9a-f]{16}")
# Places and sizes of fields in the head of a shared object about its table of sections: start, size of an
# entry, number of entries.
_SECTIONS = (0x28, 8), (0x3A, 2), (0x3C, 2)
_CAPABILITIES = ("avx2", "avx512")  # of torch, of which the compiler must make code


class NoCompilerError(ConfigError):
    """Nothing can be compiled here; the message is the cause."""


def machine_key(environment: Mapping[str, str]) -> str:
    """A digest of everything that decides which program is right, for a process with this environment."""
    compiler, versions = cpp_compiler(), package_versions(compiles=True)
    facts = {
        "cpu": cpu_model(),
        "capability": environment.get("ATEN_CPU_CAPABILITY"),
        "compiler": [compiler and os.path.realpath(compiler), versions[COMPILER]],
        "torch": versions.get("torch"),
        "python": sys.implementation.cache_tag,
        "variables": compiler_variables(environment),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def cache_folder(environment: Mapping[str, str]) -> Path:
    """The folder for programs of such a process, below the one that the user or torch chooses."""
    root = environment.get(CACHE_DIR)
    if not root:
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir

        root = default_cache_dir()
    path = Path(root).absolute()
    if _FOLDER.fullmatch(path.name):  # given by a process of this project
        path = path.parent
    return path / f"machine-{machine_key(environment)}"


def use_cache() -> None:
    """Let the compiler use this machine's folder, without damaged programs; called before it is imported.

    Raises NoCompilerError without a compiler, and if the folder cannot be had.
    """
    if cpp_compiler() is None:
        raise NoCompilerError("a C++ compiler or Python's headers are missing (apt install g++ python3-dev)")
    folder = cache_folder(os.environ)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_damaged(folder)
    except OSError as error:
        raise NoCompilerError(
            f"{folder.parent} cannot be written ({error.strerror}); TORCHINDUCTOR_CACHE_DIR=FOLDER names "
            "another place for programs"
        ) from error
    os.environ[CACHE_DIR] = str(folder)


def remove_damaged(folder: Path) -> None:
    """Remove programs that were not written to their end.

    The compiler writes a program under its final name, and later takes what has this name. After a full disk
    or a kill while it writes, every run would end: with an error, or by a signal when the program is loaded.
    """
    for path in folder.rglob("*.*"):
        if path.suffix in (".so", ".cpp", ".py") and not _is_whole(path):
            lock = FileLock(folder / "locks" / f"{path.name.partition('.')[0]}.lock")
            # Another process that compiles it holds the lock of torch.
            with suppress(Timeout, FileNotFoundError), lock.acquire(timeout=0):
                if not _is_whole(path):  # still, or the other process has just made it
                    path.unlink()


def remove_all(folder: Path) -> bool:
    """Remove all programs of the folder; False if there were none."""
    any_program = any(folder.rglob("*.so"))
    shutil.rmtree(folder, ignore_errors=True)
    return any_program


def _is_whole(path: Path) -> bool:
    """False for an empty file, and for a shared object (ELF, 64 bits) that lacks its end."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        head, size = file.read(64), path.stat().st_size
        if size == 0 or path.suffix != ".so" or sys.platform != "linux":
            return size > 0
        start, each, number = (int.from_bytes(head[at : at + n], sys.byteorder) for at, n in _SECTIONS)
        return head[:4] == b"\x7fELF" and number > 0 and start + each * number <= size
    return True


def vector_instructions() -> str:
    """The instructions that the compiler has chosen, such as `avx512 avx512_vnni`, after a program was made.

    It tries each kind with a small program, and takes the next smaller one without a word if that fails.
    Raises NoCompilerError then, since the numbers of a run would be others.
    """
    from torch._inductor.cpu_vec_isa import pick_vec_isa
    from torch.backends.cpu import get_cpu_capability

    chosen, capability = str(pick_vec_isa()), get_cpu_capability().lower()
    if capability in _CAPABILITIES and capability not in chosen:
        raise NoCompilerError(f"the C++ compiler makes no program for {capability} that can be loaded here")
    return chosen
