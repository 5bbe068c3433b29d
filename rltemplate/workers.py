"""Environments stepped by processes beside the run's.

Runs that are trained together in one process share these: a worker has a group of environments of each run,
for many processes that take turns on a core find its caches cold. It listens to all runs, and does what each
asks for as if there were no other.

Gymnasium's AsyncVectorEnv waits forever for a worker that died in the wrong moment, loses tracebacks, and
leaves its workers to signals that are meant for the run.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any, NamedTuple, NoReturn

import gymnasium as gym
import numpy as np

from rltemplate.types import STOP_SIGNALS, ConfigError, RunError
from rltemplate.vector import Arrays, Kind, Outcome, Recorded, Serial, available_cores, even_parts

# How long workers that were told to end may take to close their environments.
_GRACE_S = 5.0
_PR_SET_PDEATHSIG = 1
# So long whoever waits stays awake. To be woken costs some 50 us, as much as small environments take for a
# step, and a policy chooses actions within this time; what takes longer is worth the sleep.
_AWAKE_S = 1e-3
# Whoever is gone for longer between two looks had to leave the core to others, and leaves it for a while.
_GONE_S = 2e-4
_LEAVE_S = 0.05
# How often it is looked after workers that say nothing.
_LOOK_AFTER_S = 1.0
# After so many steps of each of several runs it is looked whether somebody draws who had not done so.
_LOOKED_AFTER = 200
# What is said most often needs no words.
_STEP = _DONE = b""


class _Birth(NamedTuple):
    """What a worker is told when it starts."""

    kind: Kind
    numbers: range  # of its environments in each run
    memories: Sequence[Any]  # of each run, which all share, for the arrays
    mask: set[int]  # of signals, as it is outside of workers
    parent: int | None  # the process without which it is not to live, where the system can see to that
    may_spin: bool


class Place(NamedTuple):
    """What one run has of the processes."""

    pipes: list[Connection]  # to each
    memory: Any


class Hosts:
    """Who steps the environments of `num_runs` runs: this process, and others beside it.

    The others start when the first run takes its place. They end when all places have been left, and with
    this process at the latest.
    """

    def __init__(self, num_runs: int = 1) -> None:
        self._num_runs = num_runs
        # The environments of each run by process; the last ones are the run's own.
        self.groups: list[range] = []
        self.processes: list[BaseProcess] = []
        self.may_spin = False
        self._kind: Kind | None = None
        self._places: list[Place] = []
        self._free: Iterator[Place] = iter(())
        self._left = 0
        self._every_pipe: list[Connection] = []
        # Also when the interpreter exits, before multiprocessing waits for workers that nobody has told.
        self._finalizer = Finalize(self, _end_workers, (self._every_pipe, self.processes), exitpriority=10)

    def take(self, kind: Kind, num_workers: int) -> Place:
        """The place of one more run, all of which have the same kind of environments."""
        if self._kind is None:
            try:
                self._start(kind, num_workers)
            except BaseException:
                self.close()
                raise
        assert self._kind is not None
        assert (self._kind.env_id, self.groups) == (kind.env_id, even_parts(kind.num_envs, num_workers + 1))
        return next(self._free)

    def leave(self, place: Place) -> None:
        """A run needs its environments no longer; those of others stay."""
        self._left += 1
        if self._left == self._num_runs:
            self.close()
        else:
            _dismiss(place.pipes)

    def close(self) -> None:
        """End all processes, by force those that do not answer; also more than once."""
        self._finalizer()

    def _start(self, kind: Kind, num_workers: int) -> None:
        self._kind = kind
        self.groups = even_parts(kind.num_envs, num_workers + 1)
        self.may_spin = available_cores() > num_workers
        # Where a fork is to be had: it knows all environments registered here.
        context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
        # It has no name in any file system, so that nothing is left of it whatever happens.
        memories = [context.RawArray(ctypes.c_char, Arrays.size(kind)) for _ in range(self._num_runs)]
        self._places = [Place([], memory) for memory in memories]
        self._free = iter(self._places)
        with _requests_blocked() as mask:
            for numbers in self.groups[:-1]:
                birth = _Birth(kind, numbers, memories, mask, _deadly_parent(), self.may_spin)
                self._start_one(context, birth)

    def _start_one(self, context: Any, birth: _Birth) -> None:
        forks = context.get_start_method() == "fork"
        theirs: list[Connection] = []
        for place in self._places:
            pipe, other = context.Pipe()
            place.pipes.append(pipe)
            self._every_pipe.append(pipe)
            theirs.append(other)
        process = context.Process(
            target=_work,
            args=(birth, theirs, self._every_pipe if forks else []),
            name=birth.kind.name(birth.numbers),
            daemon=True,
        )
        process.start()
        self.processes.append(process)
        for other in theirs:
            other.close()


class Workers(Recorded):
    """Environments in groups, one in each of `num_workers` processes beside this one, and the last one here.

    Groups follow the order of the environments and are as even as possible, the last ones the smaller: with
    as many workers as environments none is left for this process.

    What an environment raises is raised here, with the worker's traceback as its cause, and `RunError` if a
    worker has died. Of several failures that of the first environment is raised. Workers take no notice of
    signals that are meant for the run, and none outlives it.
    """

    def __init__(
        self,
        kind: Kind,
        num_workers: int,
        seeds: Sequence[int],
        first: gym.Env[Any, Any] | None = None,
        hosts: Hosts | None = None,
    ) -> None:
        """`seeds` are those of the environments, `first` is one that has been made already.

        `hosts` are the processes, where several runs share them. In each the global generators of others
        start from the seed of its first environment: after a fork Python's would start from the clock, and
        those of NumPy and torch with the same numbers everywhere.
        """
        if not 1 <= num_workers <= kind.num_envs:
            raise ValueError(f"{num_workers} workers for {kind.num_envs} environments")
        super().__init__(kind)
        self._hosts = Hosts() if hosts is None else hosts
        self._died: RunError | None = None
        self._own: Serial | None = None
        self._place: Place | None = None
        try:
            self._place = self._hosts.take(kind, num_workers)
            self._pipes, self._groups = self._place.pipes, self._hosts.groups
            self._names = [kind.name(numbers) for numbers in self._groups[:-1]]
            self._wait = _Wait(self._pipes, self._hosts.may_spin)
            self._arrays = Arrays.within(self._place.memory, kind)
            here = self._groups[-1]

            def make() -> Serial:
                return Serial(kind, kind.members(here, first), self._arrays.part(here))

            for number, group in enumerate(self._groups[:-1]):
                self._send(number, pickle.dumps(("open", (seeds[group.start],))))
            self._own = self._finish(set(range(num_workers)), make)[-1]
        except BaseException:
            self.close()
            raise
        if first is not None and not here:
            first.close()

    def reset(self, seeds: Sequence[int]) -> np.ndarray:
        """As `VectorEnv.reset`."""
        self._do("reset", [(seeds[group.start : group.stop],) for group in self._groups])
        return self._arrays.obs

    def reset_some(self, mask: np.ndarray) -> np.ndarray:
        """As `VectorEnv.reset_some`."""
        masks = [mask[group.start : group.stop] for group in self._groups]
        self._do("reset_some", [(part,) if part.any() else None for part in masks])
        return self._arrays.obs

    def begin(self, actions: np.ndarray) -> None:
        """As `VectorEnv.begin`: the workers step at once, and what is stepped here is left to `end`."""
        if self._own is None or self._died is not None:
            return
        theirs = self._groups[-1].start
        self._arrays.action[:theirs] = actions[:theirs]
        for number in range(len(self._pipes)):
            self._send(number, _STEP)
        self._own.begin(actions[theirs:])

    def end(self) -> Outcome:
        """As `VectorEnv.end`."""
        self._finish(set(range(len(self._pipes))), self._living().end)
        return self._arrays.outcome()

    def call(self, name: str, arguments: Sequence[Any] | None = None) -> list[Any]:
        """As `Recorded.call`, by all groups at the same time."""
        parts = [
            (name,) if arguments is None else (name, arguments[group.start : group.stop])
            for group in self._groups
        ]
        return [result for results in self._do("call", parts) for result in results]

    def close(self) -> None:
        """As `VectorEnv.close`; workers that do not answer are ended by force."""
        if self._place is not None:
            self._hosts.leave(self._place)
            self._place = None
        if self._own is not None:
            self._own.close()

    def _living(self) -> Serial:
        """This process's own group, unless others have died."""
        if self._died is not None:  # what is left to be said by others would be taken for other answers
            raise self._died
        assert self._own is not None
        return self._own

    def _do(self, method: str, arguments: Sequence[tuple[Any, ...] | None]) -> list[Any]:
        """Let all groups that have arguments do something at the same time; their results, in order."""
        own = self._living()
        asked = set()
        for number, given in enumerate(arguments[:-1]):
            if given is not None:
                self._send(number, pickle.dumps((method, given)))
                asked.add(number)
        here = arguments[-1]
        return self._finish(asked, lambda: None if here is None else getattr(own, method)(*here))

    def _send(self, number: int, message: bytes) -> None:
        with contextlib.suppress(ConnectionError):  # of a death that shows where its answer is missing
            self._pipes[number].send_bytes(message)

    def _finish(self, asked: set[int], own: Callable[[], Any]) -> list[Any]:
        """Do this process's own part, and wait for the workers that were asked; all results, in order."""
        failure, result = None, None
        try:
            result = own()
        except Exception as error:
            failure = error
        answers = self._answers(asked)  # their failures are those of environments before
        if failure is not None:
            raise failure
        return [*answers, result]

    def _answers(self, waiting: set[int]) -> list[Any]:
        answers: dict[int, Any] = {}
        failures: dict[int, _Failure] = {}
        while waiting:
            ready = self._wait(_LOOK_AFTER_S)
            if not ready:
                # A dead worker's pipe stays open where a process that it started has inherited it.
                for number in waiting:
                    if not self._hosts.processes[number].is_alive() and not self._pipes[number].poll():
                        self._raise_death(number)
            for number in ready:
                try:
                    message = self._pipes[number].recv_bytes()
                except (EOFError, OSError):
                    self._raise_death(number)
                waiting.discard(number)
                answer = pickle.loads(message) if message else None
                if isinstance(answer, _Failure):
                    failures[number] = answer
                else:
                    answers[number] = answer
        if failures:  # all have answered, and the first of them is named, whichever came first
            failures[min(failures)].reraise()
        return [answers[number] for number in sorted(answers)]

    def _raise_death(self, number: int) -> NoReturn:
        process = self._hosts.processes[number]
        process.join(1.0)  # its pipe closes a moment before
        code = process.exitcode
        if code is None:
            how = "closed its connection"
        else:
            how = f"died ({f'killed by signal {-code}' if code < 0 else f'exit status {code}'})"
        whose = "its" if len(self._groups[number]) == 1 else "their"
        self._died = RunError(f"{self._names[number]}: {whose} worker process {how}")
        raise self._died from None


class _Wait:
    """Waits for word from others: awake for a short time, and then asleep.

    Whoever had to sleep long the last time goes to sleep at once, so that nobody keeps a core busy who has
    nothing to do, such as a worker beside a learner that learns at length after each step. So does, for a
    while, whoever finds that others want the core too: these may be the ones that are waited for.
    """

    def __init__(self, pipes: Sequence[Connection], may_spin: bool) -> None:
        """`may_spin` says that there is a core for everyone."""
        self._poll = select.poll()
        for pipe in pipes:
            self._poll.register(pipe.fileno(), select.POLLIN)
        self._by_fd = {pipe.fileno(): number for number, pipe in enumerate(pipes)}
        self._may_spin = self._short = may_spin
        self._wanted_until = 0.0  # the core, by others, as far as is known

    def leave_out(self, pipe: Connection) -> None:
        """Wait for this one no longer."""
        self._poll.unregister(pipe.fileno())

    def __call__(self, limit_s: float | None) -> list[int]:
        """The numbers of the pipes that have something to say; none if nothing came until the limit."""
        ready = self._poll.poll(0)
        if not ready:
            began = time.perf_counter()
            if self._short and began >= self._wanted_until:
                ready = self._awake(began)
            if not ready:
                ready = self._poll.poll(None if limit_s is None else 1000 * limit_s)
                self._short = self._may_spin and time.perf_counter() - began < _AWAKE_S
        return [self._by_fd[fd] for fd, _ in ready]

    def _awake(self, began: float) -> list[tuple[int, int]]:
        last = began
        while last - began < _AWAKE_S:
            os.sched_yield()  # comes back at once unless another process waits for the core
            ready = self._poll.poll(0)
            now = time.perf_counter()
            if now - last > _GONE_S:
                self._wanted_until = now + _LEAVE_S
                return ready
            if ready:
                return ready
            last = now
        return []


@contextlib.contextmanager
def _requests_blocked() -> Iterator[set[int]]:
    """Hold back what children are to ignore until they do; gives the mask from before.

    Ignoring it here meanwhile would lose a request; held back, it arrives afterwards.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield {int(number) for number in before}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _deadly_parent() -> int | None:
    """The process whose death is to end a child at once, where the system can do that.

    Linux goes by the thread that started the child: another one than the main thread may end before the run.
    """
    main = threading.current_thread() is threading.main_thread()
    return os.getpid() if main and sys.platform == "linux" else None


def _dismiss(pipes: Sequence[Connection]) -> None:
    for pipe in pipes:
        with contextlib.suppress(OSError):
            pipe.send(None)  # closing is not enough: workers of other environments may have a copy
        pipe.close()


def _end_workers(pipes: list[Connection], processes: list[BaseProcess]) -> None:
    _dismiss(pipes)
    deadline = time.monotonic() + _GRACE_S
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        time.sleep(0.002)
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()


class _WorkerTraceback(Exception):
    """Where in its process a worker's exception arose."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class _Failure:
    """An exception of a worker, packed so that it arrives in any case."""

    def __init__(self, error: Exception) -> None:
        self.text = "".join(traceback.format_exception(error)).rstrip()
        # Many exceptions do not come out of a pickle as they went in, such as those that make their message
        # of several arguments. Then the parts that do are put together again.
        notes = {"__notes__": getattr(error, "__notes__", [])}
        for form in (error, (type(error), error.args, vars(error)), (type(error), error.args, notes)):
            with contextlib.suppress(Exception):
                self.packed = pickle.dumps(form)
                if str(self._unpacked()) == str(error):
                    return
        last = traceback.format_exception_only(error)[0].rstrip()
        self.packed = pickle.dumps((RuntimeError, (last,), notes))

    def _unpacked(self) -> Exception:
        form: Any = pickle.loads(self.packed)
        if isinstance(form, Exception):
            return form
        kind, args, attributes = form
        error: Exception = kind.__new__(kind, *args)
        vars(error).update(attributes)
        return error

    def reraise(self) -> NoReturn:
        """Raise the same here."""
        error = self._unpacked()
        if isinstance(error, ConfigError | RunError):
            raise error from None  # whose message says all
        raise error from _WorkerTraceback(self.text)


def _work(birth: _Birth, pipes: Sequence[Connection], inherited: Sequence[Connection]) -> None:
    """The process of a group. Its end is quiet, also where the run has ended without a word."""
    for request in STOP_SIGNALS:
        signal.signal(request, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, birth.mask)
    if birth.parent is not None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != birth.parent:  # it died before
            os._exit(1)
    for other in inherited:  # as long as anyone has the other end of a pipe, its reader waits
        other.close()
    _serve(birth, pipes)


class _Guests:
    """The environments of each run in a worker, each of which finds them as if it were alone."""

    def __init__(self, birth: _Birth) -> None:
        self._birth = birth
        self._groups: dict[int, Serial] = {}
        self._steps = 0
        self._broken: RunError | None = None
        # Imports torch, which would be too long for a check of the configuration.
        from rltemplate.foreign_rng import ForeignTurns

        self._turns = ForeignTurns(period=f"times {_LOOKED_AFTER} steps")

    def do(self, number: int, method: str, arguments: Any) -> Any:
        """What a run asks for."""
        if self._broken is not None:
            raise self._broken
        if method == "open":
            self._turns.expect(number, *arguments)
        self._turns.before_step(number)
        if method == "open":
            self._open(number)
            return None
        result = getattr(self._groups[number], method)(*arguments)
        if method == "step_from_arrays" and len(self._birth.memories) > 1:
            self._look_after_generators()
        return result

    def leave(self, number: int) -> None:
        """A run has no more use for its own; whatever these say to that, others go on."""
        if number in self._groups:
            try:
                self._groups.pop(number).close()
            except Exception:
                traceback.print_exc()

    def close(self) -> None:
        """All of them."""
        for number in list(self._groups):
            self.leave(number)

    def _open(self, number: int) -> None:
        kind, numbers, memory = self._birth.kind, self._birth.numbers, self._birth.memories[number]
        part = Arrays.within(memory, kind).part(numbers)
        self._groups[number] = Serial(kind, kind.members(numbers), part)

    def _look_after_generators(self) -> None:
        self._steps += 1
        if self._steps >= _LOOKED_AFTER * len(self._groups):
            self._steps = 0
            try:
                self._turns.end_period()
            except RunError as error:  # nobody knows whose
                self._broken = error
                raise


def _serve(birth: _Birth, pipes: Sequence[Connection]) -> None:
    """Do what the runs ask for, until none of them is there any more."""
    guests, wait = _Guests(birth), _Wait(pipes, birth.may_spin)
    here = set(range(len(pipes)))
    try:
        while here:
            for number in wait(None):
                if not _serve_one(guests, number, pipes[number]):
                    here.discard(number)
                    wait.leave_out(pipes[number])
                    guests.leave(number)
    finally:
        guests.close()


def _serve_one(guests: _Guests, number: int, pipe: Connection) -> bool:
    """Do what a run asks for next; False if it asks for nothing more."""
    try:
        message = pipe.recv_bytes()
    except (EOFError, ConnectionResetError):
        return False
    request = pickle.loads(message) if message else ("step_from_arrays", ())
    if request is None:
        return False
    method, arguments = request
    answer: Any = None
    try:
        answer = guests.do(number, method, arguments)
    except Exception as error:
        method, answer = "call", _Failure(error)
    # A run may leave before its answer comes, and says so next.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        # Observations lie where all find them.
        pipe.send(answer) if method == "call" else pipe.send_bytes(_DONE)
    return True
