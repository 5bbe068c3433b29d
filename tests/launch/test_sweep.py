"""Sweeps: jobs are single runs in fresh processes, signals end them well, and `sweep=resume` goes on.

They run in a copy of the project whose `runlab/launch/worker.py` is replaced by `worker.py`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from conftest import Start, alive, copy_project, environment, git, plain, program, until
from hydra import initialize_config_dir

from runlab.config.cli.preflight import Plan, preflight
from runlab.config.loading import CONF
from runlab.config.schema import register_schemas
from runlab.errors import ConfigError, RunError
from runlab.launch import process, sweep, sweep_job
from runlab.run import paths
from runlab.run.git.snapshot import GitRecord
from runlab.run.record import SweepRecord
from runlab.signals import STOP_SIGNALS


@pytest.fixture(scope="module")
def fork(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The copy in which commands of these tests are started."""
    copy = tmp_path_factory.mktemp("project") / "copy"
    copy_project(copy)
    shutil.copy(Path(__file__).with_name("worker.py"), copy / "runlab" / "launch" / "worker.py")
    git(copy, "commit", "-qam", "a worker")
    return copy


def order(cwd: Path, orders: dict[int, str] | None = None) -> None:
    """Tell runs what to do from now on, by seed."""
    (cwd / "orders.json").write_text(json.dumps(orders or {}))


def sweep_in(cwd: Path) -> tuple[Path, SweepRecord]:
    """The folder of the only sweep, and its record."""
    (path,) = cwd.glob("*/sweeps/*/sweep.json")
    return path.parent, SweepRecord.read(path.parent)


def statuses(cwd: Path) -> list[str]:
    return [job.status for job in sweep_in(cwd)[1].jobs]


def starts_in(run_dir: Path | None) -> list[dict[str, Any]]:
    """Facts about each start of a run."""
    assert run_dir is not None
    return [json.loads(line) for line in (run_dir / "starts.jsonl").read_text().splitlines()]


def resumes(cwd: Path) -> list[list[bool]]:
    """For each job of the only sweep and each start of its run, True if the run was resumed."""
    folder, record = sweep_in(cwd)
    return [[start["job"]["resume"] for start in starts_in(job.run(folder))] for job in record.jobs]


def waiting(cwd: Path, number: int = 1) -> list[int]:
    """The processes of runs that wait for a signal; so many, or none of them."""
    ready = list(cwd.glob("runs/*/*/ready"))
    return [starts_in(path.parent)[-1]["pid"] for path in ready] if len(ready) >= number else []


def heard_in(cwd: Path) -> list[list[int]]:
    return [json.loads(path.read_text()) for path in cwd.glob("runs/*/*/heard")]


@contextlib.contextmanager
def blocked() -> Iterator[None]:
    """Block the signals that end a run, as Ray's workers do: what is started in the block inherits that."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def kill_sweep(start: Start, cwd: Path, *words: str, **environment: str) -> None:
    """Start a sweep whose run of seed 2 waits, and kill every process of it then."""
    order(cwd, {2: "wait"})
    started = start("train", *words, **environment)
    started.until(lambda: bool(waiting(cwd)))
    assert started.kill() >= 3
    order(cwd)


def test_a_single_run_is_told_everything_and_writes_nothing_else(
    fork: Path, start: Start, tmp_path: Path
) -> None:
    (tmp_path / "runlab").mkdir()
    (tmp_path / "runlab" / "__init__.py").write_text("raise SystemExit('the wrong code')")
    (tmp_path / "my_envs.py").write_text(
        "import gymnasium\ngymnasium.register('mine/Walk-v0', 'gymnasium.envs.classic_control:CartPoleEnv')\n"
    )
    words = ["seed=5", "env=my_envs:mine/Walk-v0", "run_dir=here", "compile=false"]
    with blocked():
        alone = start("train", *words, status=0, PYTHONPATH=str(tmp_path))
    note = "note: ppo on my_envs:mine/Walk-v0 without a recipe: the default values of ppo are taken\n"
    assert alone.said == f"{note}auto: num_threads=1\nhello from seed 5\n"
    names = {path.name for path in tmp_path.iterdir()} - {"__pycache__"}
    assert names == {"here", "runlab", "my_envs.py"}
    (facts,) = starts_in(tmp_path / "here")
    job = facts["job"]
    assert job["config"]["env"]["id"] == "my_envs:mine/Walk-v0"
    assert (job["run_dir"], job["command"][4:]) == (str(tmp_path / "here"), words)
    assert (job["sweep"], job["overrides"][0]) == (None, "seed=5")
    assert "RUNLAB_JOB" not in facts["children"]
    assert facts["signals"] == [[], []]  # neither ignored nor blocked
    assert facts["code"] == str(fork / "runlab" / "launch" / "worker.py")
    order(tmp_path, {1: "fail", 2: "die at once"})
    start("train", "seed=1", status=1)
    start("train", "seed=2", status=-signal.SIGKILL)


@pytest.mark.long
def test_every_way_to_end_early_is_named_and_has_its_way_to_go_on(
    fork: Path, start: Start, tmp_path: Path
) -> None:
    order(tmp_path, {1: "fail", 2: "refuse", 3: "die at once", 4: "end early", 6: "die at the end"})
    words = ["seed=1,2,3,4,5,6,7", "hydra/launcher=basic"]
    out = start("train", *words, status=1).said  # its launcher is killed in the sixth job
    assert "Traceback" not in out
    folder, before = sweep_in(tmp_path)
    assert statuses(tmp_path) == ["failed", "refused", "failed", "failed", "finished", "finished"]
    assert [job.exit_status for job in before.jobs][:5] == [1, 2, 128 + signal.SIGKILL, 0, 0]
    assert [job.overrides for job in before.jobs] == [[f"seed={seed}"] for seed in range(1, 7)]
    assert (before.status, before.commands[0][4:]) == ("failed", words)
    assert all(text in out for text in ("#0 seed=1: failed, ", "exit status 1, see "))
    # One snapshot of the code for all jobs, which a ref keeps.
    (facts,) = starts_in(before.jobs[0].run(folder))
    assert GitRecord(**json.loads(facts["job"]["snapshot"])) == before.snapshot
    assert before.snapshot.tree == git(fork, "rev-parse", f"refs/runs/{before.id}^{{tree}}").strip()
    assert facts["job"]["sweep"] == {"id": before.id, "dir": str(folder), "job": 0}
    order(tmp_path)
    start("train", *words, "sweep=resume", status=0)
    record = sweep_in(tmp_path)[1]
    assert [job.final_return for job in record.jobs] == [10.0 * seed for seed in range(1, 8)]
    assert resumes(tmp_path) == [[False, True], [False], [False], [False, True], [False], [False], [False]]
    same_run = [old.run_id == new.run_id for old, new in zip(before.jobs, record.jobs, strict=False)]
    assert same_run == [True, False, False, True, True, True]  # a run without a record cannot be resumed


@pytest.mark.parametrize(("launcher", "number"), [("joblib", signal.SIGINT), ("basic", signal.SIGTERM)])
@pytest.mark.long
def test_a_signal_reaches_running_jobs_once_and_ends_the_sweep(
    start: Start, tmp_path: Path, launcher: str, number: signal.Signals
) -> None:
    expected = 1 if launcher == "basic" else 2
    words = ["seed=90,91,92", f"hydra/launcher={launcher}", *["hydra.launcher.n_jobs=2"] * (expected - 1)]
    order(tmp_path, dict.fromkeys(range(90, 93), "wait"))
    with blocked():
        started = start("train", *words)
    started.until(lambda: bool(waiting(tmp_path, expected)))
    again = preflight([*words, "sweep=resume", f"runs_dir={tmp_path / 'runs'}"])
    with pytest.raises(ConfigError, match=f"is in use, by process {started.process.pid} on "):
        sweep.run_sweep(again, [])
    if number == signal.SIGINT:
        os.killpg(started.process.pid, number)  # as a terminal does: to every process of the group
    else:
        started.process.send_signal(number)
    started.end(128 + number)
    assert "Traceback" not in started.said
    assert statuses(tmp_path) == ["interrupted"] * expected
    assert sweep_in(tmp_path)[1].status == "interrupted"
    assert heard_in(tmp_path) == [[number]] * expected


@pytest.mark.long
def test_a_third_signal_ends_everything_at_once(start: Start, tmp_path: Path) -> None:
    order(tmp_path, {1: "ignore"})
    started = start("train", "seed=1,2", "hydra/launcher=basic")
    started.until(lambda: bool(waiting(tmp_path)))
    for _ in range(3):
        assert started.process.poll() is None
        started.process.send_signal(signal.SIGINT)
        time.sleep(0.5)
    started.end(130)
    until(lambda: not alive(waiting(tmp_path)[0]))
    assert statuses(tmp_path) == ["interrupted"]


@pytest.mark.parametrize("lost", ["supervisor", "launcher"])
def test_a_killed_process_of_a_sweep_leaves_no_run_behind(start: Start, tmp_path: Path, lost: str) -> None:
    words, running = ["seed=90,91,92", "hydra.launcher.n_jobs=2"], 2
    order(tmp_path, dict.fromkeys(range(90, 93), "wait"))
    started = start("train", *words)
    started.until(lambda: bool(waiting(tmp_path, running)))
    supervisor, pids = started.process.pid, waiting(tmp_path)
    (child,) = map(int, subprocess.check_output(["pgrep", "-P", str(supervisor)]).split())
    os.kill(supervisor if lost == "supervisor" else child, signal.SIGKILL)
    until(lambda: not any(map(alive, [child, *pids])))
    assert heard_in(tmp_path) == [[signal.SIGTERM]] * running
    if lost == "supervisor":
        assert statuses(tmp_path) == ["interrupted"] * running
        return
    started.end(1)
    assert statuses(tmp_path) == ["failed"] * running
    assert "the process that waited for its run is gone" in started.said
    order(tmp_path)
    start("train", *words, "sweep=resume", status=0)
    assert resumes(tmp_path) == [[False, True]] * running + [[False]]


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["basic", "joblib", "submitit_local"])
def test_after_a_kill_the_sweep_goes_on_elsewhere_with_any_launcher(
    start: Start, tmp_path: Path, launcher: str
) -> None:
    """With words in files of another folder. Each of its jobs has the environment of the single run."""
    files = {"experiment": "# @package _global_\nlog_every: 512", "sweep": "seed: 1,2"}
    for group, content in files.items():
        (tmp_path / "mine" / group).mkdir(parents=True)
        (tmp_path / "mine" / group / "tried.yaml").write_text(f"{content}\n")
    inherited = {"OPENBLAS_NUM_THREADS": "5", "CUDA_VISIBLE_DEVICES": "0"}
    tried = ["--config-dir=mine", "experiment=tried"]
    words = [*tried, "sweep=tried", "eval_episodes=3,3"]  # equal jobs are two jobs
    kill_sweep(start, tmp_path, *words, "hydra/launcher=basic", **inherited)
    before = sweep_in(tmp_path)[1]
    assert (before.status, statuses(tmp_path)) == ("running", ["finished"] * 2 + ["running"])
    (tmp_path / "runs").rename(tmp_path / "moved")
    typed = ["eval_episodes=3,3", "seed=1,2", *tried]
    again = [*typed, "sweep=resume", f"hydra/launcher={launcher}", "runs_dir=moved"]
    out = start("train", *again, status=0, **inherited).said
    assert f"sweep {before.id} goes on: 2 of 4 jobs had finished\n" in out
    assert out.endswith("      make report runs='moved/*/" + before.id.partition("sweep")[0] + "*'\n")
    assert not (tmp_path / "runs").exists()
    folder, record = sweep_in(tmp_path)
    assert (record.id, record.status) == (before.id, "finished")
    assert [command[4:] for command in record.commands] == [[*words, "hydra/launcher=basic"], again]
    # The numbers are those of the first order.
    assert [job.final_return for job in record.jobs] == [10.0, 10.0, 20.0, 20.0]
    assert [job.run_id for job in record.jobs][:3] == [job.run_id for job in before.jobs]
    assert len({job.run_id for job in record.jobs}) == 4
    assert resumes(tmp_path) == [[False], [False], [False, True], [False]]
    assert "ppo on CartPole: return 10, 20 (of 2 seeds)\n" in out
    assert (folder / "job_3.log").read_text() == "hello from seed 2\n"

    start("train", *tried, "seed=2", "eval_episodes=3", "run_dir=here", status=0, **inherited)
    (alone,) = starts_in(tmp_path / "here")
    for start_of_run in [facts for job in record.jobs for facts in starts_in(job.run(folder))]:
        assert start_of_run["environment"] == alone["environment"]
        assert start_of_run["signals"] == alone["signals"] == [[], []]
    moved = {"runs_dir": "moved", "run_dir": None}
    assert starts_in(record.jobs[3].run(folder))[0]["job"]["config"] == alone["job"]["config"] | moved
    assert len(list(tmp_path.glob("moved/*/*"))) == 5


@pytest.mark.long
def test_changed_code_stops_a_sweep_unless_it_is_accepted(fork: Path, start: Start, tmp_path: Path) -> None:
    words = ["seed=1,2,3", "hydra/launcher=basic"]
    kill_sweep(start, tmp_path, *words)
    folder, before = sweep_in(tmp_path)
    code, observer = fork / "runlab" / "rng.py", fork / "runlab" / "run" / "sinks" / "console.py"
    original, idle = code.read_text(), observer.read_text()
    try:
        code.write_text(f"{original}# something else\n")
        observer.write_text(f"{idle}# which is no code of a run\n")
        refused = start("train", *words, "sweep=resume", status=2).said
        assert f"sweep {folder.name} began with other code: runlab/rng.py\n" in refused
        assert all(text in refused for text in (f"refs/runs/{folder.name}", "accept=changes"))
        assert sweep_in(tmp_path)[1] == before
        start("train", *words, "sweep=resume", "accept=changes", status=0)
    finally:
        code.write_text(original)
        observer.write_text(idle)
    record = sweep_in(tmp_path)[1]
    assert record.changed == {"code": ["runlab/rng.py"]}
    tree, first_tree = record.snapshot.tree, before.snapshot.tree
    jobs = [starts_in(job.run(folder))[-1]["job"] for job in record.jobs]
    assert [json.loads(each["snapshot"])["tree"] for each in jobs] == [first_tree, tree, tree]
    assert [each["resume"] and each["accept"] for each in jobs] == [False, True, False]


def test_a_reader_that_has_read_enough_ends_no_job(fork: Path, tmp_path: Path) -> None:
    """As in `make train seed=1,2 | head -0`; on a closed terminal, writing fails with another error."""
    for console, words in ((os.pipe, []), (pty.openpty, ["sweep=resume"])):
        reader, writer = console()
        os.close(reader)
        command = [*program(fork, "train"), "seed=1,2", *plain([]), "hydra/launcher=joblib", *words]
        done = subprocess.run(command, cwd=tmp_path, env=environment(), stdout=writer, stderr=subprocess.PIPE)
        os.close(writer)
        assert (done.returncode, done.stderr) == (0, b"")
    assert statuses(tmp_path) == ["finished", "finished"]


def test_a_job_goes_on_when_a_scheduler_calls_it_again_and_starts_anew_if_its_configuration_has_changed(
    fork: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """submitit's handler leaves in the middle of the wait, and the job comes a second time."""
    worker = [sys.executable, "-P", str(fork / "runlab" / "launch" / "worker.py")]
    monkeypatch.setattr(process, "worker_command", lambda: worker)
    monkeypatch.setenv(process.STOP_VARIABLE, str(tmp_path / "stop"))
    monkeypatch.setenv(process.COMMAND_VARIABLE, json.dumps(dict(os.environ) | {"PYTHONPATH": str(fork)}))
    monkeypatch.chdir(tmp_path)
    facts: dict[str, Any] = {"words": [], "start_time": "", "versions": {}, "snapshot": GitRecord()}
    SweepRecord(id="20260101-000000-sweep-a-b", num_jobs=2, commands=[["train.py"]], **facts).write(tmp_path)

    def run_job(number: int, *words: str) -> float | None:
        register_schemas()
        with initialize_config_dir(str(CONF), version_base="1.3"):
            sweep_job.run_job([], [*words], number)
        return {job.job: job.final_return for job in SweepRecord.read(tmp_path).jobs}.get(number)

    def leave() -> None:
        until(lambda: bool(waiting(tmp_path)))
        os.kill(os.getpid(), signal.SIGUSR2)

    order(tmp_path, {2: "wait"})
    before = signal.signal(signal.SIGUSR2, lambda *_: sys.exit(144))
    threading.Thread(target=leave).start()
    with pytest.raises(SystemExit):
        run_job(1, "seed=2")
    signal.signal(signal.SIGUSR2, before)
    (job,) = SweepRecord.read(tmp_path).jobs
    # The run was asked to end and has been waited for: nothing else writes its folder when it comes again.
    assert (job.status, heard_in(tmp_path)) == ("interrupted", [[signal.SIGTERM]])
    order(tmp_path)
    assert [run_job(1, "seed=2"), run_job(1, "seed=2")] == [20.0, 20.0]
    assert [start["job"]["resume"] for start in starts_in(job.run(tmp_path))] == [False, True]
    assert run_job(1, "seed=2", "num_threads=2") == 20.0
    (job,) = SweepRecord.read(tmp_path).jobs
    (anew,) = starts_in(job.run(tmp_path))
    assert (job.status, anew["job"]["resume"], anew["job"]["config"]["num_threads"]) == ("finished", False, 2)
    # One that has rows and saved nothing begins anew, in another folder; without rows, in its own.
    for number, shown in enumerate([True, False], start=5):
        order(tmp_path, {4: "fail"})
        words = ["seed=4", "checkpoint_every=0"]
        assert run_job(number, *words) is None
        before_it = next(job for job in SweepRecord.read(tmp_path).jobs if job.job == number)
        first = before_it.run(tmp_path)
        assert first is not None
        if shown:
            (first / "metrics.jsonl").write_text("{}\n")
        order(tmp_path)
        assert [run_job(number, *words), run_job(number, *words)] == [40.0, 40.0]
        last = next(job for job in SweepRecord.read(tmp_path).jobs if job.job == number)
        assert [start["job"]["resume"] for start in starts_in(last.run(tmp_path))] == [False] + [True] * (
            not shown
        )
        assert (last.run_id == before_it.run_id, (first / "starts.jsonl").exists()) == (not shown, True)
    # A scheduler that starts late what was ended, or is done elsewhere since, starts nothing.
    (tmp_path / "stop").write_text("15\n")
    assert run_job(2, "seed=3") is None
    assert [job.job for job in SweepRecord.read(tmp_path).jobs] == [1, 5, 6]


@pytest.mark.parametrize("resumes", [False, True])
def test_a_sweep_that_cannot_be_recorded_leaves_nothing(
    resumes: bool, fork: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        assert git(fork, "for-each-ref", "refs/runs") != before  # it has its code already
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    plan = replace(preflight(["seed=1,2", f"runs_dir={tmp_path}"]), resume=resumes)
    if resumes:
        received_sweep(tmp_path)
    files = {path: path.read_text() for path in tmp_path.rglob("*.json")}
    monkeypatch.setattr(sweep, "PROJECT", fork)
    monkeypatch.setattr(SweepRecord, "write", full)
    before = git(fork, "for-each-ref", "refs/runs")
    with pytest.raises(RunError, match="No space left on device; nothing was started"):
        sweep.run_sweep(plan, [])
    assert git(fork, "for-each-ref", "refs/runs") == before
    assert {path: path.read_text() for path in tmp_path.rglob("*.json")} == files
    assert len(list((tmp_path / "sweeps").iterdir())) == resumes


def test_a_sweep_says_that_its_code_is_not_recorded_and_that_its_launcher_cannot_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sweep, "PROJECT", tmp_path)  # in no repository
    refused = BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    monkeypatch.setattr(os, "fork", Mock(side_effect=refused))  # nothing is started
    assert sweep.run_sweep(preflight(["seed=1,2", f"runs_dir={tmp_path}"]), []) == 1
    shown = capsys.readouterr()
    assert f"code not recorded: {tmp_path} is in no git repository: " in shown.err
    assert f"the launcher cannot be started: {refused.strerror}; `ulimit -u`" in shown.out
    (folder,) = (tmp_path / "sweeps").iterdir()
    assert SweepRecord.read(folder).status == "failed"


@pytest.mark.parametrize("name", [paths.LOCK, "launcher.log", "job_0.log", "stop-1", "multirun.yaml"])
def test_a_received_sweep_writes_through_no_link(name: str, tmp_path: Path) -> None:
    plan, folder = received_sweep(tmp_path)
    outside = tmp_path / "outside"
    outside.write_text("kept")
    (folder / name).symlink_to(outside)
    with pytest.raises(ConfigError, match=f"{name} is a link to {outside}"):
        sweep.run_sweep(plan, [])
    assert outside.read_text() == "kept"


@pytest.mark.parametrize("name", ["../../../x-sweep-y", "/tmp/x-sweep-y", "", "-x"])
def test_the_id_of_a_received_sweep_is_no_path(name: str, tmp_path: Path) -> None:
    plan, _ = received_sweep(tmp_path, name)
    with pytest.raises(ConfigError, match=r"at `\$.id`"):
        sweep.run_sweep(plan, [])
    assert [*tmp_path.iterdir()] == [tmp_path / "sweeps"]


def test_a_finished_sweep_is_left_alone_and_other_words_are_no_sweep_that_is_started_by_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, folder = received_sweep(tmp_path)
    replace(SweepRecord.read(folder), status="finished").write(folder)
    text = (folder / paths.SWEEP_INDEX).read_bytes()
    assert sweep.run_sweep(plan, []) == 0
    assert "every job has finished already" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=f"with these overrides; the last one is {folder}/sweep.json"):
        sweep.run_sweep(replace(plan, words=["seed=1,2,3"]), [])
    assert (folder / paths.SWEEP_INDEX).read_bytes() == text
    assert [*tmp_path.iterdir()] == [tmp_path / "sweeps"]


def received_sweep(runs_dir: Path, name: str | None = None) -> tuple[Plan, Path]:
    """A sweep that somebody else has begun, and the checked command that goes on with it."""
    plan = replace(preflight(["seed=1,2", f"runs_dir={runs_dir}"]), resume=True)
    folder = runs_dir / "sweeps" / f"1-sweep-{sweep_job.digest(sorted(plan.words))}-1"
    folder.mkdir(parents=True)
    facts: dict[str, Any] = {"start_time": "", "versions": {}, "snapshot": GitRecord()}
    record = SweepRecord(
        id=folder.name if name is None else name, words=plan.words, num_jobs=2, commands=[], **facts
    )
    record.write(folder)
    return plan, folder
