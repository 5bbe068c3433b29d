"""Settings of libraries that an environment changes in a step are read back, named, and stop the run."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from conftest import Configure, job_in, newest_state, record
from gymnasium.envs.classic_control import CartPoleEnv

from runlab.determinism import kernels, switches
from runlab.determinism.switches import use_blas_threads
from runlab.envs.make import Repetition
from runlab.errors import ConfigError, RunError
from runlab.launch.worker import run
from runlab.run.evaluation import evaluate
from runlab.run.manifest import list_checkpoints

_FESETROUND = ctypes.CDLL(None).fesetround
_UPWARD = 0x800  # FE_UPWARD of x86


@pytest.fixture(autouse=True)
def settings_restored() -> Iterator[None]:
    """Each test changes settings of this process."""
    dtype, mkldnn = torch.get_default_dtype(), torch.backends.mkldnn.enabled
    yield
    _FESETROUND(0)
    torch.set_default_dtype(dtype)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.set_float32_matmul_precision("highest")
    torch.set_deterministic_debug_mode("default")
    torch.set_autocast_enabled("cpu", False)
    torch.backends.mkldnn.enabled = mkldnn
    use_blas_threads(1)


def running_with(monkeypatch: pytest.MonkeyPatch, act: Callable[[], Any], at: int = 100) -> None:
    """Let CartPole act in one of its steps."""
    step, taken = cast(Any, CartPoleEnv.step), iter(range(10**6))

    def acting(env: CartPoleEnv, action: Any) -> Any:
        if next(taken) == at:
            act()
        return step(env, action)

    monkeypatch.setattr(CartPoleEnv, "step", acting)
    held = Repetition(holds=True, seed_bits=63)  # its steps do not count
    monkeypatch.setattr("runlab.run.training_run.repeats", lambda _: held)


ACTS: dict[str, tuple[Callable[[], Any], str]] = {
    "precision": (
        lambda: torch.set_float32_matmul_precision("medium"),
        "float32_matmul_precision was highest and is medium",
    ),
    "dtype": (
        lambda: torch.set_default_dtype(torch.float64),
        "default_dtype was torch.float32 and is torch.float64",
    ),
    "device": (lambda: torch.set_default_device("meta"), "default_device was cpu and is meta"),
    "threads": (lambda: torch.set_num_threads(2), "torch_num_threads was 1 and is 2"),
    "blas": (lambda: use_blas_threads(2), "blas_threads was 1 and is 2"),
    "deterministic": (
        lambda: torch.use_deterministic_algorithms(False),
        "deterministic_algorithms was True and is False",
    ),
    "autocast": (lambda: torch.set_autocast_enabled("cpu", True), r"autocast was \[\] and is \['cpu'\]"),
    "onednn": (
        lambda: setattr(torch.backends.mkldnn, "enabled", False),
        "mkldnn_enabled was True and is False",
    ),
    "rounding": (lambda: _FESETROUND(_UPWARD), "rounds_to_nearest was True and is False"),
    "products": (lambda: kernels.use("padded"), "products was plain and is padded"),
}
WORDS = ["eval_every=0", "checkpoint_every=32", "determinism=repeat", "determinism.hash_seed=null"]
WORDS += ["determinism.cublas_workspace=null"]


def test_each_setting_that_changes_is_named(configure: Configure) -> None:
    config = configure(*WORDS)
    before = switches.apply(config)
    for act, text in ACTS.values():
        act()
        now = switches.read_back()
        assert re.search(text, switches.changes(before, now))
        before = now


@pytest.mark.parametrize("case", ["precision", "device"])
def test_a_setting_that_changes_in_a_step_is_named_and_stops_the_run(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Also where the change is the reason of an error: tensors on another device cannot be computed with."""
    act, text = ACTS[case]
    running_with(monkeypatch, act)
    with pytest.raises(RunError, match=text) as caught:
        run(job_in(tmp_path / "run", configure, *WORDS))
    first, second = str(caught.value).splitlines()
    assert "; the environment or a library has set that in iteration " in first
    assert second.endswith("determinism=repeat promises equal bits, and determinism=fast goes on")
    # What was computed with the other setting is in no checkpoint.
    last = list_checkpoints(tmp_path / "run")[-1]
    assert first.endswith(
        f", which began after {newest_state(tmp_path / 'run')['env_steps']} environment steps"
    )
    assert second.startswith(f"the last checkpoint is {last.name}; ")
    assert record(tmp_path / "run")["error"] == f"RunError: {first}"


def test_a_level_that_promises_nothing_goes_on_with_a_note(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    running_with(monkeypatch, ACTS["precision"][0])
    assert run(job_in(tmp_path / "run", configure, "eval_every=0")) == 0
    errors = capfd.readouterr().err
    assert errors.count("float32_matmul_precision was highest and is medium") == 1
    assert errors.count("; the environment or a library has set that in iteration ") == 1


def test_what_an_evaluation_changes_is_found_before_the_next_iteration(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changing(*arguments: Any, **more: Any) -> Any:
        torch.set_float32_matmul_precision("medium")
        return evaluate(*arguments, **more)

    monkeypatch.setattr("runlab.run.observers.evaluate", changing)
    with pytest.raises(RunError, match="has set that before iteration 2, which began after 64 environment"):
        run(job_in(tmp_path / "run", configure, *WORDS, "eval_every=64"))


def test_what_an_environment_changes_when_it_is_made_or_tried_is_refused(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    step = cast(Any, CartPoleEnv.step)

    def changing(env: CartPoleEnv, action: Any) -> Any:
        torch.set_float32_matmul_precision("high")
        return step(env, action)

    monkeypatch.setattr(CartPoleEnv, "step", changing)  # and the trial makes some steps
    with pytest.raises(
        ConfigError, match=r"float32_matmul_precision was highest and is high,.* after the env"
    ):
        run(job_in(tmp_path / "run", configure, *WORDS))
    assert not (tmp_path / "run").exists()
    torch.set_float32_matmul_precision("highest")
    init = cast(Any, CartPoleEnv.__init__)

    def made(env: CartPoleEnv, **options: Any) -> None:
        torch.set_float32_matmul_precision("high")
        init(env, **options)

    monkeypatch.setattr(CartPoleEnv, "__init__", made)
    assert run(job_in(tmp_path / "run", configure, "eval_every=0")) == 0
    assert "is tf32 since the environment was made" in capfd.readouterr().err
    assert record(tmp_path / "run")["determinism"]["settings"]["float32_matmul_precision"] == "high"


def test_settings_that_stay_are_no_change(configure: Configure, tmp_path: Path) -> None:
    assert run(job_in(tmp_path / "run", configure, *WORDS, "eval_every=64", "eval_episodes=1")) == 0
    now, recorded = switches.read_back(), record(tmp_path / "run")["determinism"]["settings"]
    assert {name: recorded[name] for name in now} == now
    assert recorded["float32_matmul_precision"] == "highest"
    assert {"grad_enabled", "default_device", "flush_to_zero"} <= {*now}
