"""Sweeps: jobs are single runs in fresh processes, signals end them well, and `sweep=resume` goes on.

Most tests run in a copy of the project whose `rltemplate/train.py` is replaced by a worker that does what
the file `orders.json` says for its seed; the last one uses the real one.
"""

from __future__ import annotations

import contextlib
import errno
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
from rltemplate.launch import sweep
from rltemplate.launch.process import COMMAND_VARIABLE, STOP_VARIABLE
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
    """For each job of the only sweep and each start of its run, True if the run was resumed."""
    folder, record = sweep_in(cwd)
    return [[start["job"]["resume"] for start in starts_in(job.run(folder))] for job in record.jobs]


def until(condition: Callable[[], bool], process: subprocess.Popen[str] | None = None) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.005)


def wait_for_runs(process: subprocess.Popen[str], cwd: Path, number: int = 1) -> list[int]:
    """The processes of so many runs, when all of them wait for a signal."""
    until(lambda: len(list(cwd.glob("runs/*/*/ready"))) >= number, process)
    return [starts_in(path.parent)[-1]["pid"] for path in cwd.glob("runs/*/*/ready")]


def heard_in(cwd: Path) -> list[list[int]]:
    return [json.loads(path.read_text()) for path in cwd.glob("runs/*/*/heard")]


def killed(project: Path, cwd: Path, *words: str) -> None:
    """Start a sweep whose run of seed 2 waits, and kill every process of it then."""
    order(cwd, s2="wait")
    for path in cwd.glob("runs/*/*/ready"):
        path.unlink()
    process = start(project, cwd, *words)
    wait_for_runs(process, cwd)
    assert len(kill_session(process.pid)) >= 3
    finish(process)
    order(cwd)


# --- Jobs ------------------------------------------------------------------------------------------------


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
    there = {path.name for path in tmp_path.iterdir()} - {"__pycache__"}
    assert there == {"here", "rltemplate", "my_envs.py"}
    (facts,) = starts_in(tmp_path / "here")
    job = facts["job"]
    assert job["config"]["env"]["id"] == "my_envs:mine/Walk-v0"
    assert (job["run_dir"], job["command"][1:]) == (str(tmp_path / "here"), words)
    assert (job["sweep"], job["overrides"][0]) == (None, "seed=5")
    assert "RLTEMPLATE_JOB" not in facts["children"]
    assert facts["code"] == str(project / "rltemplate" / "train.py")
    order(tmp_path, s1="fail", s2="die at once")
    assert [train(project, tmp_path, f"seed={n}")[0] for n in (1, 2)] == [1, -signal.SIGKILL]


def test_every_way_to_end_early_is_named_and_has_its_way_to_go_on(project: Path, tmp_path: Path) -> None:
    order(tmp_path, s1="fail", s2="refuse", s3="die at once", s4="end early", s6="die at the end")
    words = ["seed=1,2,3,4,5,6,7", "hydra/launcher=basic"]
    status, out, err = train(project, tmp_path, *words)  # its launcher is killed in the sixth job
    assert status == 1
    assert "Traceback" not in err
    folder, before = sweep_in(tmp_path)
    assert statuses(tmp_path) == ["failed", "refused", "failed", "failed", "finished", "finished"]
    assert [job.exit_status for job in before.jobs][:5] == [1, 2, 128 + signal.SIGKILL, 0, 0]
    assert [job.overrides for job in before.jobs] == [[f"seed={seed}"] for seed in range(1, 7)]
    assert (before.status, before.commands[0][1:]) == ("failed", words)
    assert "#0 seed=1: failed, " in out
    assert "exit status 1, see " in out
    # One snapshot of the code for all jobs, which a ref keeps.
    tree = git(project, "rev-parse", f"refs/runs/{before.id}^{{tree}}").strip()
    (facts,) = starts_in(before.jobs[0].run(folder))
    assert GitRecord.from_json(facts["job"]["snapshot"]) == before.snapshot
    assert before.snapshot.tree == tree
    assert facts["job"]["sweep"] == {"id": before.id, "dir": str(folder), "job": 0}
    order(tmp_path)
    status, out, err = train(project, tmp_path, *words, "sweep=resume")
    assert status == 0, err + out
    record = sweep_in(tmp_path)[1]
    assert [job.final_return for job in record.jobs] == [10.0 * seed for seed in range(1, 8)]
    assert resumes(tmp_path) == [[False, True], [False], [False], [False, True], [False], [False], [False]]
    kept = [old.run_id == new.run_id for old, new in zip(before.jobs, record.jobs, strict=False)]
    assert kept == [True, False, False, True, True, True]  # a run without a record cannot be resumed


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
    assert first["environment"] == second["environment"] == alone["environment"]
    assert first["signals"] == second["signals"] == alone["signals"] == [[], []]
    assert first["job"]["config"] == alone["job"]["config"] | {"run_dir": None}
    assert ("hello from seed 1" in out) == (launcher == "basic")
    if launcher != "basic":
        assert (folder / "job_0.log").read_text() == "hello from seed 1\n"


# --- Signals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("launcher", "number"),
    [
        ("joblib", signal.SIGINT),
        pytest.param("basic", signal.SIGTERM, marks=pytest.mark.long),
        pytest.param("basic", signal.SIGUSR1, marks=pytest.mark.long),
    ],
)
def test_a_signal_reaches_running_jobs_once_and_the_sweep_can_be_resumed(
    project: Path, tmp_path: Path, launcher: str, number: signal.Signals
) -> None:
    expected = 1 if launcher == "basic" else 2
    words = ["seed=90,91,92", f"hydra/launcher={launcher}", *["hydra.launcher.n_jobs=2"] * (expected - 1)]
    order(tmp_path, **{f"s{seed}": "wait" for seed in range(90, 93)})
    process = start(project, tmp_path, *words)
    wait_for_runs(process, tmp_path, expected)
    status, out, err = train(project, tmp_path, *words, "sweep=resume")
    assert (status, out) == (2, "")
    assert f"is in use, by process {process.pid} on " in err
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
    assert resumes(tmp_path) == [[False, True]] * expected + [[False]] * (3 - expected)


@pytest.mark.long
def test_a_third_signal_ends_everything_at_once(project: Path, tmp_path: Path) -> None:
    order(tmp_path, s1="ignore")
    process = start(project, tmp_path, "seed=1,2", "hydra/launcher=basic")
    (run,) = wait_for_runs(process, tmp_path)
    for _ in range(3):
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
    assert finish(process)[0] == 130
    until(lambda: not alive(run))
    assert statuses(tmp_path) == ["interrupted"]


@pytest.mark.parametrize("launcher", ["basic", pytest.param("joblib", marks=pytest.mark.long)])
@pytest.mark.parametrize("lost", ["supervisor", "launcher"])
def test_a_killed_process_of_a_sweep_leaves_no_run_behind(
    project: Path, tmp_path: Path, launcher: str, lost: str
) -> None:
    more = ["hydra.launcher.n_jobs=2"] if launcher == "joblib" else []
    words, running = ["seed=90,91,92,93", f"hydra/launcher={launcher}", *more], 1 + len(more)
    order(tmp_path, **{f"s{seed}": "wait" for seed in range(90, 94)})
    process = start(project, tmp_path, *words)
    pids = wait_for_runs(process, tmp_path, running)
    (launcher_pid,) = map(int, subprocess.check_output(["pgrep", "-P", str(process.pid)]).split())
    os.kill(process.pid if lost == "supervisor" else launcher_pid, signal.SIGKILL)
    until(lambda: not any(map(alive, [launcher_pid, *pids])))
    assert heard_in(tmp_path) == [[signal.SIGTERM]] * running
    if lost == "supervisor":
        assert statuses(tmp_path) == ["interrupted"] * running
        return
    status, out, err = finish(process)
    assert (status, statuses(tmp_path)) == (1, ["failed"] * running), err
    assert "the process that waited for its run is gone" in out
    order(tmp_path)
    assert train(project, tmp_path, *words, "sweep=resume")[0] == 0
    assert resumes(tmp_path) == [[False, True]] * running + [[False]] * (4 - running)


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
    folder, record = sweep_in(tmp_path)
    assert (record.id, record.status) == (before.id, "finished")
    assert [command[1:] for command in record.commands] == [["seed=1,2,3", "hydra/launcher=basic"], words]
    assert [job.final_return for job in record.jobs] == [10.0, 20.0, 30.0]
    assert [job.run_id for job in record.jobs][:2] == [job.run_id for job in before.jobs]
    assert resumes(tmp_path) == [[False], [False, True], [False]]
    first, second = starts_in(record.jobs[1].run(folder))
    assert second["environment"] == first["environment"]
    # A finished sweep is left alone, and other words are no sweep that is started by mistake.
    text = (folder / "sweep.json").read_bytes()
    status, out, err = train(project, tmp_path, "sweep=resume", "seed=1,2,3")
    assert (status, err, "every job has finished already" in out) == (0, "", True)
    assert (folder / "sweep.json").read_bytes() == text
    status, out, err = train(project, tmp_path, "sweep=resume", "seed=1,2")
    assert (status, out) == (2, "")
    assert f"was started with these words; the words of the last one are in {folder}/sweep.json" in err
    assert len(list(tmp_path.glob("runs/*/*"))) == 4


@pytest.mark.long
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


@pytest.mark.long
def test_changed_code_stops_a_sweep_and_a_changed_configuration_starts_its_jobs_anew(
    project: Path, tmp_path: Path
) -> None:
    copy, cwd = tmp_path / "project", tmp_path / "cwd"
    shutil.copytree(project, copy)
    cwd.mkdir()
    words = ["seed=1,2,3", "hydra/launcher=basic", "sweep=resume"]
    killed(copy, cwd, *words[:2])
    folder, before = sweep_in(cwd)
    changed = copy / "rltemplate" / "rng.py"
    changed.write_text(f"{changed.read_text()}# something else\n")
    status, out, err = train(copy, cwd, *words)
    assert (status, out) == (2, "")
    assert f"sweep {folder.name} began with other code: rltemplate/rng.py\n" in err
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
    assert [each["resume"] and each["accept"] for each in told] == [False, True, False]

    git(copy, "gc", "--quiet", "--prune=now")
    for each in (kept, tree):  # the code of each run can still be had
        assert git(copy, "cat-file", "-t", f"{each}").strip() == "tree"

    killed(copy, cwd, "seed=2,3", *words[1:2])
    default = copy / "conf" / "config.yaml"
    default.write_text(default.read_text().replace("num_threads: 1", "num_threads: 2"))
    status, out, err = train(copy, cwd, "seed=2,3", *words[1:])
    assert status == 0, err + out
    (folder,) = set((cwd / "runs" / "sweeps").iterdir()) - {folder}
    told = [starts_in(job.run(folder))[-1]["job"] for job in SweepRecord.read(folder).jobs]
    assert [(each["resume"], each["config"]["num_threads"]) for each in told] == [(False, 2)] * 2


# --- One process, many calls -----------------------------------------------------------------------------


@pytest.fixture
def folder(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a sweep of two jobs, in a process of its launcher."""
    worker = [sys.executable, "-P", str(project / "rltemplate" / "train.py")]
    monkeypatch.setattr(sweep, "worker_command", lambda: worker)
    monkeypatch.setenv(STOP_VARIABLE, str(tmp_path / "stop"))
    monkeypatch.setenv(COMMAND_VARIABLE, json.dumps(dict(os.environ) | {"PYTHONPATH": str(project)}))
    monkeypatch.chdir(tmp_path)
    facts: dict[str, Any] = {"words": [], "start_time": "", "versions": {}, "snapshot": GitRecord()}
    SweepRecord(id="20260101-000000-sweep-a-b", num_jobs=2, commands=[["train.py"]], **facts).write(tmp_path)
    return tmp_path


def run_job(number: int, seed: int) -> float | None:
    def compose() -> Config:
        return preflight([f"seed={seed}"]).configs[0]

    return sweep.run_job(compose, "CartPole", [f"seed={seed}"], number, False)


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


def test_a_job_that_a_scheduler_calls_again_goes_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert [start["job"]["resume"] for start in starts_in(job.run(folder))] == [False, True]
    for path in folder.glob("runs/*/*/ready"):
        path.unlink()
    with taken_away(folder, RuntimeError("timed out too many times")):  # the scheduler gives it up
        assert run_job(2, 3) is None
    assert "timed out too many times" in capsys.readouterr().err
    assert run_job(0, 1) == 10.0
    assert [job.status for job in SweepRecord.read(folder).jobs] == ["finished", "finished", "failed"]
    # A scheduler that starts late what was ended, or is done elsewhere since, starts nothing.
    (folder / "stop").write_text("15\n")
    assert run_job(3, 4) is None
    assert len(SweepRecord.read(folder).jobs) == 3


def test_a_sweep_is_found_by_its_words_in_any_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(range(4))
    monkeypatch.setattr(time, "strftime", lambda form: f"20260101-00000{next(times)}")
    both, other = ["seed=1,2", "env=Hopper"], ["seed=1,2,3", "env=Hopper"]
    first, second, third = (tmp_path / sweep.new_id(words) for words in (both, both[::-1], other))
    for path in (first, second, third):
        path.mkdir()
        (path / "sweep.json").touch()
    (tmp_path / sweep.new_id(both)).mkdir()  # killed before it had begun
    assert find_sweep(tmp_path, "resume", both[::-1]) == second
    assert find_sweep(tmp_path, "resume", other) == third
    assert find_sweep(tmp_path, first.name, both) == first
    for text, words in (("resume", ["seed=1,2,4", "env=Hopper"]), (first.name, other), ("zz", both)):
        with pytest.raises(ConfigError, match=f"sweep={text}: no such sweep in .* with these words"):
            find_sweep(tmp_path, text, words)


def test_a_full_disk_at_the_start_and_a_record_of_another_version_are_told(
    fork: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(sweep, "PROJECT", fork)
    plan = preflight(["seed=1,2", f"runs_dir={tmp_path}"])
    refs = git(fork, "for-each-ref", "refs/runs")  # other tests have left theirs
    monkeypatch.setattr(SweepRecord, "write", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        sweep.run_sweep(plan, [], lambda: None)
    assert list(tmp_path.rglob("*sweep-*")) == []
    assert git(fork, "for-each-ref", "refs/runs") == refs
    (tmp_path / "sweep.json").write_text('{"jobs_of_old": []}')
    with pytest.raises(ConfigError, match="of another version"):
        SweepRecord.read(tmp_path)


# --- The real one ----------------------------------------------------------------------------------------

SMALL = [*SHRUNK["ppo"], "total_env_steps=960", "checkpoint_every=320", "logger=none", "eval_every=640"]
SMALL += ["env=Pendulum", "env.max_episode_steps=20", "eval_episodes=1", "video_every=0", "log_every=320"]


@pytest.mark.long
def test_a_sweep_that_was_killed_has_the_results_of_single_runs(fork: Path, tmp_path: Path) -> None:
    cwd = tmp_path / "sweep"
    cwd.mkdir()
    for seed in (1, 2):
        assert train(fork, tmp_path, *SMALL, f"seed={seed}", f"run_dir={seed}")[0] == 0
    straight = [(tmp_path / f"{seed}" / "trace.jsonl").read_bytes() for seed in (1, 2)]
    assert straight[0] != straight[1]
    process = start(fork, cwd, *SMALL, "seed=1,2", "hydra/launcher=joblib")

    def in_the_middle() -> bool:
        """Beyond the first checkpoint of the second run, and far from its end."""
        found = list(cwd.glob("runs/*/*-seed2-*/trace.jsonl"))
        saved = list(cwd.glob("runs/*/*-seed2-*/checkpoints/step_*.json"))
        return bool(found and saved) and found[0].read_bytes().count(b"\n") >= 14

    until(in_the_middle, process)
    kill_session(process.pid)
    finish(process)
    assert statuses(cwd)[1] == "running"
    status, out, err = train(fork, cwd, *SMALL, "seed=1,2", "sweep=resume", "hydra/launcher=submitit_local")
    assert status == 0, err + out
    folder, found = sweep_in(cwd)
    run_dirs = [job.run(folder) or folder for job in found.jobs]
    assert [(run_dir / "trace.jsonl").read_bytes() for run_dir in run_dirs] == straight
    (again,) = json.loads((run_dirs[1] / "record.json").read_text())["resumed"]
    assert again["env_steps"] > 0  # not merely run again
