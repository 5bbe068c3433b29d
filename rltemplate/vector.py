"""N environments stepped together: in this process one after the other, or with others beside it.

`VectorEnv` is all that `Envs` needs of them, whoever steps them. Episodes begin only where that is asked for:
nothing is reset by itself, so that no phantom step enters a buffer. Infos are left out, as nobody reads them,
and what comes out lies in arrays that are written again and again.

`Serial` and `Workers` step environments of Gymnasium, each wrapped in `Recorder`. Gymnasium's own
SyncVectorEnv spends more time on infos and copies than small environments take; its AsyncVectorEnv waits
forever for a worker that died in the wrong moment, loses tracebacks, and leaves its workers to signals that
are meant for the run.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rltemplate.env_state import Recorder, read_states, restore_states
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


class Outcome(NamedTuple):
    """What one step of N environments gave, in arrays of theirs that the next call overwrites."""

    obs: np.ndarray  # (N, ...) as the environment's space has them, before any reset
    reward: np.ndarray  # (N,) float64
    terminated: np.ndarray  # (N,) bool
    truncated: np.ndarray  # (N,) bool


class VectorEnv(Protocol):
    """N environments, as `Envs` knows them, whatever steps them.

    Observations (N, ...) are as the space of one environment has them, actions are such as it takes, N of
    them. Results are the same whoever steps the environments and however many do. Every method raises
    `RunError` where an environment gives what is no finite observation or reward, and where it dies; what an
    environment raises itself passes. Then only `close` may follow.
    """

    def reset(self, seeds: Sequence[int]) -> np.ndarray:
        """Seed each environment and begin its first episode; the observations (N, ...)."""
        ...

    def reset_some(self, mask: np.ndarray) -> np.ndarray:
        """Begin another episode where `mask` (N,) is true; of the result (N, ...) only these rows count."""
        ...

    def begin(self, actions: np.ndarray) -> None:
        """Let the environments step with `actions` (N, ...), which nobody writes to any more; `end` follows.

        Raises nothing: whatever goes wrong is raised by `end`.
        """
        ...

    def end(self) -> Outcome:
        """What the step gave that `begin` has begun."""
        ...

    def states(self) -> list[Any]:
        """Where each environment is: N copies, of tensors, numbers and strings, nested in dicts and lists."""
        ...

    def restore(self, states: Sequence[Any], returns: np.ndarray, lengths: np.ndarray) -> None:
        """Go where `states` were taken, in place of `reset` and in environments not used before.

        `returns` and `lengths` (N,) are those of the running episodes. Raises ConfigError if an environment
        does not come out there, bit for bit.
        """
        ...

    def close(self) -> None:
        """Release everything; also after a failure, and more than once."""
        ...


@dataclass(frozen=True, slots=True)
class Kind:
    """Copies of one environment of Gymnasium: how one is made, and what all of them have in common."""

    make: Callable[[], gym.Env[Any, Any]]  # one that survives a pickle where processes are not forked
    env_id: str
    num_envs: int
    obs_space: spaces.Space[Any]
    action_space: spaces.Space[Any]

    def name(self, numbers: range) -> str:
        """The environments of these numbers, counted from 0, for messages."""
        if self.num_envs == 1:
            return self.env_id
        if len(numbers) == 1:
            return f"{self.env_id}, environment {numbers[0] + 1} of {self.num_envs}"
        return f"{self.env_id}, environments {numbers[0] + 1} to {numbers[-1] + 1} of {self.num_envs}"

    def member(self, number: int, env: gym.Env[Any, Any] | None = None) -> Recorder:
        """One of them, made here unless it is given."""
        name = self.name(range(number, number + 1))
        try:
            recorder = Recorder(self.make() if env is None else env, name)
        except Exception as error:
            if not isinstance(error, ConfigError):
                error.add_note(f"{name}, when it was made")
            raise
        if (recorder.observation_space, recorder.action_space) != (self.obs_space, self.action_space):
            raise RunError(f"{name}: its spaces are not those of the first one")
        return recorder

    def members(self, numbers: range, first: gym.Env[Any, Any] | None = None) -> list[Recorder]:
        """Those of these numbers; `first`, which has been made already, takes the place of the first."""
        return [self.member(number, first if number == numbers[0] else None) for number in numbers]


class _Arrays(NamedTuple):
    """Where environments write what they give, and where those who step them elsewhere find the actions."""

    action: np.ndarray  # (N, ...) of the action space's type, or int64 for choices
    obs: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray

    @staticmethod
    def _forms(kind: Kind) -> list[tuple[tuple[int, ...], np.dtype[Any]]]:
        action, obs, num = kind.action_space, kind.obs_space, kind.num_envs
        real = isinstance(action, spaces.Box)
        return [
            ((num, *(action.shape or ())), np.dtype(action.dtype if real else np.int64)),
            ((num, *(obs.shape or ())), np.dtype(obs.dtype)),
            ((num,), np.dtype(np.float64)),
            ((num,), np.dtype(np.bool_)),
            ((num,), np.dtype(np.bool_)),
        ]

    @classmethod
    def _places(cls, kind: Kind) -> list[int]:
        """Where in a buffer each begins, and where the last one ends: each on a cache line of its own."""
        places = [0]
        for shape, dtype in cls._forms(kind):
            places.append(places[-1] + -(-int(np.prod(shape)) * dtype.itemsize // 64) * 64)
        return places

    @classmethod
    def size(cls, kind: Kind) -> int:
        """Of the buffer, in bytes."""
        return cls._places(kind)[-1]

    @classmethod
    def within(cls, buffer: Any, kind: Kind) -> _Arrays:
        """The arrays in a buffer of that size."""
        forms = zip(cls._forms(kind), cls._places(kind), strict=False)
        return cls(*(np.ndarray(shape, dtype, buffer, place) for (shape, dtype), place in forms))

    def part(self, numbers: range) -> _Arrays:
        """The rows of some of the environments."""
        return _Arrays(*(array[numbers.start : numbers.stop] for array in self))

    def outcome(self) -> Outcome:
        """What the environments gave."""
        return Outcome(*self[1:])


class _Recorded:
    """Environments that are each wrapped in `Recorder`, wherever they are."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind

    def call(self, name: str, arguments: Sequence[Any] | None = None) -> list[Any]:
        """The results of a method of each environment, in order, called with one argument each or none."""
        raise NotImplementedError

    def states(self) -> list[Any]:
        """As `VectorEnv.states`."""
        return read_states(self)

    def restore(self, states: Sequence[Any], returns: np.ndarray, lengths: np.ndarray) -> None:
        """As `VectorEnv.restore`."""
        restore_states(self, self._kind.env_id, states, returns, lengths)


class Serial(_Recorded):
    """Environments in this process, one after the other. The first one that fails ends the step."""

    def __init__(self, kind: Kind, members: Sequence[Recorder], arrays: _Arrays | None = None) -> None:
        """`members` are all of a kind, or some of them that have a part of its `arrays`."""
        super().__init__(kind)
        if arrays is None:
            arrays = _Arrays.within(bytearray(_Arrays.size(kind)), kind)
        self._members, self._arrays = members, arrays
        self._steps = [member.step for member in members]
        self._outcome = arrays.outcome()
        self._actions: Iterable[Any] = ()

    def reset(self, seeds: Sequence[int]) -> np.ndarray:
        """As `VectorEnv.reset`."""
        obs = self._outcome.obs
        for row, (member, seed) in enumerate(zip(self._members, seeds, strict=True)):
            obs[row] = member.reset(seed=seed)[0]
        return obs

    def reset_some(self, mask: np.ndarray) -> np.ndarray:
        """As `VectorEnv.reset_some`."""
        obs = self._outcome.obs
        for row in np.flatnonzero(mask).tolist():
            obs[row] = self._members[row].reset()[0]
        return obs

    def begin(self, actions: np.ndarray) -> None:
        """As `VectorEnv.begin`; all the work is left to `end`."""
        self._actions = actions

    def end(self) -> Outcome:
        """As `VectorEnv.end`."""
        obs, reward, terminated, truncated = self._outcome
        for row, (step, action) in enumerate(zip(self._steps, self._actions, strict=True)):
            obs[row], reward[row], terminated[row], truncated[row], _ = step(action)
        return self._outcome

    def step_from_arrays(self) -> None:
        """Step with the actions that lie there; a copy, because an environment may keep its action."""
        self.begin(self._arrays.action.copy())
        self.end()

    def call(self, name: str, arguments: Sequence[Any] | None = None) -> list[Any]:
        """As `_Recorded.call`."""
        if arguments is None:
            return [getattr(member, name)() for member in self._members]
        pairs = zip(self._members, arguments, strict=True)
        return [getattr(member, name)(argument) for member, argument in pairs]

    def close(self) -> None:
        """As `VectorEnv.close`."""
        for member in self._members:
            member.close()


class _Birth(NamedTuple):
    """What a worker is told when it starts."""

    kind: Kind
    numbers: range  # of its environments
    memory: Any  # which all share, for the arrays
    mask: set[int]  # of signals, as it is outside of workers
    parent: int | None  # the process without which it is not to live, where the system can see to that
    may_spin: bool


class Workers(_Recorded):
    """Environments in groups, one in each of `num_workers` processes beside this one, and the last one here.

    Groups follow the order of the environments and are as even as possible, the last ones the smaller: with
    as many workers as environments none is left for this process.

    What an environment raises is raised here, with the worker's traceback as its cause, and `RunError` if a
    worker has died. Of several failures that of the first environment is raised. Workers take no notice of
    signals that are meant for the run, and none outlives it.
    """

    def __init__(self, kind: Kind, num_workers: int, first: gym.Env[Any, Any] | None = None) -> None:
        """`first` is an environment that has been made already."""
        if not 1 <= num_workers <= kind.num_envs:
            raise ValueError(f"{num_workers} workers for {kind.num_envs} environments")
        super().__init__(kind)
        self._groups = _groups(kind.num_envs, num_workers + 1)  # the last one is this process's own
        self._names = [kind.name(numbers) for numbers in self._groups[:-1]]
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        self._died: RunError | None = None
        self._own: Serial | None = None
        # Also when the interpreter exits, before multiprocessing waits for workers that nobody has told.
        self._finalizer = Finalize(self, _end_workers, (self._pipes, self._processes), exitpriority=10)
        # Where a fork is to be had: it knows all environments registered here.
        context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
        # It has no name in any file system, so that nothing is left of it whatever happens.
        memory = context.RawArray(ctypes.c_char, _Arrays.size(kind))
        may_spin = available_cores() > num_workers
        try:
            with _requests_blocked() as mask:
                for numbers in self._groups[:-1]:
                    self._start(context, _Birth(kind, numbers, memory, mask, _deadly_parent(), may_spin))
            self._wait = _Wait(self._pipes, may_spin)
            self._arrays = _Arrays.within(memory, kind)
            here = self._groups[-1]

            def make() -> Serial:
                return Serial(kind, kind.members(here, first), self._arrays.part(here))

            self._own = self._finish(set(range(num_workers)), make)[-1]
        except BaseException:
            self.close()
            raise
        if first is not None and not here:
            first.close()

    def _start(self, context: Any, birth: _Birth) -> None:
        inherited = self._pipes if context.get_start_method() == "fork" else []
        pipe, theirs = context.Pipe()
        self._pipes.append(pipe)
        process = context.Process(
            target=_work,
            args=(birth, theirs, inherited),
            name=birth.kind.name(birth.numbers),
            daemon=True,
        )
        process.start()
        self._processes.append(process)
        theirs.close()

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
        """As `_Recorded.call`, by all groups at the same time."""
        parts = [
            (name,) if arguments is None else (name, arguments[group.start : group.stop])
            for group in self._groups
        ]
        return [result for results in self._do("call", parts) for result in results]

    def close(self) -> None:
        """As `VectorEnv.close`; workers that do not answer are ended by force."""
        self._finalizer()
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


def _groups(num_envs: int, count: int) -> list[range]:
    """Consecutive environments in groups as even as possible, the last ones the smaller."""
    small, larger = divmod(num_envs, count)
    starts = [number * small + min(number, larger) for number in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def available_cores() -> int:
    """How many cores this process and what it starts can keep busy."""
    affinity = hasattr(os, "sched_getaffinity")  # not everywhere
    cores = len(os.sched_getaffinity(0)) if affinity else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # a container may have fewer than it sees
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, int(quota) // int(period))
    return cores


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
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        _serve(birth, pipe)


def _serve(birth: _Birth, pipe: Connection) -> None:
    try:
        members = birth.kind.members(birth.numbers)
    except Exception as error:
        pipe.send(_Failure(error))
        pipe.recv()  # an end before the others have answered would pass for a death
        return
    group = Serial(birth.kind, members, _Arrays.within(birth.memory, birth.kind).part(birth.numbers))
    wait = _Wait([pipe], birth.may_spin)
    try:
        pipe.send_bytes(_DONE)
        while True:
            wait(None)
            message = pipe.recv_bytes()
            request = pickle.loads(message) if message else ("step_from_arrays", ())
            if request is None:
                break
            method, arguments = request
            try:
                result = getattr(group, method)(*arguments)
            except Exception as error:
                pipe.send(_Failure(error))
            else:  # observations lie where all find them
                pipe.send(result) if method == "call" else pipe.send_bytes(_DONE)
    finally:
        group.close()
