"""Switches take effect where they are read back, and one that does not take stops the run."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from conftest import ROOT, Configure, env_config

from runlab.config.loading import to_dict
from runlab.config.schema import Config
from runlab.determinism import denormals, switches
from runlab.determinism.levels import prepared
from runlab.determinism.libraries import of_torch
from runlab.determinism.switches import resolve_device
from runlab.envs.envs import Envs
from runlab.errors import ConfigError

Report = Callable[..., dict[str, Any]]
SCRIPT = """
import json, sys
import torch
from runlab.config.loading import from_dict
from runlab.determinism import checks, switches
from runlab.errors import ConfigError
config = from_dict(json.loads(sys.stdin.read()))
seen = {}
try:
    seen["settings"] = switches.apply(config)
    x = torch.randn(300_003, generator=torch.Generator().manual_seed(3))
    seen["sum"] = float(x.sum())  # each thread has a part of its own
    torch.set_num_threads(1)
    seen["sum of one thread"] = float(x.sum())
    torch.set_num_threads(config.num_threads)
    seen["compiler"] = "torch._inductor" in sys.modules
    checks.check_repeats(config, {})
except ConfigError as error:
    seen["refused"] = str(error)
print(json.dumps(seen))
"""


def answer(script: str, config: Config, variables: Mapping[str, str]) -> dict[str, Any]:
    """The answer of a script in the process of a run, whose starter has these variables; `!NAME` wins."""
    forced = {name[1:]: value for name, value in variables.items() if name.startswith("!")}
    base = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    environment = prepared(base, config.determinism, config.num_threads) | forced
    command, text = [sys.executable, "-c", script], json.dumps(to_dict(config))
    done = subprocess.run(command, input=text, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout)
    return seen


@pytest.fixture
def report(configure: Configure) -> Report:
    return lambda *words, **variables: answer(SCRIPT, configure(*words), variables)


@pytest.fixture(scope="module")
def repeat(configure: Configure) -> dict[str, Any]:
    """The answer of a process with two threads."""
    return answer(SCRIPT, configure("determinism=repeat", "num_threads=2"), {})


def test_repeat_takes_effect_and_fast_shows_that_it_is_needed(report: Report, repeat: dict[str, Any]) -> None:
    settings = repeat["settings"]
    assert (settings["deterministic_algorithms"], settings["torch_num_threads"]) == (True, 2)
    assert settings["python_hash_seed"] == "0"
    assert "refused" not in repeat
    assert repeat["compiler"] is False, "importing the compiler costs every run a second"
    fast = report("determinism=fast", "num_threads=2")
    different = "a gradient of indexing gives different bits" in fast.get("refused", "")
    assert different or len(os.sched_getaffinity(0)) == 1


def test_no_variable_takes_threads_away(report: Report, repeat: dict[str, Any]) -> None:
    inherited = {"OMP_DYNAMIC": "true", "OMP_THREAD_LIMIT": "1", "OMP_MAX_ACTIVE_LEVELS": "0"}
    inherited["!OPENBLAS_NUM_THREADS"] = "1"
    limited = report("num_threads=2", **inherited)
    assert repeat["sum"] != repeat["sum of one thread"], "the sum cannot tell how many threads there are"
    assert limited["sum"] == repeat["sum"]
    assert limited["settings"]["blas_threads"] == 2


def test_a_switch_that_did_not_take_stops_the_run(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process was not prepared: its hash seed is another one than the level asks for, or its OpenMP."""
    config, let_openmp_choose = configure(), of_torch("omp_set_dynamic")
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    try:
        with pytest.raises(ConfigError, match="python_hash_seed should be 0 and is 7"):
            switches.apply(config)
        let_openmp_choose(1)  # as OMP_DYNAMIC=true does at its start
        with pytest.raises(ConfigError, match="openmp_dynamic should be False and is True"):
            switches.apply(config)
    finally:
        let_openmp_choose(0)
        torch.set_deterministic_debug_mode("default")


def test_devices_are_resolved_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for available, resolved in ((False, "cpu"), (True, "cuda")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        assert resolve_device("auto").type == resolved
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="use device=cpu"):
        resolve_device("cuda")


def test_flushing_is_switched_off_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a library that was linked with -ffast-math switches it on when it is loaded."""
    settings, switch, small = switches.read_back(), torch.set_flush_denormal, torch.full((8,), 1e-40)
    try:
        switch(True)
        Envs(env_config("CartPole-v1"), [0]).close()
        switches.confirm(settings)
        assert (small * 0.5).all()
        switch(True)
        assert not (small * 0.5).any()
        assert switches.changes(settings, switches.read_back()) == "flush_to_zero was False and is True"
        monkeypatch.setattr(torch, "set_flush_denormal", lambda _: False)
        monkeypatch.setattr(denormals, "loaded_openmp", list)
        monkeypatch.setattr(denormals, "_pools", denormals._Pools())
        with pytest.raises(ConfigError, match="cannot be switched off here"):
            switches.confirm(settings)
        with pytest.raises(ConfigError, match="cannot be switched off here"):
            Envs(env_config("CartPole-v1"), [0])
    finally:
        switch(False)


FLUSHED_FIRST = """
import ctypes, json, sys
libm, environment = ctypes.CDLL("libm.so.6"), (ctypes.c_uint32 * 8)()
libm.fegetenv(environment)
environment[7] |= 0x8040  # as a library does that was linked with -ffast-math
libm.fesetenv(environment)
import numpy as np  # starts the threads of OpenBLAS
import torch
from runlab.config.loading import from_dict
from runlab.determinism import denormals, switches

small, row = torch.full((3 * 32_768,), 2e-38), np.full((512, 4), 2.0**-70, np.float32)


def kept():
    return [(small * 0.01 > 0).float().mean().item(), float((row @ row.T > 0).mean())]


torch.set_num_threads(2)
config, seen = from_dict(json.loads(sys.stdin.read())), {"at first": kept()}
torch.set_flush_denormal(False)  # in this thread alone
seen |= {"in part": kept(), "pool": denormals.flushed_in_pool()}
seen["settings"] = switches.apply(config)
seen["all"] = kept()
# A step of an environment starts one more thread while a library flushes.
torch.set_num_threads(3)
torch.set_flush_denormal(True)
small * 0.01
torch.set_flush_denormal(False)
now = switches.read_back() | {"torch_num_threads": 2, "mkl_threads": 2}
seen["changes"] = switches.changes(seen["settings"], now)
denormals.keep_in_threads()
seen["all again"] = kept()
print(json.dumps(seen))
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="sets a register of x86")
def test_threads_that_started_while_a_library_flushed_keep_denormal_numbers(configure: Configure) -> None:
    """Those of OpenMP, and those of numpy's OpenBLAS."""
    seen = answer(FLUSHED_FIRST, configure("num_threads=2"), {})
    assert seen["at first"] == [0.0, 0.0]
    assert 0.0 < seen["in part"][0] < 1.0
    assert seen["in part"][1] < 1.0
    assert seen["pool"] is True
    assert seen["settings"]["flush_to_zero"] is False
    assert seen["all"] == seen["all again"] == [1.0, 1.0]
    assert seen["changes"] == "flush_to_zero was False and is True"
