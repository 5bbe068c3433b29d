"""Every run in a fresh process: one, or the jobs of a sweep.

A single run replaces the process that checked the command line, so that its exit status, signals and
console are the run's own. In a sweep Hydra's launcher decides where and when a job starts, and what it
starts is again such a process, with the same environment: a job leaves nothing behind for the next one, and
its result is the result of the single run with its configuration, bit for bit.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from rltemplate.config import Config, from_dict, to_dict
from rltemplate.run import paths
from rltemplate.run.determinism import prepared
from rltemplate.types import ConfigError

PROJECT = Path(__file__).resolve().parents[1]
WORKER = "rltemplate"
JOB_VARIABLE = "RLTEMPLATE_JOB"
SWEEP_VARIABLE = "RLTEMPLATE_SWEEP"
INHERITED_VARIABLE = "RLTEMPLATE_INHERITED"

# What launchers change in the environment of their workers and a single run therefore would not have.
_CHANGED_BY_LAUNCHERS = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMBA_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "ENABLE_IPC",
    "KMP_INIT_AT_FORK",
    "CUDA_VISIBLE_DEVICES",
    "PYTHONPATH",
)
_FINISHED, _REFUSED, _INTERRUPTED = 0, 2, (128 + signal.SIGINT, 128 + signal.SIGTERM)


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """The sweep that a run belongs to: its id, its folder and the number of the job."""

    id: str
    dir: str
    job: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """All that the process of a run is told.

    `snapshot` is the text of `Snapshot.to_json`. In a sweep it stays behind in the index until the run's
    process reads it there: it may name hundreds of files, and Linux allows 128 KiB for one variable.

    With `resume` the run of the folder goes on; `accept` says that it may with changed code and libraries.
    """

    config: dict[str, Any]
    run_id: str
    run_dir: str
    command: list[str]
    overrides: list[str]
    sweep: Membership | None = None
    snapshot: str | None = None
    resume: bool = False
    accept: bool = False

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """The job that `to_json` wrote."""
        values = json.loads(text)
        if values["sweep"] is not None:
            values["sweep"] = Membership(**values["sweep"])
        return cls(**values)

    @classmethod
    def from_environment(cls) -> Job:
        """The job of this process, taken out of the environment so that its children do not see it."""
        text = os.environ.pop(JOB_VARIABLE, None)
        if text is None:
            raise ConfigError("no job given: start runs with scripts/train.py, which prepares their process")
        job = cls.from_json(text)
        if job.sweep is None or job.snapshot is not None:
            return job
        index = Sweep(Path(job.sweep.dir)).read()
        return replace(job, snapshot=json.dumps(index["snapshot"]))


def run_folder(config: Config, run_id: str, env_name: str) -> Path:
    """Where the run goes, absolute: `run_dir` as it is, else `<runs_dir>/<algo>-<env>/<run_id>`."""
    if config.run_dir is not None:
        return Path(config.run_dir).expanduser().absolute()
    group = paths.safe_name(f"{config.algo.name}-{env_name}")
    return Path(config.runs_dir).expanduser().absolute() / group / run_id


def check_folder(config: Config) -> None:
    """Raise `ConfigError` unless the run's folder can be made, or is there and empty."""
    key = "runs_dir" if config.run_dir is None else "run_dir"
    text = config.runs_dir if config.run_dir is None else config.run_dir
    if not text.strip():
        raise ConfigError(f"{key}: expected the name of a folder")
    folder = Path(text).expanduser().absolute()
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{key}={text}: is a file; expected a folder")
    if key == "run_dir" and folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"{key}={text}: is not empty; a run needs a folder of its own")
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{key}={text}: cannot be written, {there} does not allow it")


def worker_command() -> list[str]:
    """The command of a run's process.

    `-P` keeps the current folder out of the import path: started from inside another checkout, a run would
    otherwise import that one's code.
    """
    return [sys.executable, "-P", "-m", WORKER]


def worker_environment(job: Job, config: Config, base: Mapping[str, str]) -> dict[str, str]:
    """The environment of a run's process, the same for equal jobs whoever starts them."""
    environment = prepared(base, config.determinism, config.num_threads)
    for name in (SWEEP_VARIABLE, INHERITED_VARIABLE):
        environment.pop(name, None)
    others = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    own = str(PROJECT)
    environment["PYTHONPATH"] = os.pathsep.join([own, *(path for path in others if path != own)])
    environment[JOB_VARIABLE] = job.to_json()
    return environment


def run_single(
    config: Config, command: Sequence[str], *, env_name: str | None = None, overrides: Sequence[str] = ()
) -> NoReturn:
    """Become the process of this run. `env_name` names the folder; without it the environment's id does."""
    check_folder(config)
    run_id = paths.new_id(f"seed{config.seed}")
    job = Job(
        config=to_dict(config),
        run_id=run_id,
        run_dir=str(run_folder(config, run_id, env_name or config.env.id)),
        command=list(command),
        overrides=list(overrides),
    )
    become(job)


def become(job: Job) -> NoReturn:
    """Become the process of a run."""
    sys.stdout.flush()
    sys.stderr.flush()
    words = worker_command()
    try:
        os.execve(words[0], words, worker_environment(job, from_dict(job.config), os.environ))
    except OSError as error:  # an override of a hundred kilobytes, for instance
        raise ConfigError(f"the process of the run could not be started: {error}") from error


class Sweep:
    """The folder of a sweep and its index `sweep.json`.

    Jobs may run in several processes at once. Each of them changes the index under a lock and replaces the
    file as a whole, so that a reader always finds a complete one.
    """

    def __init__(self, folder: Path) -> None:
        """Take part in the sweep whose folder exists."""
        self.folder = folder
        self._received: list[int] = []  # signals, from just before the launcher is split off
        self._handled: list[int] = []

    @classmethod
    def create(cls, config: Config, command: Sequence[str], num_jobs: int | None) -> Sweep:
        """Make the folder, and record the code as it is now: the last job may start in days."""
        from rltemplate.run.snapshot import take_snapshot

        sweep_id = paths.new_id("sweep")
        folder = Path(config.runs_dir).expanduser().absolute() / paths.SWEEPS / sweep_id
        snapshot = take_snapshot(PROJECT, keep_ref=sweep_id)
        folder.mkdir(parents=True)
        index = {
            "id": sweep_id,
            "status": "running",
            "command": list(command),
            "num_jobs": num_jobs,
            "start_time": _now(),
            "end_time": None,
            "signal": None,
            "snapshot": json.loads(snapshot.to_json()),
            "jobs": [],
        }
        _write(folder / paths.SWEEP_INDEX, index)
        return cls(folder)

    @classmethod
    def from_environment(cls) -> Sweep | None:
        """The sweep that this process works for, if any."""
        folder = os.environ.get(SWEEP_VARIABLE)
        return None if folder is None else cls(Path(folder))

    def read(self) -> dict[str, Any]:
        """The index as it is now."""
        index: dict[str, Any] = json.loads((self.folder / paths.SWEEP_INDEX).read_text(encoding="utf-8"))
        return index

    @contextlib.contextmanager
    def _changed(self) -> Iterator[dict[str, Any]]:
        # Released by the kernel when its holder dies, so a killed job locks nobody out.
        with (self.folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            index = self.read()
            yield index
            index["jobs"].sort(key=lambda job: job["job"])
            _write(self.folder / paths.SWEEP_INDEX, index)

    def fork_launcher(self) -> int:
        """Split off the process in which Hydra's launcher works; its id, and 0 inside of it.

        It leaves the process group of the terminal, and takes workers and runs with it. Ctrl-C would
        otherwise reach all of them, and kill the workers that wait for the runs; now only this process hears
        it, and tells the runs.
        """
        inherited = {name: os.environ.get(name) for name in _CHANGED_BY_LAUNCHERS}
        sys.stdout.flush()
        sys.stderr.flush()
        # From before there is a launcher: a signal in between would end this process and leave it alone.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, _: self._received.append(number))
                self._handled.append(number)
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            for each in self._handled:
                signal.signal(each, signal.SIG_DFL)
            os.environ[INHERITED_VARIABLE] = json.dumps(inherited)
            os.environ[SWEEP_VARIABLE] = str(self.folder)
            # Workers import this package to find the function that they are to call.
            others = os.environ.get("PYTHONPATH")
            os.environ["PYTHONPATH"] = os.pathsep.join([str(PROJECT), *([others] if others else [])])
        return pid

    def wait(self, launcher: int) -> bool:
        """Wait for the launcher and pass signals on to the runs; whether it came to its end.

        The first signal asks the runs to end, which may take them an iteration; the second reaches them
        again; the third ends everything at once.
        """
        passed = 0
        while not (ended := os.waitpid(launcher, os.WNOHANG))[0]:
            for number in self._received[passed:]:
                passed += 1
                if passed > 2:
                    os.killpg(launcher, signal.SIGKILL)
                else:
                    self.stop(number)
            time.sleep(0.05)
        for number in self._handled:
            signal.signal(number, signal.SIG_IGN)
        return os.waitstatus_to_exitcode(ended[1]) == 0

    def stop(self, number: int) -> None:
        """Start no further jobs and send the signal to those that run on this machine."""
        with self._changed() as index:
            index["signal"] = index["signal"] or int(number)
            for job in index["jobs"]:
                if job["status"] == "running" and job["host"] == socket.gethostname():
                    # A run knows two signals; a closed terminal is a request to end.
                    sent = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(job["pid"], sent)

    def run(
        self, number: int, config: Config, overrides: Sequence[str], *, env_name: str, console: bool
    ) -> float | None:
        """Run a job to its end and return its last evaluation. Trouble is recorded and never raised.

        Without a console of its own the job writes to `job_<number>.log` in the folder of the sweep.
        """
        run_id = paths.new_id(f"seed{config.seed}")
        folder = run_folder(config, run_id, env_name)
        title = f"#{number} {' '.join(overrides)}"
        with self._changed() as index:
            entry: dict[str, Any] = {
                "job": number,
                "overrides": list(overrides),
                "run_id": run_id,
                "run_dir": os.path.relpath(folder, self.folder),
                "status": "not started",
                "exit_status": None,
                "start_time": None,
                "end_time": None,
                "host": socket.gethostname(),
                "pid": None,
                "return": None,
            }
            index["jobs"].append(entry)
            if index["signal"] is not None:
                return None
            job = Job(
                config=to_dict(config),
                run_id=run_id,
                run_dir=str(folder),
                command=index["command"],
                overrides=list(overrides),
                sweep=Membership(id=index["id"], dir=str(self.folder), job=number),
            )
            log = None if console else self.folder / f"job_{number}.log"
            print(title if log is None else f"{title}\n   output in {log}", flush=True)
            environment = worker_environment(job, config, _inherited_environment())
            try:
                process = _spawn(worker_command(), environment, log)
            except OSError as error:
                problem = f"its process could not be started: {error}"
                entry |= {"status": "failed", "end_time": _now(), "problem": problem}
                print(f"#{number} failed: {problem}", flush=True)
                return None
            # Still under the lock: whoever stops the sweep now finds the process or prevents it.
            entry |= {"status": "running", "start_time": _now(), "pid": process.pid}
        code = process.wait()
        exit_status = code if code >= 0 else 128 - code  # as a shell reports a signal
        with self._changed() as index:
            entry = next(job for job in index["jobs"] if job["run_id"] == run_id)
            entry |= {"status": _status(exit_status), "exit_status": exit_status, "end_time": _now()}
            entry["return"] = result = _last_return(folder)
        if log is not None:
            print(f"#{number} {entry['status']}", flush=True)
        return result

    def refuse(self, number: int, overrides: Sequence[str], reason: str) -> None:
        """Record a job that cannot be run, for what is wrong with its configuration."""
        with self._changed() as index:
            index["jobs"].append(
                {
                    "job": number,
                    "overrides": list(overrides),
                    "run_id": None,
                    "run_dir": None,
                    "status": "refused",
                    "exit_status": _REFUSED,
                    "start_time": None,
                    "end_time": None,
                    "host": socket.gethostname(),
                    "pid": None,
                    "return": None,
                    "problem": reason,
                }
            )

    def finish(self, launched: bool) -> int:
        """Close the index, print the table of jobs and return the exit status of the command.

        `launched` says whether the launcher came to its end, so that no job is missing.
        """
        exit_status: int
        with self._changed() as index:
            jobs = index["jobs"]
            complete = launched and len(jobs) >= (index["num_jobs"] or 1)
            for job in jobs:
                if job["status"] == "running":  # its supervisor died
                    job["status"] = "failed" if index["signal"] is None else "interrupted"
            if index["signal"] is not None:
                index["status"], exit_status = "interrupted", 128 + index["signal"]
            elif complete and all(job["status"] == "finished" for job in jobs):
                index["status"], exit_status = "finished", _FINISHED
            else:
                refused = bool(jobs) and all(job["status"] == "refused" for job in jobs)
                index["status"], exit_status = "failed", _REFUSED if refused else 1
            index["end_time"] = _now()
        _print_table(index, self.folder)
        return exit_status


def _inherited_environment() -> dict[str, str]:
    """The environment with which the command was started, as far as the launcher has changed it."""
    environment = dict(os.environ)
    inherited = json.loads(environment.get(INHERITED_VARIABLE, "{}"))
    # On a cluster the scheduler says which devices a job may use.
    kept = {"CUDA_VISIBLE_DEVICES"} if "SLURM_JOB_ID" in environment else set()
    for name, value in inherited.items():
        if name in kept:
            continue
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value
    return environment


def _spawn(words: list[str], environment: dict[str, str], log: Path | None) -> subprocess.Popen[bytes]:
    sys.stdout.flush()
    sys.stderr.flush()
    if log is None:
        return subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL)
    with log.open("ab") as out:
        return subprocess.Popen(
            words, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
        )


def _status(exit_status: int) -> str:
    if exit_status in _INTERRUPTED:
        return "interrupted"
    return {_FINISHED: "finished", _REFUSED: "refused"}.get(exit_status, "failed")


def _last_return(folder: Path) -> float | None:
    """The return in the run's last evaluation, if it came to one."""
    try:
        record = json.loads((folder / paths.RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    value = (record.get("final_metrics") or {}).get("eval/return")
    return None if value is None else float(value)


def _print_table(index: Mapping[str, Any], folder: Path) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=f"sweep {index['id']}: {index['status']}", title_justify="left")
    for column in ("job", "overrides", "status", "return", "run"):
        table.add_column(column, overflow="fold", justify="right" if column == "return" else "left")
    for job in index["jobs"]:
        shown = "-" if job["return"] is None else f"{job['return']:.2f}"
        style = None if job["status"] == "finished" else "red"
        overrides = escape(" ".join(job["overrides"]))
        table.add_row(f"#{job['job']}", overrides, job["status"], shown, job["run_id"] or "-", style=style)
    console = Console()
    console.print(table)
    for job in index["jobs"]:
        if job["status"] in ("failed", "refused"):
            log = folder / f"job_{job['job']}.log"
            where = (
                log if log.exists() else os.path.normpath(folder / job["run_dir"]) if job["run_dir"] else ""
            )
            reason = job.get("problem") or f"exit status {job['exit_status']}, see {where}"
            text = f"#{job['job']} {' '.join(job['overrides'])}: {job['status']}, {reason}"
            console.print(text, style="red", markup=False, highlight=False, soft_wrap=True)
    console.print(f"{folder / paths.SWEEP_INDEX}", markup=False, highlight=False, soft_wrap=True)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _write(path: Path, index: Mapping[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)
