"""Sweeps: jobs are single runs in fresh processes, signals end them well, and `sweep=resume` goes on.

Most tests run in a copy of the project whose `rltemplate/train.py` is replaced by a worker that does what
the file `orders.json` says for its seed; the last one uses the real one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import SHRUNK, alive, copy_project, git

from rltemplate.config.cli.preflight import preflight
from rltemplate.config.schema import Config
from rltemplate.launch import sweep_job
from rltemplate.launch.process import INHERITED_VARIABLE, SESSION_VARIABLE, SWEEP_VARIABLE
from rltemplate.launch.sweep import find_sweep
from rltemplate.run.git.snapshot import GitRecord
from rltemplate.run.sweep_record import SweepRecord
from rltemplate.types import ConfigError

WORKER = """
import json, os, signal, sys, time
from pathlib import Path
environment = {name: text for name, text in os.environ.items() if name != "RLTEMPLATE_JOB"}
from rltemplate.config.loading import from_dict, to_yaml
from rltemplate.run.job import Job
from rltemplate.run.lock import RunLock

job = Job.from_environment()
seed = job.config["seed"]
orders = Path("orders.json")
order = json.loads(orders.read_text()).get(str(seed)) if orders.exists() else None
if order == "refuse":
    sys.exit(2)
folder = Path(job.run_dir)
folder.mkdir(parents=True, exist_ok=job.resume)
if order == "die at once":
    os.kill(os.getpid(), signal.SIGKILL)
lock = RunLock(folder)
lock.acquire()
(folder / "config.yaml").write_text(to_yaml(from_dict(job.config)))
ignored = [n for n in (2, 15) if signal.getsignal(n) is signal.SIG_IGN]
blocked = [int(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, [])]
facts = {"job": json.loads(job.to_json()), "environment": environment, "children": dict(os.environ),
         "code": __file__, "signals": [ignored, blocked], "pid": os.getpid()}
with (folder / "starts.jsonl").open("a") as file:
    file.write(json.dumps(facts) + "\\n")
print(f"hello from seed {seed}", flush=True)

def write(status):
    record = {"schema": 1, "id": job.run_id, "status": status, "final_metrics": {"eval/return": 10.0 * seed}}
    (folder / "record.json").write_text(json.dumps(record))

write("running")
if order in ("wait", "ignore"):
    heard = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda n, _: heard.append(n))
    (folder / "ready").touch()
    while not heard or order == "ignore":
        time.sleep(0.01)
    time.sleep(0.3)  # a second copy of the signal would arrive by now
    (folder / "heard").write_text(json.dumps(heard))
    write("interrupted")
    sys.exit(128 + heard[0])
if order == "fail":
    write("failed")
    sys.exit(1)
if order == "end early":
    sys.exit(0)
write("finished")
if order == "die at the end":
    os.kill(os.getppid(), signal.SIGKILL)  # which would have written that it has finished
sys.exit(0)
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("project") / "copy"
    copy_project(copy)
    (copy / "rltemplate" / "train.py").write_text(WORKER)
    git(copy, "commit", "-qam", "a worker")
    return copy


STARTED: list[int] = []


@pytest.fixture(autouse=True)
def leave_nothing_running() -> Iterator[None]:
    """Kill what a failed test has left behind: launchers and runs stay in the session of their command."""
    yield
    while STARTED:
        kill_session(STARTED.pop())


def kill_session(leader: int) -> list[int]:
    """Kill every process of the session and return those that there were."""
    listed = subprocess.check_output(["ps", "-A", "-o", "pid="], text=True).split()
    found = []
    for pid in map(int, listed):
        with contextlib.suppress(ProcessLookupError, PermissionError):  # gone, or somebody else's
            if os.getsid(pid) == leader:
                os.kill(pid, signal.SIGKILL)
                found.append(pid)
    return found


def start(project: Path, cwd: Path, *words: str, **environment: str) -> subprocess.Popen[str]:
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    process = subprocess.Popen(
        [sys.executable, str(project / "scripts" / "train.py"), *words],
        cwd=cwd,
        env=clean | environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    STARTED.append(process.pid)
    return process


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def train(project: Path, cwd: Path, *words: str, **environment: str) -> tuple[int, str, str]:
    return finish(start(project, cwd, *words, **environment))


def order(cwd: Path, **orders: str) -> None:
    """Tell runs what to do from now on, by seed."""
    (cwd / "orders.json").write_text(json.dumps({name.lstrip("s"): text for name, text in orders.items()}))


def sweep_in(cwd: Path, runs_dir: str = "runs") -> tuple[Path, SweepRecord]:
    """The folder of the only sweep, and its record."""
    (path,) = cwd.glob(f"{runs_dir}/sweeps/*/sweep.json")
    return path.parent, SweepRecord.read(path.parent)


def statuses(cwd: Path) -> list[str]:
    return [job.status for job in sweep_in(cwd)[1].jobs]


def starts_in(run_dir: Path | None) -> list[dict[str, Any]]:
    """Facts about each start of a run."""
    assert run_dir is not None
    return [json.loads(line) for line in (run_dir / "starts.jsonl").read_text().splitlines()]


def resumes(cwd: Path) -> list[list[bool]]:
    """For each job of the only sweep, whether each start of its run was to go on with it."""
    folder, record = sweep_in(cwd)
    return [[start["job"]["resume"] for start in starts_in(job.run(folder))] for job in record.jobs]


def until(condition: Callable[[], bool], process: subprocess.Popen[str] | None = None) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.005)


def wait_for_runs(process: subprocess.Popen[str], cwd: Path, number: int = 1) -> None:
    """Until so many runs wait for a signal."""
    until(lambda: len(list(cwd.glob("runs/*/*/ready"))) >= number, process)


def heard_in(cwd: Path) -> list[list[int]]:
    return [json.loads(path.read_text()) for path in cwd.glob("runs/*/*/heard")]


def killed(project: Path, cwd: Path, *words: str) -> None:
    """Start a sweep whose run of seed 2 waits, and kill every process of it then."""
    order(cwd, s2="wait")
    process = start(project, cwd, *words)
    wait_for_runs(process, cwd)
    assert len(kill_session(process.pid)) >= 3
    finish(process)
    order(cwd)


# --- Single runs -----------------------------------------------------------------------------------------


def test_a_single_run_is_told_everything_and_writes_nothing_else(project: Path, tmp_path: Path) -> None:
    (tmp_path / "rltemplate").mkdir()
    (tmp_path / "rltemplate" / "__init__.py").write_text("raise SystemExit('the wrong code')")
    (tmp_path / "my_envs.py").write_text(
        "import gymnasium\ngymnasium.register('mine/Walk-v0', 'gymnasium.envs.classic_control:CartPoleEnv')\n"
    )
    words = ["seed=5", "env=my_envs:mine/Walk-v0", "run_dir=here", "device=cpu"]
    status, out, err = train(project, tmp_path, *words, PYTHONPATH=str(tmp_path))
    assert (status, err) == (0, "")
    assert "hello from seed 5" in out
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {
        "here",
        "rltemplate",
        "my_envs.py",
    }
    (facts,) = starts_in(tmp_path / "here")
    job = facts["job"]
    assert job["config"]["env"]["id"] == "my_envs:mine/Walk-v0"
    assert job["run_dir"] == str(tmp_path / "here")
    assert job["command"][1:] == words
    assert (job["sweep"], job["overrides"][0]) == (None, "seed=5")
    assert "RLTEMPLATE_JOB" not in facts["children"]
    assert facts["code"] == str(project / "rltemplate" / "train.py")
    order(tmp_path, s1="fail", s2="die at once", s3="refuse")
    assert [train(project, tmp_path, f"seed={n}")[0] for n in (1, 2, 3)] == [1, -signal.SIGKILL, 2]


# --- Whole sweeps ----------------------------------------------------------------------------------------


def test_a_failing_job_stops_nobody_and_is_named(project: Path, tmp_path: Path) -> None:
    order(tmp_path, s13="fail", s14="die at once", s16="end early")
    status, out, err = train(project, tmp_path, "seed=1,13,14,2,16", "hydra/launcher=basic")
    assert status == 1, err
    assert "Traceback" not in err
    folder, record = sweep_in(tmp_path)
    assert statuses(tmp_path) == ["finished", "failed", "failed", "finished", "failed"]
    assert [job.exit_status for job in record.jobs] == [0, 1, 128 + signal.SIGKILL, 0, 0]
    assert [job.final_return for job in record.jobs] == [10.0, None, None, 20.0, None]
    assert [job.overrides for job in record.jobs] == [[f"seed={seed}"] for seed in (1, 13, 14, 2, 16)]
    assert (record.status, record.commands[0][1]) == ("failed", "seed=1,13,14,2,16")
    assert "#1 seed=13: failed, " in out
    assert "exit status 1, see " in out
    assert "its process ended with exit status 0 and its record is running" in out
    # One snapshot of the code for all jobs, which a ref keeps.
    tree = git(project, "rev-parse", f"refs/runs/{record.id}^{{tree}}").strip()
    assert tree == record.snapshot.tree
    (facts,) = starts_in(record.jobs[0].run(folder))
    assert GitRecord.from_json(facts["job"]["snapshot"]) == record.snapshot
    assert facts["job"]["sweep"] == {"id": record.id, "dir": str(folder), "job": 0}


def test_a_sweep_crosses_algorithms_and_environments_and_doubts_once(project: Path, tmp_path: Path) -> None:
    words = ["algo=ppo,sac", "env=Hopper-v5,MountainCarContinuous-v0", "total_env_steps=1000"]
    status, out, err = train(project, tmp_path, *words)
    assert status == 0, out
    assert err.count("this run collects random actions and learns nothing\n") == 1
    assert len(err.splitlines()) == 1, err
    record = sweep_in(tmp_path)[1]
    assert (record.num_jobs, len({job.run_id for job in record.jobs})) == (4, 4)
    folders = sorted(path.name for path in (tmp_path / "runs").iterdir())
    pairs = [f"{algo}-{env}" for algo in ("ppo", "sac") for env in ("Hopper", "MountainCarContinuous-v0")]
    assert [name for name in folders if "-" in name] == pairs
    order(tmp_path, s15="refuse")
    assert train(project, tmp_path, "-m", "seed=15")[0] == 2  # as a single run


INHERITED = {"OPENBLAS_NUM_THREADS": "5", "CUDA_VISIBLE_DEVICES": "0"}


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["basic", "joblib", "submitit_local"])
def test_a_job_has_the_environment_of_the_single_run(project: Path, tmp_path: Path, launcher: str) -> None:
    assert train(project, tmp_path, "seed=1", "run_dir=here", **INHERITED)[0] == 0
    status, out, err = train(project, tmp_path, "seed=1,2", f"hydra/launcher={launcher}", **INHERITED)
    assert status == 0, err + out
    folder, record = sweep_in(tmp_path)
    first, second, alone = (
        starts_in(run_dir)[0] for run_dir in (*(job.run(folder) for job in record.jobs), tmp_path / "here")
    )

    def relevant(facts: dict[str, Any]) -> dict[str, str]:
        names, own = ("PWD", "OLDPWD", "_", "SHLVL"), ("SUBMITIT", "LOKY", "JOBLIB", "PYTEST")
        return {k: v for k, v in facts["environment"].items() if k not in names and not k.startswith(own)}

    assert relevant(first) == relevant(second) == relevant(alone)
    assert first["signals"] == second["signals"] == alone["signals"] == [[], []]
    assert first["job"]["config"] == alone["job"]["config"] | {"run_dir": None}
    assert ("hello from seed 1" in out) == (launcher == "basic")
    if launcher != "basic":
        assert (folder / "job_0.log").read_text() == "hello from seed 1\n"


# --- Signals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("launcher", "number"),
    [
        ("basic", signal.SIGTERM),
        ("joblib", signal.SIGINT),
        pytest.param("basic", signal.SIGUSR1, marks=pytest.mark.long),
    ],
)
def test_a_signal_reaches_running_jobs_once_and_the_sweep_can_be_resumed(
    project: Path, tmp_path: Path, launcher: str, number: signal.Signals
) -> None:
    expected = 1 if launcher == "basic" else 2
    words = ["seed=90,91,92,93", f"hydra/launcher={launcher}"]
    words += ["hydra.launcher.n_jobs=2"] * (expected - 1)
    order(tmp_path, **{f"s{seed}": "wait" for seed in range(90, 94)})
    process = start(project, tmp_path, *words)
    wait_for_runs(process, tmp_path, expected)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does: to every process of the group
    else:
        process.send_signal(number)
    status, _, err = finish(process)
    sent = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
    assert status == 128 + sent, err
    assert "Traceback" not in err
    assert statuses(tmp_path) == ["interrupted"] * expected
    assert sweep_in(tmp_path)[1].status == "interrupted"
    assert heard_in(tmp_path) == [[sent]] * expected
    order(tmp_path)
    status, out, err = train(project, tmp_path, *words, "sweep=resume")
    assert status == 0, err + out
    assert f"goes on: {expected} interrupted, {4 - expected} not started" in out
    assert resumes(tmp_path) == [[False, True]] * expected + [[False]] * (4 - expected)


@pytest.mark.long
def test_a_third_signal_ends_everything_at_once(project: Path, tmp_path: Path) -> None:
    order(tmp_path, s1="ignore")
    process = start(project, tmp_path, "seed=1,2", "hydra/launcher=basic")
    wait_for_runs(process, tmp_path)
    ((facts,),) = [starts_in(path.parent) for path in tmp_path.glob("runs/*/*/ready")]
    for _ in range(3):
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
    assert finish(process)[0] == 130
    until(lambda: not alive(facts["pid"]))
    assert statuses(tmp_path) == ["interrupted"]


@pytest.mark.parametrize("launcher", ["basic", pytest.param("joblib", marks=pytest.mark.long)])
def test_a_killed_supervisor_leaves_no_run_unattended(project: Path, tmp_path: Path, launcher: str) -> None:
    more = ["hydra.launcher.n_jobs=2"] if launcher == "joblib" else []
    running = 1 + len(more)
    order(tmp_path, **{f"s{seed}": "wait" for seed in range(90, 94)})
    process = start(project, tmp_path, "seed=90,91,92,93", f"hydra/launcher={launcher}", *more)
    wait_for_runs(process, tmp_path, running)
    os.kill(process.pid, signal.SIGKILL)
    until(lambda: set(statuses(tmp_path)) == {"interrupted"})
    assert heard_in(tmp_path) == [[signal.SIGTERM]] * running
    with (sweep_in(tmp_path)[0] / ".lock").open() as lock:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:  # the launcher, which has the lock too, ends by itself
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            time.sleep(0.05)
    pytest.fail("the launcher goes on")


# --- Going on --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "launcher",
    ["basic", *(pytest.param(name, marks=pytest.mark.long) for name in ("joblib", "submitit_local"))],
)
def test_after_a_kill_the_sweep_goes_on_with_any_launcher(
    project: Path, tmp_path: Path, launcher: str
) -> None:
    killed(project, tmp_path, "seed=1,2,3", "hydra/launcher=basic")
    before = sweep_in(tmp_path)[1]
    assert (before.status, statuses(tmp_path)) == ("running", ["finished", "running"])
    words = ["sweep=resume", f"hydra/launcher={launcher}", "seed=1,2,3"]
    status, out, err = train(project, tmp_path, *words)
    assert status == 0, err + out
    assert "goes on: 1 finished, 1 failed, 1 not started" in out
    folder, record = sweep_in(tmp_path)
    assert (record.id, record.status) == (before.id, "finished")
    assert [command[1:] for command in record.commands] == [["seed=1,2,3", "hydra/launcher=basic"], words]
    assert [job.final_return for job in record.jobs] == [10.0, 20.0, 30.0]
    assert [job.run_id for job in record.jobs][:2] == [job.run_id for job in before.jobs]
    assert resumes(tmp_path) == [[False], [False, True], [False]]
    first, second = starts_in(record.jobs[1].run(folder))
    own = ("SUBMITIT", "LOKY", "JOBLIB", "PYTEST")
    for told in (first, second):
        told["environment"] = {k: v for k, v in told["environment"].items() if not k.startswith(own)}
    assert second["environment"] == first["environment"]
    # A finished sweep is left alone, and other words are no sweep that is started by mistake.
    text = (folder / "sweep.json").read_bytes()
    status, out, err = train(project, tmp_path, "sweep=resume", "seed=1,2,3")
    assert (status, err, "every job has finished already" in out) == (0, "", True)
    assert (folder / "sweep.json").read_bytes() == text
    status, out, err = train(project, tmp_path, "sweep=resume", "seed=1,2")
    assert (status, out) == (2, "")
    assert f"the nearest is {folder.name}, which has seed=1,2,3 where this command has seed=1,2" in err
    assert len(list(tmp_path.glob("runs/*/*"))) == 4


def test_every_way_to_end_early_has_its_way_to_go_on(project: Path, tmp_path: Path) -> None:
    order(tmp_path, s1="fail", s2="refuse", s3="die at once", s4="die at the end")
    words = ["seed=1,2,3,4,5", "hydra/launcher=basic"]
    assert train(project, tmp_path, *words)[0] == 1  # the launcher is killed in the fourth job
    before = sweep_in(tmp_path)[1]
    assert statuses(tmp_path) == ["failed", "refused", "failed", "finished"]
    order(tmp_path)
    status, out, err = train(project, tmp_path, *words, "sweep=resume")
    assert status == 0, err + out
    assert "#3 seed=4: finished already" in out
    record = sweep_in(tmp_path)[1]
    assert [job.final_return for job in record.jobs] == [10.0, 20.0, 30.0, 40.0, 50.0]
    assert resumes(tmp_path) == [[False, True], [False], [False], [False], [False]]
    kept = [old.run_id == new.run_id for old, new in zip(before.jobs, record.jobs, strict=False)]
    assert kept == [True, False, False, True]  # a run that left no record has nothing to go on with


def test_a_sweep_goes_on_where_it_was_moved_to(project: Path, tmp_path: Path) -> None:
    words = ["eval_episodes=3,4", "seed=2,2"]  # equal jobs are two jobs
    killed(project, tmp_path, *words)
    (tmp_path / "runs").rename(tmp_path / "moved")
    status, out, err = train(project, tmp_path, "runs_dir=moved", "sweep=resume", *words[::-1])
    assert status == 0, err + out
    assert not (tmp_path / "runs").exists()
    record = sweep_in(tmp_path, "moved")[1]
    # The numbers are those of the first order.
    chosen = [[word for word in job.overrides if "dir" not in word] for job in record.jobs]
    assert [words[0] for words in chosen] == ["eval_episodes=3"] * 2 + ["eval_episodes=4"] * 2
    assert len({job.run_id for job in record.jobs}) == 4
    ended = [len(path.read_text().splitlines()) for path in tmp_path.glob("moved/*/*/starts.jsonl")]
    assert sorted(ended) == [1, 1, 1, 2]


def test_one_process_at_a_time_looks_after_a_sweep_and_a_run(project: Path, tmp_path: Path) -> None:
    order(tmp_path, s2="wait")
    words = ["seed=1,2,3", "hydra/launcher=basic"]
    process = start(project, tmp_path, *words)
    wait_for_runs(process, tmp_path)
    folder, _ = sweep_in(tmp_path)
    status, out, err = train(project, tmp_path, *words, "sweep=resume")
    assert (status, out) == (2, "")
    assert f"sweep {folder.name} is still running" in err
    (run_dir,) = tmp_path.glob("runs/*/*-seed2-*")
    (facts,) = starts_in(run_dir)
    os.kill(process.pid, signal.SIGSTOP)  # so that neither of the two can end the run
    (launcher,) = {int(pid) for pid in subprocess.check_output(["pgrep", "-P", str(process.pid)]).split()}
    os.kill(launcher, signal.SIGKILL)
    process.kill()
    process.wait()  # not for what it prints: the run can still write there
    status, out, err = train(
        project, tmp_path, *words, "sweep=resume"
    )  # the run is there without its launcher
    assert (status, statuses(tmp_path)) == (1, ["finished", "refused", "finished"])
    assert f"{run_dir} is in use, by process {facts['pid']}" in out
    os.kill(facts["pid"], signal.SIGTERM)
    until(lambda: not alive(facts["pid"]))
    order(tmp_path)
    status, out, err = train(project, tmp_path, *words, "sweep=resume")
    assert status == 0, err + out
    assert resumes(tmp_path) == [[False], [False, True], [False]]


def test_changed_code_and_configuration_stop_a_sweep_from_going_on(project: Path, tmp_path: Path) -> None:
    copy, cwd = tmp_path / "project", tmp_path / "cwd"
    shutil.copytree(project, copy)
    cwd.mkdir()
    words = ["seed=1,2,3", "hydra/launcher=basic", "sweep=resume"]
    killed(copy, cwd, *words[:2])
    folder, before = sweep_in(cwd)
    default = copy / "conf" / "config.yaml"
    text = default.read_text()
    default.write_text(text.replace("eval_episodes: 10", "eval_episodes: 11"))
    status, out, err = train(copy, cwd, *words, "accept=changes")
    assert (status, out) == (2, "")
    assert "eval_episodes=11: " in err
    assert "was started with 10" in err
    default.write_text(text)
    (copy / "README.md").write_text("Changes nothing.\n")
    changed = copy / "rltemplate" / "rng.py"
    changed.write_text(f"{changed.read_text()}# something else\n")
    status, out, err = train(copy, cwd, *words)
    assert (status, out) == (2, "")
    assert f"{folder.name}: the code changed since the sweep began: rltemplate/rng.py\n" in err
    assert f"refs/runs/{folder.name}" in err
    assert "accept=changes" in err
    assert sweep_in(cwd)[1] == before
    status, out, err = train(copy, cwd, *words, "accept=changes")
    assert status == 0, err + out
    record = sweep_in(cwd)[1]
    assert record.changed == {"code": ["rltemplate/rng.py"]}
    tree, kept = record.snapshot.tree, before.snapshot.tree
    told = [starts_in(job.run(folder))[-1]["job"] for job in record.jobs]
    assert [json.loads(each["snapshot"])["tree"] for each in told] == [kept, tree, tree]
    assert [(each["resume"], each["accept"]) for each in told] == [
        (False, False),
        (True, True),
        (False, False),
    ]
    git(copy, "gc", "--quiet", "--prune=now")
    for each in (kept, tree):  # the code of each run can still be had
        assert git(copy, "cat-file", "-t", f"{each}").strip() == "tree"


# --- One process, many calls -----------------------------------------------------------------------------


@pytest.fixture
def folder(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a sweep of two jobs, in a process of its launcher."""
    worker = [sys.executable, "-P", str(project / "rltemplate" / "train.py")]
    monkeypatch.setattr(sweep_job, "worker_command", lambda: worker)
    monkeypatch.setenv("PYTHONPATH", str(project))
    monkeypatch.setenv(SWEEP_VARIABLE, str(tmp_path))
    monkeypatch.setenv(SESSION_VARIABLE, "0")
    monkeypatch.setenv(INHERITED_VARIABLE, "{}")
    monkeypatch.chdir(tmp_path)
    record(tmp_path)
    return tmp_path


def record(folder: Path, *words: str) -> None:
    folder.mkdir(exist_ok=True, parents=True)
    SweepRecord(
        id="20260101-000000-sweep-aaaaaa",
        words=list(words),
        num_jobs=2,
        commands=[["train.py"]],
        start_time="",
        versions={},
        snapshot=GitRecord(),
    ).write(folder)


def run_job(number: int, seed: int) -> float | None:
    def compose() -> Config:
        return preflight([f"seed={seed}"]).configs[0]

    return sweep_job.run_job(compose, "CartPole", [f"seed={seed}"], number, False)


@contextlib.contextmanager
def taken_away(folder: Path, raised: BaseException) -> Iterator[None]:
    """A scheduler that sends a signal when the run is there, and a handler that raises."""

    def leave(*_: object) -> None:
        raise raised

    script = (
        "import os, signal, time\nfrom pathlib import Path\n"
        f"while not list(Path({str(folder)!r}).glob('runs/*/*/ready')): time.sleep(0.01)\n"
        f"os.kill({os.getpid()}, signal.SIGUSR2)"
    )
    before = signal.signal(signal.SIGUSR2, leave)
    scheduler = subprocess.Popen([sys.executable, "-c", script])
    try:
        yield
    finally:
        scheduler.wait()
        signal.signal(signal.SIGUSR2, before)


def test_a_job_that_a_scheduler_calls_again_goes_on(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """submitit's handler leaves in the middle of the wait, and the job comes a second time."""
    order(folder, s2="wait", s3="wait")
    with taken_away(folder, SystemExit(144)), pytest.raises(SystemExit):
        run_job(1, 2)
    (job,) = SweepRecord.read(folder).jobs
    # The run was asked to end and has been waited for: nothing else writes its folder when it comes again.
    assert job.status == "interrupted"
    assert heard_in(folder) == [[signal.SIGTERM]]
    order(folder, s3="wait")
    assert [run_job(1, 2), run_job(1, 2)] == [20.0, 20.0]
    assert "#1 seed=2: finished already" in capsys.readouterr().out
    assert [start["job"]["resume"] for start in starts_in(job.run(folder))] == [False, True]
    for path in folder.glob("runs/*/*/ready"):
        path.unlink()
    with taken_away(folder, RuntimeError("timed out too many times")):  # the scheduler gives it up
        assert run_job(2, 3) is None
    assert "timed out too many times" in capsys.readouterr().err
    assert run_job(0, 1) == 10.0
    assert [job.status for job in SweepRecord.read(folder).jobs] == ["finished", "finished", "interrupted"]
    # A scheduler that starts late what was ended, or is done elsewhere since, starts nothing.
    (folder / "stop-0").write_text("15\n")
    assert run_job(3, 4) is None
    assert len(SweepRecord.read(folder).jobs) == 3
    # A process that cannot start is a job that has failed.
    (folder / "stop-0").unlink()
    monkeypatch.setattr(sweep_job, "worker_command", lambda: [str(folder / "no_such_interpreter")])
    assert run_job(3, 4) is None
    assert "no_such_interpreter" in f"{SweepRecord.read(folder).jobs[3].problem}"


def test_a_sweep_is_found_by_its_words_in_any_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both, other = ["seed=1,2", "env=Hopper"], ["seed=1,2,3", "env=Hopper"]
    for name, words in {"a1": both, "a2": both, "a3": other}.items():
        record(tmp_path / name, *words)
    (tmp_path / "b4").mkdir()
    (tmp_path / "b4" / "sweep.json").write_text('{"id": "of an earlier version"}')
    assert find_sweep(tmp_path, "resume", both[::-1]).name == "a2"
    assert "2 sweeps have these words; a2 goes on" in capsys.readouterr().err
    assert find_sweep(tmp_path, "resume", other).name == "a3"
    assert find_sweep(tmp_path, "a1", both).name == "a1"
    for text, words, expected in (
        (
            "resume",
            ["seed=1,2,4", "env=Hopper"],
            "a3, which has seed=1,2,3 where this command has seed=1,2,4",
        ),
        ("a1", other, "a1, which has seed=1,2 where this command has seed=1,2,3"),
        ("zz", both, "no such sweep in .*; allowed: resume, or"),
    ):
        with pytest.raises(ConfigError, match=f"(?s)sweep={text}: .*{expected}"):
            find_sweep(tmp_path, text, words)


# --- The real one ----------------------------------------------------------------------------------------

SMALL = [*SHRUNK["ppo"], "total_env_steps=960", "checkpoint_every=320", "logger=none", "eval_every=640"]
SMALL += ["env=Pendulum", "env.max_episode_steps=20", "eval_episodes=1", "video_every=0", "log_every=320"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("first", "second"), [("basic", "joblib"), ("joblib", "basic"), ("basic", "submitit_local")]
)
def test_a_sweep_that_was_killed_has_the_results_of_single_runs(
    fork: Path, tmp_path: Path, first: str, second: str
) -> None:
    single, cwd = tmp_path / "single", tmp_path / "sweep"
    for path in (single, cwd):
        path.mkdir()
    for seed in (1, 2):
        assert train(fork, single, *SMALL, f"seed={seed}", f"run_dir={seed}")[0] == 0
    straight = [(single / f"{seed}" / "trace.jsonl").read_bytes() for seed in (1, 2)]
    assert straight[0] != straight[1]
    process = start(fork, cwd, *SMALL, "seed=1,2", f"hydra/launcher={first}")

    def in_the_middle() -> bool:
        """Beyond the first checkpoint of the second run, and far from its end."""
        found = list(cwd.glob("runs/*/*-seed2-*/trace.jsonl"))
        saved = list(cwd.glob("runs/*/*-seed2-*/checkpoints/step_*.json"))
        return bool(found and saved) and found[0].read_bytes().count(b"\n") >= 14

    until(in_the_middle, process)
    kill_session(process.pid)
    finish(process)
    assert statuses(cwd)[1] == "running"
    status, out, err = train(fork, cwd, *SMALL, "seed=1,2", "sweep=resume", f"hydra/launcher={second}")
    assert status == 0, err + out
    folder, sweep = sweep_in(cwd)
    run_dirs = [job.run(folder) or folder for job in sweep.jobs]
    assert [(run_dir / "trace.jsonl").read_bytes() for run_dir in run_dirs] == straight
    (again,) = json.loads((run_dirs[1] / "record.json").read_text())["resumed"]
    assert again["env_steps"] > 0  # not merely run again
