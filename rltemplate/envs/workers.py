"""Environments stepped by processes beside the run's.

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

from rltemplate.envs.vector import (
    Arrays,
    Kind,
    Outcome,
    Serial,
    VectorEnv,
    available_cores,
    even_parts,
)
from rltemplate.types import STOP_SIGNALS, ConfigError, RunError

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
# What is said most often needs no words.
_STEP = _DONE = b""


class _Birth(NamedTuple):
    """What a worker is told when it starts."""

    kind: Kind
    numbers: range  # of its environments
    memory: Any  # which all share, for the arrays
    seed: int  # of the global generators
    mask: set[int]  # of signals, as it is outside of workers
    parent: int | None  # the process without which it is not to live, where the system can see to that
    may_spin: bool


class Workers(VectorEnv):
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
    ) -> None:
        """`seeds` are those of the environments, `first` is one that has been made already.

        In each process the global generators of Python, NumPy and torch start from the seed of its first
        environment: after a fork Python's would start from the clock, and the others with the same numbers
        everywhere.
        """
        if not 1 <= num_workers <= kind.num_envs:
            raise ValueError(f"{num_workers} workers for {kind.num_envs} environments")
        super().__init__(kind)
        self._groups = even_parts(kind.num_envs, num_workers + 1)
        self._names = [kind.name(numbers) for numbers in self._groups[:-1]]
        self._died: RunError | None = None
        self._own: Serial | None = None
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        # Also when the interpreter exits, before multiprocessing waits for workers that nobody has told.
        self._end = Finalize(self, _end_workers, (self._pipes, self._processes), exitpriority=10)
        may_spin = available_cores() > num_workers
        # Where a fork is to be had: it knows all environments registered here.
        context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
        # It has no name in any file system, so that nothing is left of it whatever happens.
        memory = context.RawArray(ctypes.c_char, Arrays.size(kind))
        self._arrays = Arrays.within(memory, kind)
        here = self._groups[-1]
        try:
            with _requests_blocked() as mask:
                for numbers in self._groups[:-1]:
                    seed = seeds[numbers.start]
                    birth = _Birth(kind, numbers, memory, seed, mask, _deadly_parent(), may_spin)
                    self._start(context, birth)
            self._wait = _Wait(self._pipes, may_spin)
            self._own = self._finish(
                set(range(num_workers)),
                lambda: Serial(kind, kind.members(here, first), self._arrays.part(here)),
            )[-1]
        except BaseException:
            self.close()
            raise
        if first is not None and not here:
            first.close()

    def _start(self, context: Any, birth: _Birth) -> None:
        forks = context.get_start_method() == "fork"
        pipe, other = context.Pipe()
        self._pipes.append(pipe)
        process = context.Process(
            target=_work,
            args=(birth, other, self._pipes if forks else []),
            name=birth.kind.name(birth.numbers),
            daemon=True,
        )
        process.start()
        self._processes.append(process)
        other.close()

    def reset(self, seeds: Sequence[int]) -> np.ndarray:
        """As `VectorEnv.reset`."""
        self._do("reset", [(seeds[group.start : group.stop],) for group in self._groups])
        return self._arrays.obs

    def reset_some(self, mask: np.ndarray) -> np.ndarray:
        """As `VectorEnv.reset_some`."""
        masks = [mask[group.start : group.stop] for group in self._groups]
        self._do("reset_some", [(part,) if part.any() else None for part in masks])
        return self._arrays.obs

    def step(self, actions: np.ndarray) -> Outcome:
        """See `VectorEnv.step`; all groups of environments step at the same time."""
        own, theirs = self._living(), self._groups[-1].start
        self._arrays.action[:theirs] = actions[:theirs]
        for number in range(len(self._pipes)):
            self._send(number, _STEP)
        self._finish(set(range(len(self._pipes))), lambda: own.step(actions[theirs:]))
        return self._arrays.outcome()

    def call(self, name: str, arguments: Sequence[Any] | None = None) -> list[Any]:
        """See `VectorEnv.call`; all groups of environments work at the same time."""
        parts = [
            (name,) if arguments is None else (name, arguments[group.start : group.stop])
            for group in self._groups
        ]
        return [result for results in self._do("call", parts) for result in results]

    def close(self) -> None:
        """As `VectorEnv.close`; workers that do not answer are ended by force."""
        self._end()
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
                    if not self._processes[number].is_alive() and not self._pipes[number].poll():
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
        process = self._processes[number]
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


def _end_workers(pipes: list[Connection], processes: list[BaseProcess]) -> None:
    for pipe in pipes:
        with contextlib.suppress(OSError):
            pipe.send(None)  # closing is not enough: workers of other environments may have a copy
        pipe.close()
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


def _work(birth: _Birth, pipe: Connection, inherited: Sequence[Connection]) -> None:
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
    _serve(birth, pipe)


def _serve(birth: _Birth, pipe: Connection) -> None:
    """Make the environments, and do what the run asks for until it asks for nothing more."""
    wait = _Wait([pipe], birth.may_spin)
    group: Serial | None = None
    request: tuple[str, tuple[Any, ...]] | None = ("open", ())
    try:
        while request is not None:
            method, arguments = request
            answer: Any = None
            try:
                if group is None:
                    group = _open(birth)
                else:
                    answer = getattr(group, method)(*arguments)
            except Exception as error:
                method, answer = "call", _Failure(error)
            # The run may leave before its answer comes, and says so next.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                # Observations lie where all find them.
                pipe.send(answer) if method == "call" else pipe.send_bytes(_DONE)
            request = _next_request(wait, pipe)
    finally:
        if group is not None:
            group.close()


def _open(birth: _Birth) -> Serial:
    # Imports torch, which would be too long for a check of the configuration.
    from rltemplate.envs.global_rng import seed_foreign_code

    seed_foreign_code(birth.seed)
    part = Arrays.within(birth.memory, birth.kind).part(birth.numbers)
    return Serial(birth.kind, birth.kind.members(birth.numbers), part)


def _next_request(wait: _Wait, pipe: Connection) -> tuple[str, tuple[Any, ...]] | None:
    """A method of the group and its arguments; None if the run is over."""
    wait(None)
    try:
        message = pipe.recv_bytes()
    except (EOFError, ConnectionResetError):
        return None
    request: tuple[str, tuple[Any, ...]] | None
    request = pickle.loads(message) if message else ("step_from_arrays", ())
    return request
