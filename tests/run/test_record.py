"""The record of a run, and the facts about machine and packages that go into it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rltemplate.determinism.machine import machine_facts, package_versions
from rltemplate.run.paths import RECORD
from rltemplate.run.record import Record, read_record
from rltemplate.types import ConfigError

ROOT = Path(__file__).parents[2]


def test_the_record_of_a_run_that_finishes(tmp_path: Path) -> None:
    before = datetime.now(UTC).replace(microsecond=0)
    record = Record.create(tmp_path, {"id": "abc", "determinism": {"level": "repeat", "threads": 1}})
    running = read_record(tmp_path)
    assert (running["id"], running["status"], running["schema"]) == ("abc", "running", 1)
    assert (running["ended_at"], running["final_metrics"], running["error"]) == (None, None, None)
    assert running["pid"] == os.getpid()
    assert running["command_line"] == sys.orig_argv
    assert running["determinism"] == {"level": "repeat", "threads": 1}

    record.update(env_steps=5)
    record.finish("finished", {"eval/return": 1.5})
    ended = read_record(tmp_path)
    assert (ended["status"], ended["env_steps"], ended["error"]) == ("finished", 5, None)
    assert ended["final_metrics"] == {"eval/return": 1.5}
    started_at, ended_at = (datetime.fromisoformat(ended[key]) for key in ("started_at", "ended_at"))
    assert before <= started_at <= ended_at <= datetime.now(UTC)
    assert started_at.utcoffset() is not None
    assert 0 <= ended["duration_s"] < 60
    assert sorted(path.name for path in tmp_path.iterdir()) == [RECORD]


def test_the_id_is_the_folder_where_none_is_given(tmp_path: Path) -> None:
    (tmp_path / "run-7").mkdir()
    Record.create(tmp_path / "run-7", {})
    assert read_record(tmp_path / "run-7")["id"] == "run-7"


def test_a_failure_is_recorded_with_its_reason(tmp_path: Path) -> None:
    Record.create(tmp_path, {}).finish("failed", {}, error="FloatingPointError: loss is nan")
    ended = read_record(tmp_path)
    assert (ended["status"], ended["error"]) == ("failed", "FloatingPointError: loss is nan")


def test_an_unknown_status_is_refused(tmp_path: Path) -> None:
    record = Record.create(tmp_path, {})
    with pytest.raises(ValueError, match="finished, failed, interrupted"):
        record.finish("done", {})
    assert read_record(tmp_path)["status"] == "running"


def test_duration_does_not_follow_the_wall_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    record = Record.create(tmp_path, {})
    now = 107.5
    record.finish("finished", {})
    assert read_record(tmp_path)["duration_s"] == 7.5


def test_a_second_record_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    Record.create(tmp_path, {"id": "first"})
    with pytest.raises(FileExistsError):
        Record.create(tmp_path, {"id": "second"})
    assert read_record(tmp_path)["id"] == "first"


def test_resume_keeps_the_first_start_and_adds_up_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    first = Record.create(tmp_path, {"git": {"commit": "c1"}})
    now = 10.0
    first.finish("interrupted", {"eval/return": 1.0})
    started_at = read_record(tmp_path)["started_at"]
    now = 1000.0
    again = Record.resume(tmp_path, {"git": {"commit": "c2"}})
    running = read_record(tmp_path)
    assert (running["status"], running["ended_at"], running["final_metrics"]) == ("running", None, None)
    assert running["started_at"] == started_at
    assert running["git"] == {"commit": "c1"}
    assert [entry["git"] for entry in running["resumed"]] == [{"commit": "c2"}]
    now = 1005.0
    again.finish("finished", {})
    assert read_record(tmp_path)["duration_s"] == 15.0


class Level(Enum):
    REPEAT = "repeat"


@dataclass
class Settings:
    threads: int
    path: Path


def test_the_file_is_strict_json_whatever_the_numbers_are(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "nan": float("nan"),
        "inf": [float("inf"), -float("inf")],
        "numpy": np.float32(0.5),
        "numpy_nan": np.float64("nan"),
        "numpy_int": np.int64(3),
        "numpy_bool": np.bool_(True),
        "torch": torch.tensor(2.5),
        "enum": Level.REPEAT,
        "settings": Settings(2, Path("a/b")),
        "tuple": (1, None, True),
        "text": 'caf\udce9 "quoted"\nline',
    }
    Record.create(tmp_path, {}).finish("finished", values)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    text = (tmp_path / RECORD).read_text(encoding="utf-8")
    assert json.loads(text, parse_constant=refuse)["final_metrics"] == {
        "nan": None,
        "inf": [None, None],
        "numpy": 0.5,
        "numpy_nan": None,
        "numpy_int": 3,
        "numpy_bool": True,
        "torch": 2.5,
        "enum": "repeat",
        "settings": {"threads": 2, "path": "a/b"},
        "tuple": [1, None, True],
        "text": 'caf\udce9 "quoted"\nline',
    }


def test_a_value_without_a_form_in_json_is_an_error_and_leaves_the_file_whole(tmp_path: Path) -> None:
    record = Record.create(tmp_path, {})
    before = (tmp_path / RECORD).read_bytes()
    with pytest.raises(TypeError, match="object"):
        record.update(thing=object())
    assert (tmp_path / RECORD).read_bytes() == before


def test_a_reader_never_sees_half_a_record(tmp_path: Path) -> None:
    record = Record.create(tmp_path, {"filler": "x" * 200_000})
    stop = threading.Event()
    failures: list[str] = []
    reads = 0

    def read() -> None:
        nonlocal reads
        while not stop.is_set():
            try:
                read_record(tmp_path)
                reads += 1
            except ConfigError as error:
                failures.append(str(error))

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(40):
        record.update(number=number)
    stop.set()
    reader.join()
    assert reads > 0
    assert failures == []


def test_a_failing_write_leaves_the_last_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = Record.create(tmp_path, {"number": 1})

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        record.update(number=2)
    assert read_record(tmp_path)["number"] == 1
    assert [path.name for path in tmp_path.iterdir()] == [RECORD]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "is no run folder"),
        ("{", "cannot be read"),
        ("[]", "no JSON object"),
        ('{"schema": 99}', "schema 99"),
        ("{}", "schema None"),
    ],
)
def test_a_bad_record_is_told_in_one_line(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / RECORD).write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_record(tmp_path)
    assert "\n" not in str(caught.value)


def test_machine_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_process(*args: object, **kwargs: object) -> None:
        raise AssertionError("facts about the machine must not cost a process")

    if sys.platform == "linux":
        monkeypatch.setattr(subprocess, "Popen", no_process)
    facts = machine_facts(with_gpus=False)
    assert json.loads(json.dumps(facts)) == facts
    assert facts["python"] == ".".join(map(str, sys.version_info[:3]))
    assert facts["logical_cores"] == os.cpu_count()
    assert facts["gpus"] == []
    assert all(facts[key] for key in ("os", "kernel", "architecture", "cpu", "memory_bytes"))


@pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux tells")
def test_machine_facts_on_linux_agree_with_other_sources() -> None:
    facts = machine_facts()
    assert facts["libc"] == " ".join(os.confstr("CS_GNU_LIBC_VERSION").split())  # type: ignore[union-attr]
    memory_kb = next(line.split()[1] for line in Path("/proc/meminfo").read_text().splitlines())
    assert facts["memory_bytes"] == int(memory_kb) * 1024
    capability = torch.backends.cpu.get_cpu_capability()
    assert ("avx512f" in facts["cpu_flags"]) or capability != "AVX512"
    assert ("avx2" in facts["cpu_flags"]) or capability not in ("AVX2", "AVX512")


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no affinity")
def test_the_cores_of_this_process_are_told() -> None:
    allowed = os.sched_getaffinity(0)
    assert machine_facts()["usable_cores"] == len(allowed)
    one = max(allowed)
    try:
        os.sched_setaffinity(0, {one})
        facts = machine_facts()
    finally:
        os.sched_setaffinity(0, allowed)
    assert (facts["usable_cores"], facts["affinity"]) == (1, str(one))


def test_package_versions_are_those_that_python_finds() -> None:
    versions = package_versions()
    assert versions["torch"] == torch.__version__
    assert versions["numpy"] == np.__version__
    found: dict[str, str] = {}
    for distribution in distributions():
        name = distribution.metadata["Name"].lower().replace("_", "-").replace(".", "-")
        found.setdefault(name, distribution.version)
    assert versions == found


def test_package_versions_takes_the_first_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a" / "My_Package-2.0+cpu.dist-info").mkdir(parents=True)
    (tmp_path / "b" / "my.package-1.0.dist-info").mkdir(parents=True)
    (tmp_path / "b" / "old_tool-0.3-py3.11.egg-info").mkdir()
    (tmp_path / "b" / "in_place.egg-info").mkdir()
    (tmp_path / "b" / "in_place.egg-info" / "PKG-INFO").write_text("Name: in-place\nVersion: 4.5\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "a"), str(tmp_path / "b"), str(tmp_path / "missing")])
    assert package_versions() == {"in-place": "4.5", "my-package": "2.0+cpu", "old-tool": "0.3"}


def test_importing_is_light() -> None:
    """Other tools read records and take snapshots without waiting for torch."""
    code = "import sys, rltemplate.run.record, rltemplate.run.git.snapshot, rltemplate.determinism.machine;"
    code += "print(sorted({'torch', 'numpy', 'wandb', 'hydra', 'omegaconf'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stderr
