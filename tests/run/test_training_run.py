"""The end of a run: its steps, their order, and the error that is raised."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import Configure, job_in, record

from runlab.errors import RunError
from runlab.run import files, paths, training_run
from runlab.run.files import LineFile
from runlab.run.logger import Logger
from runlab.run.record import DeterminismFacts, RunRecord
from runlab.run.training_run import TrainingRun

STEPS = ["trace", "metrics", "record", "algorithm", "lock"]
# Every step alone, the run itself, and two errors of which the first counts.
CASES = [[], ["run"], *([step] for step in STEPS), *(["run", step] for step in STEPS), ["metrics", "lock"]]


class Ending:
    """Notes the steps of the end of a run in `steps`; those in `failing` raise an error with their name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failing: Sequence[str]) -> None:
        self.steps, self.failing = list[str](), failing
        lock, close, close_logger, write = files.lock, LineFile.close, Logger.close, RunRecord.write

        def close_lines(lines: LineFile) -> None:
            if lines.path.name == paths.TRACE:
                self.step("trace", lambda: close(lines))
            else:
                close(lines)

        def write_record(written: RunRecord, run_dir: Path) -> None:
            if written.status == "running":
                write(written, run_dir)
            else:
                self.step("record", lambda: write(written, run_dir))

        def locked(folder: Path) -> Callable[[], None]:
            unlock = lock(folder)
            return lambda: self.step("lock", unlock)

        monkeypatch.setattr(LineFile, "close", close_lines)
        monkeypatch.setattr(Logger, "close", lambda *args: self.step("metrics", lambda: close_logger(*args)))
        monkeypatch.setattr(RunRecord, "write", write_record)
        monkeypatch.setattr(training_run, "lock", locked)
        self.algorithm: Any = SimpleNamespace(
            act=None, env_steps=256, replay=None, close=lambda: self.step("algorithm", lambda: None)
        )

    def step(self, name: str, act: Callable[[], object]) -> None:
        act()
        self.steps += [name] if name not in self.steps else []
        self.fail(name)

    def fail(self, name: str) -> None:
        if name in self.failing:
            raise RunError(f"{name} failed")


@pytest.mark.parametrize("failing", CASES, ids="-".join)
def test_each_step_of_the_end_happens_in_order_and_the_first_error_is_raised(
    configure: Configure,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    failing: list[str],
) -> None:
    ending, envs, problem = Ending(monkeypatch, failing), SimpleNamespace(codec=None), ""
    training = TrainingRun(job_in(tmp_path / "run", configure))
    try:
        with training:
            training.prepare()
            training.algorithm = ending.algorithm
            training.begin(ending.algorithm, DeterminismFacts())
            training.observe(ending.algorithm, envs, lambda: False)
            ending.fail("run")
    except RunError as error:
        problem = str(error)
    assert ending.steps == STEPS
    assert problem == (f"{failing[0]} failed" if failing else "")
    # The errors that are not raised are printed, in a line each.
    printed = [line for line in capfd.readouterr().err.splitlines() if "failed" in line]
    assert printed == [f"at the end of the run: {step} failed" for step in failing[1:]]
    status = "failed" if "run" in failing else "interrupted"
    assert record(tmp_path / "run")["status"] == status
    files.lock(tmp_path / "run")()  # released


def test_an_error_is_recorded_without_the_token_that_it_quotes(configure: Configure, tmp_path: Path) -> None:
    token = "hf_" + "Ab1" * 12

    def fail() -> None:
        with TrainingRun(job_in(tmp_path / "run", configure)) as training:
            training.prepare()
            training.begin(SimpleNamespace(), DeterminismFacts())
            raise RunError(f"401 for https://api:{token}@host/step")

    with pytest.raises(RunError, match=token):
        fail()
    assert record(tmp_path / "run")["error"] == "RunError: 401 for https://api:(a secret)@host/step"


def test_a_forked_process_ends_without_taking_a_step(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the child of an environment would write the record of its parent's run."""
    ending = Ending(monkeypatch, [])
    with TrainingRun(job_in(tmp_path / "run", configure)) as training:
        training.prepare()
        training.algorithm = ending.algorithm
        training.begin(ending.algorithm, DeterminismFacts())
        if (child := os.fork()) == 0:
            training.__exit__(None, None, None)
            os._exit(0)  # not reached
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
        assert record(tmp_path / "run")["status"] == "running"
    assert ending.steps == ["record", "algorithm", "lock"]
