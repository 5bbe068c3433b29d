"""Whole runs that are killed, interrupted, starved of disk or moved, and go on: nothing is lost.

Real processes, real signals, a real file system that is full.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SHRUNK, differences, git, program, rows, small

from rltemplate.config.algorithms import ALGORITHMS
from rltemplate.run import paths
from rltemplate.run.checkpoint import list_checkpoints, load_checkpoint

OBSERVED = ["log_every=48", "eval_every=480", "eval_episodes=1", "video_every=0", "checkpoint_every=96"]
TOTAL = {"ppo": 4800}  # environment steps
WORK = {algo: small(algo, f"total_env_steps={TOTAL.get(algo, 1920)}", *OBSERVED) for algo in ALGORITHMS}
MOMENT_S = 120.0  # as long as a busy machine may take for what takes seconds


class Started:
    """A process of the fork, with its standard error in a file."""

    def __init__(self, fork: Path, log: Path, script: str, *words: str, **environment: str) -> None:
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB", "PYTHON"))}
        self.log = log
        command = [*program(fork, script), *words]
        if command[0] == "env":
            command[1] += f":{environment.pop('PYTHONPATH', '')}"
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command,
                cwd=log.parent,
                env={**clean, **environment},
                stdout=out,
                stderr=out,
            )

    def until(self, happened: Callable[[], bool]) -> None:
        """Wait for something that the process does."""
        limit = time.monotonic() + MOMENT_S
        while not happened():
            assert self.process.poll() is None, self.said
            assert time.monotonic() < limit, self.said
            time.sleep(0.005)

    def end(self) -> int:
        """Its exit status, as Python gives it."""
        return self.process.wait(timeout=MOMENT_S)

    @property
    def said(self) -> str:
        """All that it wrote."""
        return self.log.read_text()


Start = Callable[..., Started]


@pytest.fixture
def start(fork: Path, tmp_path: Path) -> Iterator[Start]:
    """Start a command, and wait for its end if an exit status is given; kill it at the end of the test."""
    started: list[Started] = []

    def begin(script: str, *words: str, status: int | None = None, **environment: str) -> Started:
        started.append(Started(fork, tmp_path / f"{len(started)}.log", script, *words, **environment))
        assert status is None or started[-1].end() == status, started[-1].said
        return started[-1]

    # Tests may have been started with nohup, which would let what they start ignore a closed terminal.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield begin
    signal.signal(signal.SIGHUP, before)
    for each in started:
        if each.process.poll() is None:
            each.process.kill()
            each.process.wait()


@pytest.fixture(scope="module")
def straight(fork: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The run that nobody interrupts, by algorithm."""
    folder = tmp_path_factory.mktemp("straight")

    def run(algo: str) -> Path:
        if not (folder / algo).exists():
            done = Started(fork, folder / f"{algo}.log", "train", *WORK[algo], f"run_dir={folder / algo}")
            assert done.end() == 0, done.said
        return folder / algo

    return run


def saved(run_dir: Path, at_least: int) -> Callable[[], bool]:
    """True once so many environment steps are in a checkpoint."""
    return lambda: any(int(path.stem[5:]) >= at_least for path in list_checkpoints(run_dir))


@pytest.fixture(scope="module")
def killed(fork: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Path], Path]:
    """A copy of a run that was killed with SIGKILL after its fifth checkpoint."""
    folder = tmp_path_factory.mktemp("killed")

    def run(algo: str, copy: Path) -> Path:
        original = folder / algo
        if not original.exists():
            begun = Started(fork, folder / f"{algo}.log", "train", *WORK[algo], f"run_dir={original}")
            begun.until(saved(original, 480))
            begun.process.kill()
            assert begun.end() == -signal.SIGKILL
        shutil.copytree(original, copy)
        return copy

    return run


def record(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / paths.RECORD).read_text())  # type: ignore[no-any-return]


def assert_same(run_dir: Path, straight: Path) -> None:
    """Bit for bit the run that nobody interrupted."""
    assert differences(run_dir, straight) == []
    assert record(run_dir)["status"] == "finished"
    assert record(run_dir)["trace"] == record(straight)["trace"]


def kill_early(start: Start, run_dir: Path) -> None:
    """Begin a run of SAC and kill it before its first checkpoint."""
    begun = start("train", *WORK["sac"], f"run_dir={run_dir}")
    begun.until((run_dir / paths.RECORD).exists)
    begun.process.kill()
    begun.end()
    assert list_checkpoints(run_dir) == []


# --- Going on --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "algo", ["ppo", *(pytest.param(name, marks=pytest.mark.long) for name in WORK if name != "ppo")]
)
def test_a_killed_run_goes_on_elsewhere_and_becomes_the_run_that_never_was(
    fork: Path,
    start: Start,
    straight: Callable[[str], Path],
    killed: Callable[[str, Path], Path],
    tmp_path: Path,
    algo: str,
) -> None:
    run_dir = killed(algo, tmp_path / "moved" / "here")  # not where it began
    before = record(run_dir)
    assert before["status"] == "running"
    at = [int(path.stem[5:]) for path in list_checkpoints(run_dir)][-1]
    leftover = run_dir / paths.VIDEOS / ".step_96.mp4.01234567.part"  # of an encoder that was killed as well
    leftover.parent.mkdir()
    leftover.touch()
    start("resume", f"run={run_dir}", status=0)
    assert not leftover.exists()
    assert_same(run_dir, straight(algo))
    after = record(run_dir)
    assert (after["id"], after["started_at"]) == (before["id"], before["started_at"])
    (part,) = after["resumed"]
    assert (part["interruption"], part["env_steps"], part["changed"]) == ("killed", at, {})
    assert part["checkpoint"] == f"step_{at}.pt"
    outcome = json.loads(git(fork, "show", f"{after['git']['ref']}:.rltemplate/run/outcome.json"))
    assert (outcome["status"], outcome["trace"]) == ("finished", after["trace"])
    assert "has finished already" in start("resume", f"run={run_dir}", status=0).said
    assert record(run_dir) == after


@pytest.mark.long
def test_interrupted_again_and_again(start: Start, straight: Callable[[str], Path], tmp_path: Path) -> None:
    """By each of the signals that ask a run to end, one after another."""
    run_dir = tmp_path / "run"
    for number, name in enumerate([signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP]):
        words = ["train", *WORK["ppo"], f"run_dir={run_dir}"] if number == 0 else ["resume", f"run={run_dir}"]
        begun = start(*words)
        begun.until(saved(run_dir, 600 * (number + 1)))
        begun.process.send_signal(name)
        assert begun.end() == (130 if name == signal.SIGINT else 143), begun.said
        now = record(run_dir)
        assert (now["status"], len(now["resumed"])) == ("interrupted", number)
        # The work up to the signal is in a checkpoint, and not only up to the last that was due.
        last = list_checkpoints(run_dir)[-1]
        assert load_checkpoint(last).state["run"]["chain"] == now["trace"]["digest"]
    start("resume", f"run={run_dir}", status=0)
    assert_same(run_dir, straight("ppo"))
    assert [part["interruption"] for part in record(run_dir)["resumed"]] == ["interrupted"] * 4


@pytest.mark.long
def test_a_second_signal_ends_at_once_and_harms_no_checkpoint(start: Start, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    slow = ["algo=sac", "env=Pendulum", "algo.learning_starts=1990", "algo.steps_per_iteration=2000"]
    more = ["logger=none", "checkpoint_every=2000", "eval_every=0", "video_every=0"]
    begun = start("train", *slow, *more, f"run_dir={run_dir}", "total_env_steps=1000000")
    begun.until(saved(run_dir, 2000))
    time.sleep(1.0)  # until the next iteration has begun
    begun.process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    begun.process.send_signal(signal.SIGTERM)  # a scheduler's request may come from two sides
    time.sleep(2.5)
    assert begun.process.poll() is None  # in the middle of an iteration of 2,000 updates
    begun.process.send_signal(signal.SIGINT)
    assert begun.process.wait(timeout=10) == -signal.SIGINT
    assert load_checkpoint(list_checkpoints(run_dir)[-1]).state["env_steps"] == 2000


@pytest.mark.long
def test_a_larger_total_goes_on_with_a_finished_run(start: Start, tmp_path: Path) -> None:
    """With a constant rate it is the run that was meant to be longer from the start."""
    short, long = tmp_path / "short", tmp_path / "long"
    words = [*WORK["ppo"], "algo.learning_rate_schedule=constant", "logger=none"]
    words = [word for word in words if not word.startswith("total_env_steps")]
    start("train", *words, "total_env_steps=4800", f"run_dir={long}", status=0)
    start("train", *words, "total_env_steps=960", f"run_dir={short}", status=0)
    start("resume", f"run={short}", "total_env_steps=4800", status=0)
    assert (short / paths.TRACE).read_bytes() == (long / paths.TRACE).read_bytes()
    (part,) = record(short)["resumed"]
    assert part["changed"] == {"total_env_steps": [960, 4800]}
    assert "total_env_steps: 4800" in (short / paths.CONFIG).read_text()


# --- Refusals --------------------------------------------------------------------------------------------


def assert_refused(done: Started, message: str) -> None:
    assert done.end() == 2, done.said
    assert message in done.said
    assert len(done.said.strip().splitlines()) <= 2
    assert "Traceback" not in done.said


def listing(folder: Path) -> dict[str, bytes]:
    """Every file and its content."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != paths.LOCK)
    return {str(path): path.read_bytes() for path in files}


@pytest.mark.long
def test_what_has_changed_is_refused_unless_it_is_accepted(
    fork: Path, start: Start, killed: Callable[[str, Path], Path], tmp_path: Path
) -> None:
    """Code, libraries, configuration; not documentation, not another processor."""
    run_dir = killed("ppo", tmp_path / "run")
    before, commit = listing(run_dir), record(run_dir)["git"]["commit"]
    notes, code = fork / "NOTES.md", fork / "rltemplate" / "learning" / "optim.py"
    original = code.read_text()
    try:
        notes.write_text("thoughts\n")
        code.write_text(original + "\n# another\n")
        refused = start("resume", f"run={run_dir}")
        assert_refused(refused, "the run began with other code: rltemplate/learning/optim.py")
        assert "NOTES.md" not in refused.said
        assert listing(run_dir) == before
        start("resume", f"run={run_dir}", "accept=changes", status=0)
    finally:
        code.write_text(original)
        notes.unlink()
    after = record(run_dir)
    assert after["resumed"][0]["changed"] == {"code": ["rltemplate/learning/optim.py"]}
    assert git(fork, "show", f"{after['git']['ref']}:rltemplate/learning/optim.py").endswith("# another\n")
    assert after["git"]["commit"] != commit

    other = killed("ppo", tmp_path / "other")
    facts = record(other)
    facts["versions"]["torch"] = "1.0"
    facts["machine"]["cpu"] = "an abacus"
    (other / paths.RECORD).write_text(json.dumps(facts))
    assert_refused(start("resume", f"run={other}"), "the run began with other libraries: torch 1.0 ->")
    facts["versions"]["torch"] = torch.__version__
    (other / paths.RECORD).write_text(json.dumps(facts))
    config = other / paths.CONFIG
    config.write_text(config.read_text().replace("gamma: 0.98", "gamma: 0.9"))
    assert_refused(start("resume", f"run={other}"), "algo.gamma=0.9: step_")
    config.write_text(config.read_text().replace("gamma: 0.9", "gamma: 0.98"))
    start("resume", f"run={other}", status=0)
    assert record(other)["resumed"][0]["changed"]["cpu"][0] == "an abacus"


@pytest.mark.long
def test_a_run_without_a_checkpoint_starts_again_unless_that_wipes_what_it_has_shown(
    start: Start, straight: Callable[[str], Path], tmp_path: Path
) -> None:
    early, finished = tmp_path / "early", tmp_path / "finished"
    kill_early(start, early)
    start("resume", f"run={early}", status=0)
    assert_same(early, straight("sac"))
    assert record(early)["resumed"][0]["checkpoint"] is None
    words = ["algo=ppo", "env=CartPole", *SHRUNK["ppo"], "total_env_steps=64", *OBSERVED[:-1], "logger=none"]
    start("train", *words, "checkpoint_every=0", f"run_dir={finished}", status=0)
    before = listing(finished)
    assert_refused(start("resume", f"run={finished}", "total_env_steps=128"), "has no checkpoint")
    assert listing(finished) == before


@pytest.mark.long
def test_a_run_that_is_going_on_is_left_alone(start: Start, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    endless = [word for word in WORK["ppo"] if not word.startswith("total_env_steps")]
    begun = start("train", *endless, "total_env_steps=100000000", f"run_dir={run_dir}")
    begun.until(saved(run_dir, 96))
    assert_refused(start("resume", f"run={run_dir}"), f"in use, by process {begun.process.pid} on ")
    begun.process.kill()
    begun.end()
    # Of two that go on at once, one does.
    both = [start("resume", f"run={run_dir}") for _ in range(2)]
    limit = time.monotonic() + MOMENT_S
    while all(each.process.poll() is None for each in both) and time.monotonic() < limit:
        time.sleep(0.01)
    (ended,) = [each for each in both if each.process.poll() is not None]
    assert_refused(ended, "in use")


@pytest.mark.long
def test_damage_is_named_and_as_much_as_possible_is_kept(
    start: Start, straight: Callable[[str], Path], killed: Callable[[str, Path], Path], tmp_path: Path
) -> None:
    run_dir = killed("sac", tmp_path / "run")
    checkpoints = list_checkpoints(run_dir)
    content = bytearray(checkpoints[-1].read_bytes())
    content[len(content) // 3] ^= 1
    checkpoints[-1].write_bytes(content)
    again = start("resume", f"run={run_dir}", status=0)
    assert f"{checkpoints[-1].name} is damaged" in again.said
    assert "an older one is taken" in again.said
    assert record(run_dir)["resumed"][0]["checkpoint"] == checkpoints[-2].name
    assert_same(run_dir, straight("sac"))


# --- Trouble in mid-run ----------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MB of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=6m", "none", str(folder)]
    if subprocess.run(mounting, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(ballast: Path) -> None:
    """Take all the space that there is."""
    with ballast.open("ab", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))


@pytest.mark.long
def test_a_disk_that_is_full_for_a_while_costs_nothing(
    start: Start, straight: Callable[[str], Path], small_disk: Path
) -> None:
    """Lines wait in memory, checkpoints for the next time, and the run becomes what it would have been."""
    run_dir, ballast = small_disk / "run", small_disk / "ballast"
    # Every step in the trace, so that no room that a file system keeps for a file suffices.
    begun = start("train", *WORK["ppo"], "trace=step", f"run_dir={run_dir}")
    begun.until(saved(run_dir, 480))
    begun.process.send_signal(signal.SIGSTOP)
    fill(ballast)
    begun.process.send_signal(signal.SIGCONT)
    begun.until(lambda: "could not be written" in begun.said and "lines wait in memory" in begun.said)
    begun.process.send_signal(signal.SIGSTOP)
    good = list_checkpoints(run_dir)[-1]
    assert f"No space left on device; the last checkpoint is {good.name}" in begun.said
    load_checkpoint(good)
    ballast.unlink()
    begun.process.send_signal(signal.SIGCONT)
    assert begun.end() == 0, begun.said
    assert "no line is lost" in begun.said
    assert not list(run_dir.glob("checkpoints/.*.tmp"))
    assert rows(run_dir) == rows(straight("ppo"))
    lines = (run_dir / paths.TRACE).read_text().splitlines()
    ends = [json.loads(line)[1] for line in lines if line.startswith('["iteration"')]
    assert ends == list(range(150))
    assert sum(line.startswith('["step"') for line in lines) == 150 * 16


@pytest.mark.long
def test_a_disk_that_stays_full_costs_the_run_and_not_its_checkpoint(
    fork: Path, start: Start, straight: Callable[[str], Path], small_disk: Path
) -> None:
    run_dir, ballast = small_disk / "run", small_disk / "ballast"
    begun = start("train", *WORK["ppo"], "logger.tensorboard=false", f"run_dir={run_dir}")
    begun.until(saved(run_dir, 480))
    fill(ballast)
    assert begun.end() == 1, begun.said
    last = begun.said.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert "No space left on device" in last
    assert "Traceback" not in begun.said
    # A new run gets nothing.
    refs = git(fork, "for-each-ref", "refs/runs")
    refused = start("train", *WORK["ppo"], f"run_dir={small_disk / 'new' / 'run'}", status=1)
    assert "No space left on device; nothing was begun" in refused.said
    assert "Traceback" not in refused.said
    assert {path.name for path in small_disk.iterdir()} == {"ballast", "run"}
    assert git(fork, "for-each-ref", "refs/runs") == refs
    ballast.unlink()
    start("resume", f"run={run_dir}", status=0)
    assert_same(run_dir, straight("ppo"))


FRAGILE = """
import os
from pathlib import Path
import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv
class Fragile(CartPoleEnv):
    taken = 0
    def step(self, action):
        self.taken += 1
        obs, *rest = super().step(action)
        trouble = Path(__file__).with_name("trouble")
        if self.taken == 700 and trouble.exists():
            kind = trouble.read_text()
            if kind == "dies":
                os._exit(3)
            return obs, 1e25, *rest[1:]  # its square is infinite in 32 bits
        return obs, *rest
gym.register("Fragile-v0", Fragile, max_episode_steps=500)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "workers", "message"),
    [
        ("dies", 2, " died (exit status 3)"),
        ("huge", 0, " became inf at ["),
    ],
)
def test_an_environment_that_fails_costs_the_work_since_the_last_checkpoint(
    start: Start, tmp_path: Path, kind: str, workers: int, message: str
) -> None:
    (tmp_path / "fragile.py").write_text(FRAGILE)
    (tmp_path / "trouble").write_text(kind)
    run_dir, path = tmp_path / "run", {"PYTHONPATH": str(tmp_path)}
    words = [word for word in WORK["ppo"] if not word.startswith(("env=", "total_env_steps="))]
    words += ["total_env_steps=1920", "env=fragile:Fragile-v0", f"env.num_workers={workers}", "logger=none"]
    words += ["algo.gamma=0.98", "algo.normalize_reward=false"]
    begun = start("train", *words, f"run_dir={run_dir}", status=1, **path)
    assert message in begun.said
    assert record(run_dir)["status"] == "failed"
    assert "Traceback" not in begun.said
    lines = begun.said[begun.said.index("error: ") :].strip().splitlines()
    good = list_checkpoints(run_dir)[-1]
    assert 1000 < load_checkpoint(good).state["env_steps"] <= 1376
    if kind == "huge":  # 700 steps of two environments are in the 44th iteration, which is number 43
        assert lines[0].endswith("in iteration 43, environment steps 1,376 to 1,408")
        assert lines[1].startswith(f"the last checkpoint is {good.name}; its fingerprints are")
        assert record(run_dir)["error"] == f"RunError: {lines[0].removeprefix('error: ')}"
    else:
        assert lines[-1].startswith("error: fragile:Fragile-v0")
    (tmp_path / "trouble").unlink()
    start("resume", f"run={run_dir}", "env.num_workers=1", status=0, **path)
    assert record(run_dir)["resumed"][-1]["changed"] == {"env.num_workers": [workers, 1]}
    start("train", *words, f"run_dir={tmp_path / 'unbroken'}", status=0, **path)
    assert (run_dir / paths.TRACE).read_bytes() == (tmp_path / "unbroken" / paths.TRACE).read_bytes()
