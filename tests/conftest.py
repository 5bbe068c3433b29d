"""What tests share: the real configuration, composed as a user would, and small environments."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pkgutil
import resource
import sys

# Before libraries are loaded, which read it once: otherwise results and times depend on the number of cores.
os.environ["OMP_NUM_THREADS"] = "1"
# In this process, and in those that import flipped_bits too, ATEN_TEST_FAULT flips a bit.
FAULTS = f"{os.path.dirname(__file__)}/faults"  # noqa: PTH120 - before any other import
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [FAULTS, os.environ.get("PYTHONPATH")]))
sys.path.append(FAULTS)
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import flipped_bits  # noqa: F401
import gymnasium as gym
import numpy as np
import pytest
import torch
from filelock import FileLock
from hydra import compose, initialize_config_dir

from rltemplate.algos.ppo_config import PPOConfig
from rltemplate.algos.ppo_recurrent_config import PPORecurrentConfig
from rltemplate.learning.algorithm import StatefulAlgorithm
from rltemplate.learning.config import OffPolicyConfig
from runlab.config.loading import to_config
from runlab.config.project import ALGORITHMS, project, project_folder
from runlab.config.schema import Config, EnvConfig, register_schemas
from runlab.determinism import kernels
from runlab.envs.envs import Envs
from runlab.run import paths
from runlab.run.checkpoint import load_checkpoint
from runlab.run.job import Job
from runlab.run.manifest import list_checkpoints
from runlab.run.record import SweepRecord
from runlab.run.trace import digest, entries

ROOT = Path(__file__).resolve().parents[1]
NAME = project_folder().name  # of the project's package, which make rename changes
build = project().build
DEVICE = os.environ.get("TEST_DEVICE", "cpu")  # of most runs; `cuda` tries them on a GPU
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of a job in the background; tests press Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What makes one iteration of an algorithm a matter of a tenth of a second, by the type of its configuration.
FEW_STEPS = {
    PPOConfig: "algo.num_steps=16 algo.num_minibatches=4 algo.update_epochs=2",
    PPORecurrentConfig: "algo.sequence_length=4 algo.memory_size=8",
    OffPolicyConfig: "algo.steps_per_iteration=24 algo.learning_starts=8 algo.batch_size=8 "
    "algo.buffer_size=64",
}
SHRUNK = {
    name: ["env.num_envs=2", *" ".join(FEW_STEPS.get(kind, "") for kind in entry.config.mro()).split()]
    for name, entry in ALGORITHMS.items()
}
# Algorithms with a class of `learning/`. Another one has no functions of the engine, and a state of its own.
ON_LEARNING = [
    name
    for name, entry in ALGORITHMS.items()
    if issubclass(pkgutil.resolve_name(entry.implementation), StatefulAlgorithm)
]
# An environment for each algorithm, with continuous actions where it takes these.
TRIED_IN = {name: "CartPole" if entry.needs_discrete else "Pendulum" for name, entry in ALGORITHMS.items()}


def plain(words: Sequence[str]) -> list[str]:
    """The words of a run that is the same on every machine and not compiled, where `words` say nothing."""
    keys = {word.partition("=")[0] for word in words}
    words = ("num_threads=1", "compile=false", "env.num_workers=0", f"device={DEVICE}")
    return [word for word in words if word.partition("=")[0] not in keys]


def small(algo: str, *words: str, env: str | None = None) -> list[str]:
    """Words for a small run of an algorithm; of those about `algo.` only the ones that it has."""
    keys = {f"algo.{spec.name}" for spec in dataclasses.fields(ALGORITHMS[algo].config)}
    own = [word for word in words if not word.startswith("algo.") or word.partition("=")[0] in keys]
    env = env or ("CartPole" if algo == "ppo" else TRIED_IN[algo])
    return [f"algo={algo}", f"env={env}", *SHRUNK[algo], *plain(own), *own]


Configure = Callable[..., Config]


@pytest.fixture(autouse=True)
def games_are_registered_by_who_needs_them() -> Iterator[None]:
    """No test sees games because one before it, in the same process, has imported ale_py."""
    yield
    if sys.modules.pop("ale_py", None):
        for name in [name for name, spec in gym.registry.items() if "ale_py" in str(spec.entry_point)]:
            del gym.registry[name]


@pytest.fixture(autouse=True)
def products_and_threads_are_restored() -> Iterator[None]:
    """No test computes in the way or with the threads of one before it."""
    yield
    kernels.use("plain")
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def configure() -> Configure:
    """Compose `conf/` with overrides, recipe included, and return the typed configuration."""

    def build(*overrides: str) -> Config:
        register_schemas()
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            return to_config(compose("config", overrides=[*plain(overrides), *overrides]))

    return build


def job_in(run_dir: Path, configure: Configure, *more: str, **further: Any) -> Job:
    """A job for this process, of a short run; `further` are other fields of `Job`."""
    words = small("ppo", "env.max_episode_steps=40", "total_env_steps=256", "determinism=fast")
    return Job(
        config=configure(*words, "logger=none", "video_every=0", *more),
        run_id="run",
        run_dir=str(run_dir),
        command=["train.py"],
        overrides=[],
        snapshot=json.dumps({"problem": "no snapshot in this test"}),
        **further,
    )


def env_config(
    env_id: str, num_envs: int = 1, num_workers: int = 0, limit: int | None = None, **changes: Any
) -> EnvConfig:
    """The configuration of an environment, with `changes` to what conf/env/_gymnasium.yaml has."""
    values: dict[str, Any] = {"kwargs": {}, "wrappers": {}, "training_wrappers": {}, "infos": []}
    values |= {"logged_infos": [], **changes}
    return EnvConfig(id=env_id, num_envs=num_envs, num_workers=num_workers, max_episode_steps=limit, **values)


def play(envs: Envs, start: int, steps: int) -> list[list[Any]]:
    """The results of steps `start` to `start + steps` to the last bit, taken down only at the end."""
    taken, shape, nvec = [], (envs.num_envs, envs.codec.action_size), envs.codec.nvec
    for rng in map(np.random.default_rng, range(start, start + steps)):
        action = rng.integers(0, nvec, shape) if nvec else rng.uniform(-1.2, 1.2, shape).astype(np.float32)
        taken.append(envs.step(action))
    return [[*(array.tobytes() for array in step[:5]), step.episodes] for step in taken]


def git(folder: Path, *words: str) -> str:
    """The output of a git command."""
    identity = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.org"]
    command = ["git", *identity, *words]
    return subprocess.check_output(command, cwd=folder, env=environment(), stderr=subprocess.PIPE, text=True)


_shared: list[Path] = []


@pytest.fixture(scope="session", autouse=True)
def shared_by_all_processes(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Where `made_once` puts folders."""
    base = tmp_path_factory.getbasetemp()
    _shared[:] = [base.parent if "PYTEST_XDIST_WORKER" in os.environ else base]


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """A folder that the first process of these tests that needs it makes, for all of them.

    Tests only read it.
    """
    folder = _shared[0] / f"shared-{name}"
    made = Path(f"{folder}.made")  # in the end: another process takes nothing that is half made
    with FileLock(f"{folder}.lock"):
        if not made.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            made.touch()
    return folder


@pytest.fixture(scope="session")
def fork(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project in a repository of its own, so that runs leave their refs there."""
    copy = tmp_path_factory.mktemp("forks") / "fork"
    copy_project(copy)
    return copy


def copy_project(copy: Path) -> None:
    """Puts the project as it is into a new folder, as the only commit of a repository."""
    shutil.copytree(made_once("project", commit_project), copy, symlinks=True)
    git(copy, "update-index", "-q", "--refresh")  # it knows the files of the other folder


def commit_project(copy: Path) -> None:
    """Puts the project as it is into a folder, as a commit; the folder may have a repository already."""
    for name in git(ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0"):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    git(copy, "init", "-q", "-b", "main")
    git(copy, "add", "-A")
    git(copy, "commit", "-q", "-m", "a fork")


def program(project: Path, command: str) -> list[str]:
    """The command line of a command of a project's own code, in whatever folder it is called."""
    if command == "train":
        return [sys.executable, str(project / "scripts" / "train.py")]
    return ["env", f"PYTHONPATH={project}", sys.executable, "-P", "-m", "runlab", command]


def environment(**more: str) -> dict[str, str]:
    """This process's environment without settings of W&B, Python and git, and more variables."""
    # What git hands to its hooks would lead to another repository.
    dropped = ("WANDB", "PYTHON", "GIT_")
    of_git = "GIT_CONFIG_"
    clean = {k: v for k, v in os.environ.items() if k.startswith(of_git) or not k.startswith(dropped)}
    return {**clean, "PYTHONPATH": FAULTS, **more}


def run(
    folder: Path, *command: str, status: int | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, with more variables, to its end with the exit status."""
    done = subprocess.run(command, cwd=folder, env=environment(**variables), capture_output=True, text=True)
    assert status in (None, done.returncode), done.stdout + done.stderr
    return done


def run_train(
    project: Path, folder: Path, *words: str, status: int | None = None, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run `scripts/train.py` of a project in a folder, as a user would, to its end with the exit status."""
    return run(folder, *program(project, "train"), *words, status=status, **more)


def until(happened: Callable[[], bool], seconds: float = 120.0) -> None:
    """Wait for something that another process does; a busy machine may take long for what takes seconds."""
    limit = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < limit
        time.sleep(0.005)


class Started:
    """A command of a project's code in a session of its own, with its output in a file."""

    def __init__(self, project: Path, cwd: Path, log: Path, command: str, *words: str, **more: str) -> None:
        self.log = log
        line = program(project, command)
        if command != "train":  # its code comes first, and then what a test adds
            line[1] = f"PYTHONPATH={project}:{more.get('PYTHONPATH', FAULTS)}"
        before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup lets all that tests start ignore it
        with log.open("wb") as out:
            options: dict[str, Any] = {"cwd": cwd, "env": environment(**more), "stdout": out, "stderr": out}
            self.process = subprocess.Popen([*line, *words], **options, start_new_session=True)
        signal.signal(signal.SIGHUP, before)

    @property
    def said(self) -> str:
        """All that it wrote."""
        return self.log.read_text()

    def until(self, happened: Callable[[], bool]) -> None:
        """Wait for something that the process does."""
        until(lambda: happened() or self.process.poll() is not None)
        assert happened(), self.said

    def end(self, status: int) -> None:
        """Wait for its end, with an exit status as Python gives it."""
        assert self.process.wait(timeout=120) == status, self.said

    def kill(self) -> int:
        """Kill the process and all that stay in its session; the number of them."""
        listed = subprocess.run(["pgrep", "-s", f"{self.process.pid}"], capture_output=True, check=False)
        pids = [int(pid) for pid in listed.stdout.split()]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        until(lambda: not any(map(alive, pids)))
        self.process.wait()
        return len(pids)


@contextlib.contextmanager
def killed_at(kind: type[Any], env_steps: int) -> Iterator[None]:
    """A run of an algorithm ends as if it was killed, once it has made so many steps."""
    train_iteration = kind.train_iteration

    def ending(algorithm: Any) -> Any:
        if algorithm.env_steps >= env_steps:
            raise KeyboardInterrupt
        return train_iteration(algorithm)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "train_iteration", ending)
        with pytest.raises(KeyboardInterrupt):
            yield


@contextlib.contextmanager
def full_disk(size: int) -> Iterator[None]:
    """The kernel refuses what would make a file longer than `size` bytes, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


Start = Callable[..., Started]


@pytest.fixture
def start(fork: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Start a command of the fork in an empty folder, and wait for its end if an exit status is given.

    Nothing of it outlives the test.
    """
    started: list[Started] = []
    logs = tmp_path_factory.mktemp("said")

    def begin(command: str, *words: str, status: int | None = None, **more: str) -> Started:
        started.append(Started(fork, tmp_path, logs / f"{len(started)}.log", command, *words, **more))
        if status is not None:
            started[-1].end(status)
        return started[-1]

    yield begin
    for each in started:
        each.kill()


def alive(pid: int | str) -> bool:
    """True while a process runs; one that only waits to be collected does not."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.fixture
def own_scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Temporary folders where it can be seen whether they are gone."""
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    yield
    assert list((tmp_path / "scratch").iterdir()) == []


def write_run(
    runs_dir: Path,
    seed: int = 1,
    returns: Sequence[float] = (0.0, 1.0),
    *,
    algo: str = "ppo",
    env: str = "Thing",
    tag: str = "",
    config: Mapping[str, Any] | None = None,
    **record: Any,
) -> Path:
    """Writes a folder as a finished run leaves it, with an evaluation and a loss every hundred steps.

    `config` is merged into its configuration (nested), `record` replaces entries of its record.
    """
    run_dir = runs_dir / f"{algo}-{env}" / f"run-{seed}{tag}"
    run_dir.mkdir(parents=True)
    ref = {"ref": f"refs/runs/{run_dir.name}", "tree": "a" * 40, "base_commit": "b" * 40, "dirty": False}
    values: dict[str, Any] = {
        "schema": 1,
        "id": run_dir.name,
        "status": "finished",
        "overrides": [f"env={env}"],
        "started_at": f"2026-01-01T00:{seed % 60:02d}:00.000Z",
        "duration_s": 60.0,
        "final_metrics": {"eval/return": returns[-1]} if returns else {},
        "git": ref,
        "determinism": {"level": "repeat", "settings": {"mkl": True}, "checks": {"repeats": {"holds": True}}},
        "machine": {"cpu": "a processor"},
    }
    (run_dir / paths.RECORD).write_text(json.dumps(values | record))
    keys: dict[str, Any] = {
        "algo": {"name": algo, "gamma": 0.99},
        "env": {"id": f"{env}-v0", "max_episode_steps": None, "kwargs": {}},
        "determinism": {"level": "repeat"},
        "logger": {"console": True},
        "total_env_steps": 100 * len(returns),
    }
    keys |= {"recipe": f"{algo}-{env}", "seed": seed, "trace": "iteration", "experiment": None, "note": None}
    for key, value in (config or {}).items():
        keys[key] = {**keys[key], **value} if isinstance(value, dict) and key in keys else value
    (run_dir / paths.CONFIG).write_text(json.dumps(keys))  # which is YAML too
    written = [
        {"env_steps": 100 * (i + 1), "wall_time_s": i, "eval/return": value, "loss/policy": -value}
        for i, value in enumerate(returns)
    ]
    (run_dir / paths.METRICS).write_text("".join(f"{json.dumps(row)}\n" for row in written))
    return run_dir


class RecordedRun(NamedTuple):
    """A finished run, and the clone of the project in which it left its ref."""

    project: Path
    run_dir: Path


RECORDED = small("ppo", "total_env_steps=192", "eval_every=96", "eval_episodes=2", "video_every=0")
RECORDED += ["log_every=32", "checkpoint_every=64", "logger=none"]


@pytest.fixture(scope="session")
def recorded_run() -> RecordedRun:
    """A finished run of PPO with trace, evaluations and checkpoints, made once for all processes.

    Tests only read it: copy the folder (or clone the project) to change anything.
    """

    def make(folder: Path) -> None:
        copy_project(folder / "project")
        run_train(folder / "project", folder, *RECORDED, status=0)

    folder = made_once("recorded", make)
    (run_dir,) = folder.glob("runs/*/*")
    return RecordedRun(folder / "project", run_dir)


def record(run_dir: Path) -> dict[str, Any]:
    """The record of a run."""
    return json.loads((run_dir / paths.RECORD).read_text())  # type: ignore[no-any-return]


def runs_of(cwd: Path) -> list[Path]:
    """The folders of the runs of the only sweep so far, by number."""
    folders = [path.parent for path in cwd.glob(f"runs/sweeps/*/{paths.SWEEP_INDEX}")]
    run_dirs = [job.run(folder) for folder in folders for job in SweepRecord.read(folder).jobs]
    return [run_dir for run_dir in run_dirs if run_dir is not None]


def newest_state(run_dir: Path) -> dict[str, Any]:
    """The state in the newest checkpoint of a run."""
    return load_checkpoint(list_checkpoints(run_dir)[-1]).state


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl without times."""
    read = map(json.loads, (run_dir / paths.METRICS).read_text().splitlines())
    return [{name: value for name, value in row.items() if "time" not in name} for row in read]


def differences(a: Path, b: Path) -> list[str]:
    """Files of two ended runs and places in their newest checkpoints that are not the same, but for times."""
    places = [paths.METRICS] * (rows(a) != rows(b))
    places += [paths.TRACE] * ((a / paths.TRACE).read_bytes() != (b / paths.TRACE).read_bytes())
    states = newest_state(a), newest_state(b)
    for state in states:
        del state["run"]["training_s"], state["run"]["logger"], state["run"]["sizes"]  # clocks, also in rows
    first, second = (
        {place: digest(value) for place, value in entries(state, "checkpoint")} for state in states
    )
    return places + [place for place in {**first, **second} if first.get(place) != second.get(place)]


def write_video(path: Path, shade: int = 0, frames: int = 3, size: tuple[int, int] = (32, 48)) -> None:
    """A video, the same for the same shade."""
    import av

    from runlab.run.video.episode import open_mp4

    pictures = [np.full((*size, 3), (shade + i) % 256, np.uint8) for i in range(frames)]
    container, stream = open_mp4(path, Fraction(30), pictures[0])
    for picture in pictures:
        container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
    container.mux(stream.encode(None))
    container.close()


def read_video(path: Path) -> list[np.ndarray]:
    """The pictures of a video."""
    import av

    with av.open(str(path)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


Programs = Callable[[], int]


@pytest.fixture
def programs() -> Programs:
    """The number of programs compiled so far in this test."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    return lambda: counters["stats"]["unique_graphs"]


@pytest.fixture
def traced_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's tracer, which decides about programs, without the slow rest of the compiler."""
    compile_: Any = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, fullgraph=False, **_: compile_(function, backend="eager")
    )
