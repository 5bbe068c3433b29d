"""A sweep: its folder, the index of its jobs, and the processes that look after them.

A sweep that ended early goes on like a single run: the same command with `sweep=resume` skips the jobs that
have finished, resumes those that have a run, and starts the others. What decides the bits of its runs must
still be what it was: code and libraries unless `accept=changes` is said, the configuration always.
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import json
import os
import platform
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

from rltemplate.config.loading import from_dict, load_config
from rltemplate.config.schema import Config
from rltemplate.determinism.machine import package_versions
from rltemplate.launch.process import (
    INHERITED_VARIABLE,
    SESSION_VARIABLE,
    SWEEP_VARIABLE,
    worker_command,
    worker_environment,
)
from rltemplate.launch.resume import resume_job
from rltemplate.run import paths
from rltemplate.run.continuation import (
    ACCEPT,
    changed_code,
    changed_libraries,
    deciding,
    few,
    how_back,
)
from rltemplate.run.git.snapshot import GitRecord, Snapshot, take_snapshot
from rltemplate.run.job import PROJECT, Job, new_job
from rltemplate.run.lines import replace_text
from rltemplate.run.lock import RunLock
from rltemplate.run.record import RunRecord, SweepMembership
from rltemplate.types import BOOKKEEPING_KEYS, STOP_SIGNALS, ConfigError

NEWEST = "resume"

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


class Sweep:
    """The folder of a sweep and its index `sweep.json`.

    Jobs may run in several processes at once. Each of them changes the index under a lock and replaces the
    file as a whole, so that a reader always finds a complete one.
    """

    def __init__(self, folder: Path, session: int = 0) -> None:
        """Take part in the sweep whose folder exists, the `session`th time that it was resumed."""
        self.folder = folder
        self.session = session
        self._lock: int | None = None  # a file descriptor
        self._received: list[int] = []  # signals, from just before the launcher is split off
        self._handled: list[int] = []
        self._supervising: int | None = None  # a file descriptor

    @classmethod
    def create(
        cls, config: Config, command: Sequence[str], words: Sequence[str], num_jobs: int | None
    ) -> Sweep:
        """Make the folder, and record the code as it is now: the last job may start in days.

        `words` say what the sweep is, and find it again.
        """
        sweep_id = paths.new_id("sweep")
        sweep = cls(sweeps_dir(config) / sweep_id)
        try:
            sweep.folder.mkdir(parents=True)
        except OSError as error:
            raise ConfigError(f"runs_dir={config.runs_dir}: cannot be made, {error.strerror}") from error
        snapshot = take_snapshot(PROJECT, keep_ref=sweep_id)
        sweep._hold()
        index = {
            "id": sweep_id,
            "status": "running",
            "command": list(command),
            "words": list(words),
            "num_jobs": num_jobs,
            "start_time": _now(),
            "end_time": None,
            "signal": None,
            "resumed": [],
            "snapshot": json.loads(snapshot.to_json()),
            "versions": package_versions(),
            "jobs": [],
        }
        _write(sweep.folder / paths.SWEEP_INDEX, index)
        return sweep

    @classmethod
    def resume(
        cls,
        folder: Path,
        command: Sequence[str],
        configs: Sequence[Config],
        num_jobs: int | None,
        accept: bool = False,
    ) -> Sweep:
        """Go on with the sweep of a folder; nothing of one that has finished is touched.

        `configs` are those that its words stand for now, `num_jobs` how many there are (None: unknown).
        Raises ConfigError in a line or two, and changes nothing, if the sweep or one of its unfinished runs
        is still running, if a configuration has changed, or code or libraries that nobody accepts.
        """
        sweep = cls(folder)
        sweep._hold()
        try:
            if not sweep.finished:
                sweep._go_on(command, configs, num_jobs, accept)
        except ConfigError:
            sweep._release()
            raise
        return sweep

    def _go_on(
        self, command: Sequence[str], configs: Sequence[Config], num_jobs: int | None, accept: bool
    ) -> None:
        index = self.read()
        unfinished = [job for job in index["jobs"] if job["status"] != "finished"]
        run_dirs = [paths.job_run(self.folder, job) for job in unfinished]
        left = [path for path in run_dirs if path is not None and (path / paths.RECORD).is_file()]
        for run_dir in left:  # of a supervisor that was killed, or still in the hands of a scheduler
            lock = RunLock(run_dir)
            lock.acquire()
            lock.release()
        if len(configs) == num_jobs:
            self._check_configs(index, configs)
        kept = index["snapshot"]
        began = {name: kept.get(name) for name in GitRecord.__dataclass_fields__} | {"ref": kept["keep_ref"]}
        first = RunRecord(id=index["id"], status="", git=GitRecord(**began), versions=index["versions"])
        records = [first, *_records(left)]
        snapshot = take_snapshot(PROJECT)
        changed = _changes(index["id"], records, snapshot, accept)
        if snapshot.tree != kept["tree"]:
            snapshot = take_snapshot(PROJECT, keep_ref=f"{index['id']}-{secrets.token_hex(3)}")
            kept = json.loads(snapshot.to_json())
        now = {"snapshot": kept, "versions": package_versions(), "num_jobs": num_jobs}
        with self._changed() as index:
            ended = index["status"]
            resumed = {
                "time": _now(),
                "command": list(command),
                # Whoever is killed has no time to say so.
                "interruption": "killed" if ended == "running" else ended,
                "accept": accept,
                "changed": changed,
            }
            _give_up_running(index)
            index["resumed"].append(resumed)
            index |= {"status": "running", "signal": None, "end_time": None, **now}
        self.session = len(index["resumed"])
        print(f"sweep {index['id']} goes on: {_summary(index)}", flush=True)

    @classmethod
    def from_environment(cls) -> Sweep | None:
        """The sweep that this process works for, if any."""
        folder = os.environ.get(SWEEP_VARIABLE)
        return None if folder is None else cls(Path(folder), int(os.environ[SESSION_VARIABLE]))

    def read(self) -> dict[str, Any]:
        """The index as it is now."""
        index: dict[str, Any] = json.loads((self.folder / paths.SWEEP_INDEX).read_text(encoding="utf-8"))
        return index

    @property
    def finished(self) -> bool:
        """Whether every job has come to its end."""
        return bool(self.read()["status"] == "finished")

    def in_order(self, argv: Sequence[str]) -> list[str]:
        """The words of a command in the order in which the sweep was started, which numbers its jobs."""
        place = {word: i for i, word in enumerate(self.read()["words"])}
        return sorted(argv, key=lambda word: place.get(word, len(place)))

    @contextlib.contextmanager
    def _changed(self) -> Iterator[dict[str, Any]]:
        # Released by the kernel when its holder dies, so a killed job locks nobody out.
        with (self.folder / ".index.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            index = self.read()
            yield index
            index["jobs"].sort(key=lambda job: job["job"])
            _write(self.folder / paths.SWEEP_INDEX, index)

    def _hold(self) -> None:
        """Be the only one who looks after the sweep, or raise ConfigError with a line about who does.

        The lock is not that of runs, which ends with one process: the launcher holds this one as well, and
        may outlive a supervisor that was killed. Runs and workers are other programs and do not.
        """
        fd = os.open(self.folder / paths.LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 200, 0).decode(errors="replace").strip()
            os.close(fd)
            by = f", looked after by {holder}" if holder else ""
            raise ConfigError(
                f"sweep {self.folder.name} is still running{by}; wait, or end that first"
            ) from None
        self._lock = fd
        self._sign(f"process {os.getpid()}")

    def _sign(self, who: str) -> None:
        """Write into the lock who has it."""
        if self._lock is not None:
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, f"{who} on {platform.node()}\n".encode(), 0)

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _check_configs(self, index: Mapping[str, Any], configs: Sequence[Config]) -> None:
        """Raise ConfigError unless the runs that there are have configurations from among these."""
        now = [deciding(config) for config in configs]
        for job in index["jobs"]:
            run_dir = paths.job_run(self.folder, job)
            if run_dir is not None and (run_dir / paths.CONFIG).is_file():
                before = deciding(load_config(run_dir / paths.CONFIG))
                # Which one is meant shows in what they share.
                found = min((_differences(before, each) for each in now), key=len)
                _refuse_differences(job, found, job["run_id"])

    def fork_launcher(self) -> int:
        """Split off the process in which Hydra's launcher works; its id, and 0 inside of it.

        It leaves the process group of the terminal, and takes workers and runs with it. Ctrl-C would
        otherwise reach all of them, and kill the workers that wait for the runs; now only this process hears
        it, and tells the runs. Some schedulers signal every process that there is: the launcher goes on, for
        a run that was asked to end has still to be waited for.
        """
        inherited = {name: os.environ.get(name) for name in _CHANGED_BY_LAUNCHERS}
        sys.stdout.flush()
        sys.stderr.flush()
        # From before there is a launcher: a signal in between would end this process and leave it alone.
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, _: self._received.append(number))
                self._handled.append(number)
        supervisor = os.getpid()

        def leave_it_to_the_supervisor(number: int, _frame: FrameType | None) -> None:
            if os.getppid() != supervisor:  # it was killed
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)

        # This process alone has the end that is written to, which closes with it however it ends.
        supervised, self._supervising = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            os.close(self._supervising)
            threading.Thread(target=self._end_unsupervised, args=(supervised,), daemon=True).start()
            for each in self._handled:
                signal.signal(each, leave_it_to_the_supervisor)  # other programs do not inherit it
            os.environ[INHERITED_VARIABLE] = json.dumps(inherited)
            os.environ[SWEEP_VARIABLE] = str(self.folder)
            os.environ[SESSION_VARIABLE] = str(self.session)
            # Workers import this package to find the function that they are to call.
            others = os.environ.get("PYTHONPATH")
            path = [str(PROJECT), *([others] if others else [])]
            os.environ["PYTHONPATH"] = os.pathsep.join(path)
        else:
            os.close(supervised)
            self._sign(f"process {supervisor} and its launcher {pid}")
        return pid

    def _end_unsupervised(self, supervised: int) -> None:
        """In the launcher: when the supervisor is gone, start no further jobs and ask the runs to end."""
        os.read(supervised, 1)
        print(f"sweep {self.folder.name} has lost its supervisor: its runs are ended", file=sys.stderr)
        self.stop(signal.SIGTERM)

    def wait(self, launcher: int) -> bool:
        """Wait for the launcher and pass signals on to the runs; whether it came to its end.

        The first signal asks the runs to end, which may take them an iteration; the second reaches them
        again; the third ends everything at once.
        """
        # Needed when the sweep ends, and by then the files may hold other code than what runs here.
        import rltemplate.analysis.journal  # noqa: F401

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
        # A run knows more signals, but only two ways to say that it was asked to end.
        sent = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
        with self._changed() as index:
            index["signal"] = index["signal"] or int(sent)
            for job in index["jobs"]:
                if job["status"] == "running" and job["host"] == socket.gethostname():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(job["pid"], sent)

    def run(
        self, number: int, config: Config, overrides: Sequence[str], *, env_name: str, console: bool
    ) -> float | None:
        """Run a job to its end and return its last evaluation. Trouble is recorded and never raised.

        A job that the index has goes on: one that has finished is not run again, of one that has a run the
        run is resumed, whether the sweep was resumed or a scheduler calls the job a second time.

        Without a console of its own the job writes to `job_<number>.log` in the folder of the sweep.
        """
        with self._changed() as index:
            if len(index["resumed"]) != self.session:  # a scheduler started late what is done elsewhere
                print(f"{' '.join(overrides)}: the sweep was resumed, which this process is no part of")
                return None
            entry = self._entry(index, number, overrides)
            title = f"#{entry['job']} {' '.join(overrides)}"
            if entry["status"] == "finished":
                print(f"{title}: finished already", flush=True)
                return _last_value(entry)
            if index["signal"] is not None:
                return None
            try:
                job = self._job(index, entry, config, overrides, env_name)
            except ConfigError as error:
                self._refuse(entry, error)
                return None
            if job is None:  # it came to its end, and who should have written so did not
                self._close(entry, _FINISHED)
                print(f"{title}: finished already", flush=True)
                return _last_value(entry)
            log = None if console else self.folder / f"job_{entry['job']}.log"
            shown = f"{title}\n   goes on in {job.run_dir}" if job.resume else title
            print(shown if log is None else f"{shown}\n   output in {log}", flush=True)
            environment = worker_environment(job, from_dict(job.config), _inherited_environment())
            entry |= {"exit_status": None, "end_time": None, "return": None}
            try:
                process = _spawn(worker_command(), environment, log)
            except OSError as error:
                problem = f"its process could not be started: {error}"
                entry |= {"status": "failed", "end_time": _now(), "problem": problem}
                print(f"#{entry['job']} failed: {problem}", flush=True)
                return None
            # Still under the lock: whoever stops the sweep now finds the process or prevents it.
            entry |= {"status": "running", "host": socket.gethostname(), "pid": process.pid}
            entry["start_time"] = entry["start_time"] or _now()
        try:
            process.wait()
        except BaseException as raised:
            # A scheduler takes the job away, and its handler ends this process: the run must not outlive it.
            process.terminate()
            process.wait()
            if not isinstance(raised, Exception):
                raise
            print(f"{title}: {raised}", file=sys.stderr)
        finally:
            if process.returncode is not None:
                with self._changed() as index:
                    entry = next(job for job in index["jobs"] if job["run_id"] == entry["run_id"])
                    code = process.returncode
                    self._close(entry, code if code >= 0 else 128 - code)  # as a shell reports a signal
        if log is not None:
            print(f"#{entry['job']} {entry['status']}", flush=True)
        return _last_value(entry)

    def refuse(self, number: int, overrides: Sequence[str], error: ConfigError) -> None:
        """Record a job that cannot be run, for what is wrong with its configuration, and say so."""
        with self._changed() as index:
            if len(index["resumed"]) == self.session:
                self._refuse(self._entry(index, number, overrides), error)

    def _refuse(self, entry: dict[str, Any], error: ConfigError) -> None:
        entry |= {"status": "refused", "exit_status": _REFUSED, "end_time": _now(), "problem": str(error)}
        print(f"error: {error}", file=sys.stderr)

    def _entry(self, index: dict[str, Any], number: int, overrides: Sequence[str]) -> dict[str, Any]:
        """What the index says of this job, which it may not have had until now.

        Overrides say which job it is: a sweeper that draws may come to other numbers the second time. Jobs
        with equal ones are told apart by what the launcher called them.
        """
        called = [self.session, number]
        known: list[dict[str, Any]] = [
            job
            for job in index["jobs"]
            if _meaning(job["overrides"]) == _meaning(overrides)
            and (job["launch"] == called or job["launch"][0] < self.session)
        ]
        if known:
            entry = min(known, key=lambda job: (job["launch"] != called, job["job"] != number))
        else:
            taken = {job["job"] for job in index["jobs"]}
            entry = {
                "job": max(taken) + 1 if number in taken else number,
                "overrides": list(overrides),
                "run_id": None,
                "run_dir": None,
                "status": "not started",
                "exit_status": None,
                "start_time": None,
                "end_time": None,
                "host": None,
                "pid": None,
                "return": None,
                "resumed": 0,
            }
            index["jobs"].append(entry)
        entry["launch"] = called
        return entry

    def _job(
        self,
        index: Mapping[str, Any],
        entry: dict[str, Any],
        config: Config,
        overrides: Sequence[str],
        env_name: str,
    ) -> Job | None:
        """What the process of a run is told, and the index as well; None if the run has finished."""
        last = index["resumed"][-1] if index["resumed"] else {"command": index["command"], "accept": False}
        membership = SweepMembership(id=index["id"], dir=str(self.folder), job=entry["job"])
        there = paths.job_run(self.folder, entry)
        if there is not None and (there / paths.RECORD).is_file():
            job = resume_job(there, last["command"], accept=last["accept"])
            if job is None:
                return None
            before, now = deciding(from_dict(job.config)), deciding(config)
            _refuse_differences(entry, _differences(before, now), job.run_id)
            entry["resumed"] += 1
            entry.pop("problem", None)
            return replace(job, sweep=membership, journal=False)
        entry.pop("problem", None)
        job = new_job(config, last["command"], env_name=env_name, overrides=overrides, sweep=membership)
        entry |= {
            "run_id": job.run_id,
            "run_dir": os.path.relpath(job.run_dir, self.folder),
            "start_time": None,
        }
        return job

    def _close(self, entry: dict[str, Any], exit_status: int) -> None:
        """Enter the end of a job. Its record decides: only a run that reached its end is `finished` there."""
        run_dir = paths.job_run(self.folder, entry)
        record = None if run_dir is None else next(_records([run_dir]), None)
        status, recorded = _status(exit_status), "missing" if record is None else record.status
        if recorded == "finished":
            status = "finished"
        elif status == "finished":
            status = "failed"
            entry["problem"] = f"its process ended with exit status 0 and its record is {recorded}"
        value = None if record is None else record.final_metrics.get("eval/return")
        entry |= {"status": status, "exit_status": exit_status, "end_time": _now()}
        entry["return"] = None if value is None else float(value)

    def finish(self, launched: bool) -> int:
        """Close the index, print the table of jobs and return the exit status of the command.

        `launched` says whether the launcher came to its end, so that no job is missing.
        """
        exit_status: int
        with self._changed() as index:
            jobs = index["jobs"]
            complete = launched and len(jobs) >= (index["num_jobs"] or 1)
            _give_up_running(index)
            if index["signal"] is not None:
                index["status"], exit_status = "interrupted", 128 + index["signal"]
            elif complete and all(job["status"] == "finished" for job in jobs):
                index["status"], exit_status = "finished", _FINISHED
            else:
                refused = bool(jobs) and all(job["status"] == "refused" for job in jobs)
                index["status"], exit_status = "failed", _REFUSED if refused else 1
            index["end_time"] = _now()
        from rltemplate.analysis.journal import write_sweep

        write_sweep(self.folder, index, self.folder.parent.parent, PROJECT)
        self.show()
        return exit_status

    def show(self) -> None:
        """Print the table of jobs."""
        _print_table(self.read(), self.folder)


def sweeps_dir(config: Config) -> Path:
    """Where the folders of sweeps are, absolute."""
    return Path(config.runs_dir).expanduser().absolute() / paths.SWEEPS


def find_sweep(folder: Path, text: str, words: Sequence[str]) -> tuple[Path, str | None]:
    """The folder of the sweep that goes on, and a note where it was chosen from several.

    `text` is `resume` for the newest one in `folder` that was started with `words`, in any order, else its
    id or a unique part of it. Raises ConfigError if there is none, or if its words are others.
    """
    known = {}
    for path in sorted(folder.glob(f"*/{paths.SWEEP_INDEX}")):
        with contextlib.suppress(OSError, ValueError):
            known[path.parent.name] = json.loads(path.read_text(encoding="utf-8")).get("words")
    told = f"sweep={text}"
    if text == NEWEST:
        same = [name for name, of in known.items() if of is not None and sorted(of) == sorted(words)]
        if same:
            note = f"{len(same)} sweeps have these words; {same[-1]} goes on, sweep=ID takes another one"
            return folder / same[-1], note if len(same) > 1 else None
        comparable = [name for name, of in known.items() if of is not None]
        if not comparable:
            raise ConfigError(f"{told}: there is no sweep in {folder}; start one without {told}")
        nearest = min(reversed(comparable), key=lambda name: len(set(known[name]) ^ set(words)))
        raise ConfigError(
            f"{told}: no sweep in {folder} was started with these words\n"
            f"the nearest is {nearest}, {_compared(known[nearest], words)}"
        )
    matches = [text] if text in known else [name for name in known if text in name]
    if len(matches) != 1:
        near = f"did you mean {NEWEST}? " if difflib.get_close_matches(text, [NEWEST]) else ""
        allowed = f"{near}allowed: {NEWEST}, or a unique part of the id of a sweep in {folder}"
        found = f"in the ids of {len(matches)} sweeps" if matches else "no such sweep"
        raise ConfigError(f"{told}: {found}; {allowed}{f', as {max(known)}' if known else ''}")
    of = known[matches[0]]
    if of is None or sorted(of) != sorted(words):
        how = "which did not record its words" if of is None else _compared(of, words)
        raise ConfigError(f"{told}: this command is not that of {matches[0]}, {how}")
    return folder / matches[0], None


def _compared(theirs: Sequence[str], ours: Sequence[str]) -> str:
    """Of two commands, what each has that the other has not."""
    has, here = (
        " ".join(word for word in words if word not in others) or "nothing"
        for words, others in ((theirs, ours), (ours, theirs))
    )
    return f"which has {has} where this command has {here}"


def _meaning(overrides: Sequence[str]) -> list[str]:
    return sorted(word for word in overrides if word.partition("=")[0] not in BOOKKEEPING_KEYS)


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Keys with other values: key, value before, value now."""
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    # What was left open has a value since the run began.
    keys = [key for key in keys if (key, now.get(key)) != ("determinism.products", "auto")]
    return [(key, before.get(key), now.get(key)) for key in keys]


def _refuse_differences(
    entry: Mapping[str, Any], differences: Sequence[tuple[str, Any, Any]], run_id: str
) -> None:
    if differences:
        key, before, now = differences[0]
        raise ConfigError(
            f"{key}={now}: {run_id} ({' '.join(entry['overrides'])}) was started with {before}\n"
            "a sweep goes on with the configuration that it had: bring conf/ back, or start another sweep"
        )


def _records(run_dirs: Sequence[Path]) -> Iterator[RunRecord]:
    """The records that can be read; a job is refused when its turn comes, and says why."""
    for run_dir in run_dirs:
        with contextlib.suppress(ConfigError):
            yield RunRecord.read(run_dir)


def _changes(
    sweep_id: str, records: Sequence[RunRecord], snapshot: Snapshot, accept: bool
) -> dict[str, list[str]]:
    """What decides bits and is not what it was; ConfigError unless that is accepted."""
    changed: dict[str, list[str]] = {}
    for what, among in (
        ("code", [changed_code(record.git, snapshot) for record in records]),
        ("libraries", [changed_libraries(record.versions) for record in records]),
    ):
        found = list(dict.fromkeys(name for names in among for name in names))
        if not found:
            continue
        changed[what] = found
        if not accept:
            raise ConfigError(
                f"{sweep_id}: the {what} changed since the sweep began: {few(found)}\n"
                f"bring back {how_back(what, records[0].git.ref)}, or go on all the same with accept={ACCEPT}"
            )
    return changed


def _give_up_running(index: dict[str, Any]) -> None:
    """Nobody looks after jobs that are still said to run."""
    for job in index["jobs"]:
        if job["status"] == "running":
            job["status"] = "failed" if index["signal"] is None else "interrupted"


def _summary(index: Mapping[str, Any]) -> str:
    """How many jobs are where, in words."""
    counted = Counter(job["status"] for job in index["jobs"])
    counted["not started"] += max(0, (index["num_jobs"] or 0) - len(index["jobs"]))
    return ", ".join(f"{number} {status}" for status, number in counted.items() if number) or "no job yet"


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


def _last_value(entry: Mapping[str, Any]) -> float | None:
    value: float | None = entry["return"]
    return value


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
    replace_text(path, [json.dumps(index, indent=2), "\n"])
