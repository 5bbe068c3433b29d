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
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from itertools import pairwise
from multiprocessing.connection import Connection, wait
from multiprocessing.pool import ExceptionWithTraceback  # type: ignore[attr-defined]
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

import numpy as np

from rltemplate.envs.vector import EnvFactory, SerialEnvs, StepResult
from rltemplate.types import STOP_SIGNALS, ConfigError, RunError

_GRACE_S = 5.0  # for workers to close their environments
_LOOK_AFTER_S = 1.0  # between two looks at workers that do not answer
_PR_SET_PDEATHSIG = 1


class WorkerSpec(NamedTuple):
    """The work of one worker."""

    factory: EnvFactory
    numbers: range  # of its environments
    memory: Sequence[Any]  # for actions and results, shared by all
    seed: int  # of the global generators
    parent: int | None  # the process whose end is to kill the worker, on systems that do so


class WorkerPool:
    """Environments in groups, one in each of `num_workers` processes beside this one, and the last one here.

    Groups follow the order of the environments and are as even as possible, the last ones the smaller: with
    as many workers as environments none is left for this process. Methods are those of `SerialEnvs`; all
    groups work at the same time.

    An exception of an environment is raised here with the worker's traceback as its cause, and `RunError` if
    a worker has died. Of several failures that of the first environment is raised. Workers ignore signals
    that are meant for the run, and none outlives it.
    """

    def __init__(self, factory: EnvFactory, num_workers: int, seeds: Sequence[int]) -> None:
        """Global generators of a worker start from the seed of its first environment.

        After a fork they would all start from the same numbers.
        """
        if not 1 <= num_workers <= factory.num_envs:
            raise ValueError(f"{num_workers} workers for {factory.num_envs} environments")
        small, larger = divmod(factory.num_envs, num_workers + 1)
        starts = [number * small + min(number, larger) for number in range(num_workers + 2)]
        self._groups = [range(start, stop) for start, stop in pairwise(starts)]
        self._factory = factory
        self._died: RunError | None = None
        self._own: SerialEnvs | None = None
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        # Also when the interpreter exits, before multiprocessing waits for its children.
        self._end = Finalize(self, _end_workers, (self._pipes, self._processes), exitpriority=10)
        # A fork knows all environments that are registered here.
        context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
        memory = factory.allocate(context.RawArray)  # without a name that could be left in a file system
        self._action, self._results = factory.arrays(memory)
        # Linux goes by the thread that started the child: another one than the main thread may end earlier.
        main = threading.current_thread() is threading.main_thread()
        parent = os.getpid() if main and sys.platform == "linux" else None
        here = self._groups[-1]
        try:
            for numbers in self._groups[:-1]:
                self._start(context, WorkerSpec(factory, numbers, memory, seeds[numbers.start], parent))
            *_, self._own = self._finish(range(num_workers), lambda: _group(factory, here, self._results))
        except BaseException:
            self.close()
            raise

    def _start(self, context: Any, spec: WorkerSpec) -> None:
        pipe, other = context.Pipe()
        self._pipes.append(pipe)
        name = spec.factory.name(spec.numbers)
        process = context.Process(target=_work, args=(spec, other), name=name, daemon=True)
        # Requests to the run are held back until the child ignores them: none is lost here meanwhile.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._processes.append(process)
        other.close()

    def reset(self, mask: np.ndarray, seeds: Sequence[int | None]) -> np.ndarray:
        """Begin an episode where `mask` (N,) is true; of the result (N, ...) only these rows count."""
        slices = [slice(group.start, group.stop) for group in self._groups]
        self._do("reset", [(mask[part], seeds[part]) if mask[part].any() else None for part in slices])
        return self._results.obs

    def step(self, actions: np.ndarray) -> StepResult:
        """Step with `actions` (N, ...)."""
        here = self._groups[-1]
        self._action[:] = actions
        self._do("step", [*((None,) for _ in self._pipes), (actions[here.start :],)])
        return self._results

    def call(self, name: str, arguments: Sequence[Any] | None = None) -> list[Any]:
        """The results of a method of each environment, in order, called with one argument each or none."""
        parts: list[tuple[Any, ...]] = [
            (name,) if arguments is None else (name, arguments[group.start : group.stop])
            for group in self._groups
        ]
        return [result for results in self._do("call", parts) for result in results]

    def close(self) -> None:
        """Close all environments; workers that do not answer are ended by force."""
        self._end()
        if self._own is not None:
            self._own.close()

    def _do(self, method: str, arguments: Sequence[tuple[Any, ...] | None]) -> list[Any]:
        """The results of a method of all groups that have arguments, in order."""
        if self._died is not None:  # answers that were not read would be taken for later ones
            raise self._died
        own = self._own
        *theirs, mine = arguments
        asked = [number for number, given in enumerate(theirs) if given is not None]
        for number in asked:
            with contextlib.suppress(ConnectionError):  # of a death, which shows where its answer is missing
                self._pipes[number].send((method, theirs[number]))
        return self._finish(asked, lambda: None if mine is None else getattr(own, method)(*mine))

    def _finish(self, asked: Sequence[int], own: Callable[[], Any]) -> list[Any]:
        """The answers of the workers `asked`, and the result of `own`, called while they work."""
        try:
            mine = own()
        except Exception as error:
            mine = error
        results = [*self._answers(asked), mine]
        for result in results:
            if isinstance(result, ConfigError | RunError):
                raise result from None  # whose message says all
            if isinstance(result, Exception):
                raise result
        return results

    def _answers(self, asked: Sequence[int]) -> list[Any]:
        answers: dict[int, Any] = {}
        waiting: dict[Any, int] = {self._pipes[number]: number for number in asked}
        while waiting:
            ready: list[Any] = wait(list(waiting), _LOOK_AFTER_S)
            for pipe in ready:
                try:
                    answers[waiting[pipe]] = pipe.recv()
                except (EOFError, OSError):
                    raise self._death(waiting[pipe]) from None
                del waiting[pipe]
            # A dead worker's pipe stays open where a process that it started has inherited it.
            for number in asked if not ready else ():
                silent = number in answers or not self._pipes[number].poll()
                if silent and not self._processes[number].is_alive():
                    raise self._death(number)
        return [answers[number] for number in asked]

    def _death(self, number: int) -> RunError:
        process, numbers = self._processes[number], self._groups[number]
        process.join(1.0)  # its pipe closes a moment before
        code = process.exitcode
        how = "closed its connection"
        if code is not None:
            how = f"died ({f'killed by signal {-code}' if code < 0 else f'exit status {code}'})"
        whose = "its" if len(numbers) == 1 else "their"
        self._died = RunError(f"{self._factory.name(numbers)}: {whose} worker process {how}")
        return self._died


def _end_workers(pipes: list[Connection], processes: list[BaseProcess]) -> None:
    for pipe in pipes:
        with contextlib.suppress(OSError):
            pipe.send(None)  # closing is not enough: later workers may have a copy
        pipe.close()
    deadline = time.monotonic() + _GRACE_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


# --- In a worker -------------------------------------------------------------------------------------------


def _work(spec: WorkerSpec, pipe: Connection) -> None:
    """Make a group of environments and call its methods as asked, until there is nothing more to do."""
    for request in STOP_SIGNALS:
        signal.signal(request, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    if spec.parent is not None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != spec.parent:  # it died before
            os._exit(1)
    run = multiprocessing.parent_process()
    assert run is not None
    action, results = spec.factory.arrays(spec.memory)
    action = action[spec.numbers.start : spec.numbers.stop]
    group: SerialEnvs | None = None
    # The run may end without a word.
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        task: Any = ("", ())
        while task is not None:
            method, arguments = task
            answer: Any = None
            try:
                if group is None:
                    _seed(spec.seed)
                    group = _group(spec.factory, spec.numbers, results)
                elif method == "step":
                    group.step(action.copy())  # an environment may keep its action
                else:
                    answer = getattr(group, method)(*arguments)
            except Exception as error:
                answer = _portable(error)
            pipe.send(answer if method == "call" or isinstance(answer, ExceptionWithTraceback) else None)
            task = pipe.recv() if pipe in wait([pipe, run.sentinel]) else None
    if group is not None:
        group.close()


def _seed(seed: int) -> None:
    # Imports torch, which would be too long for a check of the configuration.
    from rltemplate.envs.global_rng import seed_global_rng

    seed_global_rng(seed)


def _group(factory: EnvFactory, numbers: range, results: StepResult) -> SerialEnvs:
    return SerialEnvs([factory.make_env(number) for number in numbers], results.rows(numbers))


def _portable(error: Exception) -> Any:
    """An exception with its traceback as its cause, in a form that comes out of a pickle as it went in.

    Some exceptions do not, such as those that make their message of several arguments: RuntimeError then
    says their kind and message.
    """
    with contextlib.suppress(Exception):
        whole = ExceptionWithTraceback(error, error.__traceback__)
        if str(pickle.loads(pickle.dumps(whole))) == str(error):
            return whole
    plain = RuntimeError(traceback.format_exception_only(error)[0].rstrip())
    plain.__notes__ = getattr(error, "__notes__", [])
    return ExceptionWithTraceback(plain, error.__traceback__)
