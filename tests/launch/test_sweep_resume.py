"""A sweep that ended early goes on: what has finished is kept, what has a run goes on, the rest is started.

Most tests run in a copy of the project whose `rltemplate/train.py` is replaced by a worker that does what
the file `orders.json` tells it to; the last ones use the real one.
"""

from __future__ import annotations

import contextlib
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
from conftest import SHRUNK, git
from test_sweep import (
    config,
    finish,
    kill_session,
    leave_nothing_running,  # noqa: F401 - a fixture
    start,
    train,
)

from rltemplate.config.cli.preflight import preflight
from rltemplate.config.loading import to_yaml
from rltemplate.launch import process
from rltemplate.launch.sweep import Sweep, find_sweep
from rltemplate.run.lock import RunLock
from rltemplate.types import ConfigError

# What the orders for a seed make a run do; without any it comes to its end.
WORKER = """
import json, os, signal, sys, time
from pathlib import Path
from rltemplate.config.loading import from_dict, to_yaml
from rltemplate.run.job import Job
from rltemplate.run.lock import RunLock
from rltemplate.run.record import RunRecord

environment = dict(os.environ)
environment.pop("RLTEMPLATE_JOB")
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
if job.resume:
    record = RunRecord.read(folder)
else:
    (folder / "config.yaml").write_text(to_yaml(from_dict(job.config)))
    record = RunRecord(id=job.run_id, status="running", overrides=job.overrides)
def finish(status, final_metrics):
    record.status, record.final_metrics = status, final_metrics
    record.write(folder)
finish("running", {})
facts = {"resume": job.resume, "accept": job.accept, "command": job.command, "overrides": job.overrides,
         "sweep": job.sweep.id, "job": job.sweep.job, "tree": json.loads(job.snapshot)["tree"],
         "environment": environment}
with (folder / "starts.jsonl").open("a") as file:
    file.write(json.dumps(facts) + "\\n")
if order == "wait":
    heard = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda n, _: heard.append(n))
    (folder / "ready").touch()
    while not heard:
        time.sleep(0.01)
    finish("interrupted", {})
    sys.exit(128 + heard[0])
if order == "fail":
    finish("failed", {})
    sys.exit(1)
finish("finished", {"eval/return": 10.0 * seed})
if order == "die at the end":
    os.kill(os.getppid(), signal.SIGKILL)  # who would have written down that it has finished
sys.exit(0)
"""


@pytest.fixture(scope="module")
def project(fork: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_worker(fork, tmp_path_factory.mktemp("project") / "copy")


def with_worker(fork: Path, copy: Path) -> Path:
    shutil.copytree(fork, copy)
    (copy / "rltemplate" / "train.py").write_text(WORKER)
    return copy


def order(cwd: Path, **orders: str) -> None:
    """What runs are to do from now on, by seed."""
    (cwd / "orders.json").write_text(json.dumps({name.lstrip("s"): text for name, text in orders.items()}))


def sweep_in(cwd: Path, runs_dir: str = "runs") -> tuple[Path, dict[str, Any]]:
    """The folder of the only sweep, and its index."""
    (path,) = cwd.glob(f"{runs_dir}/sweeps/*/sweep.json")
    return path.parent, json.loads(path.read_text())


def starts(folder: Path, job: dict[str, Any]) -> list[dict[str, Any]]:
    """What the processes of a job's run were told, one after the other."""
    path = folder / job["run_dir"] / "starts.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def resumes(cwd: Path) -> list[list[bool]]:
    """For each job of the only sweep, whether each start of its run was to go on with it."""
    folder, index = sweep_in(cwd)
    return [[start["resume"] for start in starts(folder, job)] for job in index["jobs"]]


def until(condition: Callable[[], bool], process: subprocess.Popen[str] | None = None) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.005)


def waiting(cwd: Path, number: int = 1) -> Callable[[], bool]:
    """Whether so many runs wait for a signal."""
    return lambda: len(list(cwd.glob("runs/*/*/ready"))) >= number


def killed(project: Path, cwd: Path, *words: str) -> None:
    """Start a sweep whose run of seed 2 waits, and kill every process of it then."""
    order(cwd, s2="wait")
    process = start(project, cwd, *words)
    until(waiting(cwd), process)
    assert len(kill_session(process.pid)) >= 3
    finish(process)


# ------------------------------------------------------------------------------------------- the words


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("seed=3 sweep=resume", ["sweep=resume: this is a single run", "make resume run=RUN"]),
        ("sweep=resume", ["this is a single run"]),
        ("seed=1,2 sweep=", ["expected resume"]),
        ("seed=1,2 sweep=resume sweep=resume", ["sweep is given twice"]),
        ("seed=1,2 sweep=resume accept=change", ["accept=change: did you mean changes?"]),
        ("seed=1,2 accept=changes", ["goes with sweep=resume"]),
        ("seed=1 accept=changes", ["make resume run=RUN"]),
    ],
)
def test_words_that_make_no_sense_are_refused(words: str, expected: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        preflight(words.split())
    assert all(text in str(error.value) for text in expected), error.value


def test_hydra_never_sees_how_the_sweep_is_carried_out() -> None:
    plain = preflight(["env=Hopper", "seed=1,2"])
    plan = preflight(["env=Hopper", "sweep=resume", "seed=1,2", "accept=changes"])
    assert plan.argv == plain.argv
    assert (plain.resume, plain.accept) == (None, False)
    assert (plan.resume, plan.accept) == ("resume", True)
    assert plan.words == plain.words == ["env=Hopper", "seed=1,2"]
    elsewhere = ["runs_dir=x", "env=Hopper", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "seed=1,2"]
    assert preflight(elsewhere).words == plain.words
    drawn = preflight(["env=Hopper", "seed=1,2", "hydra.sweeper.max_batch_size=1"])
    assert drawn.words != plain.words  # another sweeper tries other values


def known_sweeps(folder: Path, **words: list[str] | None) -> Path:
    for name, each in words.items():
        (folder / name).mkdir(parents=True)
        index = {"id": name} if each is None else {"id": name, "words": each}
        (folder / name / "sweep.json").write_text(json.dumps(index))
    return folder


def test_a_sweep_is_found_by_its_words_in_any_order(tmp_path: Path) -> None:
    both, other = ["seed=1,2", "env=Hopper"], ["seed=1,2,3", "env=Hopper"]
    folder = known_sweeps(tmp_path / "sweeps", a1=both, a2=both, a3=other, b4=None)
    (folder / "c5").mkdir()
    (folder / "c5" / "sweep.json").write_text("{ half of a fi")
    found, note = find_sweep(folder, "resume", both[::-1])
    assert found.name == "a2"
    assert note is not None
    assert "2 sweeps" in note
    assert "a2" in note
    assert find_sweep(folder, "resume", other) == (folder / "a3", None)
    assert find_sweep(folder, "a1", both) == (folder / "a1", None)
    assert find_sweep(folder, "3", other) == (folder / "a3", None)

    for text, words, expected in (
        ("resume", ["seed=1,2,4", "env=Hopper"], ["a3", "has seed=1,2,3 where this command has seed=1,2,4"]),
        ("resume", ["seed=1,2,3"], ["a3", "has env=Hopper where this command has nothing"]),
        ("a1", other, ["not that of a1", "has seed=1,2 where this command has seed=1,2,3"]),
        ("b4", both, ["did not record its words"]),
        ("a", both, ["in the ids of 3 sweeps", "as b4"]),
        ("resum", both, ["no such sweep", "did you mean resume?"]),
        ("zz", both, ["no such sweep; allowed: resume, or"]),
    ):
        with pytest.raises(ConfigError) as error:
            find_sweep(folder, text, words)
        assert all(part in str(error.value) for part in (f"sweep={text}", *expected)), error.value
    with pytest.raises(ConfigError, match="there is no sweep in"):
        find_sweep(tmp_path, "resume", both)


# ---------------------------------------------------------------------------------- one process, many calls

# Waits for a signal the first time, and finishes the second time.
PATIENT = """
import json, os, signal, sys, time
from pathlib import Path
from rltemplate.run.job import Job
job = Job.from_environment()
folder = Path(job.run_dir)
record = {"schema": 1, "id": job.run_id, "final_metrics": None}
with Path(job.sweep.dir, "starts").open("a") as file:
    file.write(f"{job.run_id} {job.resume}\\n")
if not job.resume and job.config["seed"] == 2:
    heard = []
    signal.signal(signal.SIGTERM, lambda n, _: heard.append(n))
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(os.environ["CONFIG_OF_2"])
    (folder / "record.json").write_text(json.dumps(record | {"status": "running"}))
    (folder / "ready").touch()
    while not heard:
        time.sleep(0.01)
    (folder / "record.json").write_text(json.dumps(record | {"status": "interrupted"}))
    sys.exit(143)
folder.mkdir(parents=True, exist_ok=True)
record |= {"status": "finished", "final_metrics": {"eval/return": 10.0 * job.config["seed"]}}
(folder / "record.json").write_text(json.dumps(record))
"""


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sweep:
    """A sweep whose runs are done by `PATIENT`."""
    index = {"id": "s", "status": "running", "command": ["train.py"], "words": ["seed=1,2"], "num_jobs": 2}
    index |= {"signal": None, "resumed": [], "snapshot": {}, "jobs": []}
    (tmp_path / "sweep.json").write_text(json.dumps(index))
    monkeypatch.setattr(process, "worker_command", lambda: [sys.executable, "-P", "-c", PATIENT])
    monkeypatch.setenv("CONFIG_OF_2", to_yaml(config(seed=2, runs_dir=str(tmp_path))))
    return Sweep(tmp_path)


def run_job(sweep: Sweep, number: int, seed: int) -> float | None:
    values = config(seed=seed, runs_dir=str(sweep.folder))
    return sweep.run(number, values, [f"seed={seed}"], env_name="CartPole", console=False)


def started(sweep: Sweep) -> list[list[str]]:
    """Run id and whether it went on, for every process that was started."""
    return [line.split() for line in (sweep.folder / "starts").read_text().splitlines()]


@contextlib.contextmanager
def taken_away(sweep: Sweep, raised: BaseException) -> Iterator[None]:
    """A scheduler that sends a signal when the run is there, and a handler that raises."""

    def leave(*_: object) -> None:
        raise raised

    script = (
        "import os, signal, time\nfrom pathlib import Path\n"
        f"while not list(Path({str(sweep.folder)!r}).glob('*/*/ready')): time.sleep(0.01)\n"
        f"os.kill({os.getpid()}, signal.SIGUSR2)"
    )
    before = signal.signal(signal.SIGUSR2, leave)
    scheduler = subprocess.Popen([sys.executable, "-c", script])
    try:
        yield
    finally:
        scheduler.wait()
        signal.signal(signal.SIGUSR2, before)


def test_a_job_that_a_scheduler_calls_again_goes_on(sweep: Sweep) -> None:
    """submitit's handler leaves in the middle of the wait, and the job comes a second time."""
    with taken_away(sweep, SystemExit(144)), pytest.raises(SystemExit):
        run_job(sweep, 1, 2)
    (job,) = sweep.read()["jobs"]
    # The run was asked to end and has been waited for: nothing else writes its folder when it comes again.
    assert (job["status"], job["exit_status"], job["resumed"]) == ("interrupted", 143, 0)
    assert run_job(sweep, 1, 2) == 20.0
    (again,) = sweep.read()["jobs"]
    assert (again["status"], again["run_id"], again["resumed"]) == ("finished", job["run_id"], 1)
    assert run_job(sweep, 1, 2) == 20.0
    assert started(sweep) == [[job["run_id"], "False"], [job["run_id"], "True"]]


def test_a_scheduler_that_gives_a_job_up_leaves_the_others_alone(
    sweep: Sweep, capsys: pytest.CaptureFixture[str]
) -> None:
    with taken_away(sweep, RuntimeError("timed out too many times")):
        assert run_job(sweep, 1, 2) is None
    assert "timed out too many times" in capsys.readouterr().err
    assert run_job(sweep, 0, 1) == 10.0
    assert [job["status"] for job in sweep.read()["jobs"]] == ["finished", "interrupted"]


def test_a_finished_job_gives_the_value_that_a_sweeper_waits_for(
    sweep: Sweep, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_job(sweep, 0, 1) == 10.0
    next_session(sweep)
    assert run_job(sweep, 0, 1) == 10.0
    assert "seed=1: finished already" in capsys.readouterr().out
    assert len(started(sweep)) == 1


def next_session(sweep: Sweep) -> None:
    index = sweep.read()
    index["resumed"].append({"command": ["train.py", "sweep=resume"], "accept": False})
    (sweep.folder / "sweep.json").write_text(json.dumps(index))
    sweep.session += 1


def test_jobs_are_known_by_their_overrides_and_not_by_their_numbers(sweep: Sweep) -> None:
    """A sweeper that draws may ask for other values under a number when it is called again."""
    assert [run_job(sweep, 0, 1), run_job(sweep, 1, 3)] == [10.0, 30.0]
    next_session(sweep)
    # 3 and 1 are known, 5 is new and its number taken.
    assert [run_job(sweep, 0, 3), run_job(sweep, 1, 5), run_job(sweep, 2, 1)] == [30.0, 50.0, 10.0]
    jobs = sweep.read()["jobs"]
    assert [(job["job"], job["overrides"]) for job in jobs] == [
        (0, ["seed=1"]),
        (1, ["seed=3"]),
        (2, ["seed=5"]),
    ]
    assert len(started(sweep)) == 3
    assert (sweep.folder / "job_2.log").exists()


def test_equal_jobs_of_one_sweep_stay_two_jobs(sweep: Sweep) -> None:
    for numbers in ((0, 1), (1, 0)):  # several at a time come in any order
        assert [run_job(sweep, number, 1) for number in numbers] == [10.0, 10.0]
        jobs = sweep.read()["jobs"]
        assert [(job["job"], job["launch"]) for job in jobs] == [(n, [sweep.session, n]) for n in (0, 1)]
        assert len({job["run_id"] for job in jobs}) == len(started(sweep)) == 2
        next_session(sweep)


def test_what_an_earlier_call_left_in_a_queue_does_nothing(
    sweep: Sweep, capsys: pytest.CaptureFixture[str]
) -> None:
    late = Sweep(sweep.folder, sweep.session)
    next_session(sweep)
    assert run_job(late, 0, 1) is None
    late.refuse(0, ["seed=1"], ConfigError("no"))
    assert "no part of" in capsys.readouterr().out
    assert sweep.read()["jobs"] == []
    assert run_job(sweep, 0, 1) == 10.0


def test_a_run_goes_on_with_the_configuration_that_it_had(
    sweep: Sweep, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = sweep.folder / "left"
    run_dir.mkdir()
    (run_dir / "record.json").write_text(json.dumps({"schema": 1, "id": "left", "status": "running"}))
    (run_dir / "config.yaml").write_text(to_yaml(config(seed=4, eval_every=7, runs_dir="elsewhere")))
    index = sweep.read()
    entry = {"job": 0, "overrides": ["seed=4"], "run_id": "left", "run_dir": "left", "status": "failed"}
    entry |= {"launch": [0, 0], "start_time": None, "return": None, "resumed": 0, "exit_status": 1}
    (sweep.folder / "sweep.json").write_text(json.dumps(index | {"jobs": [entry]}))
    assert run_job(sweep, 0, 4) is None
    (job,) = sweep.read()["jobs"]
    assert job["status"] == "refused"
    default = config().eval_every
    assert f"eval_every={default}: left (seed=4) was started with 7" in job["problem"]
    assert "was started with 7" in capsys.readouterr().err
    # Where it lies is not part of that.
    (run_dir / "config.yaml").write_text(to_yaml(config(seed=4, runs_dir="elsewhere")))
    assert run_job(sweep, 0, 4) == 40.0
    (job,) = sweep.read()["jobs"]
    assert (job["status"], "problem" in job) == ("finished", False)


# -------------------------------------------------------------------------------------------- real launchers


@pytest.mark.parametrize(
    "launcher",
    [
        "joblib",
        pytest.param("basic", marks=pytest.mark.slow),
        pytest.param("submitit_local", marks=pytest.mark.slow),
    ],
)
def test_after_a_kill_the_sweep_goes_on_with_any_launcher(
    project: Path, tmp_path: Path, launcher: str
) -> None:
    killed(project, tmp_path, "seed=1,2,3")
    folder, before = sweep_in(tmp_path)
    assert before["status"] == "running"
    assert [job["status"] for job in before["jobs"]] == ["finished", "running"]
    order(tmp_path)
    words = ["sweep=resume", f"hydra/launcher={launcher}", "seed=1,2,3"]
    status, out, err = train(project, tmp_path, *words)
    assert status == 0, err + out
    assert "goes on: 1 finished, 1 failed, 1 not started" in out
    _, index = sweep_in(tmp_path)
    assert index["id"] == before["id"]
    assert [job["job"] for job in index["jobs"]] == [0, 1, 2]
    assert [job["status"] for job in index["jobs"]] == ["finished"] * 3
    assert [job["return"] for job in index["jobs"]] == [10.0, 20.0, 30.0]
    assert [job["run_id"] for job in index["jobs"]][:2] == [job["run_id"] for job in before["jobs"]]
    assert resumes(tmp_path) == [[False], [False, True], [False]]
    assert [job["resumed"] for job in index["jobs"]] == [0, 1, 0]
    (again,) = index["resumed"]
    assert (again["interruption"], again["accept"], again["changed"]) == ("killed", False, {})
    assert again["command"][1:] == words
    assert (index["status"], index["command"]) == ("finished", before["command"])
    first, second = starts(folder, index["jobs"][1])
    assert second["overrides"] == first["overrides"] == ["seed=2"]
    assert second["sweep"] == index["id"]
    own = ("SUBMITIT", "LOKY", "JOBLIB", "PYTEST")
    for told in (first, second):
        told["environment"] = {k: v for k, v in told["environment"].items() if not k.startswith(own)}
    assert second["environment"] == first["environment"]


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGUSR1,
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR2, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, marks=pytest.mark.slow),
    ],
)
def test_what_schedulers_send_interrupts_a_sweep_that_then_goes_on(
    project: Path, tmp_path: Path, number: signal.Signals
) -> None:
    order(tmp_path, s2="wait")
    process = start(project, tmp_path, "seed=1,2,3")
    until(waiting(tmp_path), process)
    # Some signal every process of a job; the run gets the signal only once here, as it ends at a second one.
    (launcher,) = [int(pid) for pid in children(process.pid)]
    os.kill(launcher, number)
    process.send_signal(number)
    status, _, err = finish(process)
    assert status == 143, err
    _, index = sweep_in(tmp_path)
    assert (index["status"], index["signal"]) == ("interrupted", signal.SIGTERM)
    assert [job["status"] for job in index["jobs"]] == ["finished", "interrupted", "not started"]
    order(tmp_path)
    status, out, err = train(project, tmp_path, "seed=1,2,3", "sweep=resume")
    assert status == 0, err + out
    _, index = sweep_in(tmp_path)
    assert [job["status"] for job in index["jobs"]] == ["finished"] * 3
    assert (index["signal"], index["resumed"][0]["interruption"]) == (None, "interrupted")
    assert resumes(tmp_path) == [[False], [False, True], [False]]


def children(pid: int) -> list[str]:
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], check=True, capture_output=True, text=True)
    pairs = [line.split() for line in listed.stdout.splitlines()]
    return [child for child, parent in pairs if parent == str(pid)]


def test_every_way_to_end_early_has_its_way_to_go_on(project: Path, tmp_path: Path) -> None:
    order(tmp_path, s1="fail", s2="refuse", s3="die at once", s4="die at the end")
    words = ["seed=1,2,3,4,5", "hydra/launcher=basic"]
    process = start(project, tmp_path, *words)
    finish(process)  # the launcher is killed in the fourth job
    assert process.returncode == 1
    folder, before = sweep_in(tmp_path)
    assert [job["status"] for job in before["jobs"]] == ["failed", "refused", "failed", "failed"]
    order(tmp_path)
    status, out, err = train(project, tmp_path, *words, "sweep=resume")
    assert status == 0, err + out
    assert "seed=4: finished already" in out
    _, index = sweep_in(tmp_path)
    assert [job["status"] for job in index["jobs"]] == ["finished"] * 5
    assert [job["return"] for job in index["jobs"]] == [10.0, 20.0, 30.0, 40.0, 50.0]
    assert resumes(tmp_path) == [[False, True], [False], [False], [False], [False]]
    kept = [old["run_id"] == new["run_id"] for old, new in zip(before["jobs"], index["jobs"], strict=False)]
    assert kept == [True, False, False, True]  # a run that left no record has nothing to go on with
    assert [again["interruption"] for again in index["resumed"]] == ["failed"]
    # Nobody is told more than once, or of a run that is not there.
    told = [start["job"] for job in index["jobs"] for start in starts(folder, job)]
    assert sorted(told) == [0, 0, 1, 2, 3, 4]


def test_a_finished_sweep_is_left_alone(project: Path, tmp_path: Path) -> None:
    assert train(project, tmp_path, "seed=1,2")[0] == 0
    folder, _ = sweep_in(tmp_path)
    before = (folder / "sweep.json").read_bytes()
    status, out, err = train(project, tmp_path, "sweep=resume", "seed=1,2", "hydra/launcher=joblib")
    assert (status, err) == (0, "")
    assert "every job has finished already" in out
    assert out.count("│ #") == 2
    assert (folder / "sweep.json").read_bytes() == before
    assert resumes(tmp_path) == [[False], [False]]
    # Other words are another sweep, which is not started by mistake.
    status, out, err = train(project, tmp_path, "sweep=resume", "seed=1,2,3")
    assert (status, out) == (2, "")
    assert f"the nearest is {folder.name}, which has seed=1,2 where this command has seed=1,2,3" in err
    assert len(list(tmp_path.glob("runs/*/*"))) == 3


def test_a_sweep_goes_on_where_it_was_moved_to(project: Path, tmp_path: Path) -> None:
    words = ["eval_episodes=3,4", "seed=2,1"]
    killed(project, tmp_path, *words)
    (tmp_path / "runs").rename(tmp_path / "moved")
    order(tmp_path)
    status, out, err = train(project, tmp_path, "runs_dir=moved", "sweep=resume", *words[::-1])
    assert status == 0, err + out
    assert not (tmp_path / "runs").exists()
    _, index = sweep_in(tmp_path, "moved")
    # The numbers are those of the first order.
    assert [[word for word in job["overrides"] if "dir" not in word] for job in index["jobs"]] == [
        ["eval_episodes=3", "seed=2"],
        ["eval_episodes=3", "seed=1"],
        ["eval_episodes=4", "seed=2"],
        ["eval_episodes=4", "seed=1"],
    ]
    assert [job["resumed"] for job in index["jobs"]] == [1, 0, 0, 0]


def test_one_process_at_a_time_looks_after_a_sweep(project: Path, tmp_path: Path) -> None:
    order(tmp_path, s2="wait")
    process = start(project, tmp_path, "seed=1,2,3")
    until(waiting(tmp_path), process)
    folder, before = sweep_in(tmp_path)
    (launcher,) = [int(pid) for pid in children(process.pid)]
    again = ["seed=1,2,3", "sweep=resume"]

    def refused() -> str:
        status, out, err = train(project, tmp_path, *again)
        assert (status, out) == (2, ""), err
        assert sweep_in(tmp_path)[1] == before
        return err

    assert f"sweep {folder.name} is still running, looked after by process {process.pid} and" in refused()
    assert f"its launcher {launcher}" in refused()
    os.kill(process.pid, signal.SIGSTOP)  # so that neither of the two can end the run
    os.kill(launcher, signal.SIGKILL)
    process.kill()
    process.wait()  # not for what it prints: the run can still write there
    # The run is there without its launcher.
    (run_dir,) = tmp_path.glob("runs/*/*-seed2-*")
    told = refused()
    assert run_dir.name in told
    assert f"by process {before['jobs'][1]['pid']}" in told
    os.kill(before["jobs"][1]["pid"], signal.SIGTERM)
    lock = RunLock(run_dir)

    def free() -> bool:
        try:
            lock.acquire()
        except ConfigError:
            return False
        lock.release()
        return True

    until(free)
    order(tmp_path)
    status, out, err = train(project, tmp_path, *again)
    assert status == 0, err + out
    assert resumes(tmp_path) == [[False], [False, True], [False]]


def test_changed_code_and_configuration_stop_a_sweep_from_going_on(fork: Path, tmp_path: Path) -> None:
    project, cwd = with_worker(fork, tmp_path / "project"), tmp_path / "cwd"
    cwd.mkdir()
    words = ["seed=1,2,3", "sweep=resume"]
    killed(project, cwd, "seed=1,2,3")
    order(cwd)
    folder, before = sweep_in(cwd)

    default = project / "conf" / "config.yaml"
    text = default.read_text()
    default.write_text(text.replace("eval_episodes: 10", "eval_episodes: 11"))
    status, out, err = train(project, cwd, *words, "accept=changes")
    assert (status, out) == (2, "")
    assert "eval_episodes=11: " in err
    assert "was started with 10" in err
    default.write_text(text)

    (project / "README.md").write_text("Changes nothing.\n")
    (project / "rltemplate" / "normalize.py").write_text("# something else\n")
    status, out, err = train(project, cwd, *words)
    assert (status, out) == (2, "")
    assert f"{folder.name}: the code changed since the sweep began: rltemplate/learning/normalize.py\n" in err
    assert f"refs/runs/{folder.name}" in err
    assert "accept=changes" in err
    assert sweep_in(cwd)[1] == before

    status, out, err = train(project, cwd, *words, "accept=changes")
    assert status == 0, err + out
    _, index = sweep_in(cwd)
    assert index["resumed"][0]["changed"] == {"code": ["rltemplate/learning/normalize.py"]}
    tree = index["snapshot"]["tree"]
    assert tree != before["snapshot"]["tree"]
    told = [starts(folder, job)[-1] for job in index["jobs"]]
    assert [each["tree"] for each in told] == [before["snapshot"]["tree"], tree, tree]
    assert [(each["resume"], each["accept"]) for each in told] == [
        (False, False),
        (True, True),
        (False, False),
    ]
    git(project, "gc", "--quiet", "--prune=now")
    for each in (before["snapshot"]["tree"], tree):  # what each run was made with can still be had
        assert git(project, "cat-file", "-t", each).strip() == "tree"


# ---------------------------------------------------------------------------------------------- the real one

# Raises in its tenth step, as long as the file `broken` lies beside the runs.
FRAGILE = """
from pathlib import Path
import gymnasium
from gymnasium.envs.classic_control import PendulumEnv

class Fragile(PendulumEnv):
    steps = 0

    def step(self, action):
        self.steps += 1
        if self.steps == 250 and Path("broken").exists():
            raise OSError("the simulator is gone")
        return super().step(action)

gymnasium.register("Fragile-v0", Fragile, max_episode_steps=50)
"""
SMALL = [*SHRUNK["ppo"], "total_env_steps=960", "checkpoint_every=320", "logger=none", "eval_every=640"]
SMALL += ["env.max_episode_steps=20", "eval_episodes=1", "video_every=0", "log_every=320"]


@pytest.fixture(scope="module")
def fragile(fork: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("fragile") / "copy"
    shutil.copytree(fork, copy)
    (copy / "fragile_envs.py").write_text(FRAGILE)
    return copy


@pytest.fixture(scope="module")
def straight(fragile: Path, tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """The traces of a sweep that nobody interrupts."""
    cwd = tmp_path_factory.mktemp("straight")
    words = [*SMALL, "env=fragile_envs:Fragile-v0", "seed=1,2", "hydra/launcher=joblib"]
    status, out, err = train(fragile, cwd, *words, "hydra.launcher.n_jobs=2")
    assert status == 0, err + out
    found = traces(cwd)
    assert len(set(found)) == 2
    return found


def traces(cwd: Path) -> list[bytes]:
    """The traces of the jobs of the only sweep."""
    folder, index = sweep_in(cwd)
    return [(folder / job["run_dir"] / "trace.jsonl").read_bytes() for job in index["jobs"]]


def in_the_middle(cwd: Path, seed: int) -> Callable[[], bool]:
    """Whether the run is beyond its first checkpoint, and far from its end."""

    def reached() -> bool:
        found = list(cwd.glob(f"runs/*/*-seed{seed}-*/trace.jsonl"))
        saved = list(cwd.glob(f"runs/*/*-seed{seed}-*/checkpoints/step_*.json"))
        return bool(found and saved) and found[0].read_bytes().count(b"\n") >= 14

    return reached


@pytest.mark.parametrize(
    ("number", "launcher"),
    [
        (signal.SIGKILL, "basic"),
        pytest.param(signal.SIGTERM, "basic", marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, "joblib", marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, "submitit_local", marks=pytest.mark.slow),
    ],
)
def test_the_traces_are_those_of_a_sweep_that_nobody_interrupted(
    fragile: Path, tmp_path: Path, straight: list[bytes], number: signal.Signals, launcher: str
) -> None:
    words = [*SMALL, "env=fragile_envs:Fragile-v0", "seed=1,2"]
    process = start(fragile, tmp_path, *words)
    until(in_the_middle(tmp_path, 2), process)
    if number == signal.SIGKILL:
        kill_session(process.pid)
    else:
        process.send_signal(number)
    finish(process)
    _, index = sweep_in(tmp_path)
    assert [job["status"] for job in index["jobs"]] != ["finished"] * 2
    first, second, *_ = traces(tmp_path) if number == signal.SIGKILL else [*straight[:1], b""]
    assert first == straight[0]
    assert straight[1].startswith(second[: second.rfind(b"\n") + 1])
    assert second != straight[1]  # it was interrupted, and not just late

    status, out, err = train(fragile, tmp_path, *words, "sweep=resume", f"hydra/launcher={launcher}")
    assert status == 0, err + out
    folder, index = sweep_in(tmp_path)
    assert [job["status"] for job in index["jobs"]] == ["finished"] * 2
    assert [job["resumed"] for job in index["jobs"]] == [0, 1]
    assert traces(tmp_path) == straight
    record = json.loads((folder / index["jobs"][1]["run_dir"] / "record.json").read_text())
    (again,) = record["resumed"]
    assert again["env_steps"] > 0  # not merely run again


@pytest.mark.slow
def test_a_job_that_failed_goes_on_when_its_cause_is_gone(
    fragile: Path, tmp_path: Path, straight: list[bytes]
) -> None:
    (tmp_path / "broken").touch()
    words = [*SMALL, "env=fragile_envs:Fragile-v0", "seed=1,2", "hydra/launcher=joblib"]
    assert train(fragile, tmp_path, *words)[0] == 1
    _, index = sweep_in(tmp_path)
    assert [job["status"] for job in index["jobs"]] == ["failed"] * 2
    assert traces(tmp_path) != straight
    assert train(fragile, tmp_path, *words, "sweep=resume")[0] == 1  # it still is there
    (tmp_path / "broken").unlink()
    status, out, err = train(fragile, tmp_path, *words, "sweep=resume")
    assert status == 0, err + out
    assert traces(tmp_path) == straight
    _, index = sweep_in(tmp_path)
    assert [job["resumed"] for job in index["jobs"]] == [2, 2]
