"""Gymnasium environments as algorithms see them: flat float observations, plain actions, no hidden resets.

Wrapper order: gymnasium.make (with its time limit), in training `Recorder`, vectorisation, then `Codec`,
which is the only place that knows spaces. Parallel environments run with AutoresetMode.DISABLED and an
explicit reset mask, so that no worker keeps a reset pending and no phantom step enters a buffer; the
observation in which an episode ended is kept apart from the one that the next episode starts with.

Environments in processes of their own are run by `Workers` and not by Gymnasium's AsyncVectorEnv, which waits
forever for a worker that died in the wrong moment, loses tracebacks, and leaves its workers to signals that
are meant for the run.
"""

from __future__ import annotations

import contextlib
import ctypes
import difflib
import importlib
import logging
import multiprocessing
import os
import pickle
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any, NamedTuple, NoReturn

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rltemplate.env_state import Recorder, read_states, restore_states
from rltemplate.types import STOP_SIGNALS, ConfigError, Episode, RunError

_log = logging.getLogger(__name__)

# How long workers that were told to end may take to close their environments.
_GRACE_S = 5.0
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """Which environment, without saying how many: what `gymnasium.make` needs to know."""

    id: str
    max_episode_steps: int | None
    kwargs: Mapping[str, Any]


def make_env(spec: EnvSpec, render_mode: str | None = None, **extra: Any) -> gym.Env[Any, Any]:
    """One environment; `ConfigError` in one line for whatever the user can mend."""
    try:
        module, _, name = spec.id.rpartition(":")
        if module:  # the form package:Id-v0, whose package registers Id-v0 when it is imported
            importlib.import_module(module)
        if uses_mujoco(name):
            _quiet_mujoco()
        return gym.make(
            spec.id,
            max_episode_steps=spec.max_episode_steps,
            render_mode=render_mode,
            disable_env_checker=True,
            **{**spec.kwargs, **extra},
        )
    except gym.error.DependencyNotInstalled as error:
        raise ConfigError(f"env.id={spec.id}: {_first_line(error)}") from error
    except (gym.error.UnregisteredEnv, ModuleNotFoundError) as error:
        near = difflib.get_close_matches(spec.id, list(gym.registry), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"env.id={spec.id}: {_first_line(error)}{hint}") from error
    except gym.error.Error as error:
        raise ConfigError(f"env.id={spec.id}: {_first_line(error)}") from error
    except ImportError as error:
        raise ConfigError(f"env.id={spec.id}: {_first_line(error)}") from error
    except (TypeError, ValueError, LookupError, AttributeError, AssertionError) as error:
        # What an environment raises about the user's arguments is the user's to read.
        if spec.kwargs:
            reason = _first_line(error).partition(" was raised from the environment creator")[0]
            kind = "" if isinstance(error, TypeError) else f"{type(error).__name__}: "
            raise ConfigError(f"env.kwargs={dict(spec.kwargs)}: {kind}{reason}") from error
        raise


def uses_mujoco(env_id: str) -> bool:
    """Whether a registered environment is one of Gymnasium's that simulate with MuJoCo."""
    return "mujoco" in str(gym.spec(env_id.rpartition(":")[2]).entry_point)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].strip("'\" ")


def _quiet_mujoco() -> None:
    """MuJoCo writes warnings to a file in the working folder; send them to the log instead.

    The one about `settotalmass` comes with every HalfCheetah and means nothing to a user.
    """
    import mujoco

    def note(message: str) -> None:
        if "settotalmass" not in message:
            _log.warning("mujoco: %s", message)

    mujoco.set_mju_user_warning(note)


class Codec:
    """Translates between an environment's spaces and the flat arrays that algorithms use.

    Observations become float32 (N, O): Box of any shape flattened, Discrete one-hot. Actions are float32
    (N, A) in [-1, 1], scaled to the bounds of the Box (components without finite bounds pass unchanged), or
    integers (N, A) from zero for Discrete and MultiDiscrete.
    """

    def __init__(self, env_id: str, obs_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> None:
        self.env_id = env_id
        self.obs_space = obs_space
        self.action_space = action_space
        self.obs_size = self._check_obs(obs_space)
        self.nvec: tuple[int, ...] = ()  # choices per component; empty for continuous actions
        if isinstance(action_space, spaces.Box):
            self.action_size = int(np.prod(action_space.shape))
            low, high = action_space.low.reshape(-1), action_space.high.reshape(-1)
            self._bounded = np.isfinite(low) & np.isfinite(high)
            bottom, top = np.where(self._bounded, low, -1.0), np.where(self._bounded, high, 1.0)
            self._center = (bottom / 2 + top / 2).astype(np.float32)
            self._half = (top / 2 - bottom / 2).astype(np.float32)
            self._low, self._high = low, high
        elif isinstance(action_space, spaces.Discrete):
            self.nvec = (int(action_space.n),)
            self.action_size = 1
        elif isinstance(action_space, spaces.MultiDiscrete) and action_space.nvec.ndim == 1:
            self.nvec = tuple(int(n) for n in action_space.nvec)
            self.action_size = len(self.nvec)
        else:
            raise ConfigError(
                f"{env_id} has the action space {action_space}; supported: Box, Discrete and one-dimensional "
                "MultiDiscrete. Wrap the environment (gymnasium.wrappers.TransformAction) to get there"
            )

    @property
    def continuous(self) -> bool:
        """Whether actions are real numbers."""
        return not self.nvec

    @property
    def bounded(self) -> bool:
        """Whether every component of a continuous action has finite bounds."""
        return self.continuous and bool(self._bounded.all())

    def _check_obs(self, space: spaces.Space[Any]) -> int:
        if isinstance(space, spaces.Discrete):
            return int(space.n)
        if not isinstance(space, spaces.Box):
            raise ConfigError(
                f"{self.env_id} has the observation space {type(space).__name__}; supported: Box and "
                "Discrete. Register a variant wrapped in gymnasium.wrappers.FlattenObservation and name that"
            )
        if space.dtype == np.uint8 and len(space.shape) >= 2:
            raise ConfigError(
                f"{self.env_id} observes images {space.shape}, and the networks are multi-layer perceptrons; "
                "use an environment with vector observations, such as the -ram variant where there is one"
            )
        return int(np.prod(space.shape))

    def encode_obs(self, obs: Any) -> np.ndarray:
        """A batch of raw observations as float32 (N, O)."""
        batch = np.asarray(obs)
        if isinstance(self.obs_space, spaces.Discrete):
            one_hot = np.zeros((len(batch), self.obs_size), np.float32)
            one_hot[np.arange(len(batch)), batch - self.obs_space.start] = 1.0
            return one_hot
        return batch.reshape(len(batch), -1).astype(np.float32)

    def decode_action(self, action: np.ndarray) -> np.ndarray:
        """Algorithm actions (N, A) as a batch of the environment's own actions."""
        if isinstance(self.action_space, spaces.Box):
            clipped = np.where(self._bounded, np.clip(action, -1.0, 1.0), action)
            # Rounding in the scaling may step over a bound by one ulp, which some environments reject.
            native = np.clip(clipped * self._half + self._center, self._low, self._high)
            shaped: np.ndarray = native.reshape(-1, *self.action_space.shape)
            return shaped.astype(self.action_space.dtype)
        if isinstance(self.action_space, spaces.Discrete):
            return action[:, 0] + int(self.action_space.start)
        assert isinstance(self.action_space, spaces.MultiDiscrete)
        return action + self.action_space.start


class Step(NamedTuple):
    """What one step of N environments gives."""

    obs: np.ndarray  # (N, O) to act on next: after a reset where an episode ended
    reward: np.ndarray  # (N,) float64, as the environment gives it
    terminated: np.ndarray  # (N,) bool: the task ended, no reward can follow
    truncated: np.ndarray  # (N,) bool: the clock ended the episode, reward would have followed
    next_obs: np.ndarray  # (N, O) the true successor, before any reset
    episodes: list[Episode]  # episodes that ended in this step


def _member(spec: EnvSpec, number: int, of: int, env: gym.Env[Any, Any] | None = None) -> Recorder:
    """One of the environments of a run, counted from 1, with its name for messages."""
    name = _name(spec, number, of)
    try:
        return Recorder(make_env(spec) if env is None else env, name)
    except Exception as error:
        if not isinstance(error, ConfigError):
            error.add_note(f"{name}, when it was made")
        raise


def _name(spec: EnvSpec, number: int, of: int) -> str:
    return spec.id if of == 1 else f"{spec.id}, environment {number} of {of}"


class _Birth(NamedTuple):
    """What a worker is told when it starts."""

    spec: EnvSpec
    number: int  # from 1
    of: int
    obs_space: spaces.Space[Any]
    action_space: spaces.Space[Any]
    mask: set[int]  # of signals, as it is outside of workers
    parent: int | None  # the process without which it is not to live, where the system can see to that


class Workers:
    """Environments in processes of their own, one in each; looks like Gymnasium's vector environments.

    What an environment raises is raised here, with the worker's traceback as its cause, and `RunError` if a
    worker has died. Workers take no notice of signals that are meant for the run, and none outlives it.
    """

    def __init__(
        self, spec: EnvSpec, num_envs: int, obs_space: spaces.Space[Any], action_space: spaces.Space[Any]
    ) -> None:
        self._names = [_name(spec, number, num_envs) for number in range(1, num_envs + 1)]
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        self._died: RunError | None = None
        # Also when the interpreter exits, before multiprocessing waits for workers that nobody has told.
        self._finalizer = Finalize(self, _end_workers, (self._pipes, self._processes), exitpriority=10)
        try:
            with _requests_blocked() as mask:
                for number in range(1, num_envs + 1):
                    birth = _Birth(spec, number, num_envs, obs_space, action_space, mask, _deadly_parent())
                    self._start(birth)
            self._poll = select.poll()
            for pipe in self._pipes:
                self._poll.register(pipe.fileno(), select.POLLIN)
            self._by_fd = {pipe.fileno(): number for number, pipe in enumerate(self._pipes)}
            self._answers(set(range(num_envs)))  # whether they could be made
        except BaseException:
            self.close()
            raise
        self._obs = np.zeros((num_envs, *(obs_space.shape or ())), obs_space.dtype)

    def _start(self, birth: _Birth) -> None:
        inherited: list[Connection] = []
        if sys.platform == "linux":  # where a fork is to be had: it knows all environments registered here
            context = multiprocessing.get_context("fork")
            inherited = self._pipes
        else:
            context = multiprocessing.get_context("spawn")
        pipe, theirs = context.Pipe()
        self._pipes.append(pipe)
        process = context.Process(
            target=_work,
            args=(birth, theirs, inherited),
            name=self._names[birth.number - 1],
            daemon=True,
        )
        process.start()
        self._processes.append(process)
        theirs.close()

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, Any]:
        """Reset all, or those of `options["reset_mask"]`; the last observations (N, ...), and no infos."""
        seeds = [None] * len(self._pipes) if seed is None else seed
        mask = np.full(len(self._pipes), True)
        if options is not None:
            mask = options.get("reset_mask", mask)
            options = {name: value for name, value in options.items() if name != "reset_mask"}
        requests = [
            ("reset", (), {"seed": seed, "options": options}) if wanted else None
            for seed, wanted in zip(seeds, mask, strict=True)
        ]
        for number, answer in self._ask(requests).items():
            self._obs[number] = answer[0]
        return self._obs, {}

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, Any]:
        """Observations (N, ...), rewards, terminated and truncated (N,), and no infos."""
        answers = self._ask([("step", (action,), {}) for action in actions])
        rows = [answers[number] for number in range(len(actions))]
        for number, row in enumerate(rows):
            self._obs[number] = row[0]
        reward = np.array([row[1] for row in rows], np.float64)
        terminated = np.array([row[2] for row in rows], np.bool_)
        truncated = np.array([row[3] for row in rows], np.bool_)
        return self._obs, reward, terminated, truncated, {}

    def call(self, name: str) -> list[Any]:
        """The results of a method of every environment, in order."""
        answers = self._ask([(name, (), {})] * len(self._pipes))
        return [answers[number] for number in range(len(answers))]

    def set_attr(self, name: str, values: Sequence[Any]) -> None:
        """Set an attribute of every environment."""
        self._ask([("__setattr__", (name, value), {}) for value in values])

    def close(self) -> None:
        """End all workers, those that do not answer by force."""
        self._finalizer()

    def _ask(self, requests: Sequence[tuple[str, tuple[Any, ...], dict[str, Any]] | None]) -> dict[int, Any]:
        """Let all who have a request work at the same time, and return their answers."""
        if self._died is not None:  # what others still have to say would be taken for other answers
            raise self._died
        asked = set()
        for number, request in enumerate(requests):
            if request is not None:
                try:
                    self._pipes[number].send(request)
                except ConnectionError:
                    self._raise_death(number)
                asked.add(number)
        return self._answers(asked)

    def _answers(self, waiting: set[int]) -> dict[int, Any]:
        answers: dict[int, Any] = {}
        failures: dict[int, _Failure] = {}
        while waiting:
            ready = [self._by_fd[fd] for fd, _ in self._poll.poll(1000)]
            if not ready:
                # A dead worker's pipe stays open where a process that it started has inherited it.
                for number in waiting:
                    if not self._processes[number].is_alive() and not self._pipes[number].poll():
                        self._raise_death(number)
            for number in ready:
                try:
                    answer = self._pipes[number].recv()
                except (EOFError, ConnectionError):
                    self._raise_death(number)
                waiting.discard(number)
                (failures if isinstance(answer, _Failure) else answers)[number] = answer
        if failures:  # all have answered, and the first of them is named, whichever came first
            failures[min(failures)].reraise()
        return answers

    def _raise_death(self, number: int) -> NoReturn:
        process = self._processes[number]
        process.join(1.0)  # its pipe closes a moment before
        code = process.exitcode
        if code is None:
            how = "closed its connection"
        else:
            how = f"died ({f'killed by signal {-code}' if code < 0 else f'exit status {code}'})"
        self._died = RunError(f"{self._names[number]}: its worker process {how}")
        raise self._died from None


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
    """The process of one environment. Its end is quiet, also where the run has ended without a word."""
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
        env = _member(birth.spec, birth.number, birth.of)
        if (env.observation_space, env.action_space) != (birth.obs_space, birth.action_space):
            raise RunError(f"{env.name}: its spaces are not those of the first one")
    except Exception as error:
        pipe.send(_Failure(error))
        pipe.recv()  # an end before the others have answered would pass for a death
        return
    try:
        pipe.send(None)
        while (request := pipe.recv()) is not None:
            name, args, kwargs = request
            try:
                answer = getattr(env, name)(*args, **kwargs)
            except Exception as error:
                answer = _Failure(error)
            pipe.send(answer)
    finally:
        env.close()


class Envs:
    """N copies of one environment, stepped together.

    Every method raises `RunError` where an environment gives what is no observation, reward or flag, and
    where its worker process dies; what an environment raises passes. None of them is fit for use then.
    """

    def __init__(self, spec: EnvSpec, num_envs: int, seeds: Sequence[int], async_envs: bool = False) -> None:
        if len(seeds) != num_envs:
            raise ValueError(f"{len(seeds)} seeds for {num_envs} environments")
        first = make_env(spec)  # refuses before any worker starts
        self.codec = Codec(spec.id, first.observation_space, first.action_space)
        self.spec = spec
        self.num_envs = num_envs
        self._envs: SyncVectorEnv | Workers
        if async_envs:
            first.close()
            self._envs = Workers(spec, num_envs, first.observation_space, first.action_space)
        else:
            factories = [
                partial(_member, spec, number, num_envs, first if number == 1 else None)
                for number in range(1, num_envs + 1)
            ]
            # Observations are encoded, and thereby copied, before the next step can overwrite them.
            self._envs = SyncVectorEnv(factories, copy=False, autoreset_mode=AutoresetMode.DISABLED)
        self._seeds: Any = list(seeds)  # one seed each, which Gymnasium's types do not know of
        self._returns = np.zeros(num_envs)
        self._lengths = np.zeros(num_envs, np.int64)

    def reset(self) -> np.ndarray:
        """Seed every environment, start its first episode and return the observations (N, O)."""
        obs, _ = self._envs.reset(seed=self._seeds)
        self._returns[:] = 0.0
        self._lengths[:] = 0
        return self.codec.encode_obs(obs)

    def step(self, action: np.ndarray) -> Step:
        """Step every environment with `action` (N, A), and start a new episode where one ended."""
        raw, reward, terminated, truncated, _ = self._envs.step(self.codec.decode_action(action))
        next_obs = self.codec.encode_obs(raw)
        self._returns += reward
        self._lengths += 1
        done = terminated | truncated
        if not done.any():
            return Step(next_obs, reward, terminated, truncated, next_obs, [])
        episodes = [
            Episode(float(r), int(n)) for r, n in zip(self._returns[done], self._lengths[done], strict=True)
        ]
        self._returns[done] = 0.0
        self._lengths[done] = 0
        raw, _ = self._envs.reset(options={"reset_mask": done})
        obs = np.where(done[:, None], self.codec.encode_obs(raw), next_obs)
        return Step(obs, reward, terminated, truncated, next_obs, episodes)

    def state_dict(self) -> dict[str, Any]:
        """Where every environment is: a copy, of tensors, numbers and strings, nested in dicts and lists."""
        import torch  # too long for a check of the configuration

        return {
            "id": self.spec.id,
            "states": read_states(self._envs),
            "returns": torch.from_numpy(self._returns.copy()),
            "lengths": torch.from_numpy(self._lengths.copy()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state` with the next `step`: instead of `reset`, in environments not used before.

        Replays episodes. Raises ConfigError if `state` is not of `num_envs` copies of this environment, or
        if the environment does not repeat itself; none of them is fit for use then.
        """
        if state["id"] != self.spec.id:
            raise ConfigError(f"env.id={self.spec.id}: the checkpoint holds {state['id']}")
        if len(state["states"]) != self.num_envs:
            raise ConfigError(
                f"env.num_envs={self.num_envs}: the checkpoint holds {len(state['states'])} environments"
            )
        returns, lengths = state["returns"].numpy(), state["lengths"].numpy()
        restore_states(self._envs, self.spec.id, state["states"], returns, lengths)
        self._returns[:] = returns
        self._lengths[:] = lengths

    def close(self) -> None:
        """Release the environments and their worker processes, also where a worker has died or hangs."""
        self._envs.close()
