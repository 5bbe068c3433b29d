"""One run is one fresh process, and a job of a sweep is the single run of its configuration.

The commands run in a copy of the project whose `rltemplate/train.py` is replaced by a worker that reports
what it was given; the last test uses the real one.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import git, newest_state

from rltemplate.config.cli.preflight import preflight
from rltemplate.config.loading import from_dict, to_dict
from rltemplate.config.schema import Config
from rltemplate.launch import process
from rltemplate.launch.process import SWEEP_VARIABLE, check_folder, run_single, worker_environment
from rltemplate.launch.sweep import Sweep
from rltemplate.run.job import JOB_VARIABLE, Job, run_folder
from rltemplate.run.record import SweepMembership
from rltemplate.types import ConfigError

PROJECT = Path(__file__).resolve().parents[2]

# What a seed makes it do: 13 fails, 14 dies, 15 refuses, 16 ends early, 90 and above wait for a signal.
FAKE_WORKER = """
import json, os, signal, sys, time
from pathlib import Path
from rltemplate.run.job import Job

environment = dict(os.environ)
job = Job.from_environment()
seed = job.config["seed"]
if seed == 15:
    sys.exit(2)
folder = Path(job.run_dir)
folder.mkdir(parents=True)
environment.pop("RLTEMPLATE_JOB")
facts = {"job": json.loads(job.to_json()), "environment": environment, "children": dict(os.environ),
         "code": __file__, "blocked": [int(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
         "ignored": [n.name for n in signal.valid_signals()
                     if n in (2, 15) and signal.getsignal(n) is signal.SIG_IGN]}
(folder / "facts.json").write_text(json.dumps(facts))
print(f"hello from seed {seed}", flush=True)
heard = []
if seed >= 90:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda n, _: heard.append(n))
    (folder / "ready").touch()
    while not heard:
        time.sleep(0.01)
    time.sleep(0.3)  # a second copy of the signal would arrive by now
    (folder / "heard").write_text(json.dumps(heard))
    sys.exit(128 + heard[0])
if seed == 14:
    os.kill(os.getpid(), signal.SIGKILL)
status = {13: "failed", 16: "running"}.get(seed, "finished")
record = {"schema": 1, "status": status, "final_metrics": {"eval/return": 10.0 * seed}}
(folder / "record.json").write_text(json.dumps(record))
sys.exit(1 if seed == 13 else 0)
"""


@pytest.fixture(scope="module")
def project(fork: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("project") / "copy"
    shutil.copytree(fork, copy)
    (copy / "rltemplate" / "train.py").write_text(FAKE_WORKER)
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
    if Path("/proc/self").exists():
        listed = [path.name for path in Path("/proc").iterdir() if path.name.isdigit()]
    else:
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


def index_of(cwd: Path) -> tuple[Path, dict[str, Any]]:
    (path,) = cwd.glob("runs/sweeps/*/sweep.json")
    return path.parent, json.loads(path.read_text())


def facts_of(folder: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((folder / "facts.json").read_text())
    return facts


@functools.cache
def defaults() -> Config:
    return preflight([]).configs[0]


def config(**changes: Any) -> Config:
    return from_dict({**to_dict(defaults()), **changes})


def example_job(**changes: Any) -> Job:
    values: dict[str, Any] = {
        "config": to_dict(config()),
        "run_id": "id",
        "run_dir": "/somewhere/id",
        "command": ["scripts/train.py", "seed=1"],
        "overrides": ["seed=1"],
        "sweep": SweepMembership(id="s", dir="/somewhere/s", job=3),
        "snapshot": '{"tree": "0"}',
    }
    return Job(**{**values, **changes})


# ------------------------------------------------------------------------------------------- one process


@pytest.mark.parametrize("changes", [{}, {"sweep": None, "snapshot": None}])
def test_a_job_survives_the_environment_and_is_taken_out_of_it(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    job = example_job(**changes)
    monkeypatch.setenv(JOB_VARIABLE, job.to_json())
    assert Job.from_environment() == job
    assert JOB_VARIABLE not in os.environ
    with pytest.raises(ConfigError, match=r"scripts/train\.py"):
        Job.from_environment()


def test_equal_jobs_get_equal_environments_from_different_parents() -> None:
    own, job = config(num_threads=3), example_job()
    plain = worker_environment(job, own, {"PATH": "/bin"})
    disturbed = worker_environment(
        job,
        own,
        {
            "PATH": "/bin",
            "OMP_NUM_THREADS": "7",
            "PYTHONHASHSEED": "5",
            SWEEP_VARIABLE: "/s",
            "PYTHONPATH": str(PROJECT),
        },
    )
    assert disturbed == plain
    assert plain["OMP_NUM_THREADS"] == "3"
    assert plain["PYTHONHASHSEED"] == "0"
    other = worker_environment(job, config(num_threads=2), {"PATH": "/bin"})
    assert other != plain


def test_own_code_comes_first_and_is_named_once() -> None:
    base = {"PYTHONPATH": os.pathsep.join(["/other", str(PROJECT)])}
    environment = worker_environment(example_job(), config(), base)
    assert environment["PYTHONPATH"].split(os.pathsep) == [str(PROJECT), "/other"]


def test_folders_are_named_after_what_the_user_chose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_folder(config(), "id", "ALE/Pong-v5") == tmp_path / "runs" / "ppo-ALE-Pong-v5" / "id"
    assert run_folder(config(runs_dir="/x"), "id", "Hopper") == Path("/x/ppo-Hopper/id")
    assert run_folder(config(run_dir="a/b"), "id", "Hopper") == tmp_path / "a" / "b"


@pytest.mark.parametrize("key", ["run_dir", "runs_dir"])
def test_a_folder_that_is_a_file_is_refused(tmp_path: Path, key: str) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=key):
            check_folder(config(**{key: str(path)}))
    check_folder(config(**{key: str(tmp_path / "new" / "below")}))
    assert not (tmp_path / "new").exists()


def test_run_dir_may_exist_only_if_empty(tmp_path: Path) -> None:
    check_folder(config(run_dir=str(tmp_path)))
    (tmp_path / "something").touch()
    with pytest.raises(ConfigError, match="not empty"):
        check_folder(config(run_dir=str(tmp_path)))
    check_folder(config(runs_dir=str(tmp_path)))


def sweep_with(tmp_path: Path, snapshot: dict[str, Any]) -> Sweep:
    """A sweep whose index is as it was written at the start."""
    index = {"id": "s", "status": "running", "command": ["train.py"], "num_jobs": 1, "signal": None}
    index |= {"words": ["seed=1"], "resumed": []}
    (tmp_path / "sweep.json").write_text(json.dumps(index | {"snapshot": snapshot, "jobs": []}))
    return Sweep(tmp_path)


@pytest.mark.parametrize("number_of_paths", [1, 10_000])
def test_a_snapshot_of_any_size_reaches_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number_of_paths: int
) -> None:
    snapshot = {"tree": "0", "untracked": [f"folder/file_{n}" for n in range(number_of_paths)]}
    sweep = sweep_with(tmp_path, snapshot)
    report = "import sys, rltemplate.launch.process as l; sys.stdout.write(l.Job.from_environment().snapshot)"
    monkeypatch.setattr(process, "worker_command", lambda: [sys.executable, "-P", "-c", report])
    sweep.run(0, config(runs_dir=str(tmp_path)), ["seed=1"], env_name="CartPole", console=False)
    (job,) = sweep.read()["jobs"]
    assert (job["status"], job["exit_status"]) == ("failed", 0)  # no record says that it finished
    assert json.loads((tmp_path / "job_0.log").read_text()) == snapshot


def test_a_job_whose_process_cannot_start_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = sweep_with(tmp_path, {"tree": "0"})
    monkeypatch.setattr(process, "worker_command", lambda: [str(tmp_path / "no_such_interpreter")])
    assert sweep.run(0, config(), ["seed=1"], env_name="CartPole", console=True) is None
    (job,) = sweep.read()["jobs"]
    assert (job["status"], job["pid"]) == ("failed", None)
    assert sweep.finish(True) == 1
    assert "no_such_interpreter" in capsys.readouterr().out.replace("\n", "")
    with pytest.raises(ConfigError, match="could not be started"):
        run_single(config(runs_dir=str(tmp_path)), ["train.py"])


# ------------------------------------------------------------------------------------------- single runs


def test_a_single_run_is_told_everything_and_writes_nothing_else(project: Path, tmp_path: Path) -> None:
    status, out, err = train(project, tmp_path, "seed=5", "env=Hopper-v5", "run_dir=here", "device=cpu")
    assert (status, err) == (0, "")
    assert "hello from seed 5" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here"]
    facts = facts_of(tmp_path / "here")
    job = facts["job"]
    assert job["config"]["env"]["id"] == "Hopper-v5"
    assert job["run_dir"] == str(tmp_path / "here")
    assert job["command"][1:] == ["seed=5", "env=Hopper-v5", "run_dir=here", "device=cpu"]
    assert job["sweep"] is None
    assert "seed=5" in job["overrides"]
    assert JOB_VARIABLE not in facts["children"]


@pytest.mark.parametrize(("seed", "expected"), [(13, 1), (14, -signal.SIGKILL), (15, 2)])
def test_the_exit_status_is_that_of_the_run(project: Path, tmp_path: Path, seed: int, expected: int) -> None:
    assert train(project, tmp_path, f"seed={seed}")[0] == expected


def test_the_run_uses_the_code_beside_the_script(project: Path, tmp_path: Path) -> None:
    (tmp_path / "rltemplate").mkdir()
    (tmp_path / "rltemplate" / "__init__.py").write_text("raise SystemExit('the wrong code')")
    (tmp_path / "rltemplate" / "train.py").write_text("")
    status, _, err = train(project, tmp_path, "run_dir=here", PYTHONPATH=str(tmp_path))
    assert (status, err) == (0, "")
    assert facts_of(tmp_path / "here")["code"] == str(project / "rltemplate" / "train.py")


def test_a_module_of_the_projects_brings_its_environments(project: Path, tmp_path: Path) -> None:
    (project / "my_envs.py").write_text(
        "import gymnasium\ngymnasium.register('mine/Walk-v0', 'gymnasium.envs.classic_control:CartPoleEnv')\n"
    )
    status, _, err = train(project, tmp_path, "env=my_envs:mine/Walk-v0")
    assert (status, err) == (0, "")
    (run,) = (tmp_path / "runs").glob("ppo-my_envs-mine-Walk-v0/*")
    assert facts_of(run)["job"]["config"]["env"]["id"] == "my_envs:mine/Walk-v0"


# ------------------------------------------------------------------------------------------------ sweeps


def test_a_failing_job_stops_nobody_and_is_named(project: Path, tmp_path: Path) -> None:
    status, out, err = train(project, tmp_path, "seed=1,13,14,2,16")
    assert status == 1, err
    assert "Traceback" not in err
    folder, index = index_of(tmp_path)
    assert [job["status"] for job in index["jobs"]] == ["finished", "failed", "failed", "finished", "failed"]
    assert [job["exit_status"] for job in index["jobs"]] == [0, 1, 128 + signal.SIGKILL, 0, 0]
    assert [job["return"] for job in index["jobs"]] == [10.0, 130.0, None, 20.0, 160.0]
    assert [job["overrides"] for job in index["jobs"]] == [[f"seed={seed}"] for seed in (1, 13, 14, 2, 16)]
    assert index["status"] == "failed"
    assert index["command"][1:] == ["seed=1,13,14,2,16"]
    assert out.count("hello from seed") == 5
    assert "#1 seed=13: failed, exit status 1" in out
    assert "#4 seed=16: failed, its process ended with exit status 0 and its record is running" in out
    assert "#0 seed=1: failed" not in out

    moved = tmp_path / "moved"
    (tmp_path / "runs").rename(moved)
    for job in index["jobs"]:
        facts = facts_of(moved / "sweeps" / folder.name / job["run_dir"])
        assert facts["job"]["run_id"] == job["run_id"]
        assert facts["job"]["sweep"] == {"id": index["id"], "dir": str(folder), "job": job["job"]}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["moved"]


def test_a_sweep_of_refused_jobs_is_refused(project: Path, tmp_path: Path) -> None:
    assert train(project, tmp_path, "-m", "seed=15")[0] == 2


def test_a_doubt_about_a_sweep_is_said_once_and_stops_nothing(project: Path, tmp_path: Path) -> None:
    words = ["algo=sac", "env=Pendulum", "total_env_steps=1000", "seed=1,2"]
    status, _, err = train(project, tmp_path, *words)
    assert status == 0
    assert err == (
        "note: algo.learning_starts=1000 is not below total_env_steps=1000: "
        "this run collects random actions and learns nothing\n"
    )
    assert len(index_of(tmp_path)[1]["jobs"]) == 2


def test_a_sweep_crosses_algorithms_and_environments(project: Path, tmp_path: Path) -> None:
    status, _, err = train(project, tmp_path, "algo=ppo,sac", "env=Hopper-v5,MountainCarContinuous-v0")
    assert status == 0, err
    _, index = index_of(tmp_path)
    assert index["num_jobs"] == len(index["jobs"]) == 4
    assert len({job["run_id"] for job in index["jobs"]}) == 4
    folders = sorted(path.name for path in (tmp_path / "runs").iterdir())
    pairs = [f"{algo}-{env}" for algo in ("ppo", "sac") for env in ("Hopper", "MountainCarContinuous-v0")]
    assert folders == [*pairs, "sweeps"]


INHERITED = {"OPENBLAS_NUM_THREADS": "5", "CUDA_VISIBLE_DEVICES": "0"}


@pytest.fixture(scope="module")
def alone(project: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a single run was given, started from an environment that says more than the default."""
    cwd = tmp_path_factory.mktemp("single")
    assert train(project, cwd, "seed=1", "run_dir=here", **INHERITED)[0] == 0
    return facts_of(cwd / "here")


@pytest.mark.parametrize(
    "launcher", ["basic", "joblib", pytest.param("submitit_local", marks=pytest.mark.slow)]
)
def test_a_job_has_the_environment_of_the_single_run(
    project: Path, tmp_path: Path, alone: dict[str, Any], launcher: str
) -> None:
    status, out, err = train(project, tmp_path, "seed=1,2", f"hydra/launcher={launcher}", **INHERITED)
    assert status == 0, err + out
    folder, index = index_of(tmp_path)
    first, second = (facts_of(folder / job["run_dir"]) for job in index["jobs"])

    def relevant(facts: dict[str, Any]) -> dict[str, str]:
        names = ("PWD", "OLDPWD", "_", "SHLVL")
        ignored = ("SUBMITIT", "LOKY", "JOBLIB", "PYTEST")
        return {k: v for k, v in facts["environment"].items() if k not in names and not k.startswith(ignored)}

    assert relevant(first) == relevant(second) == relevant(alone)
    for facts in (first, second, alone):
        assert facts["blocked"] == facts["ignored"] == []
    assert first["job"]["config"] == alone["job"]["config"] | {"run_dir": None}
    assert first["job"]["config"] != second["job"]["config"]
    if launcher == "basic":
        assert "hello from seed 1" in out
    else:
        assert "hello" not in out
        assert (folder / "job_0.log").read_text() == "hello from seed 1\n"


def wait_for_runs(process: subprocess.Popen[str], cwd: Path, number: int) -> None:
    """Until so many runs wait for a signal."""
    deadline = time.monotonic() + 60
    while len(list(cwd.glob("runs/*/*/ready"))) < number:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("launcher", "number"),
    [
        ("basic", signal.SIGTERM),
        ("joblib", signal.SIGINT),
        pytest.param("basic", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("joblib", signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_a_signal_reaches_running_jobs_once_and_starts_no_others(
    project: Path, tmp_path: Path, launcher: str, number: signal.Signals
) -> None:
    words = ["seed=90,91,92,93", f"hydra/launcher={launcher}"]
    if launcher == "joblib":
        words.append("hydra.launcher.n_jobs=2")
    process = start(project, tmp_path, *words)
    expected = 1 if launcher == "basic" else 2
    wait_for_runs(process, tmp_path, expected)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does: to every process of the group
    else:
        process.send_signal(number)
    status, _, err = finish(process)
    assert status == 128 + number, err
    assert "Traceback" not in err
    _, index = index_of(tmp_path)
    statuses = sorted(job["status"] for job in index["jobs"])
    assert statuses == ["interrupted"] * expected + ["not started"] * (4 - expected)
    assert index["status"] == "interrupted"
    heard = [json.loads(path.read_text()) for path in tmp_path.glob("runs/*/*/heard")]
    assert heard == [[number]] * expected


@pytest.mark.parametrize("launcher", ["basic", pytest.param("joblib", marks=pytest.mark.long)])
def test_a_killed_supervisor_leaves_no_run_unattended(project: Path, tmp_path: Path, launcher: str) -> None:
    more = ["hydra.launcher.n_jobs=2"] if launcher == "joblib" else []
    process = start(project, tmp_path, "seed=90,91,92,93", f"hydra/launcher={launcher}", *more)
    running = 1 + len(more)
    wait_for_runs(process, tmp_path, running)
    os.kill(process.pid, signal.SIGKILL)
    folder, index = index_of(tmp_path)
    until = time.monotonic() + 30
    while any(job["status"] == "running" for job in index["jobs"]) and time.monotonic() < until:
        time.sleep(0.05)
        folder, index = index_of(tmp_path)
    assert sorted(job["status"] for job in index["jobs"] if job["run_id"]) == ["interrupted"] * running
    assert index["signal"] == signal.SIGTERM
    heard = [json.loads(path.read_text()) for path in tmp_path.glob("runs/*/*/heard")]
    assert heard == [[signal.SIGTERM]] * running
    with (folder / ".lock").open() as lock:
        while time.monotonic() < until:  # the launcher, which has the lock too, ends by itself
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                time.sleep(0.05)
    pytest.fail("the launcher goes on")


INTERRUPTED_AT_ONCE = """
import os, runpy, signal, sys

fork = os.fork


def forked():
    pid = fork()
    if pid:
        os.kill(os.getpid(), signal.SIGINT)
    return pid


os.fork = forked
sys.argv[:] = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_signal_that_comes_with_the_launcher_leaves_nothing_running(project: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", INTERRUPTED_AT_ONCE, str(project / "scripts" / "train.py"), "seed=90,91"]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    STARTED.append(process.pid)
    status, _, err = finish(process)
    assert status == 128 + signal.SIGINT, err
    _, index = index_of(tmp_path)
    assert index["status"] == "interrupted"
    assert {job["status"] for job in index["jobs"]} <= {"not started"}
    assert not list(tmp_path.glob("runs/*/*/ready"))
    assert kill_session(process.pid) == []


def test_the_code_is_recorded_once_before_the_first_job(project: Path, tmp_path: Path) -> None:
    status, _, err = train(project, tmp_path, "seed=1,2")
    assert status == 0, err
    folder, index = index_of(tmp_path)
    tree = git(project, "rev-parse", f"refs/runs/{index['id']}^{{tree}}").strip()
    assert tree == index["snapshot"]["tree"]
    for job in index["jobs"]:
        assert json.loads(facts_of(folder / job["run_dir"])["job"]["snapshot"]) == index["snapshot"]


def test_a_failed_test_leaves_no_process(project: Path, tmp_path: Path) -> None:
    process = start(project, tmp_path, "seed=90,91", "hydra/launcher=basic")
    wait_for_runs(process, tmp_path, 1)
    (job,) = index_of(tmp_path)[1]["jobs"]
    assert {process.pid, job["pid"]} < set(kill_session(process.pid))
    assert finish(process)[0] == -signal.SIGKILL


# ------------------------------------------------------------------------------------------ the real one


def _result(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if "time" not in k} for line in lines], _tensors(folder)


def _tensors(folder: Path) -> dict[str, list[Any]]:
    """Every tensor in the checkpoint, by its place."""
    import torch

    found: dict[str, list[Any]] = {}

    def walk(node: Any, place: str) -> None:
        if isinstance(node, torch.Tensor):
            found[place] = node.tolist()
        elif isinstance(node, dict):
            for key, value in node.items():
                walk(value, f"{place}/{key}")

    walk(newest_state(folder), "")
    assert found
    return found


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["basic", "joblib"])
def test_a_job_has_the_result_of_the_single_run(fork: Path, tmp_path: Path, launcher: str) -> None:
    words = ["debug=fast", "logger=none", "total_env_steps=1024", "video_every=0"]
    single, sweep = tmp_path / "single", tmp_path / "sweep"
    for cwd in (single, sweep):
        cwd.mkdir()
    status, out, err = train(fork, single, *words, "seed=2", "run_dir=here")
    assert status == 0, out + err
    status, out, err = train(fork, sweep, *words, "seed=1,2", f"hydra/launcher={launcher}")
    assert status == 0, out + err
    folder, index = index_of(sweep)
    other, same = (_result(folder / job["run_dir"]) for job in index["jobs"])
    alone = _result(single / "here")
    assert same == alone
    assert other[0] != alone[0]
    assert other[1] != alone[1]
