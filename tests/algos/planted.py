"""Runs tests of a copy of the project.

In a fork of one process that has imported what takes long and nothing of the project, so that each copy is
imported afresh and without waiting for torch.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest


def run_tests(folder: Path, tests: Sequence[str]) -> str:
    """The output of tests of the copy of the project in `folder`."""
    context = multiprocessing.get_context("forkserver")
    slow = ["torch._dynamo", "torch.distributions", "gymnasium.envs.mujoco", "hydra.compose", "pytest"]
    context.set_forkserver_preload([*slow, "pytest_timeout"])
    process = context.Process(target=_run, args=(folder, tests))
    process.start()
    process.join()
    return (folder / "output").read_text()


def _run(folder: Path, tests: Sequence[str]) -> None:
    os.chdir(folder)
    sys.path[:0] = [str(folder), str(folder / "tests")]
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        del os.environ[name]
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # the import of others takes as long as a test
    gc.freeze()  # Hydra collects garbage, and would go through all of torch
    output = os.open("output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    words = ["-q", "-p", "no:cacheprovider", "-p", "pytest_timeout", "-m", ""]
    pytest.main([*words, *(f"tests/{test}" for test in tests)])
    if (package := sys.modules.get("runlab")) is not None:
        assert Path(str(package.__file__)).is_relative_to(folder)
