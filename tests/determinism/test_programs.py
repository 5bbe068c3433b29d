"""Programs of torch's compiler: a cache for each kind of machine, without what was written half."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from runlab import machine
from runlab.determinism import onednn as products
from runlab.determinism import programs
from runlab.determinism.programs import (
    CACHE_DIR,
    NoCompilerError,
    cache_folder,
    remove_damaged,
    use_cache,
)


@pytest.fixture(autouse=True)
def _same_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "cpp_compiler", lambda: "/usr/bin/g++")
    monkeypatch.setattr(machine, "compiler_version", lambda: "g++ 12")
    monkeypatch.setenv(CACHE_DIR, os.environ.get(CACHE_DIR, ""))  # put back


CHANGES: list[tuple[str, Any]] = [
    ("ATEN_CPU_CAPABILITY", "avx2"),
    ("CPATH", "include"),
    ("cpu_model", {"flags": "avx2"}),  # another node of a cluster
    ("cpp_compiler", "other/g++"),
    ("compiler_version", "g++ 14"),
    ("torch", "3.0"),
]


@pytest.mark.parametrize(("what", "value"), CHANGES)
def test_whatever_makes_another_program_has_another_folder(
    what: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {CACHE_DIR: str(tmp_path), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    before = cache_folder(environment)
    assert (before.parent, cache_folder({CACHE_DIR: str(tmp_path), "LANG": "C"})) == (tmp_path, before)
    assert cache_folder(environment | {CACHE_DIR: str(before)}) == before, "a folder within the folder"
    if what.isupper():
        environment[what] = value
    elif what == "torch":
        (tmp_path / "torch-3.0.dist-info").mkdir()
        monkeypatch.setattr(machine, "_IMPORT_PATH", [tmp_path])
    else:
        monkeypatch.setattr(machine if what == "compiler_version" else programs, what, lambda: value)
    after = cache_folder(environment | {CACHE_DIR: str(before)})
    assert (after.parent, after == before) == (tmp_path, False)


def test_the_version_of_the_graph_pass_is_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = products.ProductsByOneDNN().uuid()
    (changed := tmp_path / "products.py").write_text(f"{Path(products.__file__).read_text()}\n# another\n")
    assert products.ProductsByOneDNN().uuid() == before
    monkeypatch.setattr(products, "__file__", str(changed))
    assert products.ProductsByOneDNN().uuid() != before


@pytest.mark.skipif(sys.platform != "linux", reason="shared objects are no ELF files")
def test_half_written_programs_are_removed_and_those_under_way_stay(tmp_path: Path) -> None:
    whole = next(Path(shutil.__file__).parent.glob("lib-dynload/*.so")).read_bytes()
    cut, empty = whole[: len(whole) - 1], b""
    contents = {"whole.main.so": whole, "cut.main.so": cut, "short.so": whole[:40], "zeros.so": bytes(9000)}
    contents |= {"empty.so": empty, "empty.main.cpp": empty, "full.py": b"x = 1\n", "busy.main.so": cut}
    (tmp_path / "ab").mkdir()
    for name, content in contents.items():
        (tmp_path / "ab" / name).write_bytes(content)
    with FileLock(tmp_path / "locks" / "busy.lock"):
        remove_damaged(tmp_path)
    assert {path.name for path in (tmp_path / "ab").iterdir()} == {"whole.main.so", "full.py", "busy.main.so"}


def test_the_compiler_gets_a_folder_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_DIR, str(tmp_path / "cache"))
    use_cache()
    assert os.environ[CACHE_DIR] == str(cache_folder(os.environ)) != str(tmp_path / "cache")


def test_a_compiler_that_falls_back_to_other_instructions_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its trial of AVX-512 has failed, perhaps on a busy machine: the numbers would be others."""
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr("torch._inductor.cpu_vec_isa.pick_vec_isa", lambda: "avx2")
    with pytest.raises(NoCompilerError, match="no program for avx512"):
        programs.vector_instructions()
    monkeypatch.setattr("torch._inductor.cpu_vec_isa.pick_vec_isa", lambda: "avx512 avx512_vnni")
    assert programs.vector_instructions() == "avx512 avx512_vnni"
