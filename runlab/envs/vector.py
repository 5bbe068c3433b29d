"""N environments stepped together, in this process and in worker processes, without automatic resets.

Gymnasium's own SyncVectorEnv takes more time for infos and copies than small environments take for a step.
Its AsyncVectorEnv waits forever for a worker that died in the wrong moment, loses tracebacks, and leaves its
workers to signals that are meant for the run.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any, NamedTuple, NoReturn

import numpy as np
from gymnasium import spaces

from runlab.config.schema import EnvConfig
from runlab.envs.exits import exits_are_errors, forks_end_here
from runlab.envs.make import make_env
from runlab.envs.recorder import ActionRecorder
from runlab.errors import ConfigError, RunError
from runlab.signals import STOP_SIGNALS, SignalHandler

_GRACE_S = 5.0  # for workers to close their environments
_AWAKE_S = 0.002  # a process that waits for another one polls so long before it sleeps
_LOOK_AFTER_S = 0.5  # between two looks of a worker for the run's process


class StepResult(NamedTuple):
    """The results of one step of N environments, in arrays that the next call overwrites."""

    obs: np.ndarray  # (N, ...) as the environment's space has them, before any reset
    reward: np.ndarray  # (N,) float64, as the environment gives it
    terminated: np.ndarray  # (N,) bool
    truncated: np.ndarray  # (N,) bool


def step_dtype(obs_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> np.dtype[Any]:
    """The action and the results of one environment in one step, for a structured array of all."""
    fields: list[Any] = [
        ("action", action_space.dtype, action_space.shape),
        ("obs", obs_space.dtype, obs_space.shape),
    ]
    fields += [("reward", np.float64), ("terminated", np.bool_), ("truncated", np.bool_)]
    return np.dtype(fields, align=True)


class EnvGroup:
    """The environments of one process, one after the other. The first one that fails ends the step.

    `table` (N,) of `step_dtype` holds the actions and results of all groups. Only `close` may follow an
    exception.
    """

    def __init__(self, config: EnvConfig, group: slice, table: np.ndarray) -> None:
        num, self._envs = len(table), []
        for number in range(num)[group]:
            name = config.id if num == 1 else f"{config.id}, environment {number + 1} of {num}"
            self._envs.append(ActionRecorder(make_env(config, training=True), name, config.logged_infos))
        self._actions = table["action"][group]
        self._results = StepResult(*(table[group][name] for name in StepResult._fields))
        self._steps = [env.step for env in self._envs]

    def reset(self, mask: np.ndarray, seeds: Sequence[int | None]) -> None:
        for row in np.flatnonzero(mask).tolist():
            self._results.obs[row] = self._envs[row].reset(seeds[row])

    def step(self) -> None:
        obs, reward, terminated, truncated = self._results
        actions = self._actions.copy()  # an environment may keep its action
        for row, (step, action) in enumerate(zip(self._steps, actions, strict=True)):
            obs[row], reward[row], terminated[row], truncated[row] = step(action)

    def call(self, name: str, arguments: Sequence[Any] | None = None) -> list[Any]:
        tuples = [()] * len(self._envs) if arguments is None else [(argument,) for argument in arguments]
        return [getattr(env, name)(*each) for env, each in zip(self._envs, tuples, strict=True)]

    def close(self) -> None:
        """Close all environments, also if one of them raises."""
        with forks_end_here(), contextlib.ExitStack() as closing:
            for env in self._envs:
                closing.callback(env.env.close)


class WorkerPool:
    """Environments in groups, one in each of `num_workers` processes beside this one, the last one here.

    Groups follow the order of the environments. Their sizes differ by at most one, and later groups are the
    smaller ones: with as many workers as environments this process has none. All groups work at once.

    `RunError` where an environment returns an invalid value, and if a worker has died. An exception of an
    environment in a worker is raised here as RuntimeError with the traceback as a note. Of several failures
    that of the first environment is raised. Workers ignore signals that are meant for the run, and none
    outlives it. Global generators of a worker start from the seed of its first environment: after a fork they
    would all start from the same numbers.
    """

    def __init__(self, config: EnvConfig, seeds: Sequence[int], dtype: np.dtype[Any]) -> None:
        num_envs, groups = len(seeds), config.num_workers + 1
        bounds = [-(-number * num_envs // groups) for number in range(groups + 1)]
        self._groups = list(map(slice, bounds, bounds[1:]))
        self._id = config.id
        self._own: EnvGroup | None = None
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        # Also when the interpreter exits, before multiprocessing waits for its children.
        self._end = Finalize(self, _end_workers, (self._pipes, self._processes), exitpriority=10)
        # A fork knows all environments that are registered here.
        context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
        # Shared memory without a name, so that no file can be left behind.
        size = num_envs * dtype.itemsize
        memory = context.RawArray("b", size) if config.num_workers else bytearray(size)
        table: np.ndarray = np.frombuffer(memory, dtype)
        self._actions = table["action"]
        self._results = StepResult(*(table[name] for name in StepResult._fields))
        try:
            for group in self._groups[:-1]:
                pipe, other = context.Pipe()
                work = (other, config, group, memory, dtype, seeds[group.start])
                process = context.Process(target=_work, args=work, daemon=True)
                process.start()
                other.close()
                self._pipes.append(pipe)
                self._processes.append(process)
            own = partial(EnvGroup, config, self._groups[-1], table)
            *_, self._own = self._finish(range(config.num_workers), own)
        except BaseException:
            self.close()
            raise

    def reset(self, mask: np.ndarray, seeds: Sequence[int | None]) -> np.ndarray:
        """Begin an episode where `mask` (N,) is true; of the result (N, ...) only these rows count."""
        parts = [(mask[group], seeds[group]) if mask[group].any() else None for group in self._groups]
        self._do("reset", parts)
        return self._results.obs

    def step(self, actions: np.ndarray) -> StepResult:
        """Step with `actions` (N, ...); ended episodes were reset before."""
        self._actions[:] = actions
        self._do("step", [()] * len(self._groups))
        return self._results

    def call(self, name: str, arguments: Sequence[Any] | None = None) -> list[Any]:
        """The results of a method of each environment, in order, called with one argument each or none."""
        parts = [(name, None if arguments is None else arguments[group]) for group in self._groups]
        return [result for results in self._do("call", parts) for result in results]

    def close(self) -> None:
        """Close all environments; workers that do not answer are ended by force."""
        self._end()
        if self._own is not None:
            self._own.close()

    def _do(self, method: str, arguments: Sequence[tuple[Any, ...] | None]) -> list[Any]:
        """The results of a method of all groups that have arguments, in order."""
        *theirs, mine = arguments
        asked = [number for number, each in enumerate(theirs) if each is not None]
        for number in asked:
            with contextlib.suppress(ConnectionError):  # a dead worker is reported when its answer is missing
                self._pipes[number].send((method, theirs[number]))
        return self._finish(asked, lambda: None if mine is None else getattr(self._own, method)(*mine))

    def _finish(self, asked: Sequence[int], own: Callable[[], Any]) -> list[Any]:
        """The answers of the workers `asked`, and the result of `own`, called while they work."""
        try:
            mine = own()
        except Exception as error:
            mine = error
        results = [*map(self._answer, asked), mine]
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results

    def _answer(self, number: int) -> Any:
        try:
            return _received(self._pipes[number])
        except (EOFError, OSError):
            process = self._processes[number]
            process.join(1.0)  # the pipe closes a moment before the process ends
            code = process.exitcode or 0
            how = f"killed by signal {-code}" if code < 0 else f"exit status {code}"
            which = f"worker process {number + 1} of {len(self._pipes)}"
            raise RunError(f"{self._id}: {which} died ({how})") from None


def _received(pipe: Connection) -> Any:
    """The next message. Polls for 2 ms before it sleeps, since waking a core takes up to 0.1 ms."""
    poll = select.poll()
    poll.register(pipe.fileno(), select.POLLIN)
    until = time.perf_counter() + _AWAKE_S
    while not poll.poll(0) and time.perf_counter() < until:
        os.sched_yield()  # lets the other process run if both share a core
    return pipe.recv()


def _end_workers(pipes: list[Connection], processes: list[BaseProcess]) -> None:
    for pipe in pipes:
        with contextlib.suppress(OSError):
            pipe.send(None)  # closing is not enough: workers that were forked later have a copy
        pipe.close()
    deadline = time.monotonic() + _GRACE_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


def _work(
    pipe: Connection, config: EnvConfig, group: slice, memory: Any, dtype: np.dtype[Any], seed: int
) -> None:
    """Serve a pool: make a group of environments, and call its methods as asked, until asked for no more."""
    for request in STOP_SIGNALS:
        if signal.getsignal(request) is not signal.SIG_IGN:  # which children of an environment would inherit
            signal.signal(request, SignalHandler())
    threading.Thread(target=_end_with_the_run, args=[os._exit], daemon=True).start()
    import torch  # slow

    from runlab.envs.global_rng import seed_global_rng

    torch.set_num_threads(1)  # a fork has none of the threads of the run's process, and would wait for them
    table: np.ndarray = np.frombuffer(memory, dtype)
    envs: EnvGroup | None = None
    task: Any = ("", ())
    with contextlib.suppress(EOFError, ConnectionError):  # the process of the run may be killed
        try:
            with exits_are_errors():  # entered once, and not for each step
                while task is not None:
                    method, arguments = task
                    answer: Any = None
                    try:
                        if envs is None:
                            seed_global_rng(seed)
                            envs = EnvGroup(config, group, table)
                        else:
                            answer = getattr(envs, method)(*arguments)
                    except (ConfigError, RunError) as error:
                        answer = error
                    except Exception as error:
                        # Some exceptions cannot be pickled, or change when they are.
                        answer = RuntimeError(traceback.format_exception_only(error)[0].rstrip())
                        answer.add_note("".join(traceback.format_exception(error)))
                    pipe.send(answer)
                    task = _received(pipe)
        except RunError as error:  # an environment wanted to end this process, which now ends
            pipe.send(error)
    if envs is not None:
        envs.close()


def _end_with_the_run(end: Callable[[int], NoReturn]) -> None:
    """End this process, even in the middle of a step, once the process of the run is gone."""
    run = multiprocessing.parent_process()
    while run is not None and os.getppid() == run.pid:
        time.sleep(_LOOK_AFTER_S)
    end(1)
