"""Mistakes on purpose: how one gets into a copy of the project, and what its tests say then.

Every test runs in a fork of one process that has imported what takes long and nothing of the project, so that
each copy is imported afresh and without waiting for torch.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a test ended: the name of the exception it was stopped by, or nothing where it passed."""

    test: str
    stopped_by: str
    text: str


def copy_project(root: Path, folder: Path) -> None:
    """Copy what tests of algorithms need; compiled modules too, which stay valid."""
    for name in ("rltemplate", "conf", "tests"):
        shutil.copytree(root / name, folder / name, ignore=shutil.ignore_patterns("default.yaml"))
    shutil.copy2(root / "pyproject.toml", folder)


def plant(file: Path, old: str, new: str) -> None:
    """Put `new` in the place of `old`, which has to stand in the file exactly once."""
    text = file.read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{file.name} has {old!r} {text.count(old)} times"
    file.write_text(text.replace(old, new), encoding="utf-8")


def run_tests(folder: Path, tests: Sequence[str]) -> list[Outcome]:
    """Run tests of the copy of the project in `folder`, in a process of their own."""
    context = multiprocessing.get_context("forkserver")
    slow = ["torch._dynamo", "torch.distributions", "gymnasium.envs.mujoco", "hydra.compose", "pytest"]
    context.set_forkserver_preload([*slow, "pytest_timeout"])
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(folder, list(tests), there))
    process.start()
    there.close()
    outcomes: list[Outcome] = here.recv()
    process.join()
    return outcomes


class _Watch:
    """Notes how each test ends, and what stops a module from being collected."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        report = (yield).get_result()
        if call.excinfo is not None or call.when == "call":
            stopped_by = call.excinfo.typename if call.excinfo else ""
            self.outcomes.append(Outcome(item.nodeid, stopped_by, report.longreprtext))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.outcomes.append(Outcome(report.nodeid, "CollectError", report.longreprtext))


def _run(folder: Path, tests: list[str], answer: Connection) -> None:
    os.chdir(folder)
    sys.path[:0] = [str(folder), str(folder / "tests")]
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        del os.environ[name]
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # the import of others takes as long as a test
    gc.freeze()  # Hydra collects garbage, and would go through all of torch
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    watch = _Watch()
    words = ["-q", "-p", "no:cacheprovider", "-p", "pytest_timeout", "-m", ""]
    pytest.main([*words, *(f"tests/{test}" for test in tests)], plugins=[watch])
    if (package := sys.modules.get("rltemplate")) is not None:
        assert Path(str(package.__file__)).is_relative_to(folder)
    answer.send(watch.outcomes)
