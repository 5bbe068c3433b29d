"""Whole runs that are killed, interrupted or moved, and go on: nothing is lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import power_failure
import pytest
import yaml
from conftest import (
    FAULTS,
    Configure,
    RecordedRun,
    Start,
    Started,
    differences,
    git,
    job_in,
    plain,
    record,
    rows,
    small,
    until,
)

from rltemplate.algos.ppo_config import PPOConfig
from runlab import machine
from runlab.analysis.traces import ITERATION, open_trace
from runlab.config.project import ALGORITHMS
from runlab.errors import ConfigError
from runlab.launch.worker import run
from runlab.machine import package_versions
from runlab.run import continuation, paths
from runlab.run.checkpoint import load_checkpoint
from runlab.run.continuation import check_changes, find_continuation, only_begins_anew
from runlab.run.files import lock
from runlab.run.git.snapshot import GitRecord
from runlab.run.job import resume_job
from runlab.run.manifest import list_checkpoints
from runlab.run.record import RunRecord
from runlab.run.training_run import TrainingRun

OBSERVED = ["log_every=48", "eval_every=480", "eval_episodes=1", "video_every=0", "checkpoint_every=96"]
# Environment steps: long enough for signals to reach it. The relatives of PPO are resumed in test_resume.py.
TOTAL = {
    name: 4800 if name == "ppo" else 960
    for name, entry in ALGORITHMS.items()
    if PPOConfig not in entry.config.mro()[1:]
}
LAYERS = "algo.hidden_sizes=[32,32]"
WORK = {algo: small(algo, f"total_env_steps={total}", LAYERS, *OBSERVED) for algo, total in TOTAL.items()}

Made = Callable[..., Path]


def saved(run_dir: Path, at_least: int) -> Callable[[], bool]:
    """True once so many environment steps are in a checkpoint."""
    return lambda: any(int(path.stem[5:]) >= at_least for path in list_checkpoints(run_dir))


@pytest.fixture(scope="module")
def made(fork: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The uninterrupted run of an algorithm; with `killed`, a copy in this folder of a killed run.

    SIGKILL ends that run after its fifth checkpoint.
    """
    folder = tmp_path_factory.mktemp("made")

    def run(algo: str, killed: Path | None = None) -> Path:
        run_dir = folder / f"{algo}{'' if killed is None else '-killed'}"
        if not run_dir.exists():
            words = [*WORK[algo], f"run_dir={run_dir}"]
            begun = Started(fork, folder, folder / f"{run_dir.name}.log", "train", *words)
            if killed is None:
                begun.end(0)
            else:
                begun.until(saved(run_dir, 480))
                begun.kill()
        return run_dir if killed is None else Path(shutil.copytree(run_dir, killed))

    return run


def assert_same(run_dir: Path, straight: Path) -> None:
    """Bit for bit the run that nobody interrupted."""
    assert differences(run_dir, straight) == []
    assert record(run_dir)["status"] == "finished"
    assert record(run_dir)["trace"] == record(straight)["trace"]


@pytest.mark.long
@pytest.mark.parametrize(("algo", "damaged"), [(name, name != "ppo") for name in WORK])
def test_a_killed_run_goes_on_elsewhere_and_becomes_the_run_that_never_was(
    fork: Path, start: Start, made: Made, tmp_path: Path, algo: str, damaged: bool
) -> None:
    """From its newest whole checkpoint; one that is damaged is named."""
    run_dir = made(algo, killed=tmp_path / "moved" / "here")  # not where it began
    before = record(run_dir)
    assert before["status"] == "running"
    before["machine"]["cpu"] = "an abacus"
    before["environment"]["MKL_CBWR"] = "AVX2"
    (run_dir / paths.RECORD).write_text(json.dumps(before))
    *_, older, newest = list_checkpoints(run_dir)
    if damaged:
        content = bytearray(newest.read_bytes())
        content[len(content) // 3] ^= 1
        newest.write_bytes(content)
    leftover = run_dir / paths.VIDEOS / ".step_96.mp4.01234567.part"  # of an encoder that was killed as well
    leftover.parent.mkdir()
    leftover.touch()
    with (run_dir / paths.METRICS).open("ab") as metrics:
        metrics.write(b"\0\0\n")  # of a power failure, behind the checkpoint
    trained_s = load_checkpoint(older).state["run"]["logger"]["wall_time_s"]
    output = start("resume", f"run={run_dir}", status=0).said
    assert "may change its bits: MKL_CBWR=(not set), was AVX2" in output
    assert record(run_dir)["duration_s"] > trained_s
    assert not leftover.exists()
    assert (f"{newest.name} is damaged" in output) is ("an older one is taken" in output) is damaged
    assert_same(run_dir, made(algo))
    after = record(run_dir)
    assert (after["id"], after["started_at"]) == (before["id"], before["started_at"])
    (part,) = after["resumed"]
    taken = older if damaged else newest
    assert (part["interruption"], part["checkpoint"]) == ("killed", taken.name)
    assert part["changed"]["cpu"][0] == "an abacus"
    outcome = json.loads(git(fork, "show", f"{after['git']['ref']}:.runlab/run/outcome.json"))
    assert (outcome["status"], outcome["trace"]) == ("finished", after["trace"])
    assert damaged or "has finished already" in start("resume", f"run={run_dir}", status=0).said


@pytest.mark.long
def test_lines_that_are_lost_before_the_checkpoint_are_told_and_damage_nothing(
    start: Start, made: Made, tmp_path: Path
) -> None:
    """They waited for a full disk, or were lost with it: both files break off within a line."""
    run_dir = made("ppo", killed=tmp_path / "run")
    for name in (paths.METRICS, paths.TRACE):
        content = (run_dir / name).read_bytes()
        (run_dir / name).write_bytes(content[: content.index(b"\n", len(content) // 3) + 9])
    output = start("resume", f"run={run_dir}", status=0).said
    assert f"{paths.METRICS} lacks lines up to the checkpoint" in output
    assert f"{paths.TRACE} lacks lines up to the checkpoint: a new one begins there" in output
    assert (run_dir / paths.OLD_TRACE).exists()
    steps = [row["env_steps"] for row in rows(run_dir)]
    assert (steps == sorted({*steps}), steps[-1]) == (True, TOTAL["ppo"])
    ends = [event.index for _, event in open_trace(run_dir).events() if event.name == ITERATION]
    assert (ends == [*range(ends[0], 150)], ends[0] > 0) == (True, True)


@pytest.mark.long
def test_a_run_goes_on_after_a_power_failure(start: Start, made: Made, tmp_path: Path) -> None:
    flushed, run_dir = tmp_path / "flushed", tmp_path / "disk" / "run"
    run_dir.parent.mkdir()
    code = f"import pathlib, power_failure; power_failure.record(pathlib.Path({str(flushed)!r}))"
    (tmp_path / "sitecustomize.py").write_text(code)
    path = f"{tmp_path}:{FAULTS}"
    begun = start("train", *WORK["ppo"], f"run_dir={run_dir}", PYTHONPATH=path)
    begun.until(saved(run_dir, 480))
    begun.kill()
    left = power_failure.left(flushed, run_dir.parent, tmp_path / "after") / run_dir.name
    start("resume", f"run={left}", "accept=changes", status=0)  # without the two modules of this test
    assert_same(left, made("ppo"))


@pytest.mark.long
def test_interrupted_again_and_again(start: Start, made: Made, tmp_path: Path) -> None:
    """By each of the signals that ask a run to end, one after another."""
    run_dir = tmp_path / "run"
    words = ["train", *WORK["ppo"], f"run_dir={run_dir}"]
    for number, name in enumerate([signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP]):
        begun = start(*words)
        begun.until(saved(run_dir, 600 * (number + 1)))
        begun.process.send_signal(name)
        begun.end(130 if name == signal.SIGINT else 143)
        words = ["resume", f"run={run_dir}"]
        now = record(run_dir)
        assert (now["status"], len(now["resumed"])) == ("interrupted", number)
        # The work up to the signal is in a checkpoint, and not only up to the last that was due.
        last = list_checkpoints(run_dir)[-1]
        state = load_checkpoint(last).state
        assert state["run"]["chain"] == now["trace"]["digest"]
        assert state["env_steps"] == now["env_steps"]
    start(*words, status=0)
    assert_same(run_dir, made("ppo"))
    assert [part["interruption"] for part in record(run_dir)["resumed"]] == ["interrupted"] * 4


@pytest.mark.long
def test_a_second_signal_ends_at_once_and_harms_no_checkpoint(start: Start, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    slow = ["algo=sac", "env=Pendulum", "algo.learning_starts=1990", "algo.steps_per_iteration=2000"]
    more = ["logger=none", "checkpoint_every=2000", "eval_every=0", "video_every=0", *plain([])]
    begun = start("train", *slow, *more, f"run_dir={run_dir}", "total_env_steps=1000000")
    begun.until(saved(run_dir, 2000))
    again = resume_job(run_dir, [])
    assert again is not None
    with pytest.raises(ConfigError, match=f"in use, by process {begun.process.pid} on "):
        TrainingRun(again).prepare()
    begun.process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    begun.process.send_signal(signal.SIGTERM)  # a scheduler's request may come from two sides
    time.sleep(2.5)
    assert begun.process.poll() is None  # in the middle of an iteration of 2,000 updates
    begun.process.send_signal(signal.SIGINT)
    assert begun.process.wait(timeout=10) == -signal.SIGINT
    assert load_checkpoint(list_checkpoints(run_dir)[-1]).state["env_steps"] == 2000


def test_a_larger_total_goes_on_with_a_finished_run(configure: Configure, tmp_path: Path) -> None:
    """With a constant rate it is the run that was meant to be longer from the start."""
    short, long = tmp_path / "short", tmp_path / "long"
    for run_dir, total in (long, 1920), (short, 960):
        words = [*OBSERVED, "algo.learning_rate_schedule=constant", f"total_env_steps={total}"]
        job = job_in(run_dir, configure, *words)
        assert run(job) == 0
    resumed = resume_job(short, [], total_env_steps=1920, snapshot=job.snapshot)
    assert resumed is not None
    assert run(resumed) == 0
    assert (short / paths.TRACE).read_bytes() == (long / paths.TRACE).read_bytes()
    (part,) = record(short)["resumed"]
    assert part["changed"] == {"total_env_steps": [960, 1920]}
    assert "total_env_steps: 1920" in (short / paths.CONFIG).read_text()


def listing(folder: Path) -> dict[str, bytes]:
    """Every file and its content."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != paths.LOCK)
    return {str(path): path.read_bytes() for path in files}


@pytest.mark.long
def test_changed_code_or_libraries_are_refused_unless_they_are_accepted(
    fork: Path, start: Start, made: Made, tmp_path: Path
) -> None:
    """And notes, and code that only observes a run, are not."""
    run_dir = made("ppo", killed=tmp_path / "run")
    before, commit = listing(run_dir), record(run_dir)["git"]["commit"]
    notes, code = fork / "notes.txt", fork / "runlab" / "rng.py"
    observer = fork / "runlab" / "run" / "sinks" / "console.py"
    original, idle = code.read_text(), observer.read_text()
    try:
        notes.write_text("thoughts\n")
        observer.write_text(idle + "\n# another\n")
        code.write_text(original + "\n# another\n")
        refused = start("resume", f"run={run_dir}", status=2).said
        assert "the run began with other code: runlab/rng.py\n" in refused
        assert len(refused.splitlines()) <= 2
        assert listing(run_dir) == before
        start("resume", f"run={run_dir}", "accept=changes", status=0)
    finally:
        code.write_text(original)
        observer.write_text(idle)
        notes.unlink()
    after = record(run_dir)
    assert after["resumed"][0]["changed"] == {"code": ["runlab/rng.py"]}
    assert git(fork, "show", f"{after['git']['ref']}:runlab/rng.py").endswith("# another\n")
    assert after["git"]["commit"] != commit
    versions = package_versions() | {"pytest": "1.0"}
    assert check_changes("it", GitRecord(), versions, GitRecord(), accept=False) == {}
    with pytest.raises(ConfigError, match=r"it began with other libraries: torch 1\.0 ->"):
        check_changes("it", GitRecord(), versions | {"torch": "1.0"}, GitRecord(), accept=False)


def test_packages_that_a_library_brings_along_are_no_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's compiler loads setuptools, which does so; a resumed run compares before it compiles."""
    before = package_versions()
    (tmp_path / "brought-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert package_versions() == before
    assert "torch" in before


def test_the_project_is_compared_by_no_name_and_what_is_gone_only_if_it_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make rename` changes the name; another version of the project is no difference."""
    for name, points in (
        ("a_fork-0.1.0", "[runlab.project]\na = a.project\n"),
        ("a_sink-1", "[runlab.sinks]\n"),
    ):
        (tmp_path / f"{name}.dist-info").mkdir()
        (tmp_path / f"{name}.dist-info/entry_points.txt").write_text(points)
    monkeypatch.setattr(machine, "_IMPORT_PATH", (str(tmp_path),))
    versions = package_versions()
    assert versions == {"runlab": versions["runlab"], "runlab project": "a_fork 0.1.0", "a-sink": "1"}
    former = versions | {"runlab project": "zebra 0.2", "a-former-name": "0.1.0", "another-sink": "1"}
    assert check_changes("it", GitRecord(), former, GitRecord(), accept=False) == {}
    for package, change in (("a-sink", "2 -> 1"), ("torch", "2 -> None")):
        with pytest.raises(ConfigError, match=f"it began with other libraries: {package} {change}"):
            check_changes("it", GitRecord(), versions | {package: "2"}, GitRecord(), accept=False)


def test_another_compiler_is_refused_unless_it_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled run would go on with other programs; other runs do not ask for a compiler."""
    monkeypatch.setattr(machine, "compiler_version", lambda: "g++ 14")
    same, other = ({"c++ compiler": name} for name in ("g++ 14", "g++ 12"))
    assert check_changes("it", GitRecord(), same, GitRecord(), accept=False) == {}
    change = r"c\+\+ compiler g\+\+ 12 -> g\+\+ 14"
    with pytest.raises(ConfigError, match=f"it began with other libraries: {change}"):
        check_changes("it", GitRecord(), other, GitRecord(), accept=False)
    changed = check_changes("it", GitRecord(), other, GitRecord(), accept=True)
    assert changed == {"libraries": ["c++ compiler g++ 12 -> g++ 14"]}
    monkeypatch.setattr(machine, "compiler_version", lambda: 1 / 0)
    assert check_changes("it", GitRecord(), {}, GitRecord(), accept=False) == {}


@pytest.mark.long
def test_a_run_without_a_checkpoint_starts_again(start: Start, made: Made, tmp_path: Path) -> None:
    early = tmp_path / "early"
    begun = start("train", *WORK["sac"], f"run_dir={early}")
    begun.until((early / paths.RECORD).exists)
    begun.kill()
    assert list_checkpoints(early) == []
    start("resume", f"run={early}", status=0)
    assert_same(early, made("sac"))
    assert record(early)["resumed"][0]["checkpoint"] is None


def test_a_finished_run_without_a_checkpoint_and_a_checkpoint_of_an_earlier_version_are_refused(
    recorded_run: RecordedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = resume_job(recorded_run.run_dir, [], total_env_steps=384)
    assert job is not None
    older = load_checkpoint(list_checkpoints(recorded_run.run_dir)[-1])
    del older.state["run"]["sizes"]
    for newest, message in (None, "has no checkpoint"), (older, "its checkpoints are of an earlier version"):
        monkeypatch.setattr(continuation, "newest_checkpoint", lambda *_, newest=newest: newest)
        with pytest.raises(ConfigError, match=message):
            find_continuation(job, GitRecord())


def test_a_run_that_saves_nothing_starts_again_only_if_it_has_shown_nothing(
    recorded_run: RecordedRun, tmp_path: Path
) -> None:
    run_dir = Path(shutil.copytree(recorded_run.run_dir, tmp_path / "run"))
    shutil.rmtree(run_dir / paths.CHECKPOINTS)
    replace(RunRecord.read(run_dir), status="interrupted").write(run_dir)
    config = yaml.safe_load((run_dir / paths.CONFIG).read_text())
    (run_dir / paths.CONFIG).write_text(yaml.safe_dump(config | {"checkpoint_every": 0}))
    job = resume_job(run_dir, [])
    assert job is not None
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
    with pytest.raises(ConfigError, match="would overwrite what it has shown"):
        find_continuation(job, GitRecord())
    assert {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")} == before
    # A sweep or a search begins it anew, elsewhere; not while it goes on, and not once it has finished.
    assert only_begins_anew(run_dir)
    if (child := os.fork()) == 0:
        lock(run_dir)
        time.sleep(30)
    until(lambda: f"process {child}" in (run_dir / paths.LOCK).read_text())
    with pytest.raises(ConfigError, match=f"is in use, by process {child}"):
        only_begins_anew(run_dir)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    replace(RunRecord.read(run_dir), status="finished").write(run_dir)
    assert not only_begins_anew(run_dir)
    replace(RunRecord.read(run_dir), status="interrupted").write(run_dir)
    (run_dir / paths.METRICS).unlink()
    assert not only_begins_anew(run_dir)
    assert find_continuation(job, GitRecord()).checkpoint is None
