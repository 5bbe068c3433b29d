"""Switches take effect where they are read back, and one that does not take stops the run."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, Configure

from rltemplate.run.determinism import prepared, process_environment, resolve_device
from rltemplate.types import ConfigError

# Indexed gradients with two threads give several results unless torch is told to be deterministic.
SCRIPT = """
import json, random, sys
import numpy as np, torch
from rltemplate.config import from_dict
from rltemplate.foreign_rng import seed_foreign_code
from rltemplate.run import determinism
from rltemplate.types import ConfigError
config = from_dict(json.loads(sys.stdin.read()))
try:
    settings = determinism.apply(config.determinism, config.num_threads)
    if hasattr(determinism, "confirm"):
        settings = determinism.confirm(settings)
except ConfigError as error:
    print(json.dumps({"refused": str(error)}))
    sys.exit()
seed_foreign_code(config.seed)
draws = [random.random(), float(np.random.rand()), float(torch.rand(()))]
generator = torch.Generator().manual_seed(0)
index = torch.randint(50, (200_000,), generator=generator)
values = torch.randn(200_000, generator=generator)
results = set()
for i in range(2000):  # on busy cores the threads rarely meet
    results.add(torch.zeros(50).index_put_((index,), values, accumulate=True).numpy().tobytes())
    if i >= 40 and (len(results) > 1 or settings["deterministic_algorithms"]):
        break
total = float(torch.randn(300_003, generator=generator).sum())  # each thread has a part of its own
seen = {"results": len(results), "draws": draws, "sum": total, "compiler": "torch._inductor" in sys.modules}
print(json.dumps({"settings": settings, **seen}))
"""


def report(configure: Configure, *overrides: str, **variables: str) -> dict[str, object]:
    """What the script sees in the process of a run; of the variables, those called X_forced are set there."""
    from rltemplate.config import to_dict

    config = configure(*overrides)
    forced = {name: value for name, value in variables.items() if name.endswith("_forced")}
    base = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    environment = prepared(base, config.determinism, config.num_threads)
    environment |= {name.removesuffix("_forced"): value for name, value in forced.items()}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps(to_dict(config)),
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    seen: dict[str, object] = json.loads(done.stdout)
    return seen


def test_repeat_takes_effect_and_fast_shows_that_it_is_needed(configure: Configure) -> None:
    repeat = report(configure, "determinism=repeat", "num_threads=2")
    fast = report(configure, "determinism=fast", "num_threads=2")
    settings = repeat["settings"]
    assert isinstance(settings, dict)
    assert settings["deterministic_algorithms"] is True
    assert settings["torch_num_threads"] == 2
    assert settings["python_hash_seed"] == "0"
    assert repeat["results"] == 1
    if len(os.sched_getaffinity(0)) > 1:
        assert isinstance(fast["results"], int)
        assert fast["results"] > 1
    assert repeat["compiler"] is False, "importing the compiler costs every run a second"


def test_no_variable_takes_threads_away(configure: Configure) -> None:
    inherited = {"OMP_DYNAMIC": "true", "OMP_THREAD_LIMIT": "1", "OMP_MAX_ACTIVE_LEVELS": "0"}
    one, two = (report(configure, f"num_threads={threads}") for threads in (1, 2))
    limited = report(configure, "num_threads=2", **inherited)
    assert two["sum"] != one["sum"], "the sum cannot tell how many threads there are"
    assert limited["sum"] == two["sum"]
    assert isinstance(limited["settings"], dict)
    assert limited["settings"]["parallel_threads"] == 2


@pytest.mark.parametrize(
    ("variable", "value", "problem"),
    [
        ("OMP_DYNAMIC", "true", "openmp_dynamic should be False and is True"),
        ("OMP_THREAD_LIMIT", "1", "parallel_threads should be 2 and is 1"),
        ("OMP_MAX_ACTIVE_LEVELS", "0", "parallel_threads should be 2 and is 1"),
    ],
)
def test_threads_that_are_missing_stop_the_run(
    configure: Configure, variable: str, value: str, problem: str
) -> None:
    seen = report(configure, "num_threads=2", **{f"{variable}_forced": value})
    assert problem in str(seen["refused"])


def test_the_code_of_others_draws_the_same_again(configure: Configure) -> None:
    first, again, other = (report(configure, f"seed={seed}")["draws"] for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_a_switch_that_did_not_take_stops_the_run(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process was not prepared: its hash seed is another one than the level asks for."""
    from rltemplate.run import determinism

    config = configure()
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    threads, algorithms = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    try:
        with pytest.raises(ConfigError, match="python_hash_seed should be 0 and is 7"):
            determinism.apply(config.determinism, threads)
    finally:
        torch.set_deterministic_debug_mode("error" if algorithms else "default")


def test_a_level_names_what_its_process_needs(configure: Configure) -> None:
    repeat, fast = (configure(f"determinism={level}").determinism for level in ("repeat", "fast"))
    assert process_environment(repeat, 3)["OMP_NUM_THREADS"] == "3"
    assert process_environment(repeat, 1)["PYTHONHASHSEED"] == "0"
    assert process_environment(fast, 1)["PYTHONHASHSEED"] is None


def test_devices_are_resolved_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto").type == "cpu"
    with pytest.raises(ConfigError, match="use device=cpu"):
        resolve_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device("auto").type == "cuda"
